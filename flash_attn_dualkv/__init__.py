"""Exact attention over a shared prompt: one copy of the prompt's keys and values serves all of its responses."""

from ._version import __version__
from .interface import flash_attn_dualkv_varlen_func, flash_attn_varlen_func
from .ops import build_info
from .packing import (
    SharedPromptBatch,
    SharedPromptError,
    SharedPromptLayout,
    SharedPromptLayoutError,
    SharedPromptUnsupportedError,
    balance_groups,
    group_by_prompt,
    pack_jagged,
    pack_padded,
    pack_shared_prompts,
    shared_prompt_attention,
    split_by_token_budget,
    unpack_logprobs,
    unpack_to_jagged,
)

__all__ = [
    "SharedPromptBatch",
    "SharedPromptError",
    "SharedPromptLayout",
    "SharedPromptLayoutError",
    "SharedPromptUnsupportedError",
    "__version__",
    "balance_groups",
    "build_info",
    "flash_attn_dualkv_varlen_func",
    "flash_attn_varlen_func",
    "group_by_prompt",
    "pack_jagged",
    "pack_padded",
    "pack_shared_prompts",
    "shared_prompt_attention",
    "split_by_token_budget",
    "unpack_logprobs",
    "unpack_to_jagged",
]
