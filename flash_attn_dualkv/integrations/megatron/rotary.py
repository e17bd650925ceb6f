# SPDX-License-Identifier: BSD-3-Clause
"""RoPE of packed rows: the frequencies of each row's position in its sequences.

Megatron makes frequencies for 0 .. longest and lets them begin again with every sequence of cu_seqlens; it does not
read position_ids. A packed row is one sequence there, so what is made for it are the frequencies of its T rows. They
come by the two calls that every model and every MLA layer makes: the length that `get_rotary_seq_len` finds in the
packed_seq_params carries the positions to the `forward` after it. Nothing is kept in between, so that recomputation
in the backward, other micro-batches and other threads do not matter.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .params import SharedPackedSeqParams


class RotaryLength(int):
    """How many rows get frequencies, and the positions of these rows."""

    positions: Tensor  # (rows,) int64; of all context-parallel ranks, others' are 0
    longest: int  # above all positions

    @staticmethod
    def of(params: SharedPackedSeqParams) -> RotaryLength:
        positions = params.rotary_positions()
        length = RotaryLength(len(positions))
        length.positions, length.longest = positions, params.layout.max_sequence
        return length


class OfPositions:
    """Over a class of Megatron's RoPE: takes a `RotaryLength`."""

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Any,
        transformer_config: Any,
        packed_seq_params: Any = None,
        **kwargs: Any,
    ) -> int:
        if isinstance(packed_seq_params, SharedPackedSeqParams):
            return RotaryLength.of(packed_seq_params)
        stock: Any = super()
        given = inference_context, transformer, transformer_input, transformer_config, packed_seq_params
        return int(stock.get_rotary_seq_len(*given, **kwargs))

    def forward(self, max_seq_len: int, *args: Any, **kwargs: Any) -> Any:
        stock: Any = super()
        if not isinstance(max_seq_len, RotaryLength):
            return stock.forward(max_seq_len, *args, **kwargs)
        # Not through the stock forward, whose cache would keep a table for every length.
        table = stock.get_emb(max_seq_len.longest)
        return _rows(max_seq_len, *table) if isinstance(table, tuple) else _rows(max_seq_len, table)[0]

    def get_cached_cos_sin(self, seq_len: int, *args: Any, **kwargs: Any) -> Any:
        stock: Any = super()
        if not isinstance(seq_len, RotaryLength):
            return stock.get_cached_cos_sin(seq_len, *args, **kwargs)
        return _rows(seq_len, *stock.get_cached_cos_sin(seq_len.longest, *args, **kwargs))


def _rows(length: RotaryLength, *tables: Any) -> tuple[Any, ...]:
    """The rows of the positions from tables (longest, 1, 1, d); numbers (of YaRN) stay what they are."""
    return tuple(table.index_select(0, length.positions) if isinstance(table, Tensor) else table for table in tables)
