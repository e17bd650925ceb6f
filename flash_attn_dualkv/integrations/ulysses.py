# SPDX-License-Identifier: BSD-3-Clause
"""The published place of `UlyssesLayout`, `shard_rows` and `gather_rows`."""

from ..parallel.ulysses import UlyssesLayout, gather_rows, shard_rows

__all__ = ["UlyssesLayout", "gather_rows", "shard_rows"]
