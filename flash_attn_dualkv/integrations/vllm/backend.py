# SPDX-License-Identifier: BSD-3-Clause
"""The backend: vLLM's FlashAttention backend, of which decoding runs on shared prefixes.

Cache layout, writes to the cache, prompts and all that decoding here lacks are vLLM's.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections import Counter
from typing import Any, ClassVar

import torch
import vllm.envs as envs
from torch import Tensor
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from ...checks import CUDA_DTYPES
from ...decode.attention import shared_prefix_decode
from ...decode.calls import MOST_REQUESTS
from ...decode.library import DECODE_HEAD_DIMS
from ...errors import SharedPromptUnsupportedError
from ..engines.settings import read_settings
from . import prompts
from .log import say_once
from .sharing import Geometry, Shared, Sharing, sizes_of
from .versions import NEWEST, installed, release

_VERSION = installed()
_SHARED = "dualkv_shared"  # of a step's metadata
_PROMPTS = "dualkv_prompts"  # of a step's metadata: the metadata of the requests after those that decode
_VERL_CLIENT = "flash_attn_dualkv.integrations.verl_client"  # verl imports it with itself, in its engines too


class SharedPrefixBackend(FlashAttentionBackend):
    """vLLM's backend CUSTOM."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[SharedPrefixImpl]:
        return SharedPrefixImpl

    @staticmethod
    def get_builder_cls() -> type[SharedPrefixMetadataBuilder]:
        return SharedPrefixMetadataBuilder


