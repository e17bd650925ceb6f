# SPDX-License-Identifier: BSD-3-Clause
"""Sequence parallelism over heads: on any number of ranks the same output and gradients as in one process."""

from __future__ import annotations

import pickle
import re
import warnings
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks
from tiny_models import MIXED, check_equal, check_gradients, dualkv, gradients, tiny_model
from torch import Tensor

from flash_attn_dualkv import SharedPromptError, SharedPromptLayout, pack_shared_prompts, shared_prompt_attention
from flash_attn_dualkv.parallel.ulysses import UlyssesLayout, gather_rows, shard_rows, ulysses_attention

# Query and KV heads, and which numbers of ranks divide the query heads.
HEADS = {(8, 8): (2, 4), (8, 2): (2, 4), (8, 1): (2, 4), (12, 6): (2, 4), (12, 4): (2, 3)}
RANKS = (2, 3, 4)
# Sinks and windows; softcaps; values of another width.
MODELS = {"qwen3": (2, 4), "gpt_oss": (2, 4), "gemma2": (2, 4), "deepseek_v3": (2, 4)}


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor


def layout_for(ranks: int) -> SharedPromptLayout:
    return MIXED.pack(pad_to_multiple_of=ranks).layout


def layouts_for(ranks: int) -> tuple[SharedPromptLayout, SharedPromptLayout]:
    """Of prompts, and of a tree."""
    return layout_for(ranks), SharedPromptLayout.from_tree([7, 3, 0, 9, 4], [-1, 0, 0, 2, -1], pad=-23 % ranks)


def inputs_for(layout: SharedPromptLayout, heads: tuple[int, int], width: int = 16) -> tuple[Inputs, Tensor]:
    """`width`: the head dimension of v."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    rows = layout.num_tokens
    shapes = (rows, heads[0], 8), (rows, heads[1], 8), (rows, heads[1], width), (heads[0],)
    return Inputs(*(normal(*shape) for shape in shapes)), normal(rows, heads[0], width)


def attend(inputs: Inputs, dout: Tensor, attention: Any, layout: SharedPromptLayout) -> list[Tensor]:
    """The output and the gradients of all inputs."""
    q, k, v, sinks = leaves = [one.detach().clone().requires_grad_() for one in inputs]
    out = attention(q, k, v, layout, sinks=sinks, softcap=3.0)
    out.backward(dout)
    return [out.detach(), *(one.grad for one in leaves if one.grad is not None)]


def model_step(name: str, group: Any, ranks: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities of all response tokens, and gradients of their sum; on one rank with no group."""
    model = tiny_model(name).train()
    model.gradient_checkpointing_enable(dict(use_reentrant=False))
    batch = MIXED.pack(pad_to_multiple_of=ranks)
    ids, positions, labels, layout = batch.input_ids, batch.position_ids, batch.labels, batch.layout
    if group is not None:
        ids, positions, labels = (shard_rows(one, group) for one in (ids, positions, labels))
        layout = UlyssesLayout.of(layout, group)
    inputs = dict(input_ids=ids[None], position_ids=positions[None], use_cache=False, shared_prompt_layout=layout)
    dualkv.install_layout_hook(model)
    logits = model(**inputs).logits[0].double()
    rows = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    if group is not None:
        rows = gather_rows(rows, group)
    logps = rows[batch.token_index]
    (logps.sum() / (1 if group is None else ranks)).backward()
    return logps.detach(), gradients(model)


def _run_rank(rank: int, ranks: int, results: Any) -> None:
    warnings.filterwarnings("error", ".*torch.distributed", FutureWarning)  # deprecated collectives
    group = dist.group.WORLD
    layout = layout_for(ranks)
    for heads, able in HEADS.items():
        if ranks not in able:
            continue
        for index, one in enumerate(layouts_for(ranks)):
            inputs, dout = inputs_for(one, heads)
            own = Inputs(*(shard_rows(rows, group) for rows in inputs[:3]), inputs.sinks)
            found = attend(own, shard_rows(dout, group), ulysses_attention, UlyssesLayout.of(one, group))
            results[ranks, rank, heads, index] = found
    for name, able in MODELS.items():
        if ranks in able:
            results[ranks, rank, name] = model_step(name, group, ranks)
    results[ranks, rank, "second"] = second_derivative(group)
    if ranks == 2:
        results[ranks, rank, "errors"] = [message(call) for call in wrong_calls(layout, group)]


