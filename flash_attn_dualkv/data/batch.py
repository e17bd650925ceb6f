"""A packed micro-batch, and how its row is put together from the tokens of its samples."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain, repeat
from operator import add, sub
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import checks
from ..checks import explain
from ..errors import SharedPromptError
from ..host import SeparatelyPickled, ints, same_device, to_device, written
from ..layout import HostLayout, SharedPromptLayout, mark_packed
from ..nodes import COLUMNS

Made = TypeVar("Made", SharedPromptLayout, "SharedPromptBatch")

IGNORED_LABEL = -100
# What to do where labels cannot say everything.
LABELS_ADVICE = "score batch.targets with the rows of batch.token_index, as shared_prompt_forward does"
PADDING_TOKEN = 0  # any id that every vocabulary has


@dataclass(frozen=True, eq=False)
class SharedPromptBatch(SeparatelyPickled):
    """A packed micro-batch. T rows; B samples, of which sample i has P_i prompt and R_i response tokens.

    Attributes:
        input_ids: (T,) int64.
        position_ids: (T,) int64, the position of each row in its own sequence, from 0; 0 in padding.
        layout: what the attention layers need.
        row_labels: (T,) int64, the next token of each response row; -100 in contexts and padding and where there is
            none. With boundary "gather" the first token of a response has no row of its own, hence no label; see
            `labels`.
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
    row_labels: Tensor
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
    def labels(self) -> Tensor:
        """(T,) int64, `row_labels` for a loss over rows, which has one term for each response token.

        Raises:
            SharedPromptError: rows score several tokens (boundary "gather"), so that labels leave some of them out.
        """
        is_whole = self.layout.node_lens[0] == self.prompt_lens[self.order[0]]  # of the first context
        if is_whole and any(self.response_lens):
            expected = 'a batch of boundary="replicate", whose every response token has a row of its own'
            got = f'one of "gather", whose labels leave out first tokens (or {LABELS_ADVICE})'
            raise SharedPromptError(explain("labels", expected, got))
        return self.row_labels

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
        device = checks.device(device)
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
    """Numbers in runs, one run behind the other: number k is max(0, k + 1 - equal) plus the offset of its run.

    So the first `equal` numbers stay the same within a run, and the others go up by one. (runs,) each.
    """

    begins: Tensor  # the first k of each run
    jumps: Tensor  # its offset less that of the run before; of the first run, its offset

    @staticmethod
    def place(lengths: Tensor, firsts: Tensor, equal: int) -> None:
        """On the host: lengths of runs become their begins, and their first numbers become their jumps."""
        offsets = lengths.cumsum(0).sub_(lengths)
        lengths.copy_(offsets)
        torch.sub(firsts, offsets.sub_(equal - 1).clamp_(min=0), out=offsets)
        firsts.copy_(offsets)
        firsts[1:].sub_(offsets[:-1])

    def numbers(self, equal: int, rising: int) -> Tensor:
        """(equal + rising + 1,): all of them, and one more, behind which nothing lies: empty runs may begin there."""
        steps = self.jumps.new_ones(equal + rising + 1)
        steps[:equal].zero_()
        return steps.scatter_add_(0, self.begins, self.jumps).cumsum_(0)


def on_device(tokens: Tensor, device: torch.device) -> Tensor:
    """The tokens; in one copy if they are elsewhere."""
    return tokens if same_device(tokens.device, device) else to_device([tokens.cpu()], (), device)[0]


