# SPDX-License-Identifier: BSD-3-Clause
"""Packed rows that lie on several ranks: which rows a rank has, sums over the ranks, and a check that all have one row.

How attention reaches the rows of others is said by the layouts themselves: `ulysses.UlyssesLayout` exchanges rows for
heads, `context_parallel.ContextLayout` gathers keys, and either may stand on the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import checks
from ..errors import SharedPromptError, SharedPromptLayoutError, SharedPromptTypeError
from ..host import device_of_group, untraced
from ..layout import SharedPromptLayout

# What is compared of ranks that divide a row, by the names that errors say.
_COMMON = (
    "sharing", "node_lens and node_parents", "pad", "response_lens", "options", "input_ids", "token_index", "row_index",
)  # fmt: skip
_UNKNOWN = -(1 << 63)
_MIXERS = -7046029254386353131, -4658895280553007687, -7723592293110705685  # odd, those of splitmix64

_weights: dict[torch.device, Tensor] = {}


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
        """Attention of this rank's rows, (L, H, d_v); every rank must call."""
        raise NotImplementedError

    def check_ids(self, input_ids: Any) -> None:
        """Nothing is known of a rank's ids, which are copies in general: `of` has compared those of all ranks."""

    def shard(self, values: Tensor, fill: float = 0, dim: int = 0) -> Tensor:
        """This rank's rows of a tensor that has the whole row along `dim`; `fill` in padding.

        Raises:
            SharedPromptError: the tensor has not the whole row.
        """
        checks.instance("values", values, Tensor)
        size = values.shape[dim] if values.dim() else 0
        if size != self.num_tokens:
            raise SharedPromptError("values", f"the {self.num_tokens} rows of the layout", size)
        filler = values.new_full((*values.shape[:dim], 1, *values.shape[dim:][1:]), fill)
        return torch.cat([values, filler], dim).index_select(dim, self._rows.to(values.device))

    def gather(self, values: Tensor) -> Tensor:
        """The whole row, (T, ...), of what ranks have, (L, ...) each; 0 in rows that no rank has. Every rank must call.

        Differentiable: the gradients of all ranks are summed.
        """
        checks.instance("values", values, Tensor)
        if values.dim() < 1 or len(values) != len(self._rows):
            raise SharedPromptError("values", f"this rank's {len(self._rows)} rows", tuple(values.shape))
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
        raise SharedPromptTypeError("group", expected, checks.describe(group))


def check_divided(layout: Any, whole: SharedPromptLayout) -> None:
    """SharedPromptError unless the layout is that of a batch, divided."""
    checks.instance("layout", layout, DividedLayout, " (UlyssesLayout.of, ContextLayout.of)")
    if not layout.is_like(whole):
        raise SharedPromptLayoutError("layout", "the batch's, divided", "that of another batch")


def all_gather(own: Tensor, group: Any, *, async_op: bool = False) -> tuple[Tensor, Any]:
    """The rows of all ranks, one rank's after the other's, and what to wait for where they are on their way."""
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name before PyTorch 2.13
    whole = own.new_empty((dist.get_world_size(group) * own.shape[0], *own.shape[1:]))
    return whole, gather(whole, own.contiguous(), group=group, async_op=async_op)


class Common(dict[str, Any]):
    """Values in common with other ranks, by the names of `_COMMON`: ints, strings, tuples of ints, int64 tensors.

    None, and what is not noted: not known here.
    """

    def note(self, layout: SharedPromptLayout, options: Any) -> None:
        """The row, and what else has to be the same."""
        self["node_lens and node_parents"] = (layout.node_lens, layout.node_parents)
        self.update(pad=layout.pad, input_ids=layout.input_ids)
        self["options"] = f"{self.get('options')}, {options}"


_outer: ContextVar[Common | None] = ContextVar("dualkv_common", default=None)


