"""The public functions: checked arguments in, one differentiable operator call, outputs out."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from . import arguments, checks, ops, packed_ops
from .errors import SharedPromptError, SharedPromptLayoutError, SharedPromptUnsupportedError
from .layout import SharedPromptLayout

_SHARED_NAMES = ("q", "k_context", "v_context", "k_decoded", "v_decoded")
_PLAIN_NAMES = ("q", "k", "v")
BACKENDS = ("auto", "cuda", "reference")


@overload
def flash_attn_dualkv_varlen_func(
    q: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    k_decoded: Tensor,
    v_decoded: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k_decoded: Tensor,
    max_seqlen_q: int,
    context_seqlen: int,
    max_seqlen_k_decoded: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    *,
    cu_seqlens_context: Tensor | None = None,
    cu_seqs_per_context: Tensor | None = None,
    deterministic: bool = False,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def flash_attn_dualkv_varlen_func(
    q: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    k_decoded: Tensor,
    v_decoded: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k_decoded: Tensor,
    max_seqlen_q: int,
    context_seqlen: int,
    max_seqlen_k_decoded: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    *,
    cu_seqlens_context: Tensor | None = None,
    cu_seqs_per_context: Tensor | None = None,
    deterministic: bool = False,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attn_dualkv_varlen_func(
    q: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    k_decoded: Tensor,
    v_decoded: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k_decoded: Tensor,
    max_seqlen_q: int,
    context_seqlen: int,
    max_seqlen_k_decoded: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    *,
    cu_seqlens_context: Tensor | None = None,
    cu_seqs_per_context: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...
def flash_attn_dualkv_varlen_func(
    q: Tensor,
    k_context: Tensor,
    v_context: Tensor,
    k_decoded: Tensor,
    v_decoded: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k_decoded: Tensor,
    max_seqlen_q: int,
    context_seqlen: int,
    max_seqlen_k_decoded: int,
    softmax_scale: float | None = None,
    causal: bool = True,
    *,
    cu_seqlens_context: Tensor | None = None,
    cu_seqs_per_context: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of many sequences to a shared context and to their own keys; exact and differentiable.

    Sequence i attends with its queries q_i to the keys [k_context; k_decoded_i]:

        O_i = softmax(softmax_scale * q_i [k_context; k_decoded_i]^T + mask) [v_context; v_decoded_i]

    (Gai et al., DualKV, 2026). The context is stored once however many sequences share it, and its gradients sum over
    all of them in float32. Sequences are packed along the first dimension and may have any lengths, zero included.

    With `causal`, sequences are aligned to the bottom right as in FlashAttention 2.1: of the
    context_len + decoded_len_i keys, the last query row sees all, the row before it all but the last, and so on. A row
    that sees no key is 0, its LSE is -inf and its gradients are 0; so are rows that belong to no sequence (offsets may
    end before the tensors do).

    Several groups, each with its own context, run in one call if `cu_seqlens_context` and `cu_seqs_per_context` say
    which rows of k_context belong to which group and which sequences share them. A prompt attends to itself as a
    sequence of its group without decoded rows.

    Args:
        q: (total_q, H, d), float16 or bfloat16 (on the CPU also float32 or float64); d a multiple of 8, at most 256.
        k_context, v_context: (total_context, H_k, d); H is a multiple of H_k.
        k_decoded, v_decoded: (total_decoded, H_k, d), of one packed tensor the rows behind the context. That offsets
            end before these rows do is no error, so it is not noticed if other rows are given.
        cu_seqlens_q: (N+1,) int32, sequence i has the rows [i] .. [i+1] - 1 of q.
        cu_seqlens_k_decoded: (N+1,) int32, the same for k_decoded and v_decoded.
        max_seqlen_q, max_seqlen_k_decoded: the longest lengths, >= 0. Results do not depend on them.
        context_seqlen: rows of k_context; with `cu_seqlens_context` the longest context.
        softmax_scale: finite and > 0; 1 / sqrt(d) if None.
        causal: see above; without it a row sees all keys of its sequence.
        cu_seqlens_context: (G+1,) int32, group g has the rows [g] .. [g+1] - 1 of k_context. None: one group.
        cu_seqs_per_context: (G+1,) int32, from 0 to N: group g owns the sequences [g] .. [g+1] - 1.
        deterministic: gradients bit-identical from run to run; also switched on by
            torch.use_deterministic_algorithms and by the environment's FLASH_ATTENTION_DETERMINISTIC=1.
        return_lse: return the log-sum-exp of the scaled scores too; it is differentiable.

    All q, k and v have one dtype and one device and a contiguous last dimension; views of one packed tensor are used
    without a copy if their first bytes and other strides are 16-byte aligned. Under autocast they are cast as for
    torch.nn.functional.scaled_dot_product_attention.

    Returns:
        out (total_q, H, d), contiguous, in the dtype of q; with `return_lse` the pair (out, lse), lse (H, total_q) in
        float32 (float64 for float64).

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it. Values of the offsets are checked
            on the CPU, and on a GPU only if the environment has DUALKV_DEBUG=1 (which synchronises): otherwise wrong
            offsets give wrong numbers.
        NotImplementedError: the head dimension of v is not that of q and k.
        RuntimeError: CUDA tensors in an installation without the compiled module.
    """
    tensors: tuple[Tensor, ...] = (q, k_context, v_context, k_decoded, v_decoded)
    checks.check_are_tensors(_SHARED_NAMES, tensors)
    checks.check_device("q", q)
    q, k_context, v_context, k_decoded, v_decoded = tensors = autocast(tensors)
    checks.check_alike(_SHARED_NAMES, tensors)
    checks.check_query_shape(q)
    checks.check_pair_shape(q, "k_context", k_context, "v_context", v_context)
    checks.check_pair_shape(q, "k_decoded", k_decoded, "v_decoded", v_decoded)
    checks.check_same_heads("k_decoded", k_decoded, "k_context", k_context)
    checks.check_apart("k_decoded", k_decoded, "k_context", k_context)
    checks.check_apart("v_decoded", v_decoded, "v_context", v_context)
    checks.check_offsets("cu_seqlens_q", cu_seqlens_q, q.device)
    sequences = cu_seqlens_q.shape[0] - 1
    checks.check_offsets("cu_seqlens_k_decoded", cu_seqlens_k_decoded, q.device, sequences + 1, "cu_seqlens_q")
    checks.check_grouping(cu_seqlens_context, cu_seqs_per_context, sequences, q.device)
    checks.check_length("max_seqlen_q", max_seqlen_q)
    checks.check_length("context_seqlen", context_seqlen)
    checks.check_length("max_seqlen_k_decoded", max_seqlen_k_decoded)
    if cu_seqlens_context is None:
        checks.check_context_length(context_seqlen, k_context.shape[0])
    checks.check_flag("causal", causal)
    checks.check_flag("deterministic", deterministic)
    checks.check_flag("return_lse", return_lse)
    scale = checks.resolve_softmax_scale(softmax_scale, q.shape[2])

    segments, groups = ops.segment_tables(
        cu_seqlens_q, cu_seqlens_k_decoded, cu_seqlens_context, cu_seqs_per_context, k_context.shape[0]
    )
    out, lse = ops.forward(
        q, k_context, v_context, k_decoded, v_decoded, segments, groups, scale, causal, deterministic
    )
    return (out, lse) if return_lse else out


