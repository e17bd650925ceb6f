# SPDX-License-Identifier: BSD-3-Clause
"""What samples share behind their prompts: turns, branches, and steps that later ones begin with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...data.batch import PackedBatch
from ...data.pack import group_by_prefix, pack_prefix_tree
from ...data.prefix_tree import Boundary, PrefixTree
from .fallback import Options

# The row before a branch in each of the branches: the row behind one has the token that it scores,
# which is what trainers compute with.
BOUNDARY: Boundary = "replicate"


def deeper_tree(sequences: Sequence[Tensor], prompt_rows: int, options: Options) -> PrefixTree | None:
    """The tree of all that samples begin with in common, if it has clearly fewer rows than prompts alone.

    Args:
        sequences: whole samples.
        prompt_rows: of these samples with each prompt once.
        options: their `min_shared` is what the tree must save at least, and each of its nodes.
    """
    if options.min_shared is None or not len(sequences):
        return None
    tree = group_by_prefix(sequences, boundary=BOUNDARY, min_shared=options.min_shared)
    return tree if sum(tree.node_lens) + options.min_shared <= prompt_rows else None


def pack_deeper(
    sequences: Sequence[Tensor],
    prompt_lens: Sequence[int],
    borders: Sequence[Sequence[int]],
    pad_to_multiple_of: int | None = None,
) -> PackedBatch:
    """Samples whose responses are scored, packed with the borders of their tree."""
    masks = [
        torch.arange(len(one), device=one.device) >= length for one, length in zip(sequences, prompt_lens, strict=True)
    ]
    return pack_prefix_tree(
        sequences, loss_mask=masks, boundary=BOUNDARY, borders=borders, pad_to_multiple_of=pad_to_multiple_of
    )
