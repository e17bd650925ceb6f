# SPDX-License-Identifier: BSD-3-Clause
"""How much time of a core a call takes, on a machine that has other work."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

PATIENCE = 60.0  # seconds: neighbours on the same core halve its speed, most often for a second or two


def least_time(bound: float, call: Callable[..., object], *arguments: Any, **options: Any) -> float:
    """Seconds of the host's cores in the fastest of many calls; the first that takes less than `bound` is the last."""
    least = float("inf")
    deadline = time.perf_counter() + PATIENCE
    while least >= bound and time.perf_counter() < deadline:
        began = time.process_time()
        call(*arguments, **options)
        least = min(least, time.process_time() - began)
    return least
