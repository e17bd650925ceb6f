# SPDX-License-Identifier: BSD-3-Clause
"""Core attention of Megatron-Core's layers on packed rows, and a layer spec that has it."""

from __future__ import annotations

import copy
import functools
from typing import Any, NamedTuple

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from ... import checks, guard
from ...errors import SharedPromptError, SharedPromptLayoutError
from ...packed_attention import shared_prompt_attention
from ...parallel.context import ContextLayout, context_parallel_attention
from .params import SharedPackedSeqParams

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


class AttentionSettings(NamedTuple):
    """Settings of a layer's attention, in addition to its sinks.

    Attributes:
        scale: of the scores.
        window: a row sees so many positions of its sequence, its own the last; None for all.
        head_dim_v: of the values that the layer wants, which MLA pads.
        backend: of `shared_prompt_attention`.
    """

    scale: float
    window: int | None
    head_dim_v: int
    backend: str

    @staticmethod
    def of(attention: Any, backend: str) -> AttentionSettings:
        """From an attention layer, by the rules of Megatron's own core attentions.

        Raises:
            SharedPromptError: a window after the row's own position.
        """
        config = attention.config
        # MLA's layers have a scale; others leave the default to their core attention.
        scale = getattr(attention, "softmax_scale", None) or config.softmax_scale
        window = None
        if is_layer_window_attention(config.window_size, config.window_attn_skip_freq, attention.layer_number):
            left, right = config.window_size
            if right > 0:
                raise SharedPromptError("window_size", "(keys before the own one, 0)", config.window_size)
            window = left + 1 if left >= 0 else None
        return AttentionSettings(
            scale=attention.key_hidden_size**-0.5 if scale is None else float(scale),
            window=window,
            head_dim_v=attention.val_hidden_size,
            backend=backend,
        )


class OnPackedRows:
    """Over a class of core attention: computes calls that have a layout."""

    dualkv: AttentionSettings

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
        **others: Any,
    ) -> Tensor:
        """query (T, H, d), key (T, H_k, d), value (T, H_k, d_v) of this rank's heads -> (T, H, d_v)."""
        if not isinstance(packed_seq_params, SharedPackedSeqParams):
            stock: Any = super()
            others |= dict(attention_bias=attention_bias, packed_seq_params=packed_seq_params)
            return stock.forward(query, key, value, attention_mask, attn_mask_type=attn_mask_type, **others)
        module: Any = self
        if not hasattr(module, "dualkv"):
            raise SharedPromptLayoutError("core attention", "install(model_chunks) first", "none")
        mask_type = module.attn_mask_type if attn_mask_type is None else attn_mask_type
        if mask_type not in _CAUSAL:
            raise SharedPromptError("attn_mask_type", "causal with a shared prompt", mask_type)
        given = dict(attention_mask=attention_mask, attention_bias=attention_bias, **others)
        unknown = [name for name, value in given.items() if value is not None]
        if unknown:
            raise SharedPromptError("core attention", "a layout in place of all masks", ", ".join(unknown))
        layout, settings = packed_seq_params.layout, self.dualkv
        if layout.device != query.device:
            layout = layout.to(query.device)
        guard.consume(module, layout)
        options: dict[str, Any] = dict(
            softmax_scale=settings.scale,
            sliding_window=settings.window,
            sinks=_sinks(module, query),
            backend=settings.backend,
            deterministic=module.config.deterministic_mode,
        )
        value = value[..., : settings.head_dim_v]
        if isinstance(layout, ContextLayout):
            return context_parallel_attention(query, key, value, layout, **options)
        return shared_prompt_attention(query, key, value, layout, **options)


def _sinks(module: Any, query: Tensor) -> Tensor | None:
    """(H,) of this rank's heads. Transformer Engine keeps them in a shape of its own, and zeros to itself."""
    kind = module.config.softmax_type
    if kind == "vanilla":
        return None
    return query.new_zeros(query.shape[1]) if kind == "off-by-one" else module.softmax_offset.flatten()


class SharedPromptAttention(OnPackedRows, DotProductAttention):
    """Core attention for layer specs of one's own; models still need `install(model_chunks)`.

    Without a layout it is Megatron's local one, for MLA's head dimensions too, which the local one does not take. With
    context parallelism there is no attention without a layout: the local one would see only a rank's rows.
    """

    def __init__(
        self, config: Any, *args: Any, k_channels: int | None = None, v_channels: int | None = None, **kwargs: Any
    ) -> None:
        # The local one refuses to be built for context parallelism.
        undivided = copy.copy(config)
        undivided.context_parallel_size = 1
        super().__init__(undivided, *args, **kwargs)
        self.config = config
        if v_channels is not None:
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    def forward(self, *args: Any, packed_seq_params: Any = None, **kwargs: Any) -> Tensor:
        if self.config.context_parallel_size > 1 and not isinstance(packed_seq_params, SharedPackedSeqParams):
            expected = "SharedPackedSeqParams with context parallelism (or layers of Transformer Engine)"
            raise SharedPromptLayoutError("packed_seq_params", expected, checks.describe(packed_seq_params))
        return super().forward(*args, packed_seq_params=packed_seq_params, **kwargs)  # type: ignore[misc]


@functools.wraps(get_gpt_layer_local_spec)
def get_gpt_layer_shared_prompt_spec(*args: Any, **kwargs: Any) -> Any:
    """Megatron's `get_gpt_layer_local_spec` with our core attention: no Transformer Engine, no apex.

    Args, Returns: those of Megatron's. Models that are made by it still need `install(model_chunks)`.
    """
    spec = get_gpt_layer_local_spec(*args, **kwargs)
    spec.submodules.self_attention.submodules.core_attention = SharedPromptAttention
    return spec
