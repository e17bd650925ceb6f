# SPDX-License-Identifier: BSD-3-Clause
"""Megatron's gated delta nets (Qwen3.5) and Mamba-2 (Nemotron) on packed rows: a node's state is its parent's at first.

The layer's forward is Megatron's own, so that projections, gates, norms and what is recomputed of them are those of its
version. A few functions in it look along the sequence. Of a gated delta net these are two of flash-linear-attention:
the convolution, a global name of its file, and the rule, an attribute of the layer. Of a Mamba mixer it is mamba-ssm's
kernel of convolution, scan and gate, a global name of its file, whose convolution takes no inputs from before; its
parts do. They are wrapped: while a layer with a layout runs, ours call them. With sequence parallelism the projection
before them has gathered all rows.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from megatron.core.ssm.mamba_mixer import MambaMixer
from torch import Tensor

from ... import guard
from ...errors import SharedPromptLayoutError, SharedPromptUnsupportedError
from ...layout import SharedPromptLayout
from ..common.patching import Make, replace_all
from ..recurrences.mixers import Mixer, gated_delta_rule, mamba2_by_parts, row_convolution
from .params import SharedPackedSeqParams

_CONVOLUTION, _RULE = "causal_conv1d", "gated_delta_rule"
_FUSED_SCAN = "mamba_split_conv1d_scan_combined"


class _Running(NamedTuple):
    """A layer while it runs in this thread, and which functions it has called."""

    layout: SharedPromptLayout
    called: set[str]


_running: ContextVar[_Running | None] = ContextVar("dualkv_running_recurrence", default=None)


class DeltaNetOnNodes:
    """Over Megatron's `GatedDeltaNet`: computes calls that have a layout."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        inference_context: Any = None,
        packed_seq_params: Any = None,
        *others: Any,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states (T, 1, D), or this rank's slice of the rows -> that, and a bias or None."""
        stock: Any = super()
        with _on_nodes(self, packed_seq_params, _CONVOLUTION, _RULE) as params:
            result: tuple[Tensor, Tensor | None] = stock.forward(
                hidden_states, attention_mask, inference_context, params, *others, **options
            )
        return result


class MambaOnNodes:
    """Over Megatron's `MambaMixer`: computes calls that have a layout."""

    def forward(
        self, hidden_states: Tensor, inference_context: Any = None, *, packed_seq_params: Any = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states (T, 1, D), or this rank's slice of the rows -> that, and a bias or None."""
        stock: Any = super()
        with _on_nodes(self, packed_seq_params, _FUSED_SCAN) as params:
            result: tuple[Tensor, Tensor | None] = stock.forward(
                hidden_states, inference_context, packed_seq_params=params, **options
            )
        return result


# Layers that carry a state along the sequence, and what computes them.
ON_NODES = {GatedDeltaNet: DeltaNetOnNodes, MambaMixer: MambaOnNodes}


def prepare(layers: list[Any]) -> None:
    """Wrap the functions of such layers that look along the sequence, once; calls without a layout do not change.

    Raises:
        SharedPromptUnsupportedError: a layer without them, or without causal-conv1d for Mamba-2.
    """
    delta_nets = [layer for layer in layers if isinstance(layer, GatedDeltaNet)]
    seams = [(layer, _RULE, _wrapped(_RULE, gated_delta_rule)) for layer in delta_nets]
    if delta_nets:
        seams.append((_file_of(GatedDeltaNet), _CONVOLUTION, _wrapped(_CONVOLUTION, row_convolution)))
    if len(delta_nets) < len(layers):
        file = _file_of(MambaMixer)
        if file.causal_conv1d_fn is None:
            raise SharedPromptUnsupportedError("causal-conv1d", "an installation for Mamba-2", "none")
        by_parts = mamba2_by_parts(file.causal_conv1d_fn, file.mamba_chunk_scan_combined)
        seams.append((file, _FUSED_SCAN, _wrapped(_FUSED_SCAN, by_parts)))
    replace_all(seams)


def _file_of(kind: Any) -> Any:
    return sys.modules[kind.forward.__module__]


@contextmanager
def _on_nodes(module: Any, params: Any, *functions: str) -> Iterator[Any]:
    """Around the forward of a layer, with the packed_seq_params that it gets: none if they have a layout.

    From ours it would read their ends twice, and wait for the GPU.
    """
    if not isinstance(params, SharedPackedSeqParams):
        yield params
        return
    running = _Running(params.layout, set())
    before = _running.set(running)
    try:
        yield None
    finally:
        _running.reset(before)
    missing = {*functions} - running.called
    if missing:
        expected = f"a forward that calls {' and '.join(sorted(missing))} (install(model_chunks) first)"
        raise SharedPromptLayoutError(type(module).__name__, expected, "one that mixed tokens without the layout")
    guard.consume(module, running.layout)


def _wrapped(name: str, compute: Mixer) -> Make:
    def make(stock: Any) -> Mixer:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            running = _running.get()
            if running is None:
                return stock(*args, **kwargs)
            running.called.add(name)
            return compute(stock, running.layout, *args, **kwargs)

        return replacement

    return make
