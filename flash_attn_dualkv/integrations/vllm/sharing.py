# SPDX-License-Identifier: BSD-3-Clause
"""Plan that the layers of a builder of vLLM share in a step, and which rows run on it.

vLLM puts requests with few tokens first. Their rows are decoded by a plan; the others, prompts and
long chunks of them, are left to vLLM's own attention, or with exact="trainer" are decoded, too.
The plan is made when vLLM builds a step's metadata, outside of CUDA graphs. A graph of a layer
reads it from the same memory in every replay, so that it serves all forests of its size.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from ...decode.calls import PAGE_ROWS
from ...decode.plan import SharedPrefixPlan
from ...errors import SharedPromptError
from ..engines.cuts import Cuts
from ..engines.settings import Settings
from ..engines.statistics import Statistics
from . import prompts
from .log import VLLM, logger, say_once
from .versions import installed


class Shared(NamedTuple):
    """A step: the plan of its first requests, and their rows; `behind`: how many requests have the others."""

    plan: SharedPrefixPlan
    requests: int
    tokens: int
    behind: int

    def serves(self, impl: Any) -> bool:
        """True if a layer has the sizes of the plan."""
        limits = self.plan.limits
        return sizes_of(impl) == (limits.num_heads, limits.num_kv_heads, limits.head_dim)


def sizes_of(impl: Any) -> tuple[int, int, int]:
    """Heads, KV heads and head dim of vLLM's implementation of a layer."""
    return impl.num_heads, impl.num_kv_heads, impl.head_size


