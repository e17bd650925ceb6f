# SPDX-License-Identifier: BSD-3-Clause
"""Settings of an engine's plug-in."""

from __future__ import annotations

from typing import Any, NamedTuple

from ... import checks
from ...data.prefix_tree import Boundary, checked_boundary
from ...errors import SharedPromptError

KEY = "flash_attn_dualkv"
# A name in a request's extra_args: tokens of the prompt that its sample began with, where more are
# submitted.
FIRST_PROMPT = "flash_attn_dualkv_first_prompt"


class Settings(NamedTuple):
    """Settings of an engine: vLLM's `additional_config={"flash_attn_dualkv": {...}}`, SGLang's DUALKV_SGLANG='{...}'.

    exact: "trainer" computes prompts as decoding does, so that attention has the bits of the
        training forward in every step, and in any chunks. None leaves prompts to the engine's kernels
        and decodes with `SharedPrefixPlan(exact="split")`, whose walks are divided: the last
        requests of a ragged rollout would wait for serial ones. VLLM_BATCH_INVARIANT=1 and SGLang's
        deterministic inference set "trainer": chunks of a prompt on the engine's kernels would have
        other bits than divided walks.
    boundary: as training packs its samples (`pack_shared_prompts`).
    log_interval: seconds between two lines of statistics in the engine's log; 0: none.
    """

    exact: str | None = None
    boundary: Boundary = "replicate"
    log_interval: float = 60.0

    @property
    def decodes_prompts(self) -> bool:
        return self.exact == "trainer"

    @property
    def walks(self) -> str:
        """`exact` of the plan."""
        return self.exact or "split"


def read_settings(additional_config: Any, batch_invariant: bool) -> Settings:
    """The settings in vLLM's additional_config, by `settings_from`."""
    found = additional_config.get(KEY, {}) if isinstance(additional_config, dict) else {}
    settings = settings_from(f"additional_config[{KEY!r}]", found)
    return settings._replace(exact="trainer") if batch_invariant else settings


def settings_from(name: str, found: Any) -> Settings:
    """Settings of a dict that a user has given under a name.

    Raises:
        SharedPromptError: names an entry that is not as described.
    """
    unknown = set(found) - set(Settings._fields) if isinstance(found, dict) else {found}
    if unknown:
        expected = f"a dict of {', '.join(Settings._fields)}"
        raise SharedPromptError(name, expected, ", ".join(map(repr, unknown)))
    asked = Settings(**found)
    if asked.exact is not None:
        checks.choice(f"{name}['exact']", asked.exact, ("trainer",))
    interval = checks.number(f"{name}['log_interval']", asked.log_interval, zero=True)
    return Settings(asked.exact, checked_boundary(asked.boundary), interval)
