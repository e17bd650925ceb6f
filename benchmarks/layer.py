"""One decoder layer in plain PyTorch around an attention, and every implementation of that attention.

The layer is that of Qwen3: RMSNorm, projections, an RMSNorm of every query and key head, RoPE, attention, output
projection, RMSNorm, gated MLP. Implementations differ in the attention and in the tokens that the layer runs over:
shared ones compute every token once, replicated ones a copy of the prompt for every response.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from flex import compiled_flex_attention, packed_block_mask
from packing import (
    Gradients,
    Prepared,
    cumulative,
    first_copy,
    heads_first,
    leaf,
    replicated_rows,
    scatter_sum,
    shared_dout,
    spans,
    wide,
)
from peers import Implementation, VarlenKernel, choose_family, is_importable, math_varlen, varlen_kernels
from shapes import LayerShape, Shape, fits_one_call
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from flash_attn_dualkv.predict import ModelShape

ROPE_BASE = 1e6
EPS = 1e-6
WEIGHT_STD = 0.02
# Of the norms of query and key heads. At 1 the scores of random tokens are nearly equal and attention is close to an
# average of all values, in which an error would be lost.
HEAD_NORM = 1.6

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # q (T, H, d), k and v (T, H_k, d) -> (T, H, d)


class Weights(NamedTuple):
    """Of one layer, as torch.nn.functional.linear takes them: (outputs, inputs)."""

    input_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    q_norm: Tensor
    k_norm: Tensor
    o: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


def make_weights(
    model: ModelShape, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None = None
) -> Weights:
    """Random weights; norms are near 1.

    Raises:
        ValueError: the model's layers have no norm of queries and keys.
    """
    if not model.qk_norm:
        raise ValueError("model: expected qk_norm, this layer has norms of queries and keys")
    hidden, queries, keys = model.hidden, model.heads * model.head_dim, model.kv_heads * model.head_dim

    def normal(*size: int) -> Tensor:
        return torch.randn(size, dtype=dtype, device=device, generator=generator) * WEIGHT_STD

    return Weights(
        input_norm=1 + normal(hidden),
        q=normal(queries, hidden),
        k=normal(keys, hidden),
        v=normal(keys, hidden),
        q_norm=HEAD_NORM + normal(model.head_dim),
        k_norm=HEAD_NORM + normal(model.head_dim),
        o=normal(hidden, queries),
        mlp_norm=1 + normal(hidden),
        gate=normal(model.intermediate, hidden),
        up=normal(model.intermediate, hidden),
        down=normal(hidden, model.intermediate),
    )


def rope_tables(positions: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, (T, 1, head_dim), of positions (T,); angles in fp64, as 128K times the fastest frequency needs."""
    frequencies = ROPE_BASE ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim)
    angles = positions.double()[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of (T, H, d), whose pairs are the two halves of a head."""
    first, second = heads.chunk(2, dim=-1)
    return heads * cos + torch.cat([-second, first], dim=-1) * sin


def decoder_layer(
    x: Tensor, weights: Weights, cos: Tensor, sin: Tensor, attention: Attention, model: ModelShape
) -> Tensor:
    """The layer's output for hidden states x (T, hidden)."""
    h = rms_norm(x, (model.hidden,), weights.input_norm, EPS)
    q = linear(h, weights.q).unflatten(-1, (model.heads, model.head_dim))
    k = linear(h, weights.k).unflatten(-1, (model.kv_heads, model.head_dim))
    v = linear(h, weights.v).unflatten(-1, (model.kv_heads, model.head_dim))
    q = rotate(rms_norm(q, (model.head_dim,), weights.q_norm, EPS), cos, sin)
    k = rotate(rms_norm(k, (model.head_dim,), weights.k_norm, EPS), cos, sin)
    x = x + linear(attention(q, k, v).flatten(1), weights.o)
    h = rms_norm(x, (model.hidden,), weights.mlp_norm, EPS)
    return x + linear(silu(linear(h, weights.gate)) * linear(h, weights.up), weights.down)


@dataclass
class LayerSource:
    """The micro-batch that every implementation starts from.

    x, dout: (T, hidden), rows packed ``[P][R_1]...[R_N]`` for each group. positions: (T,), of each row in its sequence.
    """

    shape: LayerShape
    weights: Weights
    x: Tensor
    dout: Tensor
    positions: Tensor

    @property
    def device(self) -> torch.device:
        return self.x.device


def make_layer_source(shape: LayerShape, dtype: torch.dtype, device: torch.device, seed: int = 0) -> LayerSource:
    """Random normal hidden states and weights."""
    generator = torch.Generator(device).manual_seed(seed)
    size = (shape.packed_tokens, shape.model.hidden)
    x, dout = (torch.randn(size, dtype=dtype, device=device, generator=generator) for _ in range(2))
    weights = make_weights(shape.model, dtype, device, generator)
    return LayerSource(shape, weights, x, dout, packed_positions(shape).to(device))


def packed_positions(shape: Shape) -> Tensor:
    """Position of every packed row in its sequence: responses count on from the end of their prompt."""
    all_spans = spans(shape)
    lengths = [span.end - span.begin for span in all_spans]
    starts = [0 if index == span.prompt else lengths[span.prompt] for index, span in enumerate(all_spans)]
    return torch.cat([torch.arange(start, start + length) for start, length in zip(starts, lengths, strict=True)])


def build_layer(source: LayerSource, rows: Tensor, dout: Tensor, attention: Attention) -> Prepared:
    """The layer over ``rows``: the packed row of each token that the implementation computes.

    Nothing of the source but the weights stays alive: it would count as this implementation's memory.
    """
    model, total = source.shape.model, source.shape.packed_tokens
    rows = rows.to(source.device)
    x = leaf(source.x[rows])
    weights = Weights(*map(leaf, source.weights))
    cos, sin = (table[rows] for table in rope_tables(source.positions, model.head_dim, x.dtype))
    copies = first_copy(rows, total)

    def take(out: Tensor, which: Tensor) -> Tensor:
        # What the layer adds to its input: the input itself is the same for all.
        at = copies[which]
        return wide(out[at]) - wide(x.detach()[at])

    def fold(gradients: Gradients) -> tuple[Tensor, ...]:
        dx, *dweights = gradients
        return scatter_sum(rows, dx, total), *map(wide, dweights)

    return Prepared((x, *weights), dout, lambda: decoder_layer(x, weights, cos, sin, attention, model), take, fold)


def samples(shape: Shape, device: torch.device) -> tuple[list[Tensor], list[Tensor]]:
    """Token ids as a sampler gives them, the prompt repeated with each response; prompts of groups differ.

    Returns:
        Prompts and responses, one of each per sample, 1-D int64.
    """
    prompts = [torch.arange(group.prompt, device=device) + index for index, group in enumerate(shape.groups)]
    repeated = [prompt for prompt, group in zip(prompts, shape.groups, strict=True) for _ in group.responses]
    return repeated, [torch.arange(length, device=device) for length in shape.responses]


def build_shared(source: LayerSource, family: str | None = None) -> Prepared:
    """This library: one call on the packed row, in which all contexts come before all responses."""
    from flash_attn_dualkv import pack_shared_prompts, shared_prompt_attention

    choose_family(family)
    # boundary="gather" keeps a prompt whole, so that the tokens are those of every other implementation
    layout = pack_shared_prompts(*samples(source.shape, source.device), boundary="gather").layout
    rows = contexts_first_rows(source.shape)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return shared_prompt_attention(q, k, v, layout)

    return build_layer(source, rows, source.dout[rows.to(source.device)], attention)


def contexts_first_rows(shape: Shape) -> Tensor:
    """Packed row (group after group) of each row of this library's layout: all prompts, then all responses."""
    all_spans = spans(shape)
    prompts = [span.rows() for index, span in enumerate(all_spans) if index == span.prompt]
    responses = [span.rows() for index, span in enumerate(all_spans) if index != span.prompt]
    return torch.cat([*prompts, *responses])


def build_replicated(source: LayerSource, kernel: VarlenKernel) -> Prepared:
    """Standard packing: the whole layer over N (P + R) tokens."""
    rows = replicated_rows(source.shape).to(source.device)
    attention = replicated_attention(source.shape, kernel, source.device)
    return build_layer(source, rows, shared_dout(source.shape, source.dout)[rows], attention)


def replicated_attention(shape: LayerShape, kernel: VarlenKernel, device: torch.device) -> Attention:
    """Causal attention of the packed row ``[P R_1][P R_2]...``."""
    calls = [VarlenCall.of(lengths, device) for lengths in in_pieces(shape)]
    tokens = [call.tokens for call in calls]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if len(calls) == 1:  # splitting would cost the backward a copy
            return kernel(*calls[0].arguments(q, k, v))
        parts = zip(calls, q.split(tokens), k.split(tokens), v.split(tokens), strict=True)
        return torch.cat([kernel(*one.arguments(queries, keys, values)) for one, queries, keys, values in parts])

    return attention


@dataclass(frozen=True)
class VarlenCall:
    """Sequences of one call of a kernel."""

    tokens: int
    offsets: Tensor
    longest: int

    def arguments(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int, int]:
        return q, k, v, self.offsets, self.offsets, self.longest, self.longest

    @staticmethod
    def of(lengths: list[int], device: torch.device) -> VarlenCall:
        return VarlenCall(sum(lengths), cumulative(lengths, device), max(lengths))


def in_pieces(shape: LayerShape) -> list[list[int]]:
    """Lengths of the replicated sequences, call by call: one call where all queries fit one.

    With 2.28e9 elements of Q (32 x 16K) the backward of PyTorch's FlashAttention-2 met an illegal memory access.
    """
    lengths, a_row = shape.replicated_lengths(), shape.heads * shape.head_dim
    if fits_one_call(sum(lengths) * a_row):
        return [lengths]
    pieces: list[list[int]] = [[]]
    for length in lengths:
        if pieces[-1] and not fits_one_call(2 * (sum(pieces[-1]) + length) * a_row):
            pieces.append([])
        pieces[-1].append(length)
    return pieces


def build_flex(source: LayerSource) -> Prepared:
    """FlexAttention with the packed mask on the packed row; compiled on a GPU, eager elsewhere."""
    from torch.nn.attention.flex_attention import flex_attention

    flex: Any = compiled_flex_attention() if source.device.type == "cuda" else flex_attention
    mask = packed_block_mask(source.shape, source.device)
    is_grouped = source.shape.heads != source.shape.kv_heads

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = flex(*map(heads_first, (q, k, v)), block_mask=mask, enable_gqa=is_grouped)
        return out[0].transpose(0, 1)

    rows = torch.arange(source.shape.packed_tokens)
    prepared = build_layer(source, rows, source.dout, attention)
    if source.device.type == "cuda":
        return prepared
    # on the CPU it has no backward and refuses inputs that ask for one
    run = prepared.run

    def without_gradients() -> Tensor:
        with torch.no_grad():
            return run()

    prepared.run = without_gradients
    return prepared


def build_prefix_grouper(source: LayerSource, kernel: VarlenKernel) -> Prepared:
    """The prefix_grouper package: prompt attention, then responses over a copy of the prompt's K and V each.

    It pads responses to the longest; the attention function it is given here removes the padding, as that of
    transformers does, but with the tables of both of its calls made once per micro-batch.
    """
    (group,) = source.shape.groups
    module: Any = importlib.import_module("prefix_grouper")
    grouper = module.PrefixGrouper([[group.prompt, *group.responses]], device=source.device)
    own_call = PaddedCall.of(grouper.prefix_attn_mask, group.prompt)
    response_call = PaddedCall.of(grouper.suffix_attn_mask, max(group.responses))

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        call = own_call if mask is grouper.prefix_attn_mask else response_call
        return call.run(kernel, q, k, v)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = grouper.forward(attend, *map(heads_first, (q, k, v)))
        return out[0]

    return build_layer(source, torch.arange(source.shape.packed_tokens), source.dout, attention)


@dataclass(frozen=True)
class PaddedCall:
    """Attention of padded sequences by a kernel for packed ones.

    rows_q, rows_k: rows of the flattened (sequence, position) that are no padding; None if all are.
    """

    rows_q: Tensor | None
    rows_k: Tensor | None
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int

    @staticmethod
    def of(mask: Tensor, queries: int) -> PaddedCall:
        """``mask``: (sequences, keys) bool, False for padding; the queries stand at the last ``queries`` keys."""

        def table(part: Tensor) -> tuple[Tensor | None, Tensor, int]:
            lengths = part.sum(dim=1).tolist()
            rows = None if bool(part.all()) else part.flatten().nonzero()[:, 0]
            return rows, cumulative(lengths, mask.device), max(lengths)

        rows_q, cu_q, max_q = table(mask[:, mask.shape[1] - queries :])
        rows_k, cu_k, max_k = table(mask)
        return PaddedCall(rows_q, rows_k, cu_q, cu_k, max_q, max_k)

    def run(self, kernel: VarlenKernel, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """(sequences, H, length, d) each -> (sequences, queries, H, d), 0 in padding."""

        def packed(tensor: Tensor, rows: Tensor | None) -> Tensor:
            flat = tensor.transpose(1, 2).flatten(0, 1)
            return flat if rows is None else flat.index_select(0, rows)

        keys, values = packed(k, self.rows_k), packed(v, self.rows_k)
        out = kernel(packed(q, self.rows_q), keys, values, self.cu_q, self.cu_k, self.max_q, self.max_k)
        if self.rows_q is not None:
            out = out.new_zeros((q.shape[0] * q.shape[2], *out.shape[1:])).index_copy(0, self.rows_q, out)
        return out.unflatten(0, (q.shape[0], q.shape[2]))


def refuses_groups(shape: Shape) -> str | None:
    return None if len(shape.groups) == 1 else "written for one group"


def replicated(name: str, kernel: VarlenKernel) -> Implementation:
    return Implementation(
        name,
        lambda source: build_replicated(source, kernel),
        pairs=Shape.replicated_pairs,
        tokens=lambda shape: shape.replicated_tokens,
    )


def prefix_grouper(kernel: VarlenKernel) -> list[Implementation]:
    if not is_importable("prefix_grouper"):
        return []
    return [Implementation("prefix_grouper", lambda source: build_prefix_grouper(source, kernel), refuses_groups)]


def cuda_layers(families: dict[str, tuple[str, ...]]) -> list[Implementation]:
    """All layers that this machine can run, ours first.

    Args:
        families: what ``peers.own_families`` returns; one without kernels for both directions cannot train.
    """
    own = [
        Implementation(f"dualkv_{family}", lambda source, f=family: build_shared(source, f), is_ours=True)  # type: ignore[misc]
        for family, directions in families.items()
        if "forward" in directions and "backward" in directions
    ]
    kernels = varlen_kernels()
    flex = Implementation("flex_packed", build_flex)
    peers = [replicated(f"{label}_replicated", kernel) for label, kernel in kernels.items()]
    return [*own, flex, *peers, *prefix_grouper(kernels["fa2"])]


def cpu_layers() -> list[Implementation]:
    """The same over plain PyTorch: for tests, never for results."""
    return [
        Implementation("dualkv_reference", build_shared, is_ours=True),
        Implementation("flex_packed", build_flex, directions=("forward",)),
        replicated("math_replicated", math_varlen),
        *prefix_grouper(math_varlen),
    ]
