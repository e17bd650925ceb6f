# SPDX-License-Identifier: BSD-3-Clause
"""Prompts of verl's FSDP engines once for all micro-batches that divide their samples.

verl's loop runs its micro-batches, forward, loss and backward. Between them, before a forward of verl's, run the passes
that it does not know: of trunks, whose keys are kept and which get the gradients of all parts, and one row for other
ranks. What is left runs behind the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, TypeAlias

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id

from ...data.batch import PackedBatch
from ...data.divided import DividedTree
from ...data.parts import Cut, Piece, walk
from ...data.prefix_tree import PrefixTree
from ..transformers.prompt_once import Plan, add_note, common_string
from ..transformers.trunk import Pieces, Scores, Trunk
from .micro_batches import TREE, packed_batch

Outputs = dict[str, Tensor]


class _Pieces(Pieces):
    """Pieces whose passes run through verl's own forward.

    Args:
        engine: that runs a row.
        data: of all sequences, one micro-batch after the other.
        tree, cut: of these.
        counts: sequences of each micro-batch.
    """

    def __init__(self, engine: Any, data: TensorDict, tree: PrefixTree, cut: Cut, counts: Sequence[int]) -> None:
        self.engine, self.data = engine, data
        tu.assign_non_tensor(data, **{TREE: tree})
        batch = packed_batch(data, 1, engine.options)
        super().__init__(engine.stock_module, batch, cut, self_check=engine.options.self_check)
        # The micro-batch of a sequence, though its last token may be a trunk's.
        begin, parts = 0, [piece for piece in walk(cut.pieces) if not piece.parts]
        self._sequences = {id(piece): [] for piece in walk(cut.pieces)}
        for piece, count in zip(parts, counts, strict=True):
            self._sequences[id(piece)] = [*range(begin, begin + count)]
            begin += count

    def score(self, row: PackedBatch) -> Scores:
        """All that verl's engine makes of the logits of a row's targets."""
        found: Outputs = {}

        def loss_of(model_output: Outputs, **_: Any) -> tuple[Tensor, dict[str, Any]]:
            found.update(model_output)
            return next(iter(found.values())).detach().sum(), {}

        self.engine.run_row(self.data, row, self.keys, dict, loss_of, not torch.is_grad_enabled())
        return tuple(found.values())

    def run_part(
        self, trunk: Trunk, index: int, micro_batch: TensorDict, loss_function: Any, forward_only: bool
    ) -> Any:
        """verl's forward step of a part."""
        piece = trunk.piece.parts[index]

        def outputs_of(scores: Outputs) -> Outputs:
            tokens, found = self.gathered(piece, trunk.leaves, tuple(scores.values()))
            return {name: self._jagged(piece, tokens, values) for name, values in zip(scores, found)}

        number, row = trunk.begin(index)
        self.engine.statistics.count_part(self._num_tokens(piece), row.layout.num_tokens)
        output = self.engine.run_row(micro_batch, row, self.keys, outputs_of, loss_function, forward_only)
        trunk.end(index, number)
        return output

    def _num_tokens(self, piece: Piece) -> int:
        return sum(self.batch.sequence_lens[index] for index in self.sequences_of(piece))

    def _jagged(self, piece: Piece, tokens: Tensor, values: Tensor) -> Tensor:
        """Values of a part's scored tokens as verl has them: each at the place before its token, 0 elsewhere."""
        sequences = self.sequences_of(piece)
        lens = [self.batch.sequence_lens[index] for index in sequences]
        offsets = self.batch.jagged_offsets[sequences[0] : sequences[-1] + 2]
        places = self.batch.jagged_index.index_select(0, tokens) - offsets[0]
        rows = values.new_zeros(sum(lens)).scatter(0, places, values)
        return torch.nested.nested_tensor_from_jagged(
            rows, offsets - offsets[0], min_seqlen=min(lens), max_seqlen=max(lens)
        )


class _Part(NamedTuple):
    """A micro-batch of verl's that continues a trunk."""

    pieces: _Pieces
    trunk: Trunk
    number: int  # among the trunk's parts


# After a pass of this rank: none of verl's is due, one that is no part, or a part.
Due: TypeAlias = "bool | _Part"


