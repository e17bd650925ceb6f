# SPDX-License-Identifier: BSD-3-Clause
"""Attention functions of transformers' interface that take a layout: names of our own, and stock names wrapped."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from ... import checks, guard
from ...errors import SharedPromptError, SharedPromptLayoutError, SharedPromptUnsupportedError
from ...kernels import max_head_dim
from ...layout import SharedPromptLayout, check_unpacked
from ...packed_attention import BACKENDS, shared_prompt_attention
from ...parallel.sharded import DividedLayout
from ...pieces import Layer, PieceLayout
from ..common.patching import in_place_of, stock_of
from . import patches
from .admission.table import TAKES_LAYOUT, check_one_row
from .hybrid.layout_context import check_running
from .masks import DeferredMask, deferred_mask, is_marked, marked
from .rope import rope_of_ranks

FALLBACKS = ("auto", "sdpa", "eager")
# Keyword arguments of attention functions that do not change what a token attends to. Others are
# refused: an argument that is ignored here might be a mask or a bias of the model.
_HARMLESS = frozenset((
    "cache_position", "config", "labels", "layer_idx", "logits_to_keep", "num_items_in_batch", "output_attentions",
    "output_hidden_states", "output_router_logits", "position_embeddings", "position_ids", "return_dict",
    "return_loss", "shift_labels", "use_cache",
))  # fmt: skip
# Scores and softcaps that sdpa does not have, under the names by which model files hand them on.
_BEYOND_SDPA = ("softcap", "s_aux", "sinks")
# Argument for keys that an indexer chose; for stock names alone model files put it into the mask.
_CHOSEN_KEYS = ("indices", "block_indices")


def register(name: str = "dualkv", fallback: str = "auto", *, backend: str = "auto") -> None:
    """Make `attn_implementation=name` available to all models of this process, under every transformers version.

    Args:
        name: must not contain "flash": transformers takes such names for packages of kernels.
        fallback: attention of calls without a layout: "sdpa", "eager" (the model's own), or "auto": sdpa, but eager
            where the model has a softcap or attention sinks, which sdpa lacks. Results are those of the stock one.
        backend: of `shared_prompt_attention`: "reference" computes in PyTorch what the kernels do not offer.

    Raises:
        SharedPromptError: an argument is not as described.
    """
    if not isinstance(name, str) or not name or "flash" in name:
        raise SharedPromptError("name", 'a name without "flash" in it', repr(name))
    if name in ("eager", "sdpa", "flex_attention"):
        raise SharedPromptError("name", "a name of its own (wrap() extends a stock attention)", repr(name))
    checks.choice("fallback", fallback, FALLBACKS)
    checks.choice("backend", backend, BACKENDS)

    stock = functools.partial(_attend_without_layout, fallback)
    AttentionInterface.register(name, _taking_layouts(stock, backend))
    AttentionMaskInterface.register(name, deferred_mask)
    patches.own_names[name] = fallback
    patches.install()
    _refuse_layouts_elsewhere()


def wrap(names: Iterable[str] = ("flash_attention_2", "flash_attention_3", "sdpa"), *, backend: str = "auto") -> None:
    """Let stock attention implementations take a layout, for programs that insist on their names.

    Calls without a layout go to the stock function unchanged. With "sdpa", pass the layout through
    `shared_prompt_forward`, `expect_shared_prompt` or a backbone that has `install_layout_hook`: transformers would
    build a mask of T x T elements for packed positions, and only these can tell that none is needed. Wrapping twice
    changes nothing but the backend.

    Args:
        names: registered attention implementations; not "eager", which every model file defines for itself.
        backend: of `shared_prompt_attention`.

    Raises:
        SharedPromptError: a name is not registered, or is "eager"; an unknown backend.
    """
    checks.choice("backend", backend, BACKENDS)
    names = (names,) if isinstance(names, str) else tuple(checks.items("names", names, "names"))
    known = AttentionInterface._global_mapping
    for name in names:
        if not isinstance(name, str) or name == "eager" or name not in known:
            raise SharedPromptError("names", f"one of {', '.join(sorted(set(known) - {'eager'}))}", repr(name))
    for name in names:
        stock = stock_of(known[name])
        AttentionInterface.register(name, in_place_of(stock, _taking_layouts(stock, backend)))
        stock_mask = AttentionMaskInterface._global_mapping.get(name)
        if stock_mask is not None and not hasattr(stock_mask, "dualkv_stock"):
            AttentionMaskInterface.register(name, in_place_of(stock_mask, _wrapped_mask(stock_mask)))
    patches.install()
    _refuse_layouts_elsewhere()


# --- with a layout --------------------------------------------------------------------------------


def _attend(
    module: nn.Module,
    tensors: tuple[Tensor, Tensor, Tensor],
    attention_mask: Any,
    layout: SharedPromptLayout,
    backend: str,
    kwargs: dict[str, Any],
) -> tuple[Tensor, None]:
    """Attention of one layer: query (1, H, T, d), key and value (1, H_k, T, d) -> (1, T, H, d_v)."""
    query, key, value = tensors
    scaling, softcap, s_aux = (kwargs.pop(name, None) for name in ("scaling", "softcap", "s_aux"))
    window = _window(attention_mask, kwargs.pop("sliding_window", None))
    _check_call(module, query, key, layout, attention_mask, kwargs)
    if layout.device != query.device:  # layers of a model may be on several devices
        layout = layout.to(query.device)
    check_one_row(kwargs.get("position_ids"))
    layout.check_positions(kwargs.get("position_ids"))
    check_running(module)
    guard.consume(module, layout)
    q, k, v = (one[0].transpose(0, 1) for one in (query, key, value))
    q, k = _in_type_of(v, q, k)
    scaling = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
    widest = max(q.shape[-1], v.shape[-1])
    if widest > checks.PORTABLE_HEAD_DIM:
        most = checks.MAX_HEAD_DIM if backend == "reference" else max_head_dim(v.device)
        if widest > most:
            raise SharedPromptUnsupportedError("head_dim", f"at most {most} with a shared prompt", widest)
    tensors = _widen(q), _widen(k), _widen(v)
    options: dict[str, Any] = dict(
        softmax_scale=scaling, sliding_window=window, softcap=softcap, sinks=s_aux, backend=backend
    )
    if isinstance(layout, DividedLayout):
        if (lacking := rope_of_ranks(module.config, layout.max_sequence)) is not None:
            raise SharedPromptUnsupportedError(lacking)
        out = layout.attention(*tensors, **options)
    elif isinstance(layout, PieceLayout):
        out = layout.attention(*tensors, layer=_layer_of(module), **options)
    else:
        out = shared_prompt_attention(*tensors, layout, **options)
    return out[None, :, :, : v.shape[-1]], None


def _layer_of(module: nn.Module) -> Layer:
    """A layer, and the one whose keys it has: in Gemma 3n and 4 the last layers have those of earlier ones."""
    attention: Any = module
    name = getattr(module, "layer_idx", None)
    name = id(module) if name is None else name
    # Files that have no index of that layer hand keys on by the type of layers.
    by_index = hasattr(module, "kv_shared_layer_index")
    if getattr(module, "is_kv_shared_layer", False) and not hasattr(module, "k_proj"):
        return Layer(name, attention.kv_shared_layer_index if by_index else attention.layer_type, False)
    hands_on = getattr(module, "store_full_length_kv", False) and not by_index
    return Layer(name, attention.layer_type if hands_on else name, True)


def _in_type_of(value: Tensor, *others: Tensor) -> Iterator[Tensor]:
    """q and k in the type that the model computes in, which v has: norms behind their projections may be in float32."""
    return (one.to(value.dtype) for one in others)


def _widen(tensor: Tensor) -> Tensor:
    """Zeros beyond the head dimension change no score; those of v are columns of the output that are cut off."""
    missing = -tensor.shape[-1] % checks.HEAD_DIM_MULTIPLE
    return functional.pad(tensor, (0, missing)) if missing else tensor


def _window(attention_mask: Any, sliding_window: int | None) -> int | None:
    """The layer's window: what the model passes, or where it has the window only in its mask, that of the mask."""
    if not isinstance(attention_mask, DeferredMask):
        return sliding_window
    if sliding_window is not None and sliding_window != attention_mask.window:
        # Stock implementations would disagree here: some look at the argument, others at the mask.
        raise SharedPromptError("sliding_window", f"{attention_mask.window} (as the mask)", sliding_window)
    return attention_mask.window


def _check_call(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    layout: SharedPromptLayout,
    attention_mask: Any,
    kwargs: dict[str, Any],
) -> None:
    """SharedPromptError if the call is anything but plain causal attention of the layout's packed row."""
    checks.instance("shared_prompt_layout", layout, SharedPromptLayout, " (batch.layout)")
    if query.shape[0] != 1 or query.shape[2] != layout.num_queries:
        expected = f"1 row of {layout.num_queries} tokens (as the layout)"
        raise SharedPromptError("input_ids", expected, f"{query.shape[0]} of {query.shape[2]}")
    if key.shape[2] != layout.num_local_tokens:
        got = f"{key.shape[2]} keys for {query.shape[2]} queries"
        raise SharedPromptError("shared_prompt_layout", "no KV cache and no virtual tokens", got)
    if isinstance(attention_mask, Tensor):
        expected = (
            "None with a layout (under a wrapped sdpa: a call through shared_prompt_forward, expect_shared_prompt or "
            "install_layout_hook)"
        )
        raise SharedPromptError("attention_mask", expected, f"shape {tuple(attention_mask.shape)}")
    dropout = kwargs.pop("dropout", 0.0)
    if dropout:
        raise SharedPromptError("dropout of attention", "0 with a shared prompt", dropout)
    is_causal = kwargs.pop("is_causal", None)
    if isinstance(attention_mask, DeferredMask):
        attention_mask.replace()
        if attention_mask.others and attention_mask.is_causal:
            expected, others = "a causal or sliding-window one with a layout", ", ".join(attention_mask.others)
            raise SharedPromptError("attention_mask", expected, f"one made of {others}")
        # The mask decides: some models pass is_causal=False with it, for sdpa's sake.
        is_causal = attention_mask.is_causal
    elif is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if not is_causal:
        raise SharedPromptError("is_causal", "True with a shared prompt", False)
    if kwargs.get("output_attentions"):
        raise SharedPromptError("output_attentions", "False (weights are never formed)", True)
    refuse_unknown(module, kwargs)


def refuse_unknown(module: nn.Module, kwargs: dict[str, Any]) -> None:
    """SharedPromptError for arguments of attention that nobody has taken and that may change what a token sees."""
    unknown = sorted({name for name, value in kwargs.items() if value is not None and value is not False} - _HARMLESS)
    if unknown:
        expected = "no arguments of attention that this library does not implement"
        raise SharedPromptError(type(module).__name__, expected, ", ".join(unknown))


# --- without a layout -----------------------------------------------------------------------------


def _attend_without_layout(
    fallback: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Stock attention on the mask that `deferred_mask` has made: None, bool, or a caller's own 4-D mask."""
    chosen = [name for name in _CHOSEN_KEYS if kwargs.get(name) is not None]
    if chosen:
        expected = "stock attention (sdpa or eager) for a model that chooses keys with an indexer"
        raise SharedPromptUnsupportedError("attn_implementation", expected, f"one that gets {chosen[0]}")
    beyond_sdpa = [name for name in _BEYOND_SDPA if kwargs.get(name) is not None]
    if fallback == "sdpa" and beyond_sdpa:
        expected = 'attention that sdpa offers (or register(fallback="eager"))'
        raise SharedPromptError("fallback", expected, ", ".join(beyond_sdpa))
    if fallback == "sdpa" or (fallback == "auto" and not beyond_sdpa):
        sdpa = AttentionInterface._global_mapping["sdpa"]
        query, key = _in_type_of(value, query, key)
        return sdpa(module, query, key, value, attention_mask, **kwargs)
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        expected = f"a model file with an eager attention ({type(module).__module__} has none)"
        raise SharedPromptError("fallback", expected, repr(fallback))
    return eager(module, query, key, value, _additive(attention_mask, query, key), **kwargs)


def _stock_mask(attention_mask: Any, kwargs: dict[str, Any]) -> Any:
    """The mask that stock attention takes; an error if it is for a packed row whose layout got lost."""
    # The guard counts layers that lost it. A compiled graph would break at it, in every layer.
    if not torch.compiler.is_compiling() and guard.current() is None:
        own = None if is_marked(attention_mask) else attention_mask
        check_unpacked(kwargs.get("position_ids"), own)
    return attention_mask.build() if isinstance(attention_mask, DeferredMask) else attention_mask


def _additive(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """sdpa's mask as eager attention takes it. None stands for causal there, unless there is one query."""
    queries, keys = query.shape[2], key.shape[2]
    if mask is None:
        if queries == 1:
            return None
        mask = torch.ones((1, 1, queries, keys), dtype=torch.bool, device=query.device).tril()
    if mask.dtype != torch.bool:
        return mask
    hidden = torch.finfo(query.dtype).min
    return torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(~mask, hidden)


# --- stock names ----------------------------------------------------------------------------------


def _refuse_layouts_elsewhere() -> None:
    """Let stock attention raise when it gets a layout, which it would drop: of a layer that was left on it, say."""
    for name, stock in list(AttentionInterface._global_mapping.items()):
        if not hasattr(stock, TAKES_LAYOUT) and not hasattr(stock, "dualkv_stock"):
            AttentionInterface.register(name, in_place_of(stock, _refusing_attention(name, stock)))


def _refusing_attention(name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("shared_prompt_layout") is not None:
            expected = "a registered or wrapped attention in every layer that gets a layout"
            raise SharedPromptLayoutError(type(module).__name__, expected, repr(name))
        return stock(module, *args, **kwargs)

    return attention


def _taking_layouts(without_layout: Callable[..., Any], backend: str) -> Any:
    """Attention under transformers' signature; calls without a layout go to the function given."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any,
        *args: Any,
        shared_prompt_layout: SharedPromptLayout | None = None,
        **kwargs: Any,
    ) -> Any:
        if shared_prompt_layout is None:
            return without_layout(module, query, key, value, _stock_mask(attention_mask, kwargs), *args, **kwargs)
        if args:
            raise SharedPromptError("attention", "options as keyword arguments", f"{len(args)} by position")
        return _attend(module, (query, key, value), attention_mask, shared_prompt_layout, backend, kwargs)

    setattr(attention, TAKES_LAYOUT, True)
    return attention


def _wrapped_mask(stock: Callable[..., Any]) -> Callable[..., Any]:
    def mask(*args: Any, **kwargs: Any) -> Any:
        if not args and guard.current() is not None and kwargs.get("attention_mask") is None:
            return DeferredMask(stock, kwargs)
        return marked(stock(*args, **kwargs))

    return mask
