# SPDX-License-Identifier: BSD-3-Clause
"""Prompts of verl's FSDP engines once for all micro-batches that divide their samples.

verl's loop runs its micro-batches, forward, loss and backward: the parts. Between them, before a forward of verl's, run
the passes that it does not know. What is left runs behind the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id

from ...data.batch import PackedBatch
from ...data.divided import DividedTrees
from ...data.parts import Cut, Piece
from ...data.prefix_tree import PrefixTree
from ..transformers.passes import Due, Part, letters_of, slots_of
from ..transformers.passes import Passes as _Passes
from ..transformers.trunk import Pieces, Scores
from .micro_batches import TREE, packed_batch

Outputs = dict[str, Tensor]


class _Pieces(Pieces):
    """Pieces whose passes run through verl's own forward.

    Args:
        engine: that runs a row.
        data: with all sequences.
        tree, cut: of these.
        sequences: of each part.
    """

    def __init__(
        self, engine: Any, data: TensorDict, tree: PrefixTree, cut: Cut, sequences: Sequence[Sequence[int]]
    ) -> None:
        order = [index for chosen in sequences for index in chosen]
        self.engine, self.data = engine, tu.index_select_tensor_dict(data, order).to(get_device_id())
        tu.assign_non_tensor(self.data, **{TREE: tree})
        batch = packed_batch(self.data, 1, engine.options)
        check, counts = engine.options.self_check, [*map(len, sequences)]
        super().__init__(engine.stock_module, batch, cut, self_check=check, counts=counts)

    def score(self, row: PackedBatch) -> Scores:
        """All that verl's engine makes of the logits of a row's targets."""
        found: Outputs = {}

        def loss_of(model_output: Outputs, **_: Any) -> tuple[Tensor, dict[str, Any]]:
            found.update(model_output)
            return next(iter(found.values())).detach().sum(), {}

        self.engine.run_row(self.data, row, self.keys, dict, loss_of, not torch.is_grad_enabled())
        return tuple(found.values())

    def run_part(self, part: Part, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> Any:
        """verl's forward step of a part."""
        trunk, piece = part.trunk, part.piece

        def outputs_of(scores: Outputs) -> Outputs:
            tokens, found = self.gathered(piece, trunk.leaves, tuple(scores.values()))
            return {name: self._jagged(piece, tokens, values) for name, values in zip(scores, found)}

        row = trunk.begin(part.number)
        self.engine.statistics.tally.add(sum(self._lens(piece)), row.layout.num_tokens)
        return self.engine.run_row(micro_batch, row, self.keys, outputs_of, loss_function, forward_only)

    def _lens(self, piece: Piece) -> list[int]:
        return [self.batch.sequence_lens[index] for index in self.sequences_of(piece)]

    def _jagged(self, piece: Piece, tokens: Tensor, values: Tensor) -> Tensor:
        """Values of a part's scored tokens as verl has them: each at the place before its token, 0 elsewhere."""
        sequences, lens = self.sequences_of(piece), self._lens(piece)
        offsets = self.batch.jagged_offsets[sequences[0] : sequences[-1] + 2]
        places = self.batch.jagged_index.index_select(0, tokens) - offsets[0]
        rows = values.new_zeros(sum(lens)).scatter(0, places, values)
        return torch.nested.nested_tensor_from_jagged(
            rows, offsets - offsets[0], min_seqlen=min(lens), max_seqlen=max(lens)
        )


class Passes(_Passes):
    """All passes of a call of the engine on this rank, verl's micro-batches among them.

    Args:
        engine: that runs.
        data: a mini-batch.
        count: of its micro-batches; those that are no parts come first.
        divided: the others, if there are any.
        has_gradients: of the call.
        group: ranks that agree on their passes.
    """

    def __init__(
        self, engine: Any, data: TensorDict, count: int, divided: DividedTrees | None, has_gradients: bool, group: Any
    ) -> None:
        self.engine, self.data, self.divided = engine, data, divided
        self.num_lonely = count - (0 if divided is None else len(divided.numbers))
        passes = "P" * self.num_lonely, "" if divided is None else divided.cut.passes
        lonely, letters = (letters_of(own, "kv" if has_gradients else None) for own in passes)
        # Those that are no parts are a slot of their own: else trunks of ranks that have none would
        # wait for each other's.
        super().__init__([lonely, *slots_of(letters)], group, has_gradients)

    def own_passes(self) -> Generator[Due | None, None, None]:
        for number in range(self.num_lonely):
            self.name = f"micro-batch {number}"
            yield True
        if self.divided is not None:
            self.engine.statistics.count_trunks(self.divided.cut, self.pieces.batch)
            yield from self.below(self.pieces.outermost)

    @cached_property
    def pieces(self) -> _Pieces:
        """Pieces of this rank's trees; without any, of its first sample, for dummies."""
        divided = self.divided
        if divided is not None:
            return _Pieces(self.engine, self.data, divided.tree, divided.cut, divided.sequences)
        tree = PrefixTree((length := int(self.data["input_ids"].offsets()[1]),), (-1,), (0,), (length,))
        return _Pieces(self.engine, self.data, tree, Cut((length,), (-1,), (Piece((0,)),)), [[0]])

    def dummy_root(self, *, with_gradients: bool) -> Tensor:
        return self.pieces.run_dummy(with_gradients=with_gradients)

    def synchronised(self, is_last: bool) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.engine.synchronised(is_last)
        return context

    def run(self, micro_batch: TensorDict, loss_function: Any, stock: Callable[[], Any]) -> Any:
        """verl's forward step of its next micro-batch; `stock`: of one that is no part."""
        self.advance()
        due = self.take()
        if not isinstance(due, Part):
            return stock()
        return self.pieces.run_part(due, micro_batch, loss_function, not self.has_gradients)
