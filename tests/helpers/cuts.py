# SPDX-License-Identifier: BSD-3-Clause
"""Cuts of trees at random places, on any number of levels, and attention in their pieces."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, count
from typing import Any

import torch
from torch import Tensor

from flash_attn_dualkv.data.parts import Cut, Piece
from flash_attn_dualkv.pieces import KeptKeys, Layer, PieceLayout, Stage


def random_cut(draw: random.Random, lens: Sequence[int], parents: Sequence[int], levels: int) -> Cut:
    """Every node is in a piece; trunks are closed under ancestors and have rows."""

    def cut(nodes: list[int], left: int) -> tuple[Piece, ...]:
        inside, trunk = {*nodes}, list[int]()
        for node in nodes:
            if (parents[node] not in inside or parents[node] in trunk) and draw.random() < 0.6:
                trunk.append(node)
        tops: dict[int, int] = {}
        for node in nodes:
            if node not in trunk:
                tops[node] = tops.get(parents[node], node)
        below = [[node for node in tops if tops[node] == top] for top in sorted({*tops.values()})]
        draw.shuffle(below)
        groups: list[list[int]] = []
        while below:
            size = draw.randint(1, 3)
            groups.append(sorted(node for subtree in below[:size] for node in subtree))
            below = below[size:]
        parts: tuple[Piece, ...] = ()
        for group in groups:
            goes_on = left > 1 and len(group) > 1 and draw.random() < 0.9
            parts += cut(group, left - 1) if goes_on else (Piece(tuple(group)),)
        has_rows = any(lens[node] for node in trunk)
        return (Piece(tuple(trunk), parts),) if has_rows and parts else (Piece(tuple(nodes)),)

    return Cut(tuple(lens), tuple(parents), cut([*range(len(lens))], levels))


def rows_of(lens: Sequence[int], nodes: Sequence[int]) -> list[int]:
    begins = [*accumulate(lens, initial=0)]
    return [row for node in nodes for row in range(begins[node], begins[node + 1])]


def attend_in_pieces(
    cut: Cut, tensors: Sequence[Tensor], dout: Tensor, **options: Any
) -> tuple[Tensor, list[Tensor], KeptKeys]:
    """Attention of all rows of a cut, from equal q, k and v (T, ...): out, their gradients in float64, and the keys."""
    lens, parents = cut.node_lens, cut.node_parents
    keys, numbers = KeptKeys(), count()
    out = torch.empty_like(dout)
    totals = [torch.zeros_like(tensor, dtype=torch.float64) for tensor in tensors]

    def run(piece: Piece, above: list[int], stage: Stage) -> None:
        rows = torch.tensor(rows_of(lens, piece.nodes), dtype=torch.int64, device=dout.device)
        begins = dict(zip(above, accumulate((lens[node] for node in above), initial=0)))
        kept = sum(lens[node] for node in above)
        layout = PieceLayout.of(lens, parents, piece.nodes, begins, kept, stage=stage, number=next(numbers), keys=keys)
        own = [tensor[rows].clone().requires_grad_() for tensor in tensors]
        with torch.set_grad_enabled(stage != "keep"):
            part = layout.to(dout.device).attention(*own, layer=Layer("own", "own", True), **options)  # type: ignore[attr-defined]
        out[rows] = part.detach()
        if stage != "keep":
            part.backward(dout[rows])
            for total, tensor in zip(totals, own):
                assert tensor.grad is not None
                total[rows] += tensor.grad.double()

    def visit(pieces: Sequence[Piece], above: list[int]) -> None:
        for piece in pieces:
            run(piece, above, "keep" if piece.parts else "part")
            if piece.parts:
                visit(piece.parts, [*above, *piece.nodes])
                run(piece, above, "inject")

    visit(cut.pieces, [])
    return out, totals, keys
