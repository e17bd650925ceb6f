# SPDX-License-Identifier: BSD-3-Clause
"""Writes the lists of docs/limits.md: reasons of fallbacks and refusals, by the texts of the package's own errors.

    python tools/limits_page.py

Reads the sources and imports nothing of them. A part of a text that only a run knows stands in braces. Listed are:
`Refused(reason, text)` and `Refusal(reason, text)` with the table REASONS, every NotImplementedError, and the
errors of the files that decide which models are exact.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "flash_attn_dualkv"
PAGE = ROOT / "docs" / "limits.md"
BEGIN, END = "<!-- made by tools/limits_page.py: {} -->\n", "<!-- end -->\n"
UNSUPPORTED = {"NotImplementedError", "SharedPromptUnsupportedError"}
# Files whose every error says that a model is not exact, or cannot be asked.
GATES = ("integrations/transformers/admission", "integrations/megatron/support.py")
NOT_OF_MODELS = {"SharedPromptTypeError", "SharedPromptLayoutError"}
UNKNOWN = "..."
# A text that says nothing without its run: all of it comes from elsewhere, where it is listed.
_PLACEHOLDER = re.compile(r"\.\.\.$|\{\w+\}$")
_ENDS = re.compile(r"^(\.\.\.|\{\w+\})|(\.\.\.|\{\w+\})$")
_OF_MODEL = "the error of the model, one of those [below](#refused-with-an-error)"
_NAMES = {"megatron": "Megatron-Core", "openrlhf": "OpenRLHF", "trl": "TRL", "verl": "verl", "vllm": "vLLM"}


class Given(NamedTuple):
    """A value that a name has from one line to another: the end of the block in which it was given."""

    begin: int
    end: int | None
    name: str
    value: ast.expr


class Scope(NamedTuple):
    """A function, or the module around it, and the values of names in it."""

    node: ast.AST
    given: list[Given]

    def value(self, name: str, line: int) -> ast.expr | None:
        """The last value that a name was given before that line, in its block or one around it."""
        found = [given for given in self.given if given.name == name and given.begin < line <= (given.end or line)]
        return found[-1].value if found else None


class Source(NamedTuple):
    """A file of the package."""

    room: str
    scopes: list[Scope]  # functions, the inner ones first; then the module

    def text(self, node: ast.expr, scope: Scope, line: int | None = None) -> str:
        """A text as its reader gets it, with names in braces where only a run knows more."""
        line = node.lineno if line is None else line
        if isinstance(node, ast.Constant):
            return str(node.value)
        if isinstance(node, ast.JoinedStr):
            return "".join(self.text(part, scope, line) for part in node.values)
        if isinstance(node, ast.FormattedValue):
            return self.text(node.value, scope, line)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.text(node.left, scope, line) + self.text(node.right, scope, line)
        if isinstance(node, ast.Tuple) and all(isinstance(item, ast.Constant) for item in node.elts):
            return " or ".join(self.text(item, scope, line) for item in node.elts)
        if isinstance(node, ast.Call) and _name(node.func) == "explain":
            return self.message(node, scope)
        if isinstance(node, ast.Name):
            value = scope.value(node.id, line)
            if value is not None:
                return self.text(value, scope)
            value = next((given.value for given in self.scopes[-1].given if given.name == node.id), None)
            return f"{{{node.id}}}" if value is None else self.text(value, self.scopes[-1])
        return f"{{{node.attr}}}" if isinstance(node, ast.Attribute) else UNKNOWN

    def message(self, call: ast.Call, scope: Scope) -> str:
        """The text of an error or of `explain`: one, or a name, what was expected and what was got."""
        parts = call.args[:2] if len(call.args) == 3 else call.args[:1]
        return ": expected ".join(self.text(part, scope) for part in parts)


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def _scope(node: ast.AST) -> Scope:
    given = []
    for part in [node] if isinstance(node, ast.Module) else ast.walk(node):
        blocks = [getattr(part, field, None) for field in ("body", "orelse", "finalbody")]
        for block in (block for block in blocks if isinstance(block, list)):
            for line in (line for line in block if isinstance(line, ast.Assign)):
                pairs = _pairs(line.targets[0], line.value)
                given += [Given(line.lineno, block[-1].end_lineno, *pair) for pair in pairs]
        if isinstance(part, ast.For):
            end = part.body[-1].end_lineno
            given += [Given(part.lineno, end, *pair) for pair in _items(part.target, part.iter)]
    return Scope(node, sorted(given, key=lambda found: found.begin))


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Names of an assignment, with their values."""
    if isinstance(target, ast.Name):
        yield target.id, value
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for name, item in zip(target.elts, value.elts):
            yield from _pairs(name, item)


