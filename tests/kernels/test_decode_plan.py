# SPDX-License-Identifier: BSD-3-Clause
"""The plan of a decoding step, made by the kernels, against what requests must walk."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from decode_plans import (
    BRANCH,
    TILES,
    Cache,
    DecodeStep,
    Item,
    Lists,
    Plan,
    Requests,
    check_lists,
    grown,
    ints,
    limits_for,
    random_tree,
    steps_of,
)
from launches import DEVICE, GPU_MARKS, captured, counted_launches, multiprocessors, needs_gpu
from node_tables import HOSTILE_VALUES

pytestmark = GPU_MARKS
COLUMNS = {16: 60, 48: 24, 256: 7}  # of pages
SIZES = [*((page_size, head_dim) for page_size in COLUMNS for head_dim in (64, 128)), (16, 256), (48, 576)]
sizes = pytest.mark.parametrize(("page_size", "head_dim"), SIZES)
splits = pytest.mark.parametrize("split", [0, 2], ids="split{}".format)


def split_keys(split: int, head_dim: int) -> int:
    """Of so many tiles."""
    return split * TILES[head_dim][1]


@sizes
@splits
@pytest.mark.parametrize("heads", [(8, 2), (5, 1), (80, 1), (256, 64)], ids="H{0[0]}-{0[1]}".format)
def test_random_forests(page_size: int, head_dim: int, split: int, heads: tuple[int, int]) -> None:
    """Each row meets the trainer's tiles in order, in its own pages; what may be shared is read once; steps follow.

    With many KV heads few leaves keep a GPU busy, so that some fold, whose splits are short.
    """
    rng = np.random.default_rng(page_size + head_dim)
    columns, shared, folds = COLUMNS[page_size], 0, 0
    if heads[1] == 64:
        split = min(split, 1)
    for _ in range(6):
        requests, cache = random_tree(rng, page_size, TILES[head_dim][1], columns)
        spare = int(rng.integers(0, 3))
        limits = limits_for(requests, heads, head_dim, spare, split_keys(split, head_dim))
        plan = Plan(limits._replace(max_keys=columns * page_size), columns)
        for turn in range(3):
            found = plan.update(requests.step(columns, gives_tree=turn % 2 == 1))
            walks = check_lists(requests, found, heads[0] // heads[1], split)
            shared += walks.check_sharing()
            folds += sum(item.folds > 0 for item in found.shared)
            requests = grown(rng, requests, cache, columns)
    assert shared > 20
    assert folds > 3 or split == 0 or heads[1] < 64


@sizes
@splits
def test_few_pages_anywhere(page_size: int, head_dim: int, split: int) -> None:
    """Pages that are alike behind others that are not, a page in several columns, lengths and cuts of any kind."""
    rng = np.random.default_rng(page_size + head_dim)
    columns, branches = COLUMNS[page_size], 0
    for turn in range(8):
        count = int(rng.integers(2, 14))
        pages = np.where(rng.random((count, columns)) < 0.9, np.arange(columns), rng.integers(0, columns + 2, columns))
        keys = rng.integers(0, columns * page_size + 1, count)
        requests = Requests(pages.tolist(), keys.tolist(), page_size, columns + 2)
        if turn % 2:
            requests.cuts = rng.integers(-9, columns * page_size, count).tolist()
        if turn % 3 == 0:
            requests.queries = rng.choice([0, 1, 2, 300], count).tolist()
        limits = limits_for(requests, (8, 2), head_dim, split_keys=split_keys(split, head_dim))
        found = Plan(limits, columns).update(requests)
        check_lists(requests, found, 4, split)
        branches += sum(item.waits >= 0 for item in found.shared)
    assert branches > 8


def test_what_a_fork_shares() -> None:
    """Two requests with all pages alike, and one that leaves them within a tile: the example of decode.h."""
    requests = Requests([[5, 6, 7, 8], [5, 6, 7, 8], [5, 9, 1, 2]], [4 * 128] * 3, 128, 10)
    plan = Plan(limits_for(requests, (4, 1), 64), 4)
    found = plan.update(requests)
    branch, all_keys = 1 << 30, 4 * 128
    assert found.shared == [
        Item(0, 0, 4, 511, all_keys, all_keys, 4, 4, -1, 0, 0),
        Item(1, 4, 4, 511, all_keys, all_keys, 4, 4, -1, 0, 0),
        Item(2, 8, 4, 511, all_keys, all_keys, 1, 4, -1, 0, 1),
        Item(0, 0, 8, branch, all_keys, all_keys, 1, 4, 0, 2, 1),
        Item(0, 0, 12, branch, 128, 128, 0, 1, 1, 2, -1),
    ]
    assert found.queries == [0, 1, 2]
    check_lists(requests, found, 4)


def test_leaves_fold_while_others_keep_the_gpu_busy() -> None:
    """Which ones do depends on the tiles that come behind them in the list, and on their own splits."""
    lengths = [16, 8, 8, 8, 8, 8, 6, *[4] * 6, 3, 2, 1]  # in tiles
    table = np.arange(16 * len(lengths)).reshape(-1, 16).tolist()
    requests = Requests(table, [128 * tiles for tiles in lengths], 128, 16 * len(lengths))
    limits = limits_for(requests, (64, 64), 64, split_keys=256)._replace(max_keys=16 * 128)
    found = Plan(limits, 16).update(requests)
    check_lists(requests, found, 1, 2)
    blocks = -(-2 * multiprocessors() // 64)  # of a KV head
    busy = [index for index, tiles in enumerate(lengths) if sum(lengths[index + 1 :]) >= blocks * tiles]
    folding = [index for index in busy if lengths[index] // 2 + 1 >= 4]
    assert [item.request for item in found.shared if item.folds] == folding
    assert 0 < len(folding) < len(busy) < 16
    for item in found.shared:
        assert item.folds in (0, lengths[item.request] // 2 + 1)  # the last split, behind the cut, is empty


def test_nobody_depends_on_an_owner_that_cannot_share() -> None:
    """The first request with a prompt's pages has no query, or a cut at 0: the others share all the same."""
    pages = list(range(12))
    for queries, cuts in (([0, 1, 1], None), ([1, 1, 1], [0, 160, 160]), ([300, 1, 1], None)):
        requests = Requests([pages] * 3, [192, 192, 192], 16, 20, queries, cuts)
        walks = check_lists(requests, Plan(limits_for(requests, (4, 1), 128), 12).update(requests), 4)
        assert walks.check_sharing() == 2


