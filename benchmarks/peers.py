"""Every implementation of the attention that is measured: the rows it computes, and a call."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch
from flex import arrange_flex
from packing import (
    Arrangement,
    Attention,
    contexts_first_rows,
    cumulative,
    heads_first,
    packed_rows,
    path_rows,
    replicated_rows,
)
from shapes import DETERMINISTIC, Shape, fits_one_call, gathered_calls, micro_batches
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from trees import Nodes, is_of_pairs
from varlen import (
    PACKAGES,
    VarlenCall,
    VarlenKernel,
    is_importable,
    math_varlen,
    package_varlen,
    torch_varlen,
    varlen_attention,
)

from flash_attn_dualkv.checks import PORTABLE_HEAD_DIM
from flash_attn_dualkv.predict import DIRECTIONS


@dataclass(frozen=True)
class Implementation:
    """What a row of the tables is about.

    Attributes:
        arrange: its rows and its attention for a shape on a device: an Arrangement, or one for each of several
            micro-batches, or the Steps of a stream.
        refuses: why a shape cannot be measured.
        is_replicated: every response has its own copy of the prompt.
        package: the key of ``PACKAGES`` that it needs.
        compile_s: about how long the first call of a shape compiles.
        work: tokens and pairs that it really computes, where these do not follow from ``is_replicated``.
    """

    name: str
    arrange: Callable[[Shape, torch.device], Any]
    refuses: Callable[[Shape], str | None] = lambda shape: None
    is_replicated: bool = False
    is_ours: bool = False
    package: str | None = None
    directions: tuple[str, ...] = DIRECTIONS
    compile_s: float = 0.0
    work: Callable[[Shape], tuple[int, int]] | None = None

    def executed(self, shape: Shape) -> tuple[int, int]:
        """Tokens and pairs that it computes."""
        if self.work is not None:
            return self.work(shape)
        if self.is_replicated:
            return shape.replicated_tokens, shape.replicated_pairs
        return shape.packed_tokens, shape.visible_pairs

    def missing(self) -> str | None:
        """Why it cannot run in this environment."""
        if self.package is None or is_importable(self.package):
            return None
        return f"{PACKAGES[self.package][1]} is not installed"


# --- this library ---------------------------------------------------------------------------------------------------


def choose_family(family: str | None) -> None:
    """From here on every call of this library goes to the kernels of that name; None leaves the choice to it."""
    if family is not None:
        os.environ["DUALKV_KERNELS"] = family


def samples(shape: Shape, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Prompts and responses as a sampler gives them, one of each per sample, 1-D int64; prompts of groups differ."""
    prompts = [torch.arange(group.prompt, device=device) + index for index, group in enumerate(shape.groups)]
    repeated = [prompt for prompt, group in zip(prompts, shape.groups) for _ in group.responses]
    return repeated, [torch.arange(length, device=device) for length in shape.responses]


def arrange_ours(
    shape: Shape, device: torch.device, family: str | None = None, deterministic: bool = False
) -> Arrangement:
    """One call on the packed row, in which all contexts come before all responses."""
    from flash_attn_dualkv import flash_attn_varlen_func, pack_shared_prompts, shared_prompt_attention

    choose_family(family)
    if shape.tree or not shape.is_plain:
        return arrange_tree(shape, device, deterministic)
    if shape.is_context_free:
        options: dict[str, Any] = {"causal": True, "deterministic": deterministic}
        calls = [VarlenCall.of(shape.responses, device)]
        return Arrangement(packed_rows(shape), varlen_attention(partial(flash_attn_varlen_func, **options), calls))
    # boundary="gather" keeps a prompt whole, so that the tokens are those of every other implementation
    layout = pack_shared_prompts(*samples(shape, device), boundary="gather").layout
    return Arrangement(
        contexts_first_rows(shape),
        lambda q, k, v: shared_prompt_attention(q, k, v, layout, deterministic=deterministic),
    )


def arrange_tree(shape: Shape, device: torch.device, deterministic: bool) -> Arrangement:
    """One call on the nodes, depth first."""
    options: dict[str, Any] = {"window_size": shape.window_size, "softcap": float(shape.softcap)}
    options |= {"sinks": sinks_of(shape, device), "deterministic": deterministic}
    return Arrangement(packed_rows(shape), tree_attention(shape.nodes, device, **options))


