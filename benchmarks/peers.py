# SPDX-License-Identifier: BSD-3-Clause
"""Every implementation of the attention that is measured: the rows it computes, and a call."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from packing import Arrangement, Attention, cumulative, heads_first, leaf, packed_rows, path_rows
from shapes import MOST_ELEMENTS, Shape
from torch import Tensor

from flash_attn_dualkv.cudnn import endpoints
from flash_attn_dualkv.model_shape import DIRECTIONS

VarlenKernel = Callable[..., Tensor]  # q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options
Load = Callable[[], VarlenKernel]  # where it is needed: its package may not be there
# By the word that names of implementations have: the module that is imported, and what is installed
# for it.
PACKAGES = {
    "cudnn_flex": ("cudnn.flex_attention", "nvidia-cudnn-frontend"),
    "fa4": ("flash_attn.cute", "flash-attn-4"),
}


@dataclass(frozen=True)
class Implementation:
    """What a row of the tables is about.

    Attributes:
        arrange: its rows and its attention for a shape on a device, of each of its micro-batches. Those of streams and
            of stock models are their own.
        refuses: why a shape cannot be measured; "" if it can.
        package: the key of ``PACKAGES`` that it needs.
        environment: of its calls; the library asks at each launch.
        is_deterministic: which is a matter of the backward; measured only where --impls names it.
        is_optional: measured only where --impls names it.
    """

    name: str
    arrange: Callable[[Shape, torch.device], Any]
    refuses: Callable[[Shape], str] = lambda shape: ""
    package: str | None = None
    environment: tuple[tuple[str, str], ...] = ()
    is_deterministic: bool = False
    is_optional: bool = False

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("dualkv")

    @property
    def directions(self) -> tuple[str, ...]:
        return DIRECTIONS[self.is_deterministic :]

    def missing(self) -> str:
        """Why it cannot run in this environment; "" if it can."""
        if self.package is None:
            return ""
        module, package = PACKAGES[self.package]
        try:
            spec = importlib.util.find_spec(module)
        except ImportError:
            spec = None
        # flash-attn-4 alone leaves a folder flash_attn that is not the flash_attn package.
        return "" if spec and spec.origin else f"{package} is not installed"

    def only(self, condition: Callable[[Shape], bool], reason: str) -> Implementation:
        """The same for the shapes that fulfil the condition."""
        return replace(self, refuses=lambda shape: self.refuses(shape) if condition(shape) else reason)


def plain(shape: Shape) -> str:
    return "" if shape.is_plain else "measured on plain causal attention"


# --- this library ---------------------------------------------------------------------------------------------------


def arrange_ours(shape: Shape, device: torch.device, deterministic: bool = False) -> list[Arrangement]:
    """One call on the packed row; sequences that share nothing go to the function that FlashAttention has too."""
    from flash_attn_dualkv import SharedPromptLayout, flash_attn_varlen_func, shared_prompt_attention

    if shape.depth == 1 and shape.is_plain:
        varlen: Any = flash_attn_varlen_func
        kernel = partial(varlen, causal=True, deterministic=deterministic)
        return [Arrangement(packed_rows(shape), varlen_attention(kernel, shape.responses, device))]
    layout = SharedPromptLayout.from_tree(*zip(*shape.nodes), device=device)
    options: dict[str, Any] = {"sliding_window": shape.window or None, "softcap": float(shape.softcap)}
    options |= {"sinks": (sinks := sinks_of(shape, device)), "deterministic": deterministic}
    attention = lambda q, k, v: shared_prompt_attention(q, k, v, layout, **options)  # noqa: E731
    return [Arrangement(packed_rows(shape), attention, sinks=sinks)]


def sinks_of(shape: Shape, device: torch.device) -> Tensor | None:
    """(H,) bf16, the same values for all implementations; a leaf."""
    if not shape.sinks:
        return None
    return leaf(torch.randn(shape.heads, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16))


def own_kernels() -> str:
    """The family of kernels that this GPU runs.

    Raises:
        RuntimeError: there are no compiled kernels.
    """
    from flash_attn_dualkv import explain_plan

    return explain_plan(num_heads=1, num_kv_heads=1, head_dim=128, rows=1).family


def ours(kernels: str | None) -> Implementation:
    """This library. ``kernels``: of ``own_kernels``, None on the CPU."""
    return Implementation(f"dualkv_{kernels or 'reference'}", arrange_ours)


def deterministic(impl: Implementation) -> Implementation:
    """The same in deterministic mode."""
    arrange, name = partial(cast(Any, impl.arrange), deterministic=True), f"{impl.name}_deterministic"
    return replace(impl, name=name, arrange=arrange, is_deterministic=True)


def portable(ours: Implementation) -> Implementation:
    """The kernels that serve an A100, in the same process as Hopper's."""
    return replace(ours, name="dualkv_sm80", environment=(("DUALKV_KERNELS", "sm80"),), is_optional=True)


