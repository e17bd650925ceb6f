# SPDX-License-Identifier: BSD-3-Clause
"""Steps of vLLM on the CPU: real backend, builder, metadata and layer code of the installed vLLM, without its engine.

What vLLM's configuration and runner give is made here, from lists of requests. Prompts run on vLLM's code down to its
FlashAttention function, which is a plain one here.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.config import ModelConfig
from vllm.v1.attention.backend import AttentionType, CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

try:
    from vllm.v1.worker.gpu.spec_decode import speculator
except ImportError:  # before 0.23
    speculator = None

from flash_attn_dualkv.integrations.vllm import backend, prompts

HEADS, KV_HEADS, HEAD_DIM, PAGE = 4, 2, 64, 16
PAGES, COLUMNS, MAX_REQUESTS, MAX_TOKENS = 64, 12, 8, 128
DTYPE = torch.bfloat16
NAME = "model.layers.0.self_attn.attn"
HAS_RSWA = hasattr(ModelConfig, "rswa_window")


@dataclass
class Request:
    """Of a step: its keys, how many of them are its queries', its prompt's length and its pages."""

    keys: int
    queries: int
    prompt: int
    pages: list[int]


PROMPT = [3, 9, 5]
# Two groups of siblings and a request by itself, shuffled.
DECODING = [
    Request(60, 1, 50, [*PROMPT, 11]),
    Request(20, 1, 18, [40, 41]),
    Request(49, 1, 48, [*PROMPT, 12]),
    Request(33, 1, 32, [20, 21, 22]),
    Request(70, 1, 50, [*PROMPT, 13, 14]),
    Request(40, 1, 32, [20, 21, 23]),
]
PREFILL = [Request(37, 37, 37, [50, 51, 52]), Request(64, 5, 70, [55, 56, 57, 58])]


def cache_shape(page: int = PAGE, pages: int = PAGES) -> tuple[int, ...]:
    """A layer's cache as vLLM makes it: K and V side by side in each row, as halves of each page, or of all."""
    shape: Any = getattr(FlashAttentionBackend, "get_kv_cache_shape", None)  # newer versions have one for all backends
    return shape(pages, page, KV_HEADS, HEAD_DIM) if shape else (pages, KV_HEADS, page, 2 * HEAD_DIM)


def halves(cache: Tensor) -> tuple[Tensor, Tensor]:
    """K and V of a layer's cache, (pages, rows, heads, head_dim)."""
    k, v = cache.unbind([*cache.shape].index(2)) if cache.dim() == 5 else cache.transpose(1, 2).split(HEAD_DIM, -1)
    return k, v


@dataclass
class Calls:
    """Of vLLM's FlashAttention: rows of q of each."""

    rows: list[int] = field(default_factory=list)


def ints(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def config(threshold: int = 1, **changes: Any) -> Any:
    """As much of a VllmConfig as the builder reads. `changes` are of its parts: parallel__use_ubatching=True."""
    speculative = None
    if threshold > 1:
        speculative = SimpleNamespace(num_speculative_tokens=threshold - 1, parallel_drafting=False)
    made = SimpleNamespace(
        model_config=SimpleNamespace(
            is_hybrid=False, is_mm_prefix_lm=False, get_num_attention_heads=lambda _: HEADS,
            get_num_kv_heads=lambda _: KV_HEADS, get_head_size=lambda: HEAD_DIM, dtype=DTYPE, max_model_len=1024,
            hf_config=SimpleNamespace(model_type="qwen3"),
        ),
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=1, prefill_context_parallel_size=1, use_ubatching=False,
            cp_kv_cache_interleave_size=1,
        ),
        cache_config=SimpleNamespace(
            cache_dtype="auto", block_size=PAGE, kv_sharing_fast_prefill=False, num_gpu_blocks=PAGES,
            enable_prefix_caching=True, mamba_cache_mode="align", mamba_ssm_cache_dtype="auto",
        ),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: True), max_cudagraph_capture_size=8,
            static_forward_context={},
        ),
        attention_config=SimpleNamespace(flash_attn_max_num_splits_for_cuda_graph=32, flash_attn_version=None),
        scheduler_config=SimpleNamespace(max_num_seqs=MAX_REQUESTS, max_num_batched_tokens=MAX_TOKENS),
        speculative_config=speculative, kernel_config=SimpleNamespace(enable_jit_warmup=False), additional_config={},
        use_v2_model_runner=True,
    )  # fmt: skip
    if HAS_RSWA:
        made.model_config.rswa_window = None
    for name, value in changes.items():
        part, _, attribute = name.partition("__")
        if attribute:
            setattr(getattr(made, f"{part}_config"), attribute, value)
        else:
            setattr(made, name, value)
    return made


