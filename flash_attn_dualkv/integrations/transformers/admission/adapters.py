# SPDX-License-Identifier: BSD-3-Clause
"""PEFT adapters that look at more than a token: what their configurations say, before any forward.

Most kinds change a weight or a token's own hidden state and are exact on shared prompts. Others look at the row as a
whole, and a packed row is one row of many sequences; or they draw random numbers, once for all copies of a prompt. Of
LoRA's dropout alone a caller may ask for that: a regulariser of its own, which no stock training has.
PEFT itself is not imported: its models are known by what they carry.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ....checks import explain
from ....errors import SharedPromptError

# Adapters that only their type reveals, and why they are not exact.
_BY_TYPE = {
    "ADAPTION_PROMPT": "its wrapper calls the forward that the model had when it was wrapped",
    "LILY": "its router takes the mean over all tokens of the row",
    "POLY": "it needs task_ids, one a row",
    "SHADOW": "its shadow model attends to the whole row, without the layout",
    "XLORA": "it runs the model once more in every forward and reads hidden states from that",
}
_ADVICE = ". Run batches without a shared prompt, or the model without this adapter"


def check_adapters(model: nn.Module) -> None:
    """Refuse a model with a PEFT adapter, active and enabled, that is not exact on shared prompts by its configuration.

    Args:
        model: with whatever is around it; adapters of PEFT and of transformers' own `add_adapter` are found in it.

    Raises:
        SharedPromptError: names the adapter, the setting, and what it does.
    """
    reasons = {
        name: reason
        for module in _outer_modules(model)
        for name, config in _configurations(module).items()
        if (reason := _reason(config, model.training)) is not None
    }
    if not reasons:  # LoRA, for example: its layers, which are many, need not be looked at
        return
    active = sorted(reasons.keys() & _active_adapters(model))
    if active:
        expected = "one that changes a token by this token alone and draws no random numbers"
        raise SharedPromptError(explain(f"PEFT adapter {active[0]!r}", expected, reasons[active[0]]) + _ADVICE)


def _reason(config: Any, training: bool) -> str | None:
    """The setting of an adapter that is not exact on shared prompts, and what it does; None if all are."""
    peft_type = getattr(config, "peft_type", None)  # a string where it is not PEFT's own enumeration
    kind = str(getattr(peft_type, "value", peft_type))
    if getattr(config, "is_prompt_learning", False):
        return f"peft_type={kind} (it puts virtual tokens in front of each row)"
    if kind in _BY_TYPE:
        return f"peft_type={kind} ({_BY_TYPE[kind]})"
    tokens = getattr(config, "alora_invocation_tokens", None)
    if tokens is not None:
        return f"alora_invocation_tokens={tokens} (it acts from the last occurrence of these tokens in the row on)"
    samples_always = getattr(config, "sample_at_inference", None)  # a field of PVeRA alone
    if samples_always or (training and samples_always is not None):
        return f"peft_type={kind} with sample_at_inference={samples_always} (it draws a sample for every token)"
    if training and getattr(config, "monteclora_config", None) is not None:
        return "monteclora_config in training mode (it draws noise on its weights in every forward)"
    projection = getattr(getattr(config, "velora_config", None), "init_type", "random")
    if training and projection != "random":
        mean = "its gradient depends on the mean over all tokens of the batch"
        return f'velora_config.init_type={projection!r} in training mode ({mean}; "random" is exact)'
    return None


def is_adapter_layer(kind: Any) -> bool:
    """Whether modules of a class are PEFT's layers: there it is a property, of transformers' models a method."""
    return isinstance(getattr(kind, "disable_adapters", None), property)


def lora_dropouts(model: nn.Module) -> list[nn.Dropout]:
    """The dropout in front of the matrices A of LoRA's layers."""
    held = (getattr(one, "lora_dropout", None) for one in model.modules() if is_adapter_layer(type(one)))
    dropouts = (one for each in held if isinstance(each, nn.ModuleDict) for one in each.values())
    return [one for one in dropouts if isinstance(one, nn.Dropout)]


@contextmanager
def without_lora_dropout(model: nn.Module) -> Iterator[None]:
    """Let LoRA's layers drop nothing for a while, whatever the mode of the model."""
    switched = [one for one in lora_dropouts(model) if one.training]
    for one in switched:
        one.training = False
    try:
        yield
    finally:
        for one in switched:
            one.training = True


def _active_adapters(model: nn.Module) -> set[str]:
    """The names of all adapters that take part in a forward."""
    layers: list[Any] = [one for one in model.modules() if is_adapter_layer(type(one))]
    enabled = [one for one in layers if not one.disable_adapters]
    if layers and not enabled:
        return set()
    names = {name for layer in enabled for name in layer.active_adapters}
    # Adapters without layers, such as virtual tokens: the wrapper says which one is active.
    for module in _outer_modules(model):
        active = vars(module).get("active_adapter")
        if isinstance(active, (str, list)) and not vars(module).get("_adapters_disabled", False):
            names.update([active] if isinstance(active, str) else active)
    return names


def _outer_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The wrappers of a model of transformers, and that model: where PEFT keeps configurations."""
    yield model
    if not isinstance(model, PreTrainedModel):
        for child in model.children():
            yield from _outer_modules(child)


def _configurations(module: nn.Module) -> dict[str, Any]:
    """The adapters' configurations that a module itself carries, by their names."""
    found = vars(module).get("peft_config") or vars(module).get("_peft_config")
    return found if isinstance(found, dict) else {}
