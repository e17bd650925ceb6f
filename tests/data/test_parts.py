# SPDX-License-Identifier: BSD-3-Clause
"""Cuts of trees that no micro-batch holds: what is in which piece, and what each of them needs."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flash_attn_dualkv.data.parts import Cut, Piece, plan_parts, walk
from flash_attn_dualkv.data.prefix_tree import PrefixTree
from flash_attn_dualkv.errors import SharedPromptError


def tree_of(lens: list[int], parents: list[int]) -> PrefixTree:
    leaves = [node for node in range(len(lens)) if node not in parents]
    totals = list(lens)
    for node, parent in enumerate(parents):
        totals[node] += totals[parent] if parent >= 0 else 0
    return PrefixTree(tuple(lens), tuple(parents), tuple(leaves), tuple(totals[leaf] for leaf in leaves))


@st.composite
def trees(draw: st.DrawFn) -> PrefixTree:
    parents: list[int] = []
    path: list[int] = []
    for node in range(draw(st.integers(1, 14))):
        for _ in range(draw(st.integers(0, len(path)))):
            path.pop()
        parents.append(path[-1] if path else -1)
        path.append(node)
    return tree_of(draw(st.lists(st.integers(0, 30), min_size=len(parents), max_size=len(parents))), parents)


def rows_of_nodes(lens: tuple[int, ...], parents: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The path of each row, as numbers of rows: what a cut must not change."""
    found: list[tuple[int, ...]] = []
    ends: dict[int, tuple[int, ...]] = {-1: ()}
    for node, (length, parent) in enumerate(zip(lens, parents)):
        path = ends[parent]
        for _ in range(length):
            path = (*path, len(found))
            found.append(path)
        ends[node] = path
    return found


def trunks_of(cut: Cut) -> list[Piece]:
    return [piece for piece in walk(cut.pieces) if piece.parts]


def rows_of(cut: Cut, piece: Piece) -> int:
    return sum(cut.node_lens[node] for node in piece.nodes)


def check(cut: Cut, tree: PrefixTree, budget: int, kept: float, state: float, held: bool) -> None:
    assert rows_of_nodes(cut.node_lens, cut.node_parents) == rows_of_nodes(tree.node_lens, tree.node_parents)
    seen: list[int] = []

    def visit(pieces: tuple[Piece, ...], above: set[int]) -> None:
        rows_above = sum(cut.node_lens[node] for node in above)
        used = (kept + held) * rows_above + state * sum(cut.node_lens[node] > 0 for node in above)
        for piece in pieces:
            assert list(piece.nodes) == sorted(piece.nodes)
            seen.extend(piece.nodes)
            own = {*piece.nodes}
            for node in piece.nodes:
                parent = cut.node_parents[node]
                assert parent < 0 or parent in own or parent in above or not cut.node_lens[parent]
            rows = rows_of(cut, piece)
            assert rows
            if piece.parts:
                own_states = state * sum(cut.node_lens[node] > 0 for node in piece.nodes)
                assert used + (1 + kept) * rows + own_states <= budget + 1e-9
                visit(piece.parts, above | own)
            else:
                assert used + rows <= budget + 1e-9
        parts = [rows_of(cut, piece) for piece in pieces if not piece.parts]
        pairs = [one + other for at, one in enumerate(parts) for other in parts[:at]]
        # No two of them could be one; below nodes without rows nothing is tried again.
        assert 0 in cut.node_lens or all(used + rows > budget for rows in pairs)

    visit(cut.pieces, set())
    assert sorted(seen) == [*range(len(cut.node_lens))]
    assert not trunks_of(cut) or not cut.is_whole


