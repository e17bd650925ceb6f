"""The tree attention of TRL's AsyncGRPOTrainer on this library's kernels.

TRL packs the samples of a micro-batch as a tree of segments and attends along the path of each: it copies the keys and
values of every path, so those of a prompt once for each of its completions. Here the segments below a node share one
copy of the path to that node, as the context of a group. The nodes are chosen so that as few keys as possible are read:
for completions of one prompt that is the prompt; completions that begin alike, or prompts that do, need no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface

from ...attention import flash_attn_dualkv_varlen_func
from ...checks import CUDA_DTYPES, HEAD_DIM_MULTIPLE, MAX_HEAD_DIM, autocast
from ...data.transfer import ints, to_device


def use_dualkv_for_tree_attention() -> None:
    """Run the attention of TRL's AsyncGRPOTrainer on this library's kernels, before or after a trainer is made.

    Calls that the kernels do not offer (on a GPU a sliding window shorter than a path, a softcap, 32 bits; head dims
    above 256) go to TRL's own. Calling it again changes nothing.
    """
    from trl.experimental.async_grpo import packing

    if not hasattr(packing.tree_attention, "dualkv_stock"):
        # What the trainer registers when it is made.
        packing.tree_attention = _tree_attention(packing.tree_attention)
    if packing.TREE_ATTENTION in AttentionInterface._global_mapping:
        AttentionInterface.register(packing.TREE_ATTENTION, packing.tree_attention)


def _tree_attention(stock: Callable[..., Any]) -> Callable[..., Any]:
    # Made once for a micro-batch: all layers, and their recomputation, are given the same tensors.
    plans: Any = WeakTensorKeyDictionary()

    def tree_attention(
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *,
        tree_kv_index: Tensor,
        tree_cu_seqlens_q: Tensor,
        tree_cu_seqlens_k: Tensor,
        tree_max_seqlen_q: int,
        tree_max_seqlen_k: int,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        has_window = bool(sliding_window) and int(sliding_window or 0) < tree_max_seqlen_k
        if has_window or softcap or not _is_offered(query, key, value):
            result: tuple[Tensor, None] = stock(
                module,
                query,
                key,
                value,
                attention_mask,
                tree_kv_index=tree_kv_index,
                tree_cu_seqlens_q=tree_cu_seqlens_q,
                tree_cu_seqlens_k=tree_cu_seqlens_k,
                tree_max_seqlen_q=tree_max_seqlen_q,
                tree_max_seqlen_k=tree_max_seqlen_k,
                scaling=scaling,
                sliding_window=sliding_window,
                softcap=softcap,
                **kwargs,
            )
            return result
        plan = plans.get(tree_cu_seqlens_q)
        if plan is None:
            plan = plans[tree_cu_seqlens_q] = Plan.build(tree_kv_index, tree_cu_seqlens_q, tree_cu_seqlens_k)
        q, k, v = (one[0].transpose(0, 1) for one in (query, key, value))
        return plan.attend(q.to(v.dtype), k.to(v.dtype), v, scaling)[None], None

    tree_attention.dualkv_stock = stock  # type: ignore[attr-defined]
    return tree_attention


def _is_offered(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether the kernels have the head dimension and the type."""
    head_dim = query.shape[-1]
    if head_dim > MAX_HEAD_DIM or head_dim % HEAD_DIM_MULTIPLE or not head_dim == key.shape[-1] == value.shape[-1]:
        return False
    return not value.is_cuda or autocast((value,))[0].dtype in CUDA_DTYPES


