"""Which samples go into which micro-batch and onto which rank, so that samples with one prompt stay together."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..checks import explain
from ..errors import SharedPromptError, SharedPromptTypeError
from ..host import untraced
from .samples import GroupIds, check_count, groups_of


@untraced
def split_by_token_budget(
    groups: Sequence[Sequence[int]],
    prompt_lens: Sequence[int] | Tensor,
    response_lens: Sequence[int] | Tensor,
    max_tokens: int,
    *,
    dp_group: Any = None,
) -> list[list[int]]:
    """Micro-batches of at most `max_tokens` packed tokens each.

    A group that fits stays whole; one that does not is split between its responses, each part with its own copy of the
    prompt. Parts of a group and micro-batches are filled in the same way: the longest first, each into the fullest one
    that has room. Of the ways to fill as few micro-batches, one is taken whose largest is small: it sets the peak of
    memory.

    Args:
        groups: the samples of each prompt, as `group_by_prompt` gives them; no sample twice. Samples of no group are
            left out.
        prompt_lens, response_lens: (B,) of the samples, lists or integer tensors; equal prompts within a group.
        max_tokens: bound of a packed micro-batch without padding, whichever boundary it is packed with.
        dp_group: a torch.distributed process group whose ranks must get equally many micro-batches; the ranks with
            fewer split theirs further, between groups where they can. Every rank must call.

    Returns:
        The sample indices of each micro-batch; no micro-batch for no groups.

    Raises:
        SharedPromptError: an argument is not as described; a single sample is longer than the budget; with dp_group, on
            every rank, if one of them fails or has fewer samples than another needs micro-batches.
    """

    def fill() -> tuple[list[list[int]], Sequence[Sequence[int]]]:
        budget = checks.integer("max_tokens", max_tokens, 1)
        checked, prompts, responses = _checked_groups(groups, prompt_lens, response_lens)
        longest = [prompts[index] + responses[index] for members in checked for index in members]
        # Groups that fit stay whole.
        whole = [prompts[members[0]] - 1 + sum(responses[index] + 1 for index in members) for members in checked]
        least = max([*longest, *(size for size in whole if size <= budget)], default=0)
        return fill_evenly(lambda size: _fill(checked, prompts, responses, size), least, budget), checked

    return on_equal_terms(fill, dp_group, "samples")


def on_equal_terms(
    fill: Callable[[], tuple[list[list[int]], Sequence[Sequence[int]]]], dp_group: Any, of: str
) -> list[list[int]]:
    """The micro-batches that `fill` gives; with dp_group, equally many on all ranks, and an error on all of them.

    Args:
        fill: gives micro-batches, and the groups between which they should be divided further.
        dp_group: of torch.distributed, or None.
        of: what micro-batches hold.
    """
    _check_process_group(dp_group)
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
    if dp_group is None:
        return micro_batches
    held = sum(map(len, micro_batches))
    wanted, fewest, failed = _largest([len(micro_batches), -held, error is not None], dp_group)
    if failed:
        raise SharedPromptError(error or explain("max_tokens", "a budget that every rank can keep", "one that cannot"))
    if wanted > -fewest:
        expected = f"at least {wanted} {of} on each rank, as many as another has micro-batches"
        raise SharedPromptError(explain("groups" if of == "samples" else "tree", expected, -fewest))
    return _split_further(micro_batches, groups, wanted)


def _split_further(micro_batches: list[list[int]], groups: Sequence[Sequence[int]], wanted: int) -> list[list[int]]:
    """Cuts micro-batches in two until there are `wanted`: between groups while there are any, nearest to the middle."""
    group_of = {index: number for number, members in enumerate(groups) for index in members}

    def cuts(one: list[int]) -> list[int]:
        return [at for at in range(1, len(one)) if group_of[one[at - 1]] != group_of[one[at]]]

    micro_batches = list(micro_batches)
    while len(micro_batches) < wanted:
        chosen = max(micro_batches, key=lambda one: (len(one) > 1, bool(cuts(one)), len(one)))
        middle = len(chosen) / 2
        cut = min(cuts(chosen) or range(1, len(chosen)), key=lambda at: abs(at - middle))
        at = micro_batches.index(chosen)
        micro_batches[at : at + 1] = [chosen[:cut], chosen[cut:]]
    return micro_batches


def _check_process_group(dp_group: Any) -> None:
    if dp_group is None:
        return
    is_running = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not is_running or not isinstance(dp_group, torch.distributed.ProcessGroup):
        expected = "a process group of an initialised torch.distributed, or None"
        raise SharedPromptTypeError(explain("dp_group", expected, checks.describe(dp_group)))


def _checked_groups(groups: Any, prompt_lens: Any, response_lens: Any) -> tuple[list[list[int]], list[int], list[int]]:
    """Groups of samples that exist, each once, with one prompt a group."""
    prompts = checks.lengths("prompt_lens", prompt_lens, least=1)
    responses = checks.lengths("response_lens", response_lens, len(prompts), "prompt_lens")
    checked: list[list[int]] = []
    seen: set[int] = set()
    for number, members in enumerate(checks.items("groups", groups, "lists of sample indices")):
        name = f"groups[{number}]"
        indices = [
            checks.integer(f"{name}[{at}]", one, 0, len(prompts) - 1)
            for at, one in enumerate(checks.items(name, members, "sample indices"))
        ]
        if not indices:
            raise SharedPromptError(explain(name, "at least one sample", "none"))
        for one in indices:
            if one in seen:
                raise SharedPromptError(explain(name, "samples that are in no group yet", f"sample {one} again"))
            seen.add(one)
        _check_one_prompt(name, indices, prompts)
        checked.append(indices)
    return checked, prompts, responses


def _check_one_prompt(name: str, members: Sequence[int], prompt_lens: Sequence[int]) -> None:
    for other in members[1:]:
        if prompt_lens[other] != prompt_lens[members[0]]:
            expected = f"samples with one prompt, of {prompt_lens[members[0]]} tokens as that of sample {members[0]}"
            raise SharedPromptError(explain(name, expected, f"{prompt_lens[other]} of sample {other}"))


def fill_evenly(fill: Callable[[int], tuple[list[list[int]], int]], least: int, max_tokens: int) -> list[list[int]]:
    """As few micro-batches as within the budget, with no more rows, within a budget that is as small as that allows.

    Args:
        fill: gives the micro-batches of a budget, and the rows of all of them.
        least: the smallest budget to try.
    """
    micro_batches, rows = fill(max_tokens)
    if len(micro_batches) < 2:
        return micro_batches
    low, high = max(least, -(-rows // len(micro_batches))), max_tokens
    while high - low > max(1, max_tokens // 64):
        middle = (low + high) // 2
        found, found_rows = fill(middle)
        if len(found) <= len(micro_batches) and found_rows <= rows:
            micro_batches, high = found, middle
        else:
            low = middle
    return micro_batches


def _fill(
    groups: Sequence[Sequence[int]], prompt_lens: Sequence[int], response_lens: Sequence[int], max_tokens: int
) -> tuple[list[list[int]], int]:
    """The micro-batches, and the rows of all of them. Rows are those of the boundary "replicate", which has more."""
    pieces: list[list[int]] = []
    sizes: list[int] = []
    for members in groups:
        prompt_len = prompt_lens[members[0]]
        rows = [response_lens[index] + 1 for index in members]
        for index, own in zip(members, rows):
            if prompt_len - 1 + own > max_tokens:
                needed = f"at least {prompt_len + response_lens[index]}, the tokens of sample {index}"
                raise SharedPromptError(explain("max_tokens", needed, max_tokens))
        for part in best_fit(rows, max_tokens - (prompt_len - 1)):
            pieces.append([members[at] for at in sorted(part)])
            sizes.append(prompt_len - 1 + sum(rows[at] for at in part))
    return [[index for at in part for index in pieces[at]] for part in best_fit(sizes, max_tokens)], sum(sizes)


def best_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of the sizes by bin, each of at most `capacity`: best fit, decreasing. No size is above the capacity."""
    if not sizes:
        return []
    if sum(sizes) <= capacity:
        return [list(range(len(sizes)))]
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room left, number of the bin), rising
    for index in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
        at = bisect_left(rooms, (sizes[index], -1))
        if at < len(rooms):
            room, number = rooms.pop(at)
        else:
            room, number = capacity, len(bins)
            bins.append([])
        bins[number].append(index)
        insort(rooms, (room - sizes[index], number))
    return bins


