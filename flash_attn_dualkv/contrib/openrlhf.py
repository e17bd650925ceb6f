# SPDX-License-Identifier: BSD-3-Clause
"""OpenRLHF's actor on shared prompts: the policy, the reference and old log-probabilities; DPO's models too.

    ray job submit --runtime-env-json '{"worker_process_setup_hook":
        "flash_attn_dualkv.contrib.openrlhf.share_prompts"}' -- python3 -m openrlhf.cli.train_ppo_ray ...

Losses, log-probabilities, entropies and gradients are OpenRLHF's up to rounding. Written for OpenRLHF 0.11.

Ran: `Actor` and `ActorPPOTrainer` of 0.11.2 with tiny models and stand-ins for Ray and vLLM, on a CPU, 2026-11-28.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from ..errors import SharedPromptUnsupportedError
from ..integrations.common.options import Refusal
from ..integrations.common.siblings import fill
from ..integrations.transformers.admission.unwrap import causal_lm_of, text_config
from .padded import PaddedScores
from .versions import OPENRLHF

__all__ = ["share_prompts"]

_STEP = "dualkv_samples_of_a_step"  # attribute of replay buffers


def share_prompts(**options: Any) -> None:
    """Let every `Actor` of this process share prompts, and let PPO's micro-batches keep a prompt's samples together.

    To be called in every process that has an actor. A second call changes nothing.

    Args:
        options: of `PaddedScores.of`.

    Raises:
        SharedPromptError: an argument is not as described.
        ImportError, SharedPromptUnsupportedError: OpenRLHF is missing, or of a version that `versions.py` refuses; in
            Ray's hook a line says so instead.
    """
    scores = PaddedScores.of(**options)
    # Nothing is imported here: processes of rollouts, which run this too, are to be without DeepSpeed.
    OPENRLHF.replace(
        {
            "openrlhf.models.actor": {"Actor.forward": lambda stock: _forward(stock, scores)},
            "openrlhf.trainer.ray.ppo_actor": {
                "ActorPPOTrainer.ppo_train": _ppo_train,
                "DataLoader": lambda stock: _data_loader,
            },
        }
    )


class ActorOutput:
    """Second output of an actor, next to log-probabilities, when no logits are made."""

    def __init__(self, entropy: Tensor | None) -> None:
        if entropy is not None:
            self.entropy = entropy

    def __contains__(self, name: object) -> bool:
        return name in vars(self)

    def __getattr__(self, name: str) -> Any:
        if name == "aux_loss":
            expected = "--actor.aux_loss_coef 0 with shared prompts"
            raise SharedPromptUnsupportedError("aux_loss", expected, "a coefficient above 0")
        raise AttributeError(f"{name}: an actor that shares prompts returns log-probabilities and entropies alone")


def _forward(stock: Callable[..., Any], scores: PaddedScores) -> Callable[..., Any]:
    def forward(
        self: Any,
        sequences: Tensor,
        action_mask: Tensor | None = None,
        attention_mask: Tensor | None = None,
        return_output: bool = False,
        allgather_logits: bool = False,
        return_logprobs: bool = False,
        ring_attn_group: Any = None,
        packed_seq_lens: list[int] | None = None,
        return_entropy: bool = False,
        **mm_inputs: Any,
    ) -> Any:
        result = None
        if attention_mask is not None and (action_mask is not None or return_logprobs):
            is_scored = torch.zeros_like(sequences, dtype=torch.bool)
            if action_mask is None:
                is_scored[:, 1:] = attention_mask[:, 1:].bool() & attention_mask[:, :-1].bool()
            else:
                is_scored[:, -action_mask.shape[1] :] = action_mask
            result = scores.score(
                self.model,
                sequences,
                attention_mask,
                is_scored,
                temperature=self.temperature,
                with_entropy=return_entropy,
                refusal=_refusal(self, ring_attn_group, mm_inputs, return_output and action_mask is None),
            )
        if result is None:
            return stock(
                self,
                sequences,
                action_mask,
                attention_mask,
                return_output,
                allgather_logits,
                return_logprobs,
                ring_attn_group,
                packed_seq_lens,
                return_entropy,
                **mm_inputs,
            )
        logps, entropy = result
        if action_mask is not None:
            logps = logps[:, -action_mask.shape[1] :]
        return (logps, ActorOutput(entropy)) if return_output else logps

    return forward


def _refusal(actor: Any, ring_attn_group: Any, mm_inputs: dict[str, Any], wants_aux_loss: bool) -> Refusal | None:
    """Why a call of an actor cannot share, if it cannot."""
    if ring_attn_group is not None:
        return Refusal("arguments", "ring attention divides rows (set --ds.ring_attn_size 1)")
    if mm_inputs:
        return Refusal("multimodal", "images in OpenRLHF's samples are not shared")
    if wants_aux_loss and getattr(text_config(causal_lm_of(actor.model).config), "output_router_logits", False):
        return Refusal("arguments", "the loss that balances experts is read from the model's output")
    return None


def _ppo_train(stock: Callable[..., Any]) -> Callable[..., Any]:
    def ppo_train(self: Any, *args: Any, **kwargs: Any) -> Any:
        setattr(self.replay_buffer, _STEP, self.micro_train_batch_size * self.strategy.accumulated_gradient)
        return stock(self, *args, **kwargs)

    return ppo_train


def _data_loader(dataset: Any, batch_size: int = 1, shuffle: bool | None = None, **options: Any) -> Any:
    """OpenRLHF's loader of micro-batches. Where it shuffles, samples of a prompt meet within each optimizer's step."""
    if not shuffle or not options.pop("drop_last", False):
        return DataLoader(dataset, batch_size, shuffle, **options)
    prompts = [_prompt_of(sample) for sample in dataset.items]
    return DataLoader(dataset, batch_sampler=_Siblings(prompts, batch_size, getattr(dataset, _STEP)), **options)


def _prompt_of(item: Any) -> tuple[int, ...]:
    """The tokens before the first action of a single sample."""
    actions = item.action_mask.nonzero()
    shift = len(item.sequences) - len(item.action_mask)
    return tuple(item.sequences[: int(actions[0]) + shift if len(actions) else None].tolist())


class _Siblings(Sampler[list[int]]):
    """Full micro-batches of a random order; each step has the samples that it would have, and as many micro-batches.

    Args:
        prompts: one for each sample, equal where samples share it.
        rows: samples of a micro-batch.
        step: samples of an optimizer's step.
    """

    def __init__(self, prompts: Sequence[Any], rows: int, step: int) -> None:
        self.prompts, self.rows, self.step = prompts, rows, step

    def __len__(self) -> int:
        return len(self.prompts) // self.rows

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(len(self.prompts))[: len(self) * self.rows].tolist()
        for begin in range(0, len(order), self.step):
            part = order[begin : begin + self.step]
            groups: dict[Any, list[int]] = {}
            for place, sample in enumerate(part):
                groups.setdefault(self.prompts[sample], []).append(place)
            for places in fill(groups.values(), self.rows):
                yield [part[place] for place in places]
