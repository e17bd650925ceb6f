# SPDX-License-Identifier: BSD-3-Clause
"""The kernels that score rows of logits, and their gradient, against PyTorch in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from launches import DEVICE, GPU_MARKS, counted_launches, needs_gpu
from torch import Tensor, nn

from flash_attn_dualkv import kernels
from flash_attn_dualkv import scores as lm_head

pytestmark = GPU_MARKS
NAN, INF = math.nan, math.inf
ROWS = 3
SENTINEL = 77.0
COLUMNS = (1, 7, 8, 9, 100, 1000, 4099, 20000)  # the last are more than a block reads at once

dtypes = pytest.mark.parametrize("dtype", kernels.LOGIT_DTYPES)
all_columns = pytest.mark.parametrize("columns", COLUMNS)


def contiguous(x: Tensor) -> Tensor:
    return x.clone()


def padded_rows(x: Tensor) -> Tensor:
    """The same values in wider rows that stay on 16 bytes, NaN behind each."""
    return x.new_full((len(x), (x.shape[1] + 15) // 8 * 8), NAN)[:, : x.shape[1]].copy_(x)


def odd_rows(x: Tensor) -> Tensor:
    """The same values with a row's address on 16 bytes now and then."""
    return x.new_full((len(x), x.shape[1] // 8 * 8 + 11), NAN)[:, : x.shape[1]].copy_(x)


def off_by_one(x: Tensor) -> Tensor:
    """The same values, one element behind an aligned address."""
    return x.new_full((x.numel() + 2,), NAN)[1:-1].view(x.shape).copy_(x)


def every_other_row(x: Tensor) -> Tensor:
    return x.new_full((2 * len(x), x.shape[1]), NAN)[::2].copy_(x)


LAYOUTS = (contiguous, padded_rows, odd_rows, off_by_one, every_other_row)
layouts = pytest.mark.parametrize("layout", LAYOUTS)
Layout = Callable[[Tensor], Tensor]


def logits_of(columns: int, dtype: torch.dtype, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Logits, and targets of which the last row's is the likeliest token, the first row's the last one."""
    generator = torch.Generator().manual_seed(columns)
    logits = (4 * torch.randn(rows, columns, generator=generator) + 9).to(dtype)
    targets = torch.randint(columns, (rows,), generator=generator)
    targets[0], targets[-1] = columns - 1, logits[-1].argmax()
    return logits.to(DEVICE), targets.to(DEVICE)


class Scores(NamedTuple):
    normalizer: Tensor
    chosen: Tensor
    entropy: Tensor


def expected_scores(logits: Tensor, targets: Tensor, temperature: float) -> Scores:
    scaled = logits.double() / temperature
    log_p = scaled.log_softmax(-1)
    entropy = torch.special.entr(log_p.exp()).sum(-1)
    return Scores(scaled.logsumexp(-1), scaled.gather(-1, targets[:, None])[:, 0], entropy)


def score(logits: Tensor, targets: Tensor, temperature: float = 1.0, elsewhere: float = NAN) -> Scores:
    """Of the kernel that computes entropies; the other one must have the same bits."""
    normalizer, chosen, entropy = kernels.score_rows(
        logits, targets, temperature, elsewhere=elsewhere, with_entropy=True
    )
    assert entropy is not None
    less = kernels.score_rows(logits, targets, temperature, elsewhere=elsewhere, with_entropy=False)
    assert less[2] is None
    assert_same_bits((normalizer, chosen), less[:2])
    return Scores(normalizer, chosen, entropy)


def assert_same_bits(got: tuple[Tensor | None, ...], expected: tuple[Tensor | None, ...]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert one is not None and other is not None
        assert torch.equal(one.view(torch.int32), other.view(torch.int32))


def assert_close(got: Scores, expected: Scores) -> None:
    for one, other, error in zip(got, expected, (4e-7, 1e-7, 2e-6)):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=error, atol=error)


@layouts
@all_columns
@dtypes
def test_scores(dtype: torch.dtype, columns: int, layout: Layout) -> None:
    logits, targets = logits_of(columns, dtype)
    placed = layout(logits)
    for temperature in (1.0, 0.7):
        assert_close(score(placed, targets, temperature), expected_scores(logits, targets, temperature))


@all_columns
@dtypes
def test_bits_of_a_row_are_its_own(dtype: torch.dtype, columns: int) -> None:
    """Whatever its address, its neighbours and their number."""
    logits, targets = logits_of(columns, dtype, rows=4)
    expected = score(logits, targets, 0.7)
    for layout in LAYOUTS:
        assert_same_bits(score(layout(logits), targets, 0.7), expected)
    for row in range(4):
        alone = slice(row, row + 1)
        own = tuple(one[alone] for one in expected)
        assert_same_bits(score(logits[alone], targets[alone], 0.7), own)
        assert_same_bits(score(logits[alone].clone(), targets[alone], 0.7), own)
        others = torch.full_like(logits, NAN)
        others[row] = logits[row]
        assert_same_bits(tuple(one[alone] for one in score(others, targets, 0.7)), own)


@dtypes
def test_targets_elsewhere(dtype: torch.dtype) -> None:
    """Another process has them, or none."""
    logits, targets = logits_of(100, dtype, rows=6)
    inside = score(logits, targets)
    outside = torch.tensor([-1, 100, -(2**40), 2**40, 2**32, targets[5]], device=DEVICE)
    got = score(logits, outside, elsewhere=0.0)
    assert got.chosen[:5].tolist() == [0.0] * 5 and got.chosen[5] == inside.chosen[5]
    assert_same_bits((got.normalizer, got.entropy), (inside.normalizer, inside.entropy))
    assert score(logits, outside).chosen[:5].isnan().all()


@pytest.mark.parametrize("columns", [9, 1000, 20000])
@dtypes
def test_masked_logits(dtype: torch.dtype, columns: int) -> None:
    """Logits of -inf have probability 0; all but one, the first threads' own, every second one."""
    logits, targets = logits_of(columns, dtype, rows=4)
    logits[0, :-1] = -INF
    logits[1, : columns // 2] = -INF
    logits[2, ::2] = -INF
    targets[:] = torch.tensor([columns - 1, columns - 1, 1, 0])
    got = score(logits, targets, 0.7)
    assert_close(got, expected_scores(logits, targets, 0.7))
    assert got.entropy[0] == 0
    d_logits = gradient(logits, targets, 0.7, got, torch.ones(4), torch.ones(4))
    assert not d_logits[logits == -INF].any()
    check_gradient(d_logits, logits, targets, 0.7, torch.ones(4), torch.ones(4))


@pytest.mark.parametrize("columns", [9, 1000, 20000])
@dtypes
def test_rows_without_a_softmax(dtype: torch.dtype, columns: int) -> None:
    """All masked: the logarithm of nothing. With NaN or +inf: NaN, in this row alone."""
    logits, targets = logits_of(columns, dtype, rows=6)
    expected = score(logits, targets)
    logits[0] = -INF
    logits[1, columns // 2] = NAN
    logits[2, columns - 1] = INF
    logits[3] = NAN
    logits[4] = INF
    got = score(logits, targets)
    assert got.normalizer[0] == -INF and got.chosen[0] == -INF and bool(got.entropy[0].isnan())
    assert bool(got.normalizer[1:5].isnan().all()) and bool(got.entropy[1:5].isnan().all())
    assert_same_bits(tuple(one[5:] for one in got), tuple(one[5:] for one in expected))
    d_logits = gradient(logits, targets, 1.0, got, torch.ones(6))
    assert bool(d_logits[:5].isnan().all()) and not bool(d_logits[5].isnan().any())


@dtypes
def test_logits_far_apart(dtype: torch.dtype) -> None:
    """As large as the type has them, rising, falling, and equal."""
    most = min(torch.finfo(dtype).max, 1e30)
    line = torch.linspace(-1, 1, 20000)
    logits = torch.stack([line * most, -line * most, 300 * line, -300 * line, 0 * line + 5]).to(DEVICE, dtype)
    targets = torch.tensor([19999, 0, 19999, 0, 7], device=DEVICE)
    assert_close(score(logits, targets), expected_scores(logits, targets, 1.0))


# --- the gradient ---


def gradient(
    logits: Tensor,
    targets: Tensor,
    temperature: float,
    scores: Scores,
    d_logps: Tensor,
    d_entropy: Tensor | None = None,
) -> Tensor:
    d_logps, d_entropy = d_logps.to(DEVICE), None if d_entropy is None else d_entropy.to(DEVICE)
    return kernels.score_rows_gradient(
        logits, targets, temperature, scores.normalizer, d_logps, scores.entropy, d_entropy
    )


def check_gradient(
    got: Tensor, logits: Tensor, targets: Tensor, temperature: float, d_logps: Tensor, d_entropy: Tensor | None
) -> None:
    """Rounded once: half a unit in the last place of its type, and what float32 has lost before."""
    log_p = (logits.double() / temperature).log_softmax(-1)
    p = log_p.exp()
    d_logps = d_logps.to(DEVICE).double()[:, None] / temperature
    expected = -p * d_logps
    at_target = torch.zeros_like(p).scatter_(-1, targets[:, None], 1.0)
    expected += at_target * d_logps
    if d_entropy is not None:
        entropy = torch.special.entr(p).sum(-1, keepdim=True)
        d_entropy = d_entropy.to(DEVICE).double()[:, None] / temperature
        expected -= d_entropy * p * (log_p.clamp(min=-1e4) + entropy)
    assert got.dtype == logits.dtype and got.is_contiguous()
    of_type, scale = torch.finfo(got.dtype), max(float(d_logps.abs().max()), 1.0) * 4
    error = (got.double() - expected).abs()
    allowed = (
        0.5 * of_type.eps * expected.abs() + 4e-6 * scale * p.clamp(min=1e-3) + of_type.smallest_normal * of_type.eps
    )
    assert bool((error <= allowed).all()), float((error / allowed).max())


def inside(monkeypatch: pytest.MonkeyPatch, name: str, offset: int) -> list[Tensor]:
    """Lets a kernel's results lie between sentinels; gives what surrounds them."""
    make, margins = getattr(kernels, name), []

    def surrounded(*arguments: object, **options: object) -> Tensor:
        result: Tensor = make(*arguments, **options)
        memory = result.new_full((result.numel() + 2 * offset,), SENTINEL)
        margins.extend((memory[:offset], memory[memory.numel() - offset :]))
        return memory[offset : memory.numel() - offset].view(result.shape)

    monkeypatch.setattr(kernels, name, surrounded)
    return margins


@pytest.mark.parametrize("with_entropy", [False, True])
@layouts
@all_columns
@dtypes
def test_gradient(
    dtype: torch.dtype, columns: int, layout: Layout, with_entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is written on any address, and nothing besides it."""
    logits, targets = logits_of(columns, dtype)
    generator = torch.Generator().manual_seed(1)
    d_logps, d_entropy = torch.randn(2, ROWS, generator=generator).unbind()
    asked = d_logps, d_entropy if with_entropy else None
    scores = score(logits, targets, 0.7)
    found = []
    for offset in (64, 63):
        with monkeypatch.context() as patch:
            margins = inside(patch, "gradient_of", offset)
            found.append(gradient(layout(logits), targets, 0.7, scores, *asked))
            assert len(margins) == 2 and all(bool((one == SENTINEL).all()) for one in margins)
        check_gradient(found[-1], logits, targets, 0.7, *asked)
    assert torch.equal(*found)


@dtypes
def test_scores_are_written_inside(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets = logits_of(1000, dtype)
    expected = score(logits, targets)
    margins = inside(monkeypatch, "uninitialised", 64)
    assert_same_bits(score(logits, targets), expected)
    assert len(margins) == 4 and all(bool((one == SENTINEL).all()) for one in margins)


def test_gradient_of_parts_of_a_vocabulary() -> None:
    """Normaliser and entropy are the whole's, a target lies in one of the parts: together the whole's gradient."""
    logits, targets = logits_of(1000, torch.bfloat16)
    scores, ones = score(logits, targets), torch.ones(ROWS)
    whole = gradient(logits, targets, 1.0, scores, ones, ones)
    parts = [gradient(logits[:, begin : begin + 500], targets - begin, 1.0, scores, ones, ones) for begin in (0, 500)]
    assert torch.equal(torch.cat(parts, 1), whole)


def test_an_expanded_gradient() -> None:
    """As a sum hands it over; and no rows at all."""
    logits, targets = logits_of(100, torch.bfloat16)
    scores = score(logits, targets)
    got = gradient(logits, targets, 1.0, scores, torch.ones(1).expand(ROWS))
    assert torch.equal(got, gradient(logits, targets, 1.0, scores, torch.ones(ROWS)))
    nothing = score(logits[:0], targets[:0])
    assert nothing.normalizer.shape == (0,)
    assert gradient(logits[:0], targets[:0], 1.0, nothing, torch.ones(0)).shape == (0, 100)


def test_arguments_that_do_not_match() -> None:
    logits, targets = logits_of(100, torch.bfloat16)
    for wrong in (targets[:-1], targets.int(), targets[:, None]):
        with pytest.raises(ValueError, match="logits and targets: expected"):
            score(logits, wrong)


@needs_gpu
def test_more_than_2_31_logits() -> None:
    columns, last = 151936, slice(-2, None)
    rows = 2**31 // columns + 3
    logits = torch.zeros(rows, columns, dtype=torch.bfloat16, device=DEVICE)
    few, targets = logits_of(columns, torch.bfloat16, rows=2)
    logits[last] = few
    all_targets = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    all_targets[last] = targets
    got, expected = score(logits, all_targets), score(few, targets)
    assert_same_bits(tuple(one[last] for one in got), expected)
    d_logits = gradient(logits, all_targets, 1.0, got, torch.ones(rows), torch.ones(rows))
    assert torch.equal(d_logits[last], gradient(few, targets, 1.0, expected, torch.ones(2), torch.ones(2)))


# --- the LM head ---


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the head take the kernels where tests run them."""
    if DEVICE == "cpu":
        monkeypatch.setattr(lm_head, "_has_kernels", lambda _, logits: logits.dtype in kernels.LOGIT_DTYPES)


@pytest.mark.usefixtures("on_host")
@pytest.mark.parametrize("with_entropy", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@dtypes
def test_the_head(dtype: torch.dtype, temperature: float, with_entropy: bool) -> None:
    """Values and gradients of a head by the kernels, against those of the same head in float64."""
    torch.manual_seed(0)
    rows, width, columns = 11, 16, 203
    head = nn.Linear(width, columns, dtype=dtype, device=DEVICE)
    hidden, targets = torch.randn(rows, width).to(DEVICE, dtype), torch.randint(columns, (rows,), device=DEVICE)
    weights = torch.randn(2, rows, device=DEVICE)

    def outcome(dtype: torch.dtype) -> list[Tensor]:
        module, rows_of_head = head.to(dtype), hidden.to(dtype).requires_grad_()
        scores = lm_head.score_in_chunks(
            module, rows_of_head, targets, rows=4, temperature=temperature, with_entropy=with_entropy
        )
        loss = sum((one * weight).sum() for one, weight in zip(scores[: 1 + with_entropy], weights))
        assert isinstance(loss, Tensor)
        return [*scores, *torch.autograd.grad(loss, (rows_of_head, *module.parameters()))]

    with counted_launches() as counts:
        got = outcome(dtype)
    assert counts == {"dualkv_score_rows": 3, "dualkv_score_gradient": 3}
    with counted_launches() as counts:
        expected = outcome(torch.float64)
    assert not counts
    error = 16 * torch.finfo(dtype).eps
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=error, atol=error)


@needs_gpu
def test_who_takes_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch scores what they cannot read, and everything where the reference is asked for."""
    settings = lm_head._Settings(nn.Identity(), 4, 1.0, False, lambda: None, None, (), 0, None)
    logits = torch.zeros(4, 8, dtype=torch.bfloat16, device=DEVICE)
    assert lm_head._has_kernels(settings, logits)
    assert not lm_head._has_kernels(settings, logits.cpu())
    assert not lm_head._has_kernels(settings, logits.double())
    assert not lm_head._has_kernels(settings, logits.T)
    assert not lm_head._has_kernels(settings._replace(temperature=-1.0), logits)
    monkeypatch.setattr(lm_head, "forces_reference", lambda: True)
    assert not lm_head._has_kernels(settings, logits)
