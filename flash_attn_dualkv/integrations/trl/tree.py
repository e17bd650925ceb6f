# SPDX-License-Identifier: BSD-3-Clause
"""The tree attention of TRL's AsyncGRPOTrainer on this library's kernels.

TRL packs the samples of a micro-batch as a tree of segments and attends along the path of each: it
copies the keys and values of every path, so those of a prompt once for each of its completions.
Here nothing is copied: the segments are nodes, and a tree of any depth is one call.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from ...checks import CUDA_DTYPES, autocast
from ...kernels import kernels_lack
from ..common.patching import replace_once
from ..trees import Forest, remembered


def use_dualkv_for_tree_attention() -> None:
    """Run TRL's AsyncGRPOTrainer on these kernels; call it before or after one is made.

    Calls that the kernels do not offer (head dims above theirs or no multiple of 8; on a GPU 32
    bits) go to TRL's own. Calling it again changes nothing.
    """
    from trl.experimental.async_grpo import packing

    # What the trainer registers when it is made.
    replace_once(packing, "tree_attention", _tree_attention)
    if packing.TREE_ATTENTION in AttentionInterface._global_mapping:
        AttentionInterface.register(packing.TREE_ATTENTION, packing.tree_attention)


def _tree_attention(stock: Callable[..., Any]) -> Callable[..., Any]:
    def tree_attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **options: Any
    ) -> tuple[Tensor, None]:
        softcap, sliding_window = options.get("softcap") or 0.0, options.get("sliding_window")
        if not _is_offered(query, value, softcap):
            return stock(module, query, key, value, attention_mask, **options)
        tables = options["tree_cu_seqlens_q"], options["tree_cu_seqlens_k"]
        forest = remembered(tables, lambda: read_tree(*tables))
        q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
        window = (sliding_window - 1, 0) if sliding_window else (-1, -1)
        scale = options.get("scaling")
        out = forest.attend(q.to(v.dtype), k.to(v.dtype), v, scale, window_size=window, softcap=softcap)
        return out, None

    return tree_attention


def _is_offered(query: Tensor, value: Tensor, softcap: float) -> bool:
    """True if the kernels have the head dimensions, the type and the softcap; the reference has any of the last two."""
    head_dims = query.shape[-1], value.shape[-1]
    if value.is_cuda and autocast((value,))[0].dtype not in CUDA_DTYPES:
        return False
    return kernels_lack(head_dims, softcap if value.is_cuda else 0.0, value.device) is None


def read_tree(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Forest:
    """TRL's depth-first segments: (segments + 1,) offsets of their rows and of their paths'."""
    bounds_q, bounds_k = torch.stack([cu_seqlens_q, cu_seqlens_k]).tolist()
    own = [end - begin for begin, end in pairwise(bounds_q)]
    paths = [end - begin for begin, end in pairwise(bounds_k)]
    parents: list[int] = []
    above: list[int] = []  # the path to the segment that was looked at last
    for segment, (length, path) in enumerate(zip(own, paths)):
        while above and paths[above[-1]] != path - length:
            above.pop()
        parents.append(above[-1] if above else -1)
        above.append(segment)
    return Forest(bounds_q[:-1], own, parents)
