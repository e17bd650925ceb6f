# SPDX-License-Identifier: BSD-3-Clause
"""Samples to ranks by groups: verl balances by length, which scatters responses."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch

from ...data.balance import balance
from ...data.given import groups_of
from ...data.prefix_tree import PrefixTree
from ..common.options import Options
from ..common.patching import after_import, replace_once

# What a token's matrix products cost, in visible pairs of attention, in models of 1B to 30B.
TOKEN_COST = 16384.0


def partitions(
    prompts: Sequence[int],
    responses: Sequence[int],
    uids: Sequence[str],
    ranks: int,
    sessions: Sequence[str] | None = None,
) -> list[list[int]]:
    """Equally many samples a rank, what shares a prompt together, prompts in the order of the batch.

    Args:
        prompts, responses: tokens of each sample.
        uids: of the prompts that rollouts begin with.
        ranks: how many lists to make.
        sessions: of rollouts, which may have several samples: the steps of an agent. None: one each.
    """
    tree, ids = expected_tree(prompts, responses, uids, sessions or range(len(uids)))
    parts = balance(tree, num_ranks=ranks, token_cost=TOKEN_COST)
    # These begin with what is most expensive, and a rank's mini-batches are cut from its list: the
    # first would have all long prompts.
    first = {rollout: index for index, rollout in reversed(list(enumerate(ids)))}
    return [sorted(part, key=lambda index: (first[ids[index]], index)) for part in parts]


def expected_tree(
    prompts: Sequence[int], responses: Sequence[int], uids: Sequence[str], sessions: Sequence[Hashable]
) -> tuple[PrefixTree, list[tuple[str, int]]]:
    """Tree that samples should share, only by their lengths; and of each the prompt that its rollout began with.

    Tokens are on other machines. A step that has room in its prompt for the step before it is taken to begin with that,
    any other one for a rollout of its own.
    """
    ids = list(zip(uids, prompts))  # samples that only fill up a batch may have another prompt under the same uid
    totals = list(map(int.__add__, prompts, responses))
    above: dict[int, int] = {}  # the step before
    last: dict[tuple[str, Hashable], int] = {}
    for index in sorted(range(len(uids)), key=totals.__getitem__):
        before = last.get((uids[index], sessions[index]))
        if before is not None and prompts[index] >= totals[before]:
            above[index], ids[index] = before, ids[before]
        last[uids[index], sessions[index]] = index
    below = {before: index for index, before in above.items()}
    lens: list[int] = []
    parents: list[int] = []
    leaves = [-1] * len(uids)
    for members in groups_of(ids):
        root = len(lens)
        lens.append(ids[members[0]][1] - 1)
        parents.append(-1)
        for head in members:
            if head in above:
                continue
            chain = [head]
            while chain[-1] in below:
                chain.append(below[chain[-1]])
            parent, end = root, lens[root]
            for step in chain:
                lens.append(totals[step] - end)
                parents.append(parent)
                parent = leaves[step] = len(lens) - 1
                end = totals[step]
    return PrefixTree(tuple(lens), tuple(parents), tuple(leaves), tuple(totals), "replicate"), ids


def _order(
    prompts: list[int],
    responses: list[int],
    uids: list[str],
    sessions: list[str] | None,
    ranks: int,
    metrics: dict[str, Any],
    prefix: str,
) -> list[int]:
    """The samples rank by rank; notes in verl's metrics how even that is."""
    from verl.utils.seqlen_balancing import log_seqlen_unbalance  # seconds, in every worker

    chosen = partitions(prompts, responses, uids, ranks, sessions)
    totals = list(map(int.__add__, prompts, responses))
    metrics.update(log_seqlen_unbalance(seqlen_list=totals, partitions=chosen, prefix=prefix))
    return [index for part in chosen for index in part]


def _is_on(trainer: Any) -> bool:
    return Options.of(trainer.config.actor_rollout_ref.model.get("override_config") or {}).enabled


def _balance_v1(stock: Callable[..., Any]) -> Callable[..., Any]:
    def _balance_batch(
        self: Any, batch: Any, metrics: dict[str, Any], logging_prefix: str = "global_seqlen", *args: Any, **kwargs: Any
    ) -> Any:
        # Fills up the batch, and asks the workers how many ranks there are.
        batch = stock(self, batch, metrics, logging_prefix, *args, **kwargs)
        uids, sessions, _ = map(list, zip(*(key.rsplit("_", 2) for key in batch.keys)))
        if not _is_on(self) or len(set(uids)) == len(uids):
            return batch
        prompts, totals = ([int(tag[name]) for tag in batch.tags] for name in ("prompt_len", "seq_len"))
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        responses = list(map(int.__sub__, totals, prompts))
        batch.reorder(_order(prompts, responses, uids, sessions, ranks, metrics, logging_prefix))
        return batch

    return _balance_batch


def _balance_v0(stock: Callable[..., Any]) -> Callable[..., Any]:
    def _balance_batch(
        self: Any,
        batch: Any,
        metrics: dict[str, Any],
        logging_prefix: str = "global_seqlen",
        keep_minibatch: bool = False,
    ) -> None:
        stock(self, batch, metrics, logging_prefix, keep_minibatch)
        uids = list(batch.non_tensor_batch.get("uid", ()))
        if not _is_on(self) or keep_minibatch or len(set(uids)) == len(uids):
            return
        mask, columns = batch.batch["attention_mask"], batch.batch["prompts"].shape[1]
        prompts, responses = (part.ne(0).sum(1).tolist() for part in (mask[:, :columns], mask[:, columns:]))
        ranks = self._get_dp_size(self.actor_rollout_wg, "actor")
        batch.reorder(torch.tensor(_order(prompts, responses, uids, None, ranks, metrics, logging_prefix)))

    return _balance_batch


_TRAINERS = {
    "verl.trainer.ppo.v1.trainer_base": ("PPOTrainer", _balance_v1),
    "verl.trainer.ppo.ray_trainer": ("RayPPOTrainer", _balance_v0),
}


def install() -> None:
    """Balance by groups in trainers, when they are imported: to import them takes seconds in every worker."""
    for name in _TRAINERS:
        after_import(name, _patch)


def _patch(module: Any) -> None:
    kind, make = _TRAINERS[module.__name__]
    replace_once(getattr(module, kind), "_balance_batch", make)