def tree_attention(nodes: Nodes, device: torch.device, **options: Any) -> Attention:
    """This library's, over rows of these nodes."""
    from flash_attn_dualkv import SharedPromptLayout, flash_attn_tree_varlen_func

    lengths, above = zip(*nodes)
    options["mean_keys"] = SharedPromptLayout.from_tree(lengths, above).mean_keys
    parents = torch.tensor(above, dtype=torch.int32, device=device)
    cu_seqlens = cumulative(lengths, device)
    return lambda q, k, v: flash_attn_tree_varlen_func(q, k, v, cu_seqlens, parents, **options)


def arrange_copied(shape: Shape, device: torch.device, family: str | None = None) -> Arrangement:
    """Every leaf has its own copy of all that lies between the root and itself."""
    choose_family(family)
    rows, nodes = [packed_rows(shape)[: shape.nodes[0][0]]], [shape.nodes[0]]
    for path in path_rows(shape, shape.leaves):
        rows.append(path[shape.nodes[0][0] :])
        nodes.append((len(rows[-1]), 0))
    return Arrangement(torch.cat(rows), tree_attention(tuple(nodes), device))


def copied(family: str | None = None) -> Implementation:
    """This library without the nodes of trees of pairs."""

    def refuses(shape: Shape) -> str | None:
        return None if is_of_pairs(shape.name) else "measured on trees of pairs"

    def work(shape: Shape) -> tuple[int, int]:
        root = shape.nodes[0][0]
        leaves = [shape.pairs_of(shape.ends[leaf]) - shape.pairs_of(root) for leaf in shape.leaves]
        return root + sum(shape.ends[leaf] - root for leaf in shape.leaves), shape.pairs_of(root) + sum(leaves)

    name = f"dualkv_{family or 'reference'}_copied"
    return Implementation(name, partial(arrange_copied, family=family), refuses, is_ours=True, work=work)


def sinks_of(shape: Shape, device: torch.device) -> Tensor | None:
    """(H,) bf16, the same for all implementations."""
    if not shape.sinks:
        return None
    return torch.randn(shape.heads, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)


def own_varlen(family: str | None = None) -> VarlenKernel:
    """This library's kernels for packed sequences that share nothing."""
    from flash_attn_dualkv import flash_attn_varlen_func

    choose_family(family)
    return partial(flash_attn_varlen_func, causal=True)


def own_families(build: dict[str, Any], capability: tuple[int, int]) -> list[str]:
    """The families of built kernels that this GPU runs.

    Args:
        build: what ``flash_attn_dualkv.build_info`` returns.
        capability: the GPU's compute capability.

    Raises:
        RuntimeError: there are no kernels for the GPU, or none at all.
    """
    if not build["compiled"]:
        raise RuntimeError(f"the CUDA kernels are not installed: {build['compiled_error'] or 'a pure-Python install'}")
    usable = {"sm80": capability >= (8, 0), "sm90": capability[0] == 9}  # sm90 has instructions of 9.x alone
    families = [family for family, dims in sorted(build["head_dims"].items()) if dims and usable[family]]
    if not families:
        raise RuntimeError(f"this build has kernels for {sorted(build['head_dims'])}, the GPU is sm_{capability}")
    return families


def own_implementations(families: list[str]) -> list[Implementation]:
    found = [Implementation(f"dualkv_{one}", partial(arrange_ours, family=one), is_ours=True) for one in families]
    return [refuses_width(impl) if impl.name == "dualkv_sm80" else impl for impl in found]


def is_wide(shape: Shape) -> bool:
    return max(shape.head_dim, shape.head_dim_v) > PORTABLE_HEAD_DIM


def refuses_width(impl: Implementation) -> Implementation:
    """The same without wide heads, for which neither FlashAttention nor cuDNN has kernels, nor ours before Hopper."""
    reason = f"measured up to head dim {PORTABLE_HEAD_DIM}"
    return replace(impl, refuses=lambda shape: reason if is_wide(shape) else impl.refuses(shape))


