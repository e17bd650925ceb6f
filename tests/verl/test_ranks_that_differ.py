# SPDX-License-Identifier: BSD-3-Clause
"""Ranks of one Ulysses group whose micro-batches differ: an error on all of them, in verl's FSDP engine."""

from __future__ import annotations

import contextlib
import importlib
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed: see docs/trainers.md")

import torch
import torch.distributed as dist
from processes import run_ranks
from tensordict import TensorDict
from transformers import Qwen3Config
from verl.utils import tensordict_utils as tu

from flash_attn_dualkv.integrations.common.options import Options

PROMPT, OTHER = [5, 6, 7, 8], [5, 6, 7, 9]
SAME = "batch: expected the same on all ranks that divide its row (a sampler gives them the same samples)"
DIFFERS = SAME + ", got other {} on some"
FAILED = "group: expected ranks that all come to this micro-batch, got an error on rank 1, which says there why"
# Prompts of the samples of rank 0 and of rank 1, and what they say.
CASES: dict[str, tuple[list[Any], list[Any], str, str]] = {
    "equal": ([PROMPT] * 3, [PROMPT] * 3, "shared", "shared"),
    "equal, not shared": ([PROMPT], [PROMPT], "dedup_ratio", "dedup_ratio"),
    "ids": ([PROMPT] * 3, [OTHER] * 3, *[DIFFERS.format("input_ids")] * 2),
    "shared on one": ([PROMPT] * 3, [PROMPT, OTHER, [5]], *[DIFFERS.format("sharing")] * 2),
    "an error on one": ([PROMPT] * 3, [PROMPT] * 2 + [None], FAILED, "no tokens"),
}


def micro_batch(prompts: list[list[int]]) -> Any:
    samples = [torch.tensor([*one, 10, 11, 12 + index]) for index, one in enumerate(prompts)]

    def jagged(values: list[Any]) -> Any:
        return torch.nested.as_nested_tensor([*map(torch.as_tensor, values)], layout=torch.jagged)

    values = dict(input_ids=jagged(samples), prompts=jagged(prompts))
    values["position_ids"] = jagged([torch.arange(len(one)) for one in samples])
    data = TensorDict({**values, "temperature": torch.ones(len(prompts))}, batch_size=len(prompts))
    tu.assign_non_tensor(data, use_dynamic_bsz=True)
    return data


def _run_rank(rank: int, names: list[str], results: Any) -> None:
    engines = importlib.import_module("flash_attn_dualkv.integrations.verl.engine")
    engines.get_device_id = lambda: "cpu"
    engines.packed_row = lambda *args: None
    engines.packed_forward = lambda *args: contextlib.nullcontext()
    engines.transformer_impl.get_ulysses_sequence_parallel_group = lambda: dist.group.WORLD
    engines.FSDPEngineWithLMHead.forward_step = lambda *args: None
    reasons: list[str] = []

    class Engine(engines.SharedPromptFSDPEngine):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.options, self.refusal, self.refusal_now, self.shares, self.budget = Options(), None, None, True, None
            self.use_ulysses_sp, self.ulysses_sequence_parallel_size, self.pad_to_length = True, 2, False
            self.pad_to_length_bucket, self.announced = 1, set()
            self.stock_module = SimpleNamespace(config=Qwen3Config())
            self.statistics = SimpleNamespace(count_shared=lambda *args: reasons.append("shared"))

        def _is_mine(self) -> bool:
            return True

        def _kernels_lack(self) -> None:
            return None

        def _count_stock(self, micro_batch: Any, reason: str) -> None:
            reasons.append(reason)

        def _plan_of(self, data: Any) -> Any:
            if "fails" in data:
                raise ValueError("no tokens")
            return super()._plan_of(data)

    for name in names:
        prompts = CASES[name][rank]
        data = micro_batch([one for one in prompts if one is not None])
        if None in prompts:
            tu.assign_non_tensor(data, fails=True)
        try:
            Engine().forward_step(data, None, True)
            results[rank, name] = reasons.pop()
        except ValueError as error:
            results[rank, name] = str(error)


@pytest.fixture(scope="module")
def found() -> dict[Any, Any]:
    return run_ranks(_run_rank, 2, [*CASES])


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("name", CASES)
def test_ranks_of_ulysses(found: dict[Any, Any], name: str, rank: int) -> None:
    assert found[rank, name] == CASES[name][2 + rank]