# --- masks over packed rows: FlexAttention, cuDNN Flex Attention ----------------------------------------------------


@functools.lru_cache(maxsize=1)
def packed_block_mask(shape: Shape, device: torch.device) -> Any:
    """Visibility in FlexAttention's form: rows that see a key are its own and later ones of its node's subtree.

    One for all rounds of a shape: with it there is one mask function, so one compilation of the attention.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    last = {index: path[-1] for path in shape.paths for index in path}  # depth first: of each node's subtree
    ends = torch.tensor([shape.begins[last[index]] + shape.nodes[last[index]][0] for index in range(len(last))])
    lengths = torch.tensor([length for length, _ in shape.nodes]).to(device)
    ends = ends.int().to(device).repeat_interleave(lengths, output_size=shape.packed_tokens)

    def mask(b: Tensor, h: Tensor, q_row: Tensor, kv_row: Tensor) -> Tensor:
        return (kv_row <= q_row) & (q_row < ends[kv_row])

    total, is_cuda = shape.packed_tokens, device.type == "cuda"
    # Uncompiled it makes tensors of all pairs of tokens.
    make = compiled_once(create_block_mask, True) if is_cuda else create_block_mask
    return make(mask, 1, 1, total, total, device.type)


@functools.cache
def compiled_once(function: Any, dynamic: bool) -> Any:
    from torch._functorch import config as functorch_config

    functorch_config.donated_buffer = False  # otherwise the backward cannot be timed alone, several times
    return torch.compile(function, dynamic=dynamic)


def arrange_flex(shape: Shape, device: torch.device, on_fa4: bool, dynamic: bool) -> list[Arrangement]:
    from torch.nn.attention.flex_attention import flex_attention

    block_mask, is_grouped = packed_block_mask(shape, device), shape.heads != shape.kv_heads
    options: dict[str, Any] = {"kernel_options": {"BACKEND": "FLASH"}} if on_fa4 else {}

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        flex = compiled_once(flex_attention, dynamic)
        out: Tensor = flex(*map(heads_first, (q, k, v)), block_mask=block_mask, enable_gqa=is_grouped, **options)
        return out[0].transpose(0, 1)

    return [Arrangement(packed_rows(shape), attention)]


def flex(dynamic: bool = False) -> list[Implementation]:
    """FlexAttention on FlashAttention-4's kernels, and on its own of Triton. ``dynamic``: compiled for any lengths."""
    arrange = partial(arrange_flex, dynamic=dynamic)
    on_fa4 = Implementation("flex_fa4", partial(arrange, on_fa4=True), plain, package="fa4")
    return [on_fa4, Implementation("flex_packed", partial(arrange, on_fa4=False), plain)]


def arrange_cudnn(shape: Shape, device: torch.device, deterministic: bool = False) -> list[Arrangement]:
    """The plan looks at sizes and types of q, k and v."""
    module: Any = importlib.import_module(PACKAGES["cudnn_flex"][0])
    heads, dims = (shape.heads, shape.kv_heads, shape.kv_heads), (shape.head_dim,) * 2 + (shape.value_dim,)
    dtype = torch.bfloat16 if device.type == "cuda" else None
    qkv = (torch.empty(1, shape.packed_tokens, *one, dtype=dtype, device=device) for one in zip(heads, dims))
    lens, parents = ([one[index] for one in shape.nodes] for index in range(2))
    mask = endpoints(lens, parents, device, shape.window - 1)
    plan = module.create_mask_plan(mask, *qkv, build_backward=True)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (one.contiguous()[None] for one in (q, k, v))
        out: Tensor = module.flex_attn_func(q, k, v, mask_plan=plan, deterministic=deterministic)
        return out[0]

    return [Arrangement(packed_rows(shape), attention)]


def cudnn_flex() -> Implementation:
    def refuses(shape: Shape) -> str:
        if shape.softcap or shape.sinks:
            return "it has neither softcaps nor sinks"
        largest = 256 if shape.heads == shape.kv_heads else 128
        fits = shape.head_dim <= largest if not shape.head_dim_v else (shape.head_dim, shape.head_dim_v) == (192, 128)
        return "" if fits else "it has head dims up to 128, (192, 128), and 256 with as many KV heads as query heads"

    return Implementation("cudnn_flex", arrange_cudnn, refuses, package="cudnn_flex")


# --- kernels for packed sequences that share nothing ----------------------------------------------------------------


def varlen_attention(kernel: VarlenKernel, lengths: Sequence[int], device: torch.device) -> Attention:
    """Causal attention of each sequence with itself."""
    offsets, longest = cumulative(lengths, device), max(lengths)
    return lambda q, k, v: kernel(q, k, v, offsets, offsets, longest, longest)