class Plan(NamedTuple):
    """Which rows are contexts, which are the rest of paths, and what belongs together.

    Every segment of the tree is a sequence, in the tree's own order; its queries are its own rows.
    """

    rows: Tensor  # of keys and values: those of the contexts, then what each sequence sees beyond its context
    num_context_rows: int
    cu_seqlens_q: Tensor
    cu_seqlens_context: Tensor
    cu_seqs_per_context: Tensor
    cu_seqlens_k_decoded: Tensor
    max_seqlen_q: int
    max_context: int
    max_decoded: int

    @staticmethod
    def build(kv_index: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor) -> Plan:
        """From TRL's description of the tree, which is copied to the host."""
        device = kv_index.device
        bounds_q, bounds_k = torch.stack([cu_seqlens_q, cu_seqlens_k]).tolist()
        own = [end - begin for begin, end in pairwise(bounds_q)]
        paths = [end - begin for begin, end in pairwise(bounds_k)]
        context_of = choose_contexts(own, paths)
        contexts, groups, decoded = [0], [], [0]
        context_rows, decoded_rows = [], []
        for segment, context in enumerate(context_of):
            begin, shared = bounds_k[segment], paths[context]
            if segment == context:
                groups.append(segment)
                contexts.append(contexts[-1] + shared)
                context_rows.append(kv_index[begin : begin + shared])
            decoded.append(decoded[-1] + paths[segment] - shared)
            decoded_rows.append(kv_index[begin + shared : bounds_k[segment + 1]])
        small = [ints(one, torch.int32) for one in (contexts, [*groups, len(own)], decoded)]
        cu_seqlens_context, cu_seqs_per_context, cu_seqlens_k_decoded = to_device((), small, device)
        return Plan(
            torch.cat([*context_rows, *decoded_rows]),
            contexts[-1],
            # A copy: plans are kept for as long as the tensor itself lives.
            cu_seqlens_q.to(torch.int32, copy=True).contiguous(),
            cu_seqlens_context,
            cu_seqs_per_context,
            cu_seqlens_k_decoded,
            max(own),
            max(paths[one] for one in groups),
            max(paths[segment] - paths[context] for segment, context in enumerate(context_of)),
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """Attention of every row to its path: q (T, H, d), k and v (T, H_k, d) -> (T, H, d)."""
        sizes = [self.num_context_rows, len(self.rows) - self.num_context_rows]
        k_context, k_decoded = _Gather.apply(k, self.rows).split(sizes)
        v_context, v_decoded = _Gather.apply(v, self.rows).split(sizes)
        return flash_attn_dualkv_varlen_func(
            q,
            k_context,
            v_context,
            k_decoded,
            v_decoded,
            self.cu_seqlens_q,
            self.cu_seqlens_k_decoded,
            self.max_seqlen_q,
            self.max_context,
            self.max_decoded,
            scale,
            cu_seqlens_context=self.cu_seqlens_context,
            cu_seqs_per_context=self.cu_seqs_per_context,
        )


def choose_contexts(own: Sequence[int], paths: Sequence[int]) -> list[int]:
    """For each segment, the segment whose path is the context of its group: itself, or one above it.

    Args:
        own: rows of each segment, a parent before its subtree (depth first). paths: rows from its root to its end.
    """
    parents: list[int] = []
    above: list[int] = []  # the path to the segment that was looked at last
    for segment, (length, path) in enumerate(zip(own, paths)):
        while above and paths[above[-1]] != path - length:
            above.pop()
        parents.append(above[-1] if above else -1)
        above.append(segment)
    # What keys are read if a segment's path is a context of its whole subtree, and what at least, from the leaves up.
    sizes, sums = [1] * len(own), list(paths)
    apart = list(paths)
    best = [0] * len(own)
    shares = [False] * len(own)
    for segment in reversed(range(len(own))):
        together = paths[segment] + sums[segment] - sizes[segment] * paths[segment]
        shares[segment] = together <= apart[segment]
        best[segment] = min(together, apart[segment])
        parent = parents[segment]
        if parent >= 0:
            sizes[parent] += sizes[segment]
            sums[parent] += sums[segment]
            apart[parent] += best[segment]
    contexts: list[int] = []
    for segment, parent in enumerate(parents):
        inherited = parent >= 0 and shares[contexts[parent]]
        contexts.append(contexts[parent] if inherited else segment)
    return contexts


class _Gather(torch.autograd.Function):
    """Rows by their index, whose gradients are summed in at least float32 and rounded once."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.rows = len(source)
        return source.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        dtype = torch.promote_types(gradient.dtype, torch.float32)
        sums = torch.zeros((ctx.rows, *gradient.shape[1:]), dtype=dtype, device=gradient.device)
        return sums.index_add_(0, index, gradient.to(dtype)).to(gradient.dtype), None
