# SPDX-License-Identifier: BSD-3-Clause
"""Values of reward models and critics on packed rows: the backbone over every token once, the head over some rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GenericForSequenceClassification, GenericForTokenClassification

from ... import checks
from ...data.batch import PackedBatch
from ...errors import SharedPromptError
from ...host import offsets_of, to_device, untraced
from .admission import check, table, unwrap
from .forward import COMPILE_THE_MODEL, check_vocabulary, checked_rows
from .packed_forward import packed_forward, packed_row
from .query_pruning import has_foreign_forward


@functools.partial(untraced, reason=COMPILE_THE_MODEL)
def shared_prompt_values(
    model: nn.Module,
    batch: PackedBatch,
    rows: Tensor | None = None,
    *,
    self_check: bool = True,
    share_lora_dropout: bool = False,
) -> Tensor:
    """Values of a reward model, a classifier or a critic for a micro-batch; each shared token is computed once.

    Args:
        model: a `*ForSequenceClassification` or `*ForTokenClassification` of transformers that has the generic head
            (`score` on the backbone's hidden states), on an attention registered or wrapped by this package; also
            inside PEFT, DDP, FSDP or DeepSpeed. Gradients flow to its parameters unless grad mode is off.
        batch: from `pack_prefix_tree` or `pack_shared_prompts`, on the model's device.
        rows: (n,) int64 on the batch's device or on the host, whose values are wanted: `batch.token_index` for one of
            each scored token (a critic's), `batch.last_rows`, `batch.rows_of(tokens)`. None: one of each sequence, at
            the row that sequence classification takes: that of its last token that is not the configuration's
            pad_token_id.
        self_check, share_lora_dropout: of `shared_prompt_forward`.

    Returns:
        (n, num_labels), or (sequences, num_labels), in the order of `rows` or of the sequences, in the head's
        type.

    Raises:
        SharedPromptError: a model with another head, or a forward of its own; rows that are not as described, or None
            for token classification; what `shared_prompt_forward` refuses.
        SharedPromptLayoutError: an attention layer has not got the layout.
    """
    checks.instance("batch", batch, PackedBatch, " (of pack_prefix_tree)")
    classifier = unwrap.causal_lm_of(model)
    with unwrap.lock_of(classifier):
        check_classifier(classifier)
        table.check_attention(classifier.config)
        first_use = dict(self_check=self_check, share_lora_dropout=share_lora_dropout)
        check.check_first_use(classifier, batch.input_ids.device, model=model, **first_use)
        check_vocabulary(classifier, batch)
        table.check_length(classifier, batch.layout.max_sequence)
        wanted = _pooled_rows(classifier, batch) if rows is None else checked_rows(rows, batch)

        def answer(stock: Callable[..., Any], *args: Any, **inputs: Any) -> Tensor:
            # The plain method would run the head over all rows.
            if unwrap.is_plain(stock, classifier):
                return values_of_rows(classifier, wanted, inputs)
            return _values_as_wrapped(stock, classifier, wanted, inputs)

        row = packed_row(classifier, batch)
        wanted = to_device([wanted], batch.input_ids.device)[0]
        with packed_forward(row), unwrap.replaced_forward(classifier, answer) as call:
            values: Tensor = call(model, row.inputs)
    return values


def check_classifier(model: Any) -> None:
    """SharedPromptError for a transformers model that is not exact, or is none with a head on each row."""
    if not isinstance(model, (GenericForSequenceClassification, GenericForTokenClassification)):
        expected = "a *ForSequenceClassification or *ForTokenClassification with transformers' generic head"
        raise SharedPromptError("model", expected, type(model).__name__)
    if has_foreign_forward(model):
        # What it does behind the backbone would be left out.
        got = f"a {type(model).__name__} with a forward of its own"
        raise SharedPromptError("model", "transformers' own forward of a classifier", got)
    # An attribute of Cohere Compass, whose forward may take another row, or the mean of all.
    if (pooling := getattr(model, "pooling", "eos")) != "eos":
        expected = '"eos", the value of the last token that is not padding'
        raise SharedPromptError(f"pooling of {type(model).__name__}", expected, repr(pooling))
    table.check_supported(model.config)


def values_of_rows(classifier: Any, rows: Tensor, inputs: dict[str, Any]) -> Tensor:
    """(n, num_labels) of a forward's keyword arguments, which wrappers may have added to; on the device of `rows`."""
    given = {name: value for name, value in inputs.items() if value is not None} | {"attention_mask": None}
    given.pop("return_dict", None)
    backbone = getattr(classifier, str(unwrap.backbone_name(classifier)))
    states = backbone(**given).last_hidden_state[0]
    hidden = states.index_select(0, rows.to(states.device))
    if isinstance(classifier, GenericForTokenClassification):
        hidden = classifier.dropout(hidden)  # 0, or refused in training mode
    return classifier.score(hidden).to(rows.device)


def _values_as_wrapped(stock: Callable[..., Any], classifier: Any, rows: Tensor, inputs: dict[str, Any]) -> Tensor:
    """Values of some rows, inside what a library has put around the model's forward: accelerate's autocast, say."""
    with unwrap.kept_outputs(classifier.score) as found:
        stock(**{**inputs, "attention_mask": None, "return_dict": True})
    if len(found) != 1:
        raise SharedPromptError("model", "a forward that calls its head once", f"{len(found)} calls")
    output: Tensor = found[0]
    return output[0].index_select(0, rows.to(output.device)).to(rows.device)


def _pooled_rows(classifier: Any, batch: PackedBatch) -> Tensor:
    """(B,): the rows that sequence classification reads where it has each sequence in a row of its own."""
    if not isinstance(classifier, GenericForSequenceClassification):
        expected = "rows whose values are wanted (batch.token_index, for example): it has one a token"
        raise SharedPromptError("rows", expected, f"None with a {type(classifier).__name__}")
    last_rows = batch.last_rows  # refuses a sequence without tokens
    padding = unwrap.text_config(classifier.config).pad_token_id
    if padding is None:
        return last_rows
    lengths = batch.jagged_offsets.diff()
    rows = batch.row_index
    sequence = torch.repeat_interleave(lengths, output_size=len(rows))
    place = torch.arange(len(rows), device=rows.device) - offsets_of(lengths)[sequence]
    # Padding counts as the first place: so does a sequence of nothing else.
    place = place.masked_fill(batch.input_ids[rows] == padding, 0)
    last = place.new_zeros(len(lengths)).scatter_reduce_(0, sequence, place, "amax")
    return rows[batch.jagged_offsets[:-1] + last]
