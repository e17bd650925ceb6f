"""Prints a command of README.md, so that CI runs what a newcomer is told to type.

    python tools/readme_commands.py install

A command is the fenced bash block right after a line `<!-- command: NAME -->`.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path


def readme_command(text: str, name: str) -> str:
    """The block marked `name`. Raises ValueError unless there is exactly one and it is not empty."""
    blocks = re.findall(rf"^<!-- command: {re.escape(name)} -->\n```bash\n(.*?)^```$", text, re.M | re.S)
    if len(blocks) != 1 or not blocks[0].strip():
        wanted = f"expected one bash block, with a command in it, after <!-- command: {name} -->"
        raise ValueError(f"README.md: {wanted}, found {len(blocks)}")
    return blocks[0].strip()


if __name__ == "__main__":
    readme = Path(__file__).resolve().parent.parent / "README.md"
    try:
        print(readme_command(readme.read_text(encoding="utf-8"), sys.argv[1]))
    except ValueError as error:
        raise SystemExit(str(error)) from None
