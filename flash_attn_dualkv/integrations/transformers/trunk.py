# SPDX-License-Identifier: BSD-3-Clause
"""The passes of a batch that is cut: trunks, whose keys are kept, and the parts that continue them.

One rule covers them: what a part reads of its trunk is a leaf. Keys, values, end states and scores of trunk tokens are
kept without a graph, their gradients are summed over parts, and the trunk's last pass gives them back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ... import checks
from ...data.batch import PackedBatch
from ...data.parts import Cut, Piece, walk
from ...errors import SharedPromptError, SharedPromptLayoutError, SharedPromptUnsupportedError
from ...host import int64s, runs, to_device
from ...layout import SharedPromptLayout
from ...nodes import with_ancestors
from ...pieces import KeptKeys, PieceLayout, Stage
from .admission.unwrap import causal_lm_of
from .forward import scored_tokens
from .images import image_rows
from .packed_forward import packed_row
from .rope import rope_of_ranks

Keep = Literal["kv", "graph"]
# Log-probabilities and entropies, (n,) each; of models that balance experts, (nodes, 2, E) sums.
Scores = tuple[Tensor, ...]


@dataclass(frozen=True)
class PartScores:
    """Scores of the sequences that end in a piece of a batch.

    Attributes:
        sequences: which of the batch's.
        tokens: (sum R,) int64, which of all scored tokens of the batch, sequence by sequence.
        response_lens: of each sequence, how many of its tokens are scored.
        logps: (sum R,) of these tokens.
        entropy: (sum R,), or None.
        balance: the loss that balances experts, a number, for a model whose configuration has `output_router_logits`:
            that of its `load_balancing_loss_func` for these sequences, each with a copy of what it shares. None for
            other models.
        own: scores of all that the pass itself has scored, for `root_of`.
    """

    sequences: tuple[int, ...]
    tokens: Tensor
    response_lens: tuple[int, ...]
    logps: Tensor
    entropy: Tensor | None = None
    balance: Tensor | None = None
    own: Scores = ()

    def unpack(self, values: Tensor, *, fill: float = 0.0) -> Tensor:
        """(sum R,) values, one for each scored token, as (sequences, max R); differentiable."""
        checks.instance("values", values, Tensor)
        if values.shape != self.tokens.shape:
            expected = f"shape {tuple(self.tokens.shape)}, a value for each scored token"
            raise SharedPromptError("values", expected, tuple(values.shape))
        rows = values.split(self.response_lens)
        return torch.nn.utils.rnn.pad_sequence([*rows], batch_first=True, padding_value=fill)


Loss = Callable[[PartScores], Tensor]


class Pieces:
    """A batch, a model and a cut of the batch's tree: what all passes have in common.

    Args:
        model, batch, temperature, with_entropy, self_check: of `shared_prompt_forward`. With `self_check` the second
            pass of a trunk is compared with the first.
        cut: of `plan_parts`, of the batch's tree.
        keep: "kv": a trunk runs twice; "graph": once, and its graph stays while its parts run.
        offload: what is kept, and sums of its gradients, lie in the host's memory.
        counts: how many of the sequences, in their order, each part has, though they may end in a trunk; None: a
            sequence is its last token's piece's.

    Raises:
        SharedPromptError: an argument is not as described; a batch or a model that cannot be cut.
    """

    def __init__(
        self, model: nn.Module, batch: PackedBatch, cut: Cut, *, keep: Keep = "kv", temperature: float = 1.0,
        with_entropy: bool = False, self_check: bool = True, offload: bool = False,
        counts: Sequence[int] | None = None,
    ) -> None:  # fmt: skip
        checks.instance("batch", batch, PackedBatch, " (of pack_shared_prompts)")
        if not cut.is_whole:
            check_can_be_cut(model, batch)
        rows = batch.layout.num_tokens - batch.layout.pad
        if sum(cut.node_lens) != rows:
            raise SharedPromptLayoutError("cut", f"one of the batch's {rows} rows", sum(cut.node_lens))
        self.model, self.batch, self.cut, self.keep = model, batch, cut, keep
        self.with_entropy, self.self_check = checks.flag("with_entropy", with_entropy), self_check
        self.options: dict[str, Any] = dict(
            temperature=checks.number("temperature", temperature),
            with_entropy=with_entropy,
            first_use=dict(self_check=self_check, share_lora_dropout=False),
        )
        self.keys = KeptKeys(offload)
        self.passes = 0
        self._begins = [*accumulate(cut.node_lens, initial=0)]
        distinct = batch.distinct
        self._targets = distinct.pick(batch.targets)
        self._positions = batch.row_values.get("position_ids")
        if batch.images and self._positions is None:
            self._positions = packed_row(model, batch).inputs["position_ids"].squeeze(-2)
        # On the host, like everything that says which piece has what.
        self._rows = distinct.pick(batch.token_index).cpu()
        count = len(batch.token_index)
        self._places = torch.arange(count) if distinct.places is None else distinct.places.cpu()
        # The place of each of these among the leaves of the trunks above and the scores of a piece.
        self.where = torch.zeros(len(self._rows), dtype=torch.int64)
        self._bounds = [*accumulate(batch.response_lens, initial=0)]
        self._sequences: dict[int, list[int]] = {}
        self._assign()
        if counts is not None:
            self._sequences = {id(piece): [] for piece in walk(cut.pieces)}
            begins, parts = accumulate(counts, initial=0), [piece for piece in walk(cut.pieces) if not piece.parts]
            self._sequences |= {id(piece): [*range(*pair)] for piece, pair in zip(parts, pairwise(begins), strict=True)}

    def _assign(self) -> None:
        """Which piece has which nodes, scored tokens and sequences."""
        pieces = [*walk(self.cut.pieces)]
        numbers = self._numbers = {id(piece): number for number, piece in enumerate(pieces)}
        piece_of_node = torch.zeros(len(self.cut.node_lens), dtype=torch.int64)
        for number, piece in enumerate(pieces):
            piece_of_node[list(piece.nodes)] = number
        # Nodes with rows that one of another piece continues: their end states are kept.
        self.continued: set[int] = set()
        nearest = [-1] * (len(piece_of_node) + 1)  # of each node's path the last node with rows
        for node, (length, parent) in enumerate(zip(self.cut.node_lens, self.cut.node_parents)):
            above = nearest[parent]
            if length and above >= 0 and piece_of_node[above] != piece_of_node[node]:
                self.continued.add(above)
            nearest[node] = node if length else above
        ends = int64s(self._begins[1:])

        def owners(rows: Tensor) -> Tensor:
            return piece_of_node[torch.searchsorted(ends, rows, right=True)]

        owner = owners(self._rows)
        order = owner.argsort(stable=True)
        counts = owner.bincount(minlength=len(pieces)).tolist()
        scored = dict(zip(numbers, order.split(counts)))
        lens = self.batch.sequence_lens
        # A sequence is its last token's piece's; one without tokens goes with any.
        held = [index for index, length in enumerate(lens) if length]
        lasts = [end - 1 for end, length in zip(accumulate(lens), lens) if length]
        rows = self.batch.rows_of(to_device([int64s(lasts)], self.batch.input_ids.device)[0]).cpu()
        homes = owners(rows).tolist()
        self._last_nodes = dict(zip(held, torch.searchsorted(ends, rows, right=True).tolist()))
        leaf = next(number for number, piece in enumerate(pieces) if not piece.parts)
        home_of = dict(zip(held, homes))
        sequences: list[list[int]] = [[] for _ in pieces]
        for index in range(len(lens)):
            sequences[home_of.get(index, leaf)].append(index)
        self._scored, self._sequences = scored, dict(zip(numbers, sequences))
        self._groups = [-1] * self.batch.layout.num_groups  # of each group, the piece that has its images
        if self.batch.images:
            roots = [begin for begin, parent in zip(self._begins, self.cut.node_parents) if parent < 0]
            rows = image_rows(self.model, self.batch).cpu()
            groups = torch.searchsorted(int64s(roots), rows, right=True) - 1
            for group, number in {*zip(groups.tolist(), owners(rows).tolist())}:
                if self._groups[group] >= 0:
                    expected = "room for all images of a prompt"
                    raise SharedPromptUnsupportedError(
                        "max_tokens", expected, f"one that divides those of prompt {group}"
                    )
                self._groups[group] = number

    @property
    def outermost(self) -> Trunk:
        """A trunk of no rows, whose parts are the pieces that continue nothing."""
        return Trunk(self, Piece((), self.cut.pieces))

    def sequences_of(self, piece: Piece) -> list[int]:
        """The sequences that end in a piece."""
        return self._sequences[id(piece)]

    def scored_in(self, piece: Piece) -> Tensor:
        """(n,) int64, which distinct scored tokens the rows of a piece score."""
        return self._scored[id(piece)]

    def run(self, piece: Piece, stage: Stage, kept_begins: dict[int, int], kept_rows: int) -> tuple[int, Scores]:
        """The number of the pass, and the scores of what a piece scores; of one row more where that is nothing."""
        number, row = self.begin(piece, stage, kept_begins, kept_rows)
        return number, self.score(row)

    def begin(self, piece: Piece, stage: Stage, kept_begins: dict[int, int], kept_rows: int) -> tuple[int, PackedBatch]:
        """The number of a pass, and its row; `token_index` has the rows that score `targets`."""
        lens, nodes, scored = self.cut.node_lens, piece.nodes, self.scored_in(piece)
        index = runs([self._begins[node] for node in nodes], [lens[node] for node in nodes])
        rows = torch.searchsorted(index, self._rows[scored])
        targets = self._targets[scored.to(self._targets.device)]
        place = lens, self.cut.node_parents, nodes, kept_begins, kept_rows
        number, self.passes = self.passes, self.passes + 1
        place_of_piece = self._numbers[id(piece)]
        images = {
            name: tuple(value if home == place_of_piece else None for value, home in zip(values, self._groups))
            for name, values in self.batch.group_images.items()
        }
        return number, self._row(index, rows, targets, *place, images=images, stage=stage, number=number)

    def score(self, row: PackedBatch) -> Scores:
        """Scores of the targets of a pass."""
        scores = scored_tokens(self.model, row, row.token_index, row.targets, ancestors=self.keys, **self.options)
        return scores if self.with_entropy else (scores[0], *scores[2:])

    def _row(
        self, index: Tensor, rows: Tensor, targets: Tensor, *place: Any, images: Any = None, **options: Any
    ) -> PackedBatch:
        """The row of the pass over the rows `index` of the batch, whose `rows` score targets; others: `PieceLayout.of`.

        A pass that scores nothing runs the head over its first row: wrappers wait for the gradients of all parameters.
        """
        batch, device = self.batch, self.batch.input_ids.device
        is_empty = not len(rows)
        index, rows = to_device([index, rows], device)
        ids, positions = (tensor.index_select(0, index) for tensor in (batch.input_ids, batch.position_ids))
        given = self._positions
        values = {} if given is None else {"position_ids": given.to(device).index_select(-1, index)}
        if is_empty:
            rows, targets = rows.new_zeros(1), targets.new_zeros(1)
        options |= dict(continued=self.continued, device=device, position_ids=positions, input_ids=ids)
        layout = PieceLayout.of(*place, **options)
        return replace(
            batch, input_ids=ids, position_ids=positions, layout=layout, token_index=rows, targets=targets,
            own_labels=True, row_values=values, group_images=images or {},
        )  # fmt: skip

    def run_dummy(self, *, with_gradients: bool) -> Tensor:
        """A pass over one row that owes nothing to any loss: other ranks have one here."""
        none = torch.zeros(0, dtype=torch.int64)
        with torch.set_grad_enabled(with_gradients):
            row = self._row(none.new_zeros(1), none, self._targets[:0], [1], [-1], [0], {}, 0, number=-1)
            return root_of(None, self.score(row))

    def part_scores(self, piece: Piece, leaves: Scores, scores: Scores, above: Sequence[int]) -> PartScores:
        """Scores of the sequences that end in a piece, from leaves of trunks above and what the piece scores.

        `above`: nodes of these leaves that are of nodes.
        """
        sequences = self.sequences_of(piece)
        lens = [self.batch.response_lens[index] for index in sequences]
        tokens, found = self.gathered(piece, leaves, scores)
        entropy = found[1] if len(found) > 1 else None
        balance = None if scores[-1].dim() == 1 else self._balance(piece, [*leaves, scores[-1]][-2:], above)
        return PartScores(tuple(sequences), tokens, tuple(lens), found[0], entropy, balance, scores)

    def _balance(self, piece: Piece, sums: Sequence[Tensor], above: Sequence[int]) -> Tensor:
        """The loss of routers over a piece's sequences, from sums of nodes above, if there are any, and of its own."""
        parents, uses = self.cut.node_parents, Counter[int]()
        for index in self.sequences_of(piece):
            node = self._last_nodes.get(index, -1)
            while node >= 0:
                uses[node] += 1
                node = parents[node]
        together = torch.cat([*sums[-1 - bool(above) :]])
        weights = together.new_tensor([uses[node] for node in (*above, *with_ancestors(parents, piece.nodes))])
        probabilities, chosen = (together * weights[:, None, None]).sum(0)
        tokens = probabilities.detach().sum().round().clamp(min=1)
        return len(chosen) * ((chosen / tokens).detach() * (probabilities / tokens)).sum()

    def gathered(self, piece: Piece, leaves: Scores, scores: Scores) -> tuple[Tensor, list[Tensor]]:
        """Which scored tokens a piece's sequences have, and the scores of these, (sum R,) each."""
        sequences, scored = self.sequences_of(piece), self.scored_in(piece)
        leaves, scores = (tuple(score for score in own if score.dim() == 1) for own in (leaves, scores))
        above = len(leaves[0]) if leaves else 0
        self.where[scored] = torch.arange(above, above + len(scored))
        lens = [self.batch.response_lens[index] for index in sequences]
        tokens = runs([self._bounds[index] for index in sequences], lens)
        device = scores[0].device
        tokens, places = to_device([tokens, self.where[self._places[tokens]]], device)
        own = [score[: len(scored)] for score in scores]
        joined = [torch.cat(pair) for pair in zip(leaves, own)] if above else own
        return tokens, [score.index_select(0, places) for score in joined]


