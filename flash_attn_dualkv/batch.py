"""A packed micro-batch, and how its row is put together from the tokens of its samples."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .checks import explain
from .shared_prompt import HostLayout, SharedPromptError, SharedPromptLayout
from .transfer import SeparatelyPickled, ints, same_device, to_device

IGNORED_LABEL = -100
PADDING_TOKEN = 0  # any id that every vocabulary has


@dataclass(frozen=True, eq=False)
class SharedPromptBatch(SeparatelyPickled):
    """A packed micro-batch. T rows; B samples, of which sample i has P_i prompt and R_i response tokens.

    Attributes:
        input_ids: (T,) int64.
        position_ids: (T,) int64, the position of each row in its own sequence, from 0; 0 in padding.
        layout: what the attention layers need.
        labels: (T,) int64, the next token of each response row; -100 in contexts and padding and where there is none.
            With boundary "gather" the first token of a response has no row of its own, hence no label.
        token_index: (sum R,) int64, the row whose logits score each response token, sample by sample in original order.
        targets: (sum R,) int64, the response tokens themselves in that order.
        response_lens: (B,) R_i in original order.
        prompt_lens: (B,) P_i in original order.
        order: (B,), response s of the layout is that of sample order[s].
        multiplicity: (T,) int64, how many sequences the row stands for: the responses of its group for a context row, 1
            for a response row, 0 for padding.
        padded_index: (sum R,) int64, place of each response token in a flattened (B, max R) tensor.
        jagged_index: (sum R,) int64, place of the row that scores each response token in the B sequences of P_i + R_i.
        jagged_offsets: (B+1,) int64, where those sequences begin.
    """

    input_ids: Tensor
    position_ids: Tensor
    layout: SharedPromptLayout
    labels: Tensor
    token_index: Tensor
    targets: Tensor
    response_lens: tuple[int, ...]
    prompt_lens: tuple[int, ...]
    order: tuple[int, ...]
    multiplicity: Tensor
    padded_index: Tensor
    jagged_index: Tensor
    jagged_offsets: Tensor

    @property
    def num_replicated_tokens(self) -> int:
        """sum(P_i + R_i): the tokens of the same samples with a prompt each."""
        return sum(self.prompt_lens) + sum(self.response_lens)

    @property
    def dedup_ratio(self) -> float:
        """rho = sum(P_i + R_i) / T: how many times fewer tokens the model sees; inf where it sees none."""
        rows = self.layout.num_tokens
        return self.num_replicated_tokens / rows if rows else math.inf

    def to(self, device: torch.device | str) -> SharedPromptBatch:
        """The batch on another device, in one copy: for batches that were packed in a data loader."""
        device = torch.device(device)
        if same_device(device, self.layout.device):
            return self
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        long = {name: value for name, value in own.items() if isinstance(value, Tensor)}
        moved = to_device(list(long.values()), self.layout.tensors, device)
        layout = self.layout.with_tensors(moved[len(long) :])
        changes: dict[str, Any] = dict(zip(long, moved))
        return replace(self, layout=layout, **changes)

    def metrics(self) -> dict[str, float]:
        """What sharing saves in this micro-batch, for a logger."""
        tokens = self.layout.num_tokens
        return {
            "shared_prompt/dedup_ratio": self.dedup_ratio,
            "shared_prompt/tokens": tokens,
            "shared_prompt/tokens_saved": self.num_replicated_tokens - tokens,
            "shared_prompt/num_prompts": self.layout.num_groups,
            "shared_prompt/responses_per_prompt": len(self.response_lens) / self.layout.num_groups,
        }


@dataclass(frozen=True)
class Samples:
    """The tokens of all samples on the host, prompt then response, one sample after the other (flat int64)."""

    tokens: Tensor
    prompt_lens: list[int]
    response_lens: list[int]
    device: torch.device  # where they came from

    def __post_init__(self) -> None:
        if not self.prompt_lens:
            raise SharedPromptError(explain("prompts", "at least one", 0))
        for index, length in enumerate(self.prompt_lens):
            if length < 1:
                raise SharedPromptError(explain(f"prompts[{index}]", "at least one token", length))

    @cached_property
    def begins(self) -> list[int]:
        lengths = map(int.__add__, self.prompt_lens, self.response_lens)
        return list(accumulate(lengths, initial=0))


def _ranges(begins: Tensor, lengths: Tensor, places: Tensor) -> Tensor:
    """The integers of the ranges [begin, begin + length), one range after the other; `places` counts all of them."""
    firsts = begins - (lengths.cumsum(0) - lengths)
    return torch.repeat_interleave(firsts, lengths, output_size=len(places)).add_(places)


def _take(values: Tensor, index: Tensor) -> Tensor:
    """values[index], which itself takes four times as long on the CPU."""
    return values.index_select(0, index)


def _ints(values: Iterable[int]) -> Tensor:
    return ints(values, torch.int64)


@dataclass(frozen=True)
class PackedRow:
    """The packed row as runs of the samples' tokens: those of the contexts, then those of the responses."""

    groups: list[list[int]]
    shift: int  # prompt tokens before each response: 1 or 0
    context_lens: list[int]
    decoded_lens: list[int]
    host: HostLayout
    pad: int

    @staticmethod
    def build(samples: Samples, groups: list[list[int]], shift: int, drop_last: bool, multiple: int) -> PackedRow:
        context_lens = [samples.prompt_lens[members[0]] - shift for members in groups]
        added = shift - 1 if drop_last else shift
        order = (index for members in groups for index in members)
        decoded_lens = [max(0, samples.response_lens[index] + added) for index in order]
        host = HostLayout.build(context_lens, decoded_lens, [*accumulate(map(len, groups), initial=0)])
        rows = sum(context_lens) + sum(decoded_lens)
        return PackedRow(groups, shift, context_lens, decoded_lens, host, -rows % multiple)

    def to_batch(self, samples: Samples, device: torch.device) -> SharedPromptBatch:
        """Everything on the device, in one copy."""
        order = [index for members in self.groups for index in members]
        long = [*self._by_row(samples, order), *self._by_token(samples, order)]
        moved = to_device(long, self.host.tensors(), device)
        input_ids, position_ids, labels, multiplicity, token_index, targets, padded, jagged, offsets = moved[:9]
        cu_seqlens_context, cu_seqlens_decoded, segments, groups = moved[9:]
        contexts, rows = self.host.cu_seqlens_context[-1], self.host.cu_seqlens_decoded[-1]
        layout = SharedPromptLayout(
            cu_seqlens_context,
            cu_seqlens_decoded,
            segments,
            groups,
            group_offsets=tuple(accumulate(map(len, self.groups), initial=0)),
            context_lens=tuple(self.context_lens),
            decoded_lens=tuple(self.decoded_lens),
            max_context=max(self.context_lens),
            max_decoded=max(self.decoded_lens),
            max_sequence=self.host.max_sequence,
            num_context_tokens=contexts,
            num_tokens=contexts + rows + self.pad,
            pad=self.pad,
        )
        return SharedPromptBatch(
            input_ids, position_ids, layout, labels, token_index, targets, tuple(samples.response_lens),
            tuple(samples.prompt_lens), tuple(order), multiplicity, padded, jagged, offsets,
        )  # fmt: skip

    def _by_row(self, samples: Samples, order: list[int]) -> tuple[Tensor, ...]:
        """input_ids, position_ids, labels, multiplicity: (T,) each."""
        begins = samples.begins
        decoded_positions = [samples.prompt_lens[index] - self.shift for index in order]
        sources = [begins[members[0]] for members in self.groups]
        sources += [begins[index] + position for index, position in zip(order, decoded_positions)]
        lengths = _ints([*self.context_lens, *self.decoded_lens])
        rows, contexts = self.host.cu_seqlens_decoded[-1], self.host.cu_seqlens_context[-1]
        places = torch.arange(contexts + rows, device="cpu")
        source = _ranges(_ints(sources), lengths, places)
        positions = _ranges(_ints([0] * len(self.groups) + decoded_positions), lengths, places)
        multiplicity = _ints([*map(len, self.groups), *([1] * len(order))])
        multiplicity = multiplicity.repeat_interleave(lengths, output_size=contexts + rows)

        # The next token of a response's row stands behind it among the samples' tokens, unless its sample ends there.
        ends = _ints([begins[index + 1] for index in order])
        ends = ends.repeat_interleave(lengths[len(self.groups) :], output_size=rows)
        following = source[contexts:] + 1
        last = following == ends
        labels = torch.full_like(source, IGNORED_LABEL)
        labels[contexts:] = _take(samples.tokens, following.masked_fill(last, 0)).masked_fill_(last, IGNORED_LABEL)
        by_row = _take(samples.tokens, source), positions, labels, multiplicity
        if self.pad == 0:
            return by_row
        fills = PADDING_TOKEN, 0, IGNORED_LABEL, 0
        return tuple(torch.nn.functional.pad(one, (0, self.pad), value=fill) for one, fill in zip(by_row, fills))

    def _by_token(self, samples: Samples, order: list[int]) -> tuple[Tensor, ...]:
        """token_index, targets, padded_index, jagged_index: (sum R,) each, in original order; jagged_offsets (B+1,)."""
        contexts = self.host.cu_seqlens_context
        first_rows = [0] * len(order)
        for index, row in zip(order, self.host.cu_seqlens_decoded):
            first_rows[index] = contexts[-1] + row - (1 - self.shift)
        lengths, total = _ints(samples.response_lens), sum(samples.response_lens)
        places = torch.arange(total, device="cpu")
        token_index = _ranges(_ints(first_rows), lengths, places)
        if self.shift == 0:
            last_context_rows = [0] * len(order)
            for members, end in zip(self.groups, contexts[1:]):
                for index in members:
                    last_context_rows[index] = end - 1
            some = lengths > 0
            token_index[(lengths.cumsum(0) - lengths)[some]] = _ints(last_context_rows)[some]
        longest = max(samples.response_lens)
        padded = _ranges(torch.arange(len(order), device="cpu") * longest, lengths, places)
        offsets = _ints(samples.begins)
        jagged = _ranges(offsets[:-1] + _ints(samples.prompt_lens) - 1, lengths, places)
        # The row that predicts a token stands one before it in its sequence.
        return token_index, _take(samples.tokens, jagged + 1), padded, jagged, offsets
