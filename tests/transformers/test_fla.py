# SPDX-License-Identifier: BSD-3-Clause
"""The gated delta rule on flash-linear-attention's kernels, 16-bit, against each sequence alone and float64."""

from __future__ import annotations

import copy
import importlib.util
import inspect
from typing import Any

import pytest
import torch
from hybrid_models import HYBRIDS, drawn_gradients, error_ratios, hybrid_model, in_float64, without_packages
from tiny_models import SEQUENCES, Samples, stock_twin

from flash_attn_dualkv import SharedPromptError, pack_prefix_tree
from flash_attn_dualkv.integrations.recurrences import known_bugs, mixers
from flash_attn_dualkv.integrations.transformers.hybrid import families

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


def is_trainable() -> bool:
    try:
        known_bugs.check_gated_backward(torch.device("cuda", torch.cuda.current_device()))
    except SharedPromptError:
        return False
    return True


needs_models = pytest.mark.skipif(not MODELS, reason="this transformers has none of the models")
needs_right_kernels = pytest.mark.skipif(
    torch.cuda.is_available() and not is_trainable(), reason="this installation's gradients are wrong"
)


def check_accuracy(name: str, samples: Samples, batch: Any) -> None:
    """The errors of all gradients are at most 1.5 times those of each sequence alone on the same kernels."""
    model = hybrid_model(name, torch.bfloat16, **SHAPE).cuda()
    stock = stock_twin(model, "eager")
    function = getattr(families.FAMILIES[name].file, families.DELTA_RULE)
    assert mixers.implementation_of(inspect.unwrap(function, stop=_is_stock)).__module__.startswith("fla.")
    with in_float64(), without_packages(name):
        exact = drawn_gradients(copy.deepcopy(stock).double(), samples)
    got = drawn_gradients(model, samples, batch)
    ratios = error_ratios(got, drawn_gradients(stock, samples), exact)
    assert not {what: ratio for what, ratio in ratios.items() if not ratio <= 1.5}
    # Both run on the same kernels: an error of these would be common to both.
    for parameter, one in exact[1].items():
        assert (got[1][parameter] - one).norm() <= 0.2 * one.norm(), parameter


def _is_stock(function: Any) -> bool:
    """Whether this is what transformers calls, with the package's function behind it."""
    return mixers.implementation_of(function) is not function


@needs_right_kernels
@pytest.mark.parametrize("name", MODELS)
def test_prompts_and_responses(name: str) -> None:
    check_accuracy(name, SAMPLES, SAMPLES.pack(device="cuda"))


@needs_models
@needs_right_kernels
def test_trees() -> None:
    """Level by level, each level with the states of the one before."""
    longer = [[token for token in one for _ in range(9)] for one in SEQUENCES]
    samples = Samples([one[:1] for one in longer], [one[1:] for one in longer])
    masks = [[0] + [1] * (len(one) - 1) for one in longer]
    batch = pack_prefix_tree(longer, loss_mask=masks, min_shared=1, device="cuda")
    assert batch.layout.depth >= 4
    check_accuracy(MODELS[0], samples, batch)