class Layer(torch.nn.Module):
    """As much of vLLM's Attention as the backend reads; its cache has so many pages of so many rows."""

    def __init__(
        self, impl_class: type = backend.SharedPrefixImpl, page: int = PAGE, pages: int = PAGES, **attributes: Any
    ) -> None:  # fmt: skip
        super().__init__()
        impl: Any = impl_class.__new__(impl_class)
        values = {
            "num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_size": HEAD_DIM, "scale": 0.125,
            "alibi_slopes": None, "sliding_window": (-1, -1), "kv_cache_dtype": "auto", "logits_soft_cap": 0,
            "attn_type": AttentionType.DECODER, "sinks": None, "vllm_flash_attn_version": 3,
            "supports_quant_query_input": False, "fa4_hd256": False, "dcp_world_size": 1, "num_queries_per_kv": 2,
        }  # fmt: skip
        for name, value in (values | attributes).items():
            setattr(impl, name, value)
        self.impl = impl
        self.kv_cache_torch_dtype = DTYPE
        self._q_scale = self._k_scale = self._v_scale = torch.ones(1)
        # NaN shows what is read too much.
        self.kv_cache = torch.full(cache_shape(page, pages), torch.nan, dtype=DTYPE)
        self.page = page


def builder(layer: Layer, vllm_config: Any | None = None, layers: dict[str, Layer] | None = None) -> Any:
    """The backend's metadata builder of a layer, or of all that have its block table."""
    made, layers = vllm_config or config(), layers or {NAME: layer}
    made.compilation_config.static_forward_context |= layers
    sizes = {"block_size": layer.page, "num_kv_heads": KV_HEADS, "head_size": HEAD_DIM, "dtype": DTYPE}
    window = layer.impl.sliding_window[0] + 1
    spec = SlidingWindowSpec(sliding_window=window, **sizes) if window else FullAttentionSpec(**sizes)
    kind = backend.SharedPrefixBackend.get_builder_cls()
    return kind(spec, [*layers], made, torch.device("cpu"))


def metadata(requests: list[Request], padded: int | None = None, **changes: Any) -> Any:
    """vLLM's CommonAttentionMetadata of requests, padded to that many as for a CUDA graph."""
    count = padded or len(requests)
    queries = [one.queries for one in requests]
    offsets = np.cumsum([0, *queries, *[0] * (count - len(requests))])
    table = torch.zeros(count, COLUMNS, dtype=torch.int32)
    for row, one in enumerate(requests):
        table[row, : len(one.pages)] = ints(one.pages)
        table[row, len(one.pages) :] = 7  # what an earlier step has left
    keys = ints([*(one.keys for one in requests), *[0] * (count - len(requests))])
    prompts.note(np.array([one.prompt for one in requests], dtype=np.int32))
    tokens = count if padded else int(offsets[-1])
    values = {
        "query_start_loc": ints(offsets), "query_start_loc_cpu": ints(offsets), "seq_lens": keys,
        "num_reqs": count, "num_actual_tokens": tokens, "max_query_len": max(queries), "max_seq_len": int(keys.max()),
        "block_table_tensor": table, "slot_mapping": torch.zeros(tokens, dtype=torch.int64), "causal": True,
        "seq_lens_cpu_upper_bound": keys, "is_prefilling": torch.zeros(count, dtype=torch.bool),
        "positions": torch.zeros(tokens, dtype=torch.int64),
    }  # fmt: skip
    return CommonAttentionMetadata(**(values | changes))


def fill(layer: Layer, requests: list[Request], seed: int = 0) -> None:
    """Keys and values of the requests, in their pages; equal pages get equal ones."""
    draw = torch.Generator().manual_seed(seed)
    for page in sorted({page for one in requests for page in one.pages}):
        for half in halves(layer.kv_cache):
            half[page] = torch.randn(half.shape[1:], generator=draw).to(DTYPE)
    for one in requests:  # behind a request's last key there is nothing
        last, rows = divmod(one.keys, layer.page)
        if rows and not any(one.pages[last] in other.pages for other in requests if other is not one):
            for half in halves(layer.kv_cache):
                half[one.pages[last], rows:] = torch.nan


