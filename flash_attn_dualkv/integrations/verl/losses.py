# SPDX-License-Identifier: BSD-3-Clause
"""Losses of verl that are no sums over samples: with other micro-batches they are other losses.

Most are divided by counts of the whole mini-batch. These take means, choose tokens or find the
longest response within a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tensordict import TensorDict

# Policy losses, and what they do with a micro-batch.
_MODES = {
    "geo_mean": "is a mean over each micro-batch",
    "clip_cov": "chooses tokens by their covariances within a micro-batch",
    "kl_cov": "chooses tokens by their covariances within a micro-batch",
}


def of_micro_batches(loss_function: Callable[..., Any] | None, data: TensorDict) -> str | None:
    """Why a loss depends on how samples are divided into micro-batches; None if it does not.

    Args:
        loss_function: of verl's workers, which bind its configuration; what others do is not known.
        data: a mini-batch.
    """
    config = getattr(loss_function, "keywords", {}).get("config")
    if not isinstance(config, Mapping):
        return None
    # Padded masks of verl's v0 trainer are as wide in all micro-batches.
    is_cut = "response_mask" in data and data["response_mask"].is_nested
    norm = "seq-mean-token-sum-norm"
    if config.get("loss_agg_mode") == norm and config.get("loss_scale_factor") is None and is_cut:
        return f"loss_agg_mode={norm} without loss_scale_factor divides by the longest response of each micro-batch"
    policy = config.get("policy_loss") or {}
    mode = policy.get("loss_mode")
    if mode in _MODES:
        return f"policy_loss.loss_mode={mode} {_MODES[mode]}"
    correction = policy.get("rollout_correction") or {}
    is_weighted = mode == "bypass_mode" and correction.get("loss_type") == "reinforce"
    if is_weighted and correction.get("rollout_is_batch_normalize"):
        return "rollout_is_batch_normalize divides weights by their mean over each micro-batch"
    return None
