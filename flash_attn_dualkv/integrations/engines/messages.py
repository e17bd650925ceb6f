# SPDX-License-Identifier: BSD-3-Clause
"""Messages in an engine's log."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

_SAID = "_dualkv_said"  # of an engine's configuration


class Engine(NamedTuple):
    """An engine in words, and its log.

    logger: one under the engine's own, whose handlers print it.
    """

    name: str
    logger: logging.Logger

    def say_once(self, message: str, owner: Any, level: int = logging.WARNING) -> None:
        """A message, once for an owner: an engine's configuration, say, as a process may make several."""
        said = vars(owner).setdefault(_SAID, set())
        if message not in said:
            said.add(message)
            self.logger.log(level, "flash_attn_dualkv: %s", message)
