"""The memory benchmark: its command, and which peaks its law is fitted to."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import bench_memory
import memory_report
import shapes
from figures import is_in_pieces


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_memory_command_on_the_cpu(tmp_path: Path) -> None:
    """Runs to the end, but has no peaks: a CPU's allocations are not counted."""
    pytest.importorskip("tqdm")
    out = tmp_path / "memory.json"
    assert bench_memory.main(["--device", "cpu", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["header"]["benchmark"] == "memory"
    assert {row["skipped"] for row in result["rows"]} == {"no GPU memory is counted here"}
    flex = {row["shape"] for row in result["rows"] if row["impl"] == "flex_packed"}
    names = [shape.name for shape in shapes.MEMORY_PRESETS["tiny"]]
    assert flex == {names[0], names[1], names[-2], names[-1]}
    assert memory_report.laws(result["rows"]) == dict.fromkeys(["dualkv_reference", "math_replicated", "flex_packed"])


def test_peaks_of_several_calls_are_not_in_the_law() -> None:
    """32K x 16 replicated rows of FlashAttention-2 do not fit one call; ours are far fewer."""
    rows: list[dict[str, Any]] = []
    for shape in shapes.MEMORY_PRESETS["grid"]:
        for impl, tokens in (("dualkv_sm90", shape.packed_tokens), ("fa2_replicated", shape.replicated_tokens)):
            responses = sum(shape.responses)
            row = {"shape": shape.name, "impl": impl, "h": 32, "d": 128, "peak_gib": 1 + 1e-4 * tokens}
            rows.append({**row, "prompt_tokens": tokens - responses, "response_tokens": responses})
    split = [row for row in rows if is_in_pieces(row, row["prompt_tokens"] + row["response_tokens"])]
    assert [(row["shape"], row["impl"]) for row in split] == [("16x32KxU(131,2048)", "fa2_replicated")]
    split[0]["peak_gib"] += 5
    laws = memory_report.laws(rows)
    assert {impl: one.points for impl, one in laws.items() if one} == {"dualkv_sm90": 12, "fa2_replicated": 11}
    assert all(one.m0_gib == pytest.approx(1) for one in laws.values() if one)
