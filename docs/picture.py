# SPDX-License-Identifier: BSD-3-Clause
"""Draws which keys each query sees: docs/shared_prompt.svg, with the prompt replicated and with the prompt stored once,
and docs/tree.svg, in a prefix tree; and docs/tiles.svg, the way from a packed row to the tiles of kernels.

python docs/picture.py [DIRECTORY]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

PROMPT, RESPONSES = 6, (4, 2, 3)
NODES = (("P", 4, -1), ("A", 4, 0), ("A₁", 3, 1), ("A₂", 2, 1), ("B", 5, 0))  # name, tokens, parent
CELL = 13
TOP = 70
GAP = 10
COLORS = {"prompt": "#2a78d6", "context": "#86b6ef", "response": "#eb6834"}
INK, MUTED, EMPTY, LINE = "#0b0b0b", "#52514e", "#f0efec", "#c3c2b7"

Token = tuple[int | None, int]  # response (None: the prompt), logical position


def replicated() -> list[list[Token]]:
    """One sequence for each response."""
    prompt: list[Token] = [(None, i) for i in range(PROMPT)]
    return [prompt + [(i, PROMPT + j) for j in range(length)] for i, length in enumerate(RESPONSES)]


def packed() -> list[Token]:
    """The prompt once, then all responses."""
    tokens: list[Token] = [(None, i) for i in range(PROMPT)]
    return tokens + [(i, PROMPT + j) for i, length in enumerate(RESPONSES) for j in range(length)]


def kind(query: Token, key: Token) -> str | None:
    """How a visible pair is drawn; None where the key is hidden."""
    if key[0] not in (None, query[0]) or key[1] > query[1]:
        return None
    if query[0] is None:
        return "prompt"
    return "context" if key[0] is None else "response"


def square(x: float, y: float, fill: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{CELL - 1}" height="{CELL - 1}" fill="{fill}"/>'


def text(x: float, y: float, words: str, size: int = 13, color: str = INK, **options: str) -> str:
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in options.items())
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{color}"{extra}>{words}</text>'


def response_name(number: int) -> str:
    return "R" + "₀₁₂₃₄₅₆₇₈₉"[number]


def matrix(x: int, y: int, queries: Sequence[Token], keys: Sequence[Token], gap: int = 0) -> list[str]:
    """One square for each (query, key); ``gap`` sets the prompt's columns apart."""
    shapes = []
    for row, query in enumerate(queries):
        for column, key in enumerate(keys):
            found = kind(query, key)
            left = x + CELL * column + (gap if column >= PROMPT else 0)
            shapes.append(square(left, y + CELL * row, COLORS[found] if found else EMPTY))
    return shapes


def border(x: float, y: float, width: int, height: int) -> str:
    size = f'width="{CELL * width + 3}" height="{CELL * height + 3}"'
    return f'<rect x="{x - 2}" y="{y - 2}" {size} fill="none" stroke="{LINE}"/>'


def left_panel(x: int) -> tuple[list[str], int]:
    """The replicated batch, one matrix below the other; and where it ends."""
    shapes, y = [], TOP
    for index, sequence in enumerate(replicated()):
        label = f"P {response_name(index + 1)}"
        shapes.append(text(x - 10, y + CELL * len(sequence) / 2 + 4, label, color=MUTED, text_anchor="end"))
        shapes += [*matrix(x, y, sequence, sequence), border(x, y, len(sequence), len(sequence))]
        y += CELL * len(sequence) + 16
    return shapes, y


def right_panel(x: int) -> list[str]:
    """The packed batch: the prompt's keys on the left, each response's own keys on the right."""
    tokens = packed()
    shapes = matrix(x, TOP, tokens, tokens, GAP)
    begin = 0
    for index, length in enumerate((PROMPT, *RESPONSES)):
        name = response_name(index) if index else "P"
        middle = CELL * (begin + length / 2)
        shapes.append(text(x - 10, TOP + middle + 4, name, color=MUTED, text_anchor="end"))
        shapes.append(text(x + middle + (GAP if index else 0), TOP - 8, name, color=MUTED, text_anchor="middle"))
        begin += length
    shapes.append(border(x, TOP, PROMPT, len(tokens)))
    shapes.append(border(x + CELL * PROMPT + GAP, TOP, len(tokens) - PROMPT, len(tokens)))
    return shapes


def legend(x: int, y: int) -> list[str]:
    lines = (
        ("prompt", "prompt with itself: k_context, v_context, stored once"),
        ("context", "responses with the prompt: k_context, v_context"),
        ("response", "each response with itself: k_decoded, v_decoded"),
    )
    shapes = []
    for index, (name, words) in enumerate(lines):
        shapes.append(square(x, y + 20 * index - 10, COLORS[name]))
        shapes.append(text(x + 18, y + 20 * index, words, 12, MUTED))
    return shapes


