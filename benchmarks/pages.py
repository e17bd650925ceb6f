# SPDX-License-Identifier: BSD-3-Clause
"""What all pages are made with: rows of result files, figures, tables, templates and plots."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from shapes import WORDS as WORDS

# Okabe and Ito's, which colour-blind readers can tell apart, by the begin of an implementation's
# name.
COLORS = {
    "cudnn_flex": "#D55E00", "flex_fa4": "#0072B2", "flex_packed": "#009E73", "fa4": "#CC79A7", "fa2": "#E69F00",
    "stock": "#56B4E9", "": "grey",
}  # fmt: skip
TEMPLATES = Path(__file__).with_name("templates")
Header = dict[str, Any]
Rows = list[dict[str, Any]]


class ResultError(ValueError):
    """A result file that cannot be read, or must not be published."""


def read(path: Path) -> tuple[Header, Rows]:
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


# --- tables -----------------------------------------------------------------------------------------------------------


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


def table_of(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str], left: int | None = None) -> str:
    """A table of rows. ``columns``: headings, and formats of their cells, which are empty where a row lacks a value."""

    def cell(form: str, known: dict[str, Any]) -> str:
        try:
            return form.format(**known)
        except KeyError:
            return ""

    known = [{key: value for key, value in row.items() if value is not None and value == value} for row in rows]
    return markdown(pd.DataFrame([{name: cell(columns[name], row) for name in columns} for row in known]), left)


class Section(NamedTuple):
    """How a result file is shown: formats, over its header and its first row, of a title and of a table's cells.

    Attributes:
        folder: of the files.
        before, after: around the link and the commit below the table.
    """

    folder: str
    title: str
    columns: Mapping[str, str]
    before: str = ""
    after: str = ""
    left: int | None = None

    def of(self, results: Path, changed: Callable[[Header, Rows], Rows]) -> str:
        """A section for each result file, of its rows as `changed`; "" if there is none."""
        parts, folder = [], results / self.folder
        for path in sorted(folder.glob("*.json")):
            header, rows = read(path)
            rows = changed(header, rows)
            facts = {**rows[0], **header}
            file = f"[File]({folder.name}/{path.name}), commit `{header['commit'][:12]}`, torch {header['torch']}"
            parts += [f"### {self.title.format(**facts)}", table_of(rows, self.columns, self.left)]
            parts.append(f"{self.before.format(**facts)}{file}{self.after.format(**facts)}.")
        return "\n\n".join(parts)


SECTIONS = {name: Section(**facts) for name, facts in json.loads((TEMPLATES / "sections.json").read_text()).items()}


def filled(template: str, parts: dict[str, str], **facts: Any) -> str:
    """The template, without its sections whose part is empty."""
    sections = (TEMPLATES / f"{template}.md").read_text().split("\n## ")
    empty = [f"{{{name}}}" for name, part in parts.items() if not part]
    kept = [section for section in sections if not any(name in section for name in empty)]
    return "\n## ".join(kept).format(**parts, **facts)


# --- plots ------------------------------------------------------------------------------------------------------------


def bars(
    ratios: pd.DataFrame, colors: Sequence[str], heading: str, path: Path, same: str = "", widest: float = 0.0
) -> None:
    """A bar for each time of a peer over this library's.

    Args:
        ratios: a row for each group of bars, a column, with its label, for each color.
        same: where both times are from, for the label of the axis.
        widest: bars begin at 1, and larger ratios stand at this edge; 0: they begin at 0.
    """
    import matplotlib

    matplotlib.use("Agg")
    begin = 1 if widest else 0
    size = (10, 1.4 + 0.16 * (ratios.size + len(ratios)))
    axis = (ratios.clip(upper=widest or None) - begin).plot.barh(
        left=begin, width=0.8, color=colors, figsize=size, fontsize=8, legend=False
    )
    for container, name in zip(axis.containers, ratios):
        labels = [f" {ratio:.2f}" + (" →" if widest and ratio > widest else "") for ratio in ratios[name]]
        axis.bar_label(container, ["" if "nan" in label else label for label in labels], fontsize=7)
    if widest:
        most = min(widest, max(1.1, ratios.max(axis=None)))
        axis.set_xlim(min(0.95, ratios.min(axis=None) - 0.03), most + 0.05)
    axis.set(ylabel="", xlabel=f"time of the peer over this library's{same}; right of 1.00 this library is faster")
    axis.axvline(1.0, color="black", linewidth=1)
    axis.spines[["top", "right"]].set_visible(False)
    figure = axis.figure
    figure.set_layout_engine("constrained")
    figure.suptitle(heading, fontsize=11)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8, reverse=True)
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot as plt

    figure.savefig(path, dpi=130, metadata={"Software": None})
    plt.close(figure)
