# SPDX-License-Identifier: BSD-3-Clause
"""Passes of trunks between parts that a loop runs itself: its own, or a trainer's.

Wrappers communicate in forwards and backwards, so that all ranks run one string of passes: a rank runs a row that owes
nothing to any loss where others have a pass more.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ...data.parts import Piece
from ...parallel.agreement import largest_of_ranks
from .trunk import Keep, Loss, Trunk

# Passes: a forward without and with a graph, forward and backward, a backward. In this order they
# make a slot of the ranks' common string.
_LETTERS = "FGBR"


def letters_of(passes: str, keep: Keep | None) -> str:
    """The letter of each pass of a cut (`Cut.passes`). `keep`: how trunks are kept; None: without gradients."""
    return passes.translate({
        "kv": str.maketrans({"P": "B"}),
        "graph": str.maketrans({"F": "G", "P": "B", "B": "R"}),
        None: str.maketrans({"P": "F", "B": ""}),
    }[keep])  # fmt: skip


def slots_of(letters: str) -> list[str]:
    """Letters in as few slots as can be."""
    return [slot for slot in re.findall("F*G*B*R*", letters) if slot]


def common_slots(slots: Sequence[str], ranks: Any) -> list[list[tuple[str, bool]]]:
    """The passes that all ranks run, and which of them are this rank's own: its letters in their order.

    Each slot has as many of a letter as any rank's. `ranks`: a group of torch.distributed, or None.
    """
    (count,) = map(int, largest_of_ranks([len(slots)], ranks))
    padded = [*slots, *[""] * (count - len(slots))]
    own = [slot.count(letter) for slot in padded for letter in _LETTERS]
    most = map(int, largest_of_ranks(own, ranks)) if own else ()
    passes = [
        [(letter, index < number) for index in range(all_ranks)]
        for letter, number, all_ranks in zip(_LETTERS * count, own, most)
    ]
    return [[*chain(*passes[at : at + len(_LETTERS)])] for at in range(0, len(passes), len(_LETTERS))]


class Part(NamedTuple):
    """A part of a trunk, by its number there."""

    trunk: Trunk
    number: int

    @property
    def piece(self) -> Piece:
        return self.trunk.piece.parts[self.number]


# A pass that the loop runs: a part, or True for one that continues no trunk.
Due: TypeAlias = "Part | bool"


class Passes:
    """This rank's passes among those of all ranks.

        with passes:
            while passes.advance():
                with passes.context():
                    run(passes.take())

    Args:
        slots: this rank's letters.
        ranks: that agree on them; None: this one alone.
        has_gradients: of the loop.

    Attributes:
        name: of the pass that runs, for errors.
        caller: of the loop.
    """

    caller = "prompt_once"

    def __init__(self, slots: Sequence[str], ranks: Any, has_gradients: bool = True) -> None:
        self.slots = common_slots(slots, ranks)
        self.has_gradients, self.name = has_gradients, "the first pass"
        self._string = [*chain(*self.slots)]
        self._place = 0
        self._due: Due | None = None
        self._own = self.own_passes()
        self._roots: list[Tensor] = []  # of other ranks' passes whose graph is kept

    # Overridden by each loop

    def own_passes(self) -> Generator[Due | None, None, None]:
        """Run this rank's passes, one a step; one of the loop's is not run but named."""
        raise NotImplementedError

    def dummy_root(self, *, with_gradients: bool) -> Tensor:
        """The root of a pass over a row that owes nothing to any loss."""
        raise NotImplementedError

    def synchronised(self, is_last: bool) -> AbstractContextManager[Any]:
        """The context of a forward and its backward; ranks add their gradients in the last one."""
        return nullcontext()

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of a forward."""
        return nullcontext()

    def run_backward(self, root: Tensor) -> None:
        root.backward()

    # Common to all loops

    def below(self, trunk: Trunk, loss_of: Loss | None = None, path: str = "") -> Generator[Due | None, None, None]:
        """The passes of all that continues a trunk. `loss_of`: of sequences that end in trunks."""
        for index, piece in enumerate(trunk.piece.parts):
            name = f"{path}{index}"
            if not piece.parts:
                self.name = f"part {name}"
                yield Part(trunk, index)
                continue
            with trunk.inner(index) as inner:
                self.name = f"the first pass of trunk {name}"
                inner.keep()
                yield None
                yield from self.below(inner, loss_of, f"{name}.")
                if self.has_gradients:
                    self.name = f"the last pass of trunk {name}"
                    with self.context():
                        with self.autocast():
                            root = inner.finish(loss_of)
                        self.run_backward(root)
            if self.has_gradients:
                yield None

    @property
    def is_last(self) -> bool:
        """True if no rank has a pass after the next one."""
        return self._place == len(self._string) - 1

    def context(self) -> AbstractContextManager[Any]:
        """That of the next pass."""
        # A backward's own forward has to be in its context, too: DDP prepares it there.
        return self.synchronised(self.is_last) if self.has_gradients else nullcontext()

    def advance(self, end: int | None = None) -> bool:
        """Run passes until one of the loop's is due, or so many have run; True if one is due."""
        end = len(self._string) if end is None else end
        with torch.set_grad_enabled(self.has_gradients):
            while self._due is None and self._place < end:
                letter, is_own = self._string[self._place]
                if is_own:
                    self._due = next(self._own)
                else:
                    self.name = "a pass for other ranks"
                    self.run_dummy(letter)
                self._place += self._due is None
        return self._due is not None

    def run_dummy(self, letter: str) -> None:
        """A pass that another rank has."""
        if letter == "R":
            self.run_backward(self._roots.pop())
            return
        with nullcontext() if letter == "F" else self.context():
            with self.autocast(), torch.set_grad_enabled(letter != "F"):
                root = self.dummy_root(with_gradients=letter != "F")
            if letter == "B":
                self.run_backward(root)
        if letter == "G":
            self._roots.append(root)

    def take(self) -> Due:
        """The pass that is due, for the loop to run it."""
        due, self._due = self._due, None
        assert due is not None
        self._place += 1
        return due

    def explain(self, error: BaseException) -> None:
        """Say in the message of an error which pass it comes from."""
        left = ": .grad has gradients of the passes before it" if self.has_gradients else ""
        text = f"in {self.name} ({self.caller}){left}"
        if hasattr(error, "add_note"):
            error.add_note(text)
        elif error.args and isinstance(error.args[0], str):  # before Python 3.11
            error.args = (f"{error.args[0]}\n{text}", *error.args[1:])

    def __enter__(self) -> Passes:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        """Run what is left, unless there was an error, and let go of everything."""
        with closing(self._own):
            if error is not None:
                self.explain(error)
                return
            try:
                self.advance()
                next(self._own, None)
            except Exception as own:
                self.explain(own)
                raise
