# SPDX-License-Identifier: BSD-3-Clause
"""Drops unread rows before the last layers, which reuse the keys of earlier ones (Gemma 3n and 4).

In these models the last layers own no keys. What such a layer computes for a row is read by the same row's later layers
and by the head, and by no other row: a prompt, an observation or another turn that scores nothing is done where these
layers begin, forward and backward. Hooks on the layers take the other rows out of what a layer is given and hand it the
layout of these, `layout.late`, whose queries they are; after the last layer the rows that have left are filled, so that
everything else sees as many rows as ever.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ...data.batch import PackedBatch
from ...layout import SharedPromptLayout
from .admission import side_effects, unwrap

# Types of text models whose layers are known to work row by row but for attention.
MODEL_TYPES = ("gemma3n_text", "gemma4_text", "gemma4_unified_text")
# Arguments of their layers that have a row for each token, as the last dimension but one; when
# given by name.
_BY_ROW = ("hidden_states", "per_layer_input", "position_embeddings")
# Configuration fields: outputs of all rows that are kept, and routers, which may count rows.
_READING_ALL = ("output_hidden_states", "output_attentions", "output_router_logits", "enable_moe_block")
# Packages whose hooks read no rows, unless a field above asks for it.
_NOT_READING = (*side_effects.BOOKKEEPERS, "transformers.")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
# Value of rows that have left. With zeros gradients of norms by hand (Gemma 3n) would be NaN there.
_FILLER = 1.0


def late_layout(causal_lm: Any, batch: PackedBatch, rows: Tensor | None = None) -> SharedPromptLayout | None:
    """The `late` of a layout, by which rows that nobody reads leave before the late layers of a model.

    None where all rows must stay: the model has no such layers, or something else may read their rows (hidden states or
    routers' logits that the configuration asks for, a hook that is none of a package that shards or moves modules).

    Args:
        causal_lm: the transformers model.
        batch: of a forward.
        rows: (n,) int64, all that is read of the backbone's output; None for `batch.token_index`.
    """
    decoder = unwrap.decoder_of(causal_lm)
    if any(getattr(one, name, False) for one in (causal_lm.config, decoder.config) for name in _READING_ALL):
        return None
    layers = late_layers(decoder)
    if not layers or _is_watched(causal_lm, decoder.layers[: -len(layers)]):
        return None
    return batch.late_layout if rows is None else batch.layout.reading(rows)


def late_layers(decoder: Any) -> list[Any]:
    """The last layers of a decoder that own no keys; none where nothing is known of a model."""
    found: list[Any] = []
    # A foreign forward may run its layers several times.
    if decoder.config.model_type not in MODEL_TYPES or has_foreign_forward(decoder):
        return found
    for outermost in reversed(decoder.layers):
        # Inside of FSDP 1 and the like.
        layer: Any = next(one for one in outermost.modules() if isinstance(one, GradientCheckpointingLayer))
        # Before transformers 5 they have a projection, and use it unless there is a cache.
        if not getattr(layer.self_attn, "is_kv_shared_layer", False) or hasattr(layer.self_attn, "k_proj"):
            break
        found.insert(0, layer)
    return found


def has_foreign_forward(module: nn.Module) -> bool:
    """True if the forward of a module's class is none of transformers, also in what is wrapped around it."""
    return _is_foreign(inspect.unwrap(type(module).forward, stop=_is_foreign))


def _is_foreign(function: Any) -> bool:
    """True if a function is none of transformers, whatever it was named after."""
    return not str(getattr(function, "__globals__", {}).get("__name__")).startswith("transformers.")


def _is_watched(causal_lm: Any, early: Iterable[nn.Module]) -> bool:
    """True if a hook on a module may read rows that are to leave, or their gradients; early layers have them all."""
    skipped = {causal_lm.get_input_embeddings(), *early}
    pending: list[nn.Module] = [causal_lm]
    while pending:
        module = pending.pop()
        for hook in itertools.chain.from_iterable(getattr(module, name).values() for name in _HOOKS):
            if not side_effects.comes_from(hook, _NOT_READING):
                return True
        pending += [one for one in module.children() if one not in skipped]
    return False


def prepare(model: Any) -> None:
    """Let the late layers of a model take a layout with `late`; once, and for calls with such a layout only."""
    layers = late_layers(unwrap.decoder_of(model))
    for layer in layers:
        if _leave not in layer._forward_pre_hooks.values():
            layer.register_forward_pre_hook(_leave, with_kwargs=True)
    if layers and _fill not in layers[-1]._forward_hooks.values():
        layers[-1].register_forward_hook(_fill, with_kwargs=True)


def _leave(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
    """Hook before a layer: its inputs for the rows of `layout.late`, as far as they have all rows."""
    layout = kwargs.get("shared_prompt_layout")
    if layout is None or layout.late is None:
        return None
    late = layout.late
    named = {name: _of_rows(kwargs[name], late) for name in _BY_ROW if name in kwargs}
    return tuple(_of_rows(one, late) for one in args), {**kwargs, **named, "shared_prompt_layout": late}


def _of_rows(value: Any, late: SharedPromptLayout) -> Any:
    if isinstance(value, tuple):
        return tuple(_of_rows(one, late) for one in value)
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[-2] != late.num_tokens:
        return value
    return value.index_select(-2, _rows_on(late, value.device))


def _fill(layer: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
    """Hook after the last layer: as many rows as at first."""
    late = kwargs.get("shared_prompt_layout")
    if late is None or late.query_rows is None:
        return None
    if isinstance(output, tuple):  # in transformers 4
        return (_fill(layer, args, kwargs, output[0]), *output[1:])
    shape = (*output.shape[:-2], late.num_tokens, output.shape[-1])
    return output.new_full(shape, _FILLER).index_copy(-2, _rows_on(late, output.device), output)


def _rows_on(late: SharedPromptLayout, device: torch.device) -> Tensor:
    if late.device != device:  # layers of a model may be on several
        late = late.to(device)
    assert late.query_rows is not None
    return late.query_rows
