"""Draws docs/shared_prompt.svg: which keys each query sees, with the prompt replicated and with the prompt stored once.

python docs/picture.py [FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

PROMPT, RESPONSES = 6, (4, 2, 3)
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
    size = f'width="760" height="{bottom + 6}" viewBox="0 0 760 {bottom + 6}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fcfcfb"/>', *shapes, "</svg>", ""])


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).with_name("shared_prompt.svg")
    target.write_text(draw(), encoding="utf-8")
