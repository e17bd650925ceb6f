# SPDX-License-Identifier: BSD-3-Clause
"""Layers that share keys and values across layers, on shared prompts: training, prefill and decoding with half a cache.

    python examples/fused_kv.py                    # trains each kind for a few steps, generates, and compares costs
    python examples/fused_kv.py --preset gpu       # times to the first token and for each one, random weights

The upper half of the layers own no keys (FusedKV: "Reconstructing KV Caches with Cross-Layer Fusion for Enhanced
Transformers"; YOCO: Sun et al., "You Only Cache Once", 2024). With n layers that do, layer i above has

    vanilla    keys and values of its own
    fused      K = a1 * K_1 + an * K_n, V = b1 * V_1 + bn * V_n, with weights for each KV head and dimension
    lite       K = K_n, V = V_1
    yoco       K = K_n, V = V_n

Keys are fused after RoPE, whose rotations commute with the weights only if both numbers of a rotated pair have the
same: here the pairs are (j, j + d/2). Rows that nobody reads leave before the layers without keys: in training those
that score nothing, in a prefill all but the last ones of each prompt. Fused keys are never made when decoding: q is
multiplied by both weights, attention runs with 2 d dimensions over [K_1 | K_n] and [V_1 | V_n], and the two halves of
its output are added.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flash_attn_dualkv import (
    PackedBatch,
    SharedPrefixPlan,
    SharedPromptLayout,
    pack_shared_prompts,
    shared_prefix_decode,
    shared_prompt_attention,
)

KINDS = ("vanilla", "fused", "lite", "yoco")
PAGE = 16  # rows


@dataclass(frozen=True)
class Shape:
    """A small model like Qwen3; `layers` is even, and at least 4."""

    kind: str = "fused"
    vocabulary: int = 64
    hidden: int = 64
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 128
    theta: float = 10000.0

    @property
    def owners(self) -> int:
        """How many layers, the first ones, own keys."""
        return self.layers if self.kind == "vanilla" else self.layers // 2


PRESETS = {
    "cpu": Shape(),
    "gpu": Shape(vocabulary=32768, hidden=2048, layers=24, heads=16, kv_heads=8, head_dim=128, intermediate=6144),
}


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """RoPE of (rows, heads, d) at positions (rows,), by pairs (j, j + d/2)."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device, dtype=torch.float64) / half)
    angles = (positions[:, None].double() * frequencies)[:, None]
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Fusion(nn.Module):
    """The weights of a layer of kind "fused": keys (2, H_k, d/2), alike in both halves of d; values (2, H_k, d)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.key = nn.Parameter(torch.randn(2, shape.kv_heads, shape.head_dim // 2))
        self.value = nn.Parameter(torch.randn(2, shape.kv_heads, shape.head_dim))

    @property
    def key_weights(self) -> Tensor:
        """(2, H_k, d), of the first owner's keys and of the last one's."""
        return torch.cat([self.key, self.key], -1)


class Layer(nn.Module):
    """Attention with norms of q and k, then an MLP; both behind an RMSNorm, and added."""

    def __init__(self, shape: Shape, owns: bool) -> None:
        super().__init__()
        width, own = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.shape = shape
        self.norm, self.mlp_norm = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
        self.q_proj, self.o_proj = (
            nn.Linear(shape.hidden, width, bias=False),
            nn.Linear(width, shape.hidden, bias=False),
        )
        self.q_norm = nn.RMSNorm(shape.head_dim)
        self.gate_up = nn.Linear(shape.hidden, 2 * shape.intermediate, bias=False)
        self.down = nn.Linear(shape.intermediate, shape.hidden, bias=False)
        self.kv_proj = nn.Linear(shape.hidden, 2 * own, bias=False) if owns else None
        self.k_norm = nn.RMSNorm(shape.head_dim) if owns else None
        self.fusion = Fusion(shape) if not owns and shape.kind == "fused" else None

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """(rows, H, d)."""
        q = self.q_norm(self.q_proj(self.norm(x)).unflatten(-1, (self.shape.heads, -1)))
        return rotated(q, positions, self.shape.theta)

    def keys(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, H_k, d) each, of a layer that owns them."""
        assert self.kv_proj is not None and self.k_norm is not None
        k, v = self.kv_proj(self.norm(x)).unflatten(-1, (2, self.shape.kv_heads, -1)).unbind(-3)
        return rotated(self.k_norm(k), positions, self.shape.theta), v

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """What the layer makes of its attention, (rows, H, d)."""
        x = x + self.o_proj(attended.flatten(-2))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class Model(nn.Module):
    """A causal LM of one of the kinds."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        if shape.kind not in KINDS or shape.layers % 2 or shape.layers < 4:
            raise ValueError(f"shape: expected a kind of {', '.join(KINDS)}, and 4, 6, 8 .. layers, got {shape}")
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape, index < shape.owners) for index in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def shared(self, layer: Layer, owned: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer that owns none."""
        (first_k, first_v), (last_k, last_v) = owned[0], owned[-1]
        if layer.fusion is None:
            return last_k, last_v if self.shape.kind == "yoco" else first_v
        k, v = layer.fusion.key_weights, layer.fusion.value
        return k[0] * first_k + k[1] * last_k, v[0] * first_v + v[1] * last_v

    def forward(
        self, ids: Tensor, positions: Tensor, layout: SharedPromptLayout, late: SharedPromptLayout | None
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Hidden states behind the last norm, and keys and values of the layers that own them.

        Args:
            ids, positions: (T,), a packed row.
            layout: of it.
            late: `layout.reading(rows)`: only its `query_rows` go through the layers that own no keys. None: all do.
        """
        x, owned = self.embedding(ids), []
        for index, layer in enumerate(self.layers):
            if layer.kv_proj is not None:
                owned.append(layer.keys(x, positions))
                k, v = owned[-1]
            else:
                if index == self.shape.owners and late is not None:
                    x, positions, layout = x[late.query_rows], positions[late.query_rows], late
                k, v = self.shared(layer, owned)
            x = layer.finish(x, shared_prompt_attention(layer.queries(x, positions), k, v, layout))
        return self.norm(x), owned

    def logps(self, batch: PackedBatch) -> Tensor:
        """Log-probabilities of the response tokens, in the order of `batch.targets`; differentiable."""
        late = None if self.shape.kind == "vanilla" else batch.late_layout
        hidden, _ = self(batch.input_ids, batch.position_ids, batch.layout, late)
        rows = batch.token_index
        if late is not None:
            rows = torch.searchsorted(late.query_rows, rows)
        return self.head(hidden[rows]).log_softmax(-1).gather(-1, batch.targets[:, None])[:, 0]


# --- generation -----------------------------------------------------------------------------------


class Cache:
    """Pages of the keys and values of all layers that own them, K_1 beside K_n and V_1 beside V_n.

    Args:
        model: whose cache it is.
        prompts: tokens of each prompt, a multiple of a page: its pages belong to all of its requests.
        requests: of each prompt.
        new: the most tokens that are appended to a request.
    """

    def __init__(self, model: Model, prompts: Sequence[int], requests: int, new: int) -> None:
        if wrong := [one for one in prompts if one % PAGE]:
            raise ValueError(f"prompts: expected multiples of {PAGE} tokens, got {wrong}")
        shape, weight = model.shape, model.head.weight
        own = -(-new // PAGE)
        pages = sum(prompts) // PAGE + len(prompts) * requests * own
        rows, first, free = [], 0, sum(prompts) // PAGE
        for length in prompts:
            for _ in range(requests):
                rows.append([*range(first, first + length // PAGE), *range(free, free + own)])
                free += own
            first += length // PAGE
        columns = max(map(len, rows))
        options: dict[str, Any] = dict(device=weight.device, dtype=torch.int32)
        self.table = torch.tensor([row + [0] * (columns - len(row)) for row in rows], **options)
        self.lengths = torch.tensor([length for length in prompts for _ in range(requests)], **options)
        self.cuts = self.lengths.clone()
        self.prompt_rows = sum(prompts)
        # The first and the last owner lie side by side, so that fused layers see both as one.
        shapes = (pages, PAGE, shape.kv_heads, 2 * shape.head_dim), (pages, PAGE, shape.kv_heads, shape.head_dim)
        self.ends = [weight.new_zeros(shapes[0]) for _ in "kv"]
        self.kind, d, owners = shape.kind, shape.head_dim, shape.owners
        self.layers = [[one[..., :d] for one in self.ends]]
        self.layers += [[weight.new_zeros(shapes[1]) for _ in "kv"] for _ in range(owners - 2)]
        self.layers += [[one[..., d:] for one in self.ends]]
        plan = dict(num_pages=pages, page_size=PAGE, num_heads=shape.heads, num_kv_heads=shape.kv_heads)
        self.plans = {
            dim: SharedPrefixPlan(*self.table.shape, head_dim=dim, device=weight.device, **plan)
            for dim in ([d, 2 * d] if shape.kind == "fused" else [d])
        }

    @property
    def bytes(self) -> int:
        """Of all keys and values."""
        inner = sum(one.nbytes for pair in self.layers[1:-1] for one in pair)
        return inner + sum(one.nbytes for one in self.ends)

    def seen_by(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer, where these are those of one that owns them."""
        if layer < len(self.layers):
            k, v = self.layers[layer]
            return k, v
        return self.layers[-1][0], self.layers[-1 if self.kind == "yoco" else 0][1]

    def fill(self, owned: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Put the keys and values of all prompts into the first pages, one prompt after the other."""
        for pages, new in zip(self.layers, owned):
            for cache, values in zip(pages, new):
                cache[: self.prompt_rows // PAGE] = values.unflatten(0, (-1, PAGE))

    def plan(self) -> None:
        """Plan the step whose tokens have been counted in `lengths`."""
        for plan in self.plans.values():
            plan.update(self.table, self.lengths, boundaries=self.cuts)

    def append(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Put each request's new key and value into its pages."""
        last = (self.lengths - 1).long()
        page = self.table.gather(1, (last // PAGE)[:, None])[:, 0].long()
        for cache, values in zip(self.layers[layer], (k, v)):
            cache[page, last % PAGE] = values


def prefill(model: Model, prompts: Sequence[Tensor], requests: int, new: int) -> tuple[Cache, Tensor]:
    """The cache of all prompts, and logits of the token behind each request's prompt."""
    layout = SharedPromptLayout.from_tree([len(one) for one in prompts], [-1] * len(prompts), device=prompts[0].device)
    ends = torch.tensor([len(one) for one in prompts], device=layout.device).cumsum(0) - 1
    late = None if model.shape.kind == "vanilla" else layout.reading(ends)
    positions = torch.cat([torch.arange(len(one), device=one.device) for one in prompts])
    hidden, owned = model(torch.cat([*prompts]), positions, layout, late)
    cache = Cache(model, [len(one) for one in prompts], requests, new)
    cache.fill(owned)
    last = ends if late is None else torch.searchsorted(late.query_rows, ends)
    return cache, model.head(hidden[last]).repeat_interleave(requests, 0)


def decode(model: Model, cache: Cache, tokens: Tensor) -> Tensor:
    """Logits of the tokens behind these, one of each request, which are appended."""
    cache.lengths += 1
    cache.plan()
    positions = cache.lengths - 1
    d, group = model.shape.head_dim, model.shape.heads // model.shape.kv_heads
    x = model.embedding(tokens)
    for index, layer in enumerate(model.layers):
        q = layer.queries(x, positions)
        if layer.kv_proj is not None:
            cache.append(index, *layer.keys(x, positions))
        if layer.fusion is None:
            attended = shared_prefix_decode(q, *cache.seen_by(index), cache.plans[d])
        else:
            keys, values = (one.repeat_interleave(group, 1) for one in (layer.fusion.key_weights, layer.fusion.value))
            wide = torch.cat([q * keys[0], q * keys[1]], -1)
            out = shared_prefix_decode(wide, *cache.ends, cache.plans[2 * d], softmax_scale=d**-0.5)
            attended = values[0] * out[..., :d] + values[1] * out[..., d:]
        x = layer.finish(x, attended)
    return model.head(model.norm(x))


@torch.no_grad()
def generate(model: Model, prompts: Sequence[Tensor], requests: int, new: int) -> tuple[Tensor, Cache, list[float]]:
    """Greedy tokens (requests, new) after each prompt, the cache, and seconds to the first and for each later one."""
    begin = now()
    cache, logits = prefill(model, prompts, requests, new)
    tokens, marks = [logits.argmax(-1)], [now()]
    for _ in range(new - 1):
        tokens.append(decode(model, cache, tokens[-1]).argmax(-1))
        marks.append(now())
    return torch.stack(tokens, 1), cache, [one - before for before, one in zip([begin, *marks], marks)]


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


# --- the comparison -------------------------------------------------------------------------------


def train(model: Model, steps: int, seed: int = 0) -> list[float]:
    """Losses of steps that teach the model to count on from a prompt: 4 responses to each of 4, on shared prompts."""
    draw = torch.Generator().manual_seed(seed)
    device, vocabulary = model.head.weight.device, model.shape.vocabulary
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        prompts = [torch.randint(vocabulary, (16,), generator=draw) for _ in range(4)]
        samples = [one for one in prompts for _ in range(4)]
        responses = [(one[-1] + 1 + torch.arange(8)) % vocabulary for one in samples]
        loss = -model.logps(pack_shared_prompts(samples, responses, device=device)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="cpu")
    parser.add_argument("--steps", type=int, default=40, help="of training, with the preset cpu")
    parser.add_argument("--prompt", type=int, help="tokens of a prompt (default: 64, and 32768 with gpu)")
    parser.add_argument("--requests", type=int, default=4, help="of each of two prompts")
    parser.add_argument("--new", type=int, default=16, help="tokens that are generated")
    options = parser.parse_args()
    on_gpu = options.preset == "gpu"
    device, dtype = ("cuda", torch.bfloat16) if on_gpu else ("cpu", torch.float32)
    length = options.prompt or (32768 if on_gpu else 64)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(PRESETS[options.preset].vocabulary, (length,), generator=draw).to(device) for _ in "ab"]
    print(f"{'':8} {'loss':>14} {'cache, MiB':>11} {'first token, ms':>16} {'each later, ms':>15}")
    for kind in KINDS:
        torch.manual_seed(0)
        model = Model(replace(PRESETS[options.preset], kind=kind)).to(device, dtype)
        losses = [] if on_gpu else train(model, options.steps)
        _, cache, seconds = [generate(model, prompts, options.requests, options.new) for _ in range(2)][-1]
        loss = f"{losses[0]:.2f} to {losses[-1]:.2f}" if losses else "-"
        later = statistics.median(seconds[1:]) if seconds[1:] else float("nan")
        print(f"{kind:8} {loss:>14} {cache.bytes / 2**20:11.2f} {1e3 * seconds[0]:16.2f} {1e3 * later:15.2f}")


if __name__ == "__main__":
    main()
