# SPDX-License-Identifier: BSD-3-Clause
"""Norms for Megatron's models without Transformer Engine and apex."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch


@contextlib.contextmanager
def local_norms() -> Iterator[None]:
    """Megatron's local norm refuses sequence parallelism; its gradient is summed as that of others."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    stock = WrappedTorchNorm.__new__

    def norm(kind: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        alone = copy.copy(config)
        alone.sequence_parallel = False
        made = stock(kind, alone, *args, **kwargs)
        for one in made.parameters():
            one.sequence_parallel = config.sequence_parallel
        return made

    with patch.object(WrappedTorchNorm, "__new__", norm):
        yield
