# SPDX-License-Identifier: BSD-3-Clause
"""Batches in pieces under DDP, FSDP 1 and FSDP 2, on two ranks with cuts of their own."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hybrid_models import KINDS
from piece_runs import expected_of, losses
from processes import run_ranks
from ranks import CPU, Setup, whole_gradients, wrap
from tiny_models import TOLERANCES, VERSION, Samples, Tolerance, check_equal, check_gradients, dualkv
from tiny_models import gradients as gradients_of

from flash_attn_dualkv import PackedBatch, SharedPromptError
from flash_attn_dualkv.data.parts import Cut, Piece
from flash_attn_dualkv.integrations.transformers import prompt_once

PLAN = prompt_once.plan_backward
SETUP = replace(CPU, dtype=torch.float64)
EXPERTS = replace(CPU, name="qwen3_moe", shape=dict(num_experts_per_tok=2))
HYBRID = replace(CPU, make="hybrid_models:hybrid_model", name=KINDS[0])
ROWS = [Samples.random([(14, [5, 4, 6])], seed=1), Samples.random([(9, [3, 4]), (12, [7, 5, 2, 6])], seed=2)]


def group_of(prompt: int, *parts: list[int]) -> Piece:
    """A prompt and its responses, part by part."""
    begin, pieces = prompt + 1, []
    for part in parts:
        pieces.append(Piece(tuple(range(begin, begin + len(part)))))
        begin += len(part)
    return Piece((prompt,), tuple(pieces))


# Of each rank the pieces. Two trunks of 2 and 3 parts beside one of 3; a row that fits beside two trunks.
CUTS: dict[str, list[tuple[Piece, ...]]] = {
    "trunks": [(group_of(0, [0], [0], [0]),), (group_of(0, [0], [0]), group_of(3, [0, 0], [0], [0]))],
    "whole": [(Piece((0, 1, 2, 3)),), (Piece((0, 1, 2)), group_of(3, [0, 0], [0, 0]))],
}
CASES = {
    "ddp": ("trunks", "kv"),
    "ddp, whole": ("whole", "kv"),
    "fsdp1": ("trunks", "kv"),
    "fsdp1, flat parameters": ("whole", "kv"),
    "fsdp2": ("trunks", "kv"),
    "fsdp2, whole": ("whole", "kv"),
    "fsdp2, graph": ("trunks", "graph"),
    "fsdp2, graph and whole": ("whole", "graph"),
    "fsdp2, mixed precision": ("trunks", "kv"),
    "ddp, experts": ("trunks", "kv"),
    "fsdp2, experts": ("trunks", "kv"),
    "fsdp2, experts and graph": ("whole", "graph"),
    "ddp, states": ("trunks", "kv"),
    "fsdp1, states": ("trunks", "kv"),
    "fsdp2, states": ("trunks", "kv"),
    "fsdp2, states and graph": ("trunks", "graph"),
    "fsdp2, mixed precision, states": ("trunks", "kv"),
}
if VERSION < (5, 0):
    # There, experts that no token takes have no gradient: DDP waits for it, and ranks of FSDP 2
    # reduce other sizes.
    CASES = {case: kinds for case, kinds in CASES.items() if "experts" not in case}


def batch_of(rank: int) -> PackedBatch:
    return ROWS[rank].pack(boundary="replicate")


def setup_of(case: str) -> Setup:
    return HYBRID if "states" in case else EXPERTS if "experts" in case else SETUP


def model_of(rank: int, case: str, dtype: torch.dtype) -> Any:
    model = setup_of(case).model(rank, dtype)
    model.config.output_router_logits = "experts" in case
    return model


def loss_of(rank: int, case: str) -> Any:
    of_tokens = losses(batch_of(rank))
    return (lambda part: of_tokens(part) + part.balance) if "experts" in case else of_tokens


def use_cut(rank: int, case: str) -> None:
    """The plan of a rank, in its process."""
    name, keep = CASES[case]
    layout = batch_of(rank).layout
    cut = Cut(layout.node_lens, layout.node_parents, CUTS[name][rank])
    plan: Any = prompt_once.Plan(cut, "kv" if cut.is_whole else keep)  # type: ignore[arg-type]
    prompt_once.plan_backward = lambda *_, **__: plan


def refused(rank: int, wrapped: Any, **options: Any) -> str:
    with pytest.raises(SharedPromptError) as caught:
        dualkv.shared_prompt_backward(wrapped, batch_of(rank), losses(batch_of(rank)), **options)
    return str(caught.value)


def _run_rank(rank: int, results: Any) -> None:
    for case in CASES:
        setup = setup_of(case)
        model = model_of(rank, case, torch.float32 if "mixed" in case else setup.dtype)
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
        wrapped = wrap(model, case.split(", s")[0].split(", e")[0], torch.device("cpu"))
        if case == "ddp":
            results[rank, "graph"] = refused(rank, wrapped, max_tokens=100, keep="graph")
        if case in ("ddp", "fsdp2"):  # one rank alone has no plan
            results[rank, f"{case}: no plan"] = refused(rank, wrapped, max_tokens=[3, 100][rank])
        use_cut(rank, case)
        for _ in range(2):  # what a pass leaves behind would be in the second
            wrapped.zero_grad()
            found = dualkv.shared_prompt_backward(wrapped, batch_of(rank), loss_of(rank, case), max_tokens=1)
        prompt_once.plan_backward = PLAN
        results[rank, case] = found.logps, {name: g.float() for name, g in whole_gradients(wrapped, model).items()}


@functools.cache
def results() -> dict[Any, Any]:
    """Of all cases, in one start of the processes; no fixture, so that a rank that fails is a failure."""
    return run_ranks(_run_rank, 2)


@pytest.mark.parametrize("case", CASES)
def test_gradients(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = results()
    setup = setup_of(case)
    model = model_of(0, case, setup.dtype)
    monkeypatch.setattr(prompt_once, "plan_backward", PLAN)  # set again by `use_cut`
    tolerance = Tolerance(1e-9, 2e-6)
    if setup is not SETUP:  # in float32
        tolerance = Tolerance(TOLERANCES[setup.dtype].value, 2e-5)
    if "mixed" in case:
        tolerance = Tolerance(5e-2, 0.2) if setup is HYBRID else Tolerance(3e-2, 8e-2)
    expected: dict[str, torch.Tensor] = {}
    for rank in range(2):
        if setup is EXPERTS:  # of parts, too, but by one process
            use_cut(rank, case)
            logps = dualkv.shared_prompt_backward(model, batch_of(rank), loss_of(rank, case), max_tokens=1).logps
            gradients = gradients_of(model)
        else:
            logps, gradients = expected_of(model, batch_of(rank))
        check_equal(found[rank, case][0].to(logps.dtype), logps, tolerance.value)
        for name, gradient in gradients.items():
            expected[name] = expected.get(name, 0) + gradient.float() / 2
    for rank in range(2):
        check_gradients(found[rank, case][1], expected, tolerance.gradient)


def test_what_ranks_are_refused() -> None:
    found = results()
    for rank in range(2):
        assert found[rank, "graph"].startswith('keep: expected "kv" inside of DDP and FSDP 1')
    for case in ("ddp", "fsdp2"):
        assert found[0, f"{case}: no plan"].startswith("max_tokens: expected more")
        assert found[1, f"{case}: no plan"].endswith("got an error on another rank")