def batch_of(
    input_ids: Tensor,
    position_ids: Tensor,
    labels: Tensor,
    multiplicity: Tensor,
    token_index: Tensor,
    targets: Tensor,
    padded_index: Tensor,
    jagged_index: Tensor,
    jagged_offsets: Tensor,
    nodes: Tensor,
    node_lens: tuple[int, ...],
    node_parents: tuple[int, ...],
    order: tuple[int, ...],
    max_sequence: int,
    mean_keys: int,
    prompt_lens: tuple[int, ...],
    response_lens: tuple[int, ...],
    max_token: int,
) -> SharedPromptBatch:
    """The batch of what the compiled module has packed: the same, bit by bit, as `packed_by_operators` makes."""
    rows = len(input_ids)
    mark_packed(position_ids)
    layout = _made(
        SharedPromptLayout, nodes, node_lens, node_parents, max_sequence, mean_keys, rows, rows - sum(node_lens), False,
        position_ids,
    )  # fmt: skip
    return _made(
        SharedPromptBatch, input_ids, position_ids, layout, labels, token_index, targets, response_lens, prompt_lens,
        order, multiplicity, padded_index, jagged_index, jagged_offsets, max_token,
    )  # fmt: skip


def _made(kind: type[Made], *values: Any) -> Made:
    """An instance with these fields. The __init__ of a frozen class, which sets each by a call, takes 10 us more."""
    made = object.__new__(kind)
    made.__dict__.update(zip(kind.__dataclass_fields__, values, strict=True))
    return made


@torch.inference_mode(False)  # tensors made in inference mode could not be saved for a later backward
def packed_by_operators(
    samples: Samples, groups: list[list[int]], shift: int, drop_last: bool, multiple: int, device: torch.device
) -> SharedPromptBatch:
    """The samples as one row of tokens.

    Args:
        samples: what is packed.
        groups: the samples of each prompt, of those that share its copy.
        shift: prompt tokens before each response: 1 or 0.
        drop_last: whether the last token of each response is left out.
        multiple: the row is padded to a multiple of this.
        device: of the batch.
    """
    return PackedRow.build(samples, groups, shift, drop_last, multiple).to_batch(samples, device)