def plain(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, request: Request, scale: float, window: int = -1,
    softcap: float = 0.0, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of a request's rows, in float64."""
    positions, rows = torch.arange(request.keys), k_cache.shape[1]
    pages = torch.tensor(request.pages)[positions // rows]
    found = (cache[pages, positions % rows].double() for cache in (k_cache, v_cache))  # (keys, KV heads, head_dim)
    k, v = (one.repeat_interleave(q.shape[1] // KV_HEADS, 1) for one in found)
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    distance = torch.arange(request.keys - request.queries, request.keys)[:, None] - positions
    hidden = distance < 0 if window < 0 else (distance < 0) | (distance > window)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double().view(-1, 1, 1).expand(-1, len(q), 1)), -1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : request.keys], v)


def run(layer: Layer, builder: Any, requests: list[Request], padded: int | None = None, **changes: Any) -> Tensor:
    """A step: output of its rows, each checked against plain attention."""
    common = metadata(requests, padded, **changes)
    fill(layer, requests)
    q = torch.randn(common.num_actual_tokens, HEADS, HEAD_DIM).to(DTYPE)
    kv = torch.zeros(common.num_actual_tokens, KV_HEADS, HEAD_DIM).to(DTYPE)
    out = torch.full_like(q, torch.nan)
    planned = builder.build(0, common)
    assert layer.impl.forward(layer, q, kv, kv, layer.kv_cache, planned, out) is out
    row, impl = 0, layer.impl
    options = impl.scale, impl.sliding_window[0], impl.logits_soft_cap, impl.sinks
    for one in requests:
        expected = plain(q[row : row + one.queries], *halves(layer.kv_cache), one, *options)
        torch.testing.assert_close(out[row : row + one.queries].double(), expected, atol=2e-2, rtol=2e-2)
        row += one.queries
    assert not out[row:].any() and not out.isnan().any()
    return out


def flash_attention(calls: Calls) -> Any:
    """vLLM's flash_attn_varlen_func on a paged cache: plain, and it counts its rows."""

    def flash_attn_varlen_func(**call: Any) -> Tensor:
        q, offsets, keys = call["q"], call["cu_seqlens_q"].tolist(), call["seqused_k"].tolist()
        calls.rows.append(len(q))
        window = (call["window_size"] or (-1, -1))[0]
        for row, count in enumerate(keys):
            begin, end = offsets[row : row + 2]
            request = Request(count, end - begin, 0, call["block_table"][row].tolist())
            if end > begin:
                some = plain(q[begin:end], call["k"], call["v"], request, call["softmax_scale"], window)
                call["out"][begin:end] = some.to(DTYPE)
        assert call["softcap"] == 0 and call["alibi_slopes"] is None
        out: Tensor = call["out"]
        return out

    return flash_attn_varlen_func


def sleeping_worker(monkeypatch: Any, gpu_worker: Any) -> Any:
    """As much of vLLM's worker as its method `wake_up` reads, above an allocator that does nothing."""
    allocator = SimpleNamespace(wake_up=lambda tags: None)
    backend = SimpleNamespace(resume=lambda tags: None)
    if hasattr(gpu_worker, "get_mem_allocator_instance"):
        monkeypatch.setattr(gpu_worker, "get_mem_allocator_instance", lambda: allocator)
    else:  # before 0.23
        monkeypatch.setattr("vllm.device_allocator.cumem.CuMemAllocator.get_instance", lambda: allocator)
    return SimpleNamespace(
        _sleep_saved_buffers={}, _sleep_saved_parameters={}, _sleep_saved_draft_buffers={},
        _sleep_rebuild_draft_metadata_buffers=False, _get_sleep_mode_backend=lambda: backend,
        sleep_mode_backend=backend, synchronize_device=lambda: None,
        model_runner=SimpleNamespace(post_kv_cache_wake_up=lambda: None),
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(enable_nccl_comm_suspend=False)),
    )  # fmt: skip


def first_runner(common: Any, tables: list[Tensor], groups: Any, cache: Any, requests: list[Request]) -> Any:
    """Metadata as the installed vLLM's first runner builds it for requests that decode, padded to those of `common`.

    tables, groups: of each group of layers of its configuration of the cache.
    """
    # Prompts' lengths behind the requests are those of earlier steps.
    count, lengths = len(requests), np.array([one.prompt for one in requests] + [99, 99], dtype=np.int32)

    def buffer(tensor: Tensor) -> Any:
        return SimpleNamespace(gpu=tensor, cpu=tensor, get_device_tensor=lambda count: tensor[:count])

    runner = SimpleNamespace(
        kv_cache_config=cache, optimistic_seq_lens_cpu=common.seq_lens, seq_lens=common.seq_lens,
        positions=common.positions, query_start_loc=buffer(common.query_start_loc), device=torch.device("cpu"),
        attn_groups=groups, requests={},
        input_batch=SimpleNamespace(
            block_table=[*map(buffer, tables)],
            num_computed_tokens_cpu_tensor=common.seq_lens - 1, num_prompt_tokens=lengths,
            num_prompt_tokens_cpu_tensor=torch.from_numpy(lengths), req_ids=list("abcdefghij")[:count],
        ),
        model_config=SimpleNamespace(rswa_window=None),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False, use_replayssm=False),
        routed_experts_initialized=False, use_async_spec_decode=False, is_mm_prefix_lm=False, dcp_world_size=1,
        speculative_config=None, max_model_len=1024, _get_encoder_seq_lens=lambda *_, **__: (None, None),
    )  # fmt: skip
    return GPUModelRunner._build_attention_metadata(
        runner, num_tokens=count, num_reqs=count, max_query_len=1, num_tokens_padded=common.num_reqs,
        num_reqs_padded=common.num_reqs, slot_mappings=dict.fromkeys(range(len(tables)), common.slot_mapping),
    )  # fmt: skip


def parameters(function: Any) -> list[str]:
    """Names of a function's parameters."""
    return list(inspect.signature(function).parameters)
