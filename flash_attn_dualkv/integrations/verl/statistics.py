"""What sharing has saved, for verl's loggers."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from verl.utils.flops_counter import FlopsCounter

from ...data.batch import PackedBatch
from ...predict import causal_pairs, shared_pairs
from .micro_batches import REASONS, Lengths


class Statistics:
    """Counts of one call of the engine, on this rank."""

    def __init__(self, flops: FlopsCounter, ranks: int) -> None:
        self.flops = flops
        self.ranks = ranks  # that work on the same samples
        self.begin()

    def begin(self) -> None:
        self.replicated = self.executed = self.pairs = self.shared = 0
        self.fallbacks: Counter[str] = Counter()

    def count_shared(self, batch: PackedBatch) -> None:
        layout = batch.layout
        self.shared += 1
        self.replicated += batch.num_replicated_tokens
        self.executed += layout.num_tokens
        decoded_lens = layout.decoded_lens
        for context, (first, end) in zip(layout.context_lens, pairwise(layout.group_offsets)):
            self.pairs += shared_pairs(context, decoded_lens[first:end])

    def count_stock(self, lengths: Lengths, reason: str) -> None:
        self.fallbacks[reason] += 1
        for prompt, response in zip(lengths.prompts, lengths.responses):
            self.replicated += prompt + response
            self.executed += prompt + response
            self.pairs += causal_pairs(prompt + response)

    def metrics(self, seconds: float, forward_only: bool) -> dict[str, list[float]]:
        """One value each, in a list as verl holds those of micro-batches. The same names on every rank."""
        found: dict[str, float] = {
            "dedup_ratio": self.replicated / max(1, self.executed),
            "tokens_saved": self.replicated - self.executed,
            "executed_tokens": self.executed,
            "executed_tokens_per_s": self.executed / seconds,
            "effective_tokens_per_s": self.replicated / seconds,
            "mfu_executed": self._mfu(seconds, forward_only),
            "micro_batches": self.shared + self.fallbacks.total(),
            "fallback_micro_batches": self.fallbacks.total(),
        }
        found |= {f"fallback/{reason}": self.fallbacks[reason] for reason in REASONS}
        return {f"shared_prompt/{name}": [float(value)] for name, value in found.items()}

    def _mfu(self, seconds: float, forward_only: bool) -> float:
        """Of what is executed; verl's own mfu counts the tokens of the replicated batch."""
        # verl's estimate is linear in tokens and in the sum of squared lengths, which is twice the visible pairs.
        one, promised = self.flops.estimate_flops([1000], 1.0)
        two, _ = self.flops.estimate_flops([1000, 1000], 1.0)
        long, _ = self.flops.estimate_flops([2000], 1.0)
        per_square = (long - two) / (2000**2 - 2 * 1000**2)
        per_token = (one - per_square * 1000**2) / 1000
        estimate = (per_token * self.executed + per_square * 2 * self.pairs) / seconds
        return estimate / promised / self.ranks / (3.0 if forward_only else 1.0)
