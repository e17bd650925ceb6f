# SPDX-License-Identifier: BSD-3-Clause
"""The hook that brings a layout to a model's backbone and sees that every attention layer has got it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ... import checks, guard
from ...errors import SharedPromptError, SharedPromptLayoutError
from ...layout import SharedPromptLayout, check_unpacked
from .admission import check, table, unwrap
from .hybrid import prepare
from .images import check_row_images, drop_layout, towers_of
from .patches import check_labels

# Outputs of towers (vision, audio), which are no result of the row.
_OF_TOWERS = re.compile(r"^(image|video|audio|vision)_")


def install_layout_hook(model: nn.Module, *, self_check: bool = True, share_lora_dropout: bool = False) -> LayoutHook:
    """Guard every forward of a model that has a layout, and pass the layout on to its backbone.

    The layout is the keyword argument `shared_prompt_layout` or, if something between the caller and the model drops
    unknown arguments, that of the enclosing `expect_shared_prompt`. The backbone (`model.model` of a causal LM) gets it
    even if the causal LM around it drops it. Install it before the model is wrapped or sharded. Layers of hybrid models
    get hooks of their own, which stay, and do nothing without a layout. A copied or pickled model has its own.

    Args:
        model: a causal LM, its backbone, or another model with one output a token; adapters included.
        self_check: try a pair of short sequences before the first forward in each mode and with each set of active
            adapters. A forward without a layout counts too, so that all ranks try it
            together; what is found refuses only forwards with one.
        share_lora_dropout: in training mode, let LoRA's dropout draw one mask for the one copy of a prompt: another
            regulariser than that of stock training, and not exact.

    Returns:
        A handle whose `remove()` takes the hook away.

    Raises:
        SharedPromptError: the model is not supported. From a forward: its head gives one value
            for the whole row; the model draws random numbers or is not exact with its present adapters. Labels without
            shift_labels, which the model would shift by a row.
        SharedPromptLayoutError: from a forward, when an attention layer has not consumed the layout, when the positions
            are not those of the layout's batch or the ids are another one's, or when either come without a layout.
    """
    stock = unwrap.causal_lm_of(model)
    table.check_supported(stock.config)
    name = unwrap.backbone_name(stock)
    modules = [stock] if name is None else [stock, getattr(stock, name)]
    table.check_positions(modules[-1])
    prepare(stock)
    first_use = dict(self_check=self_check, share_lora_dropout=share_lora_dropout)
    for name, value in first_use.items():
        checks.flag(name, value)
    return LayoutHook(modules, table.num_mixing_layers(stock), first_use)


def _check_inputs(layout: Any, inputs: dict[str, Any], model: nn.Module) -> None:
    """Refuse a forward with a layout whose positions or labels the model would make or shift by itself."""
    checks.instance("shared_prompt_layout", layout, SharedPromptLayout, " (batch.layout)")
    position_ids = inputs.get("position_ids")
    if position_ids is None:
        expected = "batch.position_ids[None] with a shared prompt"
        raise SharedPromptLayoutError("position_ids", expected, "none, so that the model would count rows")
    table.check_one_row(position_ids)
    layout.check_positions(position_ids)
    layout.check_ids(inputs.get("input_ids"))
    table.check_length(model, layout.max_sequence)
    check_labels(inputs.get("labels"), inputs.get("shift_labels"))
    check_row_images(model, position_ids, inputs)


def _check_output(output: Any, layout: SharedPromptLayout, inputs: dict[str, Any]) -> None:
    """Refuse what a forward with a layout has computed from the row as a whole, which is none of any sequence's.

    A backbone, a causal LM's head and token classification (critics, reward models a token) give something for each
    row of the pack. Sequence classification, double heads and poolers choose one row or average all of them. Which is
    which shows in the shape of what comes out, whatever the class is called.

    Args:
        output: of the model: one of transformers' outputs, a tuple or a tensor.
        layout: of the forward.
        inputs: its arguments by their names.

    Raises:
        SharedPromptError: a floating-point tensor that has no dimension of rows; a loss of labels that were not given.
    """
    if isinstance(output, Mapping) and output.get("loss") is not None and inputs.get("shift_labels") is None:
        expected = "that of shift_labels=batch.labels[None] with a shared prompt"
        raise SharedPromptError("loss", expected, f"one of other labels of {type(output).__name__}")
    kept = inputs.get("logits_to_keep")
    rows = [layout.num_local_tokens, kept.numel() if isinstance(kept, Tensor) else kept]
    for name, one in _results(output):
        # Integers are no results (offsets of positions, for example); losses have no dimension.
        if one.dim() == 0 or not one.is_floating_point():
            continue
        if not any(size in rows for size in one.shape[: max(2, one.dim() - 1)]):
            expected = "one value for each row of the packed batch (a backbone, a causal LM, token classification)"
            advice = "one for the whole row, in which all sequences lie (give each a row of its own, without a layout)"
            raise SharedPromptError(f"{name} of the model", expected, f"shape {tuple(one.shape)}: {advice}")


def _results(output: Any) -> list[tuple[str, Tensor]]:
    """The tensors of an output, and those of tuples in it; caches are objects or lie deeper."""
    named = output.items() if isinstance(output, Mapping) else enumerate(_parts(output))
    values = [(str(name), one) for name, value in named for one in _parts(value)]
    return [(name, one) for name, one in values if isinstance(one, Tensor) and not _OF_TOWERS.match(name)]


def _parts(value: Any) -> Any:
    return value if isinstance(value, (tuple, list)) else (value,)


class LayoutHook:
    """State of `install_layout_hook`: on a causal LM and on its backbone, or on a backbone alone.

    The hooks are methods: a model with them can be pickled, and a copy of it has a copy of this object.
    """

    def __init__(self, modules: list[nn.Module], layers: int, first_use: dict[str, bool]) -> None:
        self._outermost = modules[0]
        self._layers = layers
        self._first_use = first_use  # options of `check_first_use`
        self._tried: set[bool] = set()  # modes in which forwards without a layout were tried
        # Argument names of the forwards, without self.
        self._parameters = {type(one): tuple(inspect.signature(type(one).forward).parameters)[1:] for one in modules}
        self._handles: list[RemovableHandle] = []
        for one in modules:
            self._handles.append(one.register_forward_pre_hook(self._before, with_kwargs=True))
            self._handles.append(one.register_forward_hook(self._after, with_kwargs=True, always_call=True))
        for tower in towers_of(modules[0]):
            self._handles.append(tower.register_forward_pre_hook(drop_layout, with_kwargs=True))

    def remove(self) -> None:
        """Remove the hook."""
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        self._end_interrupted(module)
        given, outer = kwargs.get("shared_prompt_layout"), guard.current()
        layout = given if given is not None or outer is None else outer.layout
        inputs = self._inputs(module, args, kwargs)
        if layout is None:
            check_unpacked(*(inputs.get(name) for name in ("position_ids", "attention_mask", "input_ids")))
            if module is self._outermost and module.training not in self._tried:
                with suppress(SharedPromptError):
                    self._try(module, inputs)
            return None
        _check_inputs(layout, inputs, self._outermost)
        if outer is None or outer.owner != (self, self._outermost):
            self._try(module, inputs)
        if outer is None:
            guard.begin(layout, self._layers, owner=(self, module))
        return (args, {**kwargs, "shared_prompt_layout": layout}) if given is None else None

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        expectation = guard.current()
        own = expectation if expectation is not None and expectation.owner == (self, module) else None
        if own is not None:
            guard.end(own)
        if output is None:  # the forward raised, with an error that says more
            return
        if own is not None:
            own.check()
        layout = kwargs.get("shared_prompt_layout")
        if layout is not None and not unwrap.is_replaced(module):
            _check_output(output, layout, self._inputs(module, args, kwargs))

    def _try(self, module: nn.Module, inputs: dict[str, Any]) -> None:
        """SharedPromptError if the model cannot share prompts in its present mode and with its present adapters."""
        if unwrap.is_replaced(module):  # inside shared_prompt_forward, which has checked
            return
        self._tried.add(module.training)
        given = [inputs.get(name) for name in ("input_ids", "inputs_embeds")]
        device = next((one.device for one in given if isinstance(one, Tensor)), torch.device("cpu"))
        check.check_first_use(module, device, **self._first_use)

    def _inputs(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments of a forward by their names."""
        # The class may be FSDP2's, derived from the model's.
        names = next(self._parameters[kind] for kind in type(module).__mro__ if kind in self._parameters)
        return {**dict(zip(names, args)), **kwargs}

    def _end_interrupted(self, module: nn.Module) -> None:
        """Forget the expectations of forwards that have not come to their end: PyTorch runs no hook after Ctrl-C.

        `module` begins a forward; it cannot be inside another one of its own, nor of a module that lies within it.
        """
        while (expectation := guard.current()) is not None:
            owner = expectation.owner
            is_own = isinstance(owner, tuple) and owner[0] is self and unwrap.holds(module, owner[1])
            if not is_own:
                return
            guard.end(expectation)
