# SPDX-License-Identifier: BSD-3-Clause
"""The masks of models on a registered attention: built only for attention layers that have no layout."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import causal_mask_function, sdpa_mask

from ... import guard
from ...errors import SharedPromptUnsupportedError
from ..common.patching import closure_of

# Building blocks of transformers' masks for causal and sliding-window attention of packed rows. A
# layout stands for no other mask (blocks, chunks, images that see themselves both ways).
_WINDOW = "sliding_window_overlay.<locals>.inner_mask"
_CAUSAL_MASKS = frozenset(
    {
        "and_masks.<locals>.and_mask",
        "causal_mask_function",
        "packed_sequence_mask_function.<locals>.inner_mask",
        "remap_positions_for_packed_sequence.<locals>.inner_mask",
        _WINDOW,
    }
)


class _MaskError(SharedPromptUnsupportedError, AttributeError):
    """Raised when the mask of a forward with a layout is read. An AttributeError, so that `hasattr` answers no."""


class DeferredMask:
    """Stands for the mask of a packed row, T x T elements, which is built only when something reads it.

    Attention layers with a layout do not. To stock attention, and to models that compute with it, this is the mask.
    """

    def __init__(
        self, builder: Callable[..., Any], arguments: dict[str, Any], like: DeferredMask | None = None
    ) -> None:
        self._builder = builder
        self._arguments = arguments
        self._found: tuple[list[str], int | None] | None = None if like is None else like._found
        self._mask: Tensor | None = None
        self._is_built = False
        self._uses: _Uses = _Uses() if like is None else like._uses
        self._moved: dict[torch.device, DeferredMask] = {}

    @property
    def others(self) -> list[str]:
        """Mask functions other than causality and windows."""
        return self._read()[0]

    @property
    def window(self) -> int | None:
        """The sliding window, or None: of the whole mask, or of a part of it."""
        return self._read()[1]

    def _read(self) -> tuple[list[str], int | None]:
        """Other mask functions and the window; computed once for all layers."""
        if self._found is None:
            parts = _parts(self._arguments.get("mask_function", causal_mask_function))
            windows = self._arguments.get("local_size"), closure_of(parts.get(_WINDOW)).get("sliding_window")
            found = min((one for one in windows if one is not None), default=None)
            self._found = sorted(parts.keys() - _CAUSAL_MASKS), found
        return self._found

    @property
    def is_causal(self) -> bool:
        """True if it is a causal mask; transformers makes bidirectional ones through the same function."""
        return "allow_is_bidirectional_skip" not in self._arguments

    def build(self) -> Tensor | None:
        """The built mask: for sdpa (1, 1, T, T) bool, or None if it is plainly causal; built once for all layers."""
        if not self._is_built:
            self._mask = self._builder(**self._arguments)
            self._is_built = True
        return self._mask

    def replace(self) -> None:
        """Note that an attention layer takes a layout in its stead; an error if another layer has read it."""
        self._uses.is_replaced = True
        if self._uses.is_read:
            raise self._error()

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """The mask for layers on another device, which accelerate's hooks ask for: no layer has read it yet."""
        parsed: tuple[Any, ...] = torch._C._nn._parse_to(*args, **kwargs)
        device, dtype, _, layout = parsed
        if device is None or dtype is not None or layout is not None:
            return self._tensor().to(*args, **kwargs)
        if device not in self._moved:
            builder = functools.partial(_built_on, device, self._builder)
            self._moved[device] = DeferredMask(builder, self._arguments, like=self)
        return self._moved[device]

    @staticmethod
    def _error() -> _MaskError:
        expected = "a model that leaves its mask to its attention layers, which all run on a registered attention"
        return _MaskError("model", expected, "one that computes with the mask itself")

    def _tensor(self, **changes: Any) -> Tensor:
        """The mask for a model that reads it: there is one, even if it is plainly causal."""
        if guard.current() is not None or self._uses.is_replaced:
            raise self._error()
        self._uses.is_read = True
        return self._builder(**{**self._arguments, "allow_is_causal_skip": False, **changes})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # wrappers inspect arguments this way
            raise AttributeError(name)
        return getattr(self._tensor(), name)

    def __getitem__(self, index: Any) -> Any:
        """A part of the mask, or all of it. Of models that drop rows, only the rows that are left are built."""
        parts = index if isinstance(index, tuple) else (index,)
        if all(map(_is_whole, parts)):
            return self
        queries = self._arguments.get("q_length")  # missing in older versions
        is_of_rows = len(parts) == 4 and isinstance(parts[2], slice) and parts[2].step is None
        if queries is None or not is_of_rows or not all(map(_is_whole, (*parts[:2], parts[3]))):
            return self._tensor()[index]
        begin, end, _ = parts[2].indices(queries)
        return self._tensor(q_length=max(end - begin, 0), q_offset=self._arguments.get("q_offset", 0) + begin)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        def plain(one: Any) -> Any:
            return one._tensor() if isinstance(one, cls) else one

        return function(*map(plain, args), **{name: plain(one) for name, one in (kwargs or {}).items()})


