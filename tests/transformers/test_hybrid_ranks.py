"""Hybrid models sharded over processes, each process with samples of its own."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
from hybrid_models import KINDS
from tiny_models import MIXED, TOLERANCES, Tolerance

SETUP = ranks.Setup(
    "gloo",
    "cpu",
    torch.float32,
    MIXED,
    ["fsdp1", "fsdp2", "fsdp2, mixed precision"],
    make="hybrid_models:hybrid_model",
    name=KINDS[0],
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], ranks.Found]:
    return ranks.run(SETUP, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("wrapper", SETUP.wrappers)
def test_wrapped_models(found: Any, wrapper: str) -> None:
    """Log-probabilities of each rank's own samples, and the mean of the ranks' gradients, with checkpointing."""
    exact = Tolerance(TOLERANCES[torch.float32].value, 2e-5)
    ranks.check(SETUP, found, wrapper, Tolerance(0.05, 0.2) if "mixed" in wrapper else exact)
