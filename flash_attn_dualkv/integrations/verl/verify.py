# SPDX-License-Identifier: BSD-3-Clause
"""The first steps beside verl's own path: log-probabilities and the norm of the gradient."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from ...parallel.agreement import all_ranks, largest_of_ranks
from ..common.options import PREFIX
from ..common.pipeline import difference
from .micro_batches import Lengths

logger = logging.getLogger(__name__)

# A wrong layout is off by 0.15 nats a token and more; bf16 over 28 layers by 0.03 on average, and
# by 0.001 in the norm.
MOST_MEAN_DIFFERENCE = 0.08
MOST_NORM_DIFFERENCE = 0.1
METRICS = tuple(
    f"{PREFIX}/verify_{name}" for name in ("max_difference", "mean_difference", "grad_norm_difference", "failed")
)


def run_both(engine: Any, data: TensorDict, forward_only: bool, run: Callable[[bool], Any]) -> tuple[Any, bool | None]:
    """Run both paths: output and gradients stay verl's.

    Also whether the paths agree; None where scores do, and gradients overflow on both, as those of
    fp16's first steps.
    """
    before = tu.get_non_tensor_data(data, "return_model_output", False)
    tu.assign_non_tensor(data, return_model_output=True)
    shared = run(True)
    norm = 0.0
    if not forward_only:
        norm = engine.gradient_norm()
        engine.optimizer_zero_grad()
    stock = run(False)
    tu.assign_non_tensor(data, return_model_output=before)
    expected = norm if forward_only else engine.gradient_norm()
    # Other pipeline stages than the last have no output.
    found = [0.0, 0.0]
    if stock:
        found = _difference(shared["model_output"], stock["model_output"], Lengths.of(data)).tolist()
    largest, mean, off = largest_of_ranks([*found, difference_of_norms(norm, expected)], all_ranks())
    agree: bool | None = mean <= MOST_MEAN_DIFFERENCE and off <= MOST_NORM_DIFFERENCE
    text = f"largest difference of a score {largest:.2e}, mean {mean:.2e}, gradient norm {off:.2%}"
    if not math.isfinite(expected):
        text += " (it overflows on verl's path)"
        agree = None if agree else False
    # The first rank says it for all.
    if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
        if agree is None:
            logger.warning("flash_attn_dualkv: gradients are not verified yet, %s", text)
        elif agree:
            logger.warning("flash_attn_dualkv: verified, %s", text)
        else:
            logger.error("flash_attn_dualkv: prompts are no longer shared, the results differ: %s", text)
    if stock:
        stock["metrics"].update(
            {name: [value] for name, value in zip(METRICS, (largest, mean, off, float(agree is False)))}
        )
    return stock, agree


def difference_of_norms(norm: float, expected: float) -> float:
    """The difference, relative to what is expected; 0 where both overflow, as fp16's first steps do."""
    if not math.isfinite(norm) and not math.isfinite(expected):
        return 0.0
    return abs(norm - expected) / max(expected, 1e-12)


def _difference(shared: dict[str, Any], stock: dict[str, Any], lengths: Lengths) -> Tensor:
    """Largest and mean difference where responses are scored; what stands elsewhere is never read.

    In nats for log-probabilities, as a share of their mean size for a critic's values.
    """
    name = next(key for key in ("log_probs", "values", "distillation_losses") if key in stock)
    rows = [slice(prompt - 1, prompt - 1 + response) for prompt, response in zip(*lengths)]
    scores, other = (
        torch.cat([values[own].float() for values, own in zip(output[name].unbind(), rows)])
        for output in (shared, stock)
    )
    found = difference(scores, other)
    return found / other.abs().mean().clamp(min=1e-6) if name == "values" and len(other) else found
