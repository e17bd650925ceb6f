"""Prints a command of README.md, so that CI runs what a newcomer is told to type.

    python tools/readme_commands.py install

A command is the fenced bash block right after a line `<!-- command: NAME -->`, an example the fenced python block right
after a line `<!-- example: NAME -->`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path


def readme_command(text: str, name: str) -> str:
    """The bash block marked as command `name`. Raises ValueError unless there is exactly one and it is not empty."""
    return _block(text, "command", "bash", name)


def readme_example(text: str, name: str) -> str:
    """The python block marked as example `name`, with the same conditions."""
    return _block(text, "example", "python", name)


def _block(text: str, kind: str, language: str, name: str) -> str:
    mark = f"<!-- {kind}: {name} -->"
    blocks = re.findall(rf"^{re.escape(mark)}\n```{language}\n(.*?)^```$", text, re.M | re.S)
    if len(blocks) != 1 or not blocks[0].strip():
        wanted = f"expected one {language} block, with something in it, after {mark}"
        raise ValueError(f"README.md: {wanted}, found {len(blocks)}")
    return str(blocks[0].strip())


if __name__ == "__main__":
    readme = Path(__file__).resolve().parent.parent / "README.md"
    try:
        print(readme_command(readme.read_text(encoding="utf-8"), sys.argv[1]))
    except ValueError as error:
        raise SystemExit(str(error)) from None