class SharedPrefixMetadataBuilder(FlashAttentionMetadataBuilder):
    """Metadata of a step, with the plan of its requests that decode."""

    # Graphs hold steps in which all requests have one number of tokens: whether prompts are in a
    # step is not known on the device.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    # Each block table has a plan of its own.
    supports_update_block_table: bool = False

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        context = vllm_config.compilation_config.static_forward_context
        layers = {name: context[name] for name in layer_names}
        say_layers(vllm_config)
        scheduler = vllm_config.scheduler_config
        # The head of a draft model may have other heads than the target, and the same block table.
        (sizes, count), *others = Counter(sizes_of(layer.impl) for layer in layers.values()).most_common()
        threshold, max_keys = self.reorder_batch_threshold, vllm_config.model_config.max_model_len
        geometry = Geometry(
            *sizes, threshold, scheduler.max_num_seqs, scheduler.max_num_batched_tokens, max_keys + threshold
        )
        settings = read_settings(vllm_config.additional_config, envs.VLLM_BATCH_INVARIANT)
        self._sharing = Sharing(vllm_config, layers, geometry, settings, device)
        self._is_drafting = self._is_capturing = False
        # Runners give a target's steps their positions, but the second one those of hybrids from
        # 0.30 on alone. Its drafts are known by their speculator, and no hybrid has requests that
        # vLLM divides.
        self._lacks_positions = vllm_config.model_config.is_hybrid and vllm_config.use_v2_model_runner
        reason = next(filter(None, (why_stock(vllm_config, layer) for layer in layers.values())), None)
        try:  # in runners that are imported behind the backend
            prompts.install()
        except SharedPromptUnsupportedError as error:
            reason = str(error)
        if reason is not None:
            self.refuse(reason)
            return
        if others:
            reason = f"other sizes than {count} with their block table, of (heads, KV heads, head dim) {sizes}"
            self._sharing.say(f"{len(layers) - count} layers", reason)
        cache = vllm_config.cache_config
        if cache.num_gpu_blocks is not None:  # unknown while vLLM measures how many there may be
            # Blocks of hybrids, which hold a layer's state, may be several of the kernels' pages.
            parts = max(cache.block_size // kv_cache_spec.block_size, 1)
            self._sharing.prepare(cache.num_gpu_blocks * parts, kv_cache_spec.block_size)

    def refuse(self, reason: str) -> None:
        """Leave all steps to vLLM's own attention from now on."""
        self._sharing.refuse(reason)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        common = common_attn_metadata
        reason = self._sharing.lacking or self._unplanned(common)
        if reason is not None:
            self._sharing.statistics.count_stock(reason)
        shared = self._sharing.begin(common, not self._is_capturing) if reason is None else None
        if shared is None:
            return super().build(common_prefix_len, common, fast_build)
        # FlashAttention's own schedule is only for prompts, but it looks for windows in the first
        # step.
        is_first = getattr(self, "aot_sliding_window", None) is None
        metadata = super().build(0, common, fast_build=not is_first)
        setattr(metadata, _SHARED, shared)
        if shared.behind:
            setattr(metadata, _PROMPTS, super().build(0, requests_behind(common, shared), fast_build))
        return metadata

    def _unplanned(self, common: Any) -> str | None:
        """Why a step has no plan."""
        if self._is_drafting or (common.positions is None and not self._lacks_positions):
            return "a draft model, or requests that vLLM divides"
        if common.causal is not True:
            return "attention that is not causal"
        return None

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        self._is_capturing = True
        try:
            return super().build_for_cudagraph_capture(common_attn_metadata)
        finally:
            self._is_capturing = False

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> Any:
        self._is_drafting = True
        try:
            return super().build_for_drafting(common_attn_metadata, draft_index)
        finally:
            self._is_drafting = False

    def use_cascade_attention(self, *_: Any, **__: Any) -> bool:
        return False


def requests_behind(common: Any, shared: Shared) -> Any:
    """vLLM's CommonAttentionMetadata of the requests after those of the plan."""
    rows, first = common.num_reqs, shared.requests
    of_requests = ("seq_lens", "block_table_tensor", "seq_lens_cpu_upper_bound", "is_prefilling")
    of_tokens = ("slot_mapping", "positions")
    new: dict[str, Any] = {field.name: None for field in dataclasses.fields(common) if field.name.startswith("_")}
    new |= {name: value[first:rows] for name in of_requests if (value := getattr(common, name)) is not None}
    new |= {name: value[shared.tokens :] for name in of_tokens if (value := getattr(common, name)) is not None}
    return common.replace(
        query_start_loc=common.query_start_loc[first : rows + 1] - shared.tokens,
        query_start_loc_cpu=common.query_start_loc_cpu[first : rows + 1] - shared.tokens,
        num_reqs=shared.behind,
        num_actual_tokens=common.num_actual_tokens - shared.tokens,
        **new,
    )


class SharedPrefixImpl(FlashAttentionImpl):
    """Attention of a layer."""

    def forward(
        self, layer: torch.nn.Module, query: Tensor, key: Tensor | None, value: Tensor | None, kv_cache: Tensor,
        attn_metadata: Any, output: Tensor, output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        shared: Shared | None = getattr(attn_metadata, _SHARED, None)
        scales = output_scale, output_block_scale
        if shared is None or scales != (None, None) or not shared.serves(self):
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales)
        k, v = _VERSION.keys_and_values(kv_cache, self.head_size)
        tokens = shared.tokens
        shared_prefix_decode(
            query[:tokens], k, v, shared.plan, softmax_scale=self.scale, window_size=self.sliding_window,
            softcap=float(self.logits_soft_cap), sinks=self.sinks, out=output[:tokens],
        )  # fmt: skip
        if shared.behind:
            rest = (None if rows is None else rows[tokens:] for rows in (query, key, value))
            super().forward(layer, *rest, kv_cache, getattr(attn_metadata, _PROMPTS), output[tokens:])
        return output


def why_stock(vllm_config: Any, layer: Any) -> str | None:
    """Why a layer is vLLM's own in all steps; None if it need not be."""
    impl = getattr(layer, "impl", None)
    if not isinstance(impl, SharedPrefixImpl):
        return type(impl or layer).__name__
    dtype = layer.kv_cache_torch_dtype
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    found = [
        ("decode context parallelism", parallel.decode_context_parallel_size > 1),
        ("prefill context parallelism", parallel.prefill_context_parallel_size > 1),
        ("steps in two halves (dual batch overlap)", parallel.use_ubatching),
        ("fast prefill of layers that share keys", vllm_config.cache_config.kv_sharing_fast_prefill),
        ("reference sliding windows", _VERSION.has_rswa and model.rswa_window is not None),
        ("attention to images in both directions", model.is_mm_prefix_lm),
        (f"more than {MOST_REQUESTS} requests", vllm_config.scheduler_config.max_num_seqs > MOST_REQUESTS),
        (f"attention of the type {impl.attn_type}", impl.attn_type != AttentionType.DECODER),
        ("ALiBi", impl.alibi_slopes is not None),
        (f"a head dim of {impl.head_size}", impl.head_size not in DECODE_HEAD_DIMS),
        (f"a cache of {impl.kv_cache_dtype} ({dtype})", dtype not in CUDA_DTYPES),
    ]
    if _VERSION.keeps_captures and vllm_config.use_v2_model_runner:
        reason = "a draft model in vLLM's second model runner (VLLM_USE_V2_MODEL_RUNNER=0 takes the first one)"
        found.append((reason, vllm_config.speculative_config is not None))
    return next((reason for reason, holds in found if holds), None)


def say_layers(vllm_config: Any) -> None:
    """Log once in an engine which of its layers decode here, which do not and why, and what can be shared."""
    layers, cache = vllm_config.compilation_config.static_forward_context.values(), vllm_config.cache_config
    whose = Counter(why_stock(vllm_config, layer) for layer in layers if isinstance(layer, AttentionLayerBase))
    total = sum(whose.values())
    lines = [f"{whose.pop(None, 0)} of {total} layers decode over shared prefixes"]
    lines += [f"{count} are vLLM's own: {reason}" for reason, count in whose.items()]
    if cache.enable_prefix_caching:
        lines.append(f"requests share blocks of {cache.block_size} tokens, of vLLM's prefix cache")
    else:
        lines.append("nothing is shared, as vLLM's prefix cache is off: enable_prefix_caching=True")
    if "verl" in sys.modules and _VERL_CLIENT not in sys.modules:
        lines.append("samples that verl resumes are cut there: its VERL_USE_EXTERNAL_PLUGINS leaves this package out")
    if release() > NEWEST:
        lines.append(f"this vLLM is newer than {NEWEST[0]}.{NEWEST[1]}, the newest that is known")
    say_once("; ".join(lines), vllm_config, logging.INFO)
