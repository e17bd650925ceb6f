# SPDX-License-Identifier: BSD-3-Clause
"""Small calls of the public functions, for the tests of how these live with the rest of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from groups import Batch, Group, build_groups
from shared_prompts import GROUPS, Groups, inputs_of, layout_of, small
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from tree_cases import offsets_and_parents

from flash_attn_dualkv import (
    SharedPromptLayout,
    flash_attn_dualkv_varlen_func,
    flash_attn_tree_varlen_func,
    shared_prompt_attention,
)

TWO_GROUPS = (Group(5, ((3, 3), (0, 0), (4, 4), (5, 0))), Group(9, ((6, 2), (2, 5))))
ONE_GROUP = (Group(7, ((3, 3), (4, 6))),)
NOTHING = (Group(0, ()),)
NO_ROWS = (Group(0, ((0, 0), (0, 0))), Group(0, ()))
NO_KEYS = (Group(0, ((3, 0),)),)


def batch_of(groups: Sequence[Group], device: str, **options: Any) -> Batch:
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    return build_groups(groups, **{"head_dim": 64, "heads": (4, 2), "dtype": dtype, "device": device, **options})


def options_of(batch: Batch) -> dict[str, Any]:
    """Arguments of the function with separate keys that are no tensors of rows."""
    return {
        "cu_seqlens_q": batch.cu_seqlens_q,
        "cu_seqlens_k_decoded": batch.cu_seqlens_k_decoded,
        "max_seqlen_q": 6,
        "context_seqlen": batch.longest_context,
        "max_seqlen_k_decoded": 6,
        "cu_seqlens_context": batch.cu_seqlens_context,
        "cu_seqs_per_context": batch.cu_seqs_per_context,
    }


def leaves_of(batch: Batch) -> list[Tensor]:
    return [one.detach().clone().requires_grad_() for one in batch.inputs]


# --- either function ------------------------------------------------------------------------------------------------


@dataclass
class Call:
    """A call of one of the functions, and its upstream gradient."""

    function: Callable[..., Tensor]  # of the tensors, `rest` and options
    tensors: Sequence[Tensor]  # those that have gradients
    rest: Any  # all other arguments
    dout: Tensor

    def __call__(self, tensors: Sequence[Tensor], **options: Any) -> Tensor:
        return self.function(tensors, self.rest, **options)

    def leaves(self) -> list[Tensor]:
        return [one.detach().clone().requires_grad_() for one in self.tensors]

    def results(self, deterministic: bool = True, **options: Any) -> list[Tensor]:
        """Output and gradients."""
        leaves = [one.detach().requires_grad_() for one in self.tensors]
        out = self(leaves, deterministic=deterministic, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, self.dout)]

    def replace(self, **changes: Any) -> Call:
        return replace(self, **changes)

    @property
    def all_tensors(self) -> list[Tensor]:
        """Everything in device memory that the results depend on."""
        rest = [self.rest.nodes] if isinstance(self.rest, SharedPromptLayout) else self.rest.values()
        return [*self.tensors, self.dout, *(one for one in rest if isinstance(one, Tensor))]


def attend_separate(tensors: Sequence[Tensor], rest: dict[str, Any], **options: Any) -> Tensor:
    out: Tensor = flash_attn_dualkv_varlen_func(*tensors, **rest | options)
    return out


def attend_packed(tensors: Sequence[Tensor], layout: SharedPromptLayout, **options: Any) -> Tensor:
    q, k, v, *sinks = tensors
    return shared_prompt_attention(q, k, v, layout, sinks=sinks[0] if sinks else None, **options)


def separate(groups: Groups = GROUPS["several"], device: str = "cpu", **options: Any) -> Call:
    """flash_attn_dualkv_varlen_func with the responses of the groups."""
    made = [Group(prompt, tuple((length, length) for length in responses)) for prompt, responses in groups]
    batch = batch_of(made, device, grouped=True, **options)
    return Call(attend_separate, batch.inputs, options_of(batch), batch.dout)


def packed(groups: Groups = GROUPS["several"], device: str = "cpu", **options: Any) -> Call:
    """shared_prompt_attention with the prompts and responses of the groups."""
    layout = layout_of(groups, device=device)
    inputs = inputs_of(layout, **small(device) | options)
    return Call(attend_packed, inputs.tensors, layout, inputs.dout)


def packed_with_sinks(groups: Groups = GROUPS["several"], device: str = "cpu", **options: Any) -> Call:
    return packed(groups, device, sinks=True, **options)


def tree_of(groups: Groups) -> tuple[list[int], list[int]]:
    """Lengths and parents of trees: every prompt with its responses, of which every other continues the one before."""
    lens: list[int] = []
    parents: list[int] = []
    for prompt, responses in groups:
        root = len(lens)
        parents += (-1, *(root if index % 2 == 0 else root + index for index in range(len(responses))))
        lens += (prompt, *responses)
    return lens, parents


def attend_tree(tensors: Sequence[Tensor], rest: dict[str, Any], **options: Any) -> Tensor:
    q, k, v, *sinks = tensors
    return flash_attn_tree_varlen_func(q, k, v, **rest, sinks=sinks[0] if sinks else None, **options)


def tree(groups: Groups = GROUPS["several"], device: str = "cpu", **options: Any) -> Call:
    """flash_attn_tree_varlen_func with sinks and trees of three levels."""
    lens, parents = tree_of(groups)
    layout = SharedPromptLayout.from_tree(lens, parents, device=device)
    inputs = inputs_of(layout, **{"sinks": True, **small(device), **options})
    rest = dict(zip(("cu_seqlens", "parents"), offsets_and_parents((lens, parents), device)))
    return Call(attend_tree, inputs.tensors, rest, inputs.dout)


class Operators(TorchDispatchMode):
    """Records all operators that are called, by name with their arguments, but for autograd's own bookkeeping."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name != "aten::detach":
            self.calls.append((func._schema.name, args))
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def of_ours(self) -> dict[str, tuple[Any, ...]]:
        """Arguments of this library's operators, in the order of their calls."""
        return {name.partition("::")[2]: args for name, args in self.calls if name.startswith("flash_attn_dualkv::")}
