# SPDX-License-Identifier: BSD-3-Clause
"""Steps of SGLang on the CPU: its backend, cache and modes of the installed SGLang's code, without its engine.

Imported behind sglang_python.install().

What its model runner and scheduler give is made here, from lists of requests. Its kernels have plain ones in their
places: FlashAttention on the paged cache, and the one that fills the metadata of CUDA graphs.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention import flashattention_backend as stock
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache import memory_pool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from flash_attn_dualkv.integrations.sglang import versions

ROOT = Path(__file__).resolve().parents[2]
HEADS, KV_HEADS, HEAD_DIM, PAGE, PAGES = 4, 2, 64, 16, 64
MAX_REQUESTS, CONTEXT = 8, 160
DTYPE = torch.bfloat16


@dataclass
class Request:
    """Of a step: its keys with those of its queries, its pages, and how many queries it has: one if it decodes."""

    keys: int
    pages: list[int]
    queries: int = 1


PROMPT = [3, 9, 5]
# Two groups of siblings and a request by itself, shuffled.
DECODING = [
    Request(60, [*PROMPT, 11]),
    Request(20, [40, 41]),
    Request(49, [*PROMPT, 12]),
    Request(33, [20, 21, 22]),
    Request(70, [*PROMPT, 13, 14]),
    Request(40, [20, 21, 23]),
]
# A prompt, one whose first pages are in the cache, a chunk, and one that decodes in a mixed step.
PROMPTS = [
    Request(37, [*PROMPT], 37),
    Request(60, [*PROMPT, 11], 12),
    Request(33, [20, 21, 22], 32),
    Request(49, [*PROMPT, 12]),
]
ALONE = [Request(33, [20, 21, 22]), Request(1, [30]), Request(47, [24, 25, 26])]


@dataclass
class Calls:
    """Of SGLang's FlashAttention: rows of q of each."""

    rows: list[int] = field(default_factory=list)


def arguments() -> Any:
    """SGLang's, and what its runtime tells its backend by other ways in other versions."""
    made = SimpleNamespace(**dict.fromkeys(versions.OPTIONS.split(), False))
    vars(made).update(
        tp_size=1, attn_tp_size=1, attn_cp_size=1, dcp_size=1, disaggregation_mode="null", kv_cache_dtype="auto",
        speculative_algorithm=None, speculative_eagle_topk=None, speculative_num_draft_tokens=None, is_embedding=False,
        chunked_prefill_size=-1, disable_cuda_graph=False, enable_prefill_cp=False, attn_dp_enabled=False,
        attention_backend="dualkv", max_prefill_tokens=64, disable_piecewise_cuda_graph=True,
        deterministic=SimpleNamespace(enable_deterministic_inference=False),
    )  # fmt: skip
    return made


