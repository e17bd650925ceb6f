# SPDX-License-Identifier: BSD-3-Clause
"""Megatron's gated delta nets (Qwen3-Next, Qwen3.5) on packed rows: a node's state starts from its parent's.

The layer's forward is Megatron's own, so that projections, gates, norms and what is recomputed of them are those of its
version. Two functions in it look along the sequence, both of flash-linear-attention: the convolution, a global name of
its file, and the rule, an attribute of the layer. They are wrapped: while a layer with a layout runs, ours call them.
With sequence parallelism the projection before them has gathered all rows.
"""

from __future__ import annotations

import sys
from contextvars import ContextVar
from typing import Any, NamedTuple

from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from torch import Tensor

from ... import guard
from ...errors import SharedPromptLayoutError
from ...layout import SharedPromptLayout
from ..common.patching import Make, replace_all
from ..recurrences.mixers import Mixer, gated_delta_rule, row_convolution
from .params import SharedPackedSeqParams

_CONVOLUTION, _RULE = "causal_conv1d", "gated_delta_rule"


class _Running(NamedTuple):
    """A layer while it runs in this thread, and which functions it has called."""

    layout: SharedPromptLayout
    called: set[str]


_running: ContextVar[_Running | None] = ContextVar("dualkv_running_delta_net", default=None)


class OnNodes:
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
        module: Any = self
        stock: Any = super()
        result: tuple[Tensor, Tensor | None]
        if not isinstance(packed_seq_params, SharedPackedSeqParams):
            inputs = hidden_states, attention_mask, inference_context, packed_seq_params
            return stock.forward(*inputs, *others, **options)
        running = _Running(packed_seq_params.layout, set())
        before = _running.set(running)
        try:
            # No packed_seq_params: the forward would read their ends twice, and wait for the GPU.
            result = stock.forward(hidden_states, attention_mask, inference_context, None, *others, **options)
        finally:
            _running.reset(before)
        missing = {_CONVOLUTION, _RULE} - running.called
        if missing:
            expected = f"a forward that calls {' and '.join(sorted(missing))} (install(model_chunks) first)"
            raise SharedPromptLayoutError(type(module).__name__, expected, "one that mixed tokens without the layout")
        guard.consume(module, running.layout)
        return result


def prepare(layers: list[Any]) -> None:
    """Wrap the functions of gated delta nets that look along the sequence, once; calls without a layout do not change.

    Raises:
        SharedPromptUnsupportedError: a layer without them.
    """
    if layers:
        file = sys.modules[GatedDeltaNet.forward.__module__]
        rule = _wrapped(_RULE, gated_delta_rule)
        replace_all(
            [(file, _CONVOLUTION, _wrapped(_CONVOLUTION, row_convolution)), *((one, _RULE, rule) for one in layers)]
        )


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
