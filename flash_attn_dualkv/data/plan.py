# SPDX-License-Identifier: BSD-3-Clause
"""Which nodes samples are packed as: decided on the host by counts, before any tensor of a row is made."""

from __future__ import annotations

from collections.abc import Sequence
from operator import lt
from typing import Any

import torch

from .. import checks
from ..errors import SharedPromptError
from ..host import take
from .prefix_tree import Boundary, PrefixTree, Spans, checked_boundary
from .samples import Samples
from .trie import build_tree

# A node's last tile of keys is half empty for every row below it: 40 of 80 keys in the forward and
# 64 of 128 in the backward, some 55 pairs a row where both are weighed by their work. A token costs
# a model of 2 to 8 billion parameters as much as 10,000 to 20,000 pairs. So a border above R rows
# costs about R / 350 to R / 175 tokens: 64 for 11K to 22K.
MIN_SHARED = 64


def plan(
    samples: Samples,
    *,
    boundary: Boundary = "replicate",
    min_shared: int | None = None,
    borders: Sequence[Sequence[int]] | None = None,
) -> PrefixTree:
    """The tree of all that samples begin with in common; of their prompts only, where that has as few rows.

    Args:
        samples: with prompts, or without any.
        boundary: of `pack_prefix_tree`.
        min_shared: the fewest tokens that a node after the prompts must save, and all of them together; None: only
            prompts are shared, or of samples without prompts 64.
        borders: where nodes begin, instead of min_shared.

    Raises:
        SharedPromptError: an option that is not as described; samples of one group id with different prompts.
    """
    boundary = checked_boundary(boundary)
    of_prompts: PrefixTree | None = None
    if samples.prompt_lens is not None and borders is None:
        groups = samples.groups()
        of_prompts = PrefixTree.of_prompts(groups, samples.prompt_lens, samples.scored_lens, boundary)
        # Images of a tree are those of its root: what follows a prompt may not be another one's.
        if min_shared is None or samples.images:
            return of_prompts
    least = checks.integer("min_shared", MIN_SHARED if min_shared is None else min_shared, 1)
    if borders is not None:
        checks.check_absent("None with borders, which say where nodes begin", min_shared=min_shared)
        borders = _checked_borders(borders, samples.lengths)
    tree = build_tree(
        samples.host_ids, samples.lengths, samples.group_ids, boundary=boundary, min_shared=least, borders=borders
    )
    if of_prompts is not None and sum(tree.node_lens) + least > sum(of_prompts.node_lens):
        return of_prompts
    return tree


def checked_tree(tree: PrefixTree, samples: Samples) -> PrefixTree:
    """The tree, which must be one of these samples: with equal tokens and groups where they share rows."""
    checks.check_count("tree", tree.sequence_lens, len(samples.lengths), "sequences")
    for at, (length, own) in enumerate(zip(samples.lengths, tree.sequence_lens)):
        if length != own:
            expected = f"that of these sequences, {length} tokens in sequence {at}"
            raise SharedPromptError("tree", expected, f"one whose sequence {at} has {own}")
    ids = samples.host_ids
    rows = Spans.of(tree).rows(torch.arange(len(ids), device=ids.device))
    of_rows = ids.new_empty(sum(tree.node_lens)).index_copy_(0, rows, ids)
    if not take(of_rows, rows).equal(ids):
        raise SharedPromptError("tree", "that of these sequences", "one in which other tokens share rows")
    group_of: dict[int, Any] = {}
    for leaf, group in zip(tree.leaves, samples.group_ids or ()):
        if leaf >= 0 and group_of.setdefault(tree.roots[leaf], group) != group:
            expected = "equal ones for sequences that share rows in the tree"
            raise SharedPromptError("group_ids", expected, f"{group_of[tree.roots[leaf]]!r} and {group!r}")
    return tree


def _checked_borders(borders: Any, lengths: Sequence[int]) -> list[Sequence[int]]:
    """Those of each sequence, rising from 1 to its length."""
    borders = checks.items("borders", borders, "lists of positions")
    checks.check_count("borders", borders, len(lengths), "sequences")
    checked: list[Sequence[int]] = []
    for index, (given, length) in enumerate(zip(borders, lengths)):
        is_plain = type(given) in (tuple, list) and {*map(type, given)} <= {int}
        own = given if is_plain else checks.lengths(f"borders[{index}]", given)
        if own and not (own[0] > 0 and own[-1] <= length and all(map(lt, own, own[1:]))):
            raise SharedPromptError(f"borders[{index}]", f"rising positions from 1 to {length}", checks.describe(own))
        checked.append(own)
    return checked