def _items(target: ast.expr, values: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Names of a loop, each with a tuple of all of its values; the loop's own line where they are not written there."""
    if isinstance(target, ast.Name):
        yield target.id, values
    elif isinstance(target, ast.Tuple) and isinstance(values, ast.Tuple):
        rows = [row.elts for row in values.elts if isinstance(row, ast.Tuple)]
        for name, column in zip(target.elts, zip(*rows)):
            if isinstance(name, ast.Name):
                yield name.id, ast.Tuple([*column], ast.Load(), lineno=values.lineno)


def sources() -> Iterator[tuple[Source, bool]]:
    """All files, and whether each error of a file is a refusal of a model."""
    missing = [gate for gate in GATES if not (PACKAGE / gate).exists()]
    if missing:
        raise SystemExit(f"GATES: expected files of {PACKAGE}, got {', '.join(missing)}")
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        parts = path.relative_to(PACKAGE).parts
        room = parts[0] if parts[0] != "integrations" else parts[1]
        room = {"decode": "decoding"}.get(room, room.removesuffix(".py") if parts[0] == "integrations" else "attention")
        scopes = [*map(_scope, reversed(functions)), _scope(tree)]
        yield Source(room, scopes), path.relative_to(PACKAGE).as_posix().startswith(GATES)


def reasons() -> dict[str, set[str]]:
    """The texts that go with each reason."""
    found: dict[str, set[str]] = {}
    for source, _ in sources():
        module = source.scopes[-1]
        for _, _, name, table in module.given:
            if name != "REASONS" or not isinstance(table, ast.Dict):
                continue
            for key, meaning in zip(table.keys, table.values):
                if key is not None:
                    found.setdefault(source.text(key, module), set()).add(source.text(meaning, module))
        for scope in source.scopes:
            for node in ast.walk(scope.node):
                if isinstance(node, ast.Call) and _name(node.func) in ("Refused", "Refusal") and len(node.args) == 2:
                    reason, message = node.args
                    if isinstance(reason, ast.Constant):
                        texts = found.setdefault(str(reason.value), set())
                        texts |= {source.text(message, scope)} - {UNKNOWN, "{message}", "paused"}
    return found


def refusals() -> set[tuple[str, str, str]]:
    """Where something is refused, its argument and what was expected."""
    found = set()
    for source, is_gate in sources():
        seen: set[ast.AST] = set()
        for scope in source.scopes:
            nodes = [node for node in ast.walk(scope.node) if node not in seen]
            seen.update(nodes)
            for text in (_refused(source, scope, node, is_gate) for node in nodes):
                argument, _, expected = text.partition(": expected ")
                expected = expected.partition(", got ")[0].partition(". ")[0]  # advice is in the error
                if expected and not (_PLACEHOLDER.match(argument) and _ENDS.search(expected)) and expected != UNKNOWN:
                    found.add((source.room, argument, expected))
    return found


def _refused(source: Source, scope: Scope, node: ast.AST, is_gate: bool) -> str:
    """The text of a refusal; empty where there is none."""
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
        kind = _name(node.exc.func)
        is_of_model = is_gate and kind.endswith("Error") and kind not in NOT_OF_MODELS
        return source.message(node.exc, scope) if kind in UNSUPPORTED or is_of_model else ""
    # A gate's generator of settings, and what they must be.
    if is_gate and isinstance(node, ast.Yield) and isinstance(node.value, ast.Tuple):
        return ": expected ".join(source.text(part, scope) for part in node.value.elts)
    return ""


def lists() -> dict[str, str]:
    """The generated lists by name: a table, and what each part of the package refuses."""
    lines = ["| reason | it means, or a warning says |", "| :-- | :-- |"]
    for reason, texts in sorted(reasons().items()):
        told = sorted(text for text in texts if not any(other.startswith(text) for other in texts - {text}))
        lines.append(f"| `{reason}` | {'; '.join(told) or _OF_MODEL} |")
    rooms: dict[str, list[str]] = {}
    arguments: dict[tuple[str, str], list[str]] = {}
    for room, argument, expected in sorted(refusals()):
        arguments.setdefault((room, expected), []).append(argument)
    for (room, expected), names in arguments.items():
        rooms.setdefault(_NAMES.get(room, room), []).append(_item(", ".join(names), expected))
    rows = [f"### In {room}\n\n" + "\n".join(items) + "\n" for room, items in rooms.items()]
    return {"reasons": "\n".join(lines) + "\n", "refusals": "\n".join(rows)}


def _item(argument: str, expected: str) -> str:
    argument = re.sub(r"[a-z]+_[a-z_]+", r"`\g<0>`", argument)
    return textwrap.fill(
        f"- {argument}: {expected}", 100, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


def render(page: str) -> str:
    """A page with its lists as the sources have them now."""
    for name, table in lists().items():
        before, rest = page.split(BEGIN.format(name))
        page = before + BEGIN.format(name) + "\n" + table + "\n" + END + rest.partition(END)[2]
    return page


if __name__ == "__main__":
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
