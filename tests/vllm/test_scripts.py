# SPDX-License-Identifier: BSD-3-Clause
"""Without vLLM: its entry point, and the scripts that measure it: shapes, what processes print, comparison."""

from __future__ import annotations

import itertools
import json
import re
import sys
from functools import partial
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import bench_vllm
import check_vllm
import mismatch_vllm
import pytest
import replicas
import vllm_rig
from engine_processes import Engines


def test_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """What vLLM calls in every process is there, and does nothing where there is no vLLM to register with."""
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    (value,) = re.findall(r'^\[project.entry-points."vllm.general_plugins"\]\nflash_attn_dualkv = "(.*)"$', text, re.M)
    register = EntryPoint("flash_attn_dualkv", value, "vllm.general_plugins").load()
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert register() is None


SAMPLED = [[[1, 2]], [[-1.0, -2.0]]]


def test_checks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An engine that runs out of time fails the check, its output is shown, and the others are compared."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    first, *others = check_vllm.FEATURES
    for check, slow, count, said in (
        (
            partial(check_vllm.check_features, [first]),
            '"exact": "trainer"',
            4,
            "dualkv   against stock, alone: 2 of 2",
        ),
        (partial(check_vllm.check_features, [first]), "TRITON_ATTN", 4, "nothing to compare with"),
        (
            partial(check_vllm.check_features, others),
            "speculative_config",
            30,
            "stock    against stock, together: 2 of 2 tokens",
        ),
        (check_vllm.check_invariant, "max_num_batched_tokens", 3, "dualkv_invariant: alone equal to the bit"),
    ):
        result = {"found": {"together": SAMPLED, "alone": SAMPLED}, "about": {"steps": {"decode": 1}}}
        engines = Engines(result, slow)
        monkeypatch.setattr(vllm_rig.subprocess, "run", engines.run)
        assert not check(1.0) and engines.count == count
        text = capsys.readouterr().out
        assert "FAILED: time limit\nit was here" in text and said in text
        engines.slow = "no engine"
        assert check(1.0)
        result["about"] = {}  # no step on this package
        assert check(1.0) == (check is check_vllm.check_invariant)
        capsys.readouterr()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert (
        check_vllm.check_features(["two GPUs"], 1.0) and "takes two GPUs, and there is one" in capsys.readouterr().out
    )


def test_differences() -> None:
    """Differences count up to the first token that one of all has sampled otherwise; without any, nothing fits."""
    one = [[1, 2, 3], [4, 5, 6]], [[-1.0, -2.0, -3.0], [-1.0, -1.0, -1.0]]
    near = [[1, 2, 3], [4, 9, 6]], [[-1.25, -2.0, -4.0], [-1.0, -9.0, -9.0]]
    third = [[1, 2, 9], [9, 5, 6]], [[0.0] * 3] * 2
    assert check_vllm.differences(one, near) == (4, 1.25 / 4, 1.0)
    assert check_vllm.differences(one, near, third) == (2, 0.125, 0.25)
    count, *nothing = check_vllm.differences(one, ([[7], [7]], [[0.0], [0.0]]))
    assert count == 0 and not any(value <= 1e9 for value in nothing)
    with pytest.raises(ValueError, match="certain"):
        vllm_rig.refuse_certain(-1e-5)


@pytest.mark.parametrize("router", ["verl", "siblings"])
def test_lists_of_replicas(router: str) -> None:
    """All requests of a step are on one of the replicas, whichever router; this package's keeps prompts together."""
    lists = replicas.lists_of(router, 32, 16, 8192, 512, 2)
    lengths = replicas.draw_lengths(32, 16, 512, 0.5, 0)
    assert sorted(itertools.chain(*lists)) == sorted((prompt, new) for (prompt, _), new in lengths.items())
    assert max(lengths.values()) == 1024 and 450 < sum(lengths.values()) / 512 < 550
    copies = sum(len(dict(found)) for found in lists)
    assert copies == 64 if router == "verl" else copies <= 40
    with pytest.raises(ValueError, match="at most 2048 requests, got 4096"):
        replicas.lists_of("verl", 256, 16, 8192, 512, 8)


def test_replicas_of_an_engine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Each live replica has a process and a GPU, and the last one's seconds are said; else the one that ends last."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    found = STEP | {"router": "verl", "run": 0, "seconds": 7.0, "model_s": 6.0, "prompts": 3, "tokens_per_s": 5.0}
    engines = Engines(found | {"device": "NVIDIA H200"}, "no engine")
    monkeypatch.setattr(vllm_rig.subprocess, "run", engines.run)
    arguments = ["--engines", "dualkv", "--routers", "verl", "--replicas", "2", "--out", str(tmp_path), "--commit", "0"]
    assert bench_vllm.main([*arguments, "--live"]) == 0 and engines.count == 2
    settings = [json.loads(command[-1]) for command in engines.commands]
    assert [engine["replica"] for engine in settings] == [0, 1] and settings[0]["options"][
        "kv_cache_memory_bytes"
    ] > 2e10
    assert "('dualkv', 'verl', 0): 2 replicas, the last one's 7.0 s" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        bench_vllm.main([*arguments, "--live", "--replicas", "4"])
    with pytest.raises(SystemExit):
        bench_vllm.main([*arguments, "--model", "qwen3.5-27b"])
    engine = vllm_rig.Engine(backend="CUSTOM", routers=["verl", "siblings"], replicas=2)
    (first, apart), (second, together) = bench_vllm.cases(engine, [32, 16, 8192, 512, 512], 1)
    assert first["prompts"] == 32 and second["prompts"] < 20 and len(apart) == first["requests"] == 256
    assert second["model_s"] < first["model_s"] and max(new for _, new in together) == 1024


ROW = {"mean": 0.5, "largest": 1, "k3": 0, "equal": 0.25, "first_token": 0, "logprob": -3, "device": "NVIDIA H200"}
STEP = {"groups": 1, "n": 2, "prompt": 3, "new": "4", "step_ms": 1.5, "step_ms_10": 1.0, "step_ms_90": 2.0}


@pytest.mark.parametrize(
    ("module", "row"),
    [(bench_vllm, STEP | {"model": "qwen3-8b", "tokens_per_s": 5.0, "device": "NVIDIA H200"}), (mismatch_vllm, ROW)],
)
def test_rows_of_engines(module: Any, row: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Rows of the engines that did not fail are written, and the exit status says that one has failed."""
    engines = Engines(row, "TRITON_ATTN")
    monkeypatch.setattr(vllm_rig.subprocess, "run", engines.run)
    assert (
        module.main(["--engines", "triton", "stock", "--out", str(tmp_path), "--commit", "0123456"]) == 1
        and engines.count == 2
    )
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text())["rows"] == [{"who": "stock"} | row]
