# SPDX-License-Identifier: BSD-3-Clause
"""Without SGLang: the scripts that measure it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_sglang
import check_sglang
import mismatch_sglang
import pytest
import sglang_rig
import torch
import trainers_report
import vllm_rig
from engine_processes import Engines

ROW = {
    "groups": 1, "n": 2, "prompt": 3, "new": "4", "step_ms": 1.5, "step_ms_10": 1.0, "step_ms_90": 2.0, "layers": 8,
    "tokens_per_s": 5.0, "device": "NVIDIA H200", "sglang": "0.5.12",
}  # fmt: skip
TOLD = {"steps": [0.5, 0.25, 0.75, 0.25, 0.5, 0.25, 9.0, 9.0], "about": {"backend": "dualkv"}}


class Llm:
    """Stands for SGLang's Engine: its scheduler has sampled what was asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def flush_cache(self) -> Any:
        self.calls.append("flush")
        return SimpleNamespace(success=self.calls.count("flush") == 2)

    def collective_rpc(self, method: str, path: str) -> None:
        self.calls.append(method)
        Path(path).write_text(json.dumps(TOLD))

    def generate(self, input_ids: list[list[int]], sampling_params: dict[str, Any]) -> list[dict[str, Any]]:
        self.calls.append("generate")
        samples = len(input_ids) * sampling_params["n"]
        return [{"output_ids": [1] * sampling_params["max_new_tokens"], "meta_info": {"cached_tokens": 64}}] * samples


def test_rollout() -> None:
    """Steps are those since the rollout began, behind an empty cache, without the last ones, which requests end."""
    llm = Llm()
    found = bench_sglang.roll_out(llm, 2, 3, 5, 16, seed=0)
    assert llm.calls == ["flush", "flush", "rig_tell", "generate", "rig_tell"]
    assert found["step_ms"] == 500 and found["steps"] == 8 and found["cached_tokens"] == 64
    assert found["decode_tokens_per_s"] == 12 and found["backend"] == "dualkv"


def test_rows_of_engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Engines run in the order given, are compared with SGLang's own on the page, and one that fails ends with 1."""
    engines = Engines(ROW, '"backend": "triton"')
    monkeypatch.setattr(vllm_rig.subprocess, "run", engines.run)
    arguments = ["--out", str(tmp_path), "--commit", "0123456", "--options", '{"page_size": 64}', "--engines"]
    assert bench_sglang.main([*arguments, "stock", "dualkv", "stock", "flashinfer"]) == 0
    settings = [json.loads(command[-1]) for command in engines.commands]
    assert [engine["backend"] for engine in settings] == ["fa3", "dualkv", "fa3", "flashinfer"]
    assert settings[0]["options"] == {"page_size": 64} and settings[0]["rollouts"] == [[16, 16, 8192, 128, 128]]
    (path,) = tmp_path.iterdir()
    assert [row["who"] for row in json.loads(path.read_text())["rows"]] == ["stock", "dualkv", "stock", "flashinfer"]
    page = trainers_report.rollouts_of(tmp_path, "SGLang")
    assert "### SGLang 0.5.12" in page and page.count("| qwen3-8b, 8 layers |") == 3 and "SGLang, FlashInfer" in page
    assert trainers_report.rollouts_of(tmp_path / "none", "SGLang") == "Not measured yet."
    assert bench_sglang.main([*arguments, "triton", "stock"]) == 1
    with pytest.raises(SystemExit):
        bench_sglang.main(["--shape", "1x2x3x4-5"])


def test_checks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Every token is compared, and an engine that fails, or whose steps are SGLang's own, fails the check."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    result: dict[str, Any] = {"found": {"together": [[[1, 2]], [[-1.0, -2.0]]]}, "about": {"steps": {"decode": 1}}}
    engines = Engines(result, '"backend": "triton"')
    monkeypatch.setattr(vllm_rig.subprocess, "run", engines.run)
    assert check_sglang.main(["--features", "sleep"]) == 1 and engines.count == 3
    settings = json.loads(engines.commands[0][-1])
    assert settings["options"] == sglang_rig.ROOM | {"enable_memory_saver": True} and settings["sleeps"] == [1]
    engines.slow = "no engine"
    assert check_sglang.main([]) == 0
    assert capsys.readouterr().out.count("together: 2 of 2 tokens") == 3 * len(check_sglang.FEATURES)
    result["about"] = {}
    assert check_sglang.main(["--features", "defaults", "--stock", "unscheduled"]) == 1
    assert (
        engines.environments[-3][sglang_rig.UNSCHEDULED] == "1"
        and sglang_rig.UNSCHEDULED not in engines.environments[0]
    )


def test_differences(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A difference fails, but for SGLang's FlashAttention, and so does an engine that tells nothing."""
    row = {"device": "NVIDIA H200", "max": 0.0}
    engines = Engines(row, "no engine")
    monkeypatch.setattr(vllm_rig.subprocess, "run", engines.run)
    arguments = ["--out", str(tmp_path), "--commit", "0123456", "--engines"]
    assert mismatch_sglang.main([*arguments, "dualkv", "--features", *mismatch_sglang.FEATURES]) == 0
    assert engines.environments[1][mismatch_sglang.ORIGINAL] == "1" and "gather" in str(engines.environments[2])
    assert json.loads(engines.commands[3][-1])["options"].items() >= {"enable_mixed_chunk": True}.items()
    row["max"] = 1e-6
    assert [mismatch_sglang.main([*arguments, *names]) for names in (["stock"], ["stock", "dualkv"])] == [0, 1]
    engines.slow = "child"
    assert mismatch_sglang.main([*arguments, "dualkv"]) == 1


def test_prompts() -> None:
    """Siblings differ in their last token alone, and prompts that are apart in their first one, too."""
    together, apart = (check_sglang.prompts_of(are_apart) for are_apart in (False, True))
    assert len({tuple(prompt[:-1]) for prompt in together}) == len(check_sglang.LENGTHS)
    assert len({prompt[0] for prompt in apart}) == len({prompt[-1] for prompt in together}) == len(together)
    assert [prompt[1:] for prompt in apart] == [prompt[1:] for prompt in together]


def test_forced_tokens() -> None:
    """A request's next token depends on its last one alone, in prompts and when it decodes."""
    modes = [SimpleNamespace(is_decode=lambda is_decode=value: is_decode) for value in (True, False)]
    decoding, prompts = (
        sglang_rig.successors(SimpleNamespace(input_ids=torch.tensor(tokens), forward_mode=mode, **more))
        for mode, tokens, more in (
            (modes[0], [5, 9, 5], {}),
            (modes[1], [1, 5, 2, 3, 9, 5], {"extend_seq_lens": torch.tensor([2, 3, 1])}),
        )
    )
    assert decoding.equal(prompts) and decoding.dtype == torch.int32
    assert decoding[0] == decoding[2] != decoding[1] and 1000 <= int(decoding.min()) <= int(decoding.max()) < 101003
