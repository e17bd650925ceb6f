"""Exact attention over a shared prompt: one copy of the prompt's keys and values serves all of its responses."""

import sys

from . import attention, packing
from ._version import __version__
from .attention import flash_attn_dualkv_varlen_func, flash_attn_varlen_func
from .data.batch import SharedPromptBatch
from .data.pack import group_by_prompt, pack_jagged, pack_padded, pack_shared_prompts
from .data.split import balance_groups, split_by_token_budget
from .data.tree import PrefixTreeBatch, group_by_prefix, pack_prefix_tree
from .data.tree_split import balance_tree, split_tree_by_token_budget
from .data.trie import PrefixTree
from .data.unpack import unpack_logprobs, unpack_to_jagged
from .errors import SharedPromptError, SharedPromptLayoutError, SharedPromptUnsupportedError
from .layout import SharedPromptLayout
from .ops import build_info
from .packed_attention import flash_attn_tree_varlen_func, shared_prompt_attention
from .plan import explain_plan

# Former names of modules with public functions; `packing` is one too.
sys.modules[f"{__name__}.interface"] = attention
sys.modules.update(dict.fromkeys((f"{__name__}.{name}" for name in ("batch", "batching", "shared_prompt")), packing))

__all__ = [
    "PrefixTree",
    "PrefixTreeBatch",
    "SharedPromptBatch",
    "SharedPromptError",
    "SharedPromptLayout",
    "SharedPromptLayoutError",
    "SharedPromptUnsupportedError",
    "__version__",
    "balance_groups",
    "balance_tree",
    "build_info",
    "explain_plan",
    "flash_attn_dualkv_varlen_func",
    "flash_attn_tree_varlen_func",
    "flash_attn_varlen_func",
    "group_by_prefix",
    "group_by_prompt",
    "pack_jagged",
    "pack_padded",
    "pack_prefix_tree",
    "pack_shared_prompts",
    "shared_prompt_attention",
    "split_by_token_budget",
    "split_tree_by_token_budget",
    "unpack_logprobs",
    "unpack_to_jagged",
]
