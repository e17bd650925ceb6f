# SPDX-License-Identifier: BSD-3-Clause
"""Ranks that divide one row but have packed different ones: an error on all of them, which says what differs."""

from __future__ import annotations

import itertools
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks
from tiny_models import dualkv, tiny_model

from flash_attn_dualkv import PackedBatch, pack_prefix_tree, pack_shared_prompts
from flash_attn_dualkv.parallel import sharded
from flash_attn_dualkv.parallel.context import ContextLayout
from flash_attn_dualkv.parallel.sharded import Common, DividedLayout, _digest, _numbers, same_on_all_ranks
from flash_attn_dualkv.parallel.ulysses import UlyssesLayout

Call = Callable[[int], Any]  # of a rank


def prompts(prompt: list[int], *responses: list[int], **options: Any) -> PackedBatch:
    return pack_shared_prompts([prompt] * len(responses), [*responses], **{"pad_to_multiple_of": 2, **options})


def tree(mask: list[int]) -> PackedBatch:
    return pack_prefix_tree([[5, 6, 7, 8], [5, 6, 9]], loss_mask=[mask, [0, 0, 1]], min_shared=1)


def divide(kind: str, batch: PackedBatch, **options: Any) -> DividedLayout:
    group = dist.group.WORLD
    assert group is not None
    if kind == "ulysses":
        return UlyssesLayout.of(batch.layout, group)
    return ContextLayout.of(batch.layout, group, **{"tile": 1, **options})


def score(batch: Any, layout: Any, **options: Any) -> Any:
    return dualkv.shared_prompt_forward(tiny_model("qwen3"), batch, layout=layout, **options)[0].detach()


SAME = prompts([1, 2, 3, 4], [5, 6, 7], [8, 9])
OTHER = prompts([1, 2, 3, 4, 5], [6, 7], [8, 9])
PACKED: dict[str, tuple[Callable[[int], PackedBatch], str]] = {
    "ids": (lambda rank: prompts([1, 2, 3 + rank, 4], [5, 6, 7 + rank], [8, 9]), "input_ids"),
    "one id": (lambda rank: prompts([1, 2, 3, 4], [5, 6, 7], [8, 9 + rank]), "input_ids"),
    "order of ids": (lambda rank: prompts([1, 2, 3, 4], [[5, 6, 7], [6, 5, 7]][rank], [8, 9]), "input_ids"),
    "lengths": (
        lambda rank: prompts([1, 2, 3, 4], *[[[5, 6, 7], [8, 9]], [[5, 6], [7, 8, 9]]][rank]),
        "node_lens and node_parents, input_ids",
    ),
    "totals": (lambda rank: prompts([1, 2, 3], [4] * (3 + 2 * rank)), "node_lens and node_parents, .*"),
    "parents": (
        lambda rank: prompts([1, 2], [3], [4], group_ids=[0, rank], pad_to_multiple_of=8),
        "node_lens and node_parents, .*",
    ),
    "padding": (lambda rank: prompts([1, 2], [3], pad_to_multiple_of=[6, 8][rank]), "pad, .*"),
}
DIFFERENT: dict[str, tuple[Call, str]] = {
    **{
        f"{kind}, {name}": (lambda rank, kind=kind, make=make: divide(kind, make(rank)), wanted)
        for kind in ("context", "ulysses")
        for name, (make, wanted) in PACKED.items()
    },
    "tile": (lambda rank: divide("context", SAME, tile=1 + rank), "options"),
    "chunks": (lambda rank: divide("context", SAME, chunks=1 + rank), "options"),
    "temperature": (lambda rank: score(SAME, divide("context", SAME), temperature=1.0 + rank), "options"),
    "entropy": (lambda rank: score(SAME, divide("ulysses", SAME), with_entropy=bool(rank)), "options"),
    "number of scored tokens": (
        lambda rank: score(tree([0, 0, 1 - rank, 1]), divide("context", tree([0, 0, 1, 1]))),
        "response_lens, token_index",
    ),
    "scored tokens": (
        lambda rank: score(tree([0, rank, 1 - rank, 1]), divide("context", tree([0, 0, 1, 1]))),
        "token_index",
    ),
    "copied ids": (
        lambda rank: score(
            replace(SAME, layout=replace(SAME.layout, input_ids=SAME.input_ids + rank)), divide("context", SAME)
        ),
        "input_ids",
    ),
}
# What rank 1 says; rank 0 says that it has failed.
FAILING: dict[str, tuple[Call, str]] = {
    "layout": (lambda rank: divide("context", replace(SAME, layout=[SAME.layout, "none"][rank])), "layout: expected "),
    "option": (lambda rank: divide("context", SAME, pad_to_multiple_of=1 - rank), "pad_to_multiple_of: expected "),
    "rows": (
        lambda rank: divide("ulysses", prompts([1, 2], [3], pad_to_multiple_of=4 + rank)),
        "layout: expected a multiple of the 2 ranks",
    ),
    "batch": (lambda rank: score([SAME, "none"][rank], divide("context", SAME)), "batch: expected a PackedBatch"),
    "another batch": (
        lambda rank: score([SAME, OTHER][rank], divide("context", SAME)),
        "layout: expected the batch's, divided, got that of another batch",
    ),
    "temperature": (
        lambda rank: score(SAME, divide("ulysses", SAME), temperature=1.0 - rank),
        "temperature: expected ",
    ),
}
# No false alarm: one rank does not know the ids and positions; both know other copies of them.
EQUAL: dict[str, Call] = {
    "alone": lambda rank: divide(
        "context", replace(SAME, layout=[SAME.layout, pickle.loads(pickle.dumps(SAME.layout))][rank])
    ),
    "copies": lambda rank: score(pickle.loads(pickle.dumps(SAME)), divide("ulysses", SAME)),
    "meta": lambda rank: divide("context", [SAME, SAME.to("meta")][rank]),
    "inference": torch.inference_mode()(lambda rank: score(SAME, divide("context", SAME))),
    "scores": lambda rank: score(SAME, divide("context", SAME)),
}
EVERYTHING: dict[Any, Call] = {
    **{("differ", name): call for name, (call, _) in DIFFERENT.items()},
    **{("fail", name): call for name, (call, _) in FAILING.items()},
    **{("equal", name): call for name, call in EQUAL.items()},
}


