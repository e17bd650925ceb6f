# SPDX-License-Identifier: BSD-3-Clause
"""Attention of packed rows, whose queries and keys are the same tokens: trees, layouts."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from . import checks, cudnn, ops
from .calls import Options, make_options
from .errors import SharedPromptError, SharedPromptLayoutError
from .layout import SharedPromptLayout

_NAMES = ("q", "k", "v")
BACKENDS = ("auto", "cuda", "cudnn", "reference")


@overload
def flash_attn_tree_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, parents: Tensor, softmax_scale: float | None = None, *,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks: Tensor | None = None,
    deterministic: bool = False, return_lse: Literal[False] = False, mean_keys: int | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_tree_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, parents: Tensor, softmax_scale: float | None = None, *,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks: Tensor | None = None,
    deterministic: bool = False, return_lse: Literal[True], mean_keys: int | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def flash_attn_tree_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, parents: Tensor, softmax_scale: float | None = None, *,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks: Tensor | None = None,
    deterministic: bool = False, return_lse: bool = False, mean_keys: int | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Causal attention of sequences packed as trees of shared prefixes; exact and differentiable.

    A node is a run of rows that continues another node, its parent: a prompt, a turn, a response. A
    row sees the rows of its own node up to itself and all rows of the nodes above: what it would
    see in a sequence of its own. Any depth and any number of trees run in one call, and every row
    is stored and computed once. The gradients of a node's keys and values sum over its whole
    subtree in float32 and are rounded once. Dtypes, devices, head dims and strides are those that
    `flash_attn_dualkv_varlen_func` takes.

    Args:
        q: (T, H, d). k, v: (T, H_k, d) and (T, H_k, d_v).
        cu_seqlens: (n+1,) int32 from 0, node i has the rows [i] .. [i+1] - 1. Nodes may be empty.
            Rows after the last node are padding: out 0, LSE -inf, gradients 0.
        parents: (n,) int32, the node that each node continues, -1 for roots. Nodes are in
            depth-first order: a node, then its subtree.
        softmax_scale: finite and > 0; 1 / sqrt(d) if None.
        window_size: (left, right): a row sees `left` positions of its path before its own, or all
            with -1; `right` changes nothing.
        softcap: c > 0 replaces every scaled score s by c * tanh(s / c).
        sinks: (H,), one score of each head that joins the softmax of every row without a value.
        deterministic: gradients bit-identical from run to run.
        return_lse: return the log-sum-exp of the scaled scores too; it is differentiable.
        mean_keys: how many rows of its path a row sees on average, rounded up (`mean_keys` of a
            layout); the row count if None. By it the backward chooses its kernels, some of which
            are fast for few keys: a wrong number costs time, never exactness.

    Returns:
        out (T, H, d_v), or with `return_lse` the pair (out, lse), lse (H, T).

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it. Values of
            cu_seqlens and parents are checked on the CPU, and on a GPU only with DUALKV_DEBUG=1.
        NotImplementedError: a softcap that the CUDA kernels lack.
        RuntimeError: CUDA tensors in an installation without kernels.
    """
    q, k, v = checks.inputs(_NAMES, (q, k, v))
    checks.check_pair_shape(q, "k", k, "v", v)
    if k.shape[0] != q.shape[0]:
        raise ValueError(checks.explain("k", f"{q.shape[0]} rows (as q)", k.shape[0]))
    checks.check_offsets("cu_seqlens", cu_seqlens, q.device)
    checks.check_offsets("parents", parents, q.device, cu_seqlens.shape[0] - 1, "the nodes of cu_seqlens", least=0)
    checks.flag("return_lse", return_lse)
    checks.check_sinks(sinks, q)
    _, window = checks.resolve_window(True, window_size)
    # The lengths are on the device: for all that is known here, a row may see all of them.
    keys = q.shape[0] if mean_keys is None else min(checks.integer("mean_keys", mean_keys, 0), checks.MAX_ROWS)
    options = make_options(
        head_dim=q.shape[2], softmax_scale=softmax_scale, causal=True, window_left=window, softcap=softcap,
        mean_keys=keys, deterministic=deterministic,
    )  # fmt: skip
    out, lse = ops.attend(q, k, v, ops.tree_nodes(cu_seqlens, parents, q.shape[0]), options, sinks=sinks)
    return (out, lse) if return_lse else out


