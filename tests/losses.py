"""Losses of reinforcement learning on log-probabilities of responses, as frameworks write them.

All take (B, R) values of response tokens and a (B, R) mask; `norm` is what the sum over a micro-batch is divided by, so
that micro-batches of one step add up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Targets:
    """What a step is given: (B, R) log-probabilities of two other policies, (B,) advantages, (B, R) mask."""

    old: Tensor
    reference: Tensor
    advantages: Tensor
    mask: Tensor

    def take(self, indices: list[int]) -> Targets:
        return Targets(*(one[indices] for one in vars(self).values()))


def clipped(ratio: Tensor, advantages: Tensor, low: float, high: float) -> Tensor:
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)


def grpo(logps: Tensor, entropy: Tensor, targets: Targets, norm: float) -> Tensor:
    """PPO's clip, the k3 estimate of the KL divergence to a reference, and an entropy bonus; mean per sequence."""
    loss = clipped((logps - targets.old).exp(), targets.advantages[:, None], 0.2, 0.2)
    log_ratio = targets.reference - logps
    loss = loss + 0.04 * (log_ratio.exp() - log_ratio - 1) - 0.01 * entropy
    per_sequence = (loss * targets.mask).sum(1) / targets.mask.sum(1).clamp(min=1)
    return per_sequence.sum() / norm


def dapo(logps: Tensor, entropy: Tensor, targets: Targets, norm: float) -> Tensor:
    """Asymmetric clip, no KL, mean over all tokens of the step."""
    loss = clipped((logps - targets.old).exp(), targets.advantages[:, None], 0.2, 0.28)
    return (loss * targets.mask).sum() / norm


def gspo(logps: Tensor, entropy: Tensor, targets: Targets, norm: float) -> Tensor:
    """One ratio per sequence, that of its geometric mean over tokens."""
    log_ratio = ((logps - targets.old) * targets.mask).sum(1) / targets.mask.sum(1).clamp(min=1)
    return clipped(log_ratio.exp(), targets.advantages, 0.1, 0.1).sum() / norm


LOSSES = {"grpo": grpo, "dapo": dapo, "gspo": gspo}


def norm_of(name: str, targets: Targets) -> float:
    """The divisor of a whole step."""
    return float(targets.mask.sum() if name == "dapo" else len(targets.advantages))