def _largest(values: Sequence[int], dp_group: Any) -> list[int]:
    """The maximum of each value over the ranks of the group."""
    backend = str(torch.distributed.get_backend(dp_group))  # a name, or pairs such as "cpu:gloo,cuda:nccl"
    device = torch.device("cpu")
    if "nccl" in backend and "cpu:" not in backend:
        device = torch.device("cuda", torch.cuda.current_device())
    tensor = torch.tensor(values, dtype=torch.int64, device=device)
    torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX, group=dp_group)
    largest: list[int] = tensor.tolist()
    return largest


@untraced
def balance_groups(
    prompt_lens: Sequence[int] | Tensor,
    response_lens: Sequence[int] | Tensor,
    group_ids: GroupIds,
    num_ranks: int,
    *,
    token_cost: float = 0.0,
) -> list[list[int]]:
    """Samples for each rank: equally many, about equal costs, and groups whole where that is possible.

    The cost of a group is its visible pairs, P^2 / 2 + sum R (P + R / 2), and `token_cost` for each of its P + sum R
    tokens. Groups go, most expensive first, to the rank with the least cost that has room for all of their samples; one
    for which there is no such rank is divided among those with most room.

    Args:
        prompt_lens, response_lens: (B,) of the samples, lists or integer tensors; B is a multiple of num_ranks.
        group_ids: (B,) as for `pack_shared_prompts`.
        num_ranks: how many lists to make.
        token_cost: of the work that is done token by token, in pairs; 0 balances attention alone.

    Raises:
        SharedPromptError: an argument is not as described, unequal prompts in a group, a B that cannot be divided.
    """
    prompts = checks.lengths("prompt_lens", prompt_lens, least=1)
    samples = len(prompts)
    responses = checks.lengths("response_lens", response_lens, samples, "prompt_lens")
    ranks, share = ranks_and_share(samples, num_ranks, token_cost, "samples")
    given = checks.group_ids(group_ids)
    ids = given.tolist() if isinstance(given, Tensor) else given
    check_count(ids, samples)
    groups = groups_of(ids)
    for members in groups:
        _check_one_prompt(f"group_ids {ids[members[0]]!r}", members, prompts)

    def cost(chosen: Sequence[int]) -> float:
        prompt, own = prompts[chosen[0]], [responses[i] for i in chosen]
        pairs = prompt**2 / 2 + sum(length * (prompt + length / 2) for length in own)
        return pairs + token_cost * (prompt + sum(own))

    return spread(sorted(groups, key=cost, reverse=True), ranks, share, lambda _, chosen: cost(chosen))


