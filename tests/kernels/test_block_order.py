# SPDX-License-Identifier: BSD-3-Clause
"""The order of the backward's thread blocks, compiled for the host: every item has a block, every walk a direction."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator

import numpy as np
from geometry import shim_fixture

shim = shim_fixture("geometry")


class Order(ctypes.Structure):
    """Mirror of BackwardOrder."""

    _fields_ = [
        ("begin", ctypes.c_int * 13),
        *((name, ctypes.c_int) for name in ("alternating", "local_heads", "by_head", "ordered")),
    ]

    def classes(self) -> Iterator[range]:
        """The items of each class."""
        return itertools.starmap(range, itertools.pairwise(self.begin))


Place = tuple[int, int, bool, bool]  # item, KV head, reversed, whether the item is counted in raster order


def place_of(shim: ctypes.CDLL, block: int, order: Order, kv_heads: int, num_sms: int) -> Place | None:
    place = (ctypes.c_int * 4)()
    exists = shim.place_of(block, ctypes.byref(order), kv_heads, num_sms, place)
    return (place[0], place[1], bool(place[2]), bool(place[3])) if exists else None


def expected_places(order: Order, kv_heads: int, together: int) -> list[tuple[int, int]]:
    """Every (item, KV head): of the first class `together` heads take a tile before the next; then head by head."""
    first, *later = order.classes()
    places = []
    for begin in range(0, kv_heads, together):
        places += [(tile, head) for tile in first for head in range(begin, min(begin + together, kv_heads))]
    return places + [(item, head) for items in later for head in range(kv_heads) for item in items]


def random_order(rng: np.random.Generator, shim: ctypes.CDLL) -> Order:
    assert shim.cost_classes() == 12
    sizes = rng.integers(0, 40, 12) * rng.integers(0, 2, 12)
    sizes[0] = int(rng.integers(1, 200))  # the longest item is in the first class
    order = Order((ctypes.c_int * 13)(*np.concatenate([[0], np.cumsum(sizes)]).tolist()))
    if rng.random() < 0.3:
        order.by_head = 1
        return order
    order.alternating = int(rng.integers(0, 1 << 12))
    return order


def heads_together(shim: ctypes.CDLL, order: Order, num_sms: int) -> int:
    return 1 if order.by_head else int(shim.heads_together(order.begin[1], num_sms))


def test_every_item_has_one_block_a_head(shim: ctypes.CDLL) -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        kv_heads, num_sms = int(rng.integers(1, 9)), int(rng.choice([1, 8, 132]))
        order = random_order(rng, shim)
        expected = expected_places(order, kv_heads, heads_together(shim, order, num_sms))
        places = [place_of(shim, block, order, kv_heads, num_sms) for block in range(len(expected))]
        assert [place and place[:2] for place in places] == expected
        assert len(set(expected)) == len(expected) == order.begin[12] * kv_heads
        assert all(place_of(shim, len(expected) + more, order, kv_heads, num_sms) is None for more in (0, 7))


def test_direction_of_walks(shim: ctypes.CDLL) -> None:
    """Back from the end where blocks begin together; else a head walks in one direction."""
    rng = np.random.default_rng(1)
    seen = set()
    for _ in range(300):
        kv_heads, num_sms = int(rng.integers(1, 9)), int(rng.choice([1, 8, 132]))
        order = random_order(rng, shim)
        directions: dict[tuple[int, int], set[bool]] = {}
        for block in range(order.begin[12] * kv_heads):
            place = place_of(shim, block, order, kv_heads, num_sms)
            assert place is not None
            item, head, is_reversed, _ = place
            index = next(c for c, items in enumerate(order.classes()) if item in items)
            if not order.alternating >> index & 1:
                assert is_reversed
                continue
            directions.setdefault((index, head), set()).add(is_reversed)
        assert all(len(found) == 1 for found in directions.values())
        seen |= {(index == 0, *found) for (index, _), found in directions.items()}
    assert seen == set(itertools.product((True, False), (True, False)))


def test_the_first_class_alternates_where_its_walks_begin_in_waves(shim: ctypes.CDLL) -> None:
    alternates = shim.does_first_class_alternate
    assert alternates(32, 32, 8, 132), "28 x 4K x 2K: four heads of 32 tiles a wave"
    assert not alternates(32, 32, 1, 132), "one head of 32 tiles begins at once"
    assert not alternates(128, 16, 8, 132), "as each of many short owners does"
    assert alternates(128, 44, 8, 132)


def test_heads_that_share_a_wave(shim: ctypes.CDLL) -> None:
    found = [shim.heads_together(tiles, 132) for tiles in (0, 26, 32, 64, 66, 67, 128, 256)]
    assert found == [132, 5, 4, 2, 2, 1, 1, 1]


def test_classes_are_a_factor_of_two_wide(shim: ctypes.CDLL) -> None:
    assert [shim.class_of(cost, 64, 64) for cost in (64, 33, 32, 17, 16, 1)] == [0, 0, 1, 1, 2, 6]
    assert [shim.class_of(cost, 60, 1000) for cost in (60, 31, 30, 15, 1)] == [4, 4, 5, 6, 9]
    assert shim.class_of(1, 1 << 20, 1 << 20) == shim.class_of(1, 8, 1 << 20) == 11
    assert [shim.class_of(0, *longest) for longest in ((0, 0), (0, 9), (9, 9))] == [0, 11, 11]