class Trunk:
    """Nodes whose keys are kept while their parts run, for loops that call the backward themselves.

        with Pieces(model, batch, cut).outermost.inner(0) as trunk:
            trunk.keep()
            for index in range(trunk.num_parts):
                with trunk.part(index) as part:
                    loss_of(part).backward()
            trunk.finish().backward()

    All passes have to be under one autocast, and all backwards but the last one without synchronisation where gradients
    of ranks are reduced. Parts that are trunks again are in `inner`. Without gradients there is nothing to finish.
    """

    def __init__(self, pieces: Pieces, piece: Piece, above: Trunk | None = None, index: int = 0) -> None:
        self.piece, self._pieces, self._above, self._index = piece, pieces, above, index
        self._kept_begins: dict[int, int] = {} if above is None else above.begins
        self._kept_rows: int = 0 if above is None else above.rows
        # Begins of nodes among the rows that are kept for parts.
        self.begins: dict[int, int] = dict(self._kept_begins)
        self.rows: int = self._kept_rows
        for node in piece.nodes:
            self.begins[node] = self.rows
            self.rows += pieces.cut.node_lens[node]
        self.leaves: Scores = ()  # of this trunk and those above
        self._nodes_above: list[int] = [] if above is None else above._nodes
        self._nodes: list[int] = [*self._nodes_above]  # of leaves that are of nodes
        self._own_leaves: Scores = ()
        self._graph: Scores = ()
        self._last_pass = -1
        self._passes: dict[int, list[int]] = {}  # of the parts that have begun
        self._state: Literal["new", "kept", "finished"] = "new" if piece.nodes else "kept"

    @property
    def num_parts(self) -> int:
        return len(self.piece.parts)

    def __enter__(self) -> Trunk:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        if kind is not None:
            self._drop()
            return
        was_kept = self._state == "kept" and bool(self.piece.nodes) and torch.is_grad_enabled()
        self.close()
        if was_kept:
            expected = "finish() and its backward before the trunk is left, or the gradients of its own rows lack"
            raise SharedPromptError("Trunk", expected, f"{len(self._passes)} parts and no finish()")

    def keep(self) -> None:
        """Run the trunk, and keep what its parts read."""
        self._expect("new")
        pieces = self._pieces
        keeps_graph = pieces.keep == "graph"
        with torch.set_grad_enabled(keeps_graph):
            self._last_pass, scores = self._run("graph" if keeps_graph else "keep")
        if keeps_graph:
            self._graph = scores
        else:  # some PyTorch's autocast keeps weights that were cast without gradients
            torch.clear_autocast_cache()
        # Scores behind those of the trunk are of a row that only wrappers want.
        scored = len(pieces.scored_in(self.piece))
        own = (score.detach() for score in scores)
        self._own_leaves = tuple((score[:scored] if score.dim() == 1 else score).requires_grad_() for score in own)
        self._nodes += with_ancestors(pieces.cut.node_parents, self.piece.nodes)
        above = self._leaves_above
        offset = len(above[0]) if above else 0
        pieces.where[pieces.scored_in(self.piece)] = torch.arange(offset, offset + scored)
        self.leaves = tuple(map(torch.cat, zip(above, self._own_leaves))) if above else self._own_leaves
        self._state = "kept"

    def inner(self, index: int) -> Trunk:
        """The trunk that a part is."""
        return Trunk(self._pieces, self._part(index, is_trunk=True), self, index)

    @contextmanager
    def part(self, index: int) -> Iterator[PartScores]:
        """Run a part; the backward of its loss has to run before it is left.

        Raises:
            SharedPromptError: the trunk's keys are not there, or the part has run.
        """
        row = self.begin(index)
        yield self._pieces.part_scores(self.piece.parts[index], self.leaves, self._pieces.score(row), self._nodes)

    def begin(self, index: int) -> PackedBatch:
        """The row of a part, which is to run once: by `part`, or elsewhere."""
        piece = self._part(index, is_trunk=False)
        self._expect("kept")
        if index in self._passes:
            raise SharedPromptError("index", "a part that has not run", index)
        number, row = self._pieces.begin(piece, "part", self.begins, self.rows)
        self._passes[index] = [number]
        return row

    def finish(self, loss_of: Loss | None = None) -> Tensor:
        """A scalar whose backward gives the trunk what all parts owe it; its value is the loss of its own sequences.

        Args:
            loss_of: of sequences that end in the trunk.

        Raises:
            SharedPromptError: a part has not run, or its backward not once; a trunk with sequences and no `loss_of`.
        """
        self._expect("kept")
        pieces, done = self._pieces, self._passes
        missing = [index for index in range(self.num_parts) if index not in done]
        if missing:
            raise SharedPromptError("Trunk", f"all {self.num_parts} parts before finish()", f"none of {missing}")
        pieces.keys.check_added([number for index in sorted(done) for number in done[index]])
        sequences = pieces.sequences_of(self.piece)
        if sequences and loss_of is None:
            expected = f"a loss of the {len(sequences)} sequences that end in the trunk"
            raise SharedPromptError("loss_of", expected, None)
        scores = self._graph
        if not scores:
            pieces.keys.let_go(self._last_pass)  # the activations of this pass take the place of keys of trunks below
            self._last_pass, scores = self._run("inject")
        loss = None
        if sequences and loss_of is not None:
            loss = checked_loss(loss_of(pieces.part_scores(self.piece, self._leaves_above, scores, self._nodes_above)))
        self._state = "finished"
        return root_of(loss, scores, [leaf.grad for leaf in self._own_leaves])

    def close(self) -> None:
        """Let go of everything, when the backward of `finish()` has run.

        Raises:
            SharedPromptError: after the outermost one: the second pass of a trunk was not like the first.
        """
        keys, was_finished, above = self._pieces.keys, self._state == "finished", self._above
        if was_finished and above is not None:
            done = [number for index in sorted(self._passes) for number in self._passes[index]]
            above._passes[self._index] = [*done, self._last_pass]
        self._drop()
        if was_finished and self._pieces.self_check and keys is not self._pieces.keys:
            keys.check_same()

    def _drop(self) -> None:
        self.leaves = self._own_leaves = self._graph = ()
        self._state = "finished"
        if not self._kept_rows:
            self._pieces.keys = KeptKeys(self._pieces.keys.offload)

    @property
    def _leaves_above(self) -> Scores:
        return () if self._above is None else self._above.leaves

    def _run(self, stage: Stage) -> tuple[int, Scores]:
        return self._pieces.run(self.piece, stage, self._kept_begins, self._kept_rows)

    def _part(self, index: int, *, is_trunk: bool) -> Piece:
        piece = self.piece.parts[checks.integer("index", index, 0, self.num_parts - 1)]
        if bool(piece.parts) != is_trunk:
            expected = "a part that is a trunk" if is_trunk else "a part that is no trunk (see Trunk.inner)"
            raise SharedPromptError("index", expected, index)
        return piece

    def _expect(self, state: str) -> None:
        if self._state != state:
            raise SharedPromptError("Trunk", f"one that is {state}", self._state)


