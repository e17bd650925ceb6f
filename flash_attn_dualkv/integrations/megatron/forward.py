# SPDX-License-Identifier: BSD-3-Clause
"""A forward of one pipeline stage over a packed micro-batch, and log-probabilities of the rows that score tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor, nn

from ... import checks
from ...data.batch import PackedBatch
from ...errors import SharedPromptError
from ...parallel.context import ContextLayout
from ...parallel.sharded import Common, check_divided, same_on_all_ranks
from ...scores import rows_of_a_chunk, score_in_chunks
from ..common.buffers import unchanged_buffers
from .install import installed_chunk, position_ids_of
from .params import SharedPackedSeqParams, divided_layout

Scores = tuple[Tensor, "Tensor | None"]


class Request(NamedTuple):
    """Context of `output_processor` in Megatron's forward."""

    batch: PackedBatch
    layout: ContextLayout | None
    temperature: float
    with_entropy: bool


def shared_prompt_forward(
    model: nn.Module, batch: PackedBatch, *, temperature: float = 1.0, with_entropy: bool = False, **inputs: Any
) -> Tensor | Scores:
    """Runs this rank's chunk over the rows of a micro-batch: the step of `forward_step_func`.

    The last stage runs the LM head only over the rows that score tokens, some at a time, with the vocabulary divided
    among the tensor-parallel ranks; other stages return what the next one needs. All tensor-parallel and
    context-parallel ranks must call with the same batch. With pipeline stages set `variable_seq_lengths`, as
    micro-batches differ in their rows.

    With context parallelism each rank computes the runs of rows that `divided_layout` gives it, and gets the scores of
    all. Their gradient stays with the rank that has the row. So a loss function that returns (loss, what to log) is
    that without context parallelism, because Megatron averages over these ranks and multiplies by their number. For
    (loss, tokens, what to log) it does not multiply: multiply the loss by `context_parallel_size`.

    Args:
        model: a chunk that is installed, as the pipeline's schedule hands it to `forward_step_func`.
        batch: from `pack_shared_prompts` or `pack_prefix_tree`, on the model's device; on every stage, of which all but
            the first need only the layout. With sequence parallelism packed with `pad_to_multiple_of` = TP; with
            context parallelism its padding goes.
        temperature: divides the logits; finite and > 0.
        with_entropy: also compute the entropy of each distribution (natural log, differentiable).
        inputs: further arguments of the chunk's forward, `decoder_input` for one; no `labels` and no `loss_mask`.

    Returns:
        On the last stage (logps, entropy), each (scored tokens,) in float32 (float64 for float64 models), in the order
        of `batch.targets`, alike on all tensor-parallel and context-parallel ranks; entropy is None unless asked for.
        Padding of the vocabulary counts, as in Megatron's own loss. On other stages the hidden states of this rank's
        rows (L, 1, D), or with sequence parallelism its slice of them.

    Raises:
        SharedPromptError: an argument is not as described, or the model is not installed.
        SharedPromptLayoutError: an attention layer has not got the layout.
    """
    chunk = installed_chunk(model)
    with same_on_all_ranks(chunk.pg_collection.cp) as common:
        layout = layout_of(model, batch)
        request = _request(batch, layout, temperature, with_entropy)
        _note(common, chunk, batch, (temperature, with_entropy))
    output: Tensor | Scores = _run(
        model, batch, layout, output_processor=score_hidden, output_processor_context=request, **inputs
    )
    return output


def shared_prompt_values(model: nn.Module, batch: PackedBatch, **inputs: Any) -> Tensor:
    """Run this rank's chunk of a critic, whose output layer gives one number a row, alike on all tensor-parallel ranks.

    All tensor-parallel and context-parallel ranks must call with the same batch.

    Args:
        model: a chunk that is installed, as the pipeline's schedule hands it to `forward_step_func`.
        batch: from `pack_shared_prompts` or `pack_prefix_tree`, on the model's device.
        inputs: further arguments of the chunk's forward; no `labels` and no `loss_mask`.

    Returns:
        On the last stage (scored tokens,) values of the rows that score `batch.targets`, on other stages hidden states.
        With context parallelism all ranks have all values, and the gradient stays with the rank that has the row.

    Raises:
        SharedPromptError: an argument is not as described, the model is not installed, or more than one number a row.
        SharedPromptLayoutError: an attention layer has not got the layout.
    """
    chunk = installed_chunk(model)
    with same_on_all_ranks(chunk.pg_collection.cp) as common:
        layout = layout_of(model, batch)
        _note(common, chunk, batch, None)
    output: Tensor = _run(model, batch, layout, **inputs)
    if not chunk.post_process:
        return output
    if output.shape[-1] != 1:
        raise SharedPromptError("output layer", "one value a row", output.shape[-1])
    index = batch.token_index
    if layout is None:
        return output[0, :, 0].index_select(0, index)
    own, index = layout.local_rows(index)
    return _of_all_ranks(output[0, :, 0].index_select(0, index), own, len(batch.targets), layout)


def layout_of(model: nn.Module, batch: PackedBatch) -> ContextLayout | None:
    """The batch's layout, divided among the context-parallel ranks, if there are any."""
    checks.instance("batch", batch, PackedBatch, " (of pack_shared_prompts)")
    chunk = installed_chunk(model)
    config, group = chunk.config, chunk.pg_collection.cp
    slices = config.tensor_model_parallel_size if config.sequence_parallel else 1
    return divided_layout(batch, group, slices) if group.size() > 1 else None


