# SPDX-License-Identifier: BSD-3-Clause
"""Checks of what callers give, and its one copy to the host."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..errors import SharedPromptError, SharedPromptTypeError
from ..host import int64s, ints, memory_of, offsets_of, take, to_host

WORD = torch.int64.itemsize
_MOST = torch.iinfo(torch.int64).max
_INTEGERS = frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
# Types of masks, in addition to integers: 0.0 and 1.0 are as exact as False and True.
MASKS = (torch.bool, torch.float16, torch.bfloat16, torch.float32, torch.float64)

TokenIds = Tensor | Sequence[int]
GroupIds = Iterable[Hashable] | Tensor


# Tokens


def sequences_of(name: str, values: Any, of: str = "token sequences") -> Sequence[Any]:
    """A list of sequences. No matrix: its rows are equally long, whether all of their tokens are real or not."""
    if type(values) is not list and getattr(values, "ndim", 1) > 1:
        if isinstance(values, Tensor) and values.is_nested:
            got = f"a nested tensor (pack_jagged takes whole sequences, {name}.unbind() is a list)"
        else:
            got = (
                "a matrix, whose padding would be tokens (pack_padded takes a padded batch and its mask; only where no "
                f"row is padded, list({name}))"
            )
        raise SharedPromptTypeError(name, f"a list of {of}", got)
    return checks.items(name, values, of)


def _tokens(name: str, tokens: Any, also: Sequence[torch.dtype]) -> Tensor:
    """A 1-D integer tensor; Python sequences become one on the CPU."""
    if not isinstance(tokens, Tensor):
        expected = "a 1-D integer tensor or a sequence of ints"
        if isinstance(tokens, (str, bytes, dict, set, frozenset)):
            raise SharedPromptTypeError(name, expected, checks.describe(tokens))
        try:
            if type(tokens) in (list, tuple) and {*map(type, tokens)} == {int}:
                return ints(tokens, torch.int64)
            tokens = torch.tensor(tokens, device="cpu", dtype=None if len(tokens) else torch.int64)
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise SharedPromptTypeError(name, expected, f"{checks.describe(tokens)} ({error})") from None
    return checks.integers(name, tokens, 1, also)


def token_lists(given: Iterable[Any], *names: str, also: Sequence[torch.dtype] = ()) -> tuple[Tensor, list[int]]:
    """The tokens of sequences all in one, contiguous, and how many each has; of several names they come in turns.

    `also` are types that they may have, in addition to integers.
    """
    tokens = [*given]
    dtypes = _INTEGERS.union(also)
    # To check thousands one by one would take a millisecond.
    if not all(type(tensor) is Tensor and tensor.dim() == 1 and tensor.dtype in dtypes for tensor in tokens):
        count = len(names)
        tokens = [_tokens(f"{names[index % count]}[{index // count}]", ids, also) for index, ids in enumerate(tokens)]
    _common_device(tokens)
    if not tokens:
        return torch.empty(0, dtype=torch.int64, device="cpu"), []
    together = checks.integers(" and ".join(names), torch.cat(tokens), 1, also)
    return together, [*map(Tensor.numel, tokens)]


def largest_token(name: str, extremes: Tensor) -> int:
    """The larger; SharedPromptError for negative ones: what marks padding or ignored labels elsewhere is no token."""
    smallest, largest = extremes.tolist()
    if smallest < 0:
        raise SharedPromptError(name, "token ids >= 0", smallest)
    return int(largest)


def check_padding(pad_token_id: Any, tokens: Tensor, lengths: Sequence[int], *names: str) -> None:
    """Refuse the token of padding in sequences, where its rows would be a response's own.

    Args:
        pad_token_id: None where nothing is known of padding.
        tokens: of all sequences, on the host.
        lengths: of each; of several names sequences come in turns.
    """
    if pad_token_id is None:
        return
    padding = (tokens == checks.integer("pad_token_id", pad_token_id, 0, _MOST)).nonzero()
    if len(padding):
        first, ends = int(padding[0]), offsets_of(int64s(lengths))[1:]
        index = int(torch.searchsorted(ends, first, right=True))
        place = first - int(ends[index]) + lengths[index]
        expected = f"tokens alone, no padding (pad_token_id={pad_token_id}; pack_padded takes a padded batch)"
        name = f"{names[index % len(names)]}[{index // len(names)}]"
        raise SharedPromptError(name, expected, f"padding at place {place} of {lengths[index]}")


def extremes(tokens: Tensor) -> Tensor:
    """(2,) int64: the smallest and the largest of tokens, where they are; of none 0 and 0."""
    if tokens.numel() == 0:
        return tokens.new_zeros(2, dtype=torch.int64)
    return torch.stack([*torch.aminmax(tokens)]).long()


def selected(values: Tensor, mask: Tensor, count: int) -> Tensor:
    """values[mask], of which there are `count`. Indexing with a mask would wait for the GPU to count them."""
    mask = mask.reshape(-1) == 1
    places = torch.where(mask, mask.cumsum(0) - 1, count)  # all that is left out goes to one place after the others
    chosen = values.new_empty(count + 1).scatter_(0, places, values.reshape(-1))
    return chosen[:count]


def jagged(name: str, values: Any) -> Any:
    """A nested tensor without gaps; a type checker knows nothing of its methods."""
    if not isinstance(values, Tensor) or not values.is_nested or values.layout != torch.jagged:
        raise SharedPromptError(name, "a nested tensor with torch.jagged layout", checks.describe(values))
    nested: Any = values
    if nested.lengths() is not None:
        raise SharedPromptError(name, "no gaps between the sequences", "some, as torch.nested.narrow makes")
    return nested


def position_rows(values: Any) -> Tensor:
    """(n, T) of jagged (B, T_i) or (B, n, T_i) values, such as positions of time, height and width."""
    flat: Tensor = values.values()
    if values.dim() == 2:
        return flat[None]
    if getattr(values, "_ragged_idx", 2) == 2:
        return flat
    # Samples of one length: the number of rows was taken for what differs.
    return flat.unflatten(0, (len(values), -1)).transpose(0, 1).flatten(1)


# Lengths


def ones_of(mask: Tensor) -> tuple[Tensor, ...]:
    """(B,) each, on the device: where the ones of a row begin, how many, in how many runs; how many other values."""
    ones = mask == 1
    rises = (ones[:, 1:] & ~ones[:, :-1]).sum(1) + ones[:, :1].sum(1)
    return (ones.cumsum(1) == 0).sum(1), ones.sum(1), rises, (~ones & (mask != 0)).sum(1)


def prompt_lengths(name: str, lengths: Any, fetched: Sequence[Tensor], totals: Sequence[int]) -> list[int]:
    """Numbers of prompt tokens, one for each sequence and no longer than that."""
    given = checks.lengths(name, fetched[0].tolist() if fetched else lengths, len(totals), "samples")
    for index, (length, total) in enumerate(zip(given, totals)):
        if length > total:
            raise SharedPromptError(f"{name}[{index}]", f"0 .. {total}, its sequence's tokens", length)
    return given


# The copy to the host


def _common_device(tensors: Sequence[Tensor]) -> torch.device:
    device = tensors[0].device if tensors else torch.device("cpu")
    for other in {tensor.device for tensor in tensors} - {device}:
        raise SharedPromptError("device", f"{device} for all tensors, as the first", other)
    return device


def fetch(
    tensors: Sequence[Tensor], group_ids: GroupIds | None, count: int, like: str = "prompts"
) -> tuple[list[Tensor], list[Hashable] | None]:
    """The tensors (flat int64) and the group ids, one for each sample, on the host; one copy from a GPU."""
    device = _common_device(tensors)
    ids = None if group_ids is None else checks.group_ids(group_ids)
    if ids is not None:
        checks.check_count("group_ids", ids, count, like)
    if isinstance(ids, Tensor) and ids.device == device:
        *host, copied = to_host([*tensors, ids])
        return host, copied.tolist()
    return to_host(tensors), ids.tolist() if isinstance(ids, Tensor) else ids


# Equal keys


def bytes_of(tokens: Tensor, begins: Iterable[int], lengths: Iterable[int]) -> list[bytes]:
    """Bytes of each run of the tokens (int64 on the host, contiguous)."""
    words = memory_of(tokens)
    return [words[begin * WORD : (begin + length) * WORD].tobytes() for begin, length in zip(begins, lengths)]


def groups_of(keys: Iterable[Hashable]) -> list[list[int]]:
    """The places of equal keys, in the order of the first of them."""
    groups: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        groups.setdefault(key, []).append(index)
    return list(groups.values())


# What is scored, and what belongs to rows and groups


def joined_mask(loss_mask: Any, lengths: Sequence[int]) -> Tensor:
    """All masks in one, each as long as its sequence: int64, with -1 for what is neither 0 nor 1."""
    mask, sizes = token_lists(sequences_of("loss_mask", loss_mask, "masks"), "loss_mask", also=MASKS)
    checks.check_count("loss_mask", sizes, len(lengths), "sequences")
    for index, (size, length) in enumerate(zip(sizes, lengths)):
        if size != length:
            raise SharedPromptError(f"loss_mask[{index}]", f"{length} values (as its sequence)", size)
    return torch.where((mask == 0) | (mask == 1), mask, -1).long()


def scored_lens(mask: Tensor, lengths: Sequence[int]) -> list[int]:
    """How many tokens of each sequence the mask (on the host) trains."""
    bounds, sums = offsets_of(int64s(lengths)), offsets_of(mask)
    if mask.numel() and int(mask.min()) < 0:
        index = int(torch.searchsorted(bounds, int(mask.argmin()), right=True)) - 1
        raise SharedPromptError(f"loss_mask[{index}]", "0 and 1", "other values")
    firsts = bounds[:-1]
    # A sequence without tokens counts nothing.
    trains_first = take(sums, torch.minimum(firsts + 1, bounds[1:])) > take(sums, firsts)
    if trains_first.any():
        index = int(trains_first.nonzero()[0])
        raise SharedPromptError(f"loss_mask[{index}][0]", "0 for the first token, which no row scores", 1)
    return take(sums, bounds).diff().tolist()


def named(name: str, values: Any) -> dict[str, Any]:
    return {} if values is None else checks.instance(name, values, dict, " of names")


def listed(name: str, values: Any, lengths: Sequence[int]) -> Tensor:
    """Tensors of (..., L_i) values, one for each sequence, in one."""
    name = f"row_values[{name!r}]"
    values = sequences_of(name, values, "tensors")
    try:
        given = [torch.as_tensor(value) for value in values]
    except (TypeError, ValueError, RuntimeError):
        raise SharedPromptTypeError(name, "a list of tensors", checks.describe(values)) from None
    _common_device(given)
    checks.check_count(name, given, len(lengths), "sequences")
    for index, (tensor, length) in enumerate(zip(given, lengths)):
        if tensor.dim() == 0 or tensor.shape[-1] != length or tensor.shape[:-1] != given[0].shape[:-1]:
            expected = f"shape {(*given[0].shape[:-1], length)}, as sequence 0 and with a value for each token"
            raise SharedPromptError(f"{name}[{index}]", expected, tuple(tensor.shape))
    return torch.cat(given, -1)
