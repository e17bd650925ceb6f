# SPDX-License-Identifier: BSD-3-Clause
"""What trainers share: options, reasons for stock attention, counts, and verification."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import checks
from ...checks import CUDA_DTYPES, explain, spelled_flag
from ...data.pack import MIN_SHARED, group_by_prefix
from ...errors import SharedPromptError
from ..transformers.admission.support import kernels_lack

PREFIX = "shared_prompt"  # of options in configurations, and of metrics
ENVIRONMENT = "DUALKV_VERL"
GONE = "max_responses_per_group"


class Options(NamedTuple):
    """How a trainer shares prompts.

    Attributes:
        enabled: whether it does at all.
        min_dedup_ratio: with less than so many times fewer tokens stock attention runs.
        verify_first_steps: so many calls are computed by stock attention too and compared; if they
            differ by more than rounding, sharing is switched off on all ranks.
        self_check: before the first call in each mode and with each set of active adapters a pair
            of short sequences is tried: does the model compute the same in a packed row?
        min_shared: the fewest tokens that a node behind the prompts must save, and all of them
            together; None: prompts alone are shared.
        drop_unread: rows that nobody reads leave before the last layers.
        share_lora_dropout: LoRA's dropout draws one mask for the one copy of a prompt, where stock
            training draws one for each response: another regulariser, and not exact.
    """

    enabled: bool = True
    min_dedup_ratio: float = 1.02
    verify_first_steps: int = 0
    self_check: bool = True
    min_shared: int | None = MIN_SHARED
    drop_unread: bool = True
    share_lora_dropout: bool = False

    @property
    def first_use(self) -> dict[str, Any]:
        """The options of `check_first_use`."""
        return dict(self_check=self.self_check, share_lora_dropout=self.share_lora_dropout)

    @staticmethod
    def checked(settings: Mapping[str, tuple[str, Any]]) -> Options:
        """From (name in errors, value) of each option; SharedPromptError for a wrong value."""
        readers: dict[str, Any] = {
            "enabled": checks.flag,
            "min_dedup_ratio": checks.number,
            # For one release: its error says what to do instead.
            GONE: _gone,
            "verify_first_steps": lambda name, value: checks.integer(name, value, 0),
            "self_check": checks.flag,
            "min_shared": _count_or_none,
            "drop_unread": checks.flag,
            "share_lora_dropout": checks.flag,
        }
        read = {option: readers[option](name, value) for option, (name, value) in settings.items()}
        read.pop(GONE, None)
        options = Options(**read)
        if options.share_lora_dropout and options.verify_first_steps:
            expected = "False with verify_first_steps, as stock attention draws other masks"
            raise SharedPromptError(explain(settings["share_lora_dropout"][0], expected, True))
        return options

    @staticmethod
    def of(override_config: Mapping[str, Any]) -> Options:
        """From `override_config`'s keys shared_prompt_..., else from the environment.

            +actor_rollout_ref.model.override_config.shared_prompt_min_dedup_ratio=1.1
            DUALKV_VERL_MIN_DEDUP_RATIO=1.1

        Raises:
            ValueError: an unknown option or a wrong value; the message names the setting.
        """
        given: dict[str, tuple[str, Any]] = {}
        variables = {f"{ENVIRONMENT}_{option.upper()}": option for option in (*Options._fields, GONE)}
        for variable, value in os.environ.items():
            if variable == ENVIRONMENT or variable.startswith(f"{ENVIRONMENT}_"):
                if variable not in variables:
                    raise ValueError(explain("the environment", f"one of {', '.join(sorted(variables))}", variable))
                given[variables[variable]] = f"the environment's {variable}", value
        for key, value in override_config.items():
            if key == PREFIX or key.startswith(f"{PREFIX}_"):
                option = key.removeprefix(PREFIX).removeprefix("_") or "enabled"
                if option not in (*Options._fields, GONE):
                    expected = "one of " + ", ".join(f"{PREFIX}_{one}" for one in sorted(Options._fields))
                    raise ValueError(explain("override_config", expected, key))
                given[option] = f"override_config.{key}", value
        return Options.checked(
            {option: (name, _spelled(option, name, value)) for option, (name, value) in given.items()}
        )


def _gone(name: str, value: Any) -> None:
    checks.check_absent("None: a micro-batch's budget of tokens divides groups", **{name: value})


def _count_or_none(name: str, value: Any) -> int | None:
    return None if value is None else checks.integer(name, value, 1)


def _spelled(option: str, name: str, value: Any) -> Any:
    """The value of an option that may be given as text; what it cannot be stays text, which is refused."""
    if not isinstance(value, str):
        return value
    if option in ("enabled", "self_check", "drop_unread", "share_lora_dropout"):
        return spelled_flag(name, value)
    if option in (GONE, "min_shared") and not value:
        return None
    with suppress(ValueError):
        return float(value) if option == "min_dedup_ratio" else int(value)
    return value


class Refusal(NamedTuple):
    """Why a call cannot or need not share: one of the reasons below, and what it is in this case."""

    reason: str
    message: str

    def told(self, input_ids: Any, attention_mask: Any = None) -> str:
        """The message; of dropout, which default recipes have, with what it costs for these samples.

        Args:
            input_ids: (B, S), or nested.
            attention_mask: of (B, S).
        """
        if self.reason != "dropout" or not isinstance(input_ids, Tensor):
            return self.message
        if not input_ids.is_nested:
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            rows = input_ids[mask != 0].split((mask != 0).sum(1).tolist())
        else:
            rows = input_ids.unbind()
        tree = group_by_prefix(rows, boundary="replicate", min_shared=1)
        ratio = sum(tree.sequence_lens) / max(1, sum(tree.node_lens))
        return f"{self.message}. Without it these samples would have {ratio:.2f} times fewer tokens"


# Accelerate's mixed precisions: what its autocast, inside a prepared model's forward, computes in.
AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# What the metrics of TRL's trainers count; the words that say why come with each case.
TRL_REASONS = (
    "switched_off",
    "liger",
    "unsupported",
    "dtype",
    "kernels",
    "dropout",
    "noise",
    "self_check",
    "multimodal",
    "arguments",
    "samples",
    "dedup_ratio",
)
# What those of verl's engines count, and what it means.
VERL_REASONS = {
    "verification": "verify_first_steps has found a difference, or the step is a verified one",
    "model": "the model is not exact on shared prompts in its present mode, as a warning has said",
    "dtype": "the kernels compute in 16 bits only",
    "kernels": "the kernels lack the model's head dimension or softcap",
    "no_prompts": "samples have no prompts",
    "multimodal": "samples have images, video or audio that cannot be shared",
    "positions": "position ids do not count the tokens of each sample",
    "temperature": "samples have different temperatures",
    "distillation": (
        "the loss is on a teacher's top-k, whose logits Megatron's engine does not form, nor do fused heads "
        "(FSDP: use_fused_kernels=False)"
    ),
    "logits": "calculate_sum_pi_squared wants all logits, which Megatron's engine does not form",
    "routing_replay": "routes of experts are recorded or replayed, which Megatron's engine alone shares prompts with",
    "forced_groups": "force_group_size is above 1",
    "ratio": "less is saved than min_dedup_ratio",
}


def kernels_refusal(config: Any, dtype: torch.dtype) -> Refusal | None:
    """What the CUDA kernels lack for a model that computes in that type, if anything.

    To be asked before any layer has run: other ranks may have nothing to refuse.
    """
    if dtype not in CUDA_DTYPES:
        return Refusal("dtype", f"the kernels compute in 16 bits; the model has {dtype} (set bf16=True)")
    lack = kernels_lack(config)
    return Refusal("kernels", f"they do not have {lack}") if lack else None


@dataclass
class Tally:
    """What has been run."""

    calls: int = 0
    # Ints, or tensors that stay on their GPU.
    replicated: Any = 0  # tokens that stock attention runs, without padding
    tokens: Any = 0  # tokens that were run
    unread: int = 0  # of these, not in the last layers
    fallbacks: Counter[str] = field(default_factory=Counter)

    @torch.compiler.disable
    def add(self, replicated: Any, tokens: Any, reason: str | None = None, unread: int = 0) -> None:
        self.calls += 1
        self.replicated = self.replicated + replicated
        self.tokens = self.tokens + tokens
        self.unread += unread
        if reason is not None:
            self.fallbacks[reason] += 1


def savings(replicated: float, tokens: float) -> dict[str, float]:
    """The metrics that every trainer has, without their prefix."""
    return {"dedup_ratio": replicated / tokens if tokens else 1.0, "tokens_saved": replicated - tokens}


# fp16's loss scale begins at 2^16 and is halved by each overflow.
_MOST_REPEATS = 16


class Verification:
    """Calls of each kind still to be computed by stock attention too; whether one differed."""

    def __init__(self, calls: int, *kinds: str) -> None:
        self._left = dict.fromkeys(kinds, calls)
        self._repeats = dict.fromkeys(kinds, _MOST_REPEATS)
        self.has_failed = False

    def is_due(self, kind: str) -> bool:
        """Whether this call is to be verified; it counts."""
        is_due = self._left[kind] > 0 and not self.has_failed
        self._left[kind] -= is_due
        return is_due

    def repeat(self, kind: str) -> None:
        """This call could not be compared: another one is to be, unless that has happened too often."""
        is_allowed = self._repeats[kind] > 0
        self._repeats[kind] -= is_allowed
        self._left[kind] += is_allowed


def difference(shared: Tensor, stock: Tensor, scored: Any = None) -> Tensor:
    """(2,): the largest difference and the mean, over `scored` values; over all of them if None."""
    if not stock.numel():
        return stock.new_zeros(2, dtype=torch.float32)
    found = (shared - stock).detach().abs().float()
    return torch.stack([found.max(), found.sum() / (found.numel() if scored is None else scored)])


def worst_of_ranks(values: Tensor) -> list[float]:
    """The largest of each value over all ranks, which so decide alike; NaN becomes infinite."""
    values = values.nan_to_num(nan=float("inf"))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX)
    found: list[float] = values.tolist()
    return found
