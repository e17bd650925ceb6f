"""A packed micro-batch, and how its row is put together from the tokens of its samples."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import arguments
from ..layout import HostLayout, SharedPromptLayout
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
        max_token: the largest token id.
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
    max_token: int

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # The two were pickled apart.
        self.__dict__["layout"] = replace(self.layout, position_ids=self.position_ids)

    @property
    def scored_lens(self) -> tuple[int, ...]:
        """(B,) how many tokens of each sample rows score: its response."""
        return self.response_lens

    @property
    def num_rows(self) -> int:
        """T, padding included."""
        return self.layout.num_tokens

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
        """The batch on another device, in one copy: for batches that were packed in a data loader.

        Raises:
            SharedPromptError: there is no such device.
        """
        device = arguments.device(device)
        if same_device(device, self.layout.device):
            return self
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        long = {name: value for name, value in own.items() if isinstance(value, Tensor)}
        *moved, nodes = to_device(list(long.values()), [self.layout.nodes], device)
        changes: dict[str, Any] = dict(zip(long, moved))
        layout = self.layout.with_nodes(nodes, changes["position_ids"])
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
    """All samples of a micro-batch."""

    tokens: Tensor  # prompt then response, one sample after the other; any integer type, where they came from
    groups: list[list[int]]  # the samples of each prompt
    prompt_lens: list[int]
    response_lens: list[int]
    max_token: int


def take(values: Tensor, index: Tensor) -> Tensor:
    """values[index]; indexing takes four times as long on the CPU."""
    return values.index_select(0, index)


def expand(lengths: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Of runs that lie one after the other, `count` places in all: the run of each place, and the places themselves."""
    return torch.repeat_interleave(lengths, output_size=count), torch.arange(count, device=lengths.device)


