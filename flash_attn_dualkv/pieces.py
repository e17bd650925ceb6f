# SPDX-License-Identifier: BSD-3-Clause
"""Attention of a piece of a row: its own rows, and kept keys of the nodes that these continue.

A trunk runs once to keep the keys and values of its layers. Its parts read these, and the gradients of what they read
are summed. Then it runs again, with gradients, which these sums join.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from . import ops
from .errors import SharedPromptError, SharedPromptLayoutError
from .host import to_device
from .layout import SharedPromptLayout, is_in_backward
from .nodes import piece_table
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
    """Keys and values of the trunks of one path, one trunk after the other, of every layer that owns some.

    Neither a dataclass, a dict, a list nor a tensor: FSDP rebuilds these among the arguments of modules and casts them,
    and what is added to a copy is lost.
    """

    def __init__(self) -> None:
        # A leaf of its own makes autograd call `_Borrow`, whatever of a model is frozen: an own key that
        # needs no gradient, under LoRA of q and v, would lose that of a kept value.
        self.anchor = torch.zeros((), requires_grad=True)
        self.differs: Tensor | None = None  # whether keys of a second pass had other bits
        self.added: Counter[tuple[Hashable, int]] = Counter()  # of a layer and a pass, how often its gradients came
        self._layers: dict[Hashable, _Kept] = {}

    def exchange(
        self, layer: Layer, piece: PieceLayout, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """Own keys and values for attention, and those of the rows above; None where there are none."""
        begin, end = piece.kept_rows, piece.kept_rows + piece.num_tokens
        kept, runs_again = self._layers.get(layer.owner), is_in_backward()
        if layer.is_owner and piece.stage in ("keep", "graph") and not runs_again:
            if kept is None:
                kept = self._layers[layer.owner] = _Kept(k, v)
            kept.keep(layer, piece.number, begin, end, k, v)
        if kept is None and (begin or piece.stage != "part"):
            expected = "a trunk whose pass has kept the keys of all layers"
            raise SharedPromptLayoutError("shared_prompt_layout", expected, f"none of {layer.owner}")
        if kept is None:
            return k, v, None
        kept.check(k, v)
        if layer.is_owner and piece.stage in ("inject", "graph"):
            if piece.stage == "inject" and not runs_again:
                self._compare(kept.k[begin:end], k)
                self._compare(kept.v[begin:end], v)
            k, v = _Inject.apply(k, v, kept, begin, end)
        if not begin:
            return k, v, None
        above = kept.k[:begin], kept.v[:begin]
        if torch.is_grad_enabled():
            above = _Borrow.apply(self.anchor, *above, kept, self.added, (layer.name, piece.number))
        return k, v, above

    def _compare(self, kept: Tensor, own: Tensor) -> None:
        integers = _INTEGERS[own.itemsize]  # a NaN is equal to itself
        differs = (own.detach().view(integers) != kept.view(integers)).any()
        self.differs = differs if self.differs is None else self.differs.to(differs.device) | differs

    def let_go(self, rows: int) -> None:
        """Keep the first rows alone: those of trunks below have been given back."""
        for kept in self._layers.values():
            kept.resize(rows)

    def check_same(self) -> None:
        """SharedPromptError if keys of a second pass had other bits than those that were kept; waits for a GPU."""
        if self.differs is not None and self.differs:
            expected = "keys and values with the same bits in both passes of a trunk"
            got = (
                "others, so that gradients are not those of one function (dropout, weights or autocast that changed "
                'in between, kernels or routers that are not deterministic; keep="graph" needs one pass)'
            )
            raise SharedPromptError("model", expected, got)

    def check_added(self, passes: Sequence[int]) -> None:
        """SharedPromptError unless the backward of each pass has run once, through all layers or through none."""
        counts: dict[Hashable, list[int]] = {}
        for (layer, number), count in self.added.items():
            counts.setdefault(layer, [0] * len(passes))
            if number in passes:
                counts[layer][passes.index(number)] = count
        for layer, found in counts.items():
            if any(found) and {*found} != {1}:
                wrong = ", ".join(f"{count} of part {part}" for part, count in enumerate(found) if count != 1)
                expected = "one backward of each part before finish()"
                raise SharedPromptError(f"gradients of layer {layer}", expected, wrong)


class _Kept:
    """Keys and values of one layer, as many rows as are kept, and sums of their gradients in float32 or more."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = (tensor.new_empty((0, *tensor.shape[1:])) for tensor in (k, v))
        self.sums: tuple[Tensor, Tensor] | None = None
        self.last_pass = -1

    def keep(self, layer: Layer, number: int, begin: int, end: int, k: Tensor, v: Tensor) -> None:
        if self.last_pass == number:
            expected = "layers that run once in a forward, for a prompt in a pass of its own"
            raise SharedPromptError("model", expected, f"{layer.name} twice")
        self.last_pass = number
        self.check(k, v)
        self.resize(end)
        # Below autograd: the graph of a trunk above may have saved other rows of the same buffer.
        self.k.data[begin:end].copy_(k.detach())
        self.v.data[begin:end].copy_(v.detach())
        if self.sums is not None:  # here and not in attention of parts, which runs again in a backward
            for total in self.sums:
                total[begin:end].zero_()

    def resize(self, rows: int) -> None:
        if rows != len(self.k):
            self.k, self.v = (_resized(tensor, rows) for tensor in (self.k, self.v))
            if self.sums is not None:
                self.sums = tuple(_resized(total, rows) for total in self.sums)  # type: ignore[assignment]

    def check(self, k: Tensor, v: Tensor) -> None:
        if (k.dtype, v.dtype) != (self.k.dtype, self.v.dtype):
            expected = f"{self.k.dtype}, in which those of the trunk were kept (all passes under one autocast)"
            raise SharedPromptError("keys", expected, k.dtype)

    def add(self, rows: int, gradients: Sequence[Tensor]) -> None:
        if self.sums is None:
            self.sums = tuple(  # type: ignore[assignment]
                torch.zeros_like(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))
                for tensor in (self.k, self.v)
            )
        assert self.sums is not None
        for total, gradient in zip(self.sums, gradients):
            total[:rows].add_(gradient)


