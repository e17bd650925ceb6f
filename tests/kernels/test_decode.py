# SPDX-License-Identifier: BSD-3-Clause
"""Kernels of decoding over pages: results against fp64, and bits against training and other batches."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise, takewhile
from typing import Any, NamedTuple

import oracle
import pytest
import torch
from decode_plans import BRANCH, Item, read_lists
from forests import Forest, forest, ints
from launches import (
    DEVICE,
    GPU_MARKS,
    REPEATS,
    captured,
    counted_launches,
    multiprocessors,
    needs_gpu,
    poison_free_memory,
)
from torch import Tensor

from flash_attn_dualkv import SharedPrefixPlan, flash_attn_dualkv_varlen_func, shared_prefix_decode

pytestmark = GPU_MARKS
HEADS = {64: (8, 2), 128: (4, 4), 256: (5, 1), 576: (16, 1)}
# Head dim, page size, layout, most queries of a request, dtype, options.
CASES: list[tuple[int, int, str, int, torch.dtype, dict[str, Any]]] = [
    (64, 16, "NHD", 1, torch.bfloat16, {}),
    (64, 48, "HND", 3, torch.float16, {"softcap": 5.0}),
    (64, 256, "halves", 2, torch.bfloat16, {"window": 70}),
    (128, 16, "side by side", 4, torch.bfloat16, {"sinks": True}),
    (128, 48, "NHD", 1, torch.float16, {"window": 40, "sinks": True}),
    (128, 16, "HND", 20, torch.bfloat16, {"scale": 0.5}),
    (256, 16, "NHD", 2, torch.float16, {"softcap": 20.0, "sinks": True}),
    (256, 32, "HND", 1, torch.bfloat16, {}),
    (256, 16, "HND", 20, torch.bfloat16, {}),
    (576, 16, "latents", 4, torch.bfloat16, {"scale": 0.5}),  # maxima move
    (576, 48, "latents", 1, torch.float16, {"scale": 0.1, "softcap": 20.0, "sinks": True}),
    (576, 64, "latents", 9, torch.bfloat16, {"scale": 192**-0.5, "window": 70}),
]


def case_name(case: tuple[Any, ...]) -> str:
    return "d" + "-".join(map(str, case[:4]))


TRAINED = [case for case in CASES if case[2] != "latents"]  # whose bits may be those of training
cases = pytest.mark.parametrize("case", CASES, ids=case_name)
trained_cases = pytest.mark.parametrize("case", TRAINED, ids=case_name)
modes = pytest.mark.parametrize("exact", ["trainer", "split"])
cases_by_mode = pytest.mark.parametrize(
    ("case", "exact"),
    [
        pytest.param(case, exact, id=f"{case_name(case)}-{exact}")
        for exact in ("trainer", "split")
        for case in (TRAINED if exact == "trainer" else CASES)
    ],
)


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two tiles or three, so that rows have several."""
    monkeypatch.setattr("flash_attn_dualkv.decode.plan.SPLIT_KEYS", 160)


TILE = 128  # keys of the widest tile of any kernel


class Tiles(NamedTuple):
    """Of a kernel."""

    rows: int
    keys: int
    blocks: int  # on a multiprocessor


TILES = {
    "sm80": {64: Tiles(64, 128, 2), 128: Tiles(64, 64, 3), 256: Tiles(64, 64, 1), 576: Tiles(64, 32, 1)},
    "sm90": {64: Tiles(64, 128, 2), 128: Tiles(64, 80, 2), 256: Tiles(128, 80, 1), 576: Tiles(64, 64, 1)},
}