def ranks_and_share(count: int, num_ranks: Any, token_cost: Any, of: str) -> tuple[int, int]:
    """The ranks, and how many of `count` each gets, if the arguments are as described."""
    ranks: int = checks.integer("num_ranks", num_ranks, 1)
    if isinstance(token_cost, bool) or not isinstance(token_cost, (int, float)) or not 0 <= token_cost < math.inf:
        raise SharedPromptTypeError(explain("token_cost", "a finite number >= 0", checks.describe(token_cost)))
    if count % ranks != 0:
        raise SharedPromptError(explain("num_ranks", f"a divisor of the {count} {of}", num_ranks))
    return ranks, count // ranks


def spread(
    groups: Iterable[list[int]],
    num_ranks: int,
    share: int,
    added: Callable[[int, list[int]], float],
    take: Callable[[int, list[int]], None] = lambda rank, chosen: None,
) -> list[list[int]]:
    """One group after the other to the rank that then has the least cost, of those with room for all of it.

    A group for which there is no such rank is divided among those with most room.

    Args:
        groups: what to distribute.
        share: how many of them each rank has in the end.
        added: what a rank's cost grows by with some of a group.
        take: called when it gets them.
    """
    ranks: list[list[int]] = [[] for _ in range(num_ranks)]
    costs = [0.0] * num_ranks
    for rest in groups:
        while rest:
            roomy = [rank for rank in range(num_ranks) if share - len(ranks[rank]) >= len(rest)]
            if roomy:
                rank = min(roomy, key=lambda one: costs[one] + added(one, rest))
            else:
                rank = min(range(num_ranks), key=lambda one: (len(ranks[one]), costs[one]))
            taken, rest = rest[: share - len(ranks[rank])], rest[share - len(ranks[rank]) :]
            costs[rank] += added(rank, taken)
            take(rank, taken)
            ranks[rank] += taken
    return ranks
