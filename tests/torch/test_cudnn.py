# SPDX-License-Identifier: BSD-3-Clause
"""cuDNN Flex Attention as a backend: its masks, its choice, and its results by the accuracy rule of the kernels."""

from __future__ import annotations

import importlib.util
import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import fake_cudnn
import oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shared_prompts import inputs_of
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from tree_cases import Tree, trees, visible
from tree_runs import TREES, Variant, check_errors, exact, plain

from flash_attn_dualkv import SharedPromptError, SharedPromptLayout, cudnn, errors, shared_prompt_attention
from flash_attn_dualkv.calls import Options

CACHED = (cudnn._imported, cudnn.capability, cudnn._trial)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """cuDNN's functions on the CPU, which has the index -1 and here the compute capability 10.0."""
    for one in CACHED:
        one.cache_clear()
    monkeypatch.setattr(errors, "_said", set())
    monkeypatch.setattr(cudnn, "_imported", lambda: fake_cudnn)
    monkeypatch.setattr(cudnn, "capability", lambda device: (10, 0))
    yield fake_cudnn
    monkeypatch.undo()
    for one in CACHED:
        one.cache_clear()


@given(trees(), st.sampled_from([-1, 0, 1, 2, 5]))
def test_intervals_are_the_paths(tree: Tree, window_left: int) -> None:
    endpoints = cudnn.endpoints(*tree, "cpu", window_left)
    expected, positions = visible(tree, sum(tree[0]))
    if window_left >= 0:
        expected = expected & (positions[:, None] - positions <= window_left)
    assert torch.equal(fake_cudnn.visible(endpoints), expected)


def test_intervals_are_few() -> None:
    """One for a prompt's rows, two for responses; a leaf that adjoins its turn has no interval more than that."""
    endpoints = cudnn.endpoints([3, 2, 2], [-1, 0, 0], "cpu")
    assert endpoints[0].T.tolist() == [[1] * 3, [2] * 3, [3] * 3, [4] * 3, [5] * 3, [3, 5, 6], [3, 5, 7]]
    assert cudnn.endpoints([5, *[4] * 20], [-1, *range(20)], "cpu").shape == (1, 1, 85)  # a chain is one run


# --- results on the CPU ---


def results(attention: Any, inputs: Any) -> list[Tensor]:
    """Output and gradients."""
    leaves = inputs.leaves()
    out = attention(leaves)
    return [out, *torch.autograd.grad(out, leaves.tensors, inputs.dout)]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_results_are_those_of_the_reference(fake: Any, window: int | None, has_sinks: bool) -> None:
    """The trial of a first use included, which compares with what this package computes."""
    layout = SharedPromptLayout.from_tree([5, 3, 1, 0, 4, 6], [-1, 0, 1, 0, 3, -1], pad=3)
    inputs = inputs_of(layout, sinks=has_sinks)
    left = -1 if window is None else window - 1
    options = Options(0.3, True, left, 0.0, False, layout.mean_keys, False)
    got = results(lambda one: cudnn.attend_if_chosen("auto", one.q, one.k, one.v, layout, options, one.sinks), inputs)
    expected = results(
        lambda one: shared_prompt_attention(
            one.q, one.k, one.v, layout, softmax_scale=0.3, sliding_window=window, sinks=one.sinks
        ),
        inputs,
    )
    assert len(got) == 4 + has_sinks and all(one.is_contiguous() for one in got)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def attend(layout: SharedPromptLayout, inputs: Any, backend: str = "cudnn", **changes: Any) -> Tensor | None:
    options = Options(0.3, True, -1, 0.0, False, layout.mean_keys, False)._replace(**changes)
    return cudnn.attend_if_chosen(backend, inputs.q, inputs.k, inputs.v, layout, options, None)


def small(**options: Any) -> tuple[SharedPromptLayout, Any]:
    layout = SharedPromptLayout.from_tree([3, 2, 2], [-1, 0, 0])
    return layout, inputs_of(layout, **options)


