# SPDX-License-Identifier: BSD-3-Clause
"""Savings by sharing, for verl's loggers."""

from __future__ import annotations

from verl.utils.flops_counter import FlopsCounter

from ...data.batch import PackedBatch
from ...data.parts import Cut
from ...model_shape import causal_pairs
from ..common.options import PREFIX, REASONS
from ..common.pipeline import Tally, savings
from .micro_batches import Lengths

# Words of the release before, which go with the next one, and what they counted.
_OLD = {
    "verification": ("switched_off",),
    "model": ("unsupported", "dropout", "noise", "self_check"),
    "ratio": ("dedup_ratio",),
}


class Statistics:
    """Counts of one call of the engine, on this rank."""

    def __init__(self, flops: FlopsCounter, ranks: int) -> None:
        self.flops = flops
        self.ranks = ranks  # that work on the same samples
        self.begin()

    def begin(self) -> None:
        self.tally = Tally()
        self.divided = 0  # prompts of which samples have other routes of experts
        self.trunks = 0  # whose keys are kept for several micro-batches
        self.pairs = 0

    def count_shared(self, batch: PackedBatch, unread: int) -> None:
        self.tally.add(batch.num_replicated_tokens, batch.layout.num_tokens, unread=unread)
        self.pairs += batch.num_pairs

    def count_trunks(self, cut: Cut, batch: PackedBatch) -> None:
        """Their rows count once, as those of layers that a checkpoint runs again; and all that is seen in a batch."""
        self.trunks += len(cut.trunks)
        self.tally.tokens += cut.trunk_rows
        self.pairs += batch.num_pairs

    def count_stock(self, lengths: Lengths, reason: str) -> None:
        totals = list(map(int.__add__, lengths.prompts, lengths.responses))
        self.tally.add(sum(totals), sum(totals), reason)
        self.pairs += sum(map(causal_pairs, totals))

    def metrics(self, seconds: float, forward_only: bool) -> dict[str, list[float]]:
        """One value each, in a list as verl wants it. The same names on every rank."""
        tally = self.tally
        found: dict[str, float] = {
            **savings(tally.replicated, tally.tokens),
            "executed_tokens": tally.tokens,
            "unread_tokens": tally.unread,
            "executed_tokens_per_s": tally.tokens / seconds,
            "effective_tokens_per_s": tally.replicated / seconds,
            "mfu_executed": self._mfu(seconds, forward_only),
            "micro_batches": tally.calls,
            "fallback_micro_batches": tally.fallbacks.total(),
            "fallback_prompts": self.divided,
            "trunks": self.trunks,
        }
        counts = {reason: tally.fallbacks[reason] for reason in REASONS}
        counts |= {old: sum(counts[reason] for reason in now) for old, now in _OLD.items()}
        found |= {f"fallback/{reason}": count for reason, count in counts.items()}
        return {f"{PREFIX}/{name}": [float(value)] for name, value in found.items()}

    def _mfu(self, seconds: float, forward_only: bool) -> float:
        """MFU of what is executed; verl's own counts the tokens of the replicated batch."""
        # verl's estimate is linear in tokens and in squared lengths, whose sum is twice the pairs.
        single, promised = self.flops.estimate_flops([1000], 1.0)
        two, _ = self.flops.estimate_flops([1000, 1000], 1.0)
        long, _ = self.flops.estimate_flops([2000], 1.0)
        per_square = (long - two) / (2000**2 - 2 * 1000**2)
        per_token = (single - per_square * 1000**2) / 1000
        estimate = (per_token * self.tally.tokens + per_square * 2 * self.pairs) / seconds
        return estimate / promised / self.ranks / (3.0 if forward_only else 1.0)
