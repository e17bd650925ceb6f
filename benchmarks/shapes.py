"""The shapes that are measured: what their names mean, and what of their work counts.

A shape is one micro-batch: groups of one prompt and its responses, written N x P x R, responses by prompt by response
length, or a prefix tree of any depth. A name is a recipe that `parse` follows, so that any shape can be asked for:

    28x16Kx2K                           one prompt of 16K tokens, 28 responses of 2K
    16x8Kx131-2048                      16 responses with lengths drawn from 131 to 2048, once and for all
    4-groups-of-8x200x4K-16K            four prompts with eight responses each
    causal-32x4K-16K                    32 sequences without a prompt
    28x16Kx2K-H16-Hk4-d256              other heads than H = 32 query heads, H_k = 8 KV heads, head dim d = 128
    tree-agentic                        one of the trees of trees.py
    qwen3-0.6b-4x1Kx131-2048            another model than Qwen3-8B, where a layer or a model is measured
    gpt-oss-20b-L12-16x8Kx131-2048      its first 12 layers
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from families import FAMILIES, TINY, FamilyModel, with_layers
from trees import SHORT, TREES, Nodes

from flash_attn_dualkv.predict import (
    MODELS,
    TOKEN_BACKWARD_OVER_FORWARD,
    ModelShape,
    attention_flops,
    causal_pairs,
)

K = 1024
ALL_MODELS: dict[str, ModelShape] = {
    **MODELS,
    **FAMILIES,
    **TINY,
    "tiny": ModelShape(2, 48, 80, heads=4, kv_heads=2, head_dim=16, vocab=97),
}
DEFAULT_MODEL = "qwen3-8b"
HEADS_OF_NAME = (
    r"(?:-H(?P<heads>\d+)-Hk(?P<kv_heads>\d+))?(?:-d(?P<head_dim>\d+)(?:v(?P<head_dim_v>\d+))?)?"
    r"(?:-w(?P<window>\d+K?))?(?:-c(?P<softcap>\d+))?(?P<sinks>-sinks)?"
)
LENGTHS = rf"(?P<low>\d+K?)(?:-(?P<high>\d+K?))?{HEADS_OF_NAME}"
MODEL = rf"(?:(?P<model>{'|'.join(map(re.escape, ALL_MODELS))})-(?:L(?P<layers>\d+)-)?)?"
SHARED_NAME = re.compile(rf"{MODEL}(?:(?P<groups>\d+)-groups-of-)?(?P<n>\d+)x(?P<prompt>\d+K?)x{LENGTHS}")
CAUSAL_NAME = re.compile(rf"causal-(?P<n>\d+)x{LENGTHS}")
TREE_NAME = re.compile(rf"{MODEL}tree-(?P<tree>{'|'.join(TREES)}){HEADS_OF_NAME}")
# Also measured with deterministic=True.
DETERMINISTIC = (
    *("28x16Kx2K", "28x16Kx2K-d64", "28x16Kx2K-H16-Hk4-d256", "tree-agentic", "28x4Kx2K", "28x4Kx2K-H16-Hk2"),
    *("16x8Kx131-2048", "causal-8x4K", "causal-128x387-2304", "16-groups-of-8x256x387-2304"),
    "16-groups-of-8x256x387-2304-H8-Hk1",
)
MOST_ELEMENTS = 1 << 31  # of Q, in a call of a peer's kernel
MICRO_BATCH_TOKENS = 256 * K  # of a flattened tree, where the tree itself has no more


@dataclass(frozen=True)
class Group:
    """One prompt and the lengths of the responses sampled from it."""

    prompt: int
    responses: tuple[int, ...]


@dataclass(frozen=True)
class Shape:
    """A micro-batch and the heads of the attention layer. A prompt of length 0 is the context-free case.

    Attributes:
        tree: instead of groups, the nodes of a prefix tree as trees.py has them.
        head_dim_v: of v; 0 for that of q and k.
        window: a row sees so many positions, its own the last of them; 0 for all.
        softcap: 0 for none.
        sinks: whether a score of each head joins the softmax.
    """

    name: str
    groups: tuple[Group, ...]
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    tree: Nodes = ()
    head_dim_v: int = 0
    window: int = 0
    softcap: int = 0
    sinks: bool = False

    @cached_property
    def nodes(self) -> Nodes:
        """Of a tree, or of groups: each prompt a root, its responses the leaves below it."""
        nodes = [*self.tree]
        for group in self.groups:
            root = len(nodes)
            nodes += [(group.prompt, -1), *((length, root) for length in group.responses)]
        return tuple(nodes)

    @cached_property
    def paths(self) -> list[list[int]]:
        """Of every node the nodes from its root to itself."""
        found: list[list[int]] = []
        for index, (_, parent) in enumerate(self.nodes):
            found.append([*(found[parent] if parent >= 0 else []), index])
        return found

    @cached_property
    def ends(self) -> list[int]:
        """Of every node the length of its path."""
        return [sum(self.nodes[one][0] for one in path) for path in self.paths]

    @cached_property
    def leaves(self) -> list[int]:
        """The nodes without children: each ends a sequence."""
        parents = {parent for _, parent in self.nodes}
        return [index for index in range(len(self.nodes)) if index not in parents]

    @property
    def roots(self) -> list[int]:
        return [index for index, (_, parent) in enumerate(self.nodes) if parent < 0]

    @property
    def responses(self) -> list[int]:
        """Lengths of all responses, group after group; of a tree those of its leaves."""
        return [self.nodes[leaf][0] for leaf in self.leaves]

    @property
    def mean_prompt(self) -> int:
        return round(sum(self.nodes[root][0] for root in self.roots) / len(self.roots))

    @property
    def mean_response(self) -> int:
        return round(sum(self.responses) / max(len(self.responses), 1))

    @property
    def is_context_free(self) -> bool:
        return all(self.nodes[root][0] == 0 for root in self.roots)

    @property
    def packed_tokens(self) -> int:
        """Tokens with every prompt, or node, stored once."""
        return sum(length for length, _ in self.nodes)

    @property
    def replicated_lengths(self) -> list[int]:
        """Lengths of the sequences with the prompt, or path, in front of each of its responses."""
        return [self.ends[leaf] for leaf in self.leaves]

    @property
    def replicated_tokens(self) -> int:
        return sum(self.replicated_lengths)

    @property
    def is_plain(self) -> bool:
        """Causal attention and nothing else, of one head dim."""
        return not (self.head_dim_v or self.window or self.softcap or self.sinks)

    @property
    def window_size(self) -> tuple[int, int]:
        """As FlashAttention names it."""
        return (self.window - 1, 0) if self.window else (-1, -1)

    def pairs_of(self, length: int) -> int:
        """Visible (query, key) pairs of a sequence."""
        beyond = max(length - self.window, 0) if self.window else 0
        return causal_pairs(length) - causal_pairs(beyond)

    @property
    def visible_pairs(self) -> int:
        """Visible pairs of one head: each node with what is above it and with itself."""
        sizes = zip(self.ends, self.nodes)
        return sum(self.pairs_of(end) - self.pairs_of(end - length) for end, (length, _) in sizes)

    @property
    def replicated_pairs(self) -> int:
        """Pairs that are computed when the prompt is replicated."""
        return sum(map(self.pairs_of, self.replicated_lengths))

    def flops(self, direction: str, tokens: int, pairs: int) -> float:
        """Floating-point operations over ``tokens`` and ``pairs``: of the attention alone.

        Forward a product of the head dim of q and k and one of that of v; backward three and two of them.
        """
        value_dim = self.head_dim_v or self.head_dim
        of_qk, of_v = (1, 1) if direction == "forward" else (3, 2)
        equal = attention_flops(self.heads, self.head_dim, pairs, direction)
        return equal * (of_qk * self.head_dim + of_v * value_dim) / ((of_qk + of_v) * self.head_dim)


@dataclass(frozen=True)
class LayerShape(Shape):
    """A micro-batch and the decoder layer that it goes through; the heads are the model's."""

    model: ModelShape = field(kw_only=True)

    def flops(self, direction: str, tokens: int, pairs: int) -> float:
        return self.model.layer_flops(tokens, pairs, direction)


