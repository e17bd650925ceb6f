# SPDX-License-Identifier: BSD-3-Clause
"""Attention of sequences given by offsets: checked arguments in, one differentiable call.

Those of packed rows, whose queries and keys are the same tokens, are in `packed_attention.py`.
"""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from . import checks, ops
from .calls import make_options

_SHARED_NAMES = ("q", "k_context", "v_context", "k_decoded", "v_decoded")
_PLAIN_NAMES = ("q", "k", "v")


@overload
def flash_attn_dualkv_varlen_func(
    q: Tensor, k_context: Tensor, v_context: Tensor, k_decoded: Tensor, v_decoded: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k_decoded: Tensor,
    max_seqlen_q: int, context_seqlen: int, max_seqlen_k_decoded: int,
    softmax_scale: float | None = None, causal: bool = True, *,
    cu_seqlens_context: Tensor | None = None, cu_seqs_per_context: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks: Tensor | None = None,
    deterministic: bool = False, return_lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_dualkv_varlen_func(
    q: Tensor, k_context: Tensor, v_context: Tensor, k_decoded: Tensor, v_decoded: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k_decoded: Tensor,
    max_seqlen_q: int, context_seqlen: int, max_seqlen_k_decoded: int,
    softmax_scale: float | None = None, causal: bool = True, *,
    cu_seqlens_context: Tensor | None = None, cu_seqs_per_context: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks: Tensor | None = None,
    deterministic: bool = False, return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def flash_attn_dualkv_varlen_func(
    q: Tensor, k_context: Tensor, v_context: Tensor, k_decoded: Tensor, v_decoded: Tensor,
    cu_seqlens_q: Tensor, cu_seqlens_k_decoded: Tensor,
    max_seqlen_q: int, context_seqlen: int, max_seqlen_k_decoded: int,
    softmax_scale: float | None = None, causal: bool = True, *,
    cu_seqlens_context: Tensor | None = None, cu_seqs_per_context: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks: Tensor | None = None,
    deterministic: bool = False, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Exact, differentiable attention of many sequences to a shared context and their own keys.

    Sequence i attends with its queries q_i to the keys [k_context; k_decoded_i]:

        O_i = softmax(softmax_scale * q_i [k_context; k_decoded_i]^T + mask) [v_context; v_decoded_i]

    (Gai et al., DualKV, 2026). The context is stored once however many sequences share it, and its
    gradients sum over all of them in float32. Sequences are packed along the first dimension and
    may have any lengths, zero included.

    With `causal`, sequences are aligned to the bottom right as in FlashAttention 2.1: the last
    query row sees all context_len + decoded_len_i keys, the row before it all but the last, and so
    on. A row that sees no key is 0, its LSE is -inf (its sink, with sinks) and its gradients are
    0. So are rows that belong to no sequence (offsets may end before the tensors do): these have
    no sink.

    Several groups, each with its own context, run in one call if `cu_seqlens_context` and
    `cu_seqs_per_context` say which rows of k_context belong to which group and which sequences
    share them. A prompt attends to itself as a sequence of its group without decoded rows.

    Args:
        q: (total_q, H, d), float16 or bfloat16 (on the CPU also float32 or float64); d a multiple
            of 8, at most 512 (256 on GPUs other than Hopper).
        k_context, v_context: (total_context, H_k, d) and (total_context, H_k, d_v); H is a multiple
            of H_k; d_v a multiple of 8, with the same limit.
        k_decoded, v_decoded: (total_decoded, H_k, d) and (total_decoded, H_k, d_v); the rows after
            the context where all keys are one tensor. Other rows pass unnoticed: offsets may end
            early.
        cu_seqlens_q: (N+1,) int32, sequence i has the rows [i] .. [i+1] - 1 of q.
        cu_seqlens_k_decoded: (N+1,) int32, the same for k_decoded and v_decoded.
        max_seqlen_q, max_seqlen_k_decoded: the longest lengths, >= 0.
        context_seqlen: rows of k_context; with `cu_seqlens_context` the longest context. By these
            three the backward chooses among its kernels: wrong ones cost time, never exactness.
        softmax_scale: finite and > 0; 1 / sqrt(d) if None.
        causal: a row sees no key after it; without, it sees all keys of its sequence.
        cu_seqlens_context: (G+1,) int32, group g has the rows [g] .. [g+1] - 1 of k_context. None:
            one group.
        cu_seqs_per_context: (G+1,) int32, from 0 to N: group g owns the sequences [g] .. [g+1] - 1.
        window_size: (left, right) as in FlashAttention: a row sees `left` positions before its own,
            or all with -1; `right` matters only without `causal`: -1, or 0 for causality.
        softcap: c > 0 replaces every scaled score s by c * tanh(s / c); with the CUDA kernels 0.01
            to 1000.
        sinks: (H,) floating point, one score of each head that joins the softmax of every row and
            carries no value; it is in the LSE, and differentiable.
        deterministic: gradients bit-identical from run to run; also switched on by
            torch.use_deterministic_algorithms and by FLASH_ATTENTION_DETERMINISTIC=1 in the
            environment.
        return_lse: return the log-sum-exp of the scaled scores too; it is differentiable.

    All q, k and v have one dtype and one device and a contiguous last dimension; views of one
    packed tensor are used without a copy if their first bytes and other strides are 16-byte
    aligned. Under autocast they are cast as for torch.nn.functional.scaled_dot_product_attention.

    Returns:
        out (total_q, H, d_v), contiguous, in the dtype of q; with `return_lse` the pair (out, lse),
        lse (H, total_q) in float32 (float64 for float64).

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it. Values of
            offsets are checked on the CPU, and on a GPU only with DUALKV_DEBUG=1 in the environment
            (which synchronises): otherwise wrong offsets give wrong numbers.
        NotImplementedError: without `causal` a window that ends after the row; a softcap that the
            CUDA kernels lack.
        RuntimeError: CUDA tensors in an installation without kernels.
    """
    q, k_context, v_context, k_decoded, v_decoded = checks.inputs(
        _SHARED_NAMES, (q, k_context, v_context, k_decoded, v_decoded)
    )
    checks.check_pair_shape(q, "k_context", k_context, "v_context", v_context)
    checks.check_pair_shape(q, "k_decoded", k_decoded, "v_decoded", v_decoded)
    checks.check_decoded(k_decoded, v_decoded, k_context, v_context)
    checks.check_offsets("cu_seqlens_q", cu_seqlens_q, q.device)
    sequences = cu_seqlens_q.shape[0] - 1
    checks.check_offsets("cu_seqlens_k_decoded", cu_seqlens_k_decoded, q.device, sequences + 1, "cu_seqlens_q")
    checks.check_grouping(cu_seqlens_context, cu_seqs_per_context, sequences, q.device)
    max_seqlen_q = checks.integer("max_seqlen_q", max_seqlen_q, 0)
    context_seqlen = checks.integer("context_seqlen", context_seqlen, 0)
    max_seqlen_k_decoded = checks.integer("max_seqlen_k_decoded", max_seqlen_k_decoded, 0)
    if cu_seqlens_context is None and context_seqlen != k_context.shape[0]:
        expected = f"{k_context.shape[0]} (the rows of k_context, as cu_seqlens_context is not given)"
        raise ValueError(checks.explain("context_seqlen", expected, context_seqlen))
    checks.flag("return_lse", return_lse)
    checks.check_sinks(sinks, q)
    causal, window = checks.resolve_window(causal, window_size)
    options = make_options(
        head_dim=q.shape[2], softmax_scale=softmax_scale, causal=causal, window_left=window, softcap=softcap,
        mean_keys=_mean_keys_of_longest(max_seqlen_q, context_seqlen + max_seqlen_k_decoded, causal),
        deterministic=deterministic,
    )  # fmt: skip
    nodes = ops.sequence_nodes(
        cu_seqlens_q, cu_seqlens_k_decoded, cu_seqlens_context, cu_seqs_per_context, k_context.shape[0]
    )
    out, lse = ops.attend(
        q, k_context, v_context, nodes, options, k_decoded=k_decoded, v_decoded=v_decoded, sinks=sinks
    )
    return (out, lse) if return_lse else out


@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: Literal[False] = False, block_table: Tensor | None = None,
) -> Tensor: ...  # fmt: skip
@overload
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, *, return_attn_probs: Literal[True], block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor, None]: ...  # fmt: skip
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:  # fmt: skip
    """Attention without a shared context, called as FlashAttention 2's function of this name.

    It is the context-free case of `flash_attn_dualkv_varlen_func`, by the same kernels.

    Args:
        q: (total_q, H, d).
        k, v: (total_k, H_k, d) and (total_k, H_k, d_v).
        cu_seqlens_q, cu_seqlens_k: (N+1,) int32.
        max_seqlen_q, max_seqlen_k: the longest lengths, >= 0.
        dropout_p, alibi_slopes, block_table: not implemented; only the defaults are accepted.
        softmax_scale: finite and > 0; 1 / sqrt(d) if None.
        causal: aligned to the bottom right; without it a row sees all keys of its sequence.
        window_size: (left, right): a row sees `left` positions before its own, or all with -1;
            `right` matters only without `causal`: -1, or 0 for causality.
        softcap: c > 0 replaces every scaled score s by c * tanh(s / c).
        deterministic: gradients bit-identical from run to run.
        return_attn_probs: return (out, lse, None) as FlashAttention does without dropout.

    Returns:
        out (total_q, H, d_v), or (out, lse, None) with lse (H, total_q).

    Raises:
        NotImplementedError: an option that is not implemented is used; the message names it.
        TypeError, ValueError: an argument is not as described; the message names it. Values of
            offsets are checked on the CPU, and on a GPU only with DUALKV_DEBUG=1.
        RuntimeError: CUDA tensors in an installation without kernels.
    """
    checks.flag("return_attn_probs", return_attn_probs)
    checks.check_unimplemented(dropout_p, alibi_slopes, block_table)
    q, k, v = checks.inputs(_PLAIN_NAMES, (q, k, v))
    checks.check_pair_shape(q, "k", k, "v", v)
    checks.check_offsets("cu_seqlens_q", cu_seqlens_q, q.device)
    checks.check_offsets("cu_seqlens_k", cu_seqlens_k, q.device, cu_seqlens_q.shape[0], "cu_seqlens_q")
    max_seqlen_q = checks.integer("max_seqlen_q", max_seqlen_q, 0)
    max_seqlen_k = checks.integer("max_seqlen_k", max_seqlen_k, 0)
    causal, window = checks.resolve_window(causal, window_size)
    options = make_options(
        head_dim=q.shape[2], softmax_scale=softmax_scale, causal=causal, window_left=window, softcap=softcap,
        mean_keys=_mean_keys_of_longest(max_seqlen_q, max_seqlen_k, causal), deterministic=deterministic,
    )  # fmt: skip
    nodes = ops.sequence_nodes(cu_seqlens_q, cu_seqlens_k, None, None, None)
    out, lse = ops.attend(q, k, v, nodes, options)
    return (out, lse, None) if return_attn_probs else out


def _mean_keys_of_longest(queries: int, keys: int, causal: bool) -> int:
    """How many keys a query sees on average, rounded up, if all sequences are as long as the longest."""
    return keys - max(min(queries, keys) - 1, 0) // 2 if causal else keys
