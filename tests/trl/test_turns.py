# SPDX-License-Identifier: BSD-3-Clause
"""What completions share behind their prompts in TRL's trainers: turns, branches, steps that later ones begin with."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import tiny_trl
import torch
from hybrid_models import HYBRIDS, KINDS, hybrid_model
from tiny_models import tiny_model
from tiny_trl import StockInGroups, both, compare, drawing, model_on_disk, padded, pair, shared

from flash_attn_dualkv import group_by_prefix

pytestmark = pytest.mark.usefixtures("restored_registry")
GRPO = shared.SharedPromptGRPOTrainer
LEAST = 4  # tokens that a node must save here


def rollouts(prompts: int = 2) -> list[tuple[list[int], list[int]]]:
    """(prompt, completion) of three steps of a dialogue, the last one tried again, and all of it in one completion."""
    tokens, found = drawing(6), []
    for index in range(prompts):
        prompt = context = tokens(30 - 5 * index)
        for turn in range(3):
            found.append((context, tokens(14 - 2 * turn)))
            context = [*context, *found[-1][1], *tokens(5)]  # what a tool has answered
        context, last = found[-1]
        found += [(context, last[:4] + tokens(6)), (prompt, [*context, *last][len(prompt) :])]
    return found


def tokens_run(made: Any) -> int:
    return int(made._sharing.take().tokens)


@pytest.mark.parametrize("family", ["qwen3", "mixtral", *KINDS[:1]])
def test_dialogues(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every token of the tree is run once, every completion is scored at its own rows."""
    make = hybrid_model if family in HYBRIDS else tiny_model
    model = functools.partial(make, family, dtype=torch.float32, attention="sdpa")
    stock, ours = pair(model, tmp_path, dict(min_shared=LEAST))
    samples = rollouts()
    if family in HYBRIDS:  # a state that is carried over many tokens rounds gradients a little more
        monkeypatch.setattr(tiny_trl, "GRADIENT", 2e-5)
    compare(stock, ours, *padded(samples))
    assert not ours._sharing.tally.fallbacks
    tree = group_by_prefix([[*p, *c] for p, c in samples], boundary="replicate", min_shared=LEAST)
    assert tokens_run(ours) == 2 * sum(tree.node_lens)  # with gradients, and once more without


def agent(prompts: list[str], made: Any) -> dict[str, Any]:
    """Rollouts of three turns, of which the first two are alike in half of a prompt's completions."""
    tokens = drawing(7 + made.state.global_step)
    ids = made.processing_class(prompts)["input_ids"]
    completions, masks = [], []
    begins: dict[tuple[str, int], list[int]] = {}
    for index, prompt in enumerate(prompts):
        begin = begins.setdefault((prompt, index % 2), tokens(16))
        completions.append(begin + tokens(3 + index % 4))
        masks.append([1] * 6 + [0] * 4 + [1] * (len(completions[-1]) - 10))  # a tool's answer between turns
    return dict(prompt_ids=ids, completion_ids=completions, logprobs=None, env_mask=masks)


def test_training_on_turns(tmp_path: Path) -> None:
    """As the stock trainer does on rollouts whose turns are alike, with the answers of tools between them."""
    path = model_on_disk(tmp_path)
    config = dict(max_completion_length=32, beta=0.1, num_iterations=2, arguments=dict(rollout_func=agent))
    got, alone = (both(GRPO, StockInGroups, path, tmp_path, dict(min_shared=one), **config)[0] for one in (LEAST, None))
    for one, other in zip(got.metric("dedup_ratio"), alone.metric("dedup_ratio")):
        assert one > 1.2 * other