@dataclass(frozen=True)
class PackedRow:
    """The contexts and the responses in the order of the packed row."""

    groups: list[list[int]]
    order: list[int]  # the samples, group by group
    shift: int  # prompt tokens before each response: 1 or 0
    drop_last: bool
    context_lens: list[int]
    decoded_lens: list[int]
    host: HostLayout
    pad: int

    @staticmethod
    def build(samples: Samples, groups: list[list[int]], shift: int, drop_last: bool, multiple: int) -> PackedRow:
        context_lens = [samples.prompt_lens[members[0]] - shift for members in groups]
        added = shift - 1 if drop_last else shift
        order = [*chain.from_iterable(groups)]
        own = [samples.response_lens[index] for index in order]
        decoded_lens = [length + added if length + added > 0 else 0 for length in own]
        host = HostLayout.of_prompts(context_lens, decoded_lens, [*accumulate(map(len, groups), initial=0)])
        pad = -(sum(context_lens) + sum(decoded_lens)) % multiple
        return PackedRow(groups, order, shift, drop_last, context_lens, decoded_lens, host, pad)

    def to_batch(self, samples: Samples, device: torch.device) -> SharedPromptBatch:
        """Everything on the device: a few numbers a sample are copied, and the tokens if they are elsewhere."""
        begins = [*accumulate(map(add, samples.prompt_lens, samples.response_lens), initial=0)]
        contexts, decoded = sum(self.context_lens), sum(self.decoded_lens)
        rows, scored = contexts + decoded, sum(samples.response_lens)
        equal, rising = rows + contexts, 2 * rows + decoded + 4 * scored
        lengths, firsts = ([*chain.from_iterable(one)] for one in zip(*self._runs(samples, begins)))
        runs = len(lengths)
        buffer = written([*lengths, *firsts, *begins, IGNORED_LABEL], self.host.table, device)
        Runs.place(buffer[:runs], buffer[runs : 2 * runs], equal)
        buffer = buffer.to(device, non_blocking=device.type == "cuda")
        sizes = [runs, runs, len(begins), 1, len(self.host.table) // 2]
        # No views of each other: to write to one does not spoil what autograd has saved of another.
        first, jumps, jagged_offsets, ignored, table = buffer.unsafe_split_with_sizes(sizes)
        nodes = table.view(torch.int32).view(-1, COLUMNS).data
        tokens = on_device(samples.tokens, device)

        sizes = [rows, 2 * rows + scored, rows, scored, scored, scored, 1]
        split = Runs(first, jumps).numbers(equal, rising).unsafe_split_with_sizes(sizes)
        multiplicity, places, position_ids, token_index, padded, jagged, _ = split
        # Behind all tokens is the label of rows without one.
        found = take(torch.cat([tokens, ignored]), places)
        labels, input_ids, targets = found.unsafe_split_with_sizes([rows, rows, scored])
        by_row = self._padded((input_ids, position_ids, labels, multiplicity))
        input_ids, position_ids, labels, multiplicity = by_row
        layout = self.host.layout(nodes, self.pad, position_ids)
        return SharedPromptBatch(
            input_ids, position_ids, layout, labels, token_index, targets, tuple(samples.response_lens),
            tuple(samples.prompt_lens), tuple(self.order), multiplicity, padded, jagged, jagged_offsets,
            samples.max_token,
        )  # fmt: skip

    def _runs(self, samples: Samples, begins: list[int]) -> list[tuple[list[int], list[int]]]:
        """Of each tensor of the batch the lengths of its runs and their first numbers; see `Runs`.

        Of tensors of tokens they are places among the tokens of all samples.

        Args:
            samples: what is packed.
            begins: (B+1,) the place of each sample's first token, and that behind all tokens.
        """
        order, groups, response_lens, end = self.order, self.groups, samples.response_lens, begins[-1]
        lens = [*self.context_lens, *self.decoded_lens]
        rows = [*accumulate(lens, initial=0)]
        # Of the first row of each response.
        positions = [samples.prompt_lens[index] - self.shift for index in order]
        places = [begins[index] + position for index, position in zip(order, positions)]
        # The label of a row is the token behind its own; the last row of a response has one only if that was dropped.
        labelled = [length - 1 if length and not self.drop_last else length for length in self.decoded_lens]
        unlabelled = map(sub, self.decoded_lens, labelled)
        labels = [place + 1 for place in places]
        # The first token of a response is scored by the row before its own or, for "gather", by the context's last.
        lasts = [behind - 1 for behind, members in zip(rows[1:], groups) for _ in members]
        scoring = rows[len(groups) : -1] if self.shift else lasts
        first_rows, other_rows = [0] * len(order), [0] * len(order)
        for index, first, row in zip(order, scoring, rows[len(groups) :]):
            first_rows[index], other_rows[index] = first, row + self.shift
        firsts = [1 if length else 0 for length in response_lens]
        others = map(sub, response_lens, firsts)
        targets = [*map(add, begins, samples.prompt_lens)]
        longest = max(response_lens)
        return [
            # Equal numbers, and then numbers that rise.
            ([*self.context_lens, sum(self.decoded_lens)], [*map(len, groups), 1]),  # multiplicity
            ([sum(self.context_lens)], [end]),  # labels of the contexts
            (_in_turns(labelled, unlabelled), _in_turns(labels, repeat(end))),  # and of the responses
            (lens, [*[begins[members[0]] for members in groups], *places]),  # input_ids
            (response_lens, targets),
            (lens, [*[0] * len(groups), *positions]),  # position_ids
            (_in_turns(firsts, others), _in_turns(first_rows, other_rows)),  # token_index
            (response_lens, [index * longest for index in range(len(order))]),  # padded_index
            (response_lens, [place - 1 for place in targets]),  # jagged_index
        ]

    def _padded(self, by_row: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if self.pad == 0:
            return by_row
        fills = PADDING_TOKEN, 0, IGNORED_LABEL, 0
        return tuple(torch.nn.functional.pad(one, (0, self.pad), value=fill) for one, fill in zip(by_row, fills))


def _in_turns(ones: Iterable[int], others: Iterable[int]) -> list[int]:
    return [*chain.from_iterable(zip(ones, others))]
