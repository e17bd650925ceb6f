# SPDX-License-Identifier: BSD-3-Clause
"""The micro-batches that are measured: what their names mean, and the work that counts.

A shape is written N x P x R, N responses of R tokens to each prompt of P, or is a prefix tree of any depth. Its name is
a recipe that `parse` follows, so that any shape can be asked for:

    28x16Kx2K                           one prompt of 16K tokens, 28 responses of 2K
    16x8Kx131-2048                      16 responses with lengths drawn from 131 to 2048, once and for all
    4-groups-of-8x200x4K-16K            four prompts with eight responses each
    causal-32x4K-16K                    32 sequences without a prompt
    28x16Kx2K-H16-Hk4-d256              other heads than H = 32 query heads, H_k = 8 KV heads, head dim d = 128
    causal-8x8K-d192v128-w1K-c50-sinks  values of another width, a window, a softcap, sinks
    tree-agentic                        one of TREES
    qwen3-0.6b-4x1Kx131-2048            another model than Qwen3-8B, whose heads it has
    gpt-oss-20b-L12-16x8Kx131-2048      its first 12 layers
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from models import ALL_MODELS, DEFAULT_MODEL

from flash_attn_dualkv.model_shape import ModelShape, attention_flops, causal_pairs

Nodes = tuple[tuple[int, int], ...]  # (length, parent) depth first; a root's parent is -1
K = 1024
MOST_ELEMENTS = 1 << 31  # of Q, in a call of a peer's kernel: with more, PyTorch's FlashAttention-2 reads wild memory
MICRO_BATCH_TOKENS = 256 * K  # of a flattened tree, where the tree itself has no more


@dataclass(frozen=True, eq=False)
class Shape:
    """A micro-batch, the heads of its attention, and the model whose layers it goes through.

    Attributes:
        nodes: prompts are roots and responses leaves; a sequence without a prompt is a root.
        head_dim_v: of v; 0 for that of q and k.
        window: a row sees so many positions, its own the last of them; 0 for all.
        softcap: 0 for none.
        sinks: whether a score of each head joins the softmax.
    """

    name: str
    nodes: Nodes
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    head_dim_v: int = 0
    window: int = 0
    softcap: int = 0
    sinks: bool = False
    model: ModelShape = field(default_factory=lambda: ALL_MODELS[DEFAULT_MODEL])

    @cached_property
    def paths(self) -> list[list[int]]:
        """The nodes from its root to itself, of every node."""
        found: list[list[int]] = []
        for index, (_, parent) in enumerate(self.nodes):
            found.append([*(found[parent] if parent >= 0 else []), index])
        return found

    @cached_property
    def begins(self) -> list[int]:
        """The first packed row of every node."""
        return [*accumulate((length for length, _ in self.nodes), initial=0)][:-1]

    @cached_property
    def ends(self) -> list[int]:
        """The length of the path of every node."""
        return [sum(self.nodes[one][0] for one in path) for path in self.paths]

    @cached_property
    def leaves(self) -> list[int]:
        """The nodes without children: each ends a sequence."""
        parents = {parent for _, parent in self.nodes}
        return [index for index in range(len(self.nodes)) if index not in parents]

    @property
    def depth(self) -> int:
        return max(map(len, self.paths))

    @property
    def responses(self) -> list[int]:
        """Lengths of the leaves."""
        return [self.nodes[leaf][0] for leaf in self.leaves]

    @property
    def mean_prompt(self) -> int:
        """The mean length of the roots; 0 where nothing is shared."""
        lengths = [length for length, parent in self.nodes if parent < 0]
        return round(sum(lengths) / len(lengths)) if self.depth > 1 else 0

    @property
    def packed_tokens(self) -> int:
        """Tokens with every node stored once."""
        return sum(length for length, _ in self.nodes)

    @property
    def replicated_lengths(self) -> list[int]:
        """Lengths of the sequences with the path in front of each leaf."""
        return [self.ends[leaf] for leaf in self.leaves]

    @property
    def replicated_tokens(self) -> int:
        return sum(self.replicated_lengths)

    @property
    def value_dim(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def is_tree(self) -> bool:
        return "tree-" in self.name

    @property
    def is_plain(self) -> bool:
        """Causal attention and nothing else, of one head dim."""
        return not (self.head_dim_v or self.window or self.softcap or self.sinks)

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
        """Pairs that are computed when paths are replicated."""
        return sum(map(self.pairs_of, self.replicated_lengths))

    def flops(self, direction: str) -> float:
        """Useful operations of the attention: forward a product of the head dim of q and k and one of that of v.

        Backward three and two of them.
        """
        of_qk, of_v = (1, 1) if direction == "forward" else (3, 2)
        equal = attention_flops(self.heads, self.head_dim, self.visible_pairs, direction)
        return equal * (of_qk * self.head_dim + of_v * self.value_dim) / ((of_qk + of_v) * self.head_dim)

    def by_tokens(self, nodes: Sequence[int], most: int) -> list[list[int]]:
        """The nodes in runs whose paths have at most ``most`` tokens in all; a path that has more is alone."""
        runs: list[list[int]] = []
        tokens = most + 1
        for node in nodes:
            tokens += self.ends[node]
            if tokens > most:
                runs.append([])
                tokens = self.ends[node]
            runs[-1].append(node)
        return runs

    def micro_batches(self) -> list[list[int]]:
        """Leaves whose flattened sequences go together: as many tokens as the tree has, or 256K if it has fewer."""
        return self.by_tokens(self.leaves, max(self.packed_tokens, MICRO_BATCH_TOKENS))

    def gathered_calls(self) -> list[list[int]]:
        """Nodes whose gathered paths go together; FlashAttention-2 makes gradients of keys for every query head."""
        return self.by_tokens(range(len(self.nodes)), (MOST_ELEMENTS - 1) // (self.heads * self.head_dim))


# By name. Their rates with more implementations than these are known elsewhere for trees like agentic,
# of 148 leaves and 273,553 tokens for 1,771,242, and agentic_wide, of 13 and 19,062 for 53,149.
TREES: dict[str, list[tuple[int, int]]] = json.loads(Path(__file__).with_name("trees.json").read_text())

# --- names ----------------------------------------------------------------------------------------------------------

NAME = re.compile(
    rf"(?:(?P<model>{'|'.join(map(re.escape, ALL_MODELS))})-(?:L(?P<layers>\d+)-)?)?"
    rf"(?:tree-(?P<tree>{'|'.join(TREES)})|"
    r"(?P<causal>causal-)?(?(causal)|(?:(?P<groups>\d+)-groups-of-)?)(?P<n>\d+)x(?(causal)|(?P<prompt>\d+K?)x)"
    r"(?P<low>\d+K?)(?:-(?P<high>\d+K?))?)"
    r"(?:-H(?P<heads>\d+)-Hk(?P<kv_heads>\d+))?(?:-d(?P<head_dim>\d+)(?:v(?P<head_dim_v>\d+))?)?"
    r"(?:-w(?P<window>\d+K?))?(?:-c(?P<softcap>\d+))?(?P<sinks>-sinks)?"
)
# What people write for parts of names, and for what rows are named by.
WORDS: dict[str, dict[str, str]] = json.loads(Path(__file__).with_name("templates").joinpath("labels.json").read_text())
MODEL_TITLES, OPTION_TITLES = WORDS["models"], WORDS["options"]


def parts_of(name: str) -> dict[str, str]:
    """The parts that a shape's name has; none where it is no shape's."""
    found = NAME.fullmatch(name)
    return {key: value for key, value in found.groupdict().items() if value is not None} if found else {}


def title(name: str) -> str:
    """A shape's name for tables and plots: 16 x 8K x 131..2048 for 16x8Kx131-2048."""
    if not (parts := parts_of(name)):
        return name
    model = parts.get("model", "")
    model = f"{MODEL_TITLES.get(model, model.title())}: " if model else ""
    layers = f"{parts['layers']} layers, " if "layers" in parts else ""
    lengths = "..".join(parts[one] for one in ("low", "high") if one in parts)
    if "tree" in parts:
        what = f"tree {parts['tree']}"
    elif "causal" in parts:
        what = f"causal, {parts['n']} x {lengths}"
    else:
        groups = f"{parts['groups']} groups of " if "groups" in parts else ""
        what = f"{groups}{parts['n']} x {parts['prompt']} x {lengths}"
    options = [text.format(parts[one]) for one, text in OPTION_TITLES.items() if one in parts]
    return model + layers + ", ".join([what, *options])


