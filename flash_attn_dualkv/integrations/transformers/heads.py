# SPDX-License-Identifier: BSD-3-Clause
"""Heads that look at the row as a whole: one value for a packed row is none for any of its sequences.

A backbone, a causal LM's head and token classification (critics, reward models a token) give something for each row of
the pack, which is exact. Sequence classification, multiple choice, double heads and poolers choose one row or average
all of them. Which is which shows in the shape of what comes out, whatever the class is called.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers.models.auto import modeling_auto

from ...checks import explain
from ...errors import SharedPromptError
from ...layout import SharedPromptLayout

# Tasks of transformers' tables with one answer per row; others show when they run.
_TASKS = ("SEQUENCE_CLASSIFICATION", "MULTIPLE_CHOICE", "NEXT_SENTENCE_PREDICTION")
_EXPECTED = "one value for each row of the packed batch (a backbone, a causal LM, token classification)"
_ADVICE = "one for the whole row, in which all sequences lie (give each a row of its own, without a layout)"
# Outputs of towers (vision, audio), which are no result of the row.
_OF_TOWERS = re.compile(r"^(image|video|audio|vision)_")


def check_head(model: nn.Module) -> None:
    """Refuse a model whose head is known to give one value for a whole row.

    Args:
        model: a transformers model.

    Raises:
        SharedPromptError: names its class.
    """
    tables = (getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES", {}) for task in _TASKS)
    pooled = {name for table in tables for names in table.values() for name in _names(names)}
    if any(kind.__name__ in pooled for kind in type(model).__mro__):
        raise SharedPromptError(explain("model", _EXPECTED, f"a {type(model).__name__}, whose head gives {_ADVICE}"))


def check_output(output: Any, layout: SharedPromptLayout, inputs: dict[str, Any]) -> None:
    """Refuse what a forward with a layout has computed from the row as a whole.

    Args:
        output: of the model: one of transformers' outputs, a tuple or a tensor.
        layout: of the forward.
        inputs: its arguments by their names.

    Raises:
        SharedPromptError: a floating-point tensor that has no dimension of rows; a loss of labels that were not given.
    """
    if isinstance(output, Mapping) and output.get("loss") is not None and inputs.get("shift_labels") is None:
        expected = "that of shift_labels=batch.labels[None] with a shared prompt"
        raise SharedPromptError(explain("loss", expected, f"one of other labels of {type(output).__name__}"))
    rows = {layout.num_local_tokens, *_kept(inputs.get("logits_to_keep"))}
    for name, one in _results(output):
        # Integers are no results (offsets of positions, for example); losses have no dimension.
        if one.dim() == 0 or not one.is_floating_point():
            continue
        if rows.isdisjoint(one.shape[: max(2, one.dim() - 1)]):
            got = f"shape {tuple(one.shape)}: {_ADVICE}"
            raise SharedPromptError(explain(f"{name} of the model", _EXPECTED, got))


def _names(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def _kept(logits_to_keep: Any) -> tuple[int, ...]:
    """How many rows the head computes, if it is told which."""
    if isinstance(logits_to_keep, Tensor):
        return (logits_to_keep.numel(),)
    return (logits_to_keep,) if isinstance(logits_to_keep, int) and logits_to_keep else ()


def _results(output: Any) -> list[tuple[str, Tensor]]:
    """The tensors of an output, and those of tuples in it; caches are objects or lie deeper."""
    named = output.items() if isinstance(output, Mapping) else enumerate(_parts(output))
    values = [(str(name), one) for name, value in named for one in _parts(value)]
    return [(name, one) for name, one in values if isinstance(one, Tensor) and not _OF_TOWERS.match(name)]


def _parts(value: Any) -> Any:
    return value if isinstance(value, (tuple, list)) else (value,)
