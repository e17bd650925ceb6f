"""The law that peak memory follows: M0 + cP * (prompt tokens) + cR * (response tokens)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

GIB = 1 << 30


@dataclass(frozen=True)
class Law:
    """A least-squares fit; r2 is the share of the variance of the peaks that it explains."""

    m0_gib: float
    prompt_bytes: float
    response_bytes: float
    r2: float
    points: int

    def gib(self, prompt_tokens: float, response_tokens: float) -> float:
        return self.m0_gib + (self.prompt_bytes * prompt_tokens + self.response_bytes * response_tokens) / GIB


def fit(points: Sequence[tuple[int, int, float]]) -> Law | None:
    """The law through (prompt tokens, response tokens, GiB); None where the points do not determine it.

    Tokens are those that an implementation computes: with the prompt stored once P and mb * R, with the prompt
    replicated mb * P and mb * R.
    """
    if len(points) < 4:
        return None
    table = torch.tensor([(1.0, prompt, response) for prompt, response, _ in points], dtype=torch.float64)
    peaks = torch.tensor([peak for _, _, peak in points], dtype=torch.float64)
    scale = table.amax(dim=0)
    if torch.linalg.matrix_rank(table / scale, rtol=1e-6) < 3:
        return None
    solution = torch.linalg.lstsq(table / scale, peaks[:, None]).solution[:, 0]
    residual = peaks - table / scale @ solution
    variance = (peaks - peaks.mean()).square().sum()
    m0, prompt, response = (solution / scale).tolist()
    r2 = 1.0 - (residual.square().sum() / variance).item() if variance > 0 else 1.0
    return Law(m0, prompt * GIB, response * GIB, r2, len(points))
