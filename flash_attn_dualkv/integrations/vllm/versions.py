# SPDX-License-Identifier: BSD-3-Clause
"""Versions of vLLM, and all that differs between them for this plug-in."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..engines.names import known_version, release_of


class Version(NamedTuple):
    """Differences between versions of vLLM.

    kv_dim: dimension of a layer's cache that holds K and V: 1 of (pages, K and V, rows, heads,
        head_dim), 0 of one with pages behind it, or None: it is (pages, heads, rows, K and V side by
        side).
    has_rswa: whether models may have reference sliding windows.
    keeps_captures: whether the second model runner captures a draft model with metadata of steps
        that it has captured before. A plan is then another step's.
    wakes_by: module, class and method by which a worker takes back the memory that an engine which
        sleeps has given up: with other contents, at the same addresses.
    """

    kv_dim: int | None = None
    has_rswa: bool = True
    keeps_captures: bool = False
    wakes_by: tuple[str, str, str] = ("vllm.v1.worker.gpu_worker", "Worker", "wake_up")

    def keys_and_values(self, cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer's cache, views of (pages, rows, heads, head_dim)."""
        k, v = cache.transpose(1, 2).split(head_dim, dim=-1) if self.kv_dim is None else cache.unbind(self.kv_dim)
        return k, v


# By the first release with them, oldest first.
DIFFERENCES = {
    (0, 22): Version(kv_dim=0, has_rswa=False, keeps_captures=True),
    (0, 23): Version(kv_dim=1, has_rswa=False, keeps_captures=True),
    (0, 25): Version(kv_dim=1, keeps_captures=True),
    (0, 26): Version(),
}
NEWEST = (0, 33)  # whose code the tests have run on

# Fields and attributes that the plug-in reads, of classes of vLLM.
_CONFIG, _ATTENTION = "vllm.config", "vllm.v1.attention"
NAMES = {
    f"{_CONFIG}.VllmConfig": "additional_config compilation_config speculative_config use_v2_model_runner",
    f"{_CONFIG}.ModelConfig": "is_hybrid is_mm_prefix_lm max_model_len",
    f"{_CONFIG}.CacheConfig": "block_size enable_prefix_caching kv_sharing_fast_prefill num_gpu_blocks",
    f"{_CONFIG}.SchedulerConfig": "max_num_batched_tokens max_num_seqs",
    f"{_CONFIG}.ParallelConfig": "decode_context_parallel_size prefill_context_parallel_size use_ubatching",
    f"{_CONFIG}.CompilationConfig": "static_forward_context",
    "vllm.model_executor.layers.attention.Attention": "impl kv_cache kv_cache_torch_dtype",
    f"{_ATTENTION}.backend.CommonAttentionMetadata": (
        "block_table_tensor causal is_prefilling max_query_len max_seq_len num_actual_tokens num_reqs positions "
        "query_start_loc query_start_loc_cpu replace seq_lens seq_lens_cpu_upper_bound slot_mapping"
    ),
    f"{_ATTENTION}.backends.flash_attn.FlashAttentionImpl": (
        "alibi_slopes attn_type head_size kv_cache_dtype logits_soft_cap num_heads num_kv_heads scale sinks "
        "sliding_window"
    ),
    f"{_ATTENTION}.backends.flash_attn.FlashAttentionMetadataBuilder": "_init_reorder_batch_threshold",
}


def release() -> tuple[int, ...]:
    """Major and minor version of the installed vLLM."""
    return release_of("vllm")


def installed() -> Version:
    """Version of the installed vLLM, by its number alone; one that is newer than NEWEST is taken for that.

    Raises:
        SharedPromptUnsupportedError: it is older than all that this package knows.
    """
    return known_version("vllm", "CUSTOM", release(), DIFFERENCES, NEWEST)
