# SPDX-License-Identifier: BSD-3-Clause
"""Packing inside compiled code: it is run as it is, whoever calls it; a whole graph says why not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from samples import assert_same_batch
from torch import Tensor

import flash_attn_dualkv as api
from flash_attn_dualkv.host import REASON

pytestmark = pytest.mark.usefixtures("fresh_compiler")

IDS = torch.tensor([[5, 6, 7, 1, 9], [5, 6, 7, 2, 9], [0, 8, 9, 3, 9]])
MASK = (IDS != 0).long()
LENS = torch.tensor([3, 3, 2])
JAGGED = torch.nested.nested_tensor([*IDS], layout=torch.jagged)

# Everything public that reads tokens or lengths, called as trainers do; each returns what can be
# compared.
CALLS: dict[str, Callable[[Tensor], Any]] = {
    "pack_padded, lengths": lambda ids: api.pack_padded(ids, MASK, LENS),
    "pack_padded, columns": lambda ids: api.pack_padded(ids, MASK, 3, boundary="gather"),
    "pack_shared_prompts": lambda ids: api.pack_shared_prompts([one[:3] for one in ids], [one[3:] for one in ids]),
    "pack_shared_prompts, lists": lambda ids: api.pack_shared_prompts([[5, 6]] * 2, [[1], [2]]),
    "multiplicity": lambda ids: api.pack_padded(ids, MASK, LENS).multiplicity.tolist(),
    "pack_jagged": lambda ids: api.pack_jagged(JAGGED, LENS),
    "pack_prefix_tree": lambda ids: api.pack_prefix_tree([*ids], min_shared=1),
    "group_by_prompt": lambda ids: api.group_by_prompt([one[:3] for one in ids]),
    "group_by_prefix": lambda ids: api.group_by_prefix([*ids], min_shared=1).borders,
    "split_by_token_budget": lambda ids: api.split_by_token_budget([[0, 1], [2]], [3, 3, 2], [2, 2, 2], max_tokens=9),
    "balance": lambda ids: api.balance([[0, 1], [2]], [3, 3, 2], [2, 2, 2], 1),
    "from_tree": lambda ids: api.SharedPromptLayout.from_tree([3, 2, 2], [-1, 0, 0]).nodes.tolist(),
    "to": lambda ids: api.pack_padded(ids, MASK, LENS).layout.to("meta").nodes.shape,
}


# Of each kind one; all others behind -m slow.
QUICK = {"pack_padded, lengths", "pack_shared_prompts", "pack_prefix_tree", "balance", "from_tree"}


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (one not in QUICK)) for one in CALLS])
def test_in_a_compiled_function(name: str) -> None:
    def work(ids: Tensor) -> Any:
        return CALLS[name](ids * 1), ids + 1

    got, later = torch.compile(work, backend="eager")(IDS)
    expected = CALLS[name](IDS)
    assert later.equal(IDS + 1)
    if isinstance(expected, api.PackedBatch):
        assert_same_batch(got, expected)
    else:
        assert got == expected
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported) as raised:
        torch.compile(work, backend="eager", fullgraph=True)(IDS)
    assert REASON in str(raised.value)


def test_errors_come_through() -> None:
    def work(ids: Tensor) -> Any:
        return api.pack_padded(ids, MASK, 9)

    with pytest.raises(api.SharedPromptError, match="^prompt_length: expected an int >= 0 and <= 5, got 9"):
        torch.compile(work, backend="eager")(IDS)


@pytest.mark.slow
def test_the_compiler_is_not_imported_for_packing() -> None:
    """It takes a second or two."""
    code = (
        "import sys, flash_attn_dualkv as api; api.pack_shared_prompts([[1]], [[2]]).to('cpu'); "
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
