# SPDX-License-Identifier: BSD-3-Clause
"""Writes docs/models.md: the models and adapters that are exact on shared prompts, those that are refused, and why.

    python tools/models_page.py

Runs the sweeps of the tests on tiny models, for about a minute on a CPU. Needs the extra [test], and scikit-learn for
one adapter.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "models.md"
PACKAGES = ("transformers", "peft", "torch")
CAUSAL_LMS = "Causal LMs"
MULTIMODAL = "Text on multimodal checkpoints"
ADAPTERS = "Adapters of PEFT"

Kind = Literal["exact", "refused", "stock", "untried"]


class Result(NamedTuple):
    """What became of a model or adapter."""

    kind: Kind
    reason: str = ""


Table = Mapping[str, Result]

_HEAD = """\
# Which models and adapters are exact

Made with {versions} by `python tools/models_page.py`.

Every model is tiny and random, in training mode. *Exact*: the log-probabilities of responses and the gradients of all
trained parameters are those of each sequence alone in the stock model, up to rounding (of float64 wherever the model
runs in it), with equal random numbers where a forward draws any. *Refused*: an error says why, and nothing is computed;
the trainers' plug-ins then take the stock path.

Linear layers in 8 bits that look at all tokens of a row are not exact. LLM.int8 of bitsandbytes finds by these which
features have outliers, and float8 with tensorwise scales takes its scale from the largest value of all. There a token
depends on the others of its row, in the stock model too: packed rows differ from it by as much as it differs from
itself in another batch, in log-probabilities by a hundredth and in gradients by a tenth and more with float8. Scales of
each token depend on nothing else.
"""
_NOTES = {
    CAUSAL_LMS: "By `model_type` in a checkpoint's `config.json`.",
    MULTIMODAL: "By `model_type` in a checkpoint's `config.json`; batches without [images](training.md#images).",
    ADAPTERS: "What is refused for what it does in training mode only is exact in eval mode.",
}
_LABELS: dict[Kind, str] = {
    "exact": "Exact",
    "refused": "Refused",
    "stock": "Unknown, as the stock model fails on a tiny configuration",
    "untried": "Not tried, as no tiny model can be made",
}


def why(reason: str) -> tuple[str, str]:
    """An error's text, without what is of a single model: what was expected, and what was got if that tells more."""
    reason = reason.replace("|", "/")
    found = re.match(r"(.*?): expected (.*?), got (.*)", reason, re.S)
    if found is None:
        return " ".join(reason.split()), ""
    argument, expected, got = found.groups()
    deed = re.search(r" \((.*?)\)", got)
    if argument.startswith("PEFT adapter") and deed is not None:
        return deed[1], ""
    argument = argument.split(" of ")[0]
    prefix = f"{argument}: " if re.fullmatch(r"\w+", argument) else ""
    expected = re.sub(r"\d+ layers", "all layers", re.sub(r" \(.*\)", "", expected))
    got = re.sub(r" \(\w+\)$", "", got.split(". ")[0])  # the model's type
    is_of_one = re.search(r"\b\d|that of", got) or re.fullmatch(r"[A-Z]\w+", got)  # a count, or a class
    return f"{prefix}expected {expected}", "" if is_of_one else got


def render(tables: Mapping[str, Table], versions: Mapping[str, str]) -> str:
    """The page's text."""
    parts = [_HEAD.format(versions=", ".join(f"{name} {number}" for name, number in versions.items()))]
    for title, table in tables.items():
        parts.append(f"## {title}\n\n{_NOTES[title]}\n")
        for kind, label in _LABELS.items():
            names = [name for name, result in table.items() if result.kind == kind]
            if not names:
                continue
            if kind == "refused":
                parts.append(f"{label} ({len(names)}):\n\n{_refused(table)}")
            else:
                parts.append(_wrapped(f"{label} ({len(names)}): {', '.join(names)}."))
    return "\n".join(parts)


