# SPDX-License-Identifier: BSD-3-Clause
"""The backend: SGLang's FlashAttention backend, of which decoding runs on shared prefixes.

Page tables, the cache and all that decoding here lacks are SGLang's, and so are prompts, unless
exact="trainer" has them decoded, too. A step's plan is made
where SGLang prepares the step's metadata, outside of CUDA graphs. A graph of a layer reads it from the
same memory in every replay, so that it serves all forests of its size.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from torch import Tensor

from ...checks import CUDA_DTYPES
from ...decode.attention import shared_prefix_decode
from ...decode.calls import MOST_REQUESTS
from ...decode.library import DECODE_HEAD_DIMS
from ...decode.plan import SharedPrefixPlan
from ...errors import SharedPromptError
from ..common.patching import replace_once
from ..engines.cuts import Cuts
from ..engines.settings import Settings, settings_from
from ..engines.statistics import Statistics
from .log import SGLANG
from .pages import NAME
from .versions import NEWEST, installed, options_of, release

SETTINGS = "DUALKV_SGLANG"
_PADDING = 1  # keys of rows that pad a graph's step
_PROMPTS = (ForwardMode.EXTEND, ForwardMode.MIXED)


class SharedPrefixBackend(FlashAttentionBackend):
    """SGLang's backend dualkv, without the methods of CUDA graphs."""

    def __init__(self, model_runner: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(model_runner, *args, **kwargs)
        # The host's lengths bound the search for shared pages, which reads the whole table without.
        self.needs_cpu_seq_lens = True
        self._settings = read_settings(model_runner)
        self._pool, self._runner = model_runner.token_to_kv_pool, model_runner
        self._statistics = Statistics(self._settings.log_interval, "layers", SGLANG, model_runner, _PADDING)
        self.prompt_lengths: Any = None  # of the requests of the step that comes next, an int32 NumPy array
        if self._settings.decodes_prompts:
            replace_once(ForwardBatch, "init_new", _noting)
        self._make_plan(model_runner.req_to_token_pool.size)
        self._is_planned = False  # whether the plan is that of the step whose metadata is there
        say_sharing(model_runner, self._settings)

    def _make_plan(self, requests: int) -> None:
        """The plan of steps of at most so many requests. SGLang makes no graph before."""
        k_cache, _ = self._paged(self._pool.start_layer)
        options, rows = options_of(self._runner), requests
        if self._settings.decodes_prompts:
            chunk = options.chunked_prefill_size or 0
            rows += chunk if chunk > 0 else max(options.max_prefill_tokens, self.max_context_len)
        pages, page_size, num_kv_heads, head_dim = k_cache.shape
        try:
            self._plan = SharedPrefixPlan(
                requests, -(-self.max_context_len // page_size), num_pages=pages, max_queries=rows,
                page_size=page_size, num_heads=self.num_attention_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
                device=k_cache.device, exact=self._settings.walks,
            )  # fmt: skip
        except torch.OutOfMemoryError as error:
            setting = "max_running_requests, whose rows it has room for, or mem_fraction_static, which leaves room"
            raise torch.OutOfMemoryError(f"{error} In SGLang lower {setting}") from error
        self._cuts = Cuts(requests, self._settings.boundary, k_cache.device)
        text = "flash_attn_dualkv: the plan takes %d MB beside SGLang's cache; a lower max_running_requests takes less"
        SGLANG.logger.info(text, self._plan.nbytes // 10**6)

    def _paged(self, layer_id: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer's cache, views of (pages, rows, heads, head_dim)."""
        k, v = (cache.unflatten(0, (-1, self.page_size)) for cache in self._pool.get_kv_buffer(layer_id))
        return k, v

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        if max_bs > self._plan.limits.max_requests:
            self._make_plan(max_bs)

    def _compute_scheduler_metadata(self, *_: Any, **__: Any) -> None:
        """No schedule of rows that FlashAttention does not decode; where it does, it makes one in each layer."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        tokens = len(forward_batch.input_ids) if forward_batch.forward_mode in _PROMPTS else None
        self._prepare(forward_batch.forward_mode, forward_batch.spec_info, tokens=tokens)

    def _prepare(
        self, mode: Any, spec_info: Any, in_graph: bool = False, is_capture: bool = False, tokens: int | None = None
    ) -> None:  # fmt: skip
        """Plan the step whose metadata SGLang has prepared, if it is one of decoding, or of so many tokens of prompts.

        Raises:
            SharedPromptError: it has more requests than any for which there is a graph, which would replay another
                step's plan; or with exact="trainer" it is one that would have other bits.
        """
        self._is_planned = False
        decodes_prompts = self._settings.decodes_prompts
        if spec_info is not None or not (mode.is_decode_or_idle() or (decodes_prompts and tokens is not None)):
            if decodes_prompts:
                raise SharedPromptError("forward_mode", "decoding, or prompts outside of CUDA graphs", mode.name)
            self._statistics.count_stock("prompts")
            return
        metadata = self.forward_metadata
        requests, most = len(metadata.cache_seqlens_int32), self._plan.limits.max_requests
        if not 0 < requests <= most:
            if in_graph or (decodes_prompts and requests):
                raise SharedPromptError("requests", f"1 to {most} in a CUDA graph, or with exact='trainer'", requests)
            self._statistics.count_stock(f"no requests, or more than {most}")
            return
        table = metadata.page_table[:, : self._plan.max_pages_per_request]
        keys, longest = metadata.cache_seqlens_int32, metadata.max_seq_len_k
        options: dict[str, Any] = {}
        if decodes_prompts:
            options["boundaries"] = self._cuts.of(requests, None if is_capture else self.prompt_lengths)
        if tokens is not None:
            options |= {"cu_seqlens_q": metadata.cu_seqlens_q, "num_queries": tokens}
        self._plan.update(table, keys, max_seqlen=longest, **options)
        self._is_planned = True
        if not is_capture:
            columns, cuts = -(-longest // self._plan.limits.page_size), options.get("boundaries", keys)
            self._statistics.count_shared(table, columns, keys, cuts, self._plan.limits.page_size, tokens is not None)

    def forward_decode(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, forward_batch: Any, save_kv_cache: bool = True,
        *args: Any, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        return self._attend(super().forward_decode, q, k, v, layer, forward_batch, save_kv_cache, *args, **kwargs)

    def forward_extend(
        self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, forward_batch: Any, save_kv_cache: bool = True,
        *args: Any, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        return self._attend(super().forward_extend, q, k, v, layer, forward_batch, save_kv_cache, *args, **kwargs)

    def _attend(
        self, stock: Callable[..., Tensor], q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any,
        forward_batch: Any, save_kv_cache: bool, *args: Any, **kwargs: Any,
    ) -> Tensor:  # fmt: skip
        """Attention of a layer, or of SGLang's method where the step, or the layer, has no plan."""
        options = {name: value for name, value in kwargs.items() if value is not None and value is not False}
        sinks = options.pop("sinks", None)
        reason = self._why_stock_layer(layer, [*args, *options])
        if reason is not None:
            SGLANG.say_once(f"layers run on SGLang's own attention: {reason}", self._runner)
        if reason is not None or not self._is_planned:
            return stock(q, k, v, layer, forward_batch, save_kv_cache, *args, **kwargs)
        if k is not None and save_kv_cache:
            place = forward_batch.out_cache_loc
            self._pool.set_kv_buffer(layer, place, k, v, layer.k_scale, layer.v_scale)
        k_cache, v_cache = self._paged(layer.layer_id)
        rows = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        given = getattr(forward_batch, "_attn_output", None)
        out = shared_prefix_decode(
            rows, k_cache, v_cache, self._plan, softmax_scale=layer.scaling, window_size=(_window_of(layer), -1),
            softcap=float(layer.logit_cap or 0.0), sinks=sinks, out=None if given is None else given.view(rows.shape),
        )  # fmt: skip
        return out.view(len(rows), -1)

    def _why_stock_layer(self, layer: Any, options: list[Any]) -> str | None:
        """Why a layer is SGLang's own in all steps; None if it is not."""
        limits = self._plan.limits
        sizes = layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim, layer.v_head_dim
        if sizes != (limits.num_heads, limits.num_kv_heads, limits.head_dim, limits.head_dim):
            return f"heads, KV heads, head dim and that of values {sizes}"
        if layer.is_cross_attention or layer.attn_type != AttentionType.DECODER:
            return "cross attention, or attention that is not causal"
        if layer.k_scale is not None or layer.v_scale is not None:
            return "scales of keys and values"
        return f"options that only SGLang's kernels have: {', '.join(map(str, options))}" if options else None


class PreparedBackend(SharedPrefixBackend):
    """With one method that prepares steps of graphs."""

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        mode = forward_batch.forward_mode
        self._prepare(mode, forward_batch.spec_info, mode.is_decode_or_idle(), in_capture)


class CapturedBackend(SharedPrefixBackend):
    """With a method for captures and one for replays."""

    def init_forward_metadata_capture_cuda_graph(
        self, bs: int, num_tokens: int, req_pool_indices: Tensor, seq_lens: Tensor, encoder_lens: Tensor | None,
        forward_mode: Any, spec_info: Any,
    ) -> None:  # fmt: skip
        super().init_forward_metadata_capture_cuda_graph(
            bs, num_tokens, req_pool_indices, seq_lens, encoder_lens, forward_mode, spec_info
        )
        self._prepare(forward_mode, spec_info, True, True)

    def init_forward_metadata_replay_cuda_graph(
        self, bs: int, req_pool_indices: Tensor, seq_lens: Tensor, seq_lens_sum: int, encoder_lens: Tensor | None,
        forward_mode: Any, spec_info: Any, *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        super().init_forward_metadata_replay_cuda_graph(
            bs, req_pool_indices, seq_lens, seq_lens_sum, encoder_lens, forward_mode, spec_info, *args, **kwargs
        )
        self._prepare(forward_mode, spec_info, True)


def _window_of(layer: Any) -> int:
    """Positions before its own that a row sees; -1: all."""
    return -1 if layer.sliding_window_size is None else int(layer.sliding_window_size)


def _noting(stock: Callable[..., Any]) -> Callable[..., Any]:
    """A wrapper of ForwardBatch.init_new, by which every step of requests begins."""

    def init_new(batch: Any, model_runner: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(model_runner.attn_backend, SharedPrefixBackend):
            # A request that SGLang has retracted begins anew with what it has sampled, but keeps
            # its prompt.
            lengths = [len(request.origin_input_ids) for request in batch.reqs]
            model_runner.attn_backend.prompt_lengths = np.array(lengths, dtype=np.int32)
        return stock(batch, model_runner, *args, **kwargs)

    return init_new


def read_settings(runner: Any) -> Settings:
    """The settings in the environment: DUALKV_SGLANG='{"log_interval": 60}'.

    Raises:
        SharedPromptError: names an entry that is not as described; prompts that another backend computes.
    """
    text = os.environ.get(SETTINGS, "{}")
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise SharedPromptError(SETTINGS, "a JSON object", text) from error
    settings = settings_from(SETTINGS, found)
    options = options_of(runner)
    if options.enable_deterministic_inference:
        settings = settings._replace(exact="trainer")
    if not settings.decodes_prompts and settings.boundary != Settings().boundary:
        raise SharedPromptError(SETTINGS, "exact='trainer' beside a boundary: other bits depend on none", text)
    asked = options.prefill_attention_backend, options.decode_attention_backend
    others = {backend or options.attention_backend for backend in asked} - {NAME}
    if settings.decodes_prompts and others:
        raise SharedPromptError("attention_backend", f"{NAME} for prompts and decoding, as exact='trainer'", *others)
    graphs = getattr(options, "cuda_graph_config", None)  # from 0.5.14 on
    captures = not options.disable_piecewise_cuda_graph if graphs is None else graphs.prefill.backend != "disabled"
    if settings.decodes_prompts and captures:
        expected = "'disabled', as exact='trainer' plans prompts outside of graphs (--disable-piecewise-cuda-graph)"
        raise SharedPromptError("cuda_graph_backend_prefill", expected, "graphs of prompts")
    return settings


def why_stock(runner: Any) -> str | None:
    """Why all layers of a model runner are SGLang's own in all steps; None if they need not be."""
    options, model, pool = options_of(runner), runner.model_config, runner.token_to_kv_pool
    requests = runner.req_to_token_pool.size
    found = [
        ("a draft model", runner.is_draft_worker),
        ("speculative decoding", options.speculative_algorithm is not None),
        ("data parallel attention", options.enable_dp_attention),
        ("prefill context parallelism", options.attn_cp_size > 1),
        ("decode context parallelism", installed().decides and options.dcp_size > 1),
        ("prefill and decode in different engines", options.disaggregation_mode != "null"),
        ("prefill and decode at the same time (PD multiplexing)", options.enable_pdmux),
        ("steps in two halves (two-batch overlap)", options.enable_two_batch_overlap),
        ("torch.compile", options.enable_torch_compile),
        ("an encoder beside the decoder", model.is_encoder_decoder),
        ("local attention", model.is_local_attention_model),
        (f"more than {MOST_REQUESTS} requests", requests > MOST_REQUESTS),
        (f"a cache of the type {type(pool).__name__}", type(pool) is not MHATokenToKVPool),
        (f"a cache of {pool.dtype} for a model of {model.dtype}", pool.dtype not in {model.dtype} & {*CUDA_DTYPES}),
        (f"a head dim of {model.head_dim}", model.head_dim not in DECODE_HEAD_DIMS),
        ("a cache whose pages are not rows of heads", getattr(pool, "kv_cache_layout", "nhd") != "nhd"),
    ]
    return next((reason for reason, holds in found if holds), None)


def say_sharing(runner: Any, settings: Settings) -> None:
    """Log once in an engine what can be shared."""
    lines = ["decoding runs over shared prefixes"]
    if settings.decodes_prompts:
        lines.append(f"so do prompts, with the bits of training that packs samples with boundary={settings.boundary!r}")
    if options_of(runner).disable_radix_cache:
        lines.append("nothing is shared, as SGLang's radix cache is off (disable_radix_cache)")
    else:
        lines.append(f"requests share pages of {runner.page_size} tokens, of SGLang's radix cache")
    if release() > NEWEST:
        known = ".".join(map(str, NEWEST))
        lines.append(f"this SGLang is newer than {known}, the newest that is known")
    SGLANG.say_once("; ".join(lines), runner, logging.INFO)
