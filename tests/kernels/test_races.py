# SPDX-License-Identifier: BSD-3-Clause
"""The searches for races: that every barrier takes part in jitter.py's, and what racecheck is made to see."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import jitter
import pytest
import sanitize
from mutants import ROOT, has_hopper

PTX = Path(__file__).resolve().parents[2] / "csrc/ptx"
BARRIER = re.compile(
    r"mbarrier\.(?:arrive|try_wait|test_wait)|bar\.(?:sync|arrive|red)|barrier\.(?:sync|arrive|red)"
    r"|red\.release|ld\.acquire\.gpu\.global\.s32"
)
FUNCTION = re.compile(r"__device__ __forceinline__ \w+ (\w+)\([^)]*\) \{(.*?)\n?\}\n", re.S)


def test_every_barrier_pauses_first() -> None:
    """All functions of csrc/ptx that arrive on a barrier or wait for one, and nothing else has barriers."""
    found = []
    for path in sorted(PTX.glob("*.h")):
        text = path.read_text()
        bodies = {name: body for name, body in FUNCTION.findall(text) if BARRIER.search(body)}
        assert all(body.index("jitter(") < body.index("asm") for body in bodies.values()), path
        code = re.sub(r"//.*", "", text)
        assert sum(len(BARRIER.findall(body)) for body in bodies.values()) == len(BARRIER.findall(code)), path
        found += bodies
    known = {"mbarrier_arrive", "mbarrier_wait", "named_barrier_sync", "named_barrier_arrive", "arrive", "wait_arrived"}
    assert known <= set(found)
    assert f"#ifdef {jitter.FLAGS['NVCC_APPEND_FLAGS'].removeprefix('-D')}\n" in (PTX / "jitter.h").read_text()
    kernels = [path for path in PTX.parent.rglob("*") if path.suffix in (".h", ".cu") and path.parent != PTX]
    assert not [path for path in kernels if BARRIER.search(re.sub(r"//.*", "", path.read_text()))]


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 512])
def test_no_races(head_dim: int, tmp_path: Path) -> None:
    if not has_hopper():
        pytest.skip("needs a GPU of compute capability 9.x")
    tree = jitter.jittered(tmp_path, [head_dim], runs=200)
    jitter.build(tree)
    assert jitter.search(tree, [head_dim]) == "passed"


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
