"""The newcomer's first command: it runs anywhere, says why it took the CPU, and notices wrong results."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from flash_attn_dualkv import build_info, demo

SMALL = ["--device", "cpu", "--prompt", "48", "--response", "2,20,7"]


def test_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "flash_attn_dualkv.demo", *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    tokens = "replicated 173, shared 77: rho = 2.25"
    for expected in ("CPU: asked for with --device cpu", tokens, "time, ms", "results, MiB", "the same"):
        assert expected in done.stdout
    for name in ("out", "dQ", "dK", "dV"):
        assert f"\n{name}  " in done.stdout


@pytest.mark.skipif(torch.cuda.is_available() and build_info()["compiled"], reason="the demo takes the GPU here")
def test_says_why_there_is_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    device, reason = demo.choose_device("auto")
    assert device == "cpu" and reason
    assert demo.main(SMALL[2:]) == 0
    assert f"CPU: {reason}" in capsys.readouterr().out
    with pytest.raises(SystemExit) as caught:
        demo.main(["--device", "cuda", *SMALL[2:]])
    assert caught.value.code == 2
    assert reason in capsys.readouterr().err


@pytest.mark.gpu
def test_runs_on_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--device", "cuda", "--prompt", "700", "--responses", "5", "--response", "131..300"]) == 0
    assert torch.cuda.get_device_name() in capsys.readouterr().out


# Of the output, with the function and its arguments.
DAMAGES: dict[str, Callable[..., torch.Tensor]] = {
    "one value": lambda out, *_: out + torch.zeros_like(out).index_fill_(0, torch.tensor([5]), 1e-3),
    "not a number": lambda out, *_: out.index_fill(0, torch.tensor([5]), torch.nan),
    "half of a gradient": lambda out, call, q, k, *rest: call(q, (k + k.detach()) / 2, *rest),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_wrong_results_are_noticed(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    call, damage = demo.flash_attn_dualkv_varlen_func, DAMAGES[name]
    monkeypatch.setattr(demo, "flash_attn_dualkv_varlen_func", lambda *x: damage(call(*x), call, *x))
    assert demo.main(SMALL) == 1
    assert "NOT THE SAME" in capsys.readouterr().out