@settings(deadline=None, max_examples=300)
@given(
    trees(), st.integers(8, 90), st.sampled_from([0.0, 0.3, 1.0, 2.5]), st.sampled_from([0.0, 0.0, 1.5, 7.0]),
    st.booleans(), st.sampled_from([1, 4]),
)  # fmt: skip
def test_cuts(tree: PrefixTree, budget: int, kept: float, state: float, held: bool, tile: int) -> None:
    assume(sum(tree.node_lens))
    # What is kept of a path may leave no room for a tile and its own keys.
    longest = max(map(len, rows_of_nodes(tree.node_lens, tree.node_parents)))
    cut: Cut | None = None
    with suppress(SharedPromptError):
        cut = plan_parts(tree, budget, kept=kept, state=state, held=held, tile=tile)
    if cut is None:  # the longest path may be as many nodes, each of a tile or less
        assert (kept + held) * longest + (1 + kept) * tile + state * (1 + longest) > budget
        return
    check(cut, tree, budget, kept, state, held)
    sizes = [0] * len(tree.node_lens)
    for root, size in zip(tree.roots, tree.node_lens):
        sizes[root] += size
    if sum(sizes) <= budget:
        assert cut.is_whole and cut.node_lens == tree.node_lens and not trunks_of(cut)
    whole = {one for piece in cut.pieces if not piece.parts for one in piece.nodes}
    for root, size in enumerate(sizes):  # trees that fit are not cut
        members = {node for node, own in enumerate(tree.roots) if own == root}
        if 0 < size <= budget and cut.node_lens == tree.node_lens:
            assert members <= whole


def test_a_group_in_parts() -> None:
    tree = PrefixTree.of_prompts([[*range(8)]], [100] * 8, [40] * 8, boundary="gather")
    cut = plan_parts(tree, 200, kept=0.5, tile=1)
    assert cut.pieces == (Piece((0,), (Piece((1, 2, 3)), Piece((4, 5, 6)), Piece((7, 8)))),)
    assert plan_parts(tree, 420).is_whole


def test_a_long_prompt_in_levels() -> None:
    tree = PrefixTree.of_prompts([[0, 1]], [1000] * 2, [10] * 2, boundary="gather")
    cut = plan_parts(tree, 1000, kept=0.75, tile=100)
    # The rest of the prompt fits beside what is kept of it: it needs no second pass.
    assert cut.node_lens == (500, 500, 10, 10) and cut.node_parents == (-1, 0, 1, 1)
    assert cut.pieces == (Piece((0,), (Piece((1, 2, 3)),)),)
    tree = PrefixTree.of_prompts([[0, 1]], [1000] * 2, [100] * 2, boundary="gather")
    cut = plan_parts(tree, 1000, kept=0.75, tile=100)
    assert cut.node_lens == (500, 300, 200, 100, 100) and cut.node_parents == (-1, 0, 1, 2, 2)
    assert cut.pieces == (Piece((0,), (Piece((1,), (Piece((2, 3, 4)),)),)),)
    with pytest.raises(SharedPromptError, match="levels: expected more"):
        plan_parts(tree, 1000, kept=0.75, tile=100, levels=1)
    with pytest.raises(
        SharedPromptError, match="max_tokens: expected more, as what is kept above a part takes as much as"
    ):
        plan_parts(tree, 1000, kept=1.5, tile=100)


def test_small_turns_share_a_trunk() -> None:
    """A comb of turns: the nodes of the path to its end are one trunk, not one a turn."""
    # Depth first: a turn's answer comes before the turn that goes on.
    lens, parents, last = [10], [-1], 0
    for _ in range(12):
        lens.append(50)
        parents.append(last)
        lens.append(2)
        parents.append(last)
        last = len(lens) - 1
    cut = plan_parts(tree_of(lens, parents), 120, kept=1.0, tile=1)
    assert len(trunks_of(cut)) == 1 and rows_of(cut, trunks_of(cut)[0]) <= 34


def test_branches_leave_a_trunk_that_leaves_no_room() -> None:
    """The small turn would be in the prompt's trunk, but its keys beside another branch leave no room for that."""
    cut = plan_parts(tree_of([2, 10, 60, 60, 90], [-1, 0, 1, 1, 0]), 100, kept=1.0, tile=1)
    assert cut.pieces == (Piece((0,), (Piece((4,)), Piece((1,), (Piece((2,)), Piece((3,)))))),)


def test_arguments() -> None:
    tree = tree_of([3], [-1])
    for options in (dict(kept=-1.0), dict(state=-1.0), dict(tile=0), dict(levels=-1), dict(held=1)):
        with pytest.raises(SharedPromptError, match=next(iter(options))):
            plan_parts(tree, 4, **options)  # type: ignore[arg-type]
    with pytest.raises(SharedPromptError, match="max_tokens"):
        plan_parts(tree, 0)
