# SPDX-License-Identifier: BSD-3-Clause
"""Exact attention over a shared prompt: one copy of the prompt's keys and values serves all of its responses."""

from ._version import __version__
from .attention import flash_attn_dualkv_varlen_func, flash_attn_varlen_func
from .data.balance import balance
from .data.batch import PackedBatch
from .data.pack import group_by_prefix, group_by_prompt, pack_jagged, pack_padded, pack_prefix_tree, pack_shared_prompts
from .data.parts import plan_parts
from .data.prefix_tree import PrefixTree
from .data.split import split_by_token_budget
from .data.unpack import unpack_logprobs, unpack_to_jagged
from .decode.attention import shared_prefix_decode
from .decode.kvcache import append_kv, flash_attn_with_kvcache
from .decode.plan import SharedPrefixPlan
from .errors import SharedPromptError, SharedPromptLayoutError, SharedPromptUnsupportedError
from .kernels import build_info, warn_without_kernels
from .layout import SharedPromptLayout
from .packed_attention import flash_attn_tree_varlen_func, shared_prompt_attention
from .plan import explain_plan

warn_without_kernels()

# Former names of the one class of batches.
SharedPromptBatch = PrefixTreeBatch = PackedBatch

__all__ = [
    "PackedBatch",
    "PrefixTree",
    "PrefixTreeBatch",
    "SharedPrefixPlan",
    "SharedPromptBatch",
    "SharedPromptError",
    "SharedPromptLayout",
    "SharedPromptLayoutError",
    "SharedPromptUnsupportedError",
    "__version__",
    "append_kv",
    "balance",
    "build_info",
    "explain_plan",
    "flash_attn_dualkv_varlen_func",
    "flash_attn_tree_varlen_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "group_by_prefix",
    "group_by_prompt",
    "pack_jagged",
    "pack_padded",
    "pack_prefix_tree",
    "pack_shared_prompts",
    "plan_parts",
    "shared_prefix_decode",
    "shared_prompt_attention",
    "split_by_token_budget",
    "unpack_logprobs",
    "unpack_to_jagged",
]
