"""The first steps beside verl's own path: log-probabilities and the norm of the gradient."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.utils.fsdp_utils import fsdp2_clip_grad_norm_

from .micro_batches import Lengths

logger = logging.getLogger(__name__)

# A wrong layout is off by 0.15 nats a token and more; bf16 over 28 layers by 0.03 on average, and by 0.001 in the norm.
MOST_MEAN_DIFFERENCE = 0.08
MOST_NORM_DIFFERENCE = 0.1
METRICS = tuple(
    f"shared_prompt/verify_{name}" for name in ("max_difference", "mean_difference", "grad_norm_difference", "failed")
)


class Verifier:
    """Counts the steps to be verified, and remembers whether one failed."""

    def __init__(self, steps: int) -> None:
        self.left = steps
        self.has_failed = False

    def run(self, engine: Any, data: TensorDict, forward_only: bool, run: Callable[[bool], Any]) -> Any:
        """Both paths; the output and the gradients that stay are those of verl's."""
        self.left -= 1
        before = tu.get_non_tensor_data(data, "return_model_output", False)
        tu.assign_non_tensor(data, return_model_output=True)
        shared = run(True)
        norm = 0.0
        if not forward_only:
            norm = _gradient_norm(engine)
            engine.optimizer_zero_grad()
        stock = run(False)
        tu.assign_non_tensor(data, return_model_output=before)
        expected = norm if forward_only else _gradient_norm(engine)
        largest, mean = _difference(shared["model_output"], stock["model_output"], Lengths.of(data))
        off = abs(norm - expected) / max(expected, 1e-12)
        largest, mean, off = _largest([largest, mean, off])
        # Not a number differs from everything.
        self.has_failed = not (mean <= MOST_MEAN_DIFFERENCE and off <= MOST_NORM_DIFFERENCE)
        text = f"largest difference of a score {largest:.2e}, mean {mean:.2e}, gradient norm {off:.2%}"
        # The first rank says it for all.
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            if self.has_failed:
                logger.error("flash_attn_dualkv: prompts are no longer shared, the results differ: %s", text)
            else:
                logger.warning("flash_attn_dualkv: verified, %s", text)
        stock["metrics"].update(
            {name: [one] for name, one in zip(METRICS, (largest, mean, off, float(self.has_failed)))}
        )
        return stock


def _difference(shared: dict[str, Any], stock: dict[str, Any], lengths: Lengths) -> tuple[float, float]:
    """Largest and mean difference where responses are scored; what stands elsewhere is never read.

    Of log-probabilities in nats, of a critic's values as a share of their mean size.
    """
    name = "log_probs" if "log_probs" in stock else "values"
    differences, sizes = [], []
    for one, other, prompt, response in zip(shared[name].unbind(), stock[name].unbind(), *lengths):
        rows = slice(prompt - 1, prompt - 1 + response)
        differences.append((one[rows].float() - other[rows].float()).abs())
        sizes.append(other[rows].float().abs())
    together = torch.cat(differences)
    if not len(together):
        return 0.0, 0.0
    if name == "values":
        together = together / torch.cat(sizes).mean().clamp(min=1e-6)
    return together.max().item(), together.mean().item()


def _gradient_norm(engine: Any) -> float:
    """Of all parameters on all ranks; the gradients stay as they are."""
    module: Any = engine.module
    if isinstance(engine.module, Fsdp1):
        norm = module.clip_grad_norm_(float("inf"))
    elif isinstance(engine.module, FSDPModule):
        norm = fsdp2_clip_grad_norm_(module.parameters(), max_norm=float("inf"))
    else:
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), float("inf"))
    return float((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())


def _largest(values: list[float]) -> list[float]:
    """Over all ranks, so that all decide alike."""
    if not torch.distributed.is_initialized():
        return values
    # MAX may drop what is not a number.
    tensor = torch.tensor(values, dtype=torch.float32).nan_to_num(nan=float("inf")).to(get_device_name())
    torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX)
    found: list[float] = tensor.tolist()
    return found