def random_step(case: tuple[Any, ...], seed: int, most_pages: int = 0) -> tuple[Forest, Tensor]:
    """A forest and cuts in which some requests share a tile for sure, so that states are handed over."""
    head_dim, page_size, layout, queries, dtype, _ = case
    most = most_pages or (20 if DEVICE == "cuda" else 9)
    for attempt in range(1000):
        number = 1000 * seed + attempt
        made = forest(
            number, page_size=page_size, layout=layout, heads=HEADS[head_dim], head_dim=head_dim,
            dtype=dtype, requests=40 if DEVICE == "cuda" else 6, most_pages=max(most * 32 // page_size, 3),
            most_queries=queries, is_legal=False,
        )  # fmt: skip
        cuts = random_cuts(made, number)
        if shared_keys(made, cuts.tolist()) >= TILE:
            return made.to(DEVICE), cuts
    raise AssertionError("no forest with a branch")


def random_cuts(step: Forest, seed: int) -> Tensor:
    """Cuts as those of prompts: requests that share pages often share them."""
    rng = random.Random(seed)
    cut = rng.randint(0, max(step.seqlens))
    return ints(*(min(keys, cut) if rng.random() < 0.7 else rng.randint(0, keys) for keys in step.seqlens))


def shared_keys(step: Forest, cuts: list[int]) -> int:
    """The most keys that two requests with queries have in common, before both cuts and seen by all queries."""
    page_size, found = step.k_cache.shape[1], [0]
    requests = [index for index, queries in enumerate(step.queries) if queries]
    for one, other in combinations(requests, 2):
        limits = (min(cuts[each], step.seqlens[each] - step.queries[each] + 1) for each in (one, other))
        tables = (step.block_table[each].tolist() for each in (one, other))
        found.append(min(*limits, page_size * common_columns(*tables)))
    return max(found)


def common_columns(one: list[int], other: list[int]) -> int:
    """How many entries are the same before the first that is not."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))


def decode(
    step: Forest, options: dict[str, Any], plan: SharedPrefixPlan | None = None, **planned: Any
) -> tuple[Tensor, Tensor]:
    poison_free_memory()
    return shared_prefix_decode(
        step.q, step.k_cache, step.v_cache, plan or step.plan(**planned), softmax_scale=options.get("scale"),
        window_size=(options.get("window", -1), 0), softcap=options.get("softcap", 0.0), sinks=sinks_of(step, options),
        return_lse=True,
    )  # fmt: skip


def sinks_of(step: Forest, options: dict[str, Any]) -> Tensor | None:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(step.q.shape[1], generator=generator).to(DEVICE) if options.get("sinks") else None


@cases_by_mode
def test_results(case: tuple[Any, ...], exact: str, kernels: str) -> None:
    """The accuracy rule, with NaN in every byte of the caches that is no key of a request."""
    options = case[-1]
    for seed in range(3 if DEVICE == "cuda" else 1):
        step, cuts = random_step(case, seed)
        with counted_launches() as counts:
            out, lse = decode(step, options, boundaries=cuts, exact=exact)
        combines = {"dualkv_decode_combine"} if exact == "split" and "window" not in options else set()
        assert counts.keys() == {"dualkv_decode_plan", f"dualkv_{kernels}_decode", *combines}
        host = step.to("cpu")
        given = options | {"sinks": None if sinks_of(step, options) is None else sinks_of(step, options).cpu()}
        expected, expected_lse = host.expected(**given)
        plain = host.expected(**given, dtype=case[4])[0]
        assert not oracle.violations("out", out.cpu(), plain, expected, case[4])
        assert not oracle.lse_violations(lse.cpu(), expected_lse)


def trained(step: Forest, request: int, cut: int, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The last rows of a request by the training forward on its keys, cut there."""
    begin, end = step.offsets[request : request + 2]
    k, v = step.keys(request)
    rows = {"softmax_scale": options.get("scale"), "softcap": options.get("softcap", 0.0), "return_lse": True}
    rows |= {"causal": True, "sinks": sinks_of(step, options)}
    q, cu_q = step.q[begin:end], ints(0, end - begin).to(DEVICE)
    cut = cut % len(k)  # uncut is a cut before the first key
    cu_k = ints(0, len(k) - cut).to(DEVICE)
    return flash_attn_dualkv_varlen_func(
        q, k[:cut], v[:cut], k[cut:], v[cut:], cu_q, cu_k, end - begin, cut, len(k) - cut, **rows
    )


@trained_cases
def test_bits_of_training(case: tuple[Any, ...], kernels: str) -> None:
    """Output and LSE of every row are the training forward's, whoever shares its pages."""
    options = {name: value for name, value in case[-1].items() if name != "window"}
    for seed in range(4 if DEVICE == "cuda" else 1):
        step, cuts = random_step(case, seed + 10)
        out, lse = decode(step, options, boundaries=cuts)
        for request, (begin, end) in enumerate(pairwise(step.offsets)):
            if begin == end or step.seqlens[request] == 0:
                continue
            expected = trained(step, request, int(cuts[request]), options)
            oracle.assert_bits_equal("out", out[begin:end], expected[0])
            oracle.assert_bits_equal("lse", lse[:, begin:end], expected[1])


@cases_by_mode
def test_batch_invariance(case: tuple[Any, ...], exact: str, kernels: str) -> None:
    """Other requests, their order and the places of pages change no bit; a second launch neither."""
    (step, cuts), options = random_step(case, 20), case[-1]
    plan_twice = [decode(step, options, boundaries=cuts, exact=exact) for _ in range(2)]
    out, lse = plan_twice[0]
    oracle.assert_bits_equal("out", plan_twice[1][0], out)
    rng = random.Random(3)
    for count in (1, 3, len(step.seqlens)):
        order = rng.sample(range(len(step.seqlens)), count)
        fewer = moved(step.taken(order), rng)
        found, found_lse = decode(fewer, options, boundaries=cuts[order], exact=exact)
        for place, request in enumerate(order):
            (begin, end), (first, last) = step.offsets[request : request + 2], fewer.offsets[place : place + 2]
            oracle.assert_bits_equal("out", found[first:last], out[begin:end])
            oracle.assert_bits_equal("lse", found_lse[:, first:last], lse[:, begin:end])


def split_plan(step: Forest, cuts: Tensor, family: str) -> tuple[SharedPrefixPlan, list[Item]]:
    """A plan of divided walks with its items."""
    plan = step.plan("split", boundaries=cuts)
    assert plan._memory is not None
    lists = read_lists(plan._memory, plan.limits, len(step.q), TILES[family][plan.limits.head_dim][:2])
    return plan, lists.shared


def divided_step(case: tuple[Any, ...], shares: bool, family: str) -> tuple[Forest, Tensor]:
    """One with a leaf that has enough splits for itself to fold, of a request that shares pages, or alone."""
    for seed in range(70, 170):
        step, cuts = random_step(case, seed, most_pages=24)
        if not shares:
            longest = max(range(len(cuts)), key=step.seqlens.__getitem__)
            step, cuts = step.taken([longest]), cuts[[longest]]
        items = split_plan(step, cuts, family)[1]
        assert not any(item.folds for item in items), "few requests keep no GPU busy"
        leaves = Counter(item.row for item in items if item.q_pos != BRANCH and item.signals < 0 and item.split >= 0)
        if max(leaves.values(), default=0) > 3:
            return step, cuts
    raise AssertionError("no step with such a leaf")


def beside_others(step: Forest, cuts: Tensor, family: str) -> tuple[Forest, Tensor]:
    """With short prompts, on pages of the longest request, whose rows keep the GPU busy behind the requests' own."""
    tiles, (heads, kv_heads) = TILES[family][step.q.shape[2]], (step.q.shape[1], step.k_cache.shape[2])
    keys = max(step.seqlens)
    work = -(-tiles.blocks * multiprocessors() // kv_heads) * (keys // tiles.keys + 2)
    rows = min(keys, TILE)
    others = work // (-(-rows * heads // kv_heads // tiles.rows) * -(-rows // tiles.keys)) + 1
    q = torch.randn(others * rows, *step.q.shape[1:], generator=torch.Generator().manual_seed(5)).to(step.q)
    table = torch.cat([step.block_table, step.block_table[[step.seqlens.index(keys)]].expand(others, -1)])
    seqlens, queries = ([*one, *[rows] * others] for one in (step.seqlens, step.queries))
    more = Forest(torch.cat([step.q, q]), step.k_cache, step.v_cache, table, seqlens, queries)
    return more, torch.cat([cuts, torch.zeros(others, dtype=cuts.dtype)])


@pytest.mark.parametrize("shares", [True, False], ids=["shared", "alone"])
@pytest.mark.parametrize("case", [one for one in CASES if "window" not in one[-1]], ids=case_name)
def test_who_folds_changes_no_bit(case: tuple[Any, ...], shares: bool, kernels: str) -> None:
    """A request has its bits where one item walks all splits of its leaf, because many others keep the GPU busy."""
    options = case[-1]
    step, cuts = divided_step(case, shares, kernels)
    out, lse = decode(step, options, split_plan(step, cuts, kernels)[0])
    more, more_cuts = beside_others(step, cuts, kernels)
    plan, items = split_plan(more, more_cuts, kernels)
    assert any(item.folds for item in items)
    found, found_lse = decode(more, options, plan)
    oracle.assert_bits_equal("out", found[: len(out)], out)
    oracle.assert_bits_equal("lse", found_lse[:, : len(out)], lse)


@pytest.mark.parametrize("case", [one for one in TRAINED if "window" in one[-1]], ids=case_name)
def test_windows_are_never_divided(case: tuple[Any, ...], kernels: str) -> None:
    """Their bits are those of serial walks: a plan of layers with windows alone needs no room for splits."""
    (step, cuts), options = random_step(case, 45), case[-1]
    (out, lse), (serial, serial_lse) = (
        decode(step, options, exact=exact, boundaries=cuts) for exact in ("split", "trainer")
    )
    oracle.assert_bits_equal("out", out, serial)
    oracle.assert_bits_equal("lse", lse, serial_lse)


@modes
def test_columns_behind_the_longest_request(exact: str, kernels: str) -> None:
    """A plan that looks at no more columns than its longest request has is that of the whole table."""
    step, cuts = random_step(CASES[0], 46)
    columns = torch.full((len(step.seqlens), 300), int(step.block_table[0, 0]), dtype=torch.int32, device=DEVICE)
    step = replace(step, block_table=torch.cat([step.block_table, columns], 1))
    (out, lse), (bounded, bounded_lse) = (
        decode(step, {}, exact=exact, boundaries=cuts, max_seqlen=most) for most in (None, max(step.seqlens))
    )
    oracle.assert_bits_equal("out", bounded, out)
    oracle.assert_bits_equal("lse", bounded_lse, lse)


@cases_by_mode
def test_results_repeat_bit_for_bit(case: tuple[Any, ...], exact: str, kernels: str) -> None:
    """States are handed over in one order, whichever blocks are early: of one plan, launch after launch."""
    (step, cuts), options = random_step(case, 40), case[-1]
    plan = step.plan(exact, boundaries=cuts)
    first, *others = (decode(step, options, plan) for _ in range(REPEATS))
    for found in others:
        for name, one, expected in zip(("out", "lse"), found, first):
            oracle.assert_bits_equal(name, one, expected)


@cases
def test_growing_request(case: tuple[Any, ...], kernels: str) -> None:
    """Token by token over the edge of a tile: other rows keep their bits, and its own are training's."""
    (step, cuts), options = random_step(case, 50), case[-1]
    first_pages = step.block_table[:, 0].tolist()
    sharing = [index for index, page in enumerate(first_pages) if step.queries[index] and first_pages.count(page) > 1]
    grown = max(sharing, key=step.seqlens.__getitem__)
    keys = step.seqlens[grown]
    edge = (keys - 2) // 64 * 64 or keys - 2
    begin, end = step.offsets[grown : grown + 2]
    others = [row for row in range(len(step.q)) if not begin <= row < end]
    first = None
    for length in range(edge - 3, edge + 3):
        seqlens = [*step.seqlens[:grown], length, *step.seqlens[grown + 1 :]]
        now = replace(step, seqlens=seqlens)
        out, lse = decode(now, options, now.plan(boundaries=cuts))
        first = first or (out[others], lse[:, others])
        for name, found, expected in zip(("out", "lse"), (out[others], lse[:, others]), first):
            oracle.assert_bits_equal(f"{name} at {length}", found, expected)
        if options.get("window") is None and not step.has_latents:
            expected = trained(now, grown, min(length, int(cuts[grown])), options)
            oracle.assert_bits_equal("out", out[begin:end], expected[0])
            oracle.assert_bits_equal("lse", lse[:, begin:end], expected[1])


@cases
def test_given_tree(case: tuple[Any, ...], kernels: str) -> None:
    """An engine's word for who shares what with whom changes no bit, complete or not."""
    (step, cuts), options = random_step(case, 60), case[-1]
    expected = decode(step, options, boundaries=cuts)
    tables = step.block_table.tolist()
    common = [[common_columns(row, other) for other in tables[:index]] for index, row in enumerate(tables)]
    parents = [row.index(max(row)) if row else -1 for row in common]
    for shared in ([max(row, default=0) for row in common], [min(row, default=0) for row in common]):
        found = decode(step, options, boundaries=cuts, parents=ints(*parents), shared_pages=ints(*shared))
        for name, one, right in zip(("out", "lse"), found, expected):
            oracle.assert_bits_equal(name, one, right)


def moved(step: Forest, rng: random.Random) -> Forest:
    """The same requests with their pages in other places of the caches."""
    places = rng.sample(range(len(step.k_cache)), len(step.k_cache))
    index = torch.tensor(places, device=DEVICE)
    table = step.block_table.clone()
    inverse = torch.empty_like(index)
    inverse[index] = torch.arange(len(places), device=DEVICE)
    good = (table >= 0) & (table < len(places))
    table[good] = inverse[table[good].long()].int()
    caches = []
    for cache in (step.k_cache, step.v_cache):
        copy = torch.empty_strided(cache.shape, cache.stride(), dtype=cache.dtype, device=DEVICE)
        caches.append(copy.copy_(cache[index]))
    return replace(step, block_table=table).with_caches(*caches)


@pytest.mark.parametrize("options", [{}, {"sinks": True}], ids=["plain", "sinks"])
def test_rows_of_nobody(options: dict[str, Any], kernels: str) -> None:
    """Rows before the first request and behind the last are 0, their LSE -inf or the sink; so is one without keys."""
    step, _ = random_step(CASES[0], 4)
    step = step.taken([index for index, keys in enumerate(step.seqlens) if keys][:3])
    q = torch.cat([step.q[:1], step.q, step.q[:2]])
    plan = SharedPrefixPlan(
        3, step.block_table.shape[1], num_pages=len(step.k_cache), max_queries=9, page_size=16, num_heads=8,
        num_kv_heads=2, head_dim=64, device=DEVICE, exact="split",
    )  # fmt: skip
    seqlens, offsets = ints(step.seqlens[0], 0, step.seqlens[2]).to(DEVICE), ints(1, 2, 3, 4).to(DEVICE)
    plan.update(step.block_table, seqlens, cu_seqlens_q=offsets, num_queries=6)
    sinks = sinks_of(step, options)
    out, lse = shared_prefix_decode(q, step.k_cache, step.v_cache, plan, sinks=sinks, return_lse=True)
    nobody = [0, 2, 4, 5]
    assert (out[nobody] == 0).all()
    assert (lse[:, nobody] == (-torch.inf if sinks is None else sinks[:, None])).all()
    alone, _ = decode(step.taken([0]), options, exact="split")
    oracle.assert_bits_equal("out", out[1:2], alone)


@needs_gpu
@pytest.mark.parametrize(
    ("case", "exact"),
    [(CASES[0], "trainer"), (CASES[0], "split"), ((576, 16, "latents", 1, torch.bfloat16, {"scale": 0.1}), "split")],
    ids=["trainer", "split", "latents"],
)
def test_graph(case: tuple[Any, ...], exact: str) -> None:
    """A captured step is replayed with other lengths, pages and forests."""
    steps = [random_step(case, seed)[0] for seed in range(30, 34)]
    columns, pages = (max(getattr(one, name).shape[axis] for one in steps) for name, axis in
                      (("block_table", 1), ("k_cache", 0)))  # fmt: skip
    requests, (heads, kv_heads) = len(steps[0].seqlens), HEADS[case[0]]
    k, v = (one.new_zeros(pages, *one.shape[1:]) for one in (steps[0].k_cache, steps[0].v_cache))
    caches = steps[0].with_caches(k, v).k_cache, steps[0].with_caches(k, v).v_cache
    plan = SharedPrefixPlan(
        requests, columns, num_pages=pages, page_size=16, num_heads=heads, num_kv_heads=kv_heads, head_dim=case[0],
        head_dim_v=v.shape[3], device=DEVICE, exact=exact,
    )  # fmt: skip
    q = torch.empty_like(steps[0].q)
    table, seqlens = (torch.zeros(requests, *shape, dtype=torch.int32, device=DEVICE) for shape in ((columns,), ()))

    def run() -> tuple[Tensor, ...]:
        plan.update(table, seqlens)
        return shared_prefix_decode(q, *caches, plan, softmax_scale=case[-1].get("scale"), return_lse=True)

    graph, (out, lse) = captured(run)
    for step in steps:
        q.copy_(step.q)
        table.fill_(-1)[:, : step.block_table.shape[1]] = step.block_table
        for cache, given in zip(caches, (step.k_cache, step.v_cache)):
            cache.fill_(torch.nan)[: len(given)] = given
        seqlens.copy_(ints(*step.seqlens))
        graph.replay()
        expected, expected_lse = decode(step, case[-1], exact=exact)
        oracle.assert_bits_equal("out", out, expected)
        oracle.assert_bits_equal("lse", lse, expected_lse)
