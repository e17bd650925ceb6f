# SPDX-License-Identifier: BSD-3-Clause
"""Sizes of decoders, and what follows from them by counting: visible pairs, operations, bytes that are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import checks

FLOPS_PER_PAIR = 4  # two products of head_dim multiply-adds each: Q K^T and P V
# Operations of each direction over those of the forward. Attention's backward has five products
# instead of two, since S is computed again; that of a linear layer one for its input's gradient and
# one for its weight's.
ATTENTION_FACTORS = {"forward": 1.0, "backward": 2.5}
TOKEN_FACTORS = {"forward": 1.0, "backward": 2.0}
DIRECTIONS = tuple(ATTENTION_FACTORS)
# Peak of a layer's backward over what its forward saves, with the gradients of both: between rows of
# 16K, 64K, 128K and 256K tokens, Qwen3-1.7B's checkpointed steps differ by 0.24 to 0.26 MB a token, of
# which 0.11 MB are inputs of layers (benchmarks/results/trainers/context).
LAYER_BACKWARD = 1.7


def causal_pairs(length: int) -> int:
    """Visible (query, key) pairs of a causal sequence with itself."""
    return length * (length + 1) // 2


def shared_pairs(prompt: int, responses: Sequence[int]) -> int:
    """Visible pairs of one head, the prompt stored once: its own, and each response's with the prompt and itself."""
    return causal_pairs(prompt) + sum(length * prompt + causal_pairs(length) for length in responses)


def replicated_pairs(prompt: int, responses: Sequence[int]) -> int:
    """Visible pairs of one head with a copy of the prompt in front of each response."""
    return sum(causal_pairs(prompt + length) for length in responses)


def attention_flops(heads: int, head_dim: int, pairs: int, direction: str) -> float:
    """Operations of attention over `pairs` visible pairs of each of `heads` query heads. `direction`: in DIRECTIONS."""
    return FLOPS_PER_PAIR * heads * head_dim * pairs * ATTENTION_FACTORS[direction]


@dataclass(frozen=True)
class ModelShape:
    """A decoder of equal layers: attention with H query and H_k KV heads of dimension d, and a gated MLP.

    Attributes:
        qk_norm: queries and keys go through an RMSNorm per head, which keeps its inputs for the backward.
        vocab, tied: rows of the embedding; whether the LM head is the same matrix. Only `parameters` depends on them.
    """

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool = True
    vocab: int = 0
    tied: bool = False

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim"):
            checks.integer(name, getattr(self, name), 1)
        if self.heads % self.kv_heads:
            raise ValueError(checks.explain("heads", f"a multiple of kv_heads ({self.kv_heads})", self.heads))

    @property
    def layer_weights(self) -> int:
        """Weights of one layer's matrix products: q, k, v and o projections, gate, up and down."""
        projections = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return projections + 3 * self.hidden * self.intermediate

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: `layer_weights` and its norms."""
        return self.layer_weights + 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)

    @property
    def parameters(self) -> int:
        """Parameters of the whole model; without `vocab` those of embedding and LM head are left out."""
        embeddings = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * self.layer_parameters + self.hidden + embeddings

    def token_flops(self, tokens: int, direction: str) -> float:
        """Operations of one layer's matrix products over `tokens`; what is element-wise is not counted."""
        return 2 * self.layer_weights * tokens * TOKEN_FACTORS[direction]

    def saved_bytes_per_token(self, element_bytes: int = 2) -> int:
        """Bytes that one layer in plain PyTorch keeps of a token between forward and backward, without checkpointing.

        Norms are PyTorch's fused ones for GPUs, which keep their input and one statistic.
        The inputs of both norms, of the projections and of the MLP (4 hidden); queries, keys and values as attention
        gets them, queries and keys before their norm, and the attention's output; gate, silu(gate), up and their
        product (4 intermediate). Statistics are float32: one of each norm, and the attention's LSE.
        """
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        elements = 4 * self.hidden + 4 * self.intermediate + 2 * (queries + keys)
        statistics = 2 + self.heads
        if self.qk_norm:
            elements += queries + keys
            statistics += self.heads + self.kv_heads
        return element_bytes * elements + 4 * statistics

    def kept_cost(self, *, is_checkpointed: bool, element_bytes: int = 2, kept_columns: int | None = None) -> float:
        """How many rows of a micro-batch take as much memory as kept keys, values and fp32 sums of gradients of a row.

        `kept_columns`: of keys and values of all layers together; None: as the layers are.
        """
        if kept_columns is None:
            kept_columns = 2 * self.kv_heads * self.head_dim * self.layers
        layer = self.saved_bytes_per_token(element_bytes)
        others = self.layers * self.hidden * element_bytes if is_checkpointed else (self.layers - 1) * layer
        return kept_columns * (element_bytes + max(4, element_bytes)) / (others + LAYER_BACKWARD * layer)


MODELS = {
    "qwen3-0.6b": ModelShape(28, 1024, 3072, 16, 8, 128, vocab=151936, tied=True),
    "qwen3-1.7b": ModelShape(28, 2048, 6144, 16, 8, 128, vocab=151936, tied=True),
    "qwen3-4b": ModelShape(36, 2560, 9728, 32, 8, 128, vocab=151936, tied=True),
    "qwen3-8b": ModelShape(36, 4096, 12288, 32, 8, 128, vocab=151936),
    "qwen3-14b": ModelShape(40, 5120, 17408, 40, 8, 128, vocab=151936),
    "qwen3-32b": ModelShape(64, 5120, 25600, 64, 8, 128, vocab=151936),
    "llama3-8b": ModelShape(32, 4096, 14336, 32, 8, 128, qk_norm=False, vocab=128256),
    "llama3-70b": ModelShape(80, 8192, 28672, 64, 8, 128, qk_norm=False, vocab=128256),
}