@contextmanager
def same_on_all_ranks(*groups: Any) -> Iterator[Common]:
    """Compare what the body notes with what it notes on the other ranks of groups, before any of them goes on.

    Every rank must enter. The body ends with one reduction of two numbers (in each group, if there are several), which
    the host reads; where they differ another one says what does. A rank whose body raises takes part as well, because
    the others would wait for it. One inside of another adds to what that one compares.

    Raises:
        SharedPromptError: on all ranks, something differs or a rank has failed; there, what the body raises.
    """
    for group in groups:
        check_group(group)  # None would be all processes
    groups = tuple(group for group in groups if dist.get_world_size(group) > 1)
    outer, common = _outer.get(), Common()
    if outer is not None or not groups:
        yield common if outer is None else outer
        return
    token = _outer.set(common)
    try:
        yield common
        own = _digest(common)
    except Exception:
        with suppress(Exception):  # what the body raises says more
            _are_equal(groups, torch.full((2,), ~_UNKNOWN))
            _gathered(groups, _numbers(Common(), failed=dist.get_rank()))
        raise
    finally:
        _outer.reset(token)
    if _are_equal(groups, own):
        return
    found = [*zip(*_gathered(groups, _numbers(common)))]
    failed = next((rank for rank in found[0] if rank != _UNKNOWN), None)
    if failed is not None:
        expected, got = "ranks that all come to this micro-batch", f"an error on rank {failed}, which says there why"
        raise SharedPromptError("group", expected, got)
    differing = [name for name, values in zip(_COMMON, found[1:]) if len({*values} - {_UNKNOWN}) > 1]
    if differing:
        expected = "the same on all ranks that divide its row (a sampler gives them the same samples)"
        raise SharedPromptError("batch", expected, f"other {', '.join(differing)} on some")


def _are_equal(groups: Sequence[Any], digest: Tensor) -> bool:
    """True if all ranks of the groups have the digest; False if one has the largest number twice."""
    for group in groups:
        digest = digest.to(device_of_group(group))
        dist.all_reduce(digest, dist.ReduceOp.MAX, group=group)
    most, least = digest.tolist()
    return (most + least) % (1 << 64) == 0


@untraced
def _digest(common: Common) -> Tensor:
    """(2,) a number that stands for all values, and that times -1, whose maximum is that of the minimum.

    Three launches, each of which takes the host 10 us: the weighted sum of all tensors, times an odd number that stands
    for the values of the host and all lengths. One constant is summed, too: of ids that are all 0 the sum would be 0,
    whatever the number.
    """
    values = [common.get(name) for name in _COMMON]
    tensors = [value for value in values if isinstance(value, Tensor) and not value.is_meta]
    number = 2 * (hash((*map(_number_of_host, values), *map(len, tensors))) % (1 << 62)) + 1
    if not tensors:
        return torch.tensor([number, -number])
    device = tensors[0].device
    row = torch.cat([*(tensor.to(device) for tensor in tensors), _weights_of(1, device)[0]])
    return _weighted_sums(row, number)


def _gathered(groups: Sequence[Any], numbers: Tensor) -> list[list[int]]:
    """The numbers of all ranks of the groups."""
    for group in groups:
        numbers, _ = all_gather(numbers.to(device_of_group(group)), group)
    found: list[list[int]] = numbers.tolist()
    return found


@untraced
def _numbers(common: Common, failed: int = _UNKNOWN) -> Tensor:
    """(1, 1 + n): the rank that has failed, and what stands for each value."""
    return torch.tensor([[failed, *(_number_of(common.get(name)) for name in _COMMON)]])


def _number_of(value: Any) -> int:
    is_known = isinstance(value, Tensor) and not value.is_meta
    return int(_weighted_sums(value)[0]) if is_known else _number_of_host(value)


def _number_of_host(value: Any) -> int:
    """That of a value of the host: the hash of integers is the same in all processes, unlike that of strings."""
    if value is None or isinstance(value, Tensor):
        return _UNKNOWN
    return hash(tuple(value.encode()) if isinstance(value, str) else value)


def _weighted_sums(tensor: Tensor, factor: int = 1) -> Tensor:
    """(2,) the sum of numbers of places, each times 1 + factor * the tensor's integer, and its negative; they wrap."""
    weights = _weights_of(len(tensor), tensor.device)
    return torch.addcmul(weights, tensor, weights, value=factor).sum(1)


@torch.inference_mode(False)  # kept for calls outside of it
def _new_weights(count: int, device: torch.device) -> Tensor:
    found = torch.arange(1, count + 1, device=device).mul_(_MIXERS[0])
    for mixer in _MIXERS[1:]:
        found.bitwise_xor_(found >> 31).mul_(mixer)
    found.bitwise_xor_(found >> 29)
    return torch.stack([found, -found])


def _weights_of(count: int, device: torch.device) -> Tensor:
    """(2, count) numbers without a pattern, the same everywhere, and their negatives."""
    known = _weights.get(device)
    if known is None or known.shape[1] < count:
        known = _weights[device] = _new_weights(1 << (count + 1).bit_length(), device)
    return known[:, :count]


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
