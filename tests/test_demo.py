"""The newcomer's first command: it runs anywhere, says why it took the CPU, and notices wrong results."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from flash_attn_dualkv import build_info, demo

SMALL = ["--prompt", "48", "--responses", "3", "--shortest", "2", "--longest", "20", "--head-dim", "16"]


def has_usable_gpu() -> bool:
    return torch.cuda.is_available() and build_info()["compiled"]


def test_prints_the_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--device", "cpu", *SMALL]) == 0
    out = capsys.readouterr().out
    for expected in ("asked for with --device cpu", "rho = ", "time, ms", "gradients, MiB", "the same"):
        assert expected in out
    for name in ("out", "dQ", "dK", "dV"):
        for part in ("prompt", "responses"):
            assert f"{name:<4} {part}" in out


def test_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "flash_attn_dualkv.demo", "--device", "cpu", *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "the same" in done.stdout


@pytest.mark.skipif(has_usable_gpu(), reason="the demo takes the GPU here")
def test_says_why_there_is_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(SMALL) == 0
    device, reason = demo.choose_device("auto")
    assert device.type == "cpu"
    assert reason
    assert f"CPU: {reason}" in capsys.readouterr().out
    assert demo.main(["--device", "cuda", *SMALL]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.gpu
def test_runs_on_the_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--device", "cuda", "--prompt", "700", "--responses", "5", "--longest", "300"]) == 0
    assert torch.cuda.get_device_name() in capsys.readouterr().out


@pytest.mark.parametrize("corrupt", ["one value", "not a number"])
def test_a_wrong_output_is_noticed(
    corrupt: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = demo.flash_attn_dualkv_varlen_func
    damage = torch.nan if corrupt == "not a number" else 1e-3

    def wrong(*arguments: object, **options: object) -> torch.Tensor:
        out = right(*arguments, **options)
        return out + torch.zeros_like(out).index_fill_(0, torch.tensor([5]), damage)

    monkeypatch.setattr(demo, "flash_attn_dualkv_varlen_func", wrong)
    assert demo.main(["--device", "cpu", *SMALL]) == 1
    out = capsys.readouterr().out
    assert "NOT THE SAME" in out
    assert out.count("above the bound") == 1 or corrupt == "not a number"


def test_lost_gradients_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = demo.flash_attn_dualkv_varlen_func

    def wrong(q: torch.Tensor, k_context: torch.Tensor, *rest: object, **options: object) -> torch.Tensor:
        """The prompt's K takes part, but only half of its gradient comes back."""
        return right(q, (k_context + k_context.detach()) / 2, *rest, **options)

    monkeypatch.setattr(demo, "flash_attn_dualkv_varlen_func", wrong)
    assert demo.main(["--device", "cpu", *SMALL]) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--heads", "3", "--kv-heads", "2"], "--heads"),
        (["--shortest", "9", "--longest", "3"], "--shortest"),
        (["--head-dim", "12"], "head dimension"),
    ],
)
def test_impossible_sizes_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--device", "cpu", "--prompt", "8", "--responses", "1", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_sizes_below_one_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        demo.main(["--prompt", "0"])
    assert caught.value.code == 2
    assert "--prompt: expected at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize("copies", [1, 2, 3, 7, 8, 28, 64])
def test_shares_of_the_copies_are_exact(copies: int) -> None:
    shares = demo.shares(copies)
    assert len(shares) == copies
    assert sum(shares) == 1
    assert all((1 / share).is_integer() and int(1 / share).bit_count() == 1 for share in shares)


def test_token_counts() -> None:
    group = demo.make_group(demo.CPU_SIZES, torch.float32, torch.device("cpu"), seed=0)
    assert len(group.responses) == demo.CPU_SIZES.responses
    assert len(group.q) == group.packed_tokens == demo.CPU_SIZES.prompt + sum(group.responses)
    assert len(group.copies()) == group.replicated_tokens
    assert group.copies().unique().numel() == group.packed_tokens
