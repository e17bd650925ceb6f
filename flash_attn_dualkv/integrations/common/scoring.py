# SPDX-License-Identifier: BSD-3-Clause
"""Many sequences, such as all requests of an evaluation, as packed micro-batches whose rows the caller reads.

The tree of all of them is made once, in parts that the host's memory holds; a micro-batch is a part of it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from itertools import accumulate, chain

import torch

from ... import checks
from ...data.batch import PackedBatch, pack
from ...data.given import extremes, largest_token
from ...data.samples import Samples
from ...data.split import split_by_token_budget
from ...data.trie import build_tree
from ...errors import SharedPromptError
from ...host import int64s, to_device

MAX_TOKENS = 1 << 15
# Fewest tokens that a node must save. A node more is a query tile more in a forward without
# backward, which for a few rows below a long header costs as much as some 20 tokens; training,
# whose nodes are longer, has MIN_SHARED.
MIN_SHARED = 16
# Tokens of the sequences of one tree: making it takes some 100 bytes of the host for each.
TREE_TOKENS = 1 << 23


def scoring_batches(
    sequences: Sequence[Sequence[int]],
    *,
    max_tokens: int = MAX_TOKENS,
    min_shared: int = MIN_SHARED,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[list[int], PackedBatch]]:
    """Micro-batches that hold every sequence once, those that begin alike together.

    Args:
        sequences: of token ids, none empty, in any order, any of them several times.
        max_tokens: most rows of a micro-batch, or as many as the longest sequence has where these are more.
        min_shared: the fewest tokens that a node must save.
        device: of the micro-batches.

    Yields:
        Which sequences a micro-batch has, and it: packed with the boundary "gather" and without scored tokens. Rows are
        found by `batch.rows_of(tokens)`.

    Raises:
        SharedPromptError: an empty sequence, a token below 0, an option that is not as described.
    """
    given = [checks.items(f"sequences[{at}]", ids, "token ids") for at, ids in enumerate(sequences)]
    if not all(map(len, given)):
        at = [*map(len, given)].index(0)
        raise SharedPromptError(f"sequences[{at}]", "at least one token", "none")
    budget, least = checks.integer("max_tokens", max_tokens, 1), checks.integer("min_shared", min_shared, 1)
    for part in _parts(given):
        lengths = [len(given[index]) for index in part]
        ids = int64s(chain.from_iterable(given[index] for index in part))
        tree = build_tree(ids, lengths, None, boundary="gather", min_shared=least)
        largest = largest_token("sequences", extremes(ids))
        firsts = [*accumulate(lengths, initial=0)]
        pieces = to_device([ids], checks.device(device))[0].split(lengths)
        for chosen in split_by_token_budget(tree, max_tokens=max(budget, *lengths)):
            own, lens = torch.cat([pieces[at] for at in chosen]), [lengths[at] for at in chosen]
            samples = Samples(own, lens, [0] * len(chosen), largest, ids, [firsts[at] for at in chosen])
            yield [part[at] for at in chosen], pack(samples, tree.take(chosen))


def _parts(sequences: Sequence[Sequence[int]]) -> list[list[int]]:
    """The sequences of each tree, of at most TREE_TOKENS tokens unless one has more: neighbours when sorted."""
    total = sum(map(len, sequences))
    if total <= TREE_TOKENS:
        return [[*range(len(sequences))]] if sequences else []
    # The most significant byte first: then bytes are in the order of the numbers.
    keys = [struct.pack(f">{len(ids)}q", *ids) for ids in sequences]
    parts: list[list[int]] = []
    room = 0
    for index in sorted(range(len(sequences)), key=keys.__getitem__):
        if len(sequences[index]) > room:
            parts.append([])
            room = TREE_TOKENS
        parts[-1].append(index)
        room -= len(sequences[index])
    return parts
