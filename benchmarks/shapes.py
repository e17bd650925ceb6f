"""The shapes that are measured, and what of their work counts as useful.

A shape is one micro-batch: groups of one prompt and its responses. Visible (query, key) pairs are counted on the
deduplicated work, whatever an implementation computes: so a TFLOP/s figure compares implementations on the same result.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from flash_attn_dualkv.predict import (
    MODELS,
    TOKEN_BACKWARD_OVER_FORWARD,
    ModelShape,
    attention_flops,
    replicated_pairs,
    shared_pairs,
)


@dataclass(frozen=True)
class Group:
    """One prompt and the lengths of the responses sampled from it."""

    prompt: int
    responses: tuple[int, ...]


@dataclass(frozen=True)
class Shape:
    """A micro-batch and the heads of the attention layer. A prompt of length 0 is the context-free case."""

    name: str
    groups: tuple[Group, ...]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    deterministic: bool = field(default=False, kw_only=True)  # also measure deterministic=True

    @property
    def responses(self) -> list[int]:
        """Lengths of all responses, group after group."""
        return [length for group in self.groups for length in group.responses]

    @property
    def num_responses(self) -> int:
        return len(self.responses)

    @property
    def mean_prompt(self) -> int:
        return round(sum(group.prompt for group in self.groups) / len(self.groups))

    @property
    def mean_response(self) -> int:
        return round(sum(self.responses) / max(self.num_responses, 1))

    @property
    def is_context_free(self) -> bool:
        return all(group.prompt == 0 for group in self.groups)

    @property
    def packed_tokens(self) -> int:
        """Tokens with every prompt stored once."""
        return sum(group.prompt + sum(group.responses) for group in self.groups)

    @property
    def replicated_tokens(self) -> int:
        """Tokens with the prompt in front of each of its responses."""
        return sum(group.prompt + response for group in self.groups for response in group.responses)

    def replicated_lengths(self) -> list[int]:
        return [group.prompt + response for group in self.groups for response in group.responses]

    def visible_pairs(self) -> int:
        """Causal (query, key) pairs of one head: each prompt with itself, each response with its prompt and itself."""
        return sum(shared_pairs(group.prompt, group.responses) for group in self.groups)

    def replicated_pairs(self) -> int:
        """Pairs that are computed when the prompt is replicated."""
        return sum(replicated_pairs(group.prompt, group.responses) for group in self.groups)

    def flops(self, direction: str, pairs: int | None = None) -> float:
        """Floating-point operations of the attention over ``pairs`` (default: the visible ones)."""
        count = self.visible_pairs() if pairs is None else pairs
        return attention_flops(self.heads, self.head_dim, count, direction)

    def token_flops(self, direction: str, tokens: int) -> float:
        """Floating-point operations beside attention: none, attention alone is measured."""
        return 0.0


MOST_ELEMENTS = 1 << 31  # of Q, in a call of a peer's kernel


def fits_one_call(elements: int) -> bool:
    """Whether a peer's kernel can take so many elements of Q. Several calls need memory for their joined outputs."""
    return elements < MOST_ELEMENTS


@dataclass(frozen=True)
class LayerShape(Shape):
    """A micro-batch and the decoder layer that it goes through; the heads are the model's."""

    model: ModelShape = field(kw_only=True)

    def token_flops(self, direction: str, tokens: int) -> float:
        """Floating-point operations of projections and MLP over ``tokens``."""
        return self.model.token_flops(tokens, direction)


def in_layer(shape: Shape, model: ModelShape) -> LayerShape:
    """The micro-batch of ``shape``, for a layer of ``model``."""
    return LayerShape(shape.name, shape.groups, model.heads, model.kv_heads, model.head_dim, model=model)


def step_flops(model: ModelShape, tokens: int, pairs: int, scored: int, direction: str) -> float:
    """Operations of all layers, and of the LM head over ``scored`` rows, in a step with activation checkpointing.

    Its backward computes the forward again, of the layers and of the head.
    """
    head = 2.0 * model.hidden * model.vocab * scored
    forward = model.layers * model.layer_flops(tokens, pairs, "forward") + head
    if direction == "forward":
        return forward
    return forward + model.layers * model.layer_flops(tokens, pairs, direction) + TOKEN_BACKWARD_OVER_FORWARD * head