def second_derivative(group: Any) -> tuple[Tensor, Tensor]:
    """Of the cubes of gathered rows, which every rank sums, and these rows."""
    rows = (torch.arange(3.0) + dist.get_rank(group)).requires_grad_()
    (gradient,) = torch.autograd.grad((gather_rows(rows, group) ** 3).sum(), rows, create_graph=True)
    return torch.autograd.grad(gradient.sum(), rows)[0], rows.detach()


def wrong_calls(layout: SharedPromptLayout, group: Any) -> list[Any]:
    own = UlyssesLayout.of(layout, group)
    rows = own.num_local_tokens
    q, k = torch.zeros(rows, 4, 8), torch.zeros(rows, 2, 8)
    return [
        lambda: UlyssesLayout.of(pack_shared_prompts([[1, 2]], [[1, 2, 3]]).layout, group),
        lambda: UlyssesLayout.of(layout, "all"),
        lambda: ulysses_attention(q[:, :3], k[:, :1], k[:, :1], own),
        lambda: ulysses_attention(q, q[:, :3], q[:, :3], own),
        lambda: ulysses_attention(q[1:], k, k, own),
        lambda: ulysses_attention(q, k, k, layout),
        lambda: shard_rows(torch.zeros(3), group),
        lambda: pickle.dumps(own),
    ]


MESSAGES = [
    r"layout: expected a multiple of the 2 ranks as number of rows \(pad_to_multiple_of=2\), got 5",
    "group: expected a process group .*, got 'all'",
    "q: expected a number of heads that the 2 ranks divide, got 3",
    "k: expected a number of heads that divides q's 4 heads, got 3",
    r"layout: expected \d+ rows a rank in q, k and v, got \d+, \d+, \d+",
    "layout: expected a UlyssesLayout, got a SharedPromptLayout",
    r"values: expected a multiple of the 2 ranks as rows, got \(3,\)",
    "a UlyssesLayout holds a process group",
]


def message(call: Any) -> str:
    try:
        call()
    except (SharedPromptError, TypeError) as error:
        return str(error)
    return "no error"


@pytest.fixture(scope="module")
def found() -> dict[Any, Any]:
    """What all ranks have found, by the number of ranks and the rank."""
    return {key: one for ranks in RANKS for key, one in run_ranks(_run_rank, ranks, ranks).items()}


@pytest.mark.parametrize("ranks", RANKS)
def test_attention(ranks: int, found: dict[Any, Any]) -> None:
    able = [heads for heads, of in HEADS.items() if ranks in of]
    for heads, (number, layout) in product(able, enumerate(layouts_for(ranks))):
        inputs, dout = inputs_for(layout, heads)
        expected = attend(inputs, dout, shared_prompt_attention, layout)
        parts = [found[ranks, rank, heads, number] for rank in range(ranks)]
        for index, name in enumerate(("out", "dq", "dk", "dv")):
            whole = torch.cat([one[index] for one in parts])
            torch.testing.assert_close(whole, expected[index], rtol=0, atol=1e-12, msg=f"{name}, heads {heads}")
        # Of the sinks every rank has its own heads' gradients.
        torch.testing.assert_close(sum(one[4] for one in parts), expected[4], rtol=0, atol=1e-12)


@pytest.mark.parametrize(("name", "ranks"), [(name, ranks) for name, able in MODELS.items() for ranks in able])
def test_models(name: str, ranks: int, found: dict[Any, Any]) -> None:
    expected, expected_gradients = model_step(name, None, ranks)
    parts = [found[ranks, rank, name] for rank in range(ranks)]
    for logps, _ in parts:
        check_equal(logps, expected, 1e-6)  # parts of the models compute in float32
    total = {key: sum(one[key] for _, one in parts) for key in expected_gradients}
    check_gradients(total, expected_gradients, 2e-6)


@pytest.mark.parametrize("ranks", RANKS)
def test_second_derivative_of_gathered_rows(ranks: int, found: dict[Any, Any]) -> None:
    for rank in range(ranks):
        second, rows = found[ranks, rank, "second"]
        assert second.equal(6 * ranks * rows)


@pytest.mark.parametrize("rank", range(2))
def test_errors(rank: int, found: dict[Any, Any]) -> None:
    for error, expected in zip(found[2, rank, "errors"], MESSAGES, strict=True):
        assert re.match(expected, error), error