def deterministic(family: str) -> Implementation:
    """The same in deterministic mode, which is a matter of the backward."""
    return Implementation(
        f"dualkv_{family}_deterministic",
        partial(arrange_ours, family=family, deterministic=True),
        lambda shape: None if shape.name in DETERMINISTIC else "measured at other shapes",
        is_ours=True,
        directions=("backward",),
    )


# --- FlashAttention's kernels for packed sequences ------------------------------------------------------------------


def refuses_options(impl: Implementation) -> Implementation:
    """The same for shapes that are plain causal attention alone."""
    reason = "measured on plain causal attention"
    return replace(impl, refuses=lambda shape: impl.refuses(shape) if shape.is_plain else reason)


def in_pieces(shape: Shape) -> list[list[int]]:
    """Lengths of the replicated sequences, call by call: one call where all queries fit one.

    With 2.28e9 elements of Q (32 x 16K) the backward of PyTorch's FlashAttention-2 met an illegal memory access.
    """
    lengths = shape.replicated_lengths
    if fits_one_call(shape, sum(lengths)):
        return [lengths]
    pieces: list[list[int]] = [[]]
    for length in lengths:
        if pieces[-1] and not fits_one_call(shape, 2 * (sum(pieces[-1]) + length)):
            pieces.append([])
        pieces[-1].append(length)
    return pieces


def no_options(shape: Shape, device: torch.device) -> dict[str, Any]:
    return {}


def arrange_replicated(
    shape: Shape,
    device: torch.device,
    load: Callable[[], VarlenKernel],
    options: Callable[[Shape, torch.device], dict[str, Any]] = no_options,
) -> Arrangement:
    """Standard packing: N (P + R) tokens, every response with its own copy of the prompt.

    Args:
        options: of a shape, and the device, what a kernel is told of windows, softcaps and sinks.
    """
    calls = [VarlenCall.of(lengths, device) for lengths in in_pieces(shape)]
    kernel = load() if shape.is_plain else cast(VarlenKernel, partial(load(), **options(shape, device)))
    return Arrangement(replicated_rows(shape), varlen_attention(kernel, calls))


def fa4_options(shape: Shape, device: torch.device) -> dict[str, Any]:
    """How FlashAttention-4 names them."""
    found: dict[str, Any] = {"window_size": shape.window_size} if shape.window else {}
    found |= {"softcap": float(shape.softcap)} if shape.softcap else {}
    return found | ({"learnable_sink": sinks_of(shape, device)} if shape.sinks else {})


def refuses_groups(shape: Shape) -> str | None:
    return None if len(shape.groups) == 1 else "written for one group"


def refuses_trees(shape: Shape) -> str | None:
    return "measured flattened" if shape.tree else None


def refuses_prompts(shape: Shape) -> str | None:
    return None if shape.tree else "written for trees"


def arrange_flattened(shape: Shape, device: torch.device, load: Callable[[], VarlenKernel]) -> list[Arrangement]:
    """The path of every leaf as a sequence of its own, micro-batch after micro-batch."""
    kernel, found = load(), []
    copies = replicated_rows(shape).bincount(minlength=shape.packed_tokens)
    for leaves in micro_batches(shape):
        call = VarlenCall.of([shape.ends[leaf] for leaf in leaves], device)
        rows = torch.cat(path_rows(shape, leaves))
        found.append(Arrangement(rows, varlen_attention(kernel, [call]), copies))
    return found


def arrange_gathered(shape: Shape, device: torch.device, load: Callable[[], VarlenKernel]) -> Arrangement:
    """TRL's way: keys and values are copied so that those of every node's path lie side by side."""
    kernel, calls = load(), []
    for nodes in gathered_calls(shape):
        queries = VarlenCall.of([shape.nodes[node][0] for node in nodes], device)
        keys = VarlenCall.of([shape.ends[node] for node in nodes], device)
        lengths = queries.offsets, keys.offsets, queries.longest, keys.longest
        calls.append((queries.tokens, torch.cat(path_rows(shape, nodes)).to(device), lengths))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = q.split([tokens for tokens, *_ in calls]) if len(calls) > 1 else [q]
        outs = [
            kernel(part, k.index_select(0, keys), v.index_select(0, keys), *lengths)
            for part, (_, keys, lengths) in zip(parts, calls)
        ]
        return torch.cat(outs) if len(outs) > 1 else outs[0]

    return Arrangement(packed_rows(shape), attention)


