# SPDX-License-Identifier: BSD-3-Clause
"""Layers that mix tokens, for a piece of a row: its own rows, and what is kept of the nodes that these continue.

A trunk runs once to keep what its parts read: keys and values of attention, end states of recurrences, last inputs of
convolutions. The gradients of what they read are summed. Then it runs again, with gradients, which these sums join.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from . import ops
from .errors import SharedPromptError, SharedPromptLayoutError
from .host import to_device
from .layout import SharedPromptLayout, is_in_backward
from .nodes import piece_table, with_ancestors
from .packed_attention import checked_tensors, packed_options

# Kinds of passes: keys are kept; they are not; sums join their gradients; both at once.
Stage = Literal["keep", "part", "inject", "graph"]
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class Layer(NamedTuple):
    """A layer that attends, and the one whose keys it has.

    Attributes:
        name: of the layer.
        owner: of the layer that makes its keys.
        is_owner: whether that is itself.
    """

    name: Hashable
    owner: Hashable
    is_owner: bool


class KeptKeys:
    """Keys, values and end states of the trunks of one path, one trunk after the other, of every layer that has some.

    Neither a dataclass, a dict, a list nor a tensor: FSDP rebuilds these among the arguments of modules and casts them,
    and what is added to a copy is lost.

    Args:
        offload: tensors and sums of a GPU's layers lie in pinned memory of the host. Copies run in the stream of the
            layer that reads or adds. Those of the CPU stay.
    """

    def __init__(self, offload: bool = False) -> None:
        self.offload = offload
        # A leaf of its own makes autograd call `_Borrow`, whatever of a model is frozen: an own key that
        # needs no gradient, under LoRA of q and v, would lose that of a kept value.
        self.anchor = torch.zeros((), requires_grad=True)
        self.differs: Tensor | None = None  # whether what a second pass makes had other bits
        # How often the gradients of each layer and pass that reads kept rows came.
        self.added: Counter[tuple[Hashable, int]] = Counter()
        self._layers: dict[Hashable, _Kept] = {}

    def give(
        self, layer: Layer, piece: PieceLayout, begin: int, own: Sequence[Tensor], *carriers: Tensor
    ) -> tuple[Tensor, ...]:
        """Carriers and own tensors, which are kept, or get the gradients of what parts have read, by the stage.

        Args:
            begin: rows of the trunks above.
            own: (n, ...) each, what parts read of this pass.
            carriers: made beside these. Their gradients bring those of own tensors that the pass itself does not use.
        """
        kept, runs_again = self._layers.get(layer.owner), is_in_backward()
        if layer.is_owner and piece.stage in ("keep", "graph") and not runs_again:
            if kept is None:
                kept = self._layers[layer.owner] = _Kept(own, self.offload)
            kept.keep(layer, piece.number, begin, own)
        if kept is None and piece.stage != "part":
            raise _not_kept(layer)
        if kept is None or not layer.is_owner or piece.stage in ("keep", "part"):
            return *carriers, *own
        if piece.stage == "inject" and not runs_again:
            for before, tensor in zip(kept.tensors, own):
                self._compare(kept.there(before[begin : begin + len(tensor)]), tensor)
        given: tuple[Tensor, ...] = _Inject.apply(kept, begin, *carriers, *own)
        return given

    def borrow(
        self, layer: Layer, piece: PieceLayout, rows: int, like: Sequence[Tensor], *carriers: Tensor
    ) -> tuple[Tensor, ...]:
        """Carriers and the first rows of what is kept, whose gradients are summed.

        Args:
            like: tensors that have the types of those that are kept.
            carriers: with gradients. These come even where the pass does not use what is kept.
        """
        kept = self._layers.get(layer.owner)
        if kept is None:
            raise _not_kept(layer)
        kept.check(like)
        above = [kept.there(tensor[:rows]) for tensor in kept.tensors]
        if not torch.is_grad_enabled():
            return *carriers, *above
        which = layer.name, piece.number
        self.added[which] += 0
        borrowed: tuple[Tensor, ...] = _Borrow.apply(self.anchor, kept, self.added, which, *carriers, *above)
        return borrowed

    def _compare(self, kept: Tensor, own: Tensor) -> None:
        integers = _INTEGERS[own.itemsize]  # a NaN is equal to itself
        differs = (own.detach().view(integers) != kept.view(integers)).any()
        self.differs = differs if self.differs is None else self.differs.to(differs.device) | differs

    def let_go(self, number: int) -> None:
        """Keep what a pass and those above it have kept: that of trunks below has been given back."""
        for kept in self._layers.values():
            kept.resize(kept.ends.get(number, len(kept.tensors[0])))

    def check_same(self) -> None:
        """SharedPromptError if keys of a second pass had other bits than those that were kept; waits for a GPU."""
        if self.differs is not None and self.differs:
            expected = "keys, values and states with the same bits in both passes of a trunk"
            got = (
                "others, so that gradients are not those of one function (dropout, weights or autocast that changed "
                'in between, kernels or routers that are not deterministic; keep="graph" needs one pass)'
            )
            raise SharedPromptError("model", expected, got)

    def check_added(self, passes: Sequence[int]) -> None:
        """SharedPromptError unless the backward of each pass has run once, through all layers or through none."""
        counts: dict[Hashable, dict[int, int]] = {}
        for (layer, number), count in self.added.items():
            if number in passes:
                counts.setdefault(layer, {})[passes.index(number)] = count
        for layer, found in counts.items():
            if {*found.values()} - {0} and {*found.values()} != {1}:
                wrong = ", ".join(f"{count} of part {part}" for part, count in found.items() if count != 1)
                expected = "one backward of each part before finish()"
                raise SharedPromptError(f"gradients of layer {layer}", expected, wrong)


def _not_kept(layer: Layer) -> SharedPromptLayoutError:
    expected = "a trunk whose pass has kept the keys of all layers"
    return SharedPromptLayoutError("shared_prompt_layout", expected, f"none of {layer.owner}")


class _Kept:
    """Kept rows of one layer, and sums of their gradients in float32 or more."""

    def __init__(self, tensors: Sequence[Tensor], offload: bool) -> None:
        self.device = tensors[0].device
        self.is_pinned = offload and self.device.type == "cuda"
        place: dict[str, Any] = dict(device="cpu", pin_memory=True) if self.is_pinned else {}
        self.tensors = [tensor.new_empty((0, *tensor.shape[1:]), **place) for tensor in tensors]
        self.sums: list[Tensor] = []
        self.ends: dict[int, int] = {}  # of passes that keep, the rows that were there after them

    def there(self, tensor: Tensor) -> Tensor:
        """Kept rows on the layer's device."""
        return tensor.to(self.device, non_blocking=True)

    def keep(self, layer: Layer, number: int, begin: int, own: Sequence[Tensor]) -> None:
        if number in self.ends:
            expected = "layers that run once in a forward, for a prompt in a pass of its own"
            raise SharedPromptError("model", expected, f"{layer.name} twice")
        self.check(own)
        self.wait()
        end = self.ends[number] = begin + len(own[0])
        self.resize(end)
        for kept, tensor in zip(self.tensors, own):
            # Below autograd: a trunk's graph may have saved other rows of the same buffer.
            kept.data[begin:end].copy_(tensor.detach(), non_blocking=True)
        for total in self.sums:  # here and not in layers of parts, which run again in a backward
            total[begin:end].zero_()

    def wait(self) -> None:
        """Wait for copies, before the host reads or writes what they do."""
        if self.is_pinned:
            torch.cuda.synchronize(self.device)

    def resize(self, rows: int) -> None:
        if rows != len(self.tensors[0]):
            self.wait()
            self.tensors, self.sums = (
                [_resized(tensor, rows) for tensor in tensors] for tensors in (self.tensors, self.sums)
            )

    def check(self, like: Sequence[Tensor]) -> None:
        for kept, tensor in zip(self.tensors, like):
            if tensor.dtype != kept.dtype:
                expected = f"{kept.dtype}, in which those of the trunk were kept (all passes under one autocast)"
                raise SharedPromptError("keys", expected, tensor.dtype)

    def add(self, gradients: Sequence[Tensor]) -> None:
        if not self.sums:
            self.sums = [
                tensor.new_zeros(
                    tensor.shape, dtype=torch.promote_types(tensor.dtype, torch.float32), pin_memory=self.is_pinned
                )
                for tensor in self.tensors
            ]
        for total, gradient in zip(self.sums, gradients):
            rows = total[: len(gradient)]
            added = self.there(rows).add_(gradient)
            if self.is_pinned:
                rows.copy_(added, non_blocking=True)


