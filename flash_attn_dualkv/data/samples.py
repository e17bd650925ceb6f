"""What callers give: checked, copied to the host once, and grouped by their prompts."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from ..checks import explain
from ..errors import SharedPromptError
from .transfer import to_host

_WORD = torch.int64.itemsize
_INTEGERS = frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))

Tokens = Tensor | Sequence[int]


def check_ids(name: str, ids: Any, dimensions: int, also: tuple[torch.dtype, ...] = ()) -> None:
    if not isinstance(ids, Tensor):
        raise SharedPromptError(explain(name, "an integer tensor", type(ids).__name__))
    integers = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if not integers and ids.dtype not in also:
        raise SharedPromptError(explain(name, "integers", ids.dtype))
    if ids.dim() != dimensions:
        raise SharedPromptError(explain(name, f"{dimensions} dimension(s)", f"shape {tuple(ids.shape)}"))


def all_tokens(given: list[Tokens], names: Sequence[str]) -> list[Tensor]:
    """1-D integer tensors of what was given; the names of what it is take turns."""
    if _are_tokens(given):
        return given
    count = len(names)
    return [_tokens(f"{names[index % count]}[{index // count}]", one) for index, one in enumerate(given)]


def _are_tokens(given: list[Any]) -> TypeGuard[list[Tensor]]:
    """Mostly the answer is yes: to look at one after the other would take a millisecond for thousands."""
    if not set(map(type, given)) <= {Tensor}:
        return False
    return {one.dtype for one in given} <= _INTEGERS and set(map(Tensor.dim, given)) <= {1}


def _tokens(name: str, tokens: Any) -> Tensor:
    """A 1-D integer tensor; Python sequences become one on the CPU."""
    if not isinstance(tokens, Tensor):
        try:
            tokens = torch.tensor(tokens, device="cpu", dtype=None if len(tokens) else torch.int64)
        except (TypeError, ValueError, RuntimeError) as error:
            raise SharedPromptError(explain(name, "a 1-D integer tensor or a sequence of ints", str(error))) from None
    check_ids(name, tokens, 1)
    return tokens


class Ones(NamedTuple):
    """Of every row of a mask: where its ones begin, their number, that of their runs, and that of what is no 0 or 1."""

    begins: list[int]
    lengths: list[int]
    runs: list[int]
    others: list[int]

    @staticmethod
    def numbers(mask: Tensor) -> tuple[Tensor, ...]:
        """On the device of the mask."""
        ones = mask == 1
        rises = (ones[:, 1:] & ~ones[:, :-1]).sum(1) + ones[:, :1].sum(1)
        return (ones.cumsum(1) == 0).sum(1), ones.sum(1), rises, (~ones & (mask != 0)).sum(1)

    def check(self, name: str) -> None:
        if any(self.others):
            raise SharedPromptError(explain("attention_mask", "0 and 1", "other values"))
        for row, runs in enumerate(self.runs):
            if runs > 1:
                raise SharedPromptError(explain(name, "ones that stand together in each row", f"a hole in row {row}"))


def given_lengths(name: str, lengths: Any) -> list[Tensor]:
    """The lengths if they are a tensor, to be fetched with the tokens."""
    if not isinstance(lengths, Tensor):
        return []
    check_ids(name, lengths, 1)
    return [lengths]


def prompt_lengths(name: str, lengths: Any, fetched: Sequence[Tensor], totals: Sequence[int]) -> list[int]:
    """Numbers of prompt tokens, one for each sequence and no longer than that."""
    lengths = fetched[0].tolist() if fetched else lengths
    if not hasattr(lengths, "__len__"):
        raise SharedPromptError(explain(name, "ints, one for each sequence", repr(lengths)))
    if len(lengths) != len(totals):
        raise SharedPromptError(explain(name, f"{len(totals)} of them (as samples)", len(lengths)))
    for index, (length, total) in enumerate(zip(lengths, totals)):
        if not hasattr(length, "__index__") or not 0 <= length <= total:
            raise SharedPromptError(explain(f"{name}[{index}]", f"0 .. {total}, its sequence's tokens", length))
    return list(map(operator.index, lengths))


def _common_device(tensors: Sequence[Tensor]) -> torch.device:
    device = tensors[0].device if tensors else torch.device("cpu")
    for one in tensors:
        if one.device != device:
            raise SharedPromptError(explain("device", f"{device} for all tensors, as the first", one.device))
    return device


def joined(tokens: Sequence[Tensor]) -> Tensor:
    """All in one, contiguous."""
    _common_device(tokens)
    return torch.cat(list(tokens)) if tokens else torch.empty(0, dtype=torch.int64, device="cpu")


def fetch(
    tensors: Sequence[Tensor], group_ids: Iterable[Hashable] | Tensor | None
) -> tuple[list[Tensor], list[Hashable] | None]:
    """The tensors (flat int64) and the group ids on the host; one copy from a GPU."""
    device = _common_device(tensors)
    ids: list[Hashable] | None = None
    if isinstance(group_ids, Tensor):
        check_ids("group_ids", group_ids, 1)
        if group_ids.device == device:
            *host, copied = to_host([*tensors, group_ids])
            return host, copied.tolist()
        ids = group_ids.tolist()
    elif group_ids is not None:
        if not isinstance(group_ids, Iterable):
            raise SharedPromptError(explain("group_ids", "hashable values or one integer tensor", repr(group_ids)))
        ids = list(group_ids)
        if any(isinstance(one, Tensor) for one in ids):  # equal ones have different hashes
            raise SharedPromptError(explain("group_ids", "hashable values or one integer tensor", "tensors"))
    return to_host(tensors) if tensors else [], ids


def selected(values: Tensor, mask: Tensor, count: int) -> Tensor:
    """values[mask] of `count` elements, which by itself would ask the GPU for their number."""
    mask = mask.reshape(-1) == 1
    places = torch.where(mask, mask.cumsum(0) - 1, count)  # what is left out shares the last one
    chosen = values.new_empty(count + 1).scatter_(0, places, values.reshape(-1))
    return chosen[:count]


def check_group_ids(group_ids: Sequence[Hashable] | None, samples: int) -> Sequence[Hashable]:
    if group_ids is None or len(group_ids) != samples:
        got = None if group_ids is None else len(group_ids)
        raise SharedPromptError(explain("group_ids", f"{samples} of them (as prompts)", got))
    return group_ids


def groups_of(keys: Iterable[Hashable]) -> list[list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        try:
            groups.setdefault(key, []).append(index)
        except TypeError:
            raise SharedPromptError(explain(f"group_ids[{index}]", "a hashable value", repr(key))) from None
    return list(groups.values())


def prompt_bytes(tokens: Tensor, begins: Iterable[int], lengths: Sequence[int]) -> list[bytes]:
    """Of each prompt among the tokens (int64 on the host)."""
    if not lengths:
        raise SharedPromptError(explain("prompts", "at least one", 0))
    for index, length in enumerate(lengths):
        if length < 1:
            raise SharedPromptError(explain(f"prompts[{index}]", "at least one token", length))
    words = memoryview((ctypes.c_char * (len(tokens) * _WORD)).from_address(tokens.data_ptr()))
    return [words[begin * _WORD : (begin + length) * _WORD].tobytes() for begin, length in zip(begins, lengths)]


def group(prompts: Sequence[bytes], group_ids: Sequence[Hashable] | None) -> list[list[int]]:
    """Samples with the same prompt, or with the same id, whose prompts must then be equal."""
    if group_ids is None:
        return groups_of(prompts)
    groups = groups_of(check_group_ids(group_ids, len(prompts)))
    for members in groups:
        for other in members[1:]:
            if prompts[other] != prompts[members[0]]:
                expected = f"equal prompts of the samples with the id {group_ids[other]!r}"
                raise SharedPromptError(explain("group_ids", expected, f"samples {members[0]} and {other} differ"))
    return groups
