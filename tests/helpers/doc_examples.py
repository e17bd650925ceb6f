# SPDX-License-Identifier: BSD-3-Clause
"""Code of the pages of docs."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).resolve().parents[2] / "docs"


def examples(page: str, mark: str = "") -> list[str]:
    """The blocks of Python of a page; with a mark the one after `<!-- example: mark -->`."""
    begin = rf"<!-- example: {mark} -->\n" if mark else ""
    return re.findall(rf"^{begin}```python\n(.*?)^```$", (DOCS / f"{page}.md").read_text(encoding="utf-8"), re.M | re.S)