def draw() -> str:
    left, bottom = left_panel(60)
    right_x = 390
    total_replicated, total_packed = sum(map(len, replicated())), len(packed())
    shapes = [
        *left,
        *right_panel(right_x),
        text(20, 26, "Prompt replicated: N (P + R) tokens", 14, font_weight="600"),
        text(20, 44, f"here {total_replicated} through every layer", 12, MUTED),
        text(right_x - 30, 26, "Prompt shared: P + N R tokens", 14, font_weight="600"),
        text(right_x - 30, 44, f"here {total_packed} through every layer", 12, MUTED),
        *legend(right_x - 28, TOP + CELL * total_packed + 40),
        text(right_x - 28, TOP + CELL * total_packed + 108, "rows: queries, columns: keys", 12, MUTED),
    ]
    return document(760, bottom + 6, shapes)


def document(width: int, height: int, shapes: Sequence[str]) -> str:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fcfcfb"/>', *shapes, "</svg>", ""])


def paths() -> list[list[int]]:
    """Of each node the nodes from its root to itself."""
    found: list[list[int]] = []
    for node, (_, _, parent) in enumerate(NODES):
        found.append([*(found[parent] if parent >= 0 else []), node])
    return found


def tree_panel(x: int) -> list[str]:
    """The nodes, each where its tokens stand in their sequences."""
    shapes, step = [], 3 * CELL
    for line, (path, (name, length, parent)) in enumerate(zip(paths(), NODES)):
        begin, y = x + CELL * sum(NODES[node][1] for node in path[:-1]), TOP + step * line
        if parent >= 0:
            middle, above = y + CELL / 2, TOP + step * parent + CELL + 2
            bend = f"M{begin - 6} {above}V{middle}H{begin - 2}"
            shapes.append(f'<path d="{bend}" fill="none" stroke="{LINE}" stroke-width="1.5"/>')
        shapes += [square(begin + CELL * at, y, COLORS["response"]) for at in range(length)]
        shapes.append(text(begin + CELL * length + 8, y + 11, name, color=MUTED))
    return shapes


def tree_matrix(x: int) -> list[str]:
    """The packed row: one square for each query and key."""
    rows = [(node, at) for node, (_, length, _) in enumerate(NODES) for at in range(length)]
    shapes = []
    for y, (node, query) in enumerate(rows):
        for column, (other, key) in enumerate(rows):
            fill = EMPTY
            if other in paths()[node]:
                fill = COLORS["context"] if other != node else COLORS["response"] if key <= query else EMPTY
            shapes.append(square(x + CELL * column, TOP + CELL * y, fill))
    begin = 0
    for name, length, _ in NODES:
        middle = CELL * (begin + length / 2)
        shapes.append(text(x - 10, TOP + middle + 4, name, color=MUTED, text_anchor="end"))
        shapes.append(text(x + middle, TOP - 8, name, color=MUTED, text_anchor="middle"))
        begin += length
    return [*shapes, border(x, TOP, len(rows), len(rows))]


def draw_tree() -> str:
    leaves = {*range(len(NODES))} - {parent for _, _, parent in NODES}
    alone = sum(NODES[node][1] for leaf in leaves for node in paths()[leaf])
    total, right_x = sum(length for _, length, _ in NODES), 330
    y = TOP + CELL * total + 34
    shapes = [
        text(20, 26, "Three sequences, P A A₁, P A A₂ and P B", 14, font_weight="600"),
        text(20, 44, f"alone: {alone} tokens through every layer", 12, MUTED),
        *tree_panel(30),
        text(right_x - 30, 26, "One packed row, depth first", 14, font_weight="600"),
        text(right_x - 30, 44, f"here {total} tokens through every layer", 12, MUTED),
        *tree_matrix(right_x),
        square(right_x - 28, y - 10, COLORS["response"]),
        text(right_x - 10, y, "a node with itself, causally", 12, MUTED),
        square(right_x - 28, y + 10, COLORS["context"]),
        text(right_x - 10, y + 20, "a node with its ancestors, in full", 12, MUTED),
        text(right_x - 28, y + 44, "rows: queries, columns: keys", 12, MUTED),
    ]
    return document(620, y + 60, shapes)


# Two groups in one row, for docs/tiles.svg: name, tokens, parent. A tile is TILE tokens wide.
GROUPS = (("P₁", 16, -1), ("R₁", 7, 0), ("R₂", 5, 0), ("R₃", 10, 0), ("P₂", 9, -1), ("R₄", 6, 4), ("R₅", 8, 4))
TILE, TOKEN, BAR = 4, 12, 18