def _refused(table: Table) -> str:
    rows: dict[str, dict[str, list[str]]] = {}
    for name, result in table.items():
        if result.kind == "refused":
            expected, got = why(result.reason)
            rows.setdefault(expected, {}).setdefault(got, []).append(name)
    lines = ["| why | which |", "| :-- | :-- |"]
    for expected, groups in sorted(rows.items()):
        cells = [f"{got}: {', '.join(names)}" if got else ", ".join(names) for got, names in sorted(groups.items())]
        lines.append(f"| {expected} | {'; '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False) + "\n"


def parse(text: str, title: str) -> dict[str, Kind]:
    """What a page says of each name under a heading."""
    section = re.split(rf"^## {re.escape(title)}$", text, flags=re.M)[1:]
    found: dict[str, Kind] = {}
    for paragraph in section[0].split("\n## ")[0].split("\n\n") if section else []:
        for row in re.findall(r"^\| (?!why \||:--)[^|]+ \| ([^|]+) \|$", paragraph, re.M):
            for group in row.split("; "):
                found |= dict.fromkeys(group.split(": ")[-1].split(", "), "refused")
        for kind, label in _LABELS.items():
            listed = re.match(rf"{label} \(\d+\): (.*)\.$", " ".join(paragraph.split()))
            if listed is not None:
                found |= dict.fromkeys(listed[1].split(", "), kind)
    return found


def listed(title: str) -> dict[str, Kind]:
    """What docs/models.md says under a heading."""
    return parse(PAGE.read_text(encoding="utf-8"), title)


def exact(title: str) -> frozenset[str]:
    """What docs/models.md calls exact under a heading: no newer version may refuse it."""
    return frozenset(name for name, kind in listed(title).items() if kind == "exact")


def is_of_installed(package: str) -> bool:
    """Whether docs/models.md was made with the installed version of a package, but for the patch."""
    found = re.search(rf"\b{package} (\d+\.\d+)", PAGE.read_text(encoding="utf-8"))
    return found is not None and version(package).startswith(f"{found[1]}.")


def _results(names: Iterable[str], verdict_of: Callable[[str], Any], title: str) -> dict[str, Result]:
    skipped = importlib.import_module("pytest").skip.Exception
    tqdm = importlib.import_module("tqdm").tqdm
    results = {}
    for name in tqdm(list(names), desc=title, dynamic_ncols=True, disable=None):
        try:
            verdict = verdict_of(name)
        except skipped:
            results[name] = Result("untried")
            continue
        if verdict.kind == "inexact":
            raise SystemExit(f"{name} is wrong and no error says so: {verdict.reason}")
        results[name] = Result(verdict.kind, verdict.reason)
    return results


def main() -> None:
    """Run the sweeps and write the page."""
    warnings.simplefilter("ignore")  # of tiny models' options
    importlib.import_module("transformers").logging.set_verbosity_error()
    sys.path.insert(0, str(ROOT / "tests/helpers"))
    sweep, adapters = importlib.import_module("sweep"), importlib.import_module("adapters")
    verdict_of = partial(sweep.model_verdict, sweep.any_model)
    tables: dict[str, Table] = {CAUSAL_LMS: _results(sweep.CAUSAL_LMS, verdict_of, CAUSAL_LMS)}
    if importlib.util.find_spec("tiny_multimodal") is not None:
        make = importlib.import_module("tiny_multimodal").any_multimodal
        found = _results(sweep.MULTIMODAL, partial(sweep.model_verdict, make), MULTIMODAL)
        # What no causal LM is made of may be one of these.
        elsewhere = {name for name, one in tables[CAUSAL_LMS].items() if one.kind == "untried"} & found.keys()
        tables[CAUSAL_LMS] = {name: one for name, one in tables[CAUSAL_LMS].items() if name not in elsewhere}
        tables[MULTIMODAL] = found
    tables[ADAPTERS] = _results(adapters.KINDS, adapters.adapter_verdict, ADAPTERS)
    PAGE.write_text(render(tables, {name: version(name).split("+")[0] for name in PACKAGES}), encoding="utf-8")


if __name__ == "__main__":
    main()
