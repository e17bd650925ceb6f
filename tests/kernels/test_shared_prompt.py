# SPDX-License-Identifier: BSD-3-Clause
"""Results of the kernels for packed micro-batches: the accuracy rule of oracle.py, the two-call form, isolation, sinks.

DUALKV_TEST_DEVICE=cpu runs the same code on the CPU implementation with small sizes: a check of the tests themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import oracle
import pytest
import torch
from groups import Batch, Results, SequenceRows
from launches import CONFIGURATIONS, DEVICE, GPU_MARKS, HAS_KERNELS, configurations, kernels_ran, poison_free_memory
from shared_prompts import GROUPS, Groups, Inputs, inputs_of, layout_of, two_calls
from torch import Tensor

from flash_attn_dualkv import SharedPromptLayout, ops, shared_prompt_attention

pytestmark = [*GPU_MARKS, pytest.mark.usefixtures("kernels")]

Options = dict[str, Any]

# Many responses of one prompt, whose gradients sum over all of them; and borders of tiles on all sides.
SHAPES: dict[str, Groups] = {
    **{name: GROUPS[name] for name in ("several", "short prompts", "large")},
    "many responses": [(200, [33] * 64)],
    "many groups": [(64 + g, [g, 128, 64 - g]) for g in range(16)],
}
if not HAS_KERNELS:
    SHAPES = {name: GROUPS[name] for name in ("several", "short prompts", "long")}
shapes = pytest.mark.parametrize("shape", list(SHAPES))


def data(shape: str, boundary: str = "replicate", **options: Any) -> tuple[SharedPromptLayout, Inputs]:
    layout = layout_of(SHAPES[shape], DEVICE, boundary=boundary, pad_to_multiple_of=32)
    return layout, inputs_of(layout, **options)


def as_batch(inputs: Inputs, layout: SharedPromptLayout) -> Batch:
    """What the oracle reads: the packed tensors' regions, and a table with the prompts among the sequences."""
    context, decoded = layout.context_index(), layout.decoded_index()
    table, above, ends = [], (0, 0), [0, 0]  # the context that is shared, and where contexts and responses end
    for q_begin, q_len, *_, parent, _ in layout.nodes.tolist():
        own = (ends[parent >= 0], q_len)
        ends[parent >= 0] += q_len
        above = own if parent < 0 else above
        table.append(SequenceRows(q_begin, q_len, *above, *((0, 0) if parent < 0 else own)))
    nothing = torch.zeros(0)
    most = max(length for length, parent in zip(layout.node_lens, layout.node_parents) if parent < 0)
    return Batch(
        inputs.q, inputs.k[context], inputs.v[context], inputs.k[decoded], inputs.v[decoded], inputs.dout,
        nothing, nothing, nothing, None, table, most,
    )  # fmt: skip


def forward(
    tensors: Sequence[Tensor], layout: SharedPromptLayout, scale: float, reference: bool, deterministic: bool
) -> Any:
    """out and lse of q, k, v and, where there are some, sinks."""
    q, k, v, *sinks = tensors
    sink = sinks[0] if sinks else None
    options = (scale, True, -1, -1, 0.0, reference, layout.mean_keys, deterministic)
    return ops.forward(q, k, v, None, None, sink, layout.nodes, *options)


def run(inputs: Inputs, layout: SharedPromptLayout, deterministic: bool = False) -> tuple[Tensor, Tensor, list[Tensor]]:
    """out, lse and the gradients; free memory holds NaN before."""
    leaves = inputs.leaves()
    poison_free_memory()
    out, lse = forward(leaves.tensors, layout, inputs.q.shape[2] ** -0.5, False, deterministic)
    return out.detach(), lse.detach(), list(torch.autograd.grad(out, leaves.tensors, inputs.dout))


def as_results(layout: SharedPromptLayout, out: Tensor, lse: Tensor, gradients: list[Tensor]) -> Results:
    dq, dk, dv = gradients
    context, decoded = layout.context_index(), layout.decoded_index()
    return Results(out, lse, dq, dk[context], dv[context], dk[decoded], dv[decoded])


@configurations
@shapes
def test_accuracy(shape: str, options: Options) -> None:
    """With rows of prompts that responses take from them, and with such rows of their own."""
    layout, inputs = data(shape, "gather" if options is CONFIGURATIONS[0] else "replicate", **options)
    with kernels_ran("forward", "backward"):
        results = run(inputs, layout)
    deterministic = run(inputs, layout, deterministic=True)
    oracle.check(as_batch(inputs, layout), *(as_results(layout, *one) for one in (results, deterministic)))


@configurations
@shapes
def test_equals_the_two_call_form(shape: str, options: Options) -> None:
    """Bit by bit: what a row gives does not depend on what else is in the call."""
    layout, inputs = data(shape, sinks=True, **options)
    for sinks in (None, inputs.sinks):
        out = shared_prompt_attention(inputs.q, inputs.k, inputs.v, layout, sinks=sinks)
        oracle.assert_bits_equal("out", out, two_calls(inputs, layout, sinks=sinks))