def number(text: str) -> int:
    """8K as 8192."""
    return int(text.removesuffix("K")) * (K if text.endswith("K") else 1)


def parse(name: str) -> Shape:
    """The shape of that name.

    Raises:
        ValueError: no shape can have that name.
    """
    if not (parts := parts_of(name)):
        examples = "28x16Kx2K, 16x8Kx131-2048, 4-groups-of-8x200x4K-16K, causal-8x4K, tree-agentic"
        raise ValueError(f"shape: expected a name like {examples}, got {name!r}")
    model = ALL_MODELS[parts.get("model", DEFAULT_MODEL)]
    if not 1 <= (layers := int(parts.get("layers", model.layers))) <= model.layers:
        raise ValueError(f"layers: expected 1 to {model.layers}, got {layers}")
    options: dict[str, Any] = {"heads": model.heads, "kv_heads": model.kv_heads, "head_dim": model.head_dim}
    options |= {one: number(parts[one]) for one in OPTION_TITLES if one in parts and one != "sinks"}
    nodes = (
        tuple((length, parent) for length, parent in TREES[parts["tree"]]) if "tree" in parts else drawn_nodes(parts)
    )
    return Shape(name, nodes, **options, sinks="sinks" in parts, model=replace(model, layers=layers))


def drawn_nodes(parts: dict[str, str]) -> Nodes:
    """Prompts and responses that the parts of a name stand for."""
    n, prompt, low = int(parts["n"]), number(parts.get("prompt", "0")), number(parts["low"])
    high = number(parts.get("high", parts["low"]))
    draw = random.Random(f"{n}-{prompt}-{low}-{high}")
    groups = [(prompt, [draw.randint(low, high) for _ in range(n)]) for _ in range(int(parts.get("groups", "1")))]
    return nodes_of(groups)


def nodes_of(groups: Sequence[tuple[int, Sequence[int]]]) -> Nodes:
    """Prompts and their responses, by lengths; responses to a prompt of length 0 are roots."""
    nodes: list[tuple[int, int]] = []
    for prompt, responses in groups:
        root = len(nodes) if prompt else -1
        nodes += [(prompt, -1)] if prompt else []
        nodes += [(length, root) for length in responses]
    return tuple(nodes)