def replicated(label: str, load: Callable[[], VarlenKernel] | None = None) -> Implementation:
    """``load`` gives the kernel; None: that of the package of that label."""
    has_options = label == "fa4"
    impl = Implementation(
        f"{label}_replicated",
        partial(
            arrange_replicated,
            load=load or partial(package_varlen, label),
            options=fa4_options if has_options else no_options,
        ),
        refuses_trees,
        is_replicated=True,
        package=None if load else label,
        compile_s=20.0 if label == "fa4" else 0.0,
    )
    return impl if has_options else refuses_options(impl)


def on_trees(label: str, load: Callable[[], VarlenKernel] | None = None) -> list[Implementation]:
    """Both ways to a tree's attention with that kernel; the arguments are those of ``replicated``."""
    kernel = load or partial(package_varlen, label)
    options: dict[str, Any] = {"package": None if load else label, "compile_s": 20.0 if label == "fa4" else 0.0}
    gathered, flattened = (partial(one, load=kernel) for one in (arrange_gathered, arrange_flattened))
    return [
        Implementation(f"{label}_gathered", gathered, refuses_prompts, **options),
        Implementation(f"{label}_flattened", flattened, refuses_prompts, is_replicated=True, **options),
    ]


# --- others ---------------------------------------------------------------------------------------------------------


def arrange_dense(shape: Shape, device: torch.device, backend: SDPBackend) -> Arrangement:
    """scaled_dot_product_attention on (N, H, P + R, d): the prompt replicated, equal lengths."""
    n = len(shape.responses)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            grouped = q.shape[1] != k.shape[1]
            if grouped and backend is SDPBackend.EFFICIENT_ATTENTION:  # it has no GQA
                k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
                grouped = False
            query, key, value = (one.unflatten(0, (n, -1)).transpose(1, 2) for one in (q, k, v))
            out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        return out.transpose(1, 2).flatten(0, 1)

    return Arrangement(replicated_rows(shape), attention)


def dense(name: str, backend: SDPBackend) -> Implementation:
    def refuses(shape: Shape) -> str | None:
        return refuses_trees(shape) or (None if len(set(shape.replicated_lengths)) == 1 else "needs equal lengths")

    return refuses_options(Implementation(name, partial(arrange_dense, backend=backend), refuses, is_replicated=True))