@dataclass(frozen=True)
class StepShape(LayerShape):
    """A micro-batch and the whole model that a training step takes it through."""

    def flops(self, direction: str, pairs: int | None = None) -> float:
        """Floating-point operations of the attention of all layers."""
        count = self.visible_pairs() if pairs is None else pairs
        return step_flops(self.model, 0, count, 0, direction)

    def token_flops(self, direction: str, tokens: int) -> float:
        """Floating-point operations of projections, MLPs and the LM head."""
        return step_flops(self.model, tokens, 0, sum(self.responses), direction)


def in_model(shape: LayerShape) -> StepShape:
    """The micro-batch of ``shape``, for all of its model."""
    model = shape.model
    return StepShape(shape.name, shape.groups, model.heads, model.kv_heads, model.head_dim, model=model)


def equal(name: str, n: int, prompt: int, response: int, *heads: int, deterministic: bool = False) -> Shape:
    """One group of ``n`` responses of the same length; ``heads``: (H, H_k, d) where they are not 32, 8, 128."""
    return Shape(name, (Group(prompt, (response,) * n),), *heads, deterministic=deterministic)


def label(tokens: int) -> str:
    """8192 as 8K, 5059 as it is."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def ragged(name: str, n: int, prompt: int, low: int, high: int) -> Shape:
    """One group of ``n`` responses with lengths drawn once and for all from U(low, high)."""
    draw = random.Random(f"{n}-{prompt}-{low}-{high}")
    return Shape(name, (Group(prompt, tuple(draw.randint(low, high) for _ in range(n))),))


def split(name: str, n_groups: int, n: int, prompt: int, response: int) -> Shape:
    """``n_groups`` groups of ``n`` responses each."""
    return Shape(name, (Group(prompt, (response,) * n),) * n_groups)


K = 1024

PAPER = (
    equal("28x4Kx2K", 28, 4 * K, 2 * K),
    equal("28x16Kx2K", 28, 16 * K, 2 * K, deterministic=True),
    equal("16x32Kx2K", 16, 32 * K, 2 * K),
    equal("28x32Kx2K", 28, 32 * K, 2 * K),
    equal("16x64Kx2K", 16, 64 * K, 2 * K),
)

RAGGED = (
    ragged("32x5059xU(131,2048)", 32, 5059, 131, 2048),
    ragged("16x8KxU(131,2048)", 16, 8 * K, 131, 2048),
    ragged("8x16KxU(131,2048)", 8, 16 * K, 131, 2048),
    ragged("32x8KxU(32,256)", 32, 8 * K, 32, 256),
)

HEADS = (
    equal("28x4Kx2K-H8-Hk2", 28, 4 * K, 2 * K, 8, 2),
    equal("28x4Kx2K-H4-Hk1", 28, 4 * K, 2 * K, 4, 1),
    equal("28x16Kx2K-d64", 28, 16 * K, 2 * K, 32, 8, 64, deterministic=True),
    equal("28x16Kx2K-d256", 28, 16 * K, 2 * K, 16, 4, 256, deterministic=True),
)

CONTEXT_FREE = (equal("causal-16K-MHA", 1, 0, 16 * K, 32, 32),)

SCALING = (
    equal("28x64Kx2K", 28, 64 * K, 2 * K),
    equal("28x128Kx2K", 28, 128 * K, 2 * K),
    split("1-group-of-32x4Kx2K", 1, 32, 4 * K, 2 * K),
    split("4-groups-of-8x4Kx2K", 4, 8, 4 * K, 2 * K),
)

QUICK = (
    equal("8x1Kx256", 8, K, 256),
    ragged("8x2KxU(32,512)", 8, 2 * K, 32, 512),
)

TINY = (
    equal("4x96x24-tiny", 4, 96, 24, 4, 2, 16),
    Shape("ragged-tiny", (Group(70, (33, 1, 90)),), 4, 2, 16),
    Shape("groups-tiny", (Group(50, (20, 31)), Group(64, (64,))), 4, 1, 16),
    equal("causal-tiny", 1, 0, 128, 4, 4, 16),
)

PRESETS: dict[str, tuple[Shape, ...]] = {
    "paper": PAPER,
    "performance": PAPER[:2] + RAGGED + HEADS + CONTEXT_FREE + SCALING,
    "ragged": RAGGED,
    "heads": HEADS,
    "scaling": SCALING,
    "quick": QUICK,
    "tiny": TINY,
}

PAPER_PROMPTS = (5059, 8 * K, 16 * K, 32 * K, 64 * K, 128 * K)
PAPER_MICRO_BATCHES = (4, 8, 16, 32)
TINY_MODEL = ModelShape(layers=2, hidden=48, intermediate=80, heads=4, kv_heads=2, head_dim=16)


def layer_grid(prompts: Iterable[int], micro_batches: Iterable[int], model: str = "qwen3-8b") -> tuple[LayerShape, ...]:
    """One layer of the model over every pair: one group of responses with lengths from U(131, 2048)."""
    of = "" if model == "qwen3-8b" else f"{model}-"
    return tuple(
        in_layer(ragged(f"{of}{n}x{label(prompt)}xU(131,2048)", n, prompt, 131, 2048), MODELS[model])
        for prompt in prompts
        for n in micro_batches
    )


LAYER_TINY = tuple(
    in_layer(shape, TINY_MODEL)
    for shape in (Shape("ragged-layer-tiny", (Group(70, (33, 1, 90)),)), equal("4x64x24-layer-tiny", 4, 64, 24))
)

LAYER_PRESETS: dict[str, tuple[LayerShape, ...]] = {
    "table11": layer_grid(PAPER_PROMPTS, PAPER_MICRO_BATCHES),
    "quick": (*layer_grid([8 * K], [16]), *layer_grid([16 * K], [8])),
    "tiny": LAYER_TINY,
}

MEMORY_PRESETS: dict[str, tuple[LayerShape, ...]] = {
    "grid": layer_grid([4 * K, 8 * K, 16 * K, 32 * K], [4, 8, 16]),
    "paper": layer_grid(PAPER_PROMPTS, PAPER_MICRO_BATCHES),
    "tiny": tuple(
        in_layer(ragged(f"{n}x{prompt}xU(8,48)-tiny", n, prompt, 8, 48), TINY_MODEL)
        for prompt in (32, 64, 96)
        for n in (2, 4)
    ),
}


STEP_TINY_MODEL = replace(TINY_MODEL, vocab=97)
STEP_PRESETS: dict[str, tuple[StepShape, ...]] = {
    "qwen3-8b": tuple(map(in_model, (*LAYER_PRESETS["quick"], *layer_grid([K], [8])))),
    "qwen3-0.6b": tuple(map(in_model, layer_grid([K, 8 * K, 32 * K], [4, 16], "qwen3-0.6b"))),
    "tiny": tuple(in_model(in_layer(shape, STEP_TINY_MODEL)) for shape in LAYER_TINY),
}


def by_name(presets: Mapping[str, Iterable[Shape]]) -> dict[str, Shape]:
    """Every shape of the presets, each once."""
    return {shape.name: shape for shapes in presets.values() for shape in shapes}


SHAPES = by_name(PRESETS)


def select(
    presets: Iterable[str], names: Iterable[str], known: Mapping[str, tuple[Shape, ...]] = PRESETS
) -> list[Shape]:
    """The shapes of the presets, then the named ones, each once.

    Args:
        presets: names of presets among ``known``.
        names: names of shapes in any preset of ``known``.

    Raises:
        ValueError: a preset or a shape of that name does not exist.
    """
    shapes = by_name(known)
    chosen: dict[str, Shape] = {}
    for preset in presets:
        if preset not in known:
            raise ValueError(f"preset: expected one of {', '.join(known)}, got {preset!r}")
        chosen.update((shape.name, shape) for shape in known[preset])
    for name in names:
        if name not in shapes:
            raise ValueError(f"shape: expected one of {', '.join(shapes)}, got {name!r}")
        chosen[name] = shapes[name]
    return list(chosen.values())
