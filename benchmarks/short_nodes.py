"""Whether a short node pays: pairs of leaves that share it, and the same with a copy of its tokens in each leaf.

A border costs attention tiles that are not full in every row below it. A token that is not copied spares a model its
linear layers, and attention some rows. `pack_prefix_tree` has one figure for it, ``min_shared``.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from measure import Row, ShapeRun, significant
from shapes import Shape
from trees import is_of_pairs

from flash_attn_dualkv.predict import DIRECTIONS, MODELS

COPIED = "_copied"  # at the end of the names of implementations
LAYER = MODELS["qwen3-8b"]  # whose linear layers a token goes through; attention of any head dim is held against them


class TreeRun(ShapeRun):
    """All measurements of a tree. Where it is one of pairs, rows say what its nodes save."""

    @property
    def rows(self) -> list[Row]:
        rows = super().rows
        if not is_of_pairs(self.shape.name):
            return rows
        times = {(row["impl"], row["direction"]): row["ms"] for row in rows}
        for row in rows:
            copied = times.get((row["impl"] + COPIED, row["direction"]))
            if copied and row["ms"] and row["matmul_tflops"]:
                row |= savings(self.shape, row, copied)
        return rows


def savings(shape: Shape, row: Row, copied_ms: float) -> Row:
    """Of one direction: what attention and a layer's products save with the nodes, in ms; negative if they cost.

    The products are taken to run at the rate of the plain product of the same process.
    """
    nodes = [length for length, parent in shape.nodes if parent == 0]
    flops = LAYER.token_flops(sum(nodes), row["direction"])
    return {
        "short_nodes": len(nodes),
        "node_tokens": nodes[0],
        "rows_below": (shape.packed_tokens - shape.nodes[0][0]) // len(nodes) - nodes[0],
        "attention_saved_ms": significant(copied_ms - row["ms"]),
        "products_saved_ms": significant(flops / row["matmul_tflops"] / 1e9),
    }


@dataclass(frozen=True)
class ShortNode:
    """What nodes of some length save, forward and backward.

    Attributes:
        rows: below each of them.
        tokens: of each of them.
        attention_ms, products_ms: saved in attention and in the products of one layer, by all of them.
        cost: of a border, in tokens of the layer's products. A node of more tokens pays.
    """

    head_dim: int
    rows: int
    tokens: int
    attention_ms: float
    products_ms: float

    @property
    def cost(self) -> float:
        return -self.attention_ms / self.products_ms * self.tokens

    @property
    def pays(self) -> bool:
        return self.attention_ms + self.products_ms > 0


def short_nodes(rows: list[Row]) -> list[ShortNode]:
    """Of the rows of results those that say what nodes save, both directions together; by head dim, rows and tokens."""
    found: dict[tuple[Any, ...], dict[str, Row]] = defaultdict(dict)
    for row in rows:
        # Rows of a table have all columns, without a figure where there is none.
        if (row.get("node_tokens") or 0) > 0:
            keys = row["impl"], row["d"], row["rows_below"], row["node_tokens"]
            found[keys][row["direction"]] = row
    names = ("attention_saved_ms", "products_saved_ms")
    return [
        ShortNode(
            *map(int, keys[1:]), *(sum(float(one[direction][name]) for direction in DIRECTIONS) for name in names)
        )
        for keys, one in sorted(found.items())
        if one.keys() == set(DIRECTIONS)
    ]


HEADINGS = (
    "d", "rows below a node", "its tokens", "saved by attention, ms", "saved by the products of a layer, ms",
    "cost of its border, tokens", "pays",
)  # fmt: skip


def cells(node: ShortNode) -> tuple[str, ...]:
    """A line of the table, as HEADINGS name the columns."""
    figures = f"{node.attention_ms:.3f}", f"{node.products_ms:.3f}", f"{node.cost:.0f}"
    return str(node.head_dim), f"{node.rows:,}", str(node.tokens), *figures, "yes" if node.pays else "no"


def conclusion(rows: list[Row]) -> str:
    """The table as text; "" without such rows."""
    lines = [cells(node) for node in short_nodes(rows)]
    return "\n".join(" | ".join(line) for line in (HEADINGS, *lines)) if lines else ""
