"""The gated delta rule on flash-linear-attention's kernels, 16-bit, against each sequence alone and float64."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hybrid_models import HYBRIDS, hybrid_model, in_float64
from test_transformers_tree import SEQUENCES
from tiny_models import VOCABULARY, Samples, dualkv, gradients, replicated_logps, stock_twin
from torch import Tensor

from flash_attn_dualkv import SharedPromptError, pack_prefix_tree
from flash_attn_dualkv.integrations.transformers.hybrid import families, installation, mixers

if importlib.util.find_spec("fla") is None:  # importing it needs a GPU
    pytest.skip("needs flash-linear-attention", allow_module_level=True)
pytestmark = pytest.mark.gpu

# The heads of Qwen3.5-4B and Qwen3-Next, which the kernels are made for; all else is small.
SHAPE: dict[str, Any] = dict(
    hidden_size=256, intermediate_size=512, num_attention_heads=4, head_dim=64, linear_num_key_heads=16,
    linear_num_value_heads=32, linear_key_head_dim=128, linear_value_head_dim=128, initializer_range=0.03,
)  # fmt: skip
MODELS = [name for name in ("qwen3_5_text", "qwen3_next") if name in HYBRIDS]
# On both sides of a chunk of 64; many responses read one state.
SAMPLES = Samples.random([(300, [130, 65, 1, 64, 3, 200]), (65, [63, 70]), (2, [40])]).take([3, 0, 6, 1, 8, 5, 2, 7, 4])
# Losses: the gradients of a few parameters are a handful of numbers, of which one error is chance.
DRAWS = 8


def is_trainable() -> bool:
    try:
        installation.check_gated_backward(torch.device("cuda", torch.cuda.current_device()))
    except SharedPromptError:
        return False
    return True


needs_right_kernels = pytest.mark.skipif(
    torch.cuda.is_available() and not is_trainable(), reason="this installation's gradients are wrong"
)


@contextmanager
def without_packages(name: str) -> Iterator[None]:
    """The functions of a model file in PyTorch, which have float64."""
    file = families.FAMILIES[name].file
    functions = {one: inspect.unwrap(getattr(file, one)) for one in families.FAMILIES[name].functions}
    with patch.multiple(file, **functions):
        yield


def outcome(model: Any, samples: Samples, batch: Any = None) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities, and of every parameter the gradients (DRAWS, ...) of random sums of them."""
    if batch is None:
        logps, _ = replicated_logps(model, samples)
    else:
        logps, _ = dualkv.shared_prompt_forward(model, batch)
    weights = torch.randn(DRAWS, len(logps), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found: dict[str, list[Tensor]] = {}
    for one in weights.to(logps):
        (one @ logps).backward(retain_graph=True)
        for name, gradient in gradients(model).items():
            found.setdefault(name, []).append(gradient.double())
    return logps.detach().double(), {name: torch.stack(one) for name, one in found.items()}


def check_accuracy(name: str, samples: Samples, batch: Any) -> None:
    """The errors of all gradients are at most 1.5 times those of each sequence alone on the same kernels."""
    model = hybrid_model(name, torch.bfloat16, **SHAPE).cuda()
    stock = stock_twin(model, "eager")
    function = getattr(families.FAMILIES[name].file, families.DELTA_RULE)
    assert mixers.implementation_of(inspect.unwrap(function, stop=_is_stock)).__module__.startswith("fla.")
    with in_float64(), without_packages(name):
        exact, exact_gradients = outcome(copy.deepcopy(stock).double(), samples)
    alone, alone_gradients = outcome(stock, samples)
    got, got_gradients = outcome(model, samples, batch)
    assert (got - exact).norm() <= 1.5 * (alone - exact).norm()
    assert got_gradients.keys() == exact_gradients.keys()
    ratios = {
        parameter: ((got_gradients[parameter] - one).norm() / (alone_gradients[parameter] - one).norm()).item()
        for parameter, one in exact_gradients.items()
    }
    assert not {parameter: ratio for parameter, ratio in ratios.items() if not ratio <= 1.5}
    # What both are compared with is what they compute: an error of the kernels would be common to both.
    for parameter, one in exact_gradients.items():
        assert (got_gradients[parameter] - one).norm() <= 0.2 * one.norm(), parameter


def _is_stock(function: Any) -> bool:
    """Whether this is what transformers calls, with the package's function behind it."""
    return mixers.implementation_of(function) is not function


@needs_right_kernels
@pytest.mark.parametrize("name", MODELS)
def test_prompts_and_responses(name: str) -> None:
    check_accuracy(name, SAMPLES, SAMPLES.pack(device="cuda"))


@needs_right_kernels
def test_trees() -> None:
    """Level by level, each level with the states of the one before."""
    longer = [[token for token in one for _ in range(9)] for one in SEQUENCES]
    samples = Samples([one[:1] for one in longer], [one[1:] for one in longer])
    masks = [[0] + [1] * (len(one) - 1) for one in longer]
    batch = pack_prefix_tree(longer, loss_mask=masks, min_shared=1, device="cuda")
    assert batch.depth >= 4
    check_accuracy(MODELS[0], samples, batch)


REFUSED = f"""
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from flash_attn_dualkv import SharedPromptError, pack_shared_prompts
from flash_attn_dualkv.integrations.transformers import register, shared_prompt_forward

register()
sizes = {SHAPE!r}
options = dict(vocab_size={VOCABULARY}, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
config = AutoConfig.for_model("{MODELS[0] if MODELS else ""}", **options, num_key_value_heads=2, **sizes)
model = AutoModelForCausalLM.from_config(config, attn_implementation="dualkv", dtype=torch.bfloat16).cuda()
batch = pack_shared_prompts([list(range(3, 90))] * 2, [[5, 6], [7]], device="cuda")
with torch.no_grad():
    assert shared_prompt_forward(model, batch)[0].isfinite().all()
try:
    shared_prompt_forward(model, batch)
except SharedPromptError as error:
    print("refused:", error)
"""


@pytest.mark.skipif(not MODELS, reason="this transformers has none of the models")
def test_wrong_gradients_are_refused() -> None:
    """Without TileLang a forward with gradients raises where the kernels are wrong; one without gradients runs."""
    with patch.dict(os.environ, FLA_TILELANG="0"):
        installation.check_gated_backward.cache_clear()
        is_refused = not is_trainable()
        done = subprocess.run([sys.executable, "-c", REFUSED], capture_output=True, text=True, check=False)
    installation.check_gated_backward.cache_clear()
    assert done.returncode == 0, done.stderr
    assert ("refused: flash-linear-attention: expected Triton 3.7.1" in done.stdout) == is_refused
