# SPDX-License-Identifier: BSD-3-Clause
"""The operators of decoding under opcheck, and compiled functions around them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from forests import LATENTS, Forest, forest, ints
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from flash_attn_dualkv import SharedPrefixPlan, append_kv, flash_attn_with_kvcache, shared_prefix_decode
from flash_attn_dualkv.decode.calls import Limits, Step, pack_step

pytestmark = pytest.mark.usefixtures("fresh_compiler")


def operator_arguments(step: Forest, sinks: Tensor | None) -> tuple[Any, ...]:
    planned = step.plan(boundaries=ints(*(one // 2 for one in step.seqlens))).step
    step.k_cache.nan_to_num_(), step.v_cache.nan_to_num_()
    own = (step.q, step.k_cache, step.v_cache, sinks, torch.empty_like(step.q), 0.3, 20, 1.5)
    return *own, *pack_step(planned)


@pytest.mark.parametrize("ragged", [True, False])
def test_opcheck(ragged: bool) -> None:
    step = forest(1, most_queries=3 if ragged else 1)
    arguments = operator_arguments(step, torch.zeros(4, dtype=torch.float64) if ragged else None)
    torch.library.opcheck(torch.ops.flash_attn_dualkv.decode.default, arguments)
    torch.library.opcheck(torch.ops.flash_attn_dualkv.decode_plan.default, arguments[8:])


def test_operators_check_their_arguments() -> None:
    step = forest(1)
    arguments = [*operator_arguments(step, None)]
    with pytest.raises(ValueError, match="^q: expected shape"):
        torch.ops.flash_attn_dualkv.decode(step.q[1:], *arguments[1:])
    arguments[-5] = 3
    for operator, given in (("decode", arguments), ("decode_plan", arguments[8:])):
        with pytest.raises(ValueError, match="^num_kv_heads: expected a number that divides 3, got 2"):
            getattr(torch.ops.flash_attn_dualkv, operator)(*given)
    leaf = step.q.clone().requires_grad_()
    with pytest.raises(RuntimeError, match="^decoding has no backward"):
        torch.ops.flash_attn_dualkv.decode(leaf, *arguments[1:])


@pytest.mark.parametrize("shape", [{}, LATENTS], ids=["heads", "latents"])
def test_layer_compiles_without_a_graph_break(shape: dict[str, Any]) -> None:
    """And once more for other shapes, which are symbolic then."""

    def layer(step: Forest, plan: SharedPrefixPlan) -> tuple[Tensor, Tensor]:
        v_cache = step.k_cache[..., : step.v_cache.shape[3]] if step.has_latents else step.v_cache
        out, lse = shared_prefix_decode(step.q * 2, step.k_cache, v_cache, plan, softmax_scale=0.3, return_lse=True)
        return out * 0.5, lse

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for seed in (1, 2):
        step = forest(seed, most_queries=2, **shape)
        plan = step.plan()
        for actual, expected in zip(compiled(step, plan), layer(step, plan)):
            assert torch.equal(actual, expected)


def test_a_compiled_step() -> None:
    """The plan's update and the new keys are in the compiled function too."""

    def step_of(plan: SharedPrefixPlan, step: Forest, lengths: Tensor, new: Tensor) -> Tensor:
        plan.update(step.block_table, lengths + 1)
        append_kv(new, new * 2, step.k_cache, step.v_cache, step.block_table, lengths)
        return shared_prefix_decode(step.q, step.k_cache, step.v_cache, plan)

    outs = []
    for compiled in (True, False):
        table = torch.arange(7, dtype=torch.int32)[:, None] + ints(0, 5)  # 16 keys go on in page 7
        step = replace(forest(4), block_table=table, seqlens=[0, 5, 16, 15, 0, 0, 0])
        lengths, new = ints(*step.seqlens), torch.ones(len(step.q), 2, 16, dtype=torch.float64)
        function = torch.compile(step_of, fullgraph=True, backend="aot_eager") if compiled else step_of
        outs.append(function(step.plan(), step, lengths, new).nan_to_num())
    assert torch.equal(*outs)


def test_function_of_flash_attention_compiles() -> None:
    step = forest(5)
    given = (step.q[:, None], step.k_cache, step.v_cache)
    rest = {"cache_seqlens": ints(*step.seqlens), "block_table": step.block_table, "causal": True}
    compiled = torch.compile(flash_attn_with_kvcache, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(*given, **rest), flash_attn_with_kvcache(*given, **rest))


def test_shapes_of_cuda_tensors() -> None:
    """What a tracer sees of a GPU, where there is none."""
    with FakeTensorMode(), torch.device("cuda:0"):
        q, out = (torch.zeros(3, 4, 64, dtype=torch.bfloat16) for _ in range(2))
        cache = torch.zeros(5, 16, 2, 64, dtype=torch.bfloat16)
        table, lengths = torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
        memory = torch.zeros(4096, dtype=torch.uint8)
        step = Step(table, lengths, None, None, None, None, memory, 3, Limits(3, 32, 3, 5, 16, 4, 2, 64, 64, 0))
        torch.ops.flash_attn_dualkv.decode_plan(*pack_step(step))
        lse = torch.ops.flash_attn_dualkv.decode(q, cache, cache, None, out, 0.1, -1, 0.0, *pack_step(step))
        assert lse.shape == (4, 3) and lse.dtype == torch.float32 and lse.device == torch.device("cuda:0")
