"""What the sanitizer's script changes for racecheck, and what it makes of a tool's output; without a GPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
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


@pytest.mark.parametrize(("tool", "is_built"), [("memcheck", False), ("racecheck", True), ("racecheck", False)])
def test_a_tool_gets_what_is_asked_for(
    tool: str, is_built: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parts and head dims; racecheck its own build."""
    called: list[list[str]] = []
    built: list[str] = []

    def fake(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        called.append(command)
        return subprocess.CompletedProcess(command, 0, "ERROR SUMMARY: 0 errors")

    monkeypatch.setattr(sanitize, "find_sanitizer", lambda: "the sanitizer")
    monkeypatch.setattr(sanitize, "has_hopper", lambda: True)
    monkeypatch.setattr(sanitize.subprocess, "run", fake)
    monkeypatch.setattr(sanitize.Tree, "build", lambda tree: built.append(tree.environment["DUALKV_HEAD_DIMS"]))
    if is_built:
        assert sanitize.main(["--only-build", str(tmp_path), "--head-dim", "64", "--head-dim", "128"]) == 0
        assert built == ["64,128"] and "kConsumerWarps * 32" in (tmp_path / "tree/csrc/sm90/ds_exchange.h").read_text()
    options = ["--built", str(tmp_path)] if is_built else []
    assert sanitize.main(["trees", "packs", "hostile", "--head-dim", "64", "--tool", tool, *options]) == 0
    assert capsys.readouterr().out == f"{tool}: clean\n"
    (command,) = called
    at = command.index("the sanitizer")
    assert command[at + 1 : at + 3] == ["--tool", tool]
    script, *rest = command[command.index(sys.executable) + 1 :]
    hostile = ["hostile"] if tool == "memcheck" else []
    assert rest == ["trees", "packs", *hostile, "--head-dim", "64"]
    assert (Path(script) == Path(sanitize.__file__)) == (tool == "memcheck")
    assert script.startswith(str(tmp_path)) == is_built
    assert built == (["64,128"] if is_built else ["64"] if tool == "racecheck" else [])


@pytest.mark.parametrize("parts", [[], ["trees", "leaves"]])
def test_parts_that_are_none(parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sanitize.main(parts)
    assert f"expected some of {', '.join(sanitize.PARTS)}, got {' '.join(parts) or 'none'}" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("tool", sanitize.TOOLS)
def test_the_tools_find_nothing(tool: str, tmp_path: Path) -> None:
    sanitizer = sanitize.find_sanitizer()
    if sanitizer is None:
        pytest.skip("compute-sanitizer is neither in PATH nor in CUDA_HOME/bin; it comes with the CUDA toolkit")
    assert sanitize.run_tool(tool, sanitizer, tmp_path) == "clean"