def test_repeats() -> None:
    """Lists are the same again, in another memory, and after steps of others."""
    rng = np.random.default_rng(0)
    requests, _ = random_tree(rng, 16, 80, 60, most=40)
    other, _ = random_tree(rng, 16, 80, 60, most=40)
    limits = limits_for(requests, (8, 2), 128, spare=40)._replace(num_pages=200_000, max_queries=2000)
    first, second = Plan(limits, 60), Plan(limits, 60)
    found = first.update(requests)
    second.update(other)
    assert found == second.update(requests) == first.update(requests)


def chain(count: int, page_size: int) -> Requests:
    """Each request has one page more of the longest one than the request before, and one of its own."""
    long = list(range(count))
    table = [[*long[: index + 1], count + index] for index in range(count)]
    return Requests(table, [page_size * len(pages) for pages in table], page_size, 2 * count)


@pytest.mark.parametrize(("count", "heads", "fits"), [(60, 4, True), (200, 4, False), (250, 1, True), (300, 1, True)])
@splits
def test_deep_forests(count: int, heads: int, fits: bool, split: int) -> None:
    """Where the items of all branches have no room nothing is shared; every 256th level begins a tree of its own."""
    requests = chain(count, 128)
    limits = limits_for(requests, (heads, 1), 64, split_keys=128 * split)
    found = Plan(limits, count + 1).update(requests)
    walks = check_lists(requests, found, heads, split)
    assert any(item.q_pos == BRANCH for item in found.shared) == (fits or split > 0)
    assert fits or split or found.shared == found.alone
    assert not fits or max(map(len, walks.readers.values())) == 1 + count // 256


