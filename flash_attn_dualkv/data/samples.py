# SPDX-License-Identifier: BSD-3-Clause
"""Sequences that are to be packed, as callers hold them: lists, padded tensors, jagged tensors.

Each reader checks what it is given and copies the tokens to the host once, where what they share is worked out.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..errors import SharedPromptError, say_once
from . import given
from .given import WORD, bytes_of, groups_of, named
from .images import images_of

RowValues = Mapping[str, Any]
GroupValues = Mapping[str, Sequence[Any]]


class Beside(NamedTuple):
    """Arguments of `pack_shared_prompts` for sequences, in addition to their tokens."""

    group_ids: Any = None
    row_values: Any = None
    group_values: Any = None
    images: Any = None


NOTHING = Beside()


@dataclass(frozen=True)
class Samples:
    """B checked sequences, with a copy of their tokens on the host.

    Attributes:
        ids: (sum L,) tokens of any integer type, one sequence after the other, where they were given.
        lengths: (B,) L_i.
        scored_lens: (B,) how many tokens of each are scored.
        max_token: the largest token.
        host: int64 on the host, with what must be equal for tokens to share a row: the tokens themselves, or keys.
        begins: (B,) where the sequences begin there.
        prompt_lens: (B,) tokens of the prompt, after which all are scored; None for sequences without prompts.
        gaps: (B,) padding between a prompt and its response on the host; empty for none.
        mask: (sum L,) 1 for the scored tokens, beside `ids`; None: the last ones of each sequence.
        group_ids: (B,) only sequences with equal ones share tokens; None: all may.
        row_values: by name, (..., sum L) what belongs to tokens.
        group_values: by name, B values of what belongs to prompts or trees.
        images: by name, B tensors or None.
        image_keys: (B,) equal numbers for equal images.
    """

    ids: Tensor
    lengths: Sequence[int]
    scored_lens: Sequence[int]
    max_token: int
    host: Tensor
    begins: Sequence[int]
    prompt_lens: Sequence[int] | None = None
    gaps: Sequence[int] = ()
    mask: Tensor | None = None
    group_ids: Sequence[Hashable] | None = None
    row_values: Mapping[str, Tensor] = field(default_factory=dict)
    group_values: GroupValues | None = None
    images: Mapping[str, Sequence[Tensor | None]] = field(default_factory=dict)
    image_keys: Sequence[int] = ()

    @cached_property
    def host_ids(self) -> Tensor:
        """(sum L,) what `host` has of the sequences, one after the other."""
        begins, parts = self.begins, [*zip(self.begins, self.lengths)]
        if self.gaps and self.prompt_lens:
            after = [*map(int.__add__, map(int.__add__, begins, self.prompt_lens), self.gaps)]
            parts = [*chain.from_iterable(zip(zip(begins, self.prompt_lens), zip(after, self.scored_lens)))]
        elif len(self.host) == sum(self.lengths):
            return self.host
        return torch.cat([self.host[begin : begin + length] for begin, length in parts])

    def beside(self, row_values: Mapping[str, Tensor], beside: Beside) -> Samples:
        """These samples with what belongs to their tokens and prompts."""
        images, keys = images_of(beside.images, len(self.lengths))
        return replace(self, row_values=row_values, group_values=beside.group_values, images=images, image_keys=keys)

    def groups(self) -> list[list[int]]:
        """Samples with the same prompt and images, or with the same id, where both must then be equal.

        Raises:
            SharedPromptError: an empty prompt, or no sample; samples of one id that differ.
        """
        lengths = self.prompt_lens or ()
        if not lengths:
            raise SharedPromptError("prompts", "at least one", 0)
        if 0 in lengths:
            raise SharedPromptError(f"prompts[{lengths.index(0)}]", "at least one token", 0)
        prompts = bytes_of(self.host, self.begins, lengths)
        images = self.image_keys or [0] * len(lengths)
        if self.group_ids is None:
            return groups_of(zip(_short_keys(prompts), images))
        groups = groups_of(self.group_ids)
        for first, other in ((members[0], other) for members in groups for other in members[1:]):
            for what, values in (("prompts", prompts), ("images", images)):
                if values[other] != values[first]:
                    expected = f"equal {what} of the samples with the id {self.group_ids[other]!r}"
                    raise SharedPromptError("group_ids", expected, f"samples {first} and {other} differ")
        return groups


def _short_keys(prompts: Iterable[bytes]) -> Iterator[Hashable]:
    """Keys that are equal for equal prompts only. To hash a prompt takes ten times as long as to compare it.

    Prompts with the same bytes at some places are compared with the first of them; only those that differ are hashed.
    """
    first: dict[bytes, bytes] = {}
    for prompt in prompts:
        some = prompt[:: 8 * WORD]
        yield some if first.setdefault(some, prompt) == prompt else (prompt,)


# Readers


def read_prompts(prompts: Any, responses: Any, beside: Beside = NOTHING, *, pad_token_id: Any = None) -> Samples:
    """Arguments of `pack_shared_prompts`."""
    prompts = given.sequences_of("prompts", prompts)
    responses = given.sequences_of("responses", responses)
    checks.check_count("responses", responses, len(prompts), "prompts")
    tokens, lengths = given.token_lists(chain.from_iterable(zip(prompts, responses)), "prompts", "responses")
    # Where the tokens are: on the host they have just come from the GPU, and are in no cache.
    (host, bounds), ids = given.fetch([tokens, given.extremes(tokens)], beside.group_ids, len(prompts))
    largest = given.largest_token("prompts and responses", bounds)
    given.check_padding(pad_token_id, host, lengths, "prompts", "responses")
    prompt_lens, response_lens = lengths[::2], lengths[1::2]
    totals = [*map(int.__add__, prompt_lens, response_lens)]
    values = {
        name: given.listed(name, tensors, totals) for name, tensors in named("row_values", beside.row_values).items()
    }
    begins = [*accumulate(totals, initial=0)][:-1]
    texts = Samples(tokens, totals, response_lens, largest, host, begins, prompt_lens, (), None, ids)
    return texts.beside(values, beside)


def read_padded(input_ids: Any, attention_mask: Any, prompt_length: Any, beside: Beside = NOTHING) -> Samples:
    """Arguments of `pack_padded`."""
    input_ids = checks.integers("input_ids", input_ids, 2)
    attention_mask = checks.integers("attention_mask", attention_mask, 2, given.MASKS)
    if attention_mask.shape != input_ids.shape:
        expected = f"shape {tuple(input_ids.shape)} (as input_ids)"
        raise SharedPromptError("attention_mask", expected, tuple(attention_mask.shape))
    lens = [checks.integers("prompt_length", prompt_length, 1)] if isinstance(prompt_length, Tensor) else []
    parts = {"attention_mask": attention_mask}
    # Arrays of NumPy have a length and are indices, whatever their dimensions.
    is_list = hasattr(prompt_length, "__len__") and getattr(prompt_length, "ndim", 1) > 0
    if not lens and not is_list:
        columns = checks.integer("prompt_length", prompt_length, 0, input_ids.shape[1])
        prompts, responses = attention_mask[:, :columns], attention_mask[:, columns:]
        parts = {"attention_mask (prompts)": prompts, "attention_mask (responses)": responses}
    # The host needs some numbers of each row, not the mask.
    ones = [count for mask in parts.values() for count in given.ones_of(mask)]
    counts = torch.stack(ones).unflatten(0, (len(parts), -1))
    bounds = given.extremes(torch.where(attention_mask == 1, input_ids, 0))
    wanted = [input_ids, counts, bounds, *lens]
    (host, counted, bounds, *fetched), labels = given.fetch(wanted, beside.group_ids, len(input_ids))
    largest = given.largest_token("input_ids", bounds)
    (begins, lengths, *_), *others = numbers = counted.view(counts.shape).tolist()
    for name, (_, _, runs, wrong) in zip(parts, numbers):
        if any(wrong):
            raise SharedPromptError("attention_mask", "0 and 1", "other values")
        if max(runs, default=0) > 1:
            got = f"a hole in row {[count > 1 for count in runs].index(True)}"
            raise SharedPromptError(name, "ones that stand together in each row", got)
    rows = range(0, host.numel(), max(1, input_ids.shape[1]))
    gaps: list[int] = []
    if others:
        prompt_lens, (behind, response_lens, *_) = lengths, others[0]
        _say_where_prompts_end(columns, begins, lengths, response_lens)
        gaps = [columns + then - begin - length for begin, length, then in zip(begins, lengths, behind)]
    else:
        prompt_lens = given.prompt_lengths("prompt_length", prompt_length, fetched, lengths)
        response_lens = [total - length for total, length in zip(lengths, prompt_lens)]
    totals = [*map(int.__add__, prompt_lens, response_lens)]
    places = torch.arange(input_ids.numel(), device=input_ids.device)
    kept = given.selected(places, attention_mask, sum(totals))

    def flat(name: str, values: Any) -> Tensor:
        if not isinstance(values, Tensor) or values.shape[-2:] != input_ids.shape:
            expected = f"a tensor of shape (..., {len(input_ids)}, {input_ids.shape[1]}), as input_ids"
            raise SharedPromptError(f"row_values[{name!r}]", expected, checks.describe(values))
        return values.flatten(-2).index_select(-1, kept.to(values.device))

    tokens = input_ids.flatten().index_select(0, kept)
    values = {name: flat(name, tensor) for name, tensor in named("row_values", beside.row_values).items()}
    begins = [*map(int.__add__, rows, begins)]
    texts = Samples(tokens, totals, response_lens, largest, host, begins, prompt_lens, gaps, None, labels)
    return texts.beside(values, beside)


def _say_where_prompts_end(
    columns: int, begins: Sequence[int], lengths: Sequence[int], response_lens: Sequence[int]
) -> None:
    """Warns once if a row looks like a padded whole sequence, whose response is among the columns of prompts."""
    for index, (begin, length, response_len) in enumerate(zip(begins, lengths, response_lens)):
        if response_len == 0 and 0 < begin + length < columns:
            say_once(
                f"prompt_length: with {columns}, row {index} has {length} prompt tokens, padding behind them and no "
                "response. If rows are whole sequences, a prompt and its response together, give the number of prompt "
                "tokens of each row, (B,); if the response is empty, all is well",
                "prompt_length",
            )
            return


def read_jagged(
    input_ids: Any, prompt_lens: Any, beside: Beside = NOTHING, *, keys: Tensor | None = None, pad_token_id: Any = None
) -> Samples:
    """Arguments of `pack_jagged`; `keys`, (sum L,) int64 beside the tokens: only tokens with equal ones share a row."""
    nested = given.jagged("input_ids", input_ids)
    if nested.dim() != 2:
        raise SharedPromptError("input_ids", "2 dimensions", nested.dim())
    tokens = checks.integers("input_ids", nested.values(), 1)
    lens = [checks.integers("prompt_lens", prompt_lens, 1)] if isinstance(prompt_lens, Tensor) else []
    by_token = named("row_values", beside.row_values)
    by_token = {name: given.jagged(f"row_values[{name!r}]", nested) for name, nested in by_token.items()}
    wanted = [tokens, nested.offsets(), *lens, *(values.offsets() for values in by_token.values())]
    (host, offsets, *fetched), labels = given.fetch(wanted, beside.group_ids, len(nested))
    totals = offsets.diff().tolist()
    lengths = given.prompt_lengths("prompt_lens", prompt_lens, fetched[: len(lens)], totals)
    begin, end = (int(offsets[at]) for at in (0, -1))
    largest = given.largest_token("input_ids", given.extremes(host[begin:end]))
    given.check_padding(pad_token_id, host[begin:end], totals, "input_ids")
    response_lens = [total - length for total, length in zip(totals, lengths)]
    values = {}
    for (name, jagged), own in zip(by_token.items(), fetched[len(lens) :]):
        rows = given.position_rows(jagged)
        if rows.shape[-1] != len(tokens):
            raise SharedPromptError(f"row_values[{name!r}]", f"{len(tokens)} values (as input_ids)", rows.shape[-1])
        if not own.equal(offsets):
            expected = "the offsets of input_ids"
            raise SharedPromptError(f"row_values[{name!r}]", expected, f"others: {checks.describe(own)}")
        values[name] = (rows[0] if jagged.dim() == 2 else rows)[..., begin:end]
    host = host if keys is None else keys.cpu()
    begins = offsets[:-1].tolist()
    texts = Samples(tokens[begin:end], totals, response_lens, largest, host, begins, lengths, (), None, labels)
    return texts.beside(values, beside)


def read_sequences(
    sequences: Any, beside: Beside = NOTHING, *, loss_mask: Any = None, pad_token_id: Any = None, chosen: Any = None
) -> Samples:
    """Arguments of `pack_prefix_tree`; what is given for all sequences, and read for the chosen ones."""
    total = len(given.sequences_of("sequences", sequences))

    def pick(name: str, values: Any) -> Any:
        # What is given for all sequences is checked by who uses it.
        if values is None or chosen is None:
            return values
        own = checks.items(name, values, "values")
        checks.check_count(name, own, total, "sequences")
        return [own[index] for index in chosen]

    sequences = pick("sequences", sequences)
    if not len(sequences):
        raise SharedPromptError("sequences", "at least one", 0)
    tokens, lengths = given.token_lists(sequences, "sequences")
    group_ids = beside.group_ids
    if chosen is not None and isinstance(group_ids, Tensor):
        group_ids = checks.integers("group_ids", group_ids, 1).tolist()
    mask = None if loss_mask is None else given.joined_mask(pick("loss_mask", loss_mask), lengths)
    wanted = [tokens] if mask is None else [tokens, mask]
    (host, *marks), labels = given.fetch(wanted, pick("group_ids", group_ids), len(lengths), "sequences")
    largest = given.largest_token("sequences", given.extremes(host))
    given.check_padding(pad_token_id, host, lengths, "sequences")
    scored = given.scored_lens(marks[0], lengths) if marks else [max(0, length - 1) for length in lengths]
    by_token = {
        name: pick(f"row_values[{name!r}]", values) for name, values in named("row_values", beside.row_values).items()
    }
    by_root = {
        name: pick(f"group_values[{name!r}]", values)
        for name, values in named("group_values", beside.group_values).items()
    }
    values = {name: given.listed(name, tensors, lengths) for name, tensors in by_token.items()}
    begins = [*accumulate(lengths, initial=0)][:-1]
    return Samples(tokens, lengths, scored, largest, host, begins, None, (), mask, labels, values, by_root)
