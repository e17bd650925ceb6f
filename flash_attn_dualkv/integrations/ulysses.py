# SPDX-License-Identifier: BSD-3-Clause
"""The published place of `UlyssesLayout`."""

from ..parallel.ulysses import UlyssesLayout

__all__ = ["UlyssesLayout"]
