# SPDX-License-Identifier: BSD-3-Clause
"""Tells vLLM's plug-in the prompt that a sample of verl's partial rollouts began with.

verl loads this module in each of its processes, as an entry point of `verl.plugins`. Its client that resumes aborted
samples submits them anew, with the tokens so far as their prompt. Training cuts at the first prompt: its length travels
in `extra_args` of the sampling parameters, which verl hands on to vLLM. Other engines get nothing.

Nothing of verl is imported here: verl itself is not yet, when it loads its plug-ins.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from ..errors import SharedPromptUnsupportedError
from .common.patching import after_import, replace_once
from .engines.settings import FIRST_PROMPT

_CLIENTS = "verl.workers.rollout.llm_server"
logger = logging.getLogger(__name__)


def _change(clients: Any) -> None:
    """Wraps the client's generate; with another client samples stay cut where they resumed, and the log says so."""

    def make(stock: Callable[..., Any]) -> Callable[..., Any]:
        async def generate(self: Any, request_id: Any, *, prompt_ids: Any, sampling_params: Any, **kwargs: Any) -> Any:
            if self.config.actor_rollout_ref.rollout.name == "vllm":
                carried = {FIRST_PROMPT: len(clients.normalize_token_ids(prompt_ids))}
                extra = carried | (sampling_params.get("extra_args") or {})
                sampling_params = {**sampling_params, "extra_args": extra}
            return await stock(self, request_id, prompt_ids=prompt_ids, sampling_params=sampling_params, **kwargs)

        return generate

    try:
        replace_once(getattr(clients, "FullyAsyncLLMServerClient", clients), "generate", make)
    except SharedPromptUnsupportedError as error:
        logger.warning("flash_attn_dualkv: resumed samples are cut where they were resumed: %s", error)


after_import(_CLIENTS, _change)
