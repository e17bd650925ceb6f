"""What a user of verl can set, in the model's override_config or in the environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from ... import checks
from ...checks import explain
from ...environment import spelled_flag

PREFIX = "shared_prompt"
ENVIRONMENT = "DUALKV_VERL"


@dataclass(frozen=True)
class Options:
    """How the engines share prompts.

    Attributes:
        enabled: whether they do at all.
        min_dedup_ratio: a micro-batch with less than this many times fewer tokens runs on verl's own path.
        max_responses_per_group: groups with more are divided among micro-batches; None for no limit.
        verify_first_steps: so many calls of each kind (with and without gradients) are computed by verl's path too and
            compared; if they differ, sharing is switched off on all ranks. The results are then verl's.
        self_check: before the first call in each mode and with each set of active adapters a pair of short sequences is
            tried, as in `shared_prompt_forward`.
    """

    enabled: bool = True
    min_dedup_ratio: float = 1.02
    max_responses_per_group: int | None = None
    verify_first_steps: int = 0
    self_check: bool = True

    @staticmethod
    def of(override_config: Mapping[str, Any]) -> Options:
        """From `override_config`, whose keys begin with shared_prompt_, and the environment, where that has none.

            +actor_rollout_ref.model.override_config.shared_prompt_min_dedup_ratio=1.1
            DUALKV_VERL_MIN_DEDUP_RATIO=1.1

        Raises:
            ValueError: an unknown option, or a value that is not as described; the message names the setting.
        """
        names = {one.name for one in fields(Options)}
        given: dict[str, Any] = {}
        for name in names:
            if (text := os.environ.get(f"{ENVIRONMENT}_{name.upper()}")) is not None:
                given[name] = (f"the environment's {ENVIRONMENT}_{name.upper()}", text)
        for key, value in override_config.items():
            if key == PREFIX or key.startswith(f"{PREFIX}_"):
                name = key.removeprefix(PREFIX).removeprefix("_") or "enabled"
                if name not in names:
                    expected = "one of " + ", ".join(f"{PREFIX}_{one}" for one in sorted(names))
                    raise ValueError(explain("override_config", expected, key))
                given[name] = (f"override_config.{key}", value)
        readers: dict[str, Callable[[str, Any], Any]] = {
            "enabled": _flag,
            "self_check": _flag,
            "min_dedup_ratio": _ratio,
            "max_responses_per_group": lambda where, value: None if value in (None, "") else _count(where, value, 1),
            "verify_first_steps": lambda where, value: _count(where, value, 0),
        }
        return Options(**{name: readers[name](where, value) for name, (where, value) in given.items()})


def _flag(where: str, value: Any) -> bool:
    if isinstance(value, str):
        return spelled_flag(where, value)
    return checks.flag(where, value)


def _ratio(where: str, value: Any) -> float:
    try:
        return checks.number(where, float(value) if isinstance(value, str) else value)
    except ValueError:
        raise ValueError(explain(where, "a number > 0", repr(value))) from None


def _count(where: str, value: Any, least: int) -> int:
    if isinstance(value, str):
        if not value.strip().lstrip("-").isdigit():
            raise ValueError(explain(where, f"an int >= {least}", repr(value)))
        value = int(value)
    return checks.integer(where, value, least)
