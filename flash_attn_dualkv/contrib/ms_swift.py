# SPDX-License-Identifier: BSD-3-Clause
"""ms-swift's GRPO on shared prompts: log-probabilities of the policy, the reference and rollouts.

    from flash_attn_dualkv.contrib.ms_swift import share_prompts

    share_prompts()

is a plug-in: `swift rlhf --rlhf_type grpo --external_plugins that_file.py ...`. Losses, log-probabilities, entropies
and gradients are ms-swift's up to rounding. Written for ms-swift 4.6.

Ran: log-probabilities and losses of `GRPOTrainer` of 4.6.0 with tiny models, on a CPU, 2026-11-28; no whole training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..integrations.common.options import AUTOCAST_DTYPES, PREFIX, Refusal
from ..integrations.common.pipeline import savings
from .padded import PaddedScores
from .versions import MS_SWIFT

__all__ = ["share_prompts"]

_PADDING = -1e10  # of log-probabilities, where ms-swift pads rows that had no padding
# What a text model is given, and what has no effect on it.
_OF_TEXT = {
    "input_ids", "attention_mask", "labels", "position_ids", "text_position_ids", "logits_to_keep", "use_cache",
    "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
}  # fmt: skip


def share_prompts(**options: Any) -> None:
    """Let every GRPO trainer of this process share prompts. A second call changes nothing.

    Args:
        options: of `PaddedScores.of`.

    Raises:
        SharedPromptError: an argument is not as described.
        ImportError, SharedPromptUnsupportedError: ms-swift is missing, or of a version that `versions.py` refuses.
    """
    scores = PaddedScores.of(**options)
    name = "GRPOTrainer._get_per_token_logps_and_entropies_single"
    MS_SWIFT.replace({"swift.rlhf_trainers.grpo_trainer": {name: lambda stock: _sharing(stock, scores)}})


def _sharing(stock: Callable[..., Any], scores: PaddedScores) -> Callable[..., Any]:
    def logps_and_entropies(
        self: Any, model: Any, model_inputs: dict[str, Any], grpo_batch: Any, compute_entropy: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        refusal = _refusal(self, model_inputs)
        ids, mask = _rows(model_inputs, self.template.padding_free and refusal is None)
        kept = grpo_batch.completion_mask.shape[1]
        ids, mask = (torch.nn.functional.pad(tensor, (max(0, kept - tensor.shape[1]), 0)) for tensor in (ids, mask))
        is_scored = torch.zeros_like(ids, dtype=torch.bool)
        if refusal is None:
            is_scored[:, -kept:] = grpo_batch.completion_mask
        found = scores.score(
            model,
            ids,
            mask,
            is_scored,
            temperature=self.temperature,
            with_entropy=compute_entropy,
            refusal=refusal,
            dtype=AUTOCAST_DTYPES.get(self.accelerator.mixed_precision),
        )
        _log(self, scores)
        if found is None:
            return stock(self, model, model_inputs, grpo_batch, compute_entropy)
        # The first of all tokens has no log-probability, and is kept where rows without padding are
        # the longest.
        logps, entropy = (None if rows is None else torch.nn.functional.pad(rows, (1, 0))[:, -kept:] for rows in found)
        assert logps is not None
        if self.template.padding_free:
            columns = torch.arange(kept, device=logps.device)
            logps = logps.masked_fill(columns < kept - grpo_batch.seq_lengths[:, None], _PADDING)
        return logps, entropy

    return logps_and_entropies


def _refusal(trainer: Any, model_inputs: dict[str, Any]) -> Refusal | None:
    """Why a call cannot share, if it cannot."""
    others = sorted(name for name, value in model_inputs.items() if value is not None and name not in _OF_TEXT)
    if trainer.is_multimodal:
        return Refusal("multimodal", "ms-swift makes the embeddings of multimodal models before their forward")
    if trainer.template.sequence_parallel_size > 1:
        return Refusal("arguments", "sequences are divided (set --sequence_parallel_size 1)")
    if others:
        return Refusal("arguments", f"the model is given {', '.join(others)}")
    return None


def _rows(model_inputs: dict[str, Any], padding_free: bool) -> tuple[Tensor, Tensor]:
    """input_ids and attention_mask (B, S), padded in front if they were not padded."""
    ids = model_inputs["input_ids"]
    if not padding_free:
        mask = model_inputs.get("attention_mask")
        return ids, torch.ones_like(ids) if mask is None else mask
    positions = model_inputs.get("text_position_ids")
    positions = (model_inputs["position_ids"] if positions is None else positions).flatten()
    begins = (positions == 0).nonzero()[:, 0].tolist()
    lengths = [end - begin for begin, end in zip(begins, [*begins[1:], len(positions)])]
    pieces = [row.flip(0) for row in ids[0].split(lengths)]
    mask = [torch.ones_like(row) for row in pieces]
    ids, mask = (torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).flip(1) for rows in (pieces, mask))
    return ids, mask


def _log(trainer: Any, scores: PaddedScores) -> None:
    """Log in the trainer's metrics what was run since the last call."""
    tally = scores.take()
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    values = savings(float(tally.replicated), float(tally.tokens))
    for name, value in {**values, "fallbacks": tally.fallbacks.total()}.items():
        metrics[f"{PREFIX}/{name}"].append(value)
