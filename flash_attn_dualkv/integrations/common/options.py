# SPDX-License-Identifier: BSD-3-Clause
"""Options of all trainers, and reasons for stock attention: one list of each."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ... import checks
from ...checks import CUDA_DTYPES, explain, spelled_flag
from ...data.pack import group_by_prefix
from ...data.plan import MIN_SHARED
from ...errors import SharedPromptError, SharedPromptLayoutError
from ..transformers.admission.table import kernels_lack

PREFIX = "shared_prompt"  # of options in configurations, and of metrics
ENVIRONMENT = "DUALKV_VERL"
GONE = "max_responses_per_group"
UNASKED_RATIO = 1.05  # of trunks that nobody has asked for


class Options(NamedTuple):
    """How a trainer shares prompts.

    Attributes:
        enabled: whether it does at all.
        min_dedup_ratio: with less than so many times fewer tokens stock attention runs.
        verify_first_steps: so many calls are computed by stock attention too and compared; if they
            differ by more than rounding, sharing is switched off on all ranks.
        self_check: before the first call in each mode and with each set of active adapters a pair
            of short sequences is tried: does the model compute the same in a packed row?
        min_shared: the fewest tokens that a node after the prompts must save, and all of them
            together; None: only prompts are shared.
        drop_unread: unread rows leave before the last layers.
        share_lora_dropout: LoRA's dropout draws one mask for the one copy of a prompt, where stock
            training draws one for each response: another regulariser, and not exact.
        prompt_once: micro-batches that divide the samples of a prompt compute it once, keep its keys
            and give it their gradients in a pass of its own. Of verl's FSDP engines, and of TRL's
            trainers with rollouts. None ("auto"): where that takes 5% less work and no pass of an
            update needs more rows than the largest micro-batch, kept keys included.
    """

    enabled: bool = True
    min_dedup_ratio: float = 1.02
    verify_first_steps: int = 0
    self_check: bool = True
    min_shared: int | None = MIN_SHARED
    drop_unread: bool = True
    share_lora_dropout: bool = False
    prompt_once: bool | None = None

    @property
    def first_use(self) -> dict[str, Any]:
        """The options of `check_first_use`."""
        return dict(self_check=self.self_check, share_lora_dropout=self.share_lora_dropout)

    @property
    def trunk_ratio(self) -> float:
        """A trunk makes the work of its micro-batches so many times less, at least."""
        return self.min_dedup_ratio if self.prompt_once else max(self.min_dedup_ratio, UNASKED_RATIO)

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
            "prompt_once": _flag_or_none,
        }
        read = {option: readers[option](name, value) for option, (name, value) in settings.items()}
        read.pop(GONE, None)
        options = Options(**read)
        if options.share_lora_dropout and options.verify_first_steps:
            expected = "False with verify_first_steps, as stock attention draws other masks"
            raise SharedPromptError(settings["share_lora_dropout"][0], expected, True)
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
                    expected = "one of " + ", ".join(f"{PREFIX}_{option}" for option in sorted(Options._fields))
                    raise ValueError(explain("override_config", expected, key))
                given[option] = f"override_config.{key}", value
        return Options.checked(
            {option: (name, _spelled(option, name, value)) for option, (name, value) in given.items()}
        )


def _gone(name: str, value: Any) -> None:
    checks.check_absent("None: a micro-batch's budget of tokens divides groups", **{name: value})


def _count_or_none(name: str, value: Any) -> int | None:
    return None if value is None else checks.integer(name, value, 1)


def _flag_or_none(name: str, value: Any) -> bool | None:
    return None if value is None else checks.flag(name, value)


def _spelled(option: str, name: str, value: Any) -> Any:
    """The value of an option that may be given as text; what it cannot be stays text, which is refused."""
    if not isinstance(value, str):
        return value
    if (option in (GONE, "min_shared") and not value) or (option, value) == ("prompt_once", "auto"):
        return None
    if isinstance(Options._field_defaults.get(option), bool) or option == "prompt_once":
        return spelled_flag(name, value)
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


class Refused(Exception):  # noqa: N818 (stock attention is no error)
    """Raised anew, never kept: an exception holds the tensors of the frames it has passed."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.refusal = Refusal(reason, message)


@contextmanager
def refusing(reason: str) -> Iterator[None]:
    """Raise Refused where the package refuses something inside, but for layouts that get lost: these are mistakes."""
    try:
        yield
    except SharedPromptLayoutError:
        raise
    except SharedPromptError as error:
        raise Refused(reason, str(error)) from None


# Accelerate's mixed precisions: what its autocast, inside a prepared model's forward, computes in.
AUTOCAST_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

# Why a call runs on stock attention: words of metrics, and what each means.
REASONS = {
    "switched_off": "sharing is off: verify_first_steps has found a difference, or compares with this call",
    "liger": "use_liger_kernel=True replaces layers of the model",
    "unsupported": "the model is not exact on shared prompts in its present mode, as a warning has said",
    "dtype": "the kernels compute in 16 bits only",
    "kernels": "the kernels lack the model's head dimension or softcap",
    "dropout": "the model has dropout in its present mode",
    "noise": "the model draws random numbers in its present mode",
    "self_check": "a pair of sequences came out otherwise in a packed row",
    "multimodal": "samples have images, video or audio that cannot be shared",
    "arguments": "the model is given something that no packed row has",
    "samples": "what is scored, or padding, is not as a packed row needs it",
    "no_prompts": "samples have no prompts",
    "positions": "position ids do not count the tokens of each sample",
    "temperature": "samples have different temperatures",
    "distillation": (
        "the loss is on a teacher's top-k, whose logits Megatron's engine does not form, nor do fused heads "
        "(FSDP: use_fused_kernels=False)"
    ),
    "logits": "calculate_sum_pi_squared wants all logits, which Megatron's engine does not form",
    "routing_replay": "routes of experts are recorded or replayed, which Megatron's engine alone shares prompts with",
    "forced_groups": "force_group_size is above 1",
    "ranks": "another rank's micro-batch is not shared, and with ZeRO-3 all must be alike",
    "dedup_ratio": "less is saved than min_dedup_ratio",
}


def kernels_refusal(config: Any, dtype: torch.dtype) -> Refusal | None:
    """Reason why the CUDA kernels cannot run a model that computes in that type, if any.

    To be asked before any layer has run: other ranks may have nothing to refuse.
    """
    if dtype not in CUDA_DTYPES:
        return Refusal("dtype", f"the kernels compute in 16 bits; the model has {dtype} (set bf16=True)")
    lack = kernels_lack(config)
    return Refusal("kernels", f"they do not have {lack}") if lack else None
