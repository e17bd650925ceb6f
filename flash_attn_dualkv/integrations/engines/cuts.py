# SPDX-License-Identifier: BSD-3-Clause
"""Places where training cuts the requests of a step into a prompt and a response."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...data.prefix_tree import SHIFTS, Boundary

_NOWHERE = np.iinfo(np.int32).max  # where a request is cut that is not


class Cuts:
    """Cuts of a step's requests, on the device.

    Args:
        requests: the most of a step.
        boundary: as training packs its samples (`pack_shared_prompts`).
        device: where the steps run.
    """

    def __init__(self, requests: int, boundary: Boundary, device: torch.device) -> None:
        self._rows = torch.full((requests,), _NOWHERE, dtype=torch.int32, device=device)
        self._shift = SHIFTS[boundary]
        self._known: tuple[int, bytes] | None = None  # how many it holds, and for which prompts' lengths

    def forget(self) -> None:
        """Write all anew, after the memory has lost its contents."""
        self._known = None

    def of(self, requests: int, lengths: Any) -> Tensor:
        """(requests,) int32, by lengths of prompts, an int32 NumPy array or None. They are written when they change.

        Requests behind these are cut nowhere.
        """
        lengths = np.zeros(0, dtype=np.int32) if lengths is None else lengths[:requests]
        known = requests, lengths.tobytes()
        if known != self._known:  # bytes are compared in a tenth of the time that arrays of 256 take
            self._known = known
            cuts = np.full(requests, _NOWHERE, dtype=np.int32)
            cuts[: len(lengths)] = np.maximum(lengths - self._shift, 0)
            new = torch.from_numpy(cuts)
            # Pinned memory that is not used again: earlier steps may still copy from theirs.
            self._rows[:requests].copy_(new.pin_memory() if self._rows.is_cuda else new, non_blocking=True)
        return self._rows[:requests]
