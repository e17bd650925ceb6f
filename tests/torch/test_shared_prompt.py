# SPDX-License-Identifier: BSD-3-Clause
"""shared_prompt_attention: padding, and how it is watched. What it computes is compared in test_tree.py."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch
from shared_prompts import GROUPS, Inputs, attend, inputs_of, layout_of, run
from torch import Tensor

from flash_attn_dualkv import (
    SharedPromptError,
    SharedPromptLayout,
    SharedPromptLayoutError,
    pack_prefix_tree,
    pack_shared_prompts,
    shared_prompt_attention,
)


def test_a_sink_of_minus_infinity_is_none() -> None:
    layout = layout_of(GROUPS["several"])
    inputs = inputs_of(layout)
    without = attend(inputs, layout)
    sinks = torch.full((inputs.q.shape[1],), -math.inf, dtype=inputs.q.dtype)
    torch.testing.assert_close(attend(inputs._replace(sinks=sinks), layout), without, rtol=1e-13, atol=1e-13)


def test_padding_rows_take_no_part() -> None:
    """Whatever stands there, NaN included; their outputs and gradients are 0."""
    layout = layout_of(GROUPS["several"])
    padded = layout_of(GROUPS["several"], pad_to_multiple_of=64)
    inputs = inputs_of(padded, sinks=True)
    assert padded.pad > 0
    for one in (inputs.q, inputs.k, inputs.v, inputs.dout):
        one[-padded.pad :] = math.nan
    short = Inputs(*(one[: layout.num_tokens] for one in (inputs.q, inputs.k, inputs.v, inputs.dout)), inputs.sinks)
    out, gradients = run(inputs, lambda leaves: attend(leaves, padded))
    expected, right = run(short, lambda leaves: attend(leaves, layout))
    for actual, wanted in zip((out, *gradients[:3]), (expected, *right[:3])):
        assert actual[: layout.num_tokens].equal(wanted) and not actual[layout.num_tokens :].any()
    torch.testing.assert_close(gradients[3], right[3], rtol=1e-12, atol=1e-12)


# --- forward-mode derivatives, subclasses -----------------------------------------------------------------------------


def test_forward_mode_derivatives_are_refused() -> None:
    """Of inputs without requires_grad they would be zeros, without a word."""
    layout = layout_of(GROUPS["several"])
    q, k, v = inputs_of(layout).tensors[:3]

    def call(q: Tensor) -> Tensor:
        return shared_prompt_attention(q, k, v, layout)

    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
            call(dual)
        call(q)
    with pytest.raises(NotImplementedError, match="no forward-mode derivatives"):
        torch.func.jvp(call, (q,), (torch.ones_like(q),))


class Watcher(Tensor):
    """A subclass that wraps a tensor and sees every operator that it is an argument of."""

    seen: ClassVar[list[str]] = []
    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Watcher:
        wrapper = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)  # type: ignore[attr-defined]
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(str(func))
        plain = [one.inner if isinstance(one, cls) else one for one in args]
        return func(*plain, **(kwargs or {}))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_any_input_that_is_a_subclass_sees_the_operator(which: int) -> None:
    """The kernels would read a wrapper's own memory, of which there is none."""
    layout = layout_of(GROUPS["several"])
    tensors = list(inputs_of(layout).tensors[:3])
    expected = shared_prompt_attention(*tensors, layout)
    tensors[which] = Watcher(tensors[which].detach())
    Watcher.seen.clear()
    assert torch.equal(shared_prompt_attention(*tensors, layout), expected)
    assert any("dualkv.forward" in one for one in Watcher.seen)


# --- layouts of other batches -----------------------------------------------------------------------------------------


def rows_of(batch: Any) -> list[Tensor]:
    return [torch.randn(batch.layout.num_tokens, 2, 8) for _ in range(3)]


BATCHES = [
    pack_shared_prompts([[5, 6, 7]] * 2, [[1, 2], [3, 4, 4]]),
    pack_shared_prompts([[5, 6, 7]] * 2, [[3, 4, 4], [1, 2]]),  # as many rows, elsewhere
    pack_prefix_tree([[5, 6, 7, 1, 2, 3, 4, 5, 6]], min_shared=1),
]


def test_positions_that_cannot_be_compared() -> None:
    batch = BATCHES[0]
    tensors = rows_of(batch)
    alone = SharedPromptLayout.from_tree(batch.layout.node_lens, batch.layout.node_parents)
    wrong = {
        "^position_ids: expected None for a layout that does not know": (alone, batch.position_ids),
        "^position_ids: expected shape": (batch.layout, batch.position_ids[:-1]),
        "^position_ids: expected a torch.Tensor": (batch.layout, batch.position_ids.tolist()),
    }
    for message, (layout, given) in wrong.items():
        with pytest.raises((SharedPromptLayoutError, TypeError), match=message):
            shared_prompt_attention(*tensors, layout, position_ids=given)
    whole = torch.zeros(3, 1, batch.layout.num_tokens)
    with pytest.raises(SharedPromptLayoutError, match="^position_ids: expected shape"):
        shared_prompt_attention(*tensors, batch.layout, position_ids=whole)


def test_backends_of_cpu_tensors() -> None:
    layout = layout_of(GROUPS["one"])
    inputs = inputs_of(layout)
    assert attend(inputs, layout, backend="auto").equal(attend(inputs, layout, backend="reference"))
    for other in ("cuda", "cudnn"):
        message = f"^backend: expected 'auto' or 'reference' for cpu tensors, got '{other}'"
        with pytest.raises(SharedPromptError, match=message):
            attend(inputs, layout, backend=other)
    message = "^backend: expected 'auto' or 'cuda' or 'cudnn' or 'reference', got 'triton'"
    with pytest.raises(SharedPromptError, match=message):
        attend(inputs, layout, backend="triton")


def test_inconsistent_tables_are_found_in_the_reference() -> None:
    layout = layout_of(GROUPS["several"])
    layout.nodes[1, 1] += 10**6
    with pytest.raises(ValueError, match="^cu_seqlens_q"):
        attend(inputs_of(layout), layout)
