# SPDX-License-Identifier: BSD-3-Clause
"""What layers carry along the sequence, handed on through random forests: against each path by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from tree_cases import paths_of, trees

pytest.importorskip("transformers", "4.57", reason="needs transformers 4.57 or newer")

from flash_attn_dualkv import SharedPromptLayout, pack_shared_prompts
from flash_attn_dualkv.integrations.recurrences import levels as levels_module
from flash_attn_dualkv.integrations.recurrences import mixers, rows
from flash_attn_dualkv.integrations.recurrences.levels import levels_of, tails_of

CPU = torch.device("cpu")


@st.composite
def forests(draw: st.DrawFn) -> SharedPromptLayout:
    """Trees of any depth, with nodes that have no rows, and padding."""
    return SharedPromptLayout.from_tree(
        *draw(trees().filter(lambda tree: sum(tree[0]) > 0)), pad=draw(st.integers(0, 2))
    )


def node_by_node(layout: SharedPromptLayout, x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
    """What `compute` makes of each path by itself, in the rows of its last node."""
    out = torch.zeros_like(x)
    tree = [*layout.node_lens], [*layout.node_parents]
    for path, length in zip(paths_of(tree), tree[0]):
        if length:
            out = out.index_put((torch.tensor(path[-length:]),), compute(x[path])[-length:])
    return out


def check(layout: SharedPromptLayout, compute: Callable[[Tensor], Tensor], ours: Callable[[Tensor], Tensor]) -> None:
    """Values and gradients of all rows but padding."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(layout.num_tokens, 3, dtype=torch.float64, generator=generator).requires_grad_()
    weights = torch.randn(x.shape, dtype=torch.float64, generator=generator)
    weights[layout.num_tokens - layout.pad :] = 0
    expected = node_by_node(layout, x, compute)
    (gradient,) = torch.autograd.grad((expected * weights).sum(), x)
    got = ours(x)
    (got_gradient,) = torch.autograd.grad((got * weights).sum(), x)
    end = layout.num_tokens - layout.pad
    assert torch.allclose(got[:end], expected[:end], rtol=0, atol=1e-12)
    assert torch.allclose(got_gradient, gradient, rtol=0, atol=1e-12)


def causal_convolution(x: Tensor, weight: Tensor) -> Tensor:
    """(1, C, T), weight (C, K) -> (1, C, T)."""
    return torch.nn.functional.conv1d(x, weight[:, None], padding=weight.shape[1] - 1, groups=len(weight))[
        :, :, : x.shape[2]
    ]