class Geometry(NamedTuple):
    """Sizes that are fixed for a builder's layers.

    threshold: tokens of a request that decodes, at most.
    max_keys: of a request.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    threshold: int
    max_requests: int
    max_tokens: int
    max_keys: int


class Sharing:
    """Plans of a builder's steps.

    Args:
        engine: vLLM's configuration.
        layers: the layers, by name: vLLM's, whose `kv_cache` is there when the first step comes.
        geometry: their sizes.
        settings: the engine's.
        device: where steps run.
    """

    def __init__(
        self, engine: Any, layers: dict[str, Any], geometry: Geometry, settings: Settings, device: torch.device
    ) -> None:  # fmt: skip
        self._engine, self.geometry, self.settings, self.device = engine, geometry, settings, device
        reads_all = any(layer.impl.sliding_window[0] < 0 for layer in layers.values())  # windows are read per request
        # Windows are never divided: the states of divided walks would be memory that nothing uses.
        self._walks = settings.walks if reads_all else "trainer"
        self._whose = f"{len(layers)} layers"
        self.statistics = Statistics(settings.log_interval * reads_all, self._whose, VLLM, engine)
        self._layers = layers
        self._plan: SharedPrefixPlan | None = None
        self._is_ready = False  # whether the plan is known to be that of the layers' cache
        self._is_captured = False
        self._wakes = prompts.wakes()
        self._cuts = Cuts(0, settings.boundary, device)
        self.lacking: str | None = None  # why the kernels cannot serve these layers

    def prepare(self, pages: int, page_size: int) -> None:
        """Make the plan for a cache that vLLM is about to allocate.

        It lies where vLLM makes the cache then, in memory that a sleeping engine gives back, and gets
        again at the same addresses, which graphs hold, without its contents.
        """
        if page_size % PAGE_ROWS:
            return self.refuse(f"pages of {page_size} tokens")
        geometry, columns = self.geometry, -(-self.geometry.max_keys // page_size)
        try:
            with torch.inference_mode(False):  # tensors that can be written in any mode
                self._plan = SharedPrefixPlan(
                    geometry.max_requests, columns, num_pages=pages, max_queries=self._rows(), page_size=page_size,
                    num_heads=geometry.num_heads, num_kv_heads=geometry.num_kv_heads, head_dim=geometry.head_dim,
                    device=self.device, exact=self._walks,
                )  # fmt: skip
                self._cuts = Cuts(geometry.max_requests, self.settings.boundary, self.device)
            text = "flash_attn_dualkv: the plan of %s takes %d MB beside vLLM's cache; a lower max_num_seqs takes less"
            logger.info(text, self._whose, self._plan.nbytes // 10**6)
        except NotImplementedError as error:
            self.refuse(str(error))
        except torch.OutOfMemoryError as error:
            setting = "max_num_seqs, whose rows it has room for, or gpu_memory_utilization, which leaves room"
            raise torch.OutOfMemoryError(f"{self._whose}: {error} In vLLM lower {setting}") from error

    def begin(self, common: Any, is_real: bool) -> Shared | None:
        """Plan a step of vLLM's CommonAttentionMetadata; None if all of it is vLLM's own.

        Args:
            common: the metadata.
            is_real: whether it is a step of requests, not of a capture.
        """
        requests, tokens = self._decoded(common)
        rows = self._rows()
        if requests > self.geometry.max_requests or tokens > rows:
            self.statistics.count_stock(f"more than {self.geometry.max_requests} requests or {rows} tokens")
            return None
        if requests == 0:
            self.statistics.count_stock("prompts alone")
            return None
        plan = self._ready()
        if plan is None:
            return None
        if common.max_seq_len > plan.limits.max_keys:
            self._refuse_long(common.max_seq_len, plan.limits.max_keys)
            return None
        self._is_captured |= not is_real
        # vLLM's table may be wider than any request can be.
        table = common.block_table_tensor[:requests, : plan.max_pages_per_request]
        noted = prompts.newest()
        cuts = self._cuts.of(requests, None if noted is None else noted.lengths)
        keys = common.seq_lens[:requests]
        plan.update(
            table, keys, cu_seqlens_q=common.query_start_loc[: requests + 1], boundaries=cuts, num_queries=tokens,
            max_seqlen=common.max_seq_len,
        )  # fmt: skip
        behind, page_size = common.num_reqs - requests, plan.limits.page_size
        if is_real:
            columns = -(-common.max_seq_len // page_size)
            self.statistics.count_shared(table, columns, keys, cuts, page_size, is_mixed=behind > 0)
        return Shared(plan, requests, tokens, behind)

    def _decoded(self, common: Any) -> tuple[int, int]:
        """How many of a step's first requests are decoded, and their tokens."""
        everything = common.num_reqs, common.num_actual_tokens
        if self.settings.decodes_prompts or common.max_query_len <= self.geometry.threshold:
            return everything
        offsets = common.query_start_loc_cpu[: common.num_reqs + 1].numpy()
        is_long = np.diff(offsets) > self.geometry.threshold
        first = int(is_long.argmax())
        return (first, int(offsets[first])) if is_long[first] else everything

    def _rows(self) -> int:
        most = self.geometry.max_requests * self.geometry.threshold
        return max(most, self.geometry.max_tokens) if self.settings.decodes_prompts else most

    def _ready(self) -> SharedPrefixPlan | None:
        """The plan for the layers' cache; None if the kernels lack what it needs."""
        if not self._is_ready and self.lacking is None:
            cache = next(iter(self._layers.values())).kv_cache
            pages, page_size, _, _ = installed().keys_and_values(cache, self.geometry.head_dim)[0].shape
            made_for = None if self._plan is None else (self._plan.limits.num_pages, self._plan.limits.page_size)
            if made_for != (pages, page_size):
                self.prepare(pages, page_size)
            self._is_ready = True
        if self._wakes != prompts.wakes():
            self._wakes = prompts.wakes()
            self._cuts.forget()
            if self._plan is not None:
                self._plan.reset()
        return self._plan

    def refuse(self, reason: str) -> None:
        """Leave these layers to vLLM's own attention from now on, and say so once."""
        self.lacking, self._plan = reason, None
        self.say(self._whose, reason)

    def _refuse_long(self, keys: int, most: int) -> None:
        """Leave layers to vLLM from a step on whose requests are longer than any that vLLM allows, for which plans are.

        Raises:
            SharedPromptError: graphs hold the plan, and would replay that of another step.
        """
        if self._is_captured:
            raise SharedPromptError("max_seq_len", f"at most {most} keys (max_model_len)", keys)
        self.refuse(f"requests of {keys} keys, more than max_model_len")

    def say(self, whose: str, reason: str) -> None:
        """Logs once in an engine why layers are not served."""
        say_once(f"{whose} run on vLLM's own attention: {reason}", self._engine)
