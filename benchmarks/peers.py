"""Every implementation that is measured, on the same tokens: its inputs, one call, the way back to the packed layout.

Nothing of the preparation is timed. What an implementation has to do in every layer of a model (gathering K and V, for
one) is part of ``run`` and is timed.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from flex import build_flex
from packing import (
    Gradients,
    Prepared,
    Source,
    Span,
    cumulative,
    first_copy,
    fold_packed,
    gathered_rows,
    heads_first,
    leaf,
    replicated_rows,
    scatter_sum,
    shared_dout,
    spans,
    wide,
)
from shapes import Shape
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

VarlenKernel = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int], Tensor]


@dataclass(frozen=True)
class Implementation:
    """A row of the tables.

    ``refuses`` says why a shape cannot be measured; ``pairs`` and ``tokens`` are the work it really does.
    """

    name: str
    build: Callable[[Any], Prepared]
    refuses: Callable[[Shape], str | None] = lambda shape: None
    pairs: Callable[[Shape], int] = Shape.visible_pairs
    is_ours: bool = False
    directions: tuple[str, ...] = ("forward", "backward")
    tokens: Callable[[Shape], int] = lambda shape: shape.packed_tokens

    def executed_flops(self, shape: Shape, direction: str) -> float:
        return shape.flops(direction, self.pairs(shape)) + shape.token_flops(direction, self.tokens(shape))


# Packages that are measured where they can be imported, by the first word of an implementation's name.
PACKAGES = {"flash_attn": "flash_attn", "fa3": "flash_attn_interface", "prefix_grouper": "prefix_grouper"}


def is_importable(label: str) -> bool:
    return importlib.util.find_spec(PACKAGES[label]) is not None


def build_ours(source: Source, family: str | None = None, deterministic: bool = False) -> Prepared:
    """One call: every prompt is a sequence with no decoded keys, every response one with its own.

    ``family`` names the kernels: every call from here on, backward included, goes to them.
    """
    import flash_attn_dualkv

    choose_family(family)
    shape, device = source.shape, source.device
    if shape.is_context_free:
        return build_varlen(source, flash_attn_dualkv.flash_attn_varlen_func, causal=True, deterministic=deterministic)
    all_spans = spans(shape)
    prompts = [span for index, span in enumerate(all_spans) if index == span.prompt]
    responses = [span for index, span in enumerate(all_spans) if index != span.prompt]

    def rows(tensor: Tensor, parts: list[Span]) -> Tensor:
        if len(prompts) == 1:
            return tensor[parts[0].begin : parts[-1].end]
        return torch.cat([tensor[part.begin : part.end] for part in parts])

    q = leaf(source.q)
    kv = [leaf(rows(tensor, parts)) for parts in (prompts, responses) for tensor in (source.k, source.v)]
    decoded = [0 if index == span.prompt else span.end - span.begin for index, span in enumerate(all_spans)]
    prompt_lengths = [group.prompt for group in shape.groups]
    arguments = (
        cumulative([span.end - span.begin for span in all_spans], device),
        cumulative(decoded, device),
        max(span.end - span.begin for span in all_spans),
        max(prompt_lengths),
        max(decoded),
    )
    groups: dict[str, Any] = {}
    if len(prompts) > 1:
        groups["cu_seqlens_context"] = cumulative(prompt_lengths, device)
        groups["cu_seqs_per_context"] = cumulative([1 + len(group.responses) for group in shape.groups], device)

    function: Callable[..., Any] = flash_attn_dualkv.flash_attn_dualkv_varlen_func

    def run() -> Tensor:
        return function(q, *kv, *arguments, causal=True, deterministic=deterministic, **groups)

    def fold(gradients: Gradients) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk_context, dv_context, dk_decoded, dv_decoded = gradients
        order = torch.cat([span.rows() for span in (*prompts, *responses)]).to(device)
        dk, dv = torch.cat([dk_context, dk_decoded]), torch.cat([dv_context, dv_decoded])
        return wide(dq), scatter_sum(order, dk, len(dk)), scatter_sum(order, dv, len(dv))

    return Prepared((q, *kv), source.dout, run, lambda out, which: out[which], fold)


def choose_family(family: str | None) -> None:
    """From here on every call of this library goes to the kernels of that name; None leaves the choice to it."""
    if family is not None:
        os.environ["DUALKV_KERNELS"] = family


def build_replicated(source: Source, kernel: VarlenKernel) -> Prepared:
    """Standard packing: N (P + R) tokens, every response with its own copy of the prompt in q, k and v."""
    rows = replicated_rows(source.shape).to(source.device)
    total = source.shape.packed_tokens
    lengths = source.shape.replicated_lengths()
    cu_seqlens, longest = cumulative(lengths, source.device), max(lengths)
    q, k, v = (leaf(tensor[rows]) for tensor in (source.q, source.k, source.v))
    dout = shared_dout(source.shape, source.dout)[rows]

    def fold(gradients: Gradients) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (scatter_sum(rows, gradient, total) for gradient in gradients)
        return dq, dk, dv

    return Prepared(
        (q, k, v),
        dout,
        lambda: kernel(q, k, v, cu_seqlens, cu_seqlens, longest, longest),
        lambda out, which: out[first_copy(rows, total)[which]],
        fold,
    )


def build_gathered(source: Source, kernel: VarlenKernel) -> Prepared:
    """Prompt packed once; K and V replicated by index_select for the call, gradients summed by autograd's index_add."""
    rows = gathered_rows(source.shape).to(source.device)
    lengths_q = [span.end - span.begin for span in spans(source.shape)]
    lengths_k = [source.shape.groups[0].prompt, *source.shape.replicated_lengths()]
    cu_q, cu_k = cumulative(lengths_q, source.device), cumulative(lengths_k, source.device)
    q, k, v = leaf(source.q), leaf(source.k), leaf(source.v)

    def run() -> Tensor:
        return kernel(q, k.index_select(0, rows), v.index_select(0, rows), cu_q, cu_k, max(lengths_q), max(lengths_k))

    return Prepared((q, k, v), source.dout, run, lambda out, which: out[which], fold_packed)