def _resized(tensor: Tensor, rows: int) -> Tensor:
    """The first rows of a tensor in memory of their own."""
    new = tensor.new_empty((rows, *tensor.shape[1:]), pin_memory=tensor.is_pinned())
    both = min(rows, len(tensor))
    new[:both].copy_(tensor.detach()[:both])
    return new


class _Borrow(torch.autograd.Function):
    """Carriers and kept tensors as they are; what would be the gradients of these is added to the sums."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, kept: _Kept, added: Counter[Any], which: tuple[Hashable, int], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.kept, ctx.added, ctx.which = kept, added, which
        ctx.carriers = len(tensors) - len(kept.tensors)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.kept.add(gradients[ctx.carriers :])
        ctx.added[ctx.which] += 1
        of_kept = [None] * len(ctx.kept.tensors)
        return None, None, None, None, *gradients[: ctx.carriers], *of_kept


class _Inject(torch.autograd.Function):
    """Carriers and own tensors as they are; the sums join the gradients of these, which are rounded once."""

    @staticmethod
    def forward(ctx: Any, kept: _Kept, begin: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.kept, ctx.rows = kept, slice(begin, begin + len(tensors[-1]))
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sums, found = ctx.kept.sums, [*gradients]
        for index, total in enumerate(sums, len(found) - len(sums)):
            found[index] = (found[index].to(total.dtype) + ctx.kept.there(total[ctx.rows])).to(found[index].dtype)
        wanted = ctx.needs_input_grad[2:]
        return None, None, *(own if is_wanted else None for own, is_wanted in zip(found, wanted))


@dataclass(frozen=True, eq=False)
class PieceLayout(SharedPromptLayout):
    """The layout of a pass over some nodes of a row; its nodes are these and those that they continue.

    Models of transformers take it as they take a `SharedPromptLayout`, with the pass's own rows.

    Attributes:
        own_lens: rows of each node in this pass; 0 for those of the trunks above.
        states: of each node, the number of the end state that is kept of it, those of the trunks above first; -1 where
            no other piece continues it.
        kept_rows, kept_states: rows and end states of the trunks above.
        stage: of the pass.
        number: of the pass; no two of them have the same.
        keys: where the keys of the nodes above come from.
        caller: the layer that mixes tokens with a state, and its function.
    """

    own_lens: tuple[int, ...] = ()
    states: tuple[int, ...] = ()
    kept_rows: int = 0
    kept_states: int = 0
    stage: Stage = "part"
    number: int = 0
    keys: KeptKeys | None = None
    caller: Hashable = None

    @staticmethod
    def of(
        lens: Sequence[int], parents: Sequence[int], own: Sequence[int], kept_begins: Mapping[int, int], kept_rows: int,
        *, continued: Collection[int] = (), device: torch.device | None = None, **options: Any,
    ) -> PieceLayout:  # fmt: skip
        """The layout for arguments of `piece_table`; `options` are other fields.

        `continued`: nodes with rows that those of another piece continue.
        """
        table, longest, mean = piece_table(lens, parents, own, kept_begins, kept_rows)
        own_lens, node_lens, node_parents = (tuple(column) for column in table[:, [1, 4, 6]].T.tolist())
        rows = sum(lens[node] for node in own)
        above = [node for node in kept_begins if node in continued]
        numbers = {node: number for number, node in enumerate([*above, *(node for node in own if node in continued)])}
        states = tuple(numbers.get(node, -1) for node in with_ancestors(parents, own))
        nodes = table if device is None else to_device([table], device)[0]
        return PieceLayout(
            nodes, node_lens, node_parents, longest, mean, rows, own_lens=own_lens, states=states, kept_rows=kept_rows,
            kept_states=len(above), **options,
        )  # fmt: skip

    def called_by(self, caller: Hashable) -> PieceLayout:
        """This layout for a function of a layer."""
        return replace(self, caller=caller)

    def states_above(self, rows: Tensor, *like: Tensor) -> tuple[Tensor, Tensor | None]:
        """A function's rows, and the states (kept_states, ...) that it has kept in the trunks above; None without.

        `like`: a tensor of their type, where that is known.
        """
        if not self.kept_states:
            return rows, None
        keys, layer = self._keys_of_caller()
        rows, states = keys.borrow(layer, self, self.kept_states, like, rows)
        return rows, states

    def keep_states(self, rows: Tensor, states: Tensor) -> Tensor:
        """Keep the states (n, ...) behind the continued nodes of this pass, made with `rows`, which are returned."""
        keys, layer = self._keys_of_caller()
        return keys.give(layer, self, self.kept_states, [states], rows)[0]

    def _keys_of_caller(self) -> tuple[KeptKeys, Layer]:
        return self._keys(), Layer(self.caller, self.caller, True)

    def _keys(self) -> KeptKeys:
        if self.keys is None:
            expected = "a piece through packed_row(ancestors=...)"
            raise SharedPromptLayoutError("shared_prompt_layout", expected, "one without kept keys")
        return self.keys

    @torch.compiler.disable
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, layer: Layer, sinks: Tensor | None = None, backend: str = "auto",
        **options: Any,
    ) -> Tensor:  # fmt: skip
        """Attention of this pass's rows, (rows, H, d_v), by the kernels or the reference.

        `options` of `shared_prompt_attention`.
        """
        keys = self._keys()
        q, k, v = checked_tensors(q, k, v, sinks, backend)
        given = packed_options(q, self, backend=backend, deterministic=False, **options)
        k, v = keys.give(layer, self, self.kept_rows, (k, v))
        if not self.kept_rows:
            return ops.attend(q, k, v, self.nodes, given, sinks=sinks)[0]
        above = keys.borrow(layer, self, self.kept_rows, (k, v))
        return ops.attend(q, above[0], above[1], self.nodes, given, k_decoded=k, v_decoded=v, sinks=sinks)[0]
