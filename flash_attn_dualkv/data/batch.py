# SPDX-License-Identifier: BSD-3-Clause
"""A packed micro-batch, and how its row is put together from the tokens of its sequences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..errors import SharedPromptError, SharedPromptTypeError
from ..host import SeparatelyPickled, expand, int64s, kept, offsets_of, same_device, take, to_device, untraced
from ..layout import SharedPromptLayout
from ..nodes import visible_pairs
from .given import named, selected
from .prefix_tree import PrefixTree, Spans
from .samples import Samples

IGNORED_LABEL = -100
PADDING_TOKEN = 0  # any id that every vocabulary has


class Distinct(NamedTuple):
    """Scored tokens, those that several sequences share once.

    Attributes:
        chosen: (U,) int64, which of all scored tokens; None: all, as none is shared.
        places: (sum R,) int64, the place of each scored token among these; None where all are chosen.
    """

    chosen: Tensor | None = None
    places: Tensor | None = None

    def pick(self, values: Tensor) -> Tensor:
        """(sum R, ...) -> (U, ...)."""
        return values if self.chosen is None else values.index_select(0, self.chosen)

    def expand(self, values: Tensor) -> Tensor:
        """(U, ...) -> (sum R, ...); gradients are summed over the sequences."""
        return values if self.places is None else values.index_select(0, self.places)


@dataclass(frozen=True, eq=False)
class PackedBatch(SeparatelyPickled):
    """A packed micro-batch: T rows, n nodes; B sequences of L_i tokens, of which R_i are scored.

    The row is [node_1 .. node_n][padding], depth first: a node, then its subtree. A row attends to the rows of its node
    up to its own and to all of its node's ancestors. A sample is a sequence of a prompt and its scored response.

    Attributes:
        input_ids: (T,) int64.
        position_ids: (T,) int64, the position of each row in its sequences, from 0; 0 in padding.
        layout: what the attention layers need.
        tree: which tokens the sequences share, on the host.
        row_labels: (T,) int64, the first of the scored tokens that a row scores; -100 where there is none.
        token_index: (sum R,) int64, the row whose logits score each scored token, sequence by sequence in original
            order: that of the token before it. A row before a branch scores several different tokens.
        targets: (sum R,) int64, the scored tokens themselves in that order.
        padded_index: (sum R,) int64, place of each scored token in a flattened (B, max R) tensor.
        jagged_index: (sum R,) int64, place of the token before each scored one among the tokens of all sequences.
        jagged_offsets: (B+1,) int64, where the sequences begin there.
        source_index: (T,) int64, of each row one of the tokens that it stands for, among those of all sequences; -1 for
            padding.
        response_lens: (B,) R_i, of samples the tokens of the response.
        max_token: the largest token id.
        own_labels: whether each scored token is known to have a row of its own, without reading `row_labels`.
        row_values: by name, (..., T) what was given for the tokens, 0 in padding.
        group_values: by name, what was given for the sequences: one value for each root.
        group_images: by name, the images of each root; None for one without.
    """

    input_ids: Tensor
    position_ids: Tensor
    layout: SharedPromptLayout
    tree: PrefixTree
    row_labels: Tensor
    token_index: Tensor
    targets: Tensor
    padded_index: Tensor
    jagged_index: Tensor
    jagged_offsets: Tensor
    source_index: Tensor
    response_lens: tuple[int, ...]
    max_token: int
    own_labels: bool = False
    row_values: Mapping[str, Tensor] = field(default_factory=dict)
    group_values: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    group_images: Mapping[str, tuple[Tensor | None, ...]] = field(default_factory=dict)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        # They were pickled apart.
        self.__dict__["layout"] = replace(self.layout, position_ids=self.position_ids, input_ids=self.input_ids)

    # Sequences

    @property
    def sequence_lens(self) -> tuple[int, ...]:
        """(B,) L_i."""
        return self.tree.sequence_lens

    @property
    def prompt_lens(self) -> tuple[int, ...]:
        """(B,) L_i - R_i: tokens that are not scored, of samples those of the prompt."""
        return tuple(map(int.__sub__, self.sequence_lens, self.response_lens))

    @kept
    @untraced
    def row_index(self) -> Tensor:
        """(sum L,) int64, the row of every token of every sequence."""
        return self._rows_of(torch.arange(sum(self.sequence_lens), device=self.input_ids.device))

    @untraced
    def rows_of(self, tokens: Tensor) -> Tensor:
        """The rows of some tokens.

        Args:
            tokens: (n,) int64 on the batch's device or on the host, their places among the tokens of all sequences.

        Returns:
            (n,) int64, where the tokens are.

        Raises:
            SharedPromptError: tokens that are not as described; their values are only looked at on the CPU.
        """
        checks.indices("tokens", tokens, self.input_ids.device)
        count = self.num_replicated_tokens
        if tokens.device.type == "cpu" and ((tokens < 0) | (tokens >= count)).any():
            raise SharedPromptError("tokens", f"places among {count} tokens", tokens.tolist())
        return self._rows_of(tokens)

    @untraced
    def _rows_of(self, tokens: Tensor) -> Tensor:
        return Spans(*to_device([*Spans.of(self.tree)], tokens.device)).rows(tokens)

    @kept
    def last_rows(self) -> Tensor:
        """(B,) int64, the row of the last token of each sequence; SharedPromptError if one has none."""
        if 0 in self.sequence_lens:
            got = f"sequence {self.sequence_lens.index(0)} without any"
            raise SharedPromptError("sequences", "at least one token in each", got)
        return self._rows_of(self.jagged_offsets[1:] - 1)

    @kept
    def multiplicity(self) -> Tensor:
        """(T,) int64, how many sequences the row stands for; 0 for padding."""
        rows = self.row_index
        return torch.zeros_like(self.input_ids).index_add_(0, rows, torch.ones_like(rows))

    @kept
    def distinct(self) -> Distinct:
        """The scored tokens without repetition: of 149 rollouts of agents' turns, 1.05M are 338K.

        Waits for a GPU, because how many there are is not known without; not if `own_labels` says that all are.

        Raises:
            SharedPromptError: the batch has no values, on the meta device.
        """
        scored = len(self.token_index)
        if self.own_labels or not scored:
            return Distinct()
        self._check_has_values()
        own, number = self._rows_of(self.jagged_index + 1), torch.arange(scored, device=self.input_ids.device)
        first = torch.full_like(self.input_ids, scored).scatter_reduce_(0, own, number, "amin").index_select(0, own)
        is_first = first == number
        chosen = is_first.nonzero()[:, 0]
        if len(chosen) == scored:
            return Distinct()
        return Distinct(chosen, is_first.cumsum(0).sub_(1).index_select(0, first))

    @cached_property
    def late_layout(self) -> SharedPromptLayout | None:
        """The layout of layers before which the rows leave that score nothing; None if all stay."""
        return self.layout.reading(self.token_index)

    @kept
    def images(self) -> dict[str, Tensor]:
        """By the names of a model's inputs, the images of all roots in the order of the row; nothing without any."""
        present = {name: [image for image in values if image is not None] for name, values in self.group_images.items()}
        return {name: torch.cat(values) for name, values in present.items() if values}

    def expand(self, per_sequence: Tensor | Sequence[float]) -> Tensor:
        """A value of each sequence (an advantage) for each of its scored tokens, in the order of `token_index`.

        Args:
            per_sequence: (B, ...), a tensor or a list of numbers; differentiable. Not (B, 1): what comes of it would
                be broadcast against (sum R,) values to a matrix.

        Returns:
            (sum R, ...) on the batch's device.

        Raises:
            SharedPromptError: values that are not as described.
        """
        device, count = self.input_ids.device, len(self.response_lens)
        try:
            values = torch.as_tensor(per_sequence, device=device)
        except (TypeError, ValueError, RuntimeError):
            expected = "a tensor or a list of numbers"
            raise SharedPromptTypeError("per_sequence", expected, checks.describe(per_sequence)) from None
        if values.dim() == 0 or len(values) != count:
            raise SharedPromptError("per_sequence", f"{count} values (as sequences)", f"shape {tuple(values.shape)}")
        if values.shape[1:] == (1,):
            expected = f"shape ({count},), which values of tokens are multiplied with"
            raise SharedPromptError("per_sequence", expected, f"shape {tuple(values.shape)}")
        longest = max(1, *self.response_lens)
        return values.index_select(0, self.padded_index // longest)

    # Nodes and rows

    @kept
    def cu_seqlens(self) -> Tensor:
        """(n+1,) int32, node i has the rows [i] .. [i+1] - 1; for `flash_attn_tree_varlen_func`, like `parents`."""
        return offsets_of(self.layout.nodes[:, 1]).int()

    @kept
    def parents(self) -> Tensor:
        """(n,) int32, the node that each continues; -1 for roots."""
        return self.layout.nodes[:, 6].contiguous()

    @property
    def labels(self) -> Tensor:
        """(T,) int64, `row_labels` for a loss over rows, which has one term for each scored token of each sequence.

        Raises:
            SharedPromptError: rows score several tokens, or one token for several sequences: such a loss would count
                them once. To find that out, what a GPU has computed may be waited for. A batch without values, on meta.
        """
        scored = sum(self.response_lens)
        if not self.own_labels:
            self._check_has_values()
        rows = scored if self.own_labels else int((self.row_labels != IGNORED_LABEL).sum())
        if rows < scored:
            expected = f"a row for each of the {scored} scored tokens of all sequences"
            got = (
                f"{rows} rows with a label: a loss over them counts what sequences share once, and with "
                'boundary="gather" one branch of several (score batch.targets with the rows of batch.token_index, as '
                "shared_prompt_forward does)"
            )
            raise SharedPromptError("labels", expected, got)
        return self.row_labels

    def _check_has_values(self) -> None:
        if self.input_ids.is_meta:
            raise SharedPromptError("batch", "one whose tensors have values", "one on meta")

    # What is saved

    @property
    def num_replicated_tokens(self) -> int:
        """sum(L_i): the tokens of the same sequences without sharing."""
        return sum(self.sequence_lens)

    @property
    def num_pairs(self) -> int:
        """Pairs of a query and a key that it sees."""
        return sum(map(visible_pairs, self.tree.begins, self.tree.node_lens))

    @property
    def dedup_ratio(self) -> float:
        """rho = sum(L_i) / T: how many times fewer tokens the model sees; inf where it sees none."""
        rows = self.layout.num_tokens
        return self.num_replicated_tokens / rows if rows else math.inf

    @property
    def pair_ratio(self) -> float:
        """How many times fewer such pairs there are than in the sequences without sharing."""
        own = self.num_pairs
        return sum(visible_pairs(0, length) for length in self.sequence_lens) / own if own else math.inf

    def metrics(self) -> dict[str, float]:
        """Savings by sharing in this micro-batch, for a logger."""
        rows, prompts = self.layout.num_tokens, self.layout.num_groups
        return {
            "shared_prompt/dedup_ratio": self.dedup_ratio,
            "shared_prompt/pair_ratio": self.pair_ratio,
            "shared_prompt/tokens": rows,
            "shared_prompt/tokens_saved": self.num_replicated_tokens - rows,
            "shared_prompt/num_prompts": prompts,
            "shared_prompt/responses_per_prompt": len(self.response_lens) / max(1, prompts),
            "shared_prompt/num_nodes": self.layout.num_nodes,
            "shared_prompt/depth": self.layout.depth,
        }

    def to(self, device: torch.device | str) -> PackedBatch:
        """The batch on another device, in one copy: for batches that were packed in a data loader.

        Raises:
            SharedPromptError: there is no such device.
        """
        device = checks.device(device)
        if same_device(device, self.input_ids.device):
            return self
        own = ((field.name, getattr(self, field.name)) for field in fields(self))
        long = {name: value for name, value in own if isinstance(value, Tensor)}
        *moved, nodes = to_device([*long.values(), self.layout.nodes], device)
        changes: dict[str, Any] = dict(zip(long, moved))
        of_batch = {name: changes[name] for name in ("position_ids", "input_ids")}
        changes["layout"] = replace(self.layout, nodes=nodes, **of_batch)
        changes["row_values"] = {name: tensor.to(device, non_blocking=True) for name, tensor in self.row_values.items()}
        for of_groups in ("group_values", "group_images"):
            changes[of_groups] = {name: _on(device, values) for name, values in getattr(self, of_groups).items()}
        return replace(self, **changes)


@torch.inference_mode(False)  # tensors made in inference mode could not be saved for a later backward
def pack(
    samples: Samples, tree: PrefixTree, pad_to_multiple_of: int | None = None, device: torch.device | str | None = None
) -> PackedBatch:
    """The batch of samples and their tree: a few numbers a node and sequence are copied, and tokens if elsewhere.

    What these numbers mean for each row and each scored token is worked out on the device. `pad_to_multiple_of` and
    `device` are those of `pack_shared_prompts`.
    """
    device = samples.ids.device if device is None else checks.device(device)
    rows, scored, pad = sum(tree.node_lens), sum(samples.scored_lens), 0
    if pad_to_multiple_of is not None:
        pad = -rows % checks.integer("pad_to_multiple_of", pad_to_multiple_of, 1, checks.MAX_ROWS)
    host = SharedPromptLayout.from_tree(tree.node_lens, tree.node_parents, pad=pad)
    scored_lens, firsts = samples.scored_lens, [*accumulate(tree.sequence_lens, initial=0)]
    # Shifts from a row's number to the place of its token, and to its position; one a node.
    positions = [begin - row for begin, row in zip(tree.begins, accumulate(tree.node_lens, initial=0))]
    sources = [firsts[source] + position for source, position in zip(tree.sources, positions)]
    # Shifts from a scored token's number to the place of the one before, and to its place when
    # padded; one a sequence.
    begins, longest = [*accumulate(scored_lens, initial=0)], max(scored_lens)
    befores = [end - count - 1 - own for end, count, own in zip(firsts[1:], scored_lens, begins)]
    places = [index * longest - own for index, own in enumerate(begins[:-1])]
    numbers = map(int64s, (tree.node_lens, scored_lens, positions, sources, befores, places, firsts))
    ids, mask = samples.ids, samples.mask
    given = [] if same_device(ids.device, device) else [part.cpu().long() for part in (ids, mask) if part is not None]
    nodes, *moved = to_device([host.nodes, *numbers, *Spans.of(tree), *given], device)
    lens, counts, to_position, to_source, to_before, to_place, offsets = moved[:7]
    spans = Spans(*moved[7:9])
    if given:
        ids, mask = moved[9], moved[10] if mask is not None else None
    ids = ids.long()

    node, row = expand(lens, rows)
    source_index = take(to_source, node).add_(row)
    position_ids = _padded(take(to_position, node).add_(row), pad, 0)
    sequence, place = expand(counts, scored)
    padded_index = take(to_place, sequence).add_(place)
    if mask is None:
        before = take(to_before, sequence).add_(place)
    else:
        before = selected(torch.arange(len(ids), device=device), mask, scored).sub_(1)
    token_index, targets = spans.rows(before), take(ids, before + 1)
    # The target that comes first among those that a row scores.
    first = targets.new_full((rows + pad,), scored)
    first.scatter_reduce_(0, token_index, torch.arange(scored, device=device), "amin")
    group_values = named("group_values", samples.group_values)
    roots = [node for node, parent in enumerate(tree.node_parents) if parent < 0]
    input_ids = _padded(take(ids, source_index), pad, PADDING_TOKEN)
    return PackedBatch(
        input_ids,
        position_ids,
        replace(host, nodes=nodes, position_ids=position_ids, input_ids=input_ids),
        tree,
        take(torch.nn.functional.pad(targets, (0, 1), value=IGNORED_LABEL), first),
        token_index,
        targets,
        padded_index,
        before,
        offsets,
        _padded(source_index, pad, -1),
        tuple(scored_lens),
        samples.max_token,
        _has_own_labels(tree, samples),
        {name: _of_rows(name, values, source_index, spans, pad) for name, values in samples.row_values.items()},
        {name: _of_groups(name, values, tree) for name, values in group_values.items()},
        {name: _on(device, [values[tree.sources[root]] for root in roots]) for name, values in samples.images.items()},
    )


def _has_own_labels(tree: PrefixTree, samples: Samples) -> bool:
    """True if each scored token has a row of its own: rows that score a sequence lie in a node of this one only."""
    sequences = zip(tree.leaves, tree.sequence_lens, samples.scored_lens)
    is_alone = samples.mask is None and len({*tree.leaves}) == len(tree.leaves)
    return is_alone and all(
        tree.begins[leaf] < length - scored and tree.begins[leaf] + tree.node_lens[leaf] == length
        for leaf, length, scored in sequences
        if scored
    )


def _padded(values: Tensor, pad: int, fill: int) -> Tensor:
    return torch.nn.functional.pad(values, (0, pad), value=fill) if pad else values


def _of_rows(name: str, values: Tensor, source_index: Tensor, spans: Spans, pad: int) -> Tensor:
    """(..., T) of (..., sum L) values, which must be equal where tokens share a row."""
    values = values.to(source_index.device)
    found = values.index_select(-1, source_index)
    rows = spans.rows(torch.arange(values.shape[-1], device=values.device))
    is_same = _is_same(found.index_select(-1, rows), values)
    if not (is_same.is_meta or is_same.all()):
        expected = "equal values of tokens that share a row (or group_ids that keep them apart)"
        raise SharedPromptError(f"row_values[{name!r}]", expected, "different ones")
    return _padded(found, pad, 0)


def _of_groups(name: str, values: Sequence[Any], tree: PrefixTree) -> tuple[Any, ...]:
    """The value of the first sequence of each root, which all of its sequences must have."""
    name = f"group_values[{name!r}]"
    values = checks.items(name, values, "values")
    checks.check_count(name, values, len(tree.leaves), "samples")
    firsts: dict[int, int] = {}
    for index, leaf in enumerate(tree.leaves):
        first = firsts.setdefault(tree.roots[leaf], index) if leaf >= 0 else index
        if not _are_equal(values[first], values[index]):
            expected = "one value for all samples of a group (or group_ids that keep them apart)"
            raise SharedPromptError(name, expected, f"different ones of samples {first} and {index}")
    return tuple(values[firsts[root]] for root in sorted(firsts))


def _on(device: torch.device, values: Sequence[Any]) -> tuple[Any, ...]:
    """Tensors among them on the device."""
    return tuple(value.to(device, non_blocking=True) if isinstance(value, Tensor) else value for value in values)


def _is_same(value: Any, other: Any) -> Any:
    """Which values are equal; a missing one, NaN, is the same as another."""
    return (value == other) | ((value != value) & (other != other))


def _are_equal(value: Any, other: Any) -> bool:
    """True if two values are equal, tensors and arrays (in lists, tuples and dicts too) in shape and all elements."""
    if value is other:
        return True
    if isinstance(value, Tensor) or isinstance(other, Tensor):
        are_tensors = isinstance(value, Tensor) and isinstance(other, Tensor)
        if not are_tensors or value.device != other.device or value.is_meta:
            return False
    if isinstance(value, (list, tuple)) and type(value) is type(other):
        return len(value) == len(other) and all(map(_are_equal, value, other))
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(_are_equal(item, other[key]) for key, item in value.items())
    if getattr(value, "shape", ()) != getattr(other, "shape", ()):
        return False
    same = _is_same(value, other)
    return bool(same.all() if hasattr(same, "all") else same)
