# SPDX-License-Identifier: BSD-3-Clause
"""Numbers of whole runs, kept in a file and compared: a change of structure must change none of them.

    DUALKV_GOLDEN=write pytest tests/golden     # writes those of the packages that are installed

Each value is rounded to 9 digits when it is written; comparisons allow for rounding on another machine.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).resolve().parent
RELATIVE, ABSOLUTE = 2e-4, 2e-6
# What depends on the machine.
UNSTABLE = re.compile(r"time|seconds|mfu|memory|throughput|flops|_(s|gb|gib)$")


def plain(value: Any) -> Any:
    """A value as JSON has it; tensors as their sum, their sum of squares and their length."""
    if isinstance(value, torch.Tensor):
        value = value.detach().double()
        return [plain(float(value.sum())), plain(float(value.square().sum())), value.numel()]
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        names = sorted(name for name in value if not UNSTABLE.search(name.lower()))
        return {name: plain(value[name]) for name in names}
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def check(section: str, name: str, found: Any) -> None:
    """Compare what a set-up has found with the file of its section, or write it there.

    Other versions of what it runs on draw and round otherwise: there the test is skipped.
    """
    path, got, here = FOLDER / f"{section}.json", plain(found), _versions()
    kept = json.loads(path.read_text()) if path.exists() else {}
    if os.environ.get("DUALKV_GOLDEN") == "write":
        kept |= {"versions": {**here, **(kept.get("versions", {}) if len(kept) > 1 else {})}, name: got}
        lines = [f"{json.dumps(one)}: {json.dumps(value)}" for one, value in sorted(kept.items())]
        path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return
    if any(here.get(package) != version for package, version in kept["versions"].items()):
        pytest.skip(f"written with {kept['versions']}, and here is {here}")
    assert name in kept, f"{path.name} has no {name!r}: DUALKV_GOLDEN=write pytest {path.parent}"
    differences = [*_differences(got, kept[name], name)]
    assert not differences, differences[:10]


def _versions() -> dict[str, str]:
    """Of the installed packages that numbers come from, without what stands after their second number."""
    found = {}
    for name in ("torch", "transformers", "trl", "verl", "megatron-core"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = ".".join(metadata.version(name).split(".")[:2])
    return found


def _differences(got: Any, kept: Any, place: str) -> Any:
    if isinstance(got, dict) and isinstance(kept, dict) and got.keys() == kept.keys():
        for name in got:
            yield from _differences(got[name], kept[name], f"{place}/{name}")
    elif isinstance(got, list) and isinstance(kept, list) and len(got) == len(kept):
        for at, (one, other) in enumerate(zip(got, kept)):
            yield from _differences(one, other, f"{place}[{at}]")
    elif isinstance(got, (int, float)) and isinstance(kept, (int, float)):
        if got != pytest.approx(kept, rel=RELATIVE, abs=ABSOLUTE):
            yield f"{place}: {got}, was {kept}"
    elif got != kept:
        yield f"{place}: {got}, was {kept}"