def check_can_be_cut(model: nn.Module, batch: PackedBatch) -> None:
    """SharedPromptError for a batch or a model whose row has to run in one pass."""
    if type(batch.layout) is not SharedPromptLayout:
        raise SharedPromptLayoutError("batch", "one with its own layout", type(batch.layout).__name__)
    check_model_can_be_cut(model, batch.layout.max_sequence)


def check_model_can_be_cut(model: nn.Module, longest: int) -> None:
    """SharedPromptError for a model whose rows of sequences of up to `longest` tokens have to run in one pass."""
    config = causal_lm_of(model).config
    if (lacking := rope_of_ranks(config, longest, "in several passes")) is not None:
        raise SharedPromptUnsupportedError(lacking)


def checked_loss(loss: Any) -> Tensor:
    """SharedPromptError unless a loss is one number."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else checks.describe(loss)
        raise SharedPromptError("loss_of", "a function that returns a tensor of one number", got)
    return loss.reshape(())


def root_of(loss: Tensor | None, scores: Scores, gradients: Sequence[Tensor | None] = ()) -> Tensor:
    """The loss of a pass, whose backward also gives the scores gradients: zeros where there are none.

    So a pass whose loss reads nothing of it has a backward through all layers, which wrappers wait for.
    """
    loss = scores[0].new_zeros(()) if loss is None else loss
    known = [torch.zeros_like(score) for score in scores]
    for zeros, gradient in zip(known, gradients):
        if gradient is not None:  # without the row of a pass that scores nothing
            zeros[: len(gradient)] = gradient
    root: Tensor = _Root.apply(loss, known, *scores)
    return root


class _Root(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: list[Tensor], *scores: Tensor) -> Tensor:
        ctx.gradients = gradients
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Not times the gradient: those of leaves have a loss's scale already.
        return gradient, None, *ctx.gradients
