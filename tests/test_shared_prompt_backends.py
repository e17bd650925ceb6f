"""What each backend of shared_prompt_attention gets, what it refuses, and the errors of wrong arguments."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from shared_prompts import GROUPS, Inputs, attend, inputs_of, layout_of

from flash_attn_dualkv import (
    SharedPromptError,
    SharedPromptLayout,
    SharedPromptLayoutError,
    SharedPromptUnsupportedError,
    attention,
    ops,
    packed_ops,
    shared_prompt_attention,
)


class ReferenceAsModule:
    """Stands for the compiled module: the same signatures, computed by the reference, the calls recorded."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def packed_forward(self, *arguments: Any) -> Any:
        self.calls.append(("packed_forward", arguments))
        *tensors, context_rows, scale = arguments
        return packed_ops._forward_reference(*tensors, context_rows, scale, None, None, False, False)

    def packed_backward(self, *arguments: Any) -> Any:
        self.calls.append(("packed_backward", arguments))
        *tensors, context_rows, scale, _ = arguments
        return packed_ops._backward_reference(*tensors, context_rows, scale, None, None, False, False)


def cuda_forward(inputs: Inputs, layout: SharedPromptLayout, **changes: Any) -> Any:
    options = packed_ops.Options(layout.num_context_tokens, 0.25, None, None, False, False)._replace(**changes)
    tables = layout.segments, layout.groups
    return packed_ops._forward_cuda(inputs.q, inputs.k, inputs.v, inputs.sinks, *tables, *options)


@pytest.mark.parametrize("sinks", [False, True])
def test_what_the_compiled_module_gets(sinks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but what concerns Python alone."""
    module = ReferenceAsModule()
    monkeypatch.setattr(ops, "_C", module)
    monkeypatch.delenv("DUALKV_DEBUG", raising=False)
    monkeypatch.delenv("FLASH_ATTENTION_DETERMINISTIC", raising=False)
    layout = layout_of(GROUPS["several"], pad_to_multiple_of=16)
    inputs = inputs_of(layout, sinks=sinks)
    tables, rows = (layout.segments, layout.groups), layout.num_context_tokens
    out, lse = cuda_forward(inputs, layout)
    expected = packed_ops.packed_forward(
        inputs.q, inputs.k, inputs.v, inputs.sinks, *tables, rows, 0.25, None, None, True, False
    )
    for actual, wanted in zip((out, lse), expected):
        torch.testing.assert_close(actual, wanted, rtol=1e-13, atol=1e-13)
    assert lse[:, -layout.pad :].isneginf().all() and not out[-layout.pad :].any()
    given = (inputs.dout, None, inputs.q, inputs.k, inputs.v, out, lse, *tables)
    packed_ops._backward_cuda(*given, rows, 0.25, None, None, False, True)
    name, arguments = module.calls.pop()
    assert name == "packed_backward" and arguments[9:] == (rows, 0.25, True)
    assert all(one is other for one, other in zip(arguments, given))
    name, arguments = module.calls.pop()
    assert name == "packed_forward" and arguments[6:] == (rows, 0.25)
    assert all(one is other for one, other in zip(arguments, (inputs.q, inputs.k, inputs.v, inputs.sinks, *tables)))


def test_the_cuda_operators_refuse_what_the_kernels_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "_C", ReferenceAsModule())
    layout = layout_of(GROUPS["one"])
    inputs = inputs_of(layout)
    for name, value in (("window", 2), ("softcap", 1.0)):
        with pytest.raises(NotImplementedError, match=f"^{name}"):
            cuda_forward(inputs, layout, **{name: value})
        out, lse = cuda_forward(inputs, layout, reference=True, **{name: value})
        options = packed_ops.Options(layout.num_context_tokens, 0.25, None, None, False, False)._replace(
            **{name: value}
        )
        given = (inputs.dout, None, inputs.q, inputs.k, inputs.v, out, lse, layout.segments, layout.groups)
        with pytest.raises(NotImplementedError, match=f"^{name}"):
            packed_ops._backward_cuda(*given, *options)
        packed_ops._backward_cuda(*given, *options._replace(reference=True))


@pytest.mark.parametrize(("name", "value"), [("sliding_window", 3), ("softcap", 20.0)])
def test_options_that_the_kernels_lack(name: str, value: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "_is_reference", lambda backend, q: False)  # as for CUDA tensors
    layout = layout_of(GROUPS["several"])
    inputs = inputs_of(layout)
    with pytest.raises(SharedPromptUnsupportedError, match=f'^{name}: expected None .*backend="reference".*{value}'):
        attend(inputs, layout, **{name: value})
    assert issubclass(SharedPromptUnsupportedError, (SharedPromptError, NotImplementedError))
    # What restricts nothing is accepted.
    attend(inputs, layout, sliding_window=layout.max_sequence, softcap=0.0)
    with pytest.raises(SharedPromptUnsupportedError, match="^sliding_window"):
        attend(inputs, layout, sliding_window=layout.max_sequence - 1)


def test_a_window_of_the_longest_sequence_hides_nothing() -> None:
    """The longest sequence is no longer than the window, although prompt and response of different groups are."""
    layout = layout_of([(40, [1]), (2, [30])])
    assert layout.max_sequence == 41 < layout.max_context + layout.max_decoded
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
    ("v: expected head dimension", NotImplementedError, lambda a: a | {"v": a["v"][..., :8]}),
    ("k: expected dtype", TypeError, lambda a: a | {"k": a["k"].float()}),
    ("q: expected a torch.Tensor", TypeError, lambda a: a | {"q": None}),
    ("q: expected 3 dimensions", ValueError, lambda a: a | {"q": a["q"][None]}),
    ("softmax_scale", ValueError, lambda a: a | {"softmax_scale": 0.0}),
    ("sliding_window: expected an int >= 1", SharedPromptError, lambda a: a | {"sliding_window": 0}),
    ("sliding_window: expected an int", TypeError, lambda a: a | {"sliding_window": 2.0}),
    ("softcap: expected a finite", SharedPromptError, lambda a: a | {"softcap": -1.0}),
    ("softcap: expected a finite", SharedPromptError, lambda a: a | {"softcap": math.nan}),
    ("softcap: expected a float", TypeError, lambda a: a | {"softcap": "1"}),
    ("sinks: expected a torch.Tensor", TypeError, lambda a: a | {"sinks": [0.0] * 4}),
    ("sinks: expected a floating point", TypeError, lambda a: a | {"sinks": torch.ones(4, dtype=torch.int64)}),
    ("sinks: expected shape .4,.", SharedPromptError, lambda a: a | {"sinks": torch.ones(2)}),
    ("sinks: expected device cpu", SharedPromptError, lambda a: a | {"sinks": torch.ones(4, device="meta")}),
    ("deterministic: expected a bool", TypeError, lambda a: a | {"deterministic": 1}),
]


@pytest.mark.parametrize(("message", "kind", "change"), ERRORS, ids=[one[0] for one in ERRORS])
def test_errors(message: str, kind: type[Exception], change: Any) -> None:
    shared_prompt_attention(**valid())
    with pytest.raises(kind, match=f"^{message}"):
        shared_prompt_attention(**change(valid()))


def test_inconsistent_tables_are_found_in_the_reference() -> None:
    arguments = valid()
    arguments["layout"].segments[1, 1] += 10**6
    with pytest.raises(ValueError, match="^cu_seqlens_q"):
        shared_prompt_attention(**arguments)