def shared_prompt_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: SharedPromptLayout, *,
    position_ids: Tensor | None = None, softmax_scale: float | None = None, sliding_window: int | None = None,
    softcap: float | None = None, sinks: Tensor | None = None, backend: str = "auto", deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """Exact, differentiable causal attention of all prompts and responses of a micro-batch.

    Every row sees what its sequence would see with a copy of the prompt of its own: the rows of its
    path, up to itself. One launch computes all groups, and autograd records one node. The gradients
    of a prompt's keys and values sum over its own rows and all of its responses in float32 and are
    rounded once. Dtypes, head dims and strides are those that `flash_attn_dualkv_varlen_func` takes.

    Args:
        q: (T, H, d), float32 and float64 too in the reference. k, v: (T, H_k, d) and (T, H_k, d_v).
        layout: where prompts and responses lie among the T rows, on the device of q. The layout of
            another batch with as many rows cannot be told from it by q, k and v.
        position_ids: (T,) or (1, T), what the model computes positions from, to know by it that the
            layout is that of the same batch: `batch.position_ids` or a view of it, no copy. It is
            compared by its place in memory, which costs nothing, and in compiled code is not done.
            None: the layout is taken as it is.
        softmax_scale: finite and > 0; 1 / sqrt(d) if None.
        sliding_window: a row sees so many positions of its sequence, its own the last; or None.
        softcap: c > 0 replaces every scaled score s by c * tanh(s / c); None or 0 leaves them as
            they are.
        sinks: (H,), one score of each head that joins the softmax of every row without a value.
        backend: "cuda" for the kernels; "cudnn" for cuDNN Flex Attention (nvidia-cudnn-frontend),
            and the kernels for what that lacks; "reference" for the implementation in PyTorch,
            which is exact and bounded in memory, but slow, and reads the layout back from a GPU.
            "auto": the reference on CPU tensors, cuDNN on data-center Blackwell where it is
            installed and code is not compiled, and the kernels on all other GPUs. Compiled code
            leaves its graph for cuDNN where that is asked for.
        deterministic: gradients bit-identical from run to run.

    Returns:
        out (T, H, d_v), contiguous, in the dtype of q; 0 in padding rows.

    Raises:
        SharedPromptError (a ValueError), TypeError, ValueError: an argument is not as described.
        SharedPromptLayoutError: the rows, the device or the positions are not the layout's.
        NotImplementedError: a softcap that the CUDA kernels lack.
        RuntimeError: CUDA tensors in an installation without kernels.
    """
    q, k, v = checked_tensors(q, k, v, sinks, backend)
    _check_layout(layout, q, k)
    _check_positions(layout, position_ids)
    options = packed_options(
        q, layout, softmax_scale=softmax_scale, sliding_window=sliding_window, softcap=softcap, backend=backend,
        deterministic=deterministic,
    )  # fmt: skip
    if backend == "cudnn" or (backend == "auto" and q.is_cuda and _prefers_cudnn(q)):
        out = cudnn.attend_if_chosen(backend, q, k, v, layout, options, sinks)
        if out is not None:
            return out
    out, _ = ops.attend(q, k, v, layout.nodes, options, sinks=sinks)
    return out


def checked_tensors(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, backend: str) -> list[Tensor]:
    """q, k and v as attention of packed rows takes them; an error names what is not as described."""
    checks.choice("backend", backend, BACKENDS)
    q, k, v = checks.inputs(_NAMES, (q, k, v), checks.CPU_DTYPES if backend == "reference" else None)
    if backend in ("cuda", "cudnn") and not q.is_cuda:
        raise SharedPromptError("backend", f"'auto' or 'reference' for {q.device} tensors", repr(backend))
    checks.check_pair_shape(q, "k", k, "v", v)
    checks.check_sinks(sinks, q)
    return [q, k, v]


def packed_options(
    q: Tensor, layout: SharedPromptLayout, *,
    softmax_scale: float | None, sliding_window: int | None, softcap: float | None, backend: str, deterministic: bool,
) -> Options:  # fmt: skip
    """The options of an attention call of a packed row."""
    return make_options(
        head_dim=q.shape[2], softmax_scale=softmax_scale, causal=True,
        window_left=_resolve_window(sliding_window, layout), softcap=0.0 if softcap is None else softcap,
        reference=backend == "reference" or not q.is_cuda, mean_keys=layout.mean_keys, deterministic=deterministic,
    )  # fmt: skip


def _prefers_cudnn(q: Tensor) -> bool:
    """True if "auto" is cuDNN; compiled code would have to leave its graph for it."""
    return not torch.compiler.is_compiling() and cudnn.is_default(q.get_device())


def _check_layout(layout: Any, q: Tensor, k: Tensor) -> None:
    checks.instance("layout", layout, SharedPromptLayout)
    if type(layout) is not SharedPromptLayout:
        expected = "that of a whole row; a divided one has a method attention(q, k, v)"
        raise SharedPromptLayoutError("layout", expected, f"a {type(layout).__name__}")
    tokens = layout.num_tokens
    queries = tokens if layout.query_rows is None else len(layout.query_rows)
    if q.shape[0] != queries or k.shape[0] != tokens:
        expected = f"{tokens} rows, its num_tokens, in q and k"
        if queries != tokens:
            expected = f"{queries} rows, its query_rows, in q and {tokens} in k"
        raise SharedPromptLayoutError("layout", expected, f"{q.shape[0]} in q, {k.shape[0]} in k")
    if layout.nodes.device != q.device:
        raise SharedPromptLayoutError("layout", f"tensors on {q.device} as q, see layout.to()", layout.nodes.device)


def _check_positions(layout: SharedPromptLayout, position_ids: Any) -> None:
    if position_ids is None:
        return
    checks.check_are_tensors(("position_ids",), (position_ids,))
    if position_ids.numel() != layout.num_tokens or position_ids.dim() not in (1, 2):
        tokens = layout.num_tokens
        raise SharedPromptLayoutError("position_ids", f"shape ({tokens},) or (1, {tokens})", tuple(position_ids.shape))
    if layout.position_ids is None:
        expected = "None for a layout that does not know those of its batch (batch.layout and batch.to() do)"
        raise SharedPromptLayoutError("position_ids", expected, "a tensor")
    layout.check_positions(position_ids)


def _resolve_window(sliding_window: Any, layout: SharedPromptLayout) -> int:
    """How many positions before its own a row sees; -1 for a window that hides nothing."""
    if sliding_window is None:
        return -1
    window = checks.integer("sliding_window", sliding_window, 1)
    return -1 if window >= layout.max_sequence else window - 1
