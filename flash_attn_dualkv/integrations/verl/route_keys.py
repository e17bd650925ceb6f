# SPDX-License-Identifier: BSD-3-Clause
"""Equal tokens that must not share a row, because their recorded routes of experts differ.

What samples have in common is found by the keys of their tokens, beside which the tokens themselves are packed. So
samples share what they begin with, up to the first token whose routes differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...data.pack import group_by_prompt
from ...errors import SharedPromptError
from ...host import take

_CHUNK = 1 << 15  # tokens whose routes are widened to 64 bits at a time


def route_keys(input_ids: Any, routes: Any, replayed: Tensor | None = None) -> Tensor:
    """(sum L,) int64: equal for equal tokens that have the same experts in all layers, in the same order.

    Args:
        input_ids: nested (B, L_i).
        routes: nested (B, L_i, layers, k).
        replayed: nested (B, L_i) bool, which of them count; tokens without have equal keys if they are equal.

    Raises:
        SharedPromptError: the routes are not those of as many tokens.
    """
    tokens = input_ids.values().long()
    if not torch.equal(routes.offsets().diff().cpu(), input_ids.offsets().diff().cpu()):
        expected = f"routes of the {len(tokens)} tokens of all samples"
        raise SharedPromptError("routed_experts", expected, f"of {len(routes.values())}")
    values = routes.values().to(tokens.device).flatten(1)
    if replayed is not None:
        values = values.masked_fill(~replayed.values().to(tokens.device)[:, None], -1)
    return _numbered(tokens, values)


def divided_prompts(keys: Tensor, input_ids: Any, prompt_lens: Sequence[int]) -> int:
    """The number of prompts whose samples have different keys."""
    of_keys, of_tokens = (
        group_by_prompt([values[:length] for values, length in zip(flat.split(sizes), prompt_lens, strict=True)])
        for sizes in [input_ids.offsets().diff().tolist()]
        for flat in (keys, input_ids.values())
    )
    firsts = {index: group[0] for group in of_keys for index in group}
    return sum(len({firsts[index] for index in group}) > 1 for group in of_tokens)


def _numbered(tokens: Tensor, values: Tensor) -> Tensor:
    """Numbers from 0, equal for equal tokens with equal values.

    Args:
        tokens: (n,) int64.
        values: (n, m) integers.

    By random sums that all values are compared with afterwards: sorting rows of hundreds of values takes far longer.
    """
    parts = range(0, len(tokens), _CHUNK)
    places = torch.arange(len(tokens), device=tokens.device)
    for seed in itertools.count():
        source = torch.Generator().manual_seed(seed)  # the same on all ranks
        factors = torch.randint(-(2**63), 2**63 - 1, (values.shape[1] + 1,), generator=source).to(tokens.device)
        sums = torch.cat([(values[at : at + _CHUNK].long() * factors[1:]).sum(1) for at in parts])
        _, numbers = (sums + tokens * factors[0]).unique(return_inverse=True)
        examples = places.new_zeros(int(numbers.max()) + 1).scatter_(0, numbers, places)
        same = take(examples, numbers)
        if torch.equal(take(tokens, same), tokens) and all(
            torch.equal(values.index_select(0, same[at : at + _CHUNK]), values[at : at + _CHUNK]) for at in parts
        ):
            return numbers
    raise AssertionError("unreachable")
