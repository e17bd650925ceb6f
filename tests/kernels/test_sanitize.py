"""What the sanitizer's script changes for racecheck, and what it makes of a tool's output; without a GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import sanitize
from mutants import ROOT


def test_no_arrival_of_one_lane_is_left_for_racecheck(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    assert len(sanitize.FOLLOWED) == 10
    for change in sanitize.FOLLOWED:
        change.apply(tmp_path)
    sources = {path.name: path.read_text() for path in (tmp_path / "csrc/sm90").glob("*.h")}
    assert not [name for name, text in sources.items() if "lane == 0" in text or "named_barrier_arrive(" in text]


@pytest.mark.parametrize(
    ("text", "returncode", "verdict"),
    [
        ("========= ERROR SUMMARY: 0 errors", 0, "clean"),
        ("========= ERROR SUMMARY: 2 errors", 99, "2 errors"),
        ("========= RACECHECK SUMMARY: 3 hazards displayed", 99, "3 errors"),
        ("========= ERROR SUMMARY: 0 errors", 1, "failed"),
        ("Device not supported", 0, "failed"),
    ],
)
def test_verdicts(text: str, returncode: int, verdict: str) -> None:
    assert sanitize.judge(text, returncode) == verdict


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("tool", sanitize.TOOLS)
def test_the_tools_find_nothing(tool: str, tmp_path: Path) -> None:
    sanitizer = sanitize.find_sanitizer()
    if sanitizer is None:
        pytest.skip("compute-sanitizer is neither in PATH nor in CUDA_HOME/bin; it comes with the CUDA toolkit")
    assert sanitize.run_tool(tool, sanitizer, tmp_path) == "clean"