def outcome(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _run_rank(rank: int, results: Any) -> None:
    for name, call in EVERYTHING.items():
        results[rank, name] = outcome(lambda call=call: call(rank))


@cache
def found() -> dict[Any, Any]:
    """What two ranks say of all calls, one after the other: an error leaves no rank behind."""
    return run_ranks(_run_rank, 2)


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("name", DIFFERENT)
def test_what_differs(name: str, rank: int) -> None:
    expected = re.escape("SharedPromptError: batch: expected the same on all ranks that divide its row ")
    assert re.fullmatch(rf"{expected}.*, got other {DIFFERENT[name][1]} on some", found()[rank, ("differ", name)])


@pytest.mark.parametrize("name", FAILING)
def test_a_rank_that_fails_tells_the_others(name: str) -> None:
    own, other = (found()[rank, ("fail", name)] for rank in (1, 0))
    assert FAILING[name][1] in own, own
    assert re.match(r"SharedPromptError: group: expected .*, got an error on rank 1", other), other


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize("name", EQUAL)
def test_equal_rows(name: str, rank: int) -> None:
    assert found()[rank, ("equal", name)] == "no error"


def _run_crossed(rank: int, results: Any) -> None:
    """Heads over ranks 0 and 2, 1 and 3; rows over 0 and 1, 2 and 3."""
    rows, heads = (
        [dist.new_group(one) for one in pairs][place]
        for pairs, place in (([[0, 1], [2, 3]], rank // 2), ([[0, 2], [1, 3]], rank % 2))
    )
    layout = UlyssesLayout.of(ContextLayout.of(SAME.layout, rows, pad_to_multiple_of=2, tile=1), heads)
    results[rank, "equal"] = outcome(lambda: score(SAME, layout))
    results[rank, "differ"] = outcome(lambda: score(SAME, layout, temperature=2.0 if rank == 3 else 1.0))
    results[rank, "fail"] = outcome(lambda: score(SAME if rank != 3 else OTHER, layout))
    # Heads over ranks that have other rows.
    divided = ContextLayout.of(SAME.layout, rows, pad_to_multiple_of=2, tile=1)
    results[rank, "parts"] = outcome(lambda: UlyssesLayout.of(divided, rows))


def test_ranks_that_are_divided_twice() -> None:
    """One of four tells all others, of which one is in none of its groups."""
    crossed = run_ranks(_run_crossed, 4)
    for rank in range(4):
        assert crossed[rank, "equal"] == "no error"
        assert "got other options on some" in crossed[rank, "differ"]
        expected = "that of another batch" if rank == 3 else "got an error on rank 3"
        assert expected in crossed[rank, "fail"]
        assert "got other row_index on some" in crossed[rank, "parts"]


def test_numbers_depend_on_values_and_their_order() -> None:
    orders = [torch.tensor(one) for one in itertools.permutations(range(7))]
    orders += [torch.tensor([0] * count, dtype=torch.int64) for count in range(9)]
    for read in (lambda common: _numbers(common)[0], _digest):
        assert len({tuple(read(Common(input_ids=ids)).tolist()) for ids in orders}) == len(orders)
    both = [_digest(Common(input_ids=ids[:4], token_index=ids[4:])).tolist() for ids in orders if len(ids) == 7]
    assert len({*map(tuple, both)}) == len(both) and all(most == -least for most, least in both)
    longer, shorter = (Common(input_ids=orders[0][:cut], token_index=orders[0][cut:]) for cut in (5, 3))
    assert _digest(longer).tolist() != _digest(shorter).tolist()
    zeros = torch.zeros(4, dtype=torch.int64)
    assert len({tuple(_digest(Common(input_ids=zeros, pad=pad)).tolist()) for pad in range(4)}) == 4


def test_numbers_are_the_same_in_all_processes() -> None:
    """Python's own hash of a string is not."""
    values = "sharing='ratio', options='1.0', pad=3, response_lens=(3, -1), input_ids=torch.arange(9)"
    imports = "import torch; from flash_attn_dualkv.parallel.sharded import Common, _digest, _numbers"
    code = f"{imports}; print(_numbers(Common({values})), _digest(Common({values})))"
    printed = [
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True)
        for seed in ("1", "2")
    ]
    assert printed[0].stdout == printed[1].stdout and b"tensor" in printed[0].stdout, printed[0].stderr


def test_nothing_is_sent_on_one_rank() -> None:
    with same_on_all_ranks() as common:
        common.note(SAME.layout, None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.MonkeyPatch.context() as patch:
            for module, name in ((sharded, "all_gather"), (dist, "all_reduce")):
                patch.setattr(module, name, lambda *args, **options: pytest.fail("something is sent"))
            assert divide("context", SAME).ranks == 1
    finally:
        dist.destroy_process_group()
