# SPDX-License-Identifier: BSD-3-Clause
"""Checks that the package's version, the changelog's first heading and, where it is given, the tag are the same.

python tools/check_release.py v0.2.0
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

VERSION = re.compile(r'^__version__ = "(.+)"$', re.M)
HEADING = re.compile(r"^## (\S+)$", re.M)


def problems(version_py: str, changelog: str, tag: str | None) -> list[str]:
    """What disagrees, a sentence each."""
    found = {"flash_attn_dualkv/_version.py": VERSION.search(version_py), "CHANGELOG.md": HEADING.search(changelog)}
    missing = [f"{name}: no version found" for name, match in found.items() if match is None]
    if missing:
        return missing
    versions = {name: match.group(1) for name, match in found.items() if match}
    if tag is not None:
        versions["the tag"] = tag.removeprefix("v") if tag.startswith("v") else f"{tag!r}, which has no v in front"
    said = ", ".join(f"{name} says {version}" for name, version in versions.items())
    return [f"expected one version: {said}"] if len(set(versions.values())) > 1 else []


def main(tag: str | None) -> list[str]:
    root = Path(__file__).resolve().parent.parent
    return problems((root / "flash_attn_dualkv/_version.py").read_text(), (root / "CHANGELOG.md").read_text(), tag)


if __name__ == "__main__":
    sys.exit("\n".join(main(sys.argv[1] if len(sys.argv) > 1 else None)) or None)
