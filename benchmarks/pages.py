# SPDX-License-Identifier: BSD-3-Clause
"""What all pages are made with: rows of result files, figures, tables, templates and plots."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

# Okabe and Ito's, which colour-blind readers can tell apart, by the begin of an implementation's
# name.
COLORS = {
    "cudnn_flex": "#D55E00", "flex_fa4": "#0072B2", "flex_packed": "#009E73", "fa4": "#CC79A7", "fa2": "#E69F00",
    "stock": "#56B4E9", "": "grey",
}  # fmt: skip
TEMPLATES = Path(__file__).with_name("templates")


class ResultError(ValueError):
    """A result file that cannot be read, or must not be published."""


def read(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Header and rows of a result file.

    Raises:
        ResultError: it is no result file, or was measured on a tree with changes or without a commit.
    """
    try:
        header, rows = json.loads(path.read_text()).values()
        is_clean = header["dirty"] is False and re.fullmatch(r"[0-9a-f]{7,40}", header["commit"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ResultError(f"{path}: expected an object with header and rows, got {error!r}") from error
    if not is_clean or not rows:
        raise ResultError(f"{path}: expected rows of a clean tree with a commit, got {header}")
    return header, rows


def load(paths: list[Path]) -> pd.DataFrame:
    """The rows of result files, each with what the header says.

    ``kernels``: the commit; of attention and a layer the newest one whose kernels have the same code.
    """
    frames = []
    for path in paths:
        header, rows = read(path)
        facts = {key: header.get(key) for key in ("benchmark", "gpu", "torch", "cuda", "commit", "date")}
        facts |= {"attention_of_verl": header.get("attention_of_verl"), "kernels": header.get("kernels")}
        facts["versions"] = ", ".join(f"{key} {value}" for key, value in header.get("versions", {}).items())
        optional = dict.fromkeys(("oom", "error", "skipped", "peak_gib"))
        frame = pd.DataFrame([{**optional, **row} for row in rows]).assign(**facts, file=path.stem)
        if facts["benchmark"] == "kernel":
            frame.loc[frame["shape"].str.startswith("tree-"), "benchmark"] = "tree"
        frames.append(frame)
    frame = pd.concat(frames, ignore_index=True)
    is_of_kernels = frame["kernels"].notna() & frame["benchmark"].isin(("kernel", "tree", "layer"))
    newest = frame[is_of_kernels].sort_values("date", kind="stable").groupby("kernels")["commit"].transform("last")
    return frame.assign(kernels=newest.reindex(frame.index).fillna(frame["commit"]))


def number(value: Any, digits: int = 0) -> str:
    return "" if value is None or pd.isna(value) else f"{value:.{digits}f}"


def milliseconds(value: Any) -> str:
    return number(value, 0 if value >= 1000 else 1 if value >= 10 else 2)


def markdown(table: pd.DataFrame, left: int | None = None) -> str:
    """The first ``left`` columns to the left, figures to the right; None: all to the left.

    Columns to the right without a figure are left out.
    """
    left = table.shape[1] if left is None else left
    table = table.loc[:, [index < left or bool((table[name] != "").any()) for index, name in enumerate(table)]]
    align = ["left" if index < left else "right" for index in range(table.shape[1])]
    return str(table.to_markdown(index=False, disable_numparse=True, colalign=align))


class Section(NamedTuple):
    """Title of a result file, its table in Markdown, and what stands around the link and the commit below."""

    title: str
    table: str
    before: str = ""
    after: str = ""


def sections(folder: Path, make: Callable[[dict[str, Any], list[dict[str, Any]]], Section]) -> str:
    """What is made of the header and rows of every result file of a folder; "" if there is none."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        header, rows = read(path)
        one = make(header, rows)
        file = f"[File]({folder.name}/{path.name}), commit `{header['commit'][:12]}`, torch {header['torch']}"
        parts += [f"### {one.title}", one.table, f"{one.before}{file}{one.after}."]
    return "\n\n".join(parts)


def filled(template: str, parts: dict[str, str], **facts: Any) -> str:
    """The template, without its sections whose part is empty."""
    sections = (TEMPLATES / f"{template}.md").read_text().split("\n## ")
    empty = [f"{{{name}}}" for name, part in parts.items() if not part]
    kept = [one for one in sections if not any(name in one for name in empty)]
    return "\n## ".join(kept).format(**parts, **facts)


def save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot as plt

    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)