def scan(x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """(n, L, C), states (n, C) -> (n, L, C), states behind: not linear, so that no part can stand for another."""
    outs = []
    for one in x.unbind(1):
        state = torch.tanh(0.7 * state + one) * (one != 0).any(-1, keepdim=True) + state * (one == 0).all(
            -1, keepdim=True
        )
        outs.append(state)
    return torch.stack(outs, 1), state


@settings(max_examples=60, deadline=None)
@given(layout=forests(), width=st.integers(1, 5))
def test_convolutions(layout: SharedPromptLayout, width: int) -> None:
    weight = torch.randn(3, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    check(
        layout,
        lambda x: causal_convolution(x.T[None], weight)[0].T,
        lambda x: mixers.convolution(causal_convolution, layout, x.T[None], weight)[0].T,
    )


@pytest.fixture
def alike(request: pytest.FixtureRequest) -> Iterator[None]:
    """Up to which length segments go into one call, padded."""
    levels_module._levels.cache_clear()
    with patch.object(levels_module, "ALIKE", request.param):
        yield
    levels_module._levels.cache_clear()


@pytest.mark.parametrize(
    ("package", "alike"), [("transformers", 64), ("transformers", 1), ("fla", 64)], indirect=["alike"]
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=forests())
def test_recurrences(package: str, alike: None, layout: SharedPromptLayout) -> None:
    """Sequences padded to one length, to several, and one after the other with the offsets of each."""
    calls = []

    def stock(q: Any, k: Any, v: Tensor, *, g: Any, beta: Any, initial_state: Any, output_final_state: bool,
              cu_seqlens: Any = None) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        calls.append(output_final_state)
        assert (cu_seqlens is not None) == (package == "fla")
        parts = list(v) if cu_seqlens is None else [v[0, i:j] for i, j in pairwise(cu_seqlens)]
        states = torch.zeros(len(parts), 3, dtype=v.dtype) if initial_state is None else initial_state
        assert len(states) == len(parts) and min(map(len, parts)) > 0
        outs, last = zip(*(scan(part[None], state[None]) for part, state in zip(parts, states)))
        together = torch.stack([one[0] for one in outs]) if cu_seqlens is None else torch.cat(outs, 1)
        return together, torch.cat(last) if output_final_state else None

    stock.__module__ = f"{package}.ops"

    def ours(x: Tensor) -> Tensor:
        zeros = x.new_zeros(1, len(x), 1)
        out, state = mixers.gated_delta_rule(stock, layout, zeros, zeros, x[None], g=zeros, beta=zeros)
        assert state is None
        return out[0]

    check(layout, lambda x: scan(x[None], x.new_zeros(1, 3))[0][0], ours)
    # All that have no children come last, in one call for each bucket.
    levels = levels_of(layout, CPU).levels
    assert calls == sorted(calls, reverse=True)
    assert len(calls) == sum(1 if package == "fla" else len(level.buckets) for level in levels)
    for level in levels:
        padded = sum(count * longest for count, longest in level.buckets)
        assert levels_module.ALIKE > 1 or padded < 2 * (level.end - level.begin)


@pytest.mark.parametrize("package", ["transformers", "mamba_ssm"])
def test_step_sizes(package: str) -> None:
    """As the scan would compute them: a model file in the model's type, the package's kernels in float32."""

    def stock(*_: Any) -> None: ...

    stock.__module__ = f"{package}.ops"
    generator = torch.Generator().manual_seed(0)
    dt, bias = (torch.randn(n, generator=generator).bfloat16() for n in ((1, 5, 2), (2,)))
    given: dict[str, Any] = dict(dt_bias=bias, dt_softplus=True, dt_limit=(0.5, 1.5), chunk_size=4)
    dtype = torch.float32 if package == "mamba_ssm" else torch.bfloat16
    got = mixers._step_sizes(stock, dt, given)
    assert given == dict(chunk_size=4)
    assert torch.equal(got, torch.nn.functional.softplus(dt.to(dtype) + bias.to(dtype)).clamp(0.5, 1.5))
    assert got.dtype == dtype
    assert torch.equal(mixers._step_sizes(stock, dt, {}), dt.to(dtype).clamp(min=0))


def test_prompts_and_responses_are_two_calls() -> None:
    layout = pack_shared_prompts([[0] * 5] * 3 + [[1] * 4] * 2, [[0] * 3, [0], [0] * 2, [0] * 4, [0]]).layout
    levels = levels_of(layout, CPU)
    assert levels.order is not None and len(levels.levels) == 2
    assert levels_of(layout, CPU) is levels  # for all layers
    one = pack_shared_prompts([[0] * 5] * 3, [[0] * 3, [0], [0] * 2]).layout
    assert levels_of(one, CPU).order is None  # nothing is moved


def test_gradients_are_summed_in_float32() -> None:
    """Of thousands of responses in 16 bits: a sum in 16 bits would stop growing."""
    count = 4000
    layout = pack_shared_prompts([[0] * 9] * count, [[0]] * count, boundary="gather").layout
    tails = tails_of(layout, 3, CPU)
    x = torch.zeros(layout.num_tokens, 1, dtype=torch.bfloat16, requires_grad=True)
    rows.insert_tails(x, tails).sum().backward()
    assert x.grad is not None
    rounded = float(torch.tensor(count + 1.0).bfloat16())
    assert x.grad[6:9, 0].tolist() == [rounded] * 3
    states = torch.zeros(1, 2, dtype=torch.bfloat16, requires_grad=True)
    rows.hand_on(states, torch.zeros(count, dtype=torch.int64), torch.tensor([count])).sum().backward()
    assert states.grad is not None
    assert states.grad.tolist() == [[float(torch.tensor(float(count)).bfloat16())] * 2]


def test_a_row_of_padding_only() -> None:
    layout = SharedPromptLayout.from_tree([0], [-1], pad=3)
    with pytest.raises(ValueError, match="a row with tokens"):
        mixers._by_levels(layout, [torch.zeros(1, 3, 2)], lambda *_: (torch.zeros(0), None))
