# SPDX-License-Identifier: BSD-3-Clause
"""Versions of SGLang, and all that differs between them for this plug-in."""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

from ...errors import SharedPromptUnsupportedError
from ..engines.names import known_version, release_of

_ATTENTION, _GRAPHS = "sglang.srt.layers.attention.flashattention_backend", "init_forward_metadata"


class Version(NamedTuple):
    """Differences between versions of SGLang.

    backend: the class of backend.py with the methods by which CUDA graphs get a step's metadata.
    graph_hooks: those methods.
    page_seam: what sets the default page size.
    decides: whether that returns its decision, and options are read through a view of all such decisions. These
        versions have decode context parallelism, too.
    """

    backend: str = "PreparedBackend"
    graph_hooks: str = f"{_GRAPHS}_out_graph"
    page_seam: str = "sglang.srt.arg_groups.overrides._page_size_default"
    decides: bool = True


# By the first release with them, oldest first.
_WRITTEN = Version(page_seam="sglang.srt.server_args.ServerArgs._handle_page_size", decides=False)
DIFFERENCES = {
    (0, 5, 12): _WRITTEN._replace(
        backend="CapturedBackend", graph_hooks=f"{_GRAPHS}_capture_cuda_graph {_GRAPHS}_replay_cuda_graph"
    ),
    (0, 5, 13): _WRITTEN,
    (0, 5, 15): Version(),
}
NEWEST = (0, 5, 23)  # whose code the tests have run on

# Options that decide who serves, of SGLang's arguments.
OPTIONS = (
    "attention_backend attn_cp_size chunked_prefill_size decode_attention_backend disaggregation_mode "
    "disable_radix_cache enable_deterministic_inference enable_dp_attention enable_pdmux enable_torch_compile "
    "enable_two_batch_overlap max_prefill_tokens prefill_attention_backend speculative_algorithm"
)
RUNNER = "is_draft_worker model_config page_size req_to_token_pool server_args token_to_kv_pool"


def release() -> tuple[int, ...]:
    """The first three numbers of the installed SGLang's version."""
    return release_of("sglang", 3)


def installed() -> Version:
    """Version of the installed SGLang, by its number alone; one that is newer than NEWEST is taken for that.

    Raises:
        SharedPromptUnsupportedError: it is older than all that this package knows.
    """
    return known_version("sglang", "dualkv", release(), DIFFERENCES, NEWEST)


def names(version: Version) -> dict[str, str]:
    """Fields and attributes that the plug-in reads, of classes of SGLang."""
    return {
        f"{_ATTENTION}.FlashAttentionMetadata": "cache_seqlens_int32 cu_seqlens_q max_seq_len_k page_table",
        f"{_ATTENTION}.FlashAttentionBackend": (
            f"{version.graph_hooks} _compute_scheduler_metadata forward_metadata max_context_len num_attention_heads"
        ),
        "sglang.srt.layers.radix_attention.RadixAttention": (
            "attn_type head_dim is_cross_attention k_scale layer_id logit_cap scaling sliding_window_size "
            "tp_k_head_num tp_q_head_num v_head_dim v_scale"
        ),
        "sglang.srt.mem_cache.memory_pool.MHATokenToKVPool": "get_kv_buffer set_kv_buffer",
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch": (
            "batch_size forward_mode init_new input_ids out_cache_loc spec_info"
        ),
        "sglang.srt.server_args.ServerArgs": OPTIONS + " dcp_size" * version.decides,
    }


def check_runner(runner: Any) -> None:
    """SharedPromptUnsupportedError if a model runner lacks an attribute that the plug-in reads."""
    lacking = ", ".join(name for name in RUNNER.split() if not hasattr(runner, name))
    if lacking:
        raise SharedPromptUnsupportedError(type(runner).__name__, f"one with {lacking}", "none")


def options_of(runner: Any) -> Any:
    """SGLang's arguments as its runners see them: given by the user, or decided since."""
    if not installed().decides:
        return runner.server_args
    return importlib.import_module("sglang.srt.arg_groups.overrides").resolved_view(runner.server_args)