def _note(common: Common, chunk: Any, batch: PackedBatch, options: Any) -> None:
    """Notes what this stage reads of the batch; others may have only the layout."""
    common.note(batch.layout, options)
    if not chunk.pre_process:
        common["input_ids"] = None
    if chunk.post_process:
        common.update(response_lens=batch.response_lens, token_index=batch.token_index)


def _run(model: nn.Module, batch: PackedBatch, layout: ContextLayout | None, **inputs: Any) -> Any:
    chunk, params = installed_chunk(model), SharedPackedSeqParams(batch, layout)
    for name in ("labels", "loss_mask"):
        if inputs.get(name) is not None:
            expected = "None (the batch says what is scored, the loss function weights it)"
            raise SharedPromptError(name, expected, checks.describe(inputs[name]))
    # On all stages: if only one raised, the others would wait for it.
    if batch.max_token >= chunk.vocab_size:
        raise SharedPromptError("batch", f"token ids below {chunk.vocab_size}", batch.max_token)
    rows = batch.input_ids if layout is None else layout.shard(batch.input_ids)
    return model(rows[None], position_ids_of(chunk, params), None, packed_seq_params=params, **inputs)


def score_logits(
    logits: Tensor,
    batch: PackedBatch,
    *,
    layout: ContextLayout | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    group: Any = None,
) -> Scores:
    """Log-probabilities of the scored tokens from the logits of all rows, of a forward of one's own.

    Args:
        logits: (1, L, vocabulary / ranks), this rank's rows and part of the vocabulary, as the last stage returns them.
        batch: whose rows they are.
        layout: with context parallelism that of `SharedPackedSeqParams`; all of its ranks must call.
        temperature: divides the logits; finite and > 0.
        with_entropy: also compute the entropy of each distribution.
        group: the tensor-parallel process group that divides the vocabulary, in the order of its ranks; None: whole.

    Returns:
        (logps, entropy), each (scored tokens,) in float32 or float64; entropy is None unless asked for.

    Raises:
        SharedPromptError: an argument is not as described.
    """
    checks.instance("batch", batch, PackedBatch, " (of pack_shared_prompts)")
    checks.instance("logits", logits, Tensor)
    if layout is not None:
        check_divided(layout, batch.layout)
    rows = (batch.layout if layout is None else layout).num_local_tokens
    if logits.dim() != 3 or logits.shape[:2] != (1, rows):
        raise SharedPromptError("logits", f"shape (1, {rows}, vocabulary)", tuple(logits.shape))
    request = _request(batch, layout, temperature, with_entropy)
    return _scores(lambda chosen: chosen, logits[0], request, group, logits.shape[-1])


def score_hidden(
    *, hidden_states: Tensor, output_layer: Any, output_weight: Any, scale_logits: Any, context: Request, **_: Any
) -> Scores:
    """`output_processor` of the last stage: hidden states (T, 1, D), or this rank's slice, to scores."""
    is_sliced = output_layer.sequence_parallel
    if is_sliced:
        # Every rank scores all rows, so gradients come back alike: each takes its slice of them.
        hidden_states = gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=False, group=output_layer.tp_group
        )

    def logits(hidden: Tensor) -> Tensor:
        """(rows, D) -> (rows, vocabulary / ranks); the gradient of hidden is summed over the ranks."""
        output_layer.sequence_parallel = False
        try:
            result, _ = output_layer(hidden[:, None], weight=output_weight, runtime_gather_output=False)
        finally:
            output_layer.sequence_parallel = is_sliced
        return scale_logits(result)[:, 0]

    vocabulary = output_layer.output_size_per_partition
    frozen = [*output_layer.parameters(), *([] if output_weight is None else [output_weight])]
    with unchanged_buffers(output_layer.modules(), "an output layer runs for some rows at a time"):
        return _scores(logits, hidden_states[:, 0], context, output_layer.tp_group, vocabulary, frozen)


def _request(batch: PackedBatch, layout: ContextLayout | None, temperature: float, with_entropy: bool) -> Request:
    return Request(batch, layout, checks.number("temperature", temperature), checks.flag("with_entropy", with_entropy))


def _scores(
    head: Any, rows: Tensor, request: Request, group: Any, vocabulary: int, frozen: Iterable[Tensor] = ()
) -> Scores:
    layout, distinct = request.layout, request.batch.distinct
    targets, index = distinct.pick(request.batch.targets), distinct.pick(request.batch.token_index)
    count = len(targets)
    if layout is not None:
        own, index = layout.local_rows(index)
        targets = targets.index_select(0, own)
    # One gather for all rows: one per chunk would have a backward as large as the whole pack.
    chosen = rows.index_select(0, index)
    options: dict[str, Any] = dict(temperature=request.temperature, with_entropy=request.with_entropy, group=group)
    options |= dict(rows=rows_of_a_chunk(vocabulary), frozen=frozen, max_target=request.batch.max_token)
    logps, entropy = score_in_chunks(head, chosen, targets, **options)
    scores = [logps, entropy] if request.with_entropy else [logps]
    if layout is not None:
        scores = [_of_all_ranks(values, own, count, layout) for values in scores]
    scores = [*map(distinct.expand, scores)]
    return scores[0], scores[1] if request.with_entropy else None


def _of_all_ranks(values: Tensor, own: Tensor, count: int, layout: ContextLayout) -> Tensor:
    """So many values, of which each rank has some."""
    whole = values.new_zeros(count).index_copy(0, own, values)
    # Megatron's sum, whose gradient is not summed over the ranks: all have the same loss.
    return reduce_from_tensor_model_parallel_region(whole, group=layout.group)