@dataclass(frozen=True)
class StepShape(LayerShape):
    """A micro-batch and the whole model that a training step takes it through, with activation checkpointing.

    The backward computes the forward again, of the layers and of the LM head over the response tokens.
    """

    def flops(self, direction: str, tokens: int, pairs: int) -> float:
        head = 2.0 * self.model.hidden * self.model.vocab * sum(self.responses)
        forward = self.layers_flops("forward", tokens, pairs) + head
        if direction == "forward":
            return forward
        return forward + self.layers_flops(direction, tokens, pairs) + TOKEN_BACKWARD_OVER_FORWARD * head

    def layers_flops(self, direction: str, tokens: int, pairs: int) -> float:
        """Of all layers, once."""
        if isinstance(self.model, FamilyModel):
            return self.model.layers_flops(tokens, pairs, direction)
        return self.model.layers * self.model.layer_flops(tokens, pairs, direction)


def family_of(shape: Shape) -> FamilyModel | None:
    """The model, if its step is measured and it is one of families.py."""
    model = shape.model if isinstance(shape, StepShape) else None
    return model if isinstance(model, FamilyModel) else None


def fits_one_call(shape: Shape, tokens: int) -> bool:
    """Whether a peer's kernel can take so many rows of Q. Several calls need memory for their joined outputs."""
    return tokens * shape.heads * shape.head_dim < MOST_ELEMENTS


