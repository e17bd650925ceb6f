# SPDX-License-Identifier: BSD-3-Clause
"""Packed rows that lie on several ranks: which rows a rank has, and sums over the ranks.

How attention reaches the rows of others is said by the layouts themselves: `ulysses.UlyssesLayout` exchanges rows for
heads, `context_parallel.ContextLayout` gathers keys, and either may stand on the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import checks
from ..checks import explain
from ..errors import SharedPromptError, SharedPromptLayoutError, SharedPromptTypeError
from ..layout import SharedPromptLayout


@dataclass(frozen=True, eq=False)
class DividedLayout(SharedPromptLayout):
    """A layout whose rows are divided among the ranks of a group.

    Models of transformers take it as they take a `SharedPromptLayout`, with this rank's rows.

    Attributes:
        group: of torch.distributed.
        row_index: (L,) int64, the row of the whole that each of this rank's L rows is; `num_tokens`, which is none,
            for padding. All ranks have equally many.
    """

    group: Any = None
    row_index: Tensor | None = None

    @property
    def num_local_tokens(self) -> int:
        return len(self._rows)

    @property
    def groups(self) -> tuple[Any, ...]:
        """The groups that divide the row, one inside of the other."""
        return (self.group,)

    @property
    def num_ranks(self) -> int:
        """How many ranks have a part of the row: what a loss of the whole, made on each of them, is divided by."""
        ranks = 1
        for group in self.groups:
            check_group(group)  # None would be all processes
            ranks *= dist.get_world_size(group)
        return ranks

    @property
    def _rows(self) -> Tensor:
        assert self.row_index is not None
        return self.row_index

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """Attention of this rank's rows, (L, H, d_v); every rank must call. See `shared_prompt_attention`."""
        raise NotImplementedError

    def shard(self, values: Tensor, fill: float = 0, dim: int = 0) -> Tensor:
        """This rank's rows of a tensor that has the whole row along `dim`; `fill` in padding.

        Raises:
            SharedPromptError: the tensor has not the whole row.
        """
        checks.instance("values", values, Tensor)
        size = values.shape[dim] if values.dim() else 0
        if size != self.num_tokens:
            raise SharedPromptError(explain("values", f"the {self.num_tokens} rows of the layout", size))
        filler = values.new_full((*values.shape[:dim], 1, *values.shape[dim:][1:]), fill)
        return torch.cat([values, filler], dim).index_select(dim, self._rows.to(values.device))

    def gather(self, values: Tensor) -> Tensor:
        """The whole row, (T, ...), of what ranks have, (L, ...) each; 0 in rows that no rank has. Every rank must call.

        Differentiable, see `sum`.
        """
        checks.instance("values", values, Tensor)
        if values.dim() < 1 or len(values) != len(self._rows):
            raise SharedPromptError(explain("values", f"this rank's {len(self._rows)} rows", tuple(values.shape)))
        whole = values.new_zeros((self.num_tokens + 1, *values.shape[1:]))
        return self.sum(whole.index_copy(0, self._rows.to(values.device), values)[:-1])

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all ranks, on each of them. Every rank must call.

        Differentiable: a rank's gradient is summed over what every rank does with the sum. Where all ranks compute the
        same loss of it, divide that by `num_ranks`.
        """
        for group in self.groups:
            check_group(group)
            values = Sum.apply(values, group)
        return values

    def local_rows(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Which of some rows of the whole are here, as places in `index`, and which of this rank's rows they are.

        Waits for a GPU, because how many there are is not known without.

        Args:
            index: (n,) int64, such as the `token_index` of a batch.
        """
        rows = self._rows.to(index.device)
        places = index.new_full((self.num_tokens + 1,), -1)
        places = places.index_copy_(0, rows, torch.arange(len(rows), device=rows.device))
        found = places.index_select(0, index)
        own = (found >= 0).nonzero()[:, 0]
        return own, found.index_select(0, own)

    def __getstate__(self) -> dict[str, Any]:
        if self.group is not None:
            name = type(self).__name__
            raise TypeError(f"a {name} holds a process group and cannot be pickled; pickle what it is made of")
        return super().__getstate__()


def check_group(group: Any) -> None:
    """SharedPromptTypeError unless it is a process group."""
    if not dist.is_available() or not dist.is_initialized() or not isinstance(group, dist.ProcessGroup):
        expected = "a process group of an initialised torch.distributed"
        raise SharedPromptTypeError(explain("group", expected, checks.describe(group)))


def check_divided(layout: Any, whole: SharedPromptLayout) -> None:
    """SharedPromptError unless the layout is that of a batch, divided."""
    checks.instance("layout", layout, DividedLayout, " (UlyssesLayout.of, ContextLayout.of)")
    if not layout.is_like(whole):
        raise SharedPromptLayoutError(explain("layout", "the batch's, divided", "that of another batch"))


def all_gather(own: Tensor, group: Any, *, async_op: bool = False) -> tuple[Tensor, Any]:
    """The rows of all ranks, one rank's behind the other's, and what to wait for where they are on their way."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before PyTorch 2.13
    whole = own.new_empty((dist.get_world_size(group) * own.shape[0], *own.shape[1:]))
    return whole, gather(whole, own.contiguous(), group=group, async_op=async_op)


class Sum(torch.autograd.Function):
    """Over ranks; its gradient is summed as well, as often as one differentiates."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: Any) -> Tensor:
        ctx.group = group
        values = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return Sum.apply(gradient, ctx.group), None