@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: Literal[False] = False,
    block_table: Tensor | None = None,
) -> Tensor: ...
@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    *,
    return_attn_probs: Literal[True],
    block_table: Tensor | None = None,
) -> tuple[Tensor, Tensor, None]: ...
@overload
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    *,
    return_attn_probs: bool,
    block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]: ...
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Attention of packed sequences without a shared context, called as FlashAttention 2's function of this name.

    The context-free case of `flash_attn_dualkv_varlen_func`, which see for everything not said here.

    Args:
        q: (total_q, H, d).
        k, v: (total_k, H_k, d).
        cu_seqlens_q, cu_seqlens_k: (N+1,) int32.
        max_seqlen_q, max_seqlen_k: the longest lengths, >= 0. Results do not depend on them.
        dropout_p, window_size, softcap, alibi_slopes, block_table: not implemented; only the defaults are accepted
            (and for a causal call the equivalent window_size (-1, 0)).
        softmax_scale, causal, deterministic: as there, except that `causal` defaults to False.
        return_attn_probs: return (out, lse, None) as FlashAttention does without dropout; the LSE is differentiable.

    Returns:
        out (total_q, H, d), or (out, lse, None) with lse (H, total_q).

    Raises:
        TypeError, ValueError, RuntimeError: as there.
        NotImplementedError: an option listed above is used; the message names it.
    """
    checks.check_flag("causal", causal)
    checks.check_flag("deterministic", deterministic)
    checks.check_flag("return_attn_probs", return_attn_probs)
    checks.check_unimplemented(causal, dropout_p, window_size, softcap, alibi_slopes, block_table)
    tensors: tuple[Tensor, ...] = (q, k, v)
    checks.check_are_tensors(_PLAIN_NAMES, tensors)
    checks.check_device("q", q)
    q, k, v = tensors = autocast(tensors)
    checks.check_alike(_PLAIN_NAMES, tensors)
    checks.check_query_shape(q)
    checks.check_pair_shape(q, "k", k, "v", v)
    checks.check_offsets("cu_seqlens_q", cu_seqlens_q, q.device)
    checks.check_offsets("cu_seqlens_k", cu_seqlens_k, q.device, cu_seqlens_q.shape[0], "cu_seqlens_q")
    checks.check_length("max_seqlen_q", max_seqlen_q)
    checks.check_length("max_seqlen_k", max_seqlen_k)
    scale = checks.resolve_softmax_scale(softmax_scale, q.shape[2])

    # A fresh tensor rather than k[:0], whose backward would fill and add a gradient as large as k.
    no_context = k.new_empty((0, k.shape[1], k.shape[2]))
    segments, groups = ops.segment_tables(cu_seqlens_q, cu_seqlens_k, None, None, 0)
    out, lse = ops.forward(q, no_context, no_context, k, v, segments, groups, scale, causal, deterministic)
    return (out, lse, None) if return_attn_probs else out


def shared_prompt_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SharedPromptLayout,
    *,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
    deterministic: bool = False,
) -> Tensor:
    """Causal attention of all prompts and all responses of a packed micro-batch; exact and differentiable.

    A prompt's row sees the rows of its prompt up to itself, a response's row its whole prompt (the context of its
    group) and the rows of its response up to itself: what every sequence would see with a copy of the prompt of its
    own. One launch computes all groups, and autograd records one node. The gradients of a context's keys and values sum
    over the prompt's own rows and all of its responses in float32 and are rounded once.

    Args:
        q: (T, H, d), float16 or bfloat16 (in the reference also float32 or float64); d a multiple of 8, at most 256.
        k, v: (T, H_k, d); H is a multiple of H_k.
        layout: where prompts and responses lie among the T rows, on the device of q.
        softmax_scale: finite and > 0; 1 / sqrt(d) if None.
        sliding_window: a row sees this many positions of its sequence, its own the last of them; None for all.
        softcap: c > 0 replaces every scaled score s by c * tanh(s / c); None or 0 leaves them.
        sinks: (H,) floating point, one score of each head that joins the softmax of every row and carries no value (the
            `s_aux` of transformers); differentiable.
        backend: "cuda" for the kernels, "reference" for the implementation in PyTorch, which is exact and bounded in
            memory, but slow, and reads the layout back from a GPU; "auto" for the kernels on CUDA tensors and for the
            reference on CPU tensors.
        deterministic: gradients bit-identical from run to run, as in `flash_attn_dualkv_varlen_func`.

    q, k and v have a contiguous last dimension, and views of one packed tensor are used without a copy, as in
    `flash_attn_dualkv_varlen_func`; so is autocast.

    Returns:
        out (T, H, d), contiguous, in the dtype of q; 0 in padding rows.

    Raises:
        SharedPromptError (a ValueError), TypeError, ValueError: an argument is not as described.
        SharedPromptUnsupportedError (also a NotImplementedError): a sliding window or a softcap with the CUDA kernels.
            A window that is not smaller than the longest sequence restricts nothing and is accepted.
        NotImplementedError: the head dimension of v is not that of q and k.
        RuntimeError: CUDA tensors in an installation without the compiled module.
    """
    checks.check_are_tensors(_PLAIN_NAMES, (q, k, v))
    checks.check_device("q", q)
    q, k, v = autocast((q, k, v))
    in_reference = _is_reference(backend, q)
    checks.check_alike(_PLAIN_NAMES, (q, k, v), checks.CPU_DTYPES if in_reference else None)
    checks.check_query_shape(q)
    checks.check_pair_shape(q, "k", k, "v", v)
    _check_layout(layout, q, k)
    checks.check_flag("deterministic", deterministic)
    scale = checks.resolve_softmax_scale(softmax_scale, q.shape[2])
    window = _resolve_window(sliding_window, layout)
    cap = _resolve_softcap(softcap)
    if not in_reference:
        _refuse("sliding_window", window)
        _refuse("softcap", cap)
    if sinks is not None:
        _check_sinks(sinks, q)
    out, _ = packed_ops.attend(
        q, k, v, sinks, layout.segments, layout.groups,
        layout.num_context_tokens, scale, window, cap, in_reference, deterministic,
    )  # fmt: skip
    return out


def _is_reference(backend: Any, q: Tensor) -> bool:
    arguments.choice("backend", backend, BACKENDS)
    if backend == "cuda" and not q.is_cuda:
        raise SharedPromptError(checks.explain("backend", f"'auto' or 'reference' for {q.device} tensors", "'cuda'"))
    return backend == "reference" or not q.is_cuda


def _check_layout(layout: Any, q: Tensor, k: Tensor) -> None:
    if not isinstance(layout, SharedPromptLayout):
        raise TypeError(checks.explain("layout", "a SharedPromptLayout", type(layout).__name__))
    tokens = layout.num_tokens
    if q.shape[0] != tokens or k.shape[0] != tokens:
        got = f"{q.shape[0]} in q, {k.shape[0]} in k"
        raise SharedPromptLayoutError(checks.explain("layout", f"{tokens} rows, its num_tokens, in q and k", got))
    if layout.segments.device != q.device:
        expected = f"tensors on {q.device} as q, see layout.to()"
        raise SharedPromptLayoutError(checks.explain("layout", expected, layout.segments.device))


def _resolve_window(sliding_window: Any, layout: SharedPromptLayout) -> int | None:
    """None for a window that hides nothing."""
    if sliding_window is None:
        return None
    checks.check_length("sliding_window", sliding_window)
    if sliding_window < 1:
        raise SharedPromptError(checks.explain("sliding_window", "an int >= 1 or None", sliding_window))
    return None if sliding_window >= layout.max_sequence else int(sliding_window)


def _resolve_softcap(softcap: Any) -> float | None:
    """None for no cap, which FlashAttention writes as 0."""
    if softcap is None:
        return None
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)):
        raise TypeError(checks.explain("softcap", "a float or None", type(softcap).__name__))
    if softcap == 0.0:
        return None
    if not 0.0 < softcap < float("inf"):
        raise SharedPromptError(checks.explain("softcap", "a finite number >= 0", softcap))
    return float(softcap)


def _refuse(name: str, value: object) -> None:
    if value is not None:
        expected = 'None for the CUDA kernels, which do not have it (backend="reference" does)'
        raise SharedPromptUnsupportedError(checks.explain(name, expected, value))


def _check_sinks(sinks: Any, q: Tensor) -> None:
    checks.check_are_tensors(("sinks",), (sinks,))
    if not sinks.is_floating_point():
        raise TypeError(checks.explain("sinks", "a floating point tensor", sinks.dtype))
    if sinks.shape != (q.shape[1],):
        raise SharedPromptError(checks.explain("sinks", f"shape ({q.shape[1]},), the heads of q", tuple(sinks.shape)))
    if sinks.device != q.device:
        raise SharedPromptError(checks.explain("sinks", f"device {q.device} (as q)", sinks.device))


def autocast(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Cast as autocast does for PyTorch's own attention: floating point, other than float64, to its lower precision."""
    device_type = tensors[0].device.type
    if not torch.is_autocast_enabled(device_type):
        return tensors
    dtype = torch.get_autocast_dtype(device_type)
    return tuple(one.to(dtype) if _is_castable(one, device_type) else one for one in tensors)


def _is_castable(tensor: Tensor, device_type: str) -> bool:
    return tensor.is_floating_point() and tensor.dtype != torch.float64 and tensor.device.type == device_type
