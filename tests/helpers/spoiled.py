# SPDX-License-Identifier: BSD-3-Clause
"""A plug-in whose log-probabilities are wrong on the last rank: what verify_first_steps is for."""

import os
from typing import Any

from flash_attn_dualkv.integrations.verl import engine

right = engine.unpack_to_jagged


def wrong(values: Any, *args: Any, **options: Any) -> Any:
    off = 1.5 if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1) else 1.0
    return right(values * off, *args, **options)


engine.unpack_to_jagged = wrong