def test_a_plan_is_made_once_a_kind_of_layer(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, inputs = small()
    made = []
    monkeypatch.setattr(cudnn, "_trial", lambda *_: None)
    make = fake_cudnn.create_mask_plan
    monkeypatch.setattr(fake_cudnn, "create_mask_plan", lambda *a, **k: made.append(k) or make(*a, **k))
    for window in (-1, 2, -1, 2):
        attend(layout, inputs, window_left=window)
    attend(layout, inputs.leaves())
    assert [one["build_backward"] for one in made] == [False, False, True]
    assert "_cudnn_plans" not in pickle.loads(pickle.dumps(layout)).__dict__


def test_what_it_lacks_is_said_once(fake: Any) -> None:
    layout, inputs = small()
    with pytest.warns(UserWarning, match="kernels of this package: cuDNN Flex Attention lacks a softcap"):
        assert attend(layout, inputs, softcap=20.0) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert attend(layout, inputs, "auto", softcap=20.0) is None
    whole = SharedPromptLayout.from_tree([200, 2], [-1, 0])
    late, inputs = whole.reading(torch.tensor([201])), inputs_of(whole)
    assert late is not None
    inputs = inputs._replace(q=inputs.q[late.query_rows])
    with pytest.warns(UserWarning, match="lacks queries of some rows alone"):
        assert attend(late, inputs) is None
    wide_layout, wide = small(head_dim=512)
    with pytest.warns(UserWarning, match="lacks head dims of 512 and 512"):
        assert attend(wide_layout, wide) is None


@pytest.mark.parametrize("fault", ["wrong", "failing"])
def test_a_first_use_that_is_not_exact_stays_on_the_kernels(
    fake: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stock = fake_cudnn.flex_attn_func

    def spoiled(*args: Any, **options: Any) -> Any:
        if fault == "failing":
            raise RuntimeError("no kernel for this")
        out, lse = stock(*args, **options)
        return 1.05 * out, lse

    monkeypatch.setattr(fake_cudnn, "flex_attn_func", spoiled)
    layout, inputs = small()
    message = "O differs from this package's by 0.050" if fault == "wrong" else "RuntimeError: no kernel for this"
    with pytest.warns(UserWarning, match=message):
        assert attend(layout, inputs, "auto") is None


def test_a_limit_of_sinks_alone(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose gradient goes through the LSE: there cuDNN has head dims without it."""
    stock = fake_cudnn.flex_attn_func

    def refuse(_: Tensor) -> None:
        raise NotImplementedError("no gradient of the LSE")

    def limited(*args: Any, **options: Any) -> Any:
        out, lse = stock(*args, **options)
        if lse.requires_grad:
            lse.register_hook(refuse)
        return out, lse

    monkeypatch.setattr(fake_cudnn, "flex_attn_func", limited)
    layout, inputs = small(sinks=True)
    assert attend(layout, inputs, "auto") is not None
    options = Options(0.3, True, -1, 0.0, False, layout.mean_keys, False)
    with pytest.warns(UserWarning, match="what it needs on this GPU .*no gradient of the LSE"):
        assert cudnn.attend_if_chosen("auto", inputs.q, inputs.k, inputs.v, layout, options, inputs.sinks) is None


def test_a_first_use_within_checkpointing_and_inference(fake: Any) -> None:
    """The trial has a backward of its own, whatever the caller's modes."""
    layout, inputs = small()
    with torch.inference_mode():
        expected = attend(layout, inputs)
    cudnn._trial.cache_clear()
    leaves = inputs.leaves()
    got = checkpoint(lambda q: attend(layout, leaves._replace(q=q)), leaves.q, use_reentrant=False)
    assert torch.equal(got, expected)
    gradients = torch.autograd.grad(got, leaves.tensors, inputs.dout)
    wanted = torch.autograd.grad(attend(layout, leaves), leaves.tensors, inputs.dout)
    assert all(map(torch.equal, gradients, wanted))


def test_differentiable_once(fake: Any) -> None:
    layout, inputs = small()
    leaves = inputs.leaves()
    gradient, *_ = torch.autograd.grad(attend(layout, leaves).sum(), leaves.tensors, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiable once"):
        gradient.sum().backward()


def test_where_it_does_not_run(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layout, inputs = small()
    monkeypatch.setattr(cudnn, "_imported", lambda: "cudnn.flex_attention does not import (no such): pip install it")
    with pytest.raises(SharedPromptError, match="^backend: expected 'auto' or 'cuda' where .* got 'cudnn', and .*pip"):
        attend(layout, inputs)
    assert attend(layout, inputs, "auto") is None
    monkeypatch.setattr(cudnn, "capability", lambda device: (8, 0))
    with pytest.raises(SharedPromptError, match="a GPU of compute capability 8.0"):
        attend(layout, inputs)
    assert not cudnn.is_default(0)


# --- results on a GPU ---

MASKS: dict[str, dict[str, Any]] = {"": {}, "window": {"sliding_window": 100}, "sinks": {}}
SHAPES = [(64, 64, (8, 2)), (128, 128, (8, 8)), (128, 128, (8, 1)), (192, 128, (4, 4)), (256, 256, (4, 4))]


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec("cudnn") is None, reason="needs nvidia-cudnn-frontend")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("head_dim", "head_dim_v", "heads"), SHAPES)
@pytest.mark.parametrize("name", ["borders", "comb", "bush of bushes", "prompts"])
def test_accuracy(name: str, head_dim: int, head_dim_v: int, heads: tuple[int, int], mask: str) -> None:
    """By the rule that the kernels are tested by. A call that falls back to them is an error."""
    warnings.filterwarnings("error", message="flash_attn_dualkv: attention runs on the kernels")
    layout = SharedPromptLayout.from_tree(*TREES[name], pad=37, device="cuda")
    inputs = inputs_of(
        layout, heads=heads, head_dim=head_dim, head_dim_v=head_dim_v, dtype=torch.bfloat16, sinks=mask == "sinks"
    )
    options = MASKS[mask]
    got = results(
        lambda one: shared_prompt_attention(one.q, one.k, one.v, layout, backend="cudnn", sinks=one.sinks, **options),
        inputs,
    )
    variant = Variant(window=options.get("sliding_window", 0) - 1)
    expected = exact(inputs, layout.nodes, variant)
    found = dict(zip(("out", "dq", "dk", "dv", "dsinks"), got))
    if inputs.sinks is not None:
        check_errors(found, expected, inputs.q.dtype)
        return
    of_torch = plain(inputs, layout.nodes, variant)
    problems = [
        one for key in found for one in oracle.violations(key, found[key], of_torch[key], expected[key], inputs.q.dtype)
    ]
    assert not problems, "; ".join(problems)
