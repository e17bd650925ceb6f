# SPDX-License-Identifier: BSD-3-Clause
"""A forward of a transformers model over a packed row: the only place that knows all that it needs.

Layout, unread rows, positions, images, towers without a layout, and the guard that counts the layers. Who runs the
forward (TRL's own, verl's own, one with another head) is the caller's affair.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ... import checks
from ...data.batch import PackedBatch
from ...guard import expect_shared_prompt
from ...layout import SharedPromptLayout
from ...parallel.sharded import DividedLayout
from ...pieces import KeptKeys, PieceLayout
from .admission import table, unwrap
from .images import row_inputs, towers_without_layout
from .query_pruning import late_layout

LAYOUT = "shared_prompt_layout"


@dataclass(frozen=True)
class PackedRow:
    """A packed row as a forward takes it.

    Attributes:
        causal_lm: the transformers model.
        batch: whose row it is.
        layout: that the layers get, with the rows that leave before the last ones.
    """

    causal_lm: Any
    batch: PackedBatch
    layout: SharedPromptLayout

    @cached_property
    @torch.compiler.disable
    def inputs(self) -> dict[str, Any]:
        """Keyword arguments of the model; SharedPromptError for images that it cannot share."""
        divided = self.layout if isinstance(self.layout, DividedLayout) else None
        made = row_inputs(self.causal_lm, self.batch, divided)
        if divided is None:  # with the positions of images, if there are any
            own: dict[str, Any] = dict(late=self.layout.late)
            if isinstance(self.layout, PieceLayout):
                own["keys"] = self.layout.keys
            made[LAYOUT] = replace(made[LAYOUT], **own)
        return made


@torch.compiler.disable
def packed_row(
    model: Any,
    batch: PackedBatch,
    layout: SharedPromptLayout | None = None,
    *,
    drop_unread: bool = False,
    rows: Tensor | None = None,
    ancestors: KeptKeys | None = None,
) -> PackedRow:
    """The row of a batch for a forward of a model.

    Args:
        model: a causal LM or classifier of transformers, wrapped or not.
        batch: on the model's device.
        layout: the batch's, divided among ranks, or of `without_positions`; None: the batch's.
        drop_unread: let rows that are not read leave before the last layers, where these own no keys. Not in a divided
            row.
        rows: (n,) int64, the rows that are read of the backbone's output; None: those that score tokens.
        ancestors: where the keys come from of nodes that the batch continues and has no rows of; for a batch with a
            `PieceLayout`.
    """
    causal_lm = unwrap.causal_lm_of(model)
    layout = batch.layout if layout is None else layout
    if ancestors is not None:
        layout = replace(checks.instance("batch.layout", layout, PieceLayout), keys=ancestors)
    if drop_unread and not isinstance(layout, DividedLayout):
        layout = replace(layout, late=late_layout(causal_lm, batch, rows))
    return PackedRow(causal_lm, batch, layout)


def without_positions(batch: PackedBatch) -> SharedPromptLayout:
    """The batch's layout for a forward to which a trainer hands its own copy of the positions, padded or sliced."""
    return replace(batch.layout, position_ids=None)


@contextmanager
def packed_forward(row: PackedRow) -> Iterator[None]:
    """The context of the forward alone: every layer that mixes tokens must get the row's layout, and no tower may.

    Raises:
        SharedPromptLayoutError: on leaving, if a layer has attended without the layout.
    """
    expected = expect_shared_prompt(row.layout, table.num_mixing_layers(row.causal_lm))
    with expected, towers_without_layout(row.causal_lm, row.batch):
        yield
