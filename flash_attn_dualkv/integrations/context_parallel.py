# SPDX-License-Identifier: BSD-3-Clause
"""The published place of `ContextLayout`."""

from ..parallel.context import ContextLayout

__all__ = ["ContextLayout"]
