"""What each backend of shared_prompt_attention gets, what it refuses, and the errors of wrong arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from shared_prompts import GROUPS, attend, inputs_of, layout_of

from flash_attn_dualkv import SharedPromptError, SharedPromptLayoutError, shared_prompt_attention


def test_a_window_of_the_longest_sequence_hides_nothing() -> None:
    """The longest sequence is no longer than the window, although prompt and response of different groups are."""
    layout = layout_of([(40, [1]), (2, [30])])
    assert layout.max_sequence == 41
    inputs = inputs_of(layout)
    assert attend(inputs, layout, sliding_window=41).equal(attend(inputs, layout))
    assert not attend(inputs, layout, sliding_window=40).equal(attend(inputs, layout))


def test_backends_of_cpu_tensors() -> None:
    layout = layout_of(GROUPS["one"])
    inputs = inputs_of(layout)
    assert attend(inputs, layout, backend="auto").equal(attend(inputs, layout, backend="reference"))
    with pytest.raises(SharedPromptError, match="^backend: expected 'auto' or 'reference' for cpu tensors, got 'cuda'"):
        attend(inputs, layout, backend="cuda")
    with pytest.raises(SharedPromptError, match="^backend: expected 'auto' or 'cuda' or 'reference', got 'triton'"):
        attend(inputs, layout, backend="triton")


# --- errors --------------------------------------------------------------------------------------------------------


def valid() -> dict[str, Any]:
    layout = layout_of(GROUPS["several"])
    inputs = inputs_of(layout)
    return {"q": inputs.q, "k": inputs.k, "v": inputs.v, "layout": layout}


ERRORS: list[tuple[str, type[Exception], Any]] = [
    ("layout: expected .* rows, its num_tokens", SharedPromptLayoutError, lambda a: a | {"q": a["q"][1:]}),
    ("layout: .* in k", SharedPromptLayoutError, lambda a: a | {"k": a["k"][1:], "v": a["v"][1:]}),
    ("layout: expected tensors on cpu", SharedPromptLayoutError, lambda a: a | {"layout": a["layout"].to("meta")}),
    ("layout: expected a SharedPromptLayout", TypeError, lambda a: a | {"layout": None}),
    ("v: expected .* rows", ValueError, lambda a: a | {"v": a["v"][1:]}),
    ("k: expected a number of heads that divides", ValueError, lambda a: a | {"q": a["q"][:, :3]}),
    ("v: expected a head dimension that is a multiple of 8", ValueError, lambda a: a | {"v": a["v"][..., :4]}),
    ("k: expected dtype", TypeError, lambda a: a | {"k": a["k"].float()}),
    ("q: expected a torch.Tensor", TypeError, lambda a: a | {"q": None}),
    ("q: expected 3 dimensions", ValueError, lambda a: a | {"q": a["q"][None]}),
    ("softmax_scale", ValueError, lambda a: a | {"softmax_scale": 0.0}),
    ("sliding_window: expected an int >= 1", SharedPromptError, lambda a: a | {"sliding_window": 0}),
    ("sliding_window: expected an int", TypeError, lambda a: a | {"sliding_window": 2.0}),
    ("softcap: expected a finite", ValueError, lambda a: a | {"softcap": -1.0}),
    ("softcap: expected a finite", ValueError, lambda a: a | {"softcap": math.nan}),
    ("softcap: expected a float", TypeError, lambda a: a | {"softcap": "1"}),
    ("sinks: expected a torch.Tensor", TypeError, lambda a: a | {"sinks": [0.0] * 4}),
    ("sinks: expected a floating point", TypeError, lambda a: a | {"sinks": torch.ones(4, dtype=torch.int64)}),
    ("sinks: expected shape .4,.", ValueError, lambda a: a | {"sinks": torch.ones(2)}),
    ("sinks: expected device cpu", ValueError, lambda a: a | {"sinks": torch.ones(4, device="meta")}),
    ("deterministic: expected a bool", TypeError, lambda a: a | {"deterministic": 1}),
]


@pytest.mark.parametrize(("message", "kind", "change"), ERRORS, ids=[one[0] for one in ERRORS])
def test_errors(message: str, kind: type[Exception], change: Any) -> None:
    shared_prompt_attention(**valid())
    with pytest.raises(kind, match=f"^{message}"):
        shared_prompt_attention(**change(valid()))


def test_inconsistent_tables_are_found_in_the_reference() -> None:
    arguments = valid()
    arguments["layout"].nodes[1, 1] += 10**6
    with pytest.raises(ValueError, match="^cu_seqlens_q"):
        shared_prompt_attention(**arguments)
