# SPDX-License-Identifier: BSD-3-Clause
"""Values of response tokens from the packed order into the shapes that trainers hold them in."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import checks
from ..errors import SharedPromptError, SharedPromptTypeError
from .batch import PackedBatch


def unpack_logprobs(
    values: Tensor,
    batch: PackedBatch,
    *,
    width: int | None = None,
    fill: float = 0.0,
    per_row: bool | None = None,
) -> Tensor:
    """Values of the scored tokens as a padded tensor in the samples' original order; differentiable.

    Those of a sequence stand one after the other, wherever its loss mask has them; of samples they are the response.

    Args:
        values: (sum R,) one for each scored token, in the order of `token_index`; or (T,) one for each packed row, of
            which a scored token takes that of the row that scores it. A leading dimension of size 1 is ignored.
        batch: where they come from. Values of another batch with as many are not told from its own.
        width: columns of the result, for a trainer's mask of (B, width); None for the most scored tokens of
            a sequence.
        fill: what stands after them.
        per_row: which of the two `values` is; None: as its length says.

    Returns:
        (B, width) in the dtype of `values`.

    Raises:
        SharedPromptError: `values` has neither length, or has both and per_row is None; a width below the most
            scored tokens.
    """
    values = _of_scored_tokens(values, batch, per_row)
    samples, longest = len(batch.response_lens), max(batch.response_lens)
    columns = longest if width is None else checks.integer("width", width, longest, checks.MAX_ROWS)
    expected = f"a number of {values.dtype} (as values)"
    if isinstance(fill, bool) or not isinstance(fill, (int, float)):
        raise SharedPromptTypeError("fill", expected, checks.describe(fill))
    if not values.dtype.is_floating_point and fill % 1:  # PyTorch would cut it
        raise SharedPromptError("fill", expected, fill)
    try:
        filled = values.new_full((samples * longest,), fill)
    except (RuntimeError, OverflowError):
        raise SharedPromptError("fill", expected, fill) from None
    filled = filled.scatter_(0, batch.padded_index, values).view(samples, longest)
    return filled if columns == longest else torch.nn.functional.pad(filled, (0, columns - longest), value=fill)


def unpack_to_jagged(values: Tensor, batch: PackedBatch, *, per_row: bool | None = None) -> Tensor:
    """Values of the scored tokens as a nested tensor of whole sequences, as verl's losses read them; differentiable.

    Args:
        values: (sum R,) one for each scored token, in the order of `token_index`; or (T,) one for each packed row.
        batch: where they come from. Values of another batch with as many are not told from its own.
        per_row: which of the two `values` is; None: as its length says.

    Returns:
        nested (B, L_i): the value of a scored token stands at the place before it, where a model's unshifted output
        scores it (response token j at P_i - 1 + j); 0 elsewhere.
    """
    values = _of_scored_tokens(values, batch, per_row)
    rows = values.new_zeros((batch.num_replicated_tokens,)).scatter_(0, batch.jagged_index, values)
    totals = batch.sequence_lens
    return torch.nested.nested_tensor_from_jagged(
        rows, batch.jagged_offsets, min_seqlen=min(totals), max_seqlen=max(totals)
    )


def _of_scored_tokens(values: Tensor, batch: PackedBatch, per_row: bool | None) -> Tensor:
    checks.instance("batch", batch, PackedBatch)
    checks.instance("values", values, Tensor)
    if per_row is not None:
        checks.flag("per_row", per_row)
    if values.is_nested or values.layout != torch.strided:
        raise SharedPromptTypeError("values", "a dense tensor", f"one of layout {values.layout}")
    if values.device != batch.token_index.device:
        raise SharedPromptError("values", f"device {batch.token_index.device} (as the batch)", values.device)
    if values.dim() == 2 and values.shape[0] == 1:
        values = values[0]
    tokens, rows = sum(batch.response_lens), batch.layout.num_tokens
    if per_row is None:
        if tokens == rows > 0 and values.shape == (rows,):
            raise SharedPromptError("per_row", f"a bool, as {rows} values fit rows and scored tokens", None)
        per_row = values.shape == (rows,)
    if values.shape != (rows if per_row else tokens,):
        expected = f"{rows} values, one for each row" if per_row else f"{tokens} (scored tokens) or {rows} (rows)"
        raise SharedPromptError("values", expected, f"shape {tuple(values.shape)}")
    return values[batch.token_index] if per_row else values
