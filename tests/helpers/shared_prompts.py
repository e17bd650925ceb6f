# SPDX-License-Identifier: BSD-3-Clause
"""Small packed micro-batches for the tests of shared_prompt_attention, and the same computed in two calls."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flash_attn_dualkv import (
    SharedPromptLayout,
    flash_attn_dualkv_varlen_func,
    pack_shared_prompts,
    shared_prompt_attention,
)

Gradients = tuple[Tensor, ...]
# (prompt tokens, response tokens of each sample)
Groups = Sequence[tuple[int, Sequence[int]]]
GROUPS: dict[str, Groups] = {
    "one": [(5, [3, 1])],
    "several": [(6, [4, 0, 7]), (9, [5]), (2, [3, 3, 1, 2])],
    "short prompts": [(1, [3, 0]), (1, [0]), (2, [4])],
    "long": [(40, [20, 31]), (33, [17])],
    "large": [(300, [129, 64, 0, 65]), (1, [70]), (129, [1, 200]), (64, [64] * 5)],
}


class Inputs(NamedTuple):
    """Arguments of a call and its upstream gradient."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    sinks: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those that have gradients."""
        return (self.q, self.k, self.v) if self.sinks is None else (self.q, self.k, self.v, self.sinks)

    def leaves(self) -> Inputs:
        """The same values (and strides) as leaves that require gradients."""
        fresh = [one.detach().requires_grad_() for one in self.tensors]
        return Inputs(*fresh[:3], self.dout, *fresh[3:])


def layout_of(groups: Groups, device: str = "cpu", **options: Any) -> SharedPromptLayout:
    """Layout of the groups, whatever their tokens are."""
    prompts = [[0] * prompt for prompt, responses in groups for _ in responses]
    responses = [[0] * length for _, responses in groups for length in responses]
    ids = [g for g, (_, lengths) in enumerate(groups) for _ in lengths]
    return pack_shared_prompts(prompts, responses, group_ids=ids, device=device, **options).layout


def inputs_of(
    layout: SharedPromptLayout,
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 16,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.float64,
    device: str | torch.device | None = None,
    sinks: bool = False,
    seed: int = 0,
) -> Inputs:
    """Standard normal data for the layout, on its device."""
    device = layout.device if device is None else device
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    of_q, of_v = head_dim, head_dim_v or head_dim
    q, dout = (normal(layout.num_tokens, heads[0], dim) for dim in (of_q, of_v))
    k, v = (normal(layout.num_tokens, heads[1], dim) for dim in (of_q, of_v))
    return Inputs(q, k, v, dout, normal(heads[0]) if sinks else None)


def two_calls(inputs: Inputs, layout: SharedPromptLayout, **options: Any) -> Tensor:
    """The prompts in one call of the core function, the responses in another, put together."""
    context, decoded = layout.context_index(), layout.decoded_index()
    own, above = ([one[index] for one in (inputs.q, inputs.k, inputs.v)] for index in (decoded, context))

    def offsets(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=context.device)

    nodes = [*zip(layout.node_lens, layout.node_parents)]
    contexts, lens = [size for size, parent in nodes if parent < 0], [size for size, parent in nodes if parent >= 0]
    groups, most_context, most = len(contexts), max(contexts), max(lens)
    of_contexts, of_responses = (offsets([*accumulate(sizes, initial=0)]) for sizes in (contexts, lens))
    roots = [index for index, (_, parent) in enumerate(nodes) if parent < 0]
    owned = [*(root - group for group, root in enumerate(roots)), len(lens)]
    prompts = flash_attn_dualkv_varlen_func(
        *above, *(one[:0] for one in above[1:]),
        of_contexts, offsets([0] * (groups + 1)), most_context, most_context, 0,
        cu_seqlens_context=of_contexts, cu_seqs_per_context=offsets(range(groups + 1)), **options,
    )  # fmt: skip
    responses = flash_attn_dualkv_varlen_func(
        own[0], *above[1:], *own[1:],
        of_responses, of_responses, most, most_context, most, cu_seqlens_context=of_contexts,
        cu_seqs_per_context=offsets(owned), **options,
    )  # fmt: skip
    out = prompts.new_zeros((layout.num_tokens, *prompts.shape[1:]))
    return out.index_copy(0, context, prompts).index_copy(0, decoded, responses)


def attend(inputs: Inputs, layout: SharedPromptLayout, **options: Any) -> Tensor:
    return shared_prompt_attention(inputs.q, inputs.k, inputs.v, layout, sinks=inputs.sinks, **options)


def run(inputs: Inputs, function: Any) -> tuple[Tensor, Gradients]:
    """Output and gradients of a function of leaves with the inputs' values."""
    leaves = inputs.leaves()
    out = function(leaves)
    return out.detach(), torch.autograd.grad(out, leaves.tensors, inputs.dout)


def small(device: str) -> dict[str, Any]:
    return {"dtype": torch.float64 if device == "cpu" else torch.bfloat16, "head_dim": 16 if device == "cpu" else 64}
