# SPDX-License-Identifier: BSD-3-Clause
"""Savings by sharing, for an engine's log.

Steps are counted on the host. Once an interval a step's block table is copied, without waiting for
the device, and looked at when it is there.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .messages import Engine

# Advice on siblings is for so many requests, fewer than so many to a prompt, of so many keys on
# average: those of an engine's warm-up have one each.
_MANY, _FEW_SIBLINGS, _SHORT = 16, 3, 64
_ROUTER = "router_config_path=$(python -m flash_attn_dualkv.integrations.verl.router)"


class Reading(NamedTuple):
    """Keys of a step: of all its requests, and what others of them have read already; groups of requests that share."""

    keys: int
    saved: int
    requests: int
    groups: int
    siblings: int  # requests in the groups

    @property
    def prompts(self) -> int:
        """Distinct ones: requests that share nothing have one each."""
        return self.groups + self.requests - self.siblings

    def __str__(self) -> str:
        read = 100.0 * (self.keys - self.saved) / max(self.keys, 1)
        each = self.siblings / max(self.groups, 1)
        return (
            f"a step of {self.requests} requests reads {read:.1f}% of its {self.keys} keys, those shared once; "
            f"{self.groups} groups of {each:.1f} siblings, {self.requests - self.siblings} requests alone"
        )


def read_table(table: Any, keys: Any, cuts: Any, page_size: int, padding: int = 0) -> Reading:
    """Counts of what a step shares, from NumPy arrays: its block table, keys, and where requests are cut.

    Rows of at most `padding` keys are no requests.
    """
    is_used = keys > padding
    table, keys, cuts = table[is_used], keys[is_used], cuts[is_used]
    shareable = np.clip(np.minimum(cuts, keys), 0, None) // page_size  # whole pages
    table = table[:, : shareable.max(initial=1)]
    places = np.arange(table.shape[1]) < shareable[:, None]
    # Column by column: NumPy from 2.3 on hashes in np.unique, millions of them for seconds.
    pages = np.sort(np.where(places, table, -1).T, axis=1)
    distinct = int(np.count_nonzero(np.diff(pages, axis=1, prepend=-1)))
    firsts = table[shareable > 0, 0]
    counts = np.unique(firsts, return_counts=True)[1]
    counts = counts[counts > 1]
    saved = (int(places.sum()) - distinct) * page_size
    return Reading(int(keys.sum()), saved, len(keys), len(counts), int(counts.sum()))


class Statistics:
    """Counts of steps, of the layers that share a plan.

    Args:
        interval: seconds between two lines; 0: none.
        whose: the layers, in words.
        engine: theirs.
        owner: the engine's configuration, for which advice is said once.
        padding: keys of a step's rows that are no requests.
    """

    def __init__(self, interval: float, whose: str, engine: Engine, owner: Any, padding: int = 0) -> None:
        self.interval, self.whose, self._engine, self._owner = interval, whose, engine, owner
        self._padding = padding
        self.steps: Counter[str] = Counter()  # "decode", "mixed"
        self.stock: Counter[str] = Counter()  # reasons
        self._last = time.monotonic() if interval else 0.0
        self._pending: tuple[list[Tensor], int, Any] | None = None
        self._most = 0  # requests of a step that was read

    def count_stock(self, reason: str) -> None:
        """A step that is the engine's own."""
        self.stock[reason] += 1

    def count_shared(
        self, table: Tensor, columns: int, keys: Tensor, cuts: Tensor, page_size: int, is_mixed: bool
    ) -> None:  # fmt: skip
        """A step whose requests decode on a plan, with pages in so many columns of the table."""
        self.steps["mixed" if is_mixed else "decode"] += 1
        if not self.interval:
            return
        if self._pending is not None:
            self._report()
        elif time.monotonic() - self._last > self.interval:
            self._last = time.monotonic()
            sources = table[:, :columns], keys, cuts
            copies = [torch.empty(src.shape, dtype=src.dtype, pin_memory=src.is_cuda) for src in sources]
            for copy, src in zip(copies, sources):
                copy.copy_(src, non_blocking=True)
            event = None
            if table.is_cuda:
                event = torch.cuda.Event()
                event.record()
            self._pending = copies, page_size, event

    def _report(self) -> None:
        assert self._pending is not None
        copies, page_size, event = self._pending
        if event is not None and not event.query():
            return
        self._pending = None
        table, keys, cuts = (copy.numpy() for copy in copies)
        reading = read_table(table, keys, cuts, page_size, self._padding)
        self._engine.logger.info("flash_attn_dualkv, %s: %s", self.whose, self.line(reading))
        self._advise(reading)

    def _advise(self, reading: Reading) -> None:
        """Say once what keeps siblings together, if few are.

        An engine sees its own requests alone: how many samples of a prompt there are is for the reader to know. The
        last requests of a rollout are those of many prompts, wherever their siblings were.
        """
        self._most = max(self._most, reading.requests)
        is_large = reading.requests >= max(_MANY, self._most / 2) and reading.keys >= _SHORT * reading.requests
        if not is_large or reading.requests >= _FEW_SIBLINGS * reading.prompts:
            return
        text = (
            f"{reading.requests} requests have {reading.prompts} prompts. If more samples of each are drawn than that, "
            "the others wait or are on other replicas. A router that keeps siblings together lets them share: "
            f"in verl actor_rollout_ref.rollout.{_ROUTER}, in others docs/notes/routers.md"
        )
        self._engine.say_once(text, self._owner, logging.INFO)

    def line(self, reading: Reading) -> str:
        """A line of the log."""
        stock = ", ".join(f"{count} ({reason})" for reason, count in self.stock.items()) or "0"
        kinds = f"{self.steps['decode']} of decoding, {self.steps['mixed']} mixed, {self._engine.name}'s own {stock}"
        return f"{reading}; steps: {kinds}"
