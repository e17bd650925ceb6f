#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Weight of the repository: lines of code, words of the pages, and two habits of wording, beside their bars.

    python tests/helpers/weight.py

A line of code has a token that is neither a comment nor part of a docstring. tests/package/test_weight.py holds every
number.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
LAYOUT_TOKENS = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
CLAUSES = ("What ", "Whether ", "Where ")
LEAST_DOCSTRINGS = 15.0  # percent of the package's lines


class Weight(NamedTuple):
    """A number and its bar.

    `recorded` is where it stands as long as it is above the bar. It only goes down, but for a feature that brings a
    budget of its own: prompts once (1,976 lines of the package), vLLM's range of versions (85), verl's router (299),
    SGLang (487), latents of MLA (33), ranks that are compared in one reduction (17), delta nets in Megatron (96), its
    Mamba-2 (114); hybrids of vLLM and Megatron, replicas, rollouts of SGLang, latents and whole steps of verl (728
    lines of the benchmarks).
    """

    name: str
    count: int
    bar: int
    recorded: int | None = None

    @property
    def most(self) -> int:
        return self.bar if self.recorded is None else self.recorded


@dataclass(frozen=True)
class Source:
    """One Python file."""

    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def tokens(self) -> list[tokenize.TokenInfo]:
        return list(tokenize.generate_tokens(io.StringIO(self.text).readline))

    @cached_property
    def docstrings(self) -> list[ast.Constant]:
        """Those of the module, its classes and functions."""
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        owners = (node for node in ast.walk(self.tree) if isinstance(node, kinds))
        firsts = (owner.body[0] for owner in owners if ast.get_docstring(owner) is not None)
        return [
            first.value for first in firsts if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
        ]

    @cached_property
    def docstring_lines(self) -> set[int]:
        return {line for text in self.docstrings for line in range(text.lineno, (text.end_lineno or text.lineno) + 1)}

    @cached_property
    def code_lines(self) -> int:
        code = (token for token in self.tokens if token.type not in LAYOUT_TOKENS)
        return len({line for token in code for line in range(token.start[0], token.end[0] + 1)} - self.docstring_lines)

    def names(self, wanted: str) -> int:
        """Places where a variable of this name stands."""
        return sum(token.type == tokenize.NAME and token.string == wanted for token in self.tokens)

    @property
    def clauses(self) -> int:
        """Docstrings whose summary is a clause."""
        return sum(str(text.value).lstrip().startswith(CLAUSES) for text in self.docstrings)


@cache
def source_of(path: Path) -> Source:
    return Source(path.read_text(encoding="utf-8"))


def sources(*paths: str) -> Iterator[Source]:
    """Python files of folders, or files by name, below the root."""
    for path in (ROOT / name for name in paths):
        yield from map(source_of, [path] if path.is_file() else sorted(path.rglob("*.py")))


def lines_of(*paths: str) -> int:
    return sum(source.code_lines for source in sources(*paths))


def weights() -> list[Weight]:
    """Every number with its bar."""
    package, contrib = "flash_attn_dualkv", "flash_attn_dualkv/contrib"
    shared = (f"{package}/integrations", f"{package}/parallel", f"{package}/scores.py")
    everything = [*sources(package)]
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in (ROOT / "docs").glob("*.md"))
    return [
        Weight("package without contrib", lines_of(package) - lines_of(contrib), 10_800, 15_442),
        Weight("integrations + parallel + scores", lines_of(*shared), 6_500, 9_919),
        Weight("contrib", lines_of(contrib), 1_000),
        Weight("tests", lines_of("tests"), 18_000, 28_776),
        Weight("benchmarks", lines_of("benchmarks"), 3_100, 4_973),
        Weight("words of docs/*.md", words, 17_000),
        Weight("variables called one", sum(source.names("one") for source in everything), 500),
        Weight("summaries that are clauses", sum(source.clauses for source in everything), 40),
    ]


def docstring_share() -> float:
    """Percent of the package's lines."""
    everything = [*sources("flash_attn_dualkv")]
    lines = sum(source.text.count("\n") for source in everything)
    return 100 * sum(len(source.docstring_lines) for source in everything) / lines


def table() -> str:
    """A line for each number."""
    lines = [f"{'':<34}{'now':>8}{'bar':>8}{'held at':>9}"]
    lines += [f"{weight.name:<34}{weight.count:>8,}{weight.bar:>8,}{weight.most:>9,}" for weight in weights()]
    return "\n".join([*lines, f"{'percent of docstrings, at least':<34}{docstring_share():>8.1f}{LEAST_DOCSTRINGS:>8}"])


if __name__ == "__main__":
    print(table())