def offsets_of(lengths: Tensor) -> Tensor:
    """(n+1,): where n runs one after the other begin, and where the last of them ends."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def int64s(values: Iterable[int]) -> Tensor:
    return ints(values, torch.int64)


class Runs(NamedTuple):
    """The packed row as runs of neighbouring tokens: the contexts, then the responses. (runs,) each.

    Row r, which lies in run i, holds token r + token_offsets[i] of all samples' tokens, at the position
    r + position_offsets[i], and has a label if r < label_ends[i].
    """

    lengths: Tensor
    token_offsets: Tensor
    position_offsets: Tensor
    multiplicities: Tensor
    label_ends: Tensor

    def rows(self, tokens: Tensor, count: int) -> tuple[Tensor, ...]:
        """input_ids, position_ids, labels, multiplicity: (count,) each."""
        run, place = expand(self.lengths, count)
        source = take(self.token_offsets, run).add_(place)
        positions = take(self.position_offsets, run).add_(place)
        # The next token of a row stands behind its own among the samples' tokens.
        labels = take(tokens, (source + 1).clamp_(max=len(tokens) - 1))
        labels.masked_fill_(place >= take(self.label_ends, run), IGNORED_LABEL)
        return take(tokens, source), positions, labels, take(self.multiplicities, run)


class Responses(NamedTuple):
    """The responses in original order, (samples,) each.

    Response token t (counted over all responses), which lies in response i, is scored by row t + row_offsets[i]; the
    first one of a response, t = first_tokens[i], by first_rows[i]. Its place among the padded responses is
    t + padded_offsets[i], that among the whole sequences t + jagged_offsets[i].
    """

    lengths: Tensor
    first_tokens: Tensor
    first_rows: Tensor
    row_offsets: Tensor
    padded_offsets: Tensor
    jagged_offsets: Tensor

    def by_token(self, tokens: Tensor, count: int) -> tuple[Tensor, ...]:
        """token_index, targets, padded_index, jagged_index: (count,) each."""
        response, place = expand(self.lengths, count)
        is_first = place == take(self.first_tokens, response)
        following = take(self.row_offsets, response).add_(place)
        token_index = torch.where(is_first, take(self.first_rows, response), following)
        padded = take(self.padded_offsets, response).add_(place)
        jagged = take(self.jagged_offsets, response).add_(place)
        # The row that predicts a token stands one before it in its sequence.
        return token_index, take(tokens, jagged + 1), padded, jagged


@dataclass(frozen=True)
class PackedRow:
    """The contexts and the responses in the order of the packed row."""

    groups: list[list[int]]
    group_offsets: list[int]
    order: list[int]  # the samples, group by group
    shift: int  # prompt tokens before each response: 1 or 0
    context_lens: list[int]
    decoded_lens: list[int]
    host: HostLayout
    pad: int

    @staticmethod
    def build(samples: Samples, groups: list[list[int]], shift: int, drop_last: bool, multiple: int) -> PackedRow:
        context_lens = [samples.prompt_lens[members[0]] - shift for members in groups]
        added = shift - 1 if drop_last else shift
        order = [index for members in groups for index in members]
        own = [samples.response_lens[index] for index in order]
        decoded_lens = [length + added if length + added > 0 else 0 for length in own]
        group_offsets = [*accumulate(map(len, groups), initial=0)]
        host = HostLayout.of_prompts(context_lens, decoded_lens, group_offsets)
        pad = -(sum(context_lens) + sum(decoded_lens)) % multiple
        return PackedRow(groups, group_offsets, order, shift, context_lens, decoded_lens, host, pad)

    def to_batch(self, samples: Samples, device: torch.device) -> SharedPromptBatch:
        """Everything on the device: a few numbers a sample are copied, and the tokens if they are elsewhere."""
        small = self._numbers(samples, int64s(self.order))
        is_there = same_device(samples.tokens.device, device)
        long = small if is_there else [*small, samples.tokens.cpu()]
        moved = to_device(long, [self.host.nodes], device)
        middle = len(Runs._fields)
        end = middle + len(Responses._fields)
        runs, responses, jagged_offsets = Runs(*moved[:middle]), Responses(*moved[middle:end]), moved[end]
        tokens = samples.tokens.long() if is_there else moved[end + 1]
        count = sum(self.context_lens) + sum(self.decoded_lens)
        input_ids, position_ids, labels, multiplicity = self._padded(runs.rows(tokens, count))
        token_index, targets, padded, jagged = responses.by_token(tokens, sum(samples.response_lens))
        layout = self.host.layout(moved[-1], self.pad, position_ids)
        return SharedPromptBatch(
            input_ids, position_ids, layout, labels, token_index, targets, tuple(samples.response_lens),
            tuple(samples.prompt_lens), tuple(self.order), multiplicity, padded, jagged, jagged_offsets,
            samples.max_token,
        )  # fmt: skip

    def _numbers(self, samples: Samples, order: Tensor) -> list[Tensor]:
        """`Runs`, `Responses` and jagged_offsets of the batch, on the host."""
        prompt_lens, response_lens = int64s(samples.prompt_lens), int64s(samples.response_lens)
        begins = offsets_of(prompt_lens + response_lens)  # of the samples among the tokens
        sizes, of_context = (
            int64s(map(len, self.groups)),
            torch.zeros(len(self.groups), dtype=torch.int64, device="cpu"),
        )
        first_members = int64s(members[0] for members in self.groups)

        lengths = int64s([*self.context_lens, *self.decoded_lens])
        rows = lengths.cumsum(0) - lengths
        decoded_rows = rows[len(sizes) :]
        positions = torch.cat([of_context, prompt_lens[order] - self.shift])
        tokens = begins[torch.cat([first_members, order])] + positions
        # All but the last token of a response, and the prompt tokens before it, are followed by another.
        label_ends = decoded_rows + response_lens[order] + self.shift - 1
        runs = Runs(
            lengths,
            tokens - rows,
            positions - rows,
            torch.cat([sizes, torch.ones_like(order)]),
            torch.cat([of_context, label_ends]),
        )

        places = torch.arange(len(order), device="cpu")
        first_tokens = response_lens.cumsum(0) - response_lens
        own_rows = torch.empty_like(order).index_copy_(0, order, decoded_rows + self.shift)  # of its first token
        first_rows = own_rows - 1
        if self.shift == 0:  # the row before it is that of the context's last token
            last_rows = rows[: len(sizes)] + lengths[: len(sizes)] - 1
            first_rows[order] = last_rows.repeat_interleave(sizes, output_size=len(order))
        responses = Responses(
            response_lens,
            first_tokens,
            first_rows,
            own_rows - first_tokens - 1,
            places * max(samples.response_lens) - first_tokens,
            begins[:-1] + prompt_lens - first_tokens - 1,
        )
        return [*runs, *responses, begins]

    def _padded(self, by_row: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self.pad == 0:
            return by_row
        fills = PADDING_TOKEN, 0, IGNORED_LABEL, 0
        return tuple(torch.nn.functional.pad(one, (0, self.pad), value=fill) for one, fill in zip(by_row, fills))
