"""Packing of token sequences as a prefix tree: one row that holds every shared beginning once, and the way back.

    batch = pack_prefix_tree(sequences, loss_mask=masks)
    logits = ...                                   # of a model whose rows attend along their paths
    logprobs = logits.log_softmax(-1)[batch.token_index, batch.targets]
    unpacked = unpack_logprobs(logprobs, batch)    # (B, width)

Attention along paths is `shared_prompt_attention(q, k, v, batch.layout)`, or `flash_attn_tree_varlen_func`.

`group_by_prefix` finds the same nodes without packing them: for `data.tree_split`, and for passes over some of the
sequences in which nodes are to begin where they do among all of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from operator import lt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..checks import MAX_ROWS, explain
from ..errors import SharedPromptError
from ..host import SeparatelyPickled, ints, same_device, to_device, untraced
from ..layout import HostLayout, SharedPromptLayout
from .batch import IGNORED_LABEL, LABELS_ADVICE, PADDING_TOKEN, expand, int64s, offsets_of, take
from .pack import BOUNDARIES, Boundary
from .samples import (
    GroupIds,
    Tokens,
    all_tokens,
    check_count,
    check_token_ids,
    extremes,
    fetch,
    joined,
    selected,
    sequences_of,
)
from .trie import Nodes, PrefixTree, build_nodes, nodes_between

# A node's last tile of keys is half empty for every row below it: 40 of 80 keys in the forward and 64 of 128 in the
# backward, some 55 pairs a row where both are weighed by their work. A token costs a model of 2 to 8 billion parameters
# as much as 10,000 to 20,000 pairs. So a border above R rows costs about R / 350 to R / 175 tokens: 64 for 11K to 22K.
MIN_SHARED = 64


@dataclass(frozen=True, eq=False)
class PrefixTreeBatch(SeparatelyPickled):
    """Sequences packed as a prefix tree. T rows, n nodes; B sequences, of which sequence i has L_i tokens.

    The row is [node_1 .. node_n][padding]. Nodes are depth first: a node, then its subtree, so that the rows of both
    lie together. A row attends to the rows of its node up to its own and to all of its node's ancestors.

    Attributes:
        input_ids: (T,) int64.
        position_ids: (T,) int64, the position of each row in its sequences, from 0; 0 in padding.
        layout: what the attention layers need; it has the rows and the parents of the nodes on the host.
        cu_seqlens: (n+1,) int32, node i has the rows [i] .. [i+1] - 1; for `flash_attn_tree_varlen_func`, like
        parents: (n,) int32, the node that each node continues; -1 for the roots.
        row_index: (sum L,) int64, the row of every token of every sequence, in original order.
        token_index: (trained tokens,) int64, the row whose logits score each trained token, sequence by sequence in
            original order: that of the token before it. A row before a branch scores several different tokens.
        targets: (trained tokens,) int64, the trained tokens themselves in that order.
        row_labels: (T,) int64, the first of the trained tokens that a row scores; -100 where there is none. With
            boundary "replicate" a row scores no other token, though it may score it for several sequences; see
            `labels`.
        multiplicity: (T,) int64, how many sequences the row stands for; 0 for padding.
        padded_index: (trained tokens,) int64, place of each in a flattened tensor of (B, most trained tokens).
        scored_lens: (B,) trained tokens of each sequence.
        sequence_lens: (B,) L_i.
        leaves: (B,) the node whose path begins with each sequence; -1 for one without tokens.
        max_token: the largest token id.
    """

    input_ids: Tensor
    position_ids: Tensor
    layout: SharedPromptLayout
    cu_seqlens: Tensor
    parents: Tensor
    row_index: Tensor
    token_index: Tensor
    targets: Tensor
    row_labels: Tensor
    multiplicity: Tensor
    padded_index: Tensor
    scored_lens: tuple[int, ...]
    sequence_lens: tuple[int, ...]
    leaves: tuple[int, ...]
    max_token: int

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # The two were pickled apart.
        self.__dict__["layout"] = replace(self.layout, position_ids=self.position_ids)

    @property
    def labels(self) -> Tensor:
        """(T,) int64, `row_labels` for a loss over rows, which has one term for each trained token of each sequence.

        The first time it reads their number back, for which a GPU is waited for.

        Raises:
            SharedPromptError: rows score several tokens, or one token for several sequences: such a loss would count
                them once.
        """
        trained, rows = sum(self.scored_lens), self._labelled_rows
        if rows < trained:
            expected = f"a row for each of the {trained} trained tokens of all sequences"
            got = (
                f"{rows} rows with a label: a loss over them counts what sequences share once, and with "
                f'boundary="gather" one branch of several ({LABELS_ADVICE})'
            )
            raise SharedPromptError(explain("labels", expected, got))
        return self.row_labels

    @cached_property
    def _labelled_rows(self) -> int:
        return int((self.row_labels != IGNORED_LABEL).sum())

    @property
    def node_lens(self) -> tuple[int, ...]:
        """(n,) rows of each node."""
        return self.layout.node_lens

    @property
    def node_parents(self) -> tuple[int, ...]:
        """(n,) `parents` on the host."""
        return self.layout.node_parents

    @property
    def tree(self) -> PrefixTree:
        """The nodes as `group_by_prefix` gives them."""
        return PrefixTree(self.node_lens, self.node_parents, self.leaves, self.sequence_lens)

    @property
    def num_nodes(self) -> int:
        return self.layout.num_nodes

    @property
    def num_rows(self) -> int:
        """T, padding included."""
        return self.layout.num_tokens

    @property
    def pad(self) -> int:
        """Rows at the end that are padding."""
        return self.layout.pad

    @property
    def depth(self) -> int:
        """The most nodes on a path."""
        return self.layout.depth

    @property
    def dedup_ratio(self) -> float:
        """sum(L_i) / T: how many times fewer tokens the model sees; inf where it sees none."""
        return sum(self.sequence_lens) / self.num_rows if self.num_rows else math.inf

    @property
    def pair_ratio(self) -> float:
        """How many times fewer pairs of a query and a key that it sees there are than in the sequences alone."""
        ends: list[int] = []  # the last position of each node, counted from 1
        for length, parent in zip(self.node_lens, self.node_parents):
            ends.append(length + (0 if parent < 0 else ends[parent]))
        own = sum(_pairs(end) - _pairs(end - length) for end, length in zip(ends, self.node_lens))
        return sum(map(_pairs, self.sequence_lens)) / own if own else math.inf

    def to(self, device: torch.device | str) -> PrefixTreeBatch:
        """The batch on another device, in one copy: for batches that were packed in a data loader.

        Raises:
            SharedPromptError: there is no such device.
        """
        device = checks.device(device)
        if same_device(device, self.input_ids.device):
            return self
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        tensors = {name: one for name, one in own.items() if isinstance(one, Tensor)}
        long = {name: one for name, one in tensors.items() if one.dtype == torch.int64}
        short = {name: one for name, one in tensors.items() if name not in long}
        *moved, nodes = to_device([*long.values()], [*short.values(), self.layout.nodes], device)
        changes: dict[str, Any] = dict(zip((*long, *short), moved))
        return replace(self, layout=self.layout.with_nodes(nodes, changes["position_ids"]), **changes)

    def metrics(self) -> dict[str, float]:
        """What sharing saves in this micro-batch, for a logger."""
        return {
            "prefix_tree/dedup_ratio": self.dedup_ratio,
            "prefix_tree/pair_ratio": self.pair_ratio,
            "prefix_tree/tokens": self.num_rows,
            "prefix_tree/tokens_saved": sum(self.sequence_lens) - self.num_rows,
            "prefix_tree/num_nodes": self.num_nodes,
            "prefix_tree/depth": self.depth,
        }


def _pairs(length: int) -> int:
    """Pairs of a query and a key that it sees in a sequence alone."""
    return length * (length + 1) // 2


@untraced
def pack_prefix_tree(
    sequences: Sequence[Tokens],
    *,
    loss_mask: Sequence[Tokens] | None = None,
    boundary: Boundary = "gather",
    min_shared: int | None = None,
    max_depth: int | None = None,
    borders: Sequence[Sequence[int]] | None = None,
    group_ids: GroupIds | None = None,
    pad_to_multiple_of: int | None = None,
    device: torch.device | str | None = None,
) -> PrefixTreeBatch:
    """Pack sequences of any kind as a prefix tree: what they begin with in common is in the row once.

    Nodes follow each other in the order of their groups, and below a node in that of their tokens, whatever the order
    of the sequences. Sequences that are equal, or the beginning of another, share all of their rows at no cost, and
    without a node of their own.

    Args:
        sequences: B sequences of token ids, 1-D integer tensors of one device or Python sequences; any may be empty.
        loss_mask: B sequences of 0 and 1 (or bool), each as long as its tokens and on their device, 1 for the tokens to
            train. The first token of a sequence has no row that scores it: 0 there. A token may be trained in one
            sequence and not in another that shares it. None: all tokens but the first ones.
        boundary: "gather" shares all equal tokens; the row before a branch scores the first token of each child.
            "replicate" puts that row at the head of each child instead of at the node's end, so that no row scores two
            different tokens.
        min_shared: the fewest tokens that a node must save; where it would save fewer, its children have a copy each.
            The nodes are those with which the rows, and this many for each node with children, are fewest. None: 64.
        max_depth: the most nodes on a path; None for no limit. Nodes that save least are given up first.
        borders: where nodes are to begin, instead of min_shared and max_depth: B sequences of rising positions, from 1
            to the length of each sequence, as `PrefixTree.borders` gives them. Sequences share the nodes up to whose
            ends they agree in borders and tokens. The last bits of a row depend on where the nodes of its path begin:
            two passes give the same ones if their borders are the same, whatever other sequences each of them has.
        group_ids: (B,) hashable values or an integer tensor: only sequences with equal ids share tokens. For tokens
            that stand for different things (images). None: equal tokens are shared.
        pad_to_multiple_of: pad the row to a multiple of this; None for no padding.
        device: of the batch; None for that of the tokens.

    Raises:
        SharedPromptError: no sequences, tokens that are no integers >= 0 in one dimension, a mask that is not as
            described, or an option that is not as described.
    """
    if pad_to_multiple_of is not None:
        checks.integer("pad_to_multiple_of", pad_to_multiple_of, 1, MAX_ROWS)
    chosen = None if device is None else checks.device(device)
    rule = _Rule.checked(boundary, min_shared, max_depth, borders)
    given, lengths = _checked(sequences)
    tokens = [joined(given, "sequences")]
    if loss_mask is not None:
        tokens.append(_joined_mask(loss_mask, lengths))
    (ids, *mask), groups = fetch(tokens, group_ids)
    nodes, largest = rule.nodes(ids, lengths, groups)
    scored = _scored_lens(mask[0], lengths) if mask else [max(0, length - 1) for length in lengths]
    target = tokens[0].device if chosen is None else chosen
    return _PackedTree(nodes, lengths, scored, pad_to_multiple_of or 1, largest).to_batch(tokens, target)


@untraced
def group_by_prefix(
    sequences: Sequence[Tokens],
    *,
    boundary: Boundary = "gather",
    min_shared: int | None = None,
    max_depth: int | None = None,
    group_ids: GroupIds | None = None,
) -> PrefixTree:
    """What sequences share, without packing them: the nodes that `pack_prefix_tree` would make.

    Args:
        sequences, boundary, min_shared, max_depth, group_ids: as for `pack_prefix_tree`. Parts of the tree are then
            packed with its borders, the same boundary and the same ids.

    Raises:
        SharedPromptError: as there.
    """
    rule = _Rule.checked(boundary, min_shared, max_depth, None)
    given, lengths = _checked(sequences)
    (ids,), groups = fetch([joined(given, "sequences")], group_ids)
    return rule.nodes(ids, lengths, groups)[0].tree(lengths)


def _checked(sequences: Any) -> tuple[list[Tensor], list[int]]:
    """The sequences as tensors, and their lengths."""
    given = all_tokens([*sequences_of("sequences", sequences)], ("sequences",))
    if not given:
        raise SharedPromptError(explain("sequences", "at least one", 0))
    return given, [*map(Tensor.numel, given)]


class _Rule(NamedTuple):
    """Where nodes begin."""

    shift: int  # tokens before a branch that are left to the children
    min_shared: int
    max_depth: int | None
    borders: Sequence[Any] | None

    @staticmethod
    def checked(boundary: Any, min_shared: Any, max_depth: Any, borders: Any) -> _Rule:
        checks.choice("boundary", boundary, BOUNDARIES)
        if borders is not None:
            for name, value in (("min_shared", min_shared), ("max_depth", max_depth)):
                if value is not None:
                    raise SharedPromptError(explain(name, "None with borders, which say where nodes begin", value))
            borders = checks.items("borders", borders, "lists of positions")
        if min_shared is None:
            min_shared = MIN_SHARED
        if max_depth is not None:
            checks.integer("max_depth", max_depth, 1)
        return _Rule(
            1 if boundary == "replicate" else 0, checks.integer("min_shared", min_shared, 1), max_depth, borders
        )

    def nodes(self, ids: Tensor, lengths: list[int], groups: list[Any] | None) -> tuple[Nodes, int]:
        """Those of the tokens of all sequences (on the host), and the largest token."""
        if groups is not None:
            check_count(groups, len(lengths), "sequences")
        smallest, largest = extremes(ids).tolist()
        check_token_ids("sequences", smallest)
        if self.borders is not None:
            borders = _checked_borders(self.borders, lengths)
            return nodes_between(ids, lengths, groups, borders, shift=self.shift), largest
        limits: Any = dict(min_shared=self.min_shared, max_depth=self.max_depth)
        return build_nodes(ids, lengths, groups, shift=self.shift, **limits), largest


def _checked_borders(borders: Sequence[Any], lengths: Sequence[int]) -> list[Sequence[int]]:
    """Of each sequence, rising from 1 to its length."""
    if len(borders) != len(lengths):
        raise SharedPromptError(explain("borders", f"{len(lengths)} of them (as sequences)", len(borders)))
    checked: list[Sequence[int]] = []
    for index, (given, length) in enumerate(zip(borders, lengths)):
        is_plain = type(given) in (tuple, list) and {*map(type, given)} <= {int}
        own = given if is_plain else checks.lengths(f"borders[{index}]", given)
        if own and not (own[0] > 0 and own[-1] <= length and all(map(lt, own, own[1:]))):
            expected = f"rising positions from 1 to {length}"
            raise SharedPromptError(explain(f"borders[{index}]", expected, checks.describe(own)))
        checked.append(own)
    return checked


def _joined_mask(loss_mask: Any, lengths: Sequence[int]) -> Tensor:
    """All masks in one, each as long as its sequence."""
    masks = all_tokens([*sequences_of("loss_mask", loss_mask, "masks")], ("loss_mask",), (torch.bool,))
    if len(masks) != len(lengths):
        raise SharedPromptError(explain("loss_mask", f"{len(lengths)} of them (as sequences)", len(masks)))
    for index, (size, length) in enumerate(zip(map(Tensor.numel, masks), lengths)):
        if size != length:
            raise SharedPromptError(explain(f"loss_mask[{index}]", f"{length} values (as its sequence)", size))
    return joined(masks, "loss_mask").long()


def _scored_lens(mask: Tensor, lengths: Sequence[int]) -> list[int]:
    """How many tokens of each sequence the mask (on the host) trains."""
    smallest, largest = extremes(mask).tolist()
    if smallest < 0 or largest > 1:
        raise SharedPromptError(explain("loss_mask", "0 and 1", smallest if smallest < 0 else largest))
    bounds = offsets_of(int64s(lengths))
    sums = offsets_of(mask)
    firsts = bounds[:-1]
    # Of a sequence without tokens nothing is counted.
    trains_first = take(sums, torch.minimum(firsts + 1, bounds[1:])) > take(sums, firsts)
    if trains_first.any():
        index = int(trains_first.nonzero()[0])
        expected = "0 for the first token, which no row scores"
        raise SharedPromptError(explain(f"loss_mask[{index}][0]", expected, 1))
    scored: list[int] = take(sums, bounds).diff().tolist()
    return scored


class Spans(NamedTuple):
    """What each sequence has of each node on its path, from the root, sequence by sequence. (spans,) each.

    Token t (counted over all sequences), which lies in span i, has the row t + row_offsets[i] and stands at the
    position t + position_offsets[i].
    """

    lengths: Tensor
    row_offsets: Tensor
    position_offsets: Tensor

    @staticmethod
    def build(nodes: Nodes, lengths: Tensor) -> Spans:
        """On the host, one level of the tree after the other."""
        parents, begins, ends = map(int64s, nodes[:3])
        rows = offsets_of(ends - begins)[:-1]
        firsts = offsets_of(lengths)[:-1]  # of the sequences among all tokens
        sequence = lengths.nonzero().view(-1)
        node = take(nodes.leaves, sequence)
        levels = []
        while len(sequence):
            levels.append(torch.stack([sequence, node]))
            node = take(parents, node)
            rest = (node >= 0).nonzero().view(-1)
            sequence, node = take(sequence, rest), take(node, rest)
        if not levels:
            return Spans(lengths[:0], lengths[:0], lengths[:0])
        sequence, node = torch.cat(levels[::-1], 1)  # the roots first
        order = sequence.argsort(stable=True)
        sequence, node = take(sequence, order), take(node, order)
        first, begin = take(firsts, sequence), take(begins, node)
        # A sequence may end before the path does.
        sizes = (torch.minimum(take(ends, node), take(lengths, sequence)) - begin).clamp_(min=0)
        return Spans(sizes, take(rows, node) - begin - first, -first)


@dataclass(frozen=True)
class _PackedTree:
    """The nodes in the order of the packed row."""

    nodes: Nodes
    lengths: list[int]
    scored: list[int]
    multiple: int
    max_token: int

    @torch.inference_mode(False)  # tensors made in inference mode could not be saved for a later backward
    def to_batch(self, given: list[Tensor], device: torch.device) -> PrefixTreeBatch:
        """Everything on the device: a few numbers a span are copied, and the tokens and the mask if they are elsewhere.

        Args:
            given: the tokens of all sequences and, if there is one, their mask.
            device: of the batch.
        """
        node_lens = [end - begin for begin, end in zip(self.nodes.begins, self.nodes.ends)]
        host = HostLayout.of_tree(node_lens, self.nodes.parents)
        count = sum(node_lens)
        pad = -count % self.multiple
        scored = int64s(self.scored)
        firsts = scored.cumsum(0) - scored
        padded_offsets = torch.arange(len(scored), device="cpu") * max(self.scored) - firsts
        small = [*Spans.build(self.nodes, int64s(self.lengths)), scored, padded_offsets]
        offsets = ints(accumulate(node_lens, initial=0), torch.int32)
        short = [offsets, ints(self.nodes.parents, torch.int32), host.nodes]
        is_there = same_device(given[0].device, device)
        long = small if is_there else [*small, *(one.cpu().long() for one in given)]
        moved = to_device(long, short, device)
        spans, (scored, padded_offsets) = Spans(*moved[:3]), moved[3:5]
        tokens, *mask = [one.long() for one in given] if is_there else moved[5 : len(long)]
        cu_seqlens, parents, table = moved[len(long) :]

        span, place = expand(spans.lengths, len(tokens))
        row_index = take(spans.row_offsets, span).add_(place)
        positions = take(spans.position_offsets, span).add_(place)
        trained = selected(place, mask[0] if mask else positions.clamp(max=1), sum(self.scored))
        # The row that scores a token is that of the token before it.
        token_index, targets = take(row_index, trained - 1), take(tokens, trained)
        sequence, place = expand(scored, len(trained))

        def by_row(fill: int, values: Tensor) -> Tensor:
            """Of tokens that share a row all have the same value."""
            return tokens.new_full((count + pad,), fill).scatter_(0, row_index, values)

        position_ids = by_row(0, positions)
        return PrefixTreeBatch(
            by_row(PADDING_TOKEN, tokens),
            position_ids,
            host.layout(table, pad, position_ids),
            cu_seqlens,
            parents,
            row_index,
            token_index,
            targets,
            _first_targets(token_index, targets, count + pad),
            tokens.new_zeros(count + pad).index_add_(0, row_index, torch.ones_like(row_index)),
            take(padded_offsets, sequence).add_(place),
            tuple(self.scored),
            tuple(self.lengths),
            self.nodes.tree(self.lengths).leaves,
            self.max_token,
        )


def _first_targets(token_index: Tensor, targets: Tensor, rows: int) -> Tensor:
    """(rows,) of each row the target that comes first among those that it scores; -100 for none."""
    none = len(targets)
    places = torch.arange(none, device=targets.device)
    first = targets.new_full((rows,), none).scatter_reduce_(0, token_index, places, "amin")
    return take(torch.nn.functional.pad(targets, (0, 1), value=IGNORED_LABEL), first)
