"""Packing of prompts with many responses into one row that holds each prompt once, and the way back.

    batch = pack_shared_prompts(prompts, responses)     # or pack_padded, pack_jagged
    logits = model(batch.input_ids, batch.position_ids, ...)      # attention: shared_prompt_attention(.., batch.layout)
    logprobs = unpack_logprobs(values_of_the_response_tokens, batch)

Samples are grouped by the equality of their prompts' tokens, in whatever order they come, and everything that comes
back is in their original order. The tokens are copied to the host once, for grouping; a few numbers for each sample go
back in one copy, and what they mean for each token is worked out on the device.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from .batch import PackedRow, Samples, SharedPromptBatch
from .batching import balance_groups, split_by_token_budget
from .checks import check_flag, explain
from .shared_prompt import (
    SharedPromptError,
    SharedPromptLayout,
    SharedPromptLayoutError,
    SharedPromptUnsupportedError,
    shared_prompt_attention,
)
from .transfer import to_host

__all__ = [
    "SharedPromptBatch",
    "SharedPromptError",
    "SharedPromptLayout",
    "SharedPromptLayoutError",
    "SharedPromptUnsupportedError",
    "balance_groups",
    "group_by_prompt",
    "pack_jagged",
    "pack_padded",
    "pack_shared_prompts",
    "shared_prompt_attention",
    "split_by_token_budget",
    "unpack_logprobs",
    "unpack_to_jagged",
]

BOUNDARIES = ("replicate", "gather")
_WORD = torch.int64.itemsize
_INTEGERS = frozenset((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))

Tokens = Tensor | Sequence[int]


def pack_shared_prompts(
    prompts: Sequence[Tokens],
    responses: Sequence[Tokens],
    *,
    group_ids: Iterable[Hashable] | None = None,
    **options: Any,
) -> SharedPromptBatch:
    """Pack one prompt and one response per sample, each prompt once for all samples that have it.

    Args:
        prompts: B sequences of token ids, 1-D integer tensors of one device or Python sequences; none empty.
        responses: B of them; a response may be empty.
        group_ids: (B,) hashable values or an integer tensor: samples share a prompt where their ids are equal, and
            their prompts are then checked to be equal. Needed where equal tokens do not mean equal prompts (images).
            None: by the tokens. A prompt that is only the beginning of another is another prompt.
        boundary: "replicate" puts the last prompt token before each response instead of at the context's end, so that a
            response's rows score all of its tokens (context = prompt[:-1], decoded = prompt[-1:] + response). "gather"
            keeps the prompt whole (context = prompt, decoded = response); its last row scores every first token.
        drop_last: leave out the last token of each response, whose logits nobody reads. It still has its label, but a
            model that shifts input_ids itself would not see it.
        max_responses_per_group: groups with more are split into several; None for no limit.
        pad_to_multiple_of: pad the row to a multiple of this; None for no padding.
        device: of the batch; None for that of the tokens.

    Raises:
        SharedPromptError: an empty prompt, unequal numbers of prompts and responses, ids that are no 1-D integers,
            samples of one group id with different prompts, or an option that is not as described.
    """
    if len(prompts) != len(responses):
        raise SharedPromptError(explain("responses", f"{len(prompts)} of them (as prompts)", len(responses)))
    given = _all_tokens([*chain.from_iterable(zip(prompts, responses))], ("prompts", "responses"))
    tokens = _joined(given)
    (fetched,), ids = _fetch([tokens], group_ids)
    lengths = [*map(Tensor.numel, given)]
    prompt_lens, response_lens = lengths[::2], lengths[1::2]
    keys = _bytes(fetched, [*accumulate(lengths, initial=0)][:-1:2], prompt_lens)
    return _pack(Samples(tokens, keys, prompt_lens, response_lens), ids, **options)


def pack_padded(
    input_ids: Tensor,
    attention_mask: Tensor,
    prompt_length: int | Sequence[int] | Tensor,
    *,
    group_ids: Iterable[Hashable] | None = None,
    **options: Any,
) -> SharedPromptBatch:
    """Pack a padded (B, S) batch as Hugging Face and TRL make it. Padding is what the mask says, whatever the token.

    Args:
        input_ids: (B, S) integers.
        attention_mask: (B, S) of 0 and 1 (or bool), 0 for padding.
        prompt_length: the number of leading columns that hold the prompts, in each of which, and in the columns behind
            them, the real tokens stand together on either side; or (B,) numbers of prompt tokens, for rows whose real
            tokens stand together and begin with the prompt.
        group_ids, options: as for `pack_shared_prompts`.

    Raises:
        SharedPromptError: as there; a mask with holes.
    """
    _check_ids("input_ids", input_ids, 2)
    _check_ids("attention_mask", attention_mask, 2, (torch.bool,))
    if attention_mask.shape != input_ids.shape:
        expected = f"shape {tuple(input_ids.shape)} (as input_ids)"
        raise SharedPromptError(explain("attention_mask", expected, tuple(attention_mask.shape)))
    given = _given_lengths("prompt_length", prompt_length)
    parts = {"attention_mask": attention_mask}
    if not given and hasattr(prompt_length, "__index__"):
        columns = operator.index(prompt_length)
        if not 0 <= columns <= input_ids.shape[1]:
            raise SharedPromptError(explain("prompt_length", f"0 .. {input_ids.shape[1]} columns", columns))
        prompts, responses = attention_mask[:, :columns], attention_mask[:, columns:]
        parts = {"attention_mask (prompts)": prompts, "attention_mask (responses)": responses}
    # The host needs some numbers of each row, not the mask.
    counts = torch.stack([one for mask in parts.values() for one in Ones.numbers(mask)])
    (ids, counted, *fetched), labels = _fetch([input_ids, counts, *given], group_ids)
    ones = [Ones(*numbers) for numbers in counted.view(len(parts), len(Ones._fields), len(input_ids)).tolist()]
    for name, one in zip(parts, ones):
        one.check(name)
    totals = ones[0].lengths
    if len(ones) == 2:
        prompt_lens, response_lens = totals, ones[1].lengths
    else:
        prompt_lens = _lengths("prompt_length", prompt_length, fetched, totals)
        response_lens = [total - length for total, length in zip(totals, prompt_lens)]
    rows = range(0, ids.numel(), max(1, input_ids.shape[1]))
    keys = _bytes(ids, map(int.__add__, rows, ones[0].begins), prompt_lens)
    tokens = _selected(input_ids, attention_mask, sum(prompt_lens) + sum(response_lens))
    return _pack(Samples(tokens, keys, prompt_lens, response_lens), labels, **options)


def pack_jagged(
    input_ids: Tensor,
    prompt_lens: Sequence[int] | Tensor,
    *,
    group_ids: Iterable[Hashable] | None = None,
    **options: Any,
) -> SharedPromptBatch:
    """Pack a nested tensor of sequences that begin with their prompts, as verl keeps them.

    Args:
        input_ids: nested (B, P_i + R_i) integers in the jagged layout, contiguous.
        prompt_lens: (B,) P_i.
        group_ids, options: as for `pack_shared_prompts`.

    Raises:
        SharedPromptError: as there; no jagged tensor; a prompt longer than its sequence.
    """
    if not isinstance(input_ids, Tensor) or not input_ids.is_nested or input_ids.layout != torch.jagged:
        got = type(input_ids).__name__
        raise SharedPromptError(explain("input_ids", "a nested tensor with torch.jagged layout", got))
    nested: Any = input_ids  # a type checker knows nothing of its methods
    if nested.dim() != 2 or nested.lengths() is not None:
        got = f"{nested.dim()} dimensions, {'no ' if nested.lengths() is None else ''}gaps"
        raise SharedPromptError(explain("input_ids", "2 dimensions and no gaps between the sequences", got))
    _check_ids("input_ids", nested.values(), 1)
    given = _given_lengths("prompt_lens", prompt_lens)
    (tokens, offsets, *fetched), labels = _fetch([nested.values(), nested.offsets(), *given], group_ids)
    totals = offsets.diff().tolist()
    lengths = _lengths("prompt_lens", prompt_lens, fetched, totals)
    begin, end = (int(offsets[at]) for at in (0, -1))
    response_lens = [total - length for total, length in zip(totals, lengths)]
    keys = _bytes(tokens, offsets.tolist(), lengths)
    return _pack(Samples(nested.values()[begin:end], keys, lengths, response_lens), labels, **options)


def group_by_prompt(
    prompts: Sequence[Tokens], *, group_ids: Iterable[Hashable] | None = None, verify: bool = True
) -> list[list[int]]:
    """Which samples have the same prompt: lists of their indices, in the order of their first samples.

    Args:
        prompts, group_ids: as for `pack_shared_prompts`.
        verify: whether to check that the prompts of a group id are equal; without it their tokens are not looked at.

    Raises:
        SharedPromptError: an empty prompt; samples of one group id with different prompts.
    """
    if len(prompts) == 0:
        return []
    given = _all_tokens([*prompts], ("prompts",))
    if group_ids is not None and not verify:
        _, ids = _fetch([], group_ids)
        return _groups(_check_group_ids(ids, len(given)))
    (tokens,), ids = _fetch([_joined(given)], group_ids)
    lengths = [*map(Tensor.numel, given)]
    return _group(_bytes(tokens, [*accumulate(lengths, initial=0)], lengths), ids)


def unpack_logprobs(
    values: Tensor, batch: SharedPromptBatch, *, fill: float = 0.0, per_row: bool | None = None
) -> Tensor:
    """Values of the response tokens as a padded tensor in the samples' original order; differentiable.

    Args:
        values: (sum R,) one for each response token, in the order of `token_index`; or (T,) one for each packed row, of
            which a response token takes that of the row that scores it. A leading dimension of size 1 is ignored.
        batch: where they come from.
        fill: what stands behind the responses.
        per_row: which of the two `values` is; None: as its length says.

    Returns:
        (B, max R) in the dtype of `values`.

    Raises:
        SharedPromptError: `values` has neither length, or has both and per_row is None.
    """
    values = _of_response_tokens(values, batch, per_row)
    samples, longest = len(batch.response_lens), max(batch.response_lens)
    filled = values.new_full((samples * longest,), fill)
    return filled.index_put((batch.padded_index,), values).view(samples, longest)


def unpack_to_jagged(values: Tensor, batch: SharedPromptBatch, *, per_row: bool | None = None) -> Tensor:
    """Values of the response tokens as a nested tensor of whole sequences, as verl's losses read them; differentiable.

    Args:
        values, batch, per_row: as for `unpack_logprobs`.

    Returns:
        nested (B, P_i + R_i): the value of response token j stands at P_i - 1 + j, where a model's unshifted output
        scores it; 0 elsewhere.
    """
    values = _of_response_tokens(values, batch, per_row)
    rows = values.new_zeros((batch.num_replicated_tokens,)).index_put((batch.jagged_index,), values)
    longest = max(map(int.__add__, batch.prompt_lens, batch.response_lens))
    shortest = min(map(int.__add__, batch.prompt_lens, batch.response_lens))
    return torch.nested.nested_tensor_from_jagged(rows, batch.jagged_offsets, min_seqlen=shortest, max_seqlen=longest)


def _of_response_tokens(values: Tensor, batch: SharedPromptBatch, per_row: bool | None) -> Tensor:
    if values.dim() == 2 and values.shape[0] == 1:
        values = values[0]
    tokens, rows = sum(batch.response_lens), batch.layout.num_tokens
    if per_row is None:
        if tokens == rows > 0 and values.shape == (rows,):
            raise SharedPromptError(explain("per_row", f"a bool, as {rows} values fit rows and response tokens", None))
        per_row = values.shape == (rows,)
    if values.shape != (rows if per_row else tokens,):
        expected = f"{rows} values, one for each row" if per_row else f"{tokens} (response tokens) or {rows} (rows)"
        raise SharedPromptError(explain("values", expected, f"shape {tuple(values.shape)}"))
    return values[batch.token_index] if per_row else values


# Samples: checks, the copy to the host, and which of them share a prompt


def _check_ids(name: str, ids: Any, dimensions: int, also: tuple[torch.dtype, ...] = ()) -> None:
    if not isinstance(ids, Tensor):
        raise SharedPromptError(explain(name, "an integer tensor", type(ids).__name__))
    integers = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if not integers and ids.dtype not in also:
        raise SharedPromptError(explain(name, "integers", ids.dtype))
    if ids.dim() != dimensions:
        raise SharedPromptError(explain(name, f"{dimensions} dimension(s)", f"shape {tuple(ids.shape)}"))


def _all_tokens(given: list[Tokens], names: Sequence[str]) -> list[Tensor]:
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
    _check_ids(name, tokens, 1)
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


def _given_lengths(name: str, lengths: Any) -> list[Tensor]:
    """The lengths if they are a tensor, to be fetched with the tokens."""
    if not isinstance(lengths, Tensor):
        return []
    _check_ids(name, lengths, 1)
    return [lengths]


def _lengths(name: str, lengths: Any, fetched: Sequence[Tensor], totals: Sequence[int]) -> list[int]:
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


def _joined(tokens: Sequence[Tensor]) -> Tensor:
    """All in one, contiguous."""
    _common_device(tokens)
    return torch.cat(list(tokens)) if tokens else torch.empty(0, dtype=torch.int64, device="cpu")


def _fetch(
    tensors: Sequence[Tensor], group_ids: Iterable[Hashable] | Tensor | None
) -> tuple[list[Tensor], list[Hashable] | None]:
    """The tensors (flat int64) and the group ids on the host; one copy from a GPU."""
    device = _common_device(tensors)
    ids: list[Hashable] | None = None
    if isinstance(group_ids, Tensor):
        _check_ids("group_ids", group_ids, 1)
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


def _selected(values: Tensor, mask: Tensor, count: int) -> Tensor:
    """values[mask] of `count` elements, which by itself would ask the GPU for their number."""
    mask = mask.reshape(-1) == 1
    places = torch.where(mask, mask.cumsum(0) - 1, count)  # what is left out shares the last one
    chosen = values.new_empty(count + 1).scatter_(0, places, values.reshape(-1))
    return chosen[:count]


def _check_group_ids(group_ids: Sequence[Hashable] | None, samples: int) -> Sequence[Hashable]:
    if group_ids is None or len(group_ids) != samples:
        got = None if group_ids is None else len(group_ids)
        raise SharedPromptError(explain("group_ids", f"{samples} of them (as prompts)", got))
    return group_ids


def _groups(keys: Iterable[Hashable]) -> list[list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        try:
            groups.setdefault(key, []).append(index)
        except TypeError:
            raise SharedPromptError(explain(f"group_ids[{index}]", "a hashable value", repr(key))) from None
    return list(groups.values())


def _bytes(tokens: Tensor, begins: Iterable[int], lengths: Sequence[int]) -> list[bytes]:
    """Of each prompt among the tokens (int64 on the host)."""
    if not lengths:
        raise SharedPromptError(explain("prompts", "at least one", 0))
    for index, length in enumerate(lengths):
        if length < 1:
            raise SharedPromptError(explain(f"prompts[{index}]", "at least one token", length))
    words = memoryview((ctypes.c_char * (len(tokens) * _WORD)).from_address(tokens.data_ptr()))
    return [words[begin * _WORD : (begin + length) * _WORD].tobytes() for begin, length in zip(begins, lengths)]


def _group(prompts: Sequence[bytes], group_ids: Sequence[Hashable] | None) -> list[list[int]]:
    """Samples with the same prompt, or with the same id, whose prompts must then be equal."""
    if group_ids is None:
        return _groups(prompts)
    groups = _groups(_check_group_ids(group_ids, len(prompts)))
    for members in groups:
        for other in members[1:]:
            if prompts[other] != prompts[members[0]]:
                expected = f"equal prompts of the samples with the id {group_ids[other]!r}"
                raise SharedPromptError(explain("group_ids", expected, f"samples {members[0]} and {other} differ"))
    return groups


# The packed row


@torch.inference_mode(False)  # tensors made in inference mode could not be saved for a later backward
def _pack(
    samples: Samples,
    group_ids: Sequence[Hashable] | None,
    *,
    boundary: str = "replicate",
    drop_last: bool = False,
    max_responses_per_group: int | None = None,
    pad_to_multiple_of: int | None = None,
    device: torch.device | str | None = None,
) -> SharedPromptBatch:
    if boundary not in BOUNDARIES:
        raise SharedPromptError(explain("boundary", " or ".join(map(repr, BOUNDARIES)), repr(boundary)))
    for name, value in (
        ("max_responses_per_group", max_responses_per_group),
        ("pad_to_multiple_of", pad_to_multiple_of),
    ):
        if value is not None and (not hasattr(value, "__index__") or value < 1):
            raise SharedPromptError(explain(name, "an int >= 1 or None", repr(value)))
    check_flag("drop_last", drop_last)
    groups = _group(samples.prompts, group_ids)
    if max_responses_per_group is not None:
        step = max_responses_per_group
        groups = [members[at : at + step] for members in groups for at in range(0, len(members), step)]
    row = PackedRow.build(samples, groups, 1 if boundary == "replicate" else 0, drop_last, pad_to_multiple_of or 1)
    device = samples.tokens.device if device is None else torch.device(device)
    return row.to_batch(samples, device)
