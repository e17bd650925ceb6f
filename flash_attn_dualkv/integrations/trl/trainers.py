# SPDX-License-Identifier: BSD-3-Clause
"""Trainers of TRL whose forwards share prompts."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor
from trl import DPOTrainer, GRPOTrainer, RewardTrainer, RLOOTrainer, SFTTrainer

from ...errors import SharedPromptError
from ...parallel.agreement import all_ranks, largest_of_ranks
from ..common.options import GONE, PREFIX, REASONS, Options, Refusal
from ..common.pipeline import Verification, difference, savings
from .prompt_once import PromptOnce
from .regroup import keep_siblings_together
from .sharing import Sharing

logger = get_logger(__name__)

# Mean differences of log-probabilities that rounding cannot explain.
TOLERANCES = {32: 1e-4, 16: 0.05}


class SiblingsTogetherMixin:
    """A generating trainer: completions of a prompt share a micro-batch where they fit.

    Attributes:
        siblings_window: micro-batches of an optimizer step, if those that share a prompt are to be in the same.
    """

    siblings_window: int | None = None

    def _prepare_inputs(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = getattr(self, "_buffered_inputs", None)
        prepared = super()._prepare_inputs(*args, **kwargs)  # type: ignore[misc]
        slices = getattr(self, "_buffered_inputs", None)
        if slices is None or slices is before:
            return prepared
        self._buffered_inputs = keep_siblings_together(slices, self.siblings_window)
        return self._buffered_inputs[self._step % self.args.steps_per_generation]


class SharedPromptMixin(SiblingsTogetherMixin):
    """Put before a trainer of TRL: `class MyTrainer(SharedPromptMixin, MyGRPOTrainer)`.

    Args:
        min_dedup_ratio: with less than so many times fewer tokens stock attention runs.
        verify_first_steps: so many of the policy's forwards are computed by stock attention too; if log-probabilities
            differ by more than rounding, sharing is switched off on all ranks.
        self_check: try a pair of short sequences before the first forward in each mode and with each set of adapters.
        min_shared: the fewest tokens that a node after the prompts must save; None: only prompts are shared.
        drop_unread: unread rows leave before the last layers.
        share_lora_dropout: let LoRA's dropout draw one mask for the one copy of a prompt, where stock training draws
            one for each completion: another regulariser, and not exact. False: with LoRA's dropout nothing is shared.
        prompt_once: micro-batches of an optimizer step that have prompts in common are neighbours and compute them
            once: keys and values of a prompt, and float32 sums of their gradients, are kept meanwhile. None: where
            that takes 5% less work, and no pass needs more rows than the largest micro-batch, kept keys included;
            not with a `training_step` or `_prepare_inputs` that is not of TRL's stable trainers.

    Everything else is the trainer's.

    Raises:
        SharedPromptError: an argument is not as described.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        names = {*Options._fields, GONE} - {"enabled"}
        given = {name: (name, kwargs.pop(name)) for name in names & kwargs.keys()}
        self._sharing_options = Options.checked(given)
        steps = self._sharing_options.verify_first_steps
        self._verification = Verification(steps, "policy")
        has_rollouts = hasattr(super(), "_get_per_token_logps_and_entropies")
        self._once = PromptOnce(self) if has_rollouts and self._may_keep_prompts() else None
        for name, off in (("verify_first_steps", 0), ("prompt_once", False)):
            value = getattr(self._sharing_options, name)
            if value and not has_rollouts:
                raise SharedPromptError(
                    name, f"{off} for a trainer without rollouts", f"{value} for a {type(self).__name__}"
                )
        self._sharing: Sharing | None = None
        self._known_reasons: set[str] = set()
        self._logged: dict[str, list[float]] = {}  # numbers since the last line of the log, by mode
        super().__init__(*args, **kwargs)
        self._share()
        if self._once is not None:
            self.siblings_window = self.args.gradient_accumulation_steps  # type: ignore[attr-defined]

    def _may_keep_prompts(self) -> bool:
        """True if asked, or if nobody says no and the trainer's slices and steps are TRL's."""

        def is_trl(name: str) -> bool:
            stock = getattr(super(SiblingsTogetherMixin, self), name).__module__
            return getattr(type(self), name) is getattr(SharedPromptMixin, name) and stock.startswith("trl.trainer.")

        # Steps of the user's own may clip gradients that those of prompts are still to be added to.
        is_asked = self._sharing_options.prompt_once
        return all(map(is_trl, ("training_step", "_prepare_inputs"))) if is_asked is None else is_asked

    def _share(self: Any) -> None:
        """Let the policy and the reference share prompts, as soon as TRL has prepared them."""
        if self._sharing is not None:
            return
        _warn_of_small_batches(self.args, self._once is not None)
        self._sharing = Sharing(self._sharing_options, self.args)
        for model in (self.model, getattr(self, "ref_model", None)):
            if model is not None:
                self._sharing.install(model)

    def _precompute_ref_logps(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._share()  # DPOTrainer does this while it is made
        return super()._precompute_ref_logps(*args, **kwargs)  # type: ignore[misc]

    def compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)  # type: ignore[misc]
        self._log_sharing()
        return loss

    def training_step(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        stock = super().training_step  # type: ignore[misc]
        with nullcontext() if self._once is None else self._once.step(model):
            return stock(model, *args, **kwargs)

    def _get_per_token_logps_and_entropies(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        stock = super()._get_per_token_logps_and_entropies  # type: ignore[misc]
        scorer = model if self._once is None else self._once.scorer(model, *args, **kwargs)
        return self._verified(stock, scorer, *args, **kwargs)

    def _verified(self: Any, stock: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Scores by the stock method; compared, if they are due, with those of stock attention."""
        if not torch.is_grad_enabled() or not self._verification.is_due("policy"):
            return stock(model, *args, **kwargs)
        with torch.no_grad(), self._sharing.paused():
            expected, *_ = stock(model, *args, **kwargs)
        scores = stock(model, *args, **kwargs)
        # Siblings that have run as parts need this one.
        if self._agrees(scores[0], expected) or (self._once is not None and not self._once.forgo()):
            return scores
        return stock(model, *args, **kwargs)

    def _agrees(self: Any, logps: Tensor, expected: Tensor) -> bool:
        """True if all ranks have stock attention's log-probabilities; if not, switches off."""
        found = difference(logps, expected, (expected != 0).sum().clamp(min=1))
        largest, mean = largest_of_ranks(found.tolist(), all_ranks())
        self._metrics["train"]["shared_prompt/logp_difference"].append(largest)
        is_precise = self.accelerator.mixed_precision == "no" and self.model.dtype == torch.float32
        tolerance = TOLERANCES[32 if is_precise else 16]
        if mean <= tolerance:
            return True
        message = f"log-probabilities differ from stock attention's by {mean:.2g} on average (at most {tolerance})"
        self._sharing.off = Refusal("switched_off", message)
        self._verification.has_failed = True
        return False

    def _log_sharing(self: Any) -> None:
        """Log what all ranks have run since the last line of the log, in the trainer's metrics."""
        numbers = self._sharing.numbers(self.accelerator.device)
        if self.accelerator.num_processes > 1:
            numbers = self.accelerator.reduce(numbers, reduction="sum")
        mode = "train" if self.model.training else "eval"
        metrics = self._metrics[mode]
        if "shared_prompt/tokens" in metrics:  # which the trainer clears when it has written a line
            numbers = [number + before for number, before in zip(numbers.tolist(), self._logged[mode])]
        else:
            numbers = numbers.tolist()
        calls, replicated, tokens, unread, *fallbacks = numbers
        if calls == 0:
            return
        self._logged[mode] = numbers
        values = {**savings(replicated, tokens), "tokens": tokens, "unread_tokens": unread}
        values["fallbacks"] = sum(fallbacks) / calls
        for reason, count in zip(REASONS, fallbacks):
            if count or reason in self._known_reasons:
                self._known_reasons.add(reason)
                values[f"fallbacks/{reason}"] = count / calls
        for name, value in values.items():
            # One value for all micro-batches: the trainer logs the mean of what it finds here.
            metrics[f"{PREFIX}/{name}"] = [value]


def _warn_of_small_batches(args: Any, has_trunks: bool) -> None:
    """Say it before the training if no micro-batch, or optimizer step, can hold all completions of a prompt."""
    size, generations = args.per_device_train_batch_size, getattr(args, "num_generations", 1)
    size *= args.gradient_accumulation_steps if has_trunks else 1
    if size < generations:
        shared = f"at most {size} of a prompt's {generations} completions share it" if size > 1 else "nothing is shared"
        logger.warning(
            f"per_device_train_batch_size: expected num_generations={generations} or a multiple, got {size}: {shared} "
            "(raise it, and divide gradient_accumulation_steps by as much)"
        )


class SharedPromptGRPOTrainer(SharedPromptMixin, GRPOTrainer):
    """GRPOTrainer with every prompt computed once; arguments of `SharedPromptMixin`."""


class SharedPromptRLOOTrainer(SharedPromptMixin, RLOOTrainer):
    """RLOOTrainer with every prompt computed once; arguments of `SharedPromptMixin`."""


class SharedPromptDPOTrainer(SharedPromptMixin, DPOTrainer):
    """DPOTrainer whose chosen and rejected completions share a prompt; arguments of `SharedPromptMixin`."""


class SharedPromptSFTTrainer(SharedPromptMixin, SFTTrainer):
    """SFTTrainer whose samples share what they begin with (system prompts); arguments of `SharedPromptMixin`.

    Any tokens may be trained: completions, the assistant's turns, or all.
    """


class SharedPromptRewardTrainer(SharedPromptMixin, RewardTrainer):
    """RewardTrainer whose chosen and rejected sequences share what they begin with; arguments of `SharedPromptMixin`.

    There is no prompt but what is equal, so that `min_shared` must be a number.
    """