class Passes:
    """All passes of a call of the engine on this rank, verl's micro-batches among them.

    Args:
        engine: that runs.
        data: a mini-batch.
        num_lonely: how many micro-batches come first, which are no parts.
        trees: whose parts the others are, in this order.
        forward_only: no pass has a backward.
        group: ranks that agree on their passes.
    """

    def __init__(
        self, engine: Any, data: TensorDict, num_lonely: int, trees: Sequence[DividedTree], forward_only: bool,
        group: Any,
    ) -> None:  # fmt: skip
        self.engine, self.data, self.num_lonely, self.trees = engine, data, num_lonely, trees
        self.forward_only = forward_only
        letters = [Plan(divided.cut, "kv").letters for divided in trees]
        if forward_only:
            letters = ["F" * len([*walk(divided.cut.pieces)]) for divided in trees]
        # Those that are no parts are a string of their own: else trunks of ranks that have none would
        # wait for each other's.
        lonely = ("F" if forward_only else "B") * num_lonely
        self._string = [*common_string(lonely, group), *common_string("".join(letters), group)]
        self._last = len(self._string) - 1
        self._place = 0
        self._own = self._passes()
        self._due: Due = False
        self._name = "the first pass"
        self._dummy: _Pieces | None = None

    def _passes(self) -> Generator[Due, None, None]:
        """Run this rank's own passes; a pass of verl's is not run but named."""
        for number in range(self.num_lonely):
            self._name = f"micro-batch {number}"
            yield True
        for divided in self.trees:
            order = [index for chosen in divided.sequences for index in chosen]
            data = tu.index_select_tensor_dict(self.data, order).to(get_device_id())
            pieces = _Pieces(self.engine, data, divided.tree, divided.cut, [*map(len, divided.sequences)])
            self.engine.statistics.pairs += pieces.batch.num_pairs
            yield from self._below(pieces, pieces.outermost)

    def _below(self, pieces: _Pieces, trunk: Trunk) -> Generator[Due, None, None]:
        for index, piece in enumerate(trunk.piece.parts):
            if not piece.parts:
                self._name = f"a micro-batch, part {index} of {len(trunk.piece.parts)} of its prompt"
                yield _Part(pieces, trunk, index)
                continue
            with trunk.inner(index) as inner:
                self._name = "the first pass of a prompt"
                inner.keep()
                self.engine.statistics.count_trunk(inner.rows - trunk.rows)
                yield False
                yield from self._below(pieces, inner)
                if not self.forward_only:
                    self._name = "the last pass of a prompt"
                    with self._synchronised(self._place):
                        inner.finish().backward()
                    yield False

    def _synchronised(self, place: int) -> AbstractContextManager[Any]:
        """The context of a backward: gradients are synchronised in the last one of all ranks."""
        if self.forward_only:
            return nullcontext()
        context: AbstractContextManager[Any] = self.engine.synchronised(place == self._last)
        return context

    def catch_up(self) -> bool:
        """Run all passes before verl's next micro-batch; True if that is the last of all ranks' passes."""
        while not self._due and self._place <= self._last:
            letter, is_own = self._string[self._place]
            if is_own:
                self._due = next(self._own)
            else:
                self._run_dummy(letter)
            self._place += not self._due
        return self._place == self._last

    def _run_dummy(self, letter: str) -> None:
        if self._dummy is None:  # of any tokens
            data = tu.index_select_tensor_dict(self.data, [0]).to(get_device_id())
            tree = PrefixTree((length := int(data["input_ids"].offsets()[-1]),), (-1,), (0,), (length,), "gather")
            self._dummy = _Pieces(self.engine, data, tree, Cut((length,), (-1,), (Piece((0,)),)), [1])
        with self._synchronised(self._place):
            root = self._dummy.run_dummy(with_gradients=letter == "B")
            if letter == "B":
                root.backward()

    def run(self, micro_batch: TensorDict, loss_function: Any, stock: Callable[[], Any]) -> Any:
        """verl's forward step of its next micro-batch; `stock`: of one that is no part."""
        self.catch_up()
        due, self._due = self._due, False
        self._place += 1
        if not isinstance(due, _Part):
            return stock()
        return due.pieces.run_part(due.trunk, due.number, micro_batch, loss_function, self.forward_only)

    def finish(self) -> None:
        """Run what comes behind verl's last micro-batch."""
        with torch.set_grad_enabled(not self.forward_only):
            self.catch_up()
            next(self._own, None)

    def close(self) -> None:
        """Let go of everything, after an error as well."""
        self._own.close()

    def explain(self, error: Exception) -> None:
        """Say in the message of an error which pass it comes from."""
        left = "" if self.forward_only else ": .grad has gradients of the passes before it"
        add_note(error, f"in {self._name} (prompt_once){left}")
