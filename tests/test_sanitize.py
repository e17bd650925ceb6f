"""What the sanitizer's script changes for racecheck, without a GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import sanitize
from mutants import ROOT


def test_changes_for_racecheck_fit_the_sources(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    for change in sanitize.FOLLOWED:
        change.apply(tmp_path)
        with pytest.raises(ValueError, match=r"0 places .* expected 1"):
            change.apply(tmp_path)


def test_no_arrival_of_one_lane_is_left(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    for change in sanitize.FOLLOWED:
        change.apply(tmp_path)
    sources = {path.name: path.read_text() for path in (tmp_path / "csrc/sm90").glob("*.h")}
    assert not [name for name, text in sources.items() if "lane == 0" in text or "named_barrier_arrive(" in text]


def test_other_tools_look_at_the_installed_build() -> None:
    with sanitize.script_for("memcheck") as (script, environment):
        assert script == Path(sanitize.__file__).resolve()
        assert "PYTHONPATH" in environment
