# SPDX-License-Identifier: BSD-3-Clause
"""Attention of decoding over shared prefixes: checked arguments in, one call."""

from __future__ import annotations

from typing import Literal, overload

from torch import Tensor

from .. import checks
from . import operators
from .calls import DecodeCall, check_call
from .contents import are_checked
from .plan import SharedPrefixPlan, check_plan


@overload
def shared_prefix_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: SharedPrefixPlan, *, softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks: Tensor | None = None,
    out: Tensor | None = None, return_lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def shared_prefix_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: SharedPrefixPlan, *, softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks: Tensor | None = None,
    out: Tensor | None = None, return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def shared_prefix_decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, plan: SharedPrefixPlan, *, softmax_scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, sinks: Tensor | None = None,
    out: Tensor | None = None, return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Exact attention of each request's last tokens over its pages; shared pages are read once.

    It is causal: query i of request r is at position seqlens[r] - queries_r + i and sees the keys
    from position 0, or from where its window begins, up to its own. A row's bits depend on its
    request's keys, values and cut alone: not on the other requests, their order, the pages, or what
    is shared.

    Args:
        q: (total_q, H, d), float16 or bfloat16 (on the CPU also float32 or float64); `num_queries`
            rows as the plan's step says, H and d as the plan says. Copied if its rows do not begin
            on 16 bytes.
        k_cache, v_cache: (num_pages, page_size, H_k, d) in the dtype of q, by any strides with a
            contiguous last dimension: views of (num_pages, H_k, page_size, d), of one tensor with K
            and V side by side, and so on. On a GPU never copied: their first bytes lie on 16 bytes,
            and the other strides are multiples of 8. Rows that hold no request's keys are not read
            into any result. With a plan for latents v_cache is k_cache[..., :d_v], the view itself:
            the columns are read once.
        plan: a plan that has planned this step with `update`.
        softmax_scale: finite and > 0; 1 / sqrt(d) if None. Required for latents, whose scale is that
            of the heads before absorption (192 ** -0.5 for DeepSeek, times its YaRN factor), which
            d does not tell.
        window_size: (left, right): a row sees `left` positions before its own, or all with -1;
            `right` changes nothing, as it sees none behind.
        softcap: c > 0 replaces every scaled score s by c * tanh(s / c); with the CUDA kernels 0.01
            to 1000.
        sinks: (H,) floating point, one score of each head that joins the softmax of every row and
            carries no value; it is in the LSE.
        out: (total_q, H, d_v), written and returned; of the dtype of q, with a contiguous last
            dimension, and aligned as the caches. It must not overlap the other tensors. Made here
            if None.
        return_lse: return the log-sum-exp of the scaled scores too.

    Returns:
        out (total_q, H, d_v), d_v = d but for latents; with `return_lse` the pair (out, lse), lse
        (H, total_q), the natural logarithm, in float32 (float64 for float64). A row that sees no
        key, or that no request owns, is 0 and its LSE -inf (its sink, with sinks).

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.
        NotImplementedError: FP8 caches; a softcap that the CUDA kernels lack.
        RuntimeError: the plan has planned no step, or another one (seen on the CPU, and with
            DUALKV_DEBUG=1); an input requires a gradient while gradients are recorded: there is no
            backward.
    """
    step = check_plan(plan)
    checks.check_are_tensors(("q", "k_cache", "v_cache"), (q, k_cache, v_cache))
    if out is not None:
        checks.check_are_tensors(("out",), (out,))
    checks.flag("return_lse", return_lse)
    _, window = checks.resolve_window(True, window_size)
    limits = plan.limits
    if softmax_scale is None and limits.are_latents:
        expected = "a float for latents: that of the heads before absorption, such as 192 ** -0.5"
        raise ValueError(checks.explain("softmax_scale", expected, None))
    scale = checks.resolve_softmax_scale(softmax_scale, limits.head_dim)
    softcap = checks.number("softcap", softcap, zero=True)
    if out is None:
        out = q.new_empty(step.queries, limits.num_heads, limits.head_dim_v)
    call = DecodeCall(q, k_cache, v_cache, sinks, out, scale, window, softcap, step)
    check_call(call)
    if plan.seen is not None and are_checked(q):
        plan.seen.check(call)
    lse = operators.decode(call)
    return (call.out, lse) if return_lse else call.out