def test_a_long_chain_of_parents_is_flat() -> None:
    """Requests that follow one another, each with a page more, share equally many tiles: each is read once."""
    requests = replace(chain(300, 16), cuts=[160] * 300)
    found = Plan(limits_for(requests, (4, 1), 128), 301).update(requests)
    walks = check_lists(requests, found, 4)
    assert walks.check_sharing() == 2


@pytest.mark.parametrize("count", [1100, 4096])
def test_many_requests(count: int) -> None:
    """More than shared memory holds."""
    rng = np.random.default_rng(1)
    cache, table, keys, cuts = Cache(rng, 20 * count, 16), [], [], []
    for _ in range(count // 10):
        prompt = cache.extend([], 0, int(rng.integers(0, 500)))
        for _ in range(10):
            pages, length = cache.extend(*prompt, int(rng.integers(1, 20)))
            table.append(pages), keys.append(length), cuts.append(prompt[1])
    while len(table) < count:
        table.append([]), keys.append(0), cuts.append(0)
    order = rng.permutation(count).tolist()
    requests = Requests(*([one[index] for index in order] for one in (table, keys)), 16, cache.num_pages)
    requests.cuts = [cuts[index] for index in order]
    walks = check_lists(requests, Plan(limits_for(requests, (4, 4), 128), 34).update(requests), 1)
    if count < 2000:
        assert walks.check_sharing() > 100


def hostile(rng: np.random.Generator, like: torch.Tensor | None, share: float) -> torch.Tensor | None:
    """A tensor some of whose numbers are arbitrary."""
    if like is None:
        return None
    shape = tuple(like.shape)
    wild = np.where(rng.random(shape) < 0.5, rng.choice(HOSTILE_VALUES, shape), rng.integers(-(2**31), 2**31, shape))
    wild = rng.integers(-2, 40, shape) if rng.random() < 0.3 else wild
    mixed = np.where(rng.random(shape) < share, wild, like.cpu().numpy())
    return torch.from_numpy(mixed.astype(np.int32)).to(DEVICE)


def check_hostile(plan: Plan, step: DecodeStep, lists: Lists, heads: int) -> None:
    """Rows and tiles are in their tensors, and whoever waits is served."""
    requests, columns = step.block_table.shape
    rows = step.queries * heads
    assert all(0 <= one < step.queries for one in lists.queries)
    for items in (lists.shared, lists.alone):
        done: dict[int, int] = {}
        for item in items:
            assert 0 <= item.request < requests and item.waits < plan.limits.max_requests
            assert 0 < item.rows <= lists.block_m and item.row >= 0 and item.row + item.rows <= rows
            for _, part in steps_of(item, lists.block_n, plan.limits.split_keys // lists.block_n):
                assert 0 <= part.first <= part.end and 0 <= part.cut <= part.keys <= columns * plan.limits.page_size
                assert (part.end - 1) * lists.block_n < part.cut
            assert item.waits < 0 or done.get(item.waits, 0) == item.arrivals
            done[item.signals] = done.get(item.signals, 0) + 1
        waits = {item.waits for item in items}
        assert {item.signals for item in items} <= waits | {-1}


@sizes
def test_hostile_contents(page_size: int, head_dim: int) -> None:
    """Any numbers in any tensor: nothing behind the memory is written, no row is outside, nobody waits in vain."""
    rng = np.random.default_rng(2)
    columns = COLUMNS[page_size]
    for turn in range(12):
        requests, _ = random_tree(rng, page_size, 80, columns)
        split = turn % 3
        limits = limits_for(requests, (8, 2), head_dim, 1, split_keys(split, head_dim))
        plan, step = Plan(limits, columns), requests.step(columns, gives_tree=turn % 2 == 1)
        for share in (0.05, 0.5, 1.0):
            given = [hostile(rng, one, share if (turn + at) % 3 else 0.02) for at, one in enumerate(tensors(step))]
            assert given[0] is not None and given[1] is not None
            wild = DecodeStep(given[0], given[1], step.queries, *given[2:])
            check_hostile(plan, wild, plan.update(wild), 4)
        check_lists(requests, plan.update(requests), 4, split).check_sharing()  # no step spoils the next


def tensors(step: DecodeStep) -> tuple[torch.Tensor | None, ...]:
    return step.block_table, step.seqlens, *step[3:]


@needs_gpu
@pytest.mark.parametrize("gives_tree", [False, True])
def test_a_graph_follows_new_contents(gives_tree: bool) -> None:
    """Captured once, replayed with other requests, lengths, forests and queries."""
    rng = np.random.default_rng(3)
    made = [random_tree(rng, 16, 80, 60, most=20)[0] for _ in range(4)]
    made = [replace(one, table=one.table[:20], keys=one.keys[:20], cuts=[200] * 20) for one in made]
    made = [replace(one, queries=rng.permutation([0, 2] * 10).tolist(), rows_before=0, rows_behind=0) for one in made]
    limits = limits_for(made[0], (8, 2), 128)
    plan, eager, steps = Plan(limits, 60), Plan(limits, 60), [one.step(60, gives_tree) for one in made]
    static = DecodeStep(*(one.clone() if isinstance(one, torch.Tensor) else one for one in steps[0]))

    def launch() -> tuple[torch.Tensor, ...]:
        plan.launch(static)
        return (plan.memory,)

    graph, _ = captured(launch)
    for requests, step in zip(made, steps):
        for to, new in zip(tensors(static), tensors(step)):
            if to is not None and new is not None:
                to.copy_(new)
        graph.replay()
        assert plan.read(static.queries) == eager.update(step)
        check_lists(requests, plan.read(static.queries), 4)


def test_offsets_that_decrease() -> None:
    """Requests would have rows in common: no row is in any."""
    requests = Requests([[0], [0], [1]], [16] * 3, 16, 4)
    plan = Plan(limits_for(requests, (4, 1), 64, spare=4), 1)
    step = requests.step(1)._replace(queries=7, cu_seqlens_q=ints([0, 5, 2, 7]))
    found = plan.update(step)
    assert found.shared == found.alone == [Item(0, 0, 28, 0, 0, 0, 0, 0, -1, 0, -1)]
    assert found.queries == list(range(7))


def test_no_requests() -> None:
    requests = Requests([[0]], [16], 16, 4)
    plan = Plan(limits_for(requests, (4, 1), 64), 1)
    step = DecodeStep(torch.zeros(0, 1, dtype=torch.int32, device=DEVICE), ints([]), 0)
    assert plan.update(step) == Lists([], [], [], [], *TILES[64])


def test_sizes_that_are_refused() -> None:
    requests = Requests([[0]], [16], 16, 4)
    limits = limits_for(requests, (4, 1), 64)
    with pytest.raises(ValueError, match="max_requests: expected 0 to 4096, got 4097"):
        Plan(limits._replace(max_requests=4097), 1)
    with pytest.raises(ValueError, match="max_keys: expected 0 to 33554432, got 33554433"):
        Plan(limits._replace(max_keys=2**25 + 1), 1)
    with pytest.raises(ValueError, match="queries: expected 0 to 1, got 2"):
        Plan(limits, 1).update(requests.step(1)._replace(queries=2))


def test_launches() -> None:
    requests = Requests([[0]], [16], 16, 4)
    plan = Plan(limits_for(requests, (4, 1), 64), 1)
    with counted_launches() as counts:
        plan.update(requests)
    assert counts == {"dualkv_decode_plan": 1}


def test_what_is_not_said_is_not_shared() -> None:
    """A given tree takes the place of the search: equal pages are read for each request, a wrong tree is believed."""
    pages = list(range(12))
    requests = Requests([pages, pages, [*pages[:11], 13]], [192] * 3, 16, 20)
    plan, step = Plan(limits_for(requests, (4, 1), 128), 12), requests.step(12)
    for parents, shared, branches in (
        ([-1, -1, -1], [0, 0, 0], 0),
        ([-1, 0, -1], [0, 5, 9], 1),
        ([7, 99, 99], [99] * 3, 1),
    ):
        found = plan.update(step._replace(parents=ints(parents), shared_pages=ints(shared)))
        assert sum(item.waits >= 0 for item in found.shared) == branches
        if parents[0] < 0:
            check_lists(requests, found, 4)