def build_varlen(source: Source, function: Callable[..., Any], **options: Any) -> Prepared:
    """Any function with FlashAttention 2's signature, on a source without prompts."""
    lengths = source.shape.responses
    cu_seqlens, longest = cumulative(lengths, source.device), max(lengths)
    q, k, v = leaf(source.q), leaf(source.k), leaf(source.v)
    return Prepared(
        (q, k, v),
        source.dout,
        lambda: function(q, k, v, cu_seqlens, cu_seqlens, longest, longest, **options),
        lambda out, which: out[which],
        fold_packed,
    )


def torch_varlen() -> VarlenKernel:
    """PyTorch's own FlashAttention-2 kernels."""
    from torch.nn.attention.varlen import varlen_attn

    # Newer versions want to be told about grouped heads, older ones do not know the argument.
    has_flag = "enable_gqa" in inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"enable_gqa": True} if has_flag else {}

    def kernel(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> Tensor:
        return cast(Tensor, varlen_attn(q, k, v, cu_q, cu_k, max_q, max_k, window_size=(-1, 0), **options))

    return kernel


def package_varlen(module: str) -> VarlenKernel:
    """``flash_attn_varlen_func`` of the ``flash_attn`` or ``flash_attn_interface`` (FlashAttention-3) package."""
    function = importlib.import_module(module).flash_attn_varlen_func

    def kernel(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> Tensor:
        out = function(q, k, v, cu_q, cu_k, max_q, max_k, causal=True)
        return out[0] if isinstance(out, tuple) else out

    return kernel


def varlen_kernels() -> dict[str, VarlenKernel]:
    """FlashAttention's packed kernels for CUDA tensors, those that can be imported."""
    packages = [label for label in ("flash_attn", "fa3") if is_importable(label)]
    return {"fa2": torch_varlen(), **{label: package_varlen(PACKAGES[label]) for label in packages}}


def math_varlen(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int) -> Tensor:
    """The same contract in plain PyTorch, sequence by sequence, for machines without a GPU."""
    bounds_q, bounds_k = cu_q.tolist(), cu_k.tolist()
    outs = []
    for begin_q, end_q, begin_k, end_k in zip(bounds_q, bounds_q[1:], bounds_k, bounds_k[1:], strict=False):
        len_q, len_k = end_q - begin_q, end_k - begin_k
        mask = torch.ones(len_q, len_k, dtype=torch.bool, device=q.device).tril(len_k - len_q)
        parts = (q[begin_q:end_q], k[begin_k:end_k], v[begin_k:end_k])
        query, key, value = map(heads_first, parts)
        out = scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


def build_dense(source: Source, backend: SDPBackend) -> Prepared:
    """scaled_dot_product_attention on (N, H, P + R, d): the prompt replicated, equal lengths."""
    shape, total = source.shape, source.shape.packed_tokens
    rows = replicated_rows(shape).to(source.device)
    n, length = shape.num_responses, shape.replicated_lengths()[0]
    grouped: dict[str, Any] = {"enable_gqa": True} if shape.heads != shape.kv_heads else {}
    q, k, v = (leaf(tensor[rows].unflatten(0, (n, length))) for tensor in (source.q, source.k, source.v))
    dout = shared_dout(source.shape, source.dout)[rows].unflatten(0, (n, length)).transpose(1, 2)

    def run() -> Tensor:
        with sdpa_kernel(backend):
            query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
            return scaled_dot_product_attention(query, key, value, is_causal=True, **grouped)

    def fold(gradients: Gradients) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (scatter_sum(rows, gradient.flatten(0, 1), total) for gradient in gradients)
        return dq, dk, dv

    def take(out: Tensor, which: Tensor) -> Tensor:
        copy = first_copy(rows, total)[which]
        return out[copy // length, :, copy % length]

    return Prepared((q, k, v), dout, run, take, fold)


def refuses_dense(shape: Shape) -> str | None:
    return None if len(set(shape.replicated_lengths())) == 1 else "needs equal lengths"


def refuses_gathered(shape: Shape) -> str | None:
    if shape.is_context_free:
        return "no prompt to gather"
    return None if len(shape.groups) == 1 else "written for one group"


def own_families(build: dict[str, Any], capability: tuple[int, int]) -> dict[str, tuple[str, ...]]:
    """The families of built kernels that this GPU runs, and the directions that each has kernels of its own for.

    Args:
        build: what ``flash_attn_dualkv.build_info`` returns.
        capability: the GPU's compute capability.

    Raises:
        RuntimeError: there are no kernels for the GPU, or none at all.
    """
    if not build["compiled"]:
        raise RuntimeError(f"the CUDA kernels are not installed: {build['compiled_error'] or 'a pure-Python install'}")
    built = {"forward": build["head_dims"], "backward": build["backward_head_dims"]}
    families = {}
    for family in sorted(build["head_dims"]):
        arch = int(family.removeprefix("sm"))
        # sm90 kernels use instructions that exist on compute capability 9.x alone
        usable = capability >= (arch // 10, arch % 10) and (arch < 90 or arch // 10 == capability[0])
        directions = tuple(direction for direction, head_dims in built.items() if usable and head_dims.get(family))
        if directions:
            families[family] = directions
    if not families:
        raise RuntimeError(f"this build has kernels for {sorted(build['head_dims'])}, the GPU is sm_{capability}")
    return families


def own_implementations(families: dict[str, tuple[str, ...]]) -> list[Implementation]:
    """Each family in the directions that it has kernels for; deterministic mode is a matter of the backward."""
    found = []
    for family, directions in families.items():
        name = f"dualkv_{family}"
        found.append(
            Implementation(name, lambda source, f=family: build_ours(source, f), is_ours=True, directions=directions)  # type: ignore[misc]
        )
        if "backward" in directions:
            found.append(
                Implementation(
                    f"{name}_deterministic",
                    lambda source, f=family: build_ours(source, f, deterministic=True),  # type: ignore[misc]
                    lambda shape: None if shape.deterministic else "not in this shape's list",
                    is_ours=True,
                    directions=("backward",),
                )
            )
    return found


def cuda_implementations(families: dict[str, tuple[str, ...]]) -> list[Implementation]:
    """All implementations that this machine can import, ours first."""
    found = [*own_implementations(families), Implementation("flex_packed", build_flex)]
    for label, kernel in varlen_kernels().items():
        found += varlen_implementations(label, kernel)
    found.append(
        Implementation(
            "cudnn_replicated",
            lambda source: build_dense(source, SDPBackend.CUDNN_ATTENTION),
            refuses_dense,
            Shape.replicated_pairs,
        )
    )
    return found


def varlen_implementations(label: str, kernel: VarlenKernel) -> list[Implementation]:
    return [
        Implementation(f"{label}_gathered", lambda source: build_gathered(source, kernel), refuses_gathered),
        Implementation(
            f"{label}_replicated", lambda source: build_replicated(source, kernel), pairs=Shape.replicated_pairs
        ),
    ]


def cpu_implementations() -> list[Implementation]:
    """The same preparations over plain PyTorch: for tests, never for results."""
    return [
        Implementation("dualkv_reference", build_ours, is_ours=True),
        Implementation("flex_packed", build_flex, directions=("forward",)),
        *varlen_implementations("math", math_varlen),
        Implementation(
            "sdpa_replicated",
            lambda source: build_dense(source, SDPBackend.MATH),
            refuses_dense,
            Shape.replicated_pairs,
        ),
    ]
