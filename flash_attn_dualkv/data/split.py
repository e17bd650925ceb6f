# SPDX-License-Identifier: BSD-3-Clause
"""Which sequences go into which micro-batch and onto which rank, so that what they share stays together.

    tree = group_by_prefix(sequences)
    for chosen in split_by_token_budget(tree, max_tokens=16384):
        batch = pack_prefix_tree(sequences, tree=tree, chosen=chosen)

Prompts with their responses are trees of depth two: `split_by_token_budget(groups, prompt_lens, response_lens, 16384)`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .. import checks
from ..checks import explain
from ..errors import SharedPromptError, SharedPromptTypeError
from ..host import untraced
from ..parallel.agreement import largest_of_ranks
from .prefix_tree import PrefixTree

Groups: TypeAlias = "PrefixTree | Sequence[Sequence[int]]"


@untraced
def split_by_token_budget(
    groups: Groups,
    prompt_lens: Sequence[int] | Tensor | None = None,
    response_lens: Sequence[int] | Tensor | None = None,
    max_tokens: int | None = None,
    *,
    dp_group: Any = None,
) -> list[list[int]]:
    """Micro-batches of at most `max_tokens` packed tokens each.

    What a node has below it stays together where it fits beside the path to it; else it is divided among parts that
    have a copy of the path each. Parts and micro-batches are filled in the same way: the longest first, each into the
    fullest one that has room. Of the ways to fill as few micro-batches, one is taken whose largest is small: it sets
    the peak of memory.

    Args:
        groups: the samples of each prompt, as `group_by_prompt` gives them, no sample twice; samples of no group are
            left out. Or the tree of sequences, as `group_by_prefix` or a batch gives it; micro-batches are then packed
            with it.
        prompt_lens, response_lens: (B,) of the samples, lists or integer tensors; equal prompts within a group. None
            with a tree.
        max_tokens: bound of a packed micro-batch without padding, whichever boundary prompts are packed with.
        dp_group: a torch.distributed process group whose ranks must get equally many micro-batches; the ranks with
            fewer split theirs further, between groups where they can. Every rank must call.

    Returns:
        The indices of each micro-batch's samples, those that share most beside each other; no micro-batch for no
        groups.

    Raises:
        SharedPromptError: an argument is not as described; a single sample is longer than the budget; with dp_group, on
            every rank, if one of them fails or has fewer samples than another needs micro-batches.
    """

    def fill() -> tuple[list[list[int]], Sequence[Sequence[int]]]:
        tree = as_tree(groups, prompt_lens, response_lens)
        budget = checks.integer("max_tokens", max_tokens, 1)
        for index, (leaf, length) in enumerate(zip(tree.leaves, tree.sequence_lens)):
            if leaf >= 0 and length > budget:
                raise SharedPromptError("max_tokens", f"at least {length}, the tokens of sample {index}", max_tokens)
        sizes = [0] * (tree.roots[-1] + 1 if tree.roots else 0)
        for root, size in zip(tree.roots, tree.node_lens):
            sizes[root] += size
        held = (length for leaf, length in zip(tree.leaves, tree.sequence_lens) if leaf >= 0)
        # Trees that fit stay whole.
        least = max([*held, *(size for size in sizes if size <= budget)], default=0)
        return _fill_evenly(tree, least, budget), below(tree, tree.roots)

    return on_equal_terms(fill, dp_group)


def as_tree(groups: Any, prompt_lens: Any, response_lens: Any) -> PrefixTree:
    """The tree given; or that of groups of samples that exist, each once, with one prompt a group.

    It has a row of the prompt's before each response.
    """
    if isinstance(groups, PrefixTree):
        expected = "None with a tree, which knows them"
        checks.check_absent(expected, prompt_lens=prompt_lens, response_lens=response_lens)
        return groups
    prompts = checks.lengths("prompt_lens", prompt_lens, least=1)
    responses = checks.lengths("response_lens", response_lens, len(prompts), "prompt_lens")
    checked: list[list[int]] = []
    seen: set[int] = set()
    for number, members in enumerate(checks.items("groups", groups, "lists of sample indices")):
        name = f"groups[{number}]"
        given = checks.items(name, members, "sample indices")
        if not len(given):
            raise SharedPromptError(name, "at least one sample", "none")
        own = [checks.integer(f"{name}[{at}]", index, 0, len(prompts) - 1) for at, index in enumerate(given)]
        checked.append(own)
        for index in own:
            if index in seen:
                raise SharedPromptError(name, "samples that are in no group yet", f"sample {index} again")
            seen.add(index)
            if prompts[index] != prompts[own[0]]:
                expected = f"samples with one prompt, of {prompts[own[0]]} tokens as that of sample {own[0]}"
                raise SharedPromptError(name, expected, f"{prompts[index]} of sample {index}")
    return PrefixTree.of_prompts(checked, prompts, responses)


def below(tree: PrefixTree, tops: Sequence[int]) -> list[list[int]]:
    """The sequences with the same one of `tops`, a number for each node; those that share most beside each other."""
    held = (index for index, length in enumerate(tree.sequence_lens) if tree.leaves[index] >= 0 or not length)
    groups: dict[int, list[int]] = {}
    for index in sorted(held, key=lambda index: (tree.leaves[index], tree.sequence_lens[index])):
        leaf = tree.leaves[index]
        groups.setdefault(tops[leaf] if leaf >= 0 else -1, []).append(index)
    return [*groups.values()]


def on_equal_terms(
    fill: Callable[[], tuple[list[list[int]], Sequence[Sequence[int]]]], dp_group: Any, multiple: int = 1
) -> list[list[int]]:
    """The micro-batches that `fill` gives; with dp_group, equally many on all ranks, and an error on all of them.

    Args:
        fill: gives micro-batches, and the groups between which they should be divided further.
        dp_group: of torch.distributed, or None.
        multiple: their number is one of it, as pipelines of virtual stages want it.
    """
    is_running = torch.distributed.is_available() and torch.distributed.is_initialized()
    if dp_group is not None and not (is_running and isinstance(dp_group, torch.distributed.ProcessGroup)):
        expected = "a process group of an initialised torch.distributed, or None"
        raise SharedPromptTypeError("dp_group", expected, checks.describe(dp_group))
    micro_batches: list[list[int]] = []
    groups: Sequence[Sequence[int]] = []
    # Not the exception: it holds this frame, and with it the process group beyond its end.
    error: str | None = None
    try:
        micro_batches, groups = fill()
    except SharedPromptError as own:
        if dp_group is None:
            raise
        error = str(own)  # the other ranks wait for this one
    numbers = len(micro_batches), -sum(map(len, micro_batches)), error is not None
    wanted, fewest, failed = map(int, largest_of_ranks(numbers, dp_group))
    if failed:
        raise SharedPromptError(error or explain("max_tokens", "a budget that every rank can keep", "one that cannot"))
    wanted = -(-wanted // multiple) * multiple
    if wanted > -fewest:
        expected = f"at least {wanted} samples on each rank, as many as another has micro-batches"
        in_multiples = f", in multiples of {multiple}" if multiple > 1 else ""
        raise SharedPromptError("groups", f"{expected}{in_multiples}", -fewest)
    return _split_further(micro_batches, groups, wanted)


def _split_further(micro_batches: list[list[int]], groups: Sequence[Sequence[int]], wanted: int) -> list[list[int]]:
    """Cuts micro-batches in two until there are `wanted`: between groups while there are any, nearest to the middle."""
    group_of = {index: number for number, members in enumerate(groups) for index in members}

    def cuts(members: list[int]) -> list[int]:
        return [at for at in range(1, len(members)) if group_of[members[at - 1]] != group_of[members[at]]]

    micro_batches = list(micro_batches)
    while len(micro_batches) < wanted:
        chosen = max(micro_batches, key=lambda members: (len(members) > 1, bool(cuts(members)), len(members)))
        middle = len(chosen) / 2
        cut = min(cuts(chosen) or range(1, len(chosen)), key=lambda at: abs(at - middle))
        at = micro_batches.index(chosen)
        micro_batches[at : at + 1] = [chosen[:cut], chosen[cut:]]
    return micro_batches


def _fill_evenly(tree: PrefixTree, least: int, max_tokens: int) -> list[list[int]]:
    """As few micro-batches as within the budget, with no more rows, within one that is as small, from `least` on."""
    micro_batches, rows = _fill(tree, max_tokens)
    if len(micro_batches) < 2:
        return micro_batches
    low, high = max(least, -(-rows // len(micro_batches))), max_tokens
    while high - low > max(1, max_tokens // 64):
        middle = (low + high) // 2
        found, found_rows = _fill(tree, middle)
        if len(found) <= len(micro_batches) and found_rows <= rows:
            micro_batches, high = found, middle
        else:
            low = middle
    return micro_batches


def _fill(tree: PrefixTree, max_tokens: int) -> tuple[list[list[int]], int]:
    """The micro-batches, and the rows of all of them."""
    nodes = len(tree.node_lens)
    # Parts of what is below each node, and of the forest: rows that are not on the path, sequences.
    parts: list[list[tuple[int, list[int]]]] = [[] for _ in range(nodes + 1)]
    for members in below(tree, range(nodes)):
        parts[tree.leaves[members[0]]].append((0, members))
    for node in reversed(range(nodes)):
        own = tree.node_lens[node]
        room = max_tokens - tree.begins[node] - own
        # What is last in the row comes first.
        found = united(parts[node][::-1], room)
        parts[tree.node_parents[node]] += [(own + size, members) for size, members in reversed(found)]
        parts[node] = []
    found = united(parts[-1][::-1], max_tokens)
    return [members for _, members in found], sum(size for size, _ in found)


def united(parts: list[tuple[int, list[int]]], room: int) -> list[tuple[int, list[int]]]:
    """Fewer parts of at most `room` rows: best fit, decreasing. None has more rows yet."""
    sizes = [size for size, _ in parts]
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, number of the bin), rising
    order = sorted(range(len(parts)), key=lambda part: -sizes[part])
    if order and sum(sizes) <= room:
        bins, order = [order], []
    for index in order:
        at = bisect_left(rooms, (sizes[index], -1))
        if at < len(rooms):
            left, number = rooms.pop(at)
        else:
            left, number = room, len(bins)
            bins.append([])
        bins[number].append(index)
        insort(rooms, (left - sizes[index], number))
    for chosen in bins:
        chosen.sort()
    return [(sum(sizes[at] for at in chosen), [index for at in chosen for index in parts[at][1]]) for chosen in bins]