def torch_varlen() -> VarlenKernel:
    """PyTorch's own FlashAttention-2 kernels."""
    from torch.nn.attention.varlen import varlen_attn

    # Newer versions want to be told about grouped heads, older ones do not know the argument, or no
    # window.
    parameters = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in parameters else {}
    options |= {"window_size": (-1, 0)} if "window_size" in parameters else {"is_causal": True}
    return cast(VarlenKernel, partial(varlen_attn, **options))


def fa4_varlen() -> VarlenKernel:
    function = importlib.import_module(PACKAGES["fa4"][0]).flash_attn_varlen_func
    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")

    def kernel(*arguments: Any, **options: Any) -> Tensor:
        out = function(**dict(zip(names, arguments)), causal=True, **options)
        return out[0] if isinstance(out, tuple) else out

    return kernel


def fa4_options(shape: Shape, sinks: Tensor | None) -> dict[str, Any]:
    """How FlashAttention-4 names windows, softcaps and sinks."""
    found: dict[str, Any] = {"window_size": (shape.window - 1, 0)} if shape.window else {}
    found |= {"softcap": float(shape.softcap)} if shape.softcap else {}
    return found | ({} if sinks is None else {"learnable_sink": sinks})


def arrange_replicated(shape: Shape, device: torch.device, load: Load) -> list[Arrangement]:
    """Standard packing: the path of every leaf as a sequence of its own; of trees, micro-batch after micro-batch."""
    sinks = sinks_of(shape, device)
    kernel = load() if shape.is_plain else partial(load(), **fa4_options(shape, sinks))
    every, found = torch.cat(path_rows(shape, shape.leaves)), []
    for leaves in shape.micro_batches() if shape.is_tree else [shape.leaves]:
        attention = varlen_attention(kernel, [shape.ends[leaf] for leaf in leaves], device)
        found.append(Arrangement(torch.cat(path_rows(shape, leaves)), attention, every, sinks))
    return found


def arrange_gathered(shape: Shape, device: torch.device, load: Load) -> list[Arrangement]:
    """TRL's way: keys and values are copied so that those of every node's path lie side by side."""
    kernel, calls = load(), []
    for nodes in shape.gathered_calls():
        queries, keys = [shape.nodes[node][0] for node in nodes], [shape.ends[node] for node in nodes]
        lengths = cumulative(queries, device), cumulative(keys, device), max(queries), max(keys)
        calls.append((sum(queries), torch.cat(path_rows(shape, nodes)).to(device), lengths))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = q.split([tokens for tokens, *_ in calls]) if len(calls) > 1 else [q]
        outs = [
            kernel(part, k.index_select(0, keys), v.index_select(0, keys), *lengths)
            for part, (_, keys, lengths) in zip(parts, calls)
        ]
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    return [Arrangement(packed_rows(shape), attention)]


KERNELS: dict[str, Load] = {"fa4": fa4_varlen, "fa2": torch_varlen}


def of_varlen(label: str) -> list[Implementation]:
    """Prompts replicated, and both ways to a tree's attention, on one of ``KERNELS``."""

    def refuses(shape: Shape) -> str:
        if shape.is_tree:
            return "measured flattened"
        if shape.replicated_tokens * shape.heads * shape.head_dim >= MOST_ELEMENTS:
            return "its kernels count fewer elements of Q than the replicated prompts have"
        return "" if shape.is_plain or label == "fa4" else "measured on plain causal attention"

    def on_trees(shape: Shape) -> str:
        return plain(shape) if shape.is_tree else "written for trees"

    ways = {
        "replicated": (arrange_replicated, refuses),
        "gathered": (arrange_gathered, on_trees),
        "flattened": (arrange_replicated, on_trees),
    }
    package = label if label in PACKAGES else None
    return [
        Implementation(f"{label}_{way}", partial(arrange, load=KERNELS[label]), refuse, package)
        for way, (arrange, refuse) in ways.items()
    ]


# --- what is measured where -----------------------------------------------------------------------------------------


def peers() -> list[Implementation]:
    """What attention, a layer and a model are measured against, the strongest first."""
    return [cudnn_flex(), *flex(), *of_varlen("fa4"), *of_varlen("fa2")]


def layer_implementations(kernels: str | None) -> list[Implementation]:
    """What a layer and a model are measured with, ours first. ``kernels``: of ``own_kernels``, None on the CPU."""
    with_stand_ins = [*of_varlen("fa4"), cudnn_flex()]  # of tests: the others need a GPU
    return [ours(kernels), *(peers() if kernels else with_stand_ins)]


def kernel_implementations(kernels: str | None) -> list[Implementation]:
    """Attention alone."""
    found = [*layer_implementations(kernels), deterministic(ours(kernels)), deterministic(cudnn_flex())]
    return [*found, portable(found[0])] if kernels == "sm90" else found