def replace_kernels(monkeypatch: Any) -> Calls:
    """Plain functions for SGLang's kernels, and what its runtime would tell its backend."""
    calls = Calls()
    told = arguments()
    for name in ("get_parallel", "get_spec", "get_exec", "get_model", "get_schedule", "get_memory"):
        monkeypatch.setattr(stock, name, lambda: told, raising=False)
    monkeypatch.setattr(stock, "get_kv_shard_pool", lambda _: None, raising=False)
    monkeypatch.setattr(stock, "get_device_capability", lambda: (9, 0), raising=False)
    monkeypatch.setattr(memory_pool, "maybe_init_custom_mem_pool", lambda **_: (False, None, None))
    monkeypatch.setattr(memory_pool, "ceil_align", lambda count, of: -(-count // of) * of, raising=False)
    monkeypatch.setattr(memory_pool, "can_use_store_cache", lambda *_: False, raising=False)
    signature = inspect.signature(stock.normal_decode_set_metadata)

    def normal_decode_set_metadata(*args: Any, **kwargs: Any) -> None:
        given = SimpleNamespace(**signature.bind(*args, **kwargs).arguments)
        keys = given.seq_lens + given.seq_len_delta
        given.cache_seqlens_int32.copy_(keys)
        given.cu_seqlens_k[1:].copy_(keys.cumsum(0))
        pages = -(-int(keys.max()) // given.page_size)
        slots = given.req_to_token[given.req_pool_indices][:, : pages * given.page_size : given.page_size]
        given.page_table[:, :pages].copy_(slots // given.page_size)

    monkeypatch.setattr(stock, "normal_decode_set_metadata", normal_decode_set_metadata)

    def flash_attn_with_kvcache(**call: Any) -> Tensor:
        q, table, keys = call["q"], call["page_table"], call["cache_seqlens"].tolist()
        calls.rows.append(len(q))
        rows = [
            plain(q[row], call["k_cache"], call["v_cache"], Request(count, table[row].tolist()), call["softmax_scale"])
            for row, count in enumerate(keys)
        ]
        return torch.stack(rows).to(DTYPE)

    monkeypatch.setattr(stock, "flash_attn_with_kvcache", flash_attn_with_kvcache)
    return calls


def pool(dtype: torch.dtype = DTYPE) -> Any:
    """SGLang's cache of a layer."""
    return memory_pool.MHATokenToKVPool((PAGES - 1) * PAGE, PAGE, dtype, KV_HEADS, HEAD_DIM, 1, "cpu", False)


def runner(**changes: Any) -> Any:
    """As much of SGLang's model runner as its backend reads. `changes` are of its parts: model_config__head_dim=80."""
    made = SimpleNamespace(
        sliding_window_size=None, device="cpu", page_size=PAGE, kv_cache_dtype=DTYPE, kv_cache_dtype_str="auto",
        attn_cp_size=1, tp_size=1, use_mla_backend=False, is_draft_worker=False, attention_chunk_size=None,
        kv_index_translator=SimpleNamespace(is_translating=False, reads_are_translated=False, space=lambda _: None),
        token_to_kv_pool=pool(),
        req_to_token_pool=SimpleNamespace(
            size=MAX_REQUESTS, req_to_token=torch.zeros(MAX_REQUESTS + 1, CONTEXT, dtype=torch.int32)
        ),
        model_config=SimpleNamespace(
            is_encoder_decoder=False, context_len=CONTEXT, attention_arch="MHA", head_dim=HEAD_DIM, dtype=DTYPE,
            hf_text_config=SimpleNamespace(num_attention_heads=HEADS), get_num_kv_heads=lambda _: KV_HEADS,
            is_local_attention_model=False,
        ),
        server_args=arguments(), ps=arguments(), token_to_kv_pool_allocator=SimpleNamespace(),
    )  # fmt: skip
    for name, value in changes.items():
        owner: Any = made
        *path, last = name.split("__")
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, last, value)
    return made


def layer(**changes: Any) -> RadixAttention:
    made = RadixAttention(HEADS, HEAD_DIM, HEAD_DIM**-0.5, KV_HEADS, layer_id=0)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def batch(backend: Any, requests: list[Request], padded: int | None = None) -> Any:
    """A ForwardBatch of requests, in rows of the pool from 1 on, padded as for a CUDA graph."""
    count = padded or len(requests)
    slots = backend._runner.req_to_token_pool.req_to_token
    for row, request in enumerate(requests, 1):
        places = torch.tensor(request.pages)[:, None] * PAGE + torch.arange(PAGE)
        slots[row, : places.numel()] = places.flatten()
        slots[row, places.numel() :] = 7 * PAGE  # what an earlier request has left
    keys = torch.tensor([request.keys for request in requests] + [1] * (count - len(requests)))
    rows = torch.tensor([*range(1, len(requests) + 1)] + [0] * (count - len(requests)))
    queries = [request.queries for request in requests] + [1] * (count - len(requests))
    of_rows = torch.arange(count).repeat_interleave(torch.tensor(queries))
    positions = torch.cat([torch.arange(most - new, most) for most, new in zip(keys.tolist(), queries)])
    mode = ForwardMode.DECODE if max(queries) == 1 else ForwardMode.MIXED if 1 in queries else ForwardMode.EXTEND
    return SimpleNamespace(
        forward_mode=mode, spec_info=None, batch_size=count, seq_lens=keys, seq_lens_cpu=keys,
        req_pool_indices=rows, req_to_token_pool=backend._runner.req_to_token_pool, encoder_lens=None,
        token_to_kv_pool=backend._pool, out_cache_loc=slots[rows[of_rows], positions].long(), positions=positions,
        kv_loc_plan=None, attn_attend_prefix_cache=None, out_cache_loc_is_physical=True,
        seq_lens_sum=int(keys.sum()), input_ids=positions, extend_seq_lens=torch.tensor(queries),
        extend_seq_lens_cpu=queries, extend_prefix_lens_cpu=(keys - torch.tensor(queries)).tolist(),
    )  # fmt: skip


def plain(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, request: Request, scale: float, window: int = -1, softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attention of a request's row, (heads, head_dim), in float64."""
    positions = torch.arange(request.keys)
    pages = torch.tensor(request.pages)[positions // PAGE]
    k, v = (
        cache[pages, positions % PAGE].double().repeat_interleave(HEADS // KV_HEADS, 1) for cache in (k_cache, v_cache)
    )
    scores = torch.einsum("hd,khd->hk", q.double(), k) * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if window >= 0:
        scores = scores.masked_fill(request.keys - 1 - positions > window, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[:, None]), -1)
    return torch.einsum("hk,khd->hd", scores.softmax(-1)[:, : request.keys], v)


def prepare(backend: Any, step: Any) -> None:
    """An eager step's metadata."""
    backend.init_forward_metadata(step)


def capture(backend: Any, step: Any) -> None:
    """A CUDA graph's metadata, before it is captured."""
    if versions.installed().backend == "PreparedBackend":
        backend.init_forward_metadata_out_graph(step, in_capture=True)
    else:
        given = step.batch_size, step.batch_size, step.req_pool_indices, step.seq_lens, None
        backend.init_forward_metadata_capture_cuda_graph(*given, step.forward_mode, step.spec_info)


def replay(backend: Any, step: Any) -> None:
    """A CUDA graph's metadata, before it is replayed."""
    if versions.installed().backend == "PreparedBackend":
        backend.init_forward_metadata_out_graph(step)
    else:
        given = step.batch_size, step.req_pool_indices, step.seq_lens, int(step.seq_lens.sum()), None
        backend.init_forward_metadata_replay_cuda_graph(*given, step.forward_mode, step.spec_info, step.seq_lens_cpu)


def places(backend: Any) -> list[int]:
    """Memory that decoding reads in a step, beside the caches."""
    return [part.data_ptr() for part in backend._plan.step if isinstance(part, Tensor)]


def fill(backend: Any) -> None:
    """Keys and values in all pages."""
    draw = torch.Generator().manual_seed(0)
    for cache in backend._pool.get_kv_buffer(0):
        cache.copy_(torch.randn(cache.shape, generator=draw))


def output(backend: Any, attention: Any, requests: list[Request], first: int = 0) -> Tensor:
    """Of a step whose keys and values are in the cache; its rows of q are those from the first on of all."""
    step = batch(backend, requests)
    backend.init_forward_metadata(step)
    q = torch.randn(CONTEXT, HEADS * HEAD_DIM, generator=torch.Generator().manual_seed(1)).to(DTYPE)
    out: Tensor = backend.forward(q[first : first + len(step.positions)], None, None, attention, step)
    return out


def run(
    backend: Any, attention: Any, requests: list[Request], padded: int | None = None, metadata: Any = prepare,
    **options: Any,
) -> Tensor:  # fmt: skip
    """A step: its output, of which each row is checked against plain attention."""
    fill(backend)
    draw = torch.Generator().manual_seed(2)
    step = batch(backend, requests, padded)
    metadata(backend, step)
    tokens = sum(request.queries for request in requests)
    q = torch.randn(len(step.positions), HEADS * HEAD_DIM, generator=draw).to(DTYPE)
    k, v = (torch.randn(len(q), KV_HEADS, HEAD_DIM, generator=draw).to(DTYPE) for _ in range(2))
    out = backend.forward(q, k, v, attention, step, **options)
    assert out.shape == q.shape and not out.isnan().any()
    caches = backend._paged(0)
    for cache, new in zip(backend._pool.get_kv_buffer(0), (k, v)):
        assert torch.equal(cache[step.out_cache_loc][:tokens], new[:tokens]), "the step's keys are written"
    window = -1 if attention.sliding_window_size is None else attention.sliding_window_size
    settings = attention.scaling, window, attention.logit_cap, options.get("sinks")
    of_tokens = [request for request in requests for _ in range(request.queries)]
    for row, (request, position) in enumerate(zip(of_tokens, step.positions.tolist())):
        expected = plain(q[row].view(HEADS, -1), *caches, Request(position + 1, request.pages), *settings).flatten()
        torch.testing.assert_close(out[row].double(), expected, atol=2e-2, rtol=2e-2)
    return out