def micro_batches(shape: Shape) -> list[list[int]]:
    """Leaves whose flattened sequences go together: no more tokens than the tree has, or 256K if it has fewer.

    All at once they would need more memory than there is, and the tree is one micro-batch of its size.
    """
    return by_tokens(shape, shape.leaves, max(shape.packed_tokens, MICRO_BATCH_TOKENS))


def gathered_calls(shape: Shape) -> list[list[int]]:
    """Nodes whose paths go together where they are gathered.

    FlashAttention-2 makes gradients of keys for every query head: as many elements as `fits_one_call` is about.
    """
    return by_tokens(shape, range(len(shape.nodes)), (MOST_ELEMENTS - 1) // (shape.heads * shape.head_dim))


def by_tokens(shape: Shape, nodes: Sequence[int], most: int) -> list[list[int]]:
    """The nodes in runs whose paths have at most ``most`` tokens in all; a path that has more is alone."""
    runs: list[list[int]] = []
    tokens = most + 1
    for node in nodes:
        tokens += shape.ends[node]
        if tokens > most:
            runs.append([])
            tokens = shape.ends[node]
        runs[-1].append(node)
    return runs


def number(text: str) -> int:
    """8K as 8192."""
    return int(text.removesuffix("K")) * (K if text.endswith("K") else 1)


def parse(name: str, kind: type[Shape] = Shape) -> Shape:
    """The shape of that name; for a layer or a model the heads are the model's.

    Raises:
        ValueError: no shape can have that name.
    """
    found = SHARED_NAME.fullmatch(name) or CAUSAL_NAME.fullmatch(name) or TREE_NAME.fullmatch(name)
    if found is None:
        known = "28x16Kx2K, 16x8Kx131-2048, 4-groups-of-8x200x4K-16K, causal-8x4K, tree-agentic"
        raise ValueError(f"shape: expected a name like {known}, got {name!r}")
    parts = {key: value for key, value in found.groupdict().items() if value is not None}
    of_heads = ("heads", "kv_heads", "head_dim", "head_dim_v", "softcap")
    heads: dict[str, Any] = {key: int(parts[key]) for key in of_heads if key in parts}
    heads |= {"window": number(parts.get("window", "0")), "sinks": "sinks" in parts}
    groups, tree = ((), TREES[parts["tree"]]()) if "tree" in parts else (drawn_groups(parts), ())
    shape = Shape(name, groups, tree=tree, **heads)
    model = ALL_MODELS[parts.get("model", DEFAULT_MODEL)]
    if not issubclass(kind, StepShape) and (isinstance(model, FamilyModel) or "layers" in parts):
        raise ValueError(f"shape: expected a model of equal layers, of which one is measured, got {name!r}")
    if not issubclass(kind, LayerShape):
        return shape
    return of_model(shape, with_layers(model, int(parts["layers"])) if "layers" in parts else model, kind)


def drawn_groups(parts: dict[str, str]) -> tuple[Group, ...]:
    """What the parts of a name stand for."""
    n, prompt, low = int(parts["n"]), number(parts.get("prompt", "0")), number(parts["low"])
    high = number(parts.get("high", parts["low"]))
    draw = random.Random(f"{n}-{prompt}-{low}-{high}")
    count = int(parts.get("groups", "1"))
    return tuple(Group(prompt, tuple(draw.randint(low, high) for _ in range(n))) for _ in range(count))


def of_model(shape: Shape, model: ModelShape, kind: type[LayerShape] = LayerShape) -> LayerShape:
    """The micro-batch of ``shape``, for a layer of the model or for all of it."""
    return kind(shape.name, shape.groups, model.heads, model.kv_heads, model.head_dim, shape.tree, model=model)


# Of a name to what people write: 16x8Kx131-2048 as 16 x 8K x 131..2048.
SPELLINGS = (
    (r"^causal-", "causal, "),
    (r"^qwen3-([\d.]+)b-", r"Qwen3-\1B: "),
    (r"^gpt-oss-20b-", "gpt-oss-20b: "),
    (r"^gemma3-4b-", "Gemma 3 4B: "),
    (r"^qwen3\.5-4b-", "Qwen3.5-4B: "),
    (r"^deepseek-16b-a3b-", "DeepSeek-V3 of 16B: "),
    (r"(?<=: )L(\d+)-", r"\1 layers, "),
    (r"-groups-of-", " groups of "),
    (r"\btree-pairs_(\d+)x(\d+K)", r"pairs of leaves of \2 below \1 tokens"),
    (r"\btree-", "tree "),
    (r"(?<=[\dK])x(?=\d)", " x "),
    (r"(?<=[\dK])-(?=\d+K?(-|$))", ".."),
    (r"-Hk(?=\d)", ", H_k = "),
    (r"-([Hd])(?=\d)", r", \1 = "),
    (r"(?<=\d)v(?=\d)", ", d_v = "),
    (r"-w(?=\d)", ", window "),
    (r"-c(?=\d)", ", softcap "),
    (r"-sinks$", ", sinks"),
)


def title(name: str) -> str:
    """A shape's name for tables and plots."""
    for pattern, spelling in SPELLINGS:
        name = re.sub(pattern, spelling, name)
    return name


PAPER = ("28x4Kx2K", "28x16Kx2K", "16x32Kx2K", "28x32Kx2K", "16x64Kx2K")
RAGGED = ("32x5059x131-2048", "16x8Kx131-2048", "8x16Kx131-2048", "32x8Kx32-256")
RESPONSES = (
    "4-groups-of-8x200x4K-16K", "8-groups-of-1x2Kx2K", "16-groups-of-8x256x131-2048",
    "8x1Kx131-2048", "16-groups-of-8x128x64-512", "32-groups-of-4x64x8-64",
)  # fmt: skip
CAUSAL = ("causal-1x16K", "causal-32x4K-16K", "causal-8x4K", "causal-128x387-2304")
HEADS = ("28x4Kx2K-H8-Hk2", "28x4Kx2K-H4-Hk1", "28x16Kx2K-d64", "28x16Kx2K-H16-Hk4-d256", "causal-1x16K-H32-Hk32")
# gpt-oss, Gemma 3 and 2, DeepSeek-V3; and a long prompt with a window.
WINDOWS = (
    "causal-8x8K-H64-Hk8-d64-sinks", "causal-8x8K-H64-Hk8-d64-w128-sinks", "causal-8x8K-H32-Hk16-w1K",
    "causal-8x8K-H16-Hk8-d256-c50", "causal-8x8K-H16-Hk8-d256-w4K-c50", "causal-8x8K-c50", "28x16Kx2K-w1K",
)  # fmt: skip
MLA = ("causal-8x8K-H16-Hk16-d192v128", "28x4Kx2K-H16-Hk16-d192v128")
OF_FA4 = (*WINDOWS[:6], MLA[0])  # what FlashAttention-4 has kernels for
# Where launches, and the begin and end of blocks, are a large part.
SMALL = (
    "32-groups-of-4x64x8-64", "16-groups-of-8x128x64-512", "causal-64x128-256", "causal-256x128-512",
    "causal-64x512-768", "causal-32x512-1K", "causal-8x2K", "32-groups-of-4x64x8-64-d64",
)  # fmt: skip
WIDE = ("causal-8x8K-H16-Hk2-d512", "8x4Kx2K-H16-Hk2-d512")  # the full attention of Gemma 4
SCALING = ("28x64Kx2K", "28x128Kx2K", "32x4Kx2K", "4-groups-of-8x4Kx2K")
KERNEL_PRESETS = {
    "paper": PAPER,
    "ragged": RAGGED,
    "responses": RESPONSES,
    "causal": CAUSAL,
    "heads": HEADS,
    "windows": WINDOWS,
    "mla": MLA,
    "fa4": OF_FA4,
    "wide": WIDE,
    "small": SMALL,
    "scaling": SCALING,
    "shared": (*PAPER[:2], *RAGGED),
    "quick": ("8x1Kx256", "8x2Kx32-512"),
    "tiny": ("4x96x24-H4-Hk2-d16", "2-groups-of-3x70x1-90-H4-Hk1-d16", "causal-1x128-H4-Hk4-d16"),
    "tiny-options": ("causal-2x100-H4-Hk2-d16v8-w30-c5-sinks", "3x70x50-H4-Hk2-d16-w40-sinks"),
}

PAPER_GRID = tuple(
    f"{n}x{prompt}x131-2048" for prompt in ("5059", "8K", "16K", "32K", "64K", "128K") for n in (4, 8, 16, 32)
)
LAYER_PRESETS = {
    "table11": PAPER_GRID,
    "memory": tuple(f"{n}x{prompt}x131-2048" for prompt in ("4K", "8K", "16K", "32K") for n in (4, 8, 16)),
    "quick": ("16x8Kx131-2048", "8x16Kx131-2048"),
    "tree": ("tree-agentic",),
    "tiny": ("tiny-3x70x1-90", "tiny-4x64x24"),
}
MODEL_PRESETS = {
    "qwen3-8b": (*LAYER_PRESETS["quick"], "8x1Kx131-2048"),
    "qwen3-0.6b": tuple(f"qwen3-0.6b-{n}x{prompt}x131-2048" for prompt in ("1K", "8K", "32K") for n in (4, 16)),
    "tree": ("qwen3-1.7b-tree-agentic",),
    "models": (*(f"{name}-16x8Kx131-2048" for name in FAMILIES), "qwen3.5-4b-16x16Kx1K"),
    "tiny": LAYER_PRESETS["tiny"],
    "tiny-models": tuple(f"{name}-3x70x1-90" for name in TINY),
}
TREE_PRESETS = {
    "trees": tuple(f"tree-{name}" for name in TREES if name != "tiny" and not name.startswith("pairs_")),
    # Of d = 64 only long leaves: all of it takes a minute.
    "min_shared": (
        *(f"tree-pairs_{shared}x{leaf}K" for leaf in (1, 8) for shared in SHORT),
        *(f"tree-pairs_{shared}x8K-d64" for shared in SHORT),
    ),
    "tiny": ("tree-tiny-H4-Hk2-d16",),
    "tiny_min_shared": ("tree-pairs_tiny-H4-Hk2-d16",),
}


@dataclass(frozen=True)
class Stream:
    """Micro-batches one after another, no two of the same lengths, as sampling makes them.

    Each has ``samples`` responses in groups of one of ``group_sizes``; lengths are drawn from ``prompt`` and
    ``response``.
    """

    name: str
    micro_batches: int
    samples: int
    group_sizes: tuple[int, ...]
    prompt: tuple[int, int]
    response: tuple[int, int]
    heads: tuple[int, int, int] = (32, 8, 128)

    def shapes(self) -> list[Shape]:
        draw = random.Random(self.name)
        found = []
        for index in range(self.micro_batches):
            n = draw.choice(self.group_sizes)
            groups = tuple(
                Group(draw.randint(*self.prompt), tuple(draw.randint(*self.response) for _ in range(n)))
                for _ in range(self.samples // n)
            )
            found.append(Shape(f"{self.name}-{index:02d}", groups, *self.heads))
        return found


STREAMS = {
    # About 64K packed tokens each.
    "rl": Stream("stream-64K", 40, 64, (4, 8, 16), (256, 2 * K), (131, 3 * K // 2)),
    "tiny": Stream("stream-tiny", 4, 8, (2, 4), (16, 48), (4, 32), (4, 2, 16)),
}
