# SPDX-License-Identifier: BSD-3-Clause
"""LLaMA-Factory's DPO on shared prompts: chosen and rejected answers, of the policy and of the reference.

    python -m flash_attn_dualkv.contrib.llama_factory dpo.yaml

is `llamafactory-cli train dpo.yaml` with it (on several GPUs, `torchrun -m` this module). Losses, log-probabilities and
gradients are LLaMA-Factory's up to rounding. Written for LLaMA-Factory 0.9.5.

Ran: `CustomDPOTrainer` of 0.9.5, its losses of tiny models, on a CPU, 2026-11-28; no whole training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..data.batch import IGNORED_LABEL
from ..errors import SharedPromptError
from ..integrations.common.options import AUTOCAST_DTYPES, Refusal
from .padded import PaddedScores
from .versions import LLAMA_FACTORY

__all__ = ["main", "share_prompts"]


def share_prompts(**options: Any) -> None:
    """Let every DPO trainer of this process share prompts; ORPO and SimPO are of it. A second call changes nothing.

    The metrics `logits/chosen` and `logits/rejected` are NaN where prompts are shared: logits of prompts are not made.

    Args:
        options: of `PaddedScores.of`.

    Raises:
        SharedPromptError: an argument is not as described.
        ImportError, SharedPromptUnsupportedError: LLaMA-Factory is missing, or of a version that `versions.py` refuses.
    """
    scores = PaddedScores.of(**options)
    name = "CustomDPOTrainer.concatenated_forward"
    LLAMA_FACTORY.replace({"llamafactory.train.dpo.trainer": {name: lambda stock: _forward(stock, scores)}})


def _forward(stock: Callable[..., Any], scores: PaddedScores) -> Callable[..., Any]:
    def concatenated_forward(self: Any, model: Any, batch: dict[str, Any], is_ref_model: bool = False) -> Any:
        ids, mask, labels = (batch[name] for name in ("input_ids", "attention_mask", "labels"))
        is_scored = labels != IGNORED_LABEL
        if (is_scored & (labels != ids)).any():
            raise SharedPromptError("labels", f"the tokens themselves or {IGNORED_LABEL}", "others")
        is_scored[:, 0] = False  # nothing scores it
        refusal = None
        if others := sorted(batch.keys() - {"input_ids", "attention_mask", "labels"}):
            refusal = Refusal("arguments", f"the model is given {', '.join(others)}")
        elif self.ld_alpha is not None:
            refusal = Refusal("arguments", "ld_alpha weighs tokens by their place, which is not offered")
        elif mask.dim() != 2:
            refusal = Refusal("arguments", f"the mask has {mask.dim()} dimensions")
        dtype = AUTOCAST_DTYPES.get(self.accelerator.mixed_precision)
        found = scores.score(model, ids, mask, is_scored, refusal=refusal, dtype=dtype)
        if found is None:
            return stock(self, model, batch, is_ref_model)
        logps, lengths = found[0].sum(1), is_scored.sum(1)
        means = logps / lengths
        if self.loss_type in ("ipo", "orpo", "simpo"):
            logps = means
        nothing = torch.full((), float("nan"), device=logps.device)
        chosen, rejected = logps.chunk(2)
        return {
            "chosen_logps": chosen,
            "rejected_logps": rejected,
            "chosen_logits": nothing,
            "rejected_logits": nothing,
            "chosen_logps_avg": means.chunk(2)[0],
        }

    return concatenated_forward


def main() -> None:
    """LLaMA-Factory's training of the configuration on the command line."""
    share_prompts()
    from llamafactory.train.tuner import run_exp

    run_exp()


if __name__ == "__main__":
    main()
