"""The law of peak memory: the fit finds what is there, says how well, and refuses what is not determined."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

import law


def test_the_law_recovers_known_coefficients() -> None:
    points = [(p, mb * 1000, 2.5 + (p * 3e5 + mb * 1000 * 2e5) / law.GIB) for p in (4096, 8192, 32768) for mb in (4, 9)]
    found = law.fit(points)
    assert found is not None
    assert (found.m0_gib, found.prompt_bytes, found.response_bytes) == pytest.approx((2.5, 3e5, 2e5), rel=1e-6)
    assert found.r2 == pytest.approx(1.0)
    assert found.points == 6
    assert found.gib(10_000, 5_000) == pytest.approx(2.5 + (3e9 + 1e9) / law.GIB)


def test_the_law_says_how_well_it_fits() -> None:
    points = [
        (p, r, 1.0 + 1e-4 * p + 2e-4 * r + error)
        for (p, r), error in zip(
            [(1, 1), (1000, 1), (1, 1000), (1000, 1000), (500, 400)], (0.05, -0.05, 0.02, 0.04, -0.06)
        )
    ]
    found = law.fit(points)
    assert found is not None
    residuals = [peak - found.gib(p, r) for p, r, peak in points]
    mean = sum(peak for _, _, peak in points) / len(points)
    expected = 1 - sum(one**2 for one in residuals) / sum((peak - mean) ** 2 for _, _, peak in points)
    assert found.r2 == pytest.approx(expected)
    assert 0.5 < found.r2 < 0.999


@pytest.mark.parametrize(
    "points",
    [
        [],
        [(1, 1, 1.0), (2, 1, 2.0), (1, 2, 3.0)],
        [(1, 2, 1.0), (2, 4, 2.0), (3, 6, 3.0), (4, 8, 4.0)],  # prompt and response tokens in one proportion
        [(1, 2, 1.0), (1, 4, 2.0), (1, 6, 3.0), (1, 8, 4.0)],  # one prompt
    ],
)
def test_no_law_where_points_do_not_determine_one(points: list[tuple[int, int, float]]) -> None:
    assert law.fit(points) is None