def bar(
    x: float, y: float, tokens: int, fill: str, words: str = "", ink: str = "#ffffff", step: float = TOKEN
) -> list[str]:
    """Neighbouring tokens as one box, `step` pixels each."""
    width = step * tokens - 1
    shapes = [f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{BAR}" fill="{fill}"/>']
    if words:
        shapes.append(text(x + width / 2, y + 13, words, 11, ink, text_anchor="middle"))
    return shapes


def arrow(x: float, y: float, end: float) -> str:
    tip = 5 if end > x else -5
    line = f"M{x:g} {y:g}H{end:g}M{end - tip:g} {y - 3:g}L{end:g} {y:g}L{end - tip:g} {y + 3:g}"
    return f'<path d="{line}" fill="none" stroke="{MUTED}" stroke-width="1.5"/>'


def node_color(parent: int) -> str:
    return COLORS["prompt"] if parent < 0 else COLORS["response"]


def packed_groups(x: float, y: float) -> list[str]:
    """The row: storage."""
    shapes: list[str] = []
    for name, length, parent in GROUPS:
        shapes += bar(x, y, length, node_color(parent), name)
        x += TOKEN * length
    return shapes


def nodes_of_groups(x: float, y: float) -> list[str]:
    """Each node at its logical positions, cut into KV tiles, which start with their node."""
    shapes: list[str] = []
    line = 0
    for index, (name, length, parent) in enumerate(GROUPS):
        if parent < 0 and index:
            x, line = x + TOKEN * 31, 0
        begin = x + (TOKEN * GROUPS[parent][1] if parent >= 0 else 0)
        top = y + 24 * line
        for first in range(0, length, TILE):
            shapes += bar(begin + TOKEN * first, top, min(TILE, length - first), node_color(parent))
        at, anchor = (begin - 8, "end") if parent < 0 else (begin + TOKEN * length + 4, "start")
        shapes.append(text(at, top + 13, name, 11, MUTED, text_anchor=anchor))
        line += 1
    return shapes


def forward_walk(x: float, y: float) -> list[str]:
    """A query tile of R₃, and the KV tiles of its path in the order of the walk."""
    shapes: list[str] = []
    steps = iter(range(6, 0, -1))
    for length, parent in ((16, -1), (8, 0)):
        for _ in range(0, length, TILE):
            shapes += bar(x, y, TILE, COLORS["context"] if parent < 0 else COLORS["response"], str(next(steps)), INK)
            x += TOKEN * TILE
    shapes += bar(x - TOKEN * TILE, y + 42, TILE, INK, "Q tile")
    shapes.append(arrow(x - TOKEN * TILE / 2, y + 32, x - TOKEN * 24))
    return shapes


def backward_walk(x: float, y: float) -> list[str]:
    """The second KV tile of P₁, and the query tiles of its subtree: one range of rows on one grid."""
    step = 9.6
    shapes: list[str] = []
    for first in range(TILE, 38, TILE):
        fill = COLORS["prompt"] if first < 16 else COLORS["response"]
        shapes += bar(x + step * first, y, TILE, fill, step=step)
    shapes += bar(x + step * TILE, y + 42, TILE, INK, "K, V", step=step)
    shapes.append(arrow(x + step * 40, y + 32, x + step * TILE))
    return shapes


def draw_tiles() -> str:
    x, right_x = 50, 420
    shapes = [
        text(20, 26, "1. Packed row (storage): two groups, depth first", 14, font_weight="600"),
        *packed_groups(x, 40),
        text(20, 92, "2. Nodes at their logical positions, cut into KV tiles", 14, font_weight="600"),
        *nodes_of_groups(x, 108),
        text(20, 232, "3. Forward, dQ: a block owns a query tile", 14, font_weight="600"),
        text(20, 250, "KV tiles of the path: own node first, then its parent", 12, MUTED),
        *forward_walk(x, 266),
        text(20, 348, "forward.h, backward_dq.h", 12, MUTED),
        text(right_x, 232, "4. Backward: a block owns a KV tile", 14, font_weight="600"),
        text(right_x, 250, "query tiles of the subtree: P₁ from its diagonal on, R₁, R₂, R₃", 12, MUTED),
        *backward_walk(right_x, 266),
        text(right_x, 348, "backward.h, _mla.h, _wide.h, _columns.h", 12, MUTED),
    ]
    return document(820, 366, shapes)


if __name__ == "__main__":
    directory = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, picture in (("shared_prompt.svg", draw()), ("tree.svg", draw_tree()), ("tiles.svg", draw_tiles())):
        (directory / name).write_text(picture, encoding="utf-8")