@dataclass
class _Uses:
    """Record of the use of a mask, on all devices."""

    is_read: bool = False  # by anything but this package's attention
    is_replaced: bool = False  # by a layout, in at least one layer


def _built_on(device: torch.device, builder: Callable[..., Any], /, **arguments: Any) -> Any:
    mask = builder(**arguments)
    return mask.to(device) if isinstance(mask, Tensor) else mask


def _is_whole(index: Any) -> bool:
    return isinstance(index, slice) and index in (slice(None), slice(0, None))


def _parts(mask_function: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The functions that a mask function is made of, by their names."""
    pending = [mask_function]
    found: dict[str, Callable[..., Any]] = {}
    while pending:
        function = pending.pop()
        # getattr() with a default always returns the default in TorchDynamo of PyTorch 2.11.
        name = function.__qualname__ if isinstance(function, FunctionType) else type(function).__name__
        inner = _functions(closure_of(function))
        alternatives = [one for one in inner if not _is_without_blocks(one)]
        # Masks of images are dropped for rows of text.
        if name == "or_masks.<locals>.or_mask" and len(alternatives) == 1:
            pending += alternatives
            continue
        found[name] = function
        pending += inner
    return found


def _functions(values: dict[str, Any]) -> list[Callable[..., Any]]:
    parts = [one for value in values.values() for one in (value if isinstance(value, tuple) else (value,))]
    return [one for one in parts if callable(one)]


def _is_without_blocks(function: Callable[..., Any]) -> bool:
    """True if a function shows the tokens of a block to each other and there is no block: all are text, -1."""
    blocks = closure_of(function).get("block_sequence_ids")
    return isinstance(blocks, Tensor) and not (blocks >= 0).any()


def deferred_mask(
    batch_size: int,
    *,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Any = None,
    **kwargs: Any,
) -> Any:
    """Mask function of a registered name: sdpa's mask, later if the call might have a layout.

    Only a forward of one row without padding and cache can have one; then transformers gives no 2-D mask.
    """
    if isinstance(attention_mask, DeferredMask):  # generate() has made it, for a static cache
        return attention_mask
    arguments = dict(batch_size=batch_size, mask_function=mask_function, attention_mask=attention_mask, **kwargs)
    if batch_size == 1 and attention_mask is None and not _has_past(arguments) and not _is_skipped(arguments):
        return DeferredMask(sdpa_mask, arguments)
    mask = marked(sdpa_mask(**arguments))
    # Layers with others' keys may get the last rows alone: None would be causal from the first.
    drops_rows = bool(getattr(kwargs.get("config"), "num_kv_shared_layers", 0))
    # The offset may be a static cache's counter, which layers move before the mask is built.
    return DeferredMask(sdpa_mask, {**arguments, "q_offset": 0}) if mask is None and drops_rows else mask


def marked(mask: Any) -> Any:
    """A mask that transformers has made of positions and padding, with a mark of that.

    It knows nothing of shared prompts, while a mask of the caller's own, which does not come here, may stand for a
    layout.
    """
    if isinstance(mask, Tensor) and not torch.compiler.is_compiling():
        _whole(mask).dualkv_made = True
    return mask


def is_marked(mask: Any) -> bool:
    """True if a mask, or what it is a view of, has this mark."""
    return isinstance(mask, Tensor) and hasattr(_whole(mask), "dualkv_made")


def _whole(tensor: Tensor) -> Any:
    return tensor._base if tensor._is_view() else tensor


def _has_past(arguments: dict[str, Any]) -> bool:
    """True if there are more keys than queries: a cache, in which layers may count on before the mask is built."""
    queries = arguments.get("q_length")  # missing in older versions
    return bool(arguments["kv_length"] != (len(arguments["cache_position"]) if queries is None else queries))


def _is_skipped(arguments: dict[str, Any]) -> bool:
    """True if sdpa_mask builds nothing of T x T elements: of one plainly causal sequence, unless it is compiled."""
    is_plain = arguments["mask_function"] is causal_mask_function and arguments.get("local_size") is None
    return is_plain and bool(arguments.get("allow_is_causal_skip", True)) and not torch.compiler.is_compiling()
