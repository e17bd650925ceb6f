# SPDX-License-Identifier: BSD-3-Clause
"""Megatron's gated delta nets and Mamba-2 on packed rows, in float64, against each sequence alone."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: see docs/megatron.md")

import tiny_megatron as tiny
import torch
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, torch_chunk_gated_delta_rule
from megatron.core.tensor_parallel import random as recomputing
from megatron_cpu import megatron_on_the_cpu
from tiny_megatron import alone, check_close, check_gradients, draw, gradients, megatron, tiny_chunk, tiny_config

from flash_attn_dualkv import SharedPromptLayoutError, SharedPromptUnsupportedError

MIXED = "mamba, delta nets, rotary, tied"
KINDS = ["delta nets", "qwen3 next", "nemotron", MIXED]
EXACT = 1e-11
HAS_NORM_OUT = hasattr(GatedDeltaNet, "_gated_norm_and_a2a")  # 0.18 cannot recompute its norms
RECOMPUTATIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "full": tiny.RECOMPUTED,
    "parts": dict(recompute_granularity="selective", recompute_modules=["core_attn"]),
}


@pytest.fixture(autouse=True, scope="module")
def _cpu() -> Iterator[None]:
    with megatron_on_the_cpu(), in_float64():
        yield


class _WiderTorch:
    """The module torch, but for the type in which Megatron's rule and routers compute."""

    float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def in_float64() -> Iterator[None]:
    """Recurrences and experts in float64 throughout: rounding in float32 would be the larger error by far."""
    wider = ("megatron.core.ssm.gated_delta_net", "megatron.core.transformer.moe.")
    files = [file for name, file in sys.modules.items() if name.startswith(wider)]
    with ExitStack() as stack:
        for file in files:
            if hasattr(file, "torch"):
                stack.enter_context(patch.object(file, "torch", _WiderTorch()))
        stack.enter_context(patch.object(torch.Tensor, "float", torch.Tensor.double))
        yield


def random_tree(seed: int) -> tiny.Sequences:
    """Nodes on both sides of a convolution's inputs and of a rule's chunk of 64, and empty ones."""
    drawn = random.Random(seed)
    paths = [draw(100 * seed, drawn.choice([2, 9, 70]))]
    for node in range(1, 9):
        above = drawn.choice(paths)
        paths.append(above[: drawn.randint(1, len(above))] + draw(100 * seed + node, drawn.choice([0, 1, 2, 5, 66])))
    return tiny.Sequences(paths, [[0] + [int(drawn.random() < 0.6) for _ in one[1:]] for one in paths])


def compare(kind: str, sequences: tiny.Sequences, **options: Any) -> None:
    model = tiny_chunk(kind, tiny_config(kind, params_dtype=torch.float64, **options)).double()
    expected = alone(model, sequences)
    weights = torch.randn(len(expected), generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    (expected @ weights).backward()
    expected_gradients = gradients(model)
    megatron.install(model)
    logps, _ = megatron.shared_prompt_forward(model, sequences.pack(min_shared=1))
    check_close(logps.detach(), expected.detach(), EXACT)
    (logps @ weights).backward()
    check_gradients(gradients(model), expected_gradients, EXACT)


class _NoFp8:
    """Asked by Megatron when a part of a layer is recomputed; without Transformer Engine the name is missing."""

    @staticmethod
    def is_fp8_enabled() -> bool:
        return False


@pytest.mark.parametrize("recomputation", RECOMPUTATIONS)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_random_trees(kind: str, seed: int, recomputation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if recomputation == "parts":
        monkeypatch.setattr(recomputing, "FP8GlobalStateManager", _NoFp8, raising=False)
        for name in ("activation_recompute_forward", "fp8_autocast"):
            monkeypatch.setattr(recomputing, name, lambda **_: nullcontext(), raising=False)
    options: dict[str, Any] = dict(moe_router_dtype="fp64") if kind in ("qwen3 next", "nemotron") else {}
    options |= RECOMPUTATIONS[recomputation]
    if "recompute_modules" in options and HAS_NORM_OUT and kind in ("delta nets", "qwen3 next"):
        options["recompute_modules"] = ["core_attn", "gdn_norm_out"]
    compare(kind, random_tree(seed), **options)


def test_a_rule_without_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's own, which other hardware gets: nodes are padded to each other's lengths."""
    monkeypatch.setattr(sys.modules[GatedDeltaNet.__module__], "chunk_gated_delta_rule", torch_chunk_gated_delta_rule)
    compare("delta nets", random_tree(5))


@pytest.mark.parametrize("kind", ["delta nets", MIXED])
def test_calls_without_a_layout_do_not_change(kind: str) -> None:
    model = tiny_chunk(kind, tiny_config(kind, params_dtype=torch.float64)).double()
    sequences, _ = tiny.tree()
    before, names = alone(model, sequences), list(model.state_dict())
    megatron.install(model)
    megatron.install(model)  # twice is once
    assert torch.equal(alone(model, sequences), before)
    assert list(model.state_dict()) == names


def test_a_layer_that_mixes_by_another_function(monkeypatch: pytest.MonkeyPatch) -> None:
    file = sys.modules[GatedDeltaNet.__module__]
    model = tiny_chunk("delta nets", tiny_config("delta nets", params_dtype=torch.float64)).double()
    megatron.install(model)
    model.decoder.layers[1].self_attention.gated_delta_rule = vars(file)["chunk_gated_delta_rule"]
    with pytest.raises(SharedPromptLayoutError, match="calls gated_delta_rule .*without the layout"):
        megatron.shared_prompt_forward(model, tiny.tree()[1])
    model = tiny_chunk(MIXED, tiny_config(MIXED))
    megatron.install(model)
    stock = mamba_mixer.mamba_split_conv1d_scan_combined.dualkv_stock
    monkeypatch.setattr(mamba_mixer, "mamba_split_conv1d_scan_combined", stock)
    with pytest.raises(SharedPromptLayoutError, match="calls mamba_split_conv1d_scan_combined .*without the layout"):
        megatron.shared_prompt_forward(model, tiny.tree()[1])


SETTINGS: list[tuple[str, str, str, Any]] = [
    ("delta nets", "gated delta nets", "context_parallel_size", 2),
    ("delta nets", "gated delta nets", "deterministic_mode", True),
    ("nemotron", "Mamba-2", "context_parallel_size", 2),
    ("nemotron", "Mamba-2", "use_mamba_mem_eff_path", False),
]


@pytest.mark.parametrize(("kind", "layers", "name", "value"), SETTINGS)
@pytest.mark.parametrize("variant", ["gated_delta_net", None])
def test_settings(kind: str, layers: str, name: str, value: Any, variant: str | None) -> None:
    """Also of layers that a spec has put into a model whose configuration does not say so."""
    model = tiny_chunk(kind, tiny_config(kind))
    if kind == "delta nets":
        model.config.experimental_attention_variant = variant
    setattr(model.config, name, value)
    with pytest.raises(SharedPromptUnsupportedError, match=f"{name}: expected .* for {layers}"):
        megatron.install(model)
    first = model.decoder.layers[0]
    assert type(first.mixer if kind == "nemotron" else first.self_attention) in (GatedDeltaNet, mamba_mixer.MambaMixer)


def test_no_convolution(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_chunk("nemotron", tiny_config("nemotron"))
    monkeypatch.setattr(mamba_mixer, "causal_conv1d_fn", None)
    with pytest.raises(SharedPromptUnsupportedError, match="causal-conv1d: expected an installation for Mamba-2"):
        megatron.install(model)
