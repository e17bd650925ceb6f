"""The data side under its former name: `flash_attn_dualkv` itself has all of these."""

from .attention import shared_prompt_attention
from .data.batch import SharedPromptBatch
from .data.pack import group_by_prompt, pack_jagged, pack_padded, pack_shared_prompts
from .data.split import balance_groups, split_by_token_budget
from .data.tree import PrefixTreeBatch, group_by_prefix, pack_prefix_tree
from .data.tree_split import balance_tree, split_tree_by_token_budget
from .data.trie import PrefixTree
from .data.unpack import unpack_logprobs, unpack_to_jagged
from .errors import SharedPromptError, SharedPromptLayoutError, SharedPromptUnsupportedError
from .layout import SharedPromptLayout

__all__ = [
    "PrefixTree",
    "PrefixTreeBatch",
    "SharedPromptBatch",
    "SharedPromptError",
    "SharedPromptLayout",
    "SharedPromptLayoutError",
    "SharedPromptUnsupportedError",
    "balance_groups",
    "balance_tree",
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