def _resized(tensor: Tensor, rows: int) -> Tensor:
    """The first rows of a tensor in memory of their own."""
    new, both = tensor.new_empty((rows, *tensor.shape[1:])), min(rows, len(tensor))
    new[:both].copy_(tensor.detach()[:both])
    return new


class _Borrow(torch.autograd.Function):
    """Kept keys and values as they are; what would be their gradients is added to the sums."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, k: Tensor, v: Tensor, kept: _Kept, added: Counter[Any], which: tuple[Hashable, int]
    ) -> tuple[Tensor, Tensor]:
        ctx.kept, ctx.added, ctx.which = kept, added, which
        return k.view_as(k), v.view_as(v)

    @staticmethod
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[None, ...]:
        ctx.kept.add(len(dk), (dk, dv))
        ctx.added[ctx.which] += 1
        return None, None, None, None, None, None


class _Inject(torch.autograd.Function):
    """Keys and values as they are; the sums join their gradients, which are rounded once."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, kept: _Kept, begin: int, end: int) -> tuple[Tensor, Tensor]:
        ctx.kept, ctx.rows = kept, slice(begin, end)
        return k.view_as(k), v.view_as(v)

    @staticmethod
    def backward(ctx: Any, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        sums, gradients = ctx.kept.sums, [dk, dv]
        if sums is not None:
            gradients = [(own.to(total.dtype) + total[ctx.rows]).to(own.dtype) for own, total in zip(gradients, sums)]
        wanted = ctx.needs_input_grad[:2]
        dk, dv = (own if is_wanted else None for own, is_wanted in zip(gradients, wanted))  # type: ignore[assignment]
        return dk, dv, None, None, None


@dataclass(frozen=True, eq=False)
class PieceLayout(SharedPromptLayout):
    """The layout of a pass over some nodes of a row; its nodes are these and those that they continue.

    Models of transformers take it as they take a `SharedPromptLayout`, with the pass's own rows.

    Attributes:
        kept_rows: rows of the trunks above.
        stage: of the pass.
        number: of the pass; no two of them have the same.
        keys: where the keys of the nodes above come from.
    """

    kept_rows: int = 0
    stage: Stage = "part"
    number: int = 0
    keys: KeptKeys | None = None

    @staticmethod
    def of(
        lens: Sequence[int], parents: Sequence[int], own: Sequence[int], kept_begins: Mapping[int, int], kept_rows: int,
        *, device: torch.device | None = None, **options: Any,
    ) -> PieceLayout:  # fmt: skip
        """The layout for arguments of `piece_table`; `options` are other fields."""
        table, longest, mean = piece_table(lens, parents, own, kept_begins, kept_rows)
        node_lens, node_parents = (tuple(column) for column in table[:, [4, 6]].T.tolist())
        rows = sum(lens[node] for node in own)
        nodes = table if device is None else to_device([table], device)[0]
        return PieceLayout(nodes, node_lens, node_parents, longest, mean, rows, kept_rows=kept_rows, **options)

    @torch.compiler.disable
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, layer: Layer, sinks: Tensor | None = None, backend: str = "auto",
        **options: Any,
    ) -> Tensor:  # fmt: skip
        """Attention of this pass's rows, (rows, H, d_v), by the kernels or the reference.

        `options` of `shared_prompt_attention`.
        """
        if self.keys is None:
            expected = "a piece through packed_row(ancestors=...)"
            raise SharedPromptLayoutError("shared_prompt_layout", expected, "one without kept keys")
        q, k, v = checked_tensors(q, k, v, sinks, backend)
        given = packed_options(q, self, backend=backend, deterministic=False, **options)
        k, v, above = self.keys.exchange(layer, self, k, v)
        if above is None:
            return ops.attend(q, k, v, self.nodes, given, sinks=sinks)[0]
        return ops.attend(q, above[0], above[1], self.nodes, given, k_decoded=k, v_decoded=v, sinks=sinks)[0]