def of_any_width() -> list[Implementation]:
    """The backends of scaled_dot_product_attention that have every head dim."""
    backends = {"efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
    found = [dense(f"{name}_replicated", backend) for name, backend in backends.items()]
    reason = "measured where others have no kernels"

    def restrict(impl: Implementation) -> Implementation:
        return replace(impl, refuses=lambda shape: impl.refuses(shape) if is_wide(shape) else reason)

    return [restrict(impl) for impl in found]


def arrange_prefix_grouper(shape: Shape, device: torch.device, load: Callable[[], VarlenKernel]) -> Arrangement:
    """The prefix_grouper package: prompt attention, then responses over a copy of the prompt's K and V each.

    It pads responses to the longest; the attention function it is given here removes the padding, as that of
    transformers does, but with the tables of both of its calls made once per micro-batch.
    """
    (group,), kernel = shape.groups, load()
    module: Any = importlib.import_module("prefix_grouper")
    grouper = module.PrefixGrouper([[group.prompt, *group.responses]], device=device)
    is_key = grouper.suffix_attn_mask  # (responses, prompt and longest response) bool
    (keys,), (queries,) = (one.flatten().nonzero(as_tuple=True) for one in (is_key, is_key[:, group.prompt :]))
    of_prompt = VarlenCall.of([group.prompt], device)
    of_queries, of_keys = VarlenCall.of(shape.responses, device), VarlenCall.of(shape.replicated_lengths, device)

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """(sequences, H, length, d) each -> (sequences, length, H, d), 0 in padding."""
        size = (q.shape[0], q.shape[2])
        q, k, v = (one.transpose(1, 2).flatten(0, 1) for one in (q, k, v))
        if mask is grouper.prefix_attn_mask:
            return varlen_attention(kernel, [of_prompt])(q, k, v)[None]
        lengths = of_queries.offsets, of_keys.offsets, of_queries.longest, of_keys.longest
        out = kernel(q[queries], k[keys], v[keys], *lengths)
        return out.new_zeros((q.shape[0], *out.shape[1:])).index_copy(0, queries, out).unflatten(0, size)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = grouper.forward(attend, *map(heads_first, (q, k, v)))
        return out[0]

    return Arrangement(packed_rows(shape), attention)


def prefix_grouper(load: Callable[[], VarlenKernel]) -> Implementation:
    return Implementation(
        "prefix_grouper", partial(arrange_prefix_grouper, load=load), refuses_groups, package="prefix_grouper"
    )


# --- what is measured where -----------------------------------------------------------------------------------------


def peers() -> list[Implementation]:
    """What attention, a layer and a model are measured against."""
    return [
        refuses_options(Implementation("flex_fa4", partial(arrange_flex, on_fa4=True), package="fa4", compile_s=40.0)),
        refuses_options(Implementation("flex_packed", arrange_flex, compile_s=20.0)),
        replicated("fa4"),
        replicated("fa2", torch_varlen),
        replicated("flash_attn"),
        replicated("fa3"),
    ]


def tree_peers(families: list[str] | None) -> list[Implementation]:
    """What is measured beside the peers on trees alone: keys gathered along paths, and flattened sequences."""
    if families is None:
        return [*on_trees("math", lambda: math_varlen), *on_trees("varlen_reference", own_varlen)[1:]]
    ours = on_trees(f"varlen_{families[-1]}", partial(own_varlen, families[-1]))[1:]
    return [*on_trees("fa4"), *on_trees("fa2", torch_varlen), *ours]


def on_cpu(flex: bool) -> list[Implementation]:
    """Plain PyTorch in the places of the kernels: for tests, never for results.

    FlexAttention is not compiled there: it has no backward, and computes all pairs.
    """
    ours = Implementation("dualkv_reference", arrange_ours, is_ours=True)
    work = lambda shape: (shape.packed_tokens, shape.packed_tokens**2)  # noqa: E731
    eager = Implementation("flex_packed", arrange_flex, directions=("forward",), work=work)
    return [ours, *([refuses_options(eager)] if flex else []), replicated("math", lambda: math_varlen)]


def kernel_implementations(families: list[str] | None) -> list[Implementation]:
    """Attention alone, ours first. ``families``: what ``own_families`` returns, None on the CPU."""
    if families is None:
        return [*on_cpu(flex=True), dense("sdpa_replicated", SDPBackend.MATH)]
    cudnn = dense("cudnn_replicated", SDPBackend.CUDNN_ATTENTION)
    others = map(refuses_width, (*peers(), cudnn))
    return [*own_implementations(families), *map(deterministic, families), *others, *of_any_width()]


def layer_implementations(families: list[str] | None) -> list[Implementation]:
    """What a layer is measured with, ours first."""
    if families is None:
        return [*on_cpu(flex=True), prefix_grouper(lambda: math_varlen), *tree_peers(None)]
    return [*own_implementations(families), *peers(), prefix_grouper(torch_varlen), *tree_peers(families)]


def model_implementations(families: list[str] | None) -> list[Implementation]:
    """What a whole model is measured with, ours first."""
    ours_and_peers = on_cpu(flex=False) if families is None else [*own_implementations(families), *peers()]
    return [*ours_and_peers, *tree_peers(families)]


def tree_implementations(families: list[str] | None) -> list[Implementation]:
    """Attention over a tree, ours first."""
    if families is None:
        return [*on_cpu(flex=True), copied(), *tree_peers(None)]
    flex = [one for one in peers() if one.name.startswith("flex")]
    ours = [*own_implementations(families), *map(deterministic, families), *map(copied, families)]
    return [*ours, *flex, *tree_peers(families)]
