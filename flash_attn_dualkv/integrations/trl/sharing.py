# SPDX-License-Identifier: BSD-3-Clause
"""The forward that scores completions, on a packed row instead of a padded batch.

TRL gives a causal LM a forward that returns log-probabilities instead of logits: `model(input_ids,
attention_mask, labels, fused_lm_head=True)`. All of its trainers score their completions with it,
policy and reference alike. Here that forward is replaced by one that packs the same samples, each
prompt once, calls TRL's forward on the packed row, and puts what comes back where it stands in the
padded batch. It runs below DDP, FSDP and PEFT, once for each of their forwards: some ranks may
share and others not, their collectives are the same.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from ...checks import explain
from ...data.batch import IGNORED_LABEL, PackedBatch
from ...data.pack import pack_padded, pack_prefix_tree
from ...errors import SharedPromptError, SharedPromptUnsupportedError
from ..common.fallback import TRL_REASONS, Options, Refusal, Tally
from ..common.models import Refused, check_model, take_layouts
from ..common.turns import BOUNDARY, deeper_tree, pack_deeper
from ..transformers import expect_shared_prompt
from ..transformers.admission import support
from ..transformers.admission.support import is_mark_of_text, num_mixing_layers, text_config
from ..transformers.admission.unwrap import backbone_name, causal_lm_of
from ..transformers.classifiers import check_classifier, values_of_rows
from ..transformers.images import images_of_samples, row_inputs, towers_without_layout
from ..transformers.query_pruning import late_layout

logger = get_logger(__name__)

_SAMPLES = {"input_ids", "attention_mask", "labels"}
_PASSED_ON = {"num_items_in_batch", "output_router_logits"}
_WITHOUT_EFFECT = {"return_dict", "use_cache"}


class Sharing:
    """What the models of one trainer have in common."""

    def __init__(self, options: Options, args: Any) -> None:
        self.options = options
        self.args = args  # of the trainer
        self.tally = Tally()
        self.off: Refusal | None = None
        self._announced: set[str] = set()

    def take(self, device: torch.device) -> Tensor:
        """Calls, replicated tokens, tokens, unread ones and fallbacks by reason, since this was last asked."""
        tally, self.tally = self.tally, Tally()
        counts = tally.calls, tally.replicated, tally.tokens, tally.unread
        numbers = [*counts, *(tally.fallbacks[reason] for reason in TRL_REASONS)]
        return torch.stack([torch.as_tensor(one, dtype=torch.float64, device=device) for one in numbers])

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Forwards inside are stock ones and are not counted."""
        off, tally, announced = self.off, self.tally, self._announced
        self.off, self.tally, self._announced = Refusal("switched_off", "paused"), Tally(), {"switched_off"}
        try:
            yield
        finally:
            self.off, self.tally, self._announced = off, tally, announced

    @torch.compiler.disable
    def fall_back(self, refusal: Refusal, inputs: dict[str, Any]) -> None:
        """Count a stock forward, and say why when a reason comes up for the first time."""
        mask, ids = inputs.get("attention_mask"), inputs.get("input_ids")
        tokens = mask.sum() if isinstance(mask, Tensor) else 0 if ids is None else ids.numel()
        self.tally.add(tokens, tokens, refusal.reason)
        if refusal.reason not in self._announced:
            self._announced.add(refusal.reason)
            message = refusal.told(ids, mask)
            logger.warning(f"Prompts are not shared where this holds ({refusal.reason}): {message}")

    def install(self, model: Any) -> None:
        """Let a model that has TRL's forward share prompts."""
        stock = causal_lm_of(model)
        take_layouts(stock)
        # What TRL scores has an LM head.
        kind = SharedValues if stock.get_output_embeddings() is None else SharedForward
        kind(self, stock)


class SharedForward:
    """Takes the place of the forward that TRL has given to one causal LM, or of a reward model's own.

    Where the trainer compiles its model, this is a part of it. Compilers trace what the model
    computes, `stock`, and nothing else here: packing looks into tokens, in other groups each time.
    """

    def __init__(self, sharing: Sharing, causal_lm: Any) -> None:
        self.sharing = sharing
        self.causal_lm = causal_lm
        self.stock: Callable[..., Any] = causal_lm.forward
        self._unsupported: Refusal | None = None

        # `generate` looks at the signature; accelerate expects a method.
        @functools.wraps(type(causal_lm).forward)
        def forward(model: Any, *args: Any, **inputs: Any) -> Any:
            return (self if model is self.causal_lm else self._of_a_copy(model)).answer(*args, **inputs)

        causal_lm.forward = types.MethodType(forward, causal_lm)

    def _of_a_copy(self, model: Any) -> SharedForward:
        """This for a deep copy of the model: its forward is bound to it, and is the same function."""
        twin = copy.copy(self)
        twin.causal_lm = model
        if isinstance(self.stock, types.MethodType):
            twin.stock = types.MethodType(self.stock.__func__, model)
        return twin

    def answer(self, *args: Any, fused_lm_head: bool = False, **inputs: Any) -> Any:
        """The output for a padded batch: TRL asks for scores, generation and some losses for logits."""
        if fused_lm_head:
            return self.score(*args, **inputs)
        if torch.is_grad_enabled():
            message = "the loss is made of logits (label_smoothing_factor, compute_loss_func), not of scores"
            self.sharing.fall_back(Refusal("arguments", message), inputs)
        return self.stock(*args, **inputs)

    @torch.compiler.disable(recursive=False)
    def score(self, *args: Any, **inputs: Any) -> Any:
        """TRL's output for a padded batch: fields (B, S - 1), 0 where no label is next."""
        try:
            is_scored, batch, row = self._pack(args, inputs)
            output = self._run(batch, row)
        except Refused as refused:
            self.sharing.fall_back(refused.refusal, inputs)
            return self.stock(*args, fused_lm_head=True, **inputs)
        layout = row["shared_prompt_layout"]
        self.sharing.tally.add(batch.num_replicated_tokens, layout.num_tokens, unread=layout.num_unread)
        output = _unpack(output, is_scored[:, 1:], batch)
        weight = getattr(text_config(self.causal_lm.config), "router_aux_loss_coef", 0.0)
        output["loss"] = _loss(output, inputs.get("num_items_in_batch"), weight)
        return output

    @torch.compiler.disable
    def _pack(self, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[Tensor, PackedBatch, dict[str, Any]]:
        """Which tokens are scored, the packed batch, and what the model is given. Raises Refused."""
        self._check(inputs)
        marks = {name for name, value in inputs.items() if is_mark_of_text(name, value)}
        given = {name for name, value in inputs.items() if value is not None and value is not False} - marks
        media = support.media_among(inputs)
        others = sorted(given - _SAMPLES - _PASSED_ON - _WITHOUT_EFFECT - {*media})
        if args or others or not given >= _SAMPLES:
            raise Refused("arguments", f"the model is given {', '.join(others) or sorted(given)} (needs {_SAMPLES})")
        ids, attention_mask, labels = (inputs[name] for name in ("input_ids", "attention_mask", "labels"))
        is_scored = labels != IGNORED_LABEL
        is_prompt = attention_mask.bool() & ~is_scored
        is_odd = (is_scored & ((attention_mask == 0) | (labels != ids))).any()
        # Samples of supervised fine-tuning may have no prompt, or several turns that are scored.
        has_turns = (is_scored[:, :-1] & is_prompt[:, 1:]).any() | ~is_prompt.any(1).all()
        is_odd, has_turns = torch.stack([is_odd, has_turns]).tolist()  # one wait for a GPU
        if is_odd:
            raise Refused("samples", "tokens are labelled with others, or are padding")
        try:
            images = images_of_samples(self.causal_lm, ids, attention_mask, {name: inputs[name] for name in media})
        except SharedPromptError as error:
            raise Refused("multimodal", str(error)) from None
        if has_turns:
            batch = self._transcripts(ids, attention_mask.bool(), is_scored, images)
        else:
            batch = self._completions(ids, attention_mask, is_prompt.sum(1), images)
        self._check_savings(batch)
        passed_on = {name: inputs[name] for name in _PASSED_ON - {"num_items_in_batch"} if name in inputs}
        # The packed row is text too.
        row = passed_on | {name: torch.zeros_like(batch.input_ids)[None] for name in marks}
        try:
            row |= row_inputs(self.causal_lm, batch)
        except SharedPromptError as error:
            raise Refused("multimodal", str(error)) from None
        if self.sharing.options.drop_unread and not row.get("output_router_logits"):
            late = late_layout(self.causal_lm, batch)
            row["shared_prompt_layout"] = replace(row["shared_prompt_layout"], late=late)
        return is_scored, batch, row

    def _completions(self, ids: Tensor, attention_mask: Tensor, prompt_lens: Tensor, images: Any) -> PackedBatch:
        """Samples whose ends are scored; what they share behind their prompts too."""
        options = self.sharing.options
        try:
            batch = pack_padded(ids, attention_mask, prompt_lens, images=images)
        except SharedPromptError as error:
            raise Refused("samples", str(error)) from None
        if not images:
            begins = attention_mask.argmax(1).tolist()  # of tokens that stand together
            sequences = [row[at : at + length] for row, at, length in zip(ids, begins, batch.sequence_lens)]
            tree = deeper_tree(sequences, sum(batch.tree.node_lens), options)
            if tree is not None:
                batch = pack_deeper(sequences, batch.prompt_lens, tree.borders)
        return batch

    def _transcripts(self, ids: Tensor, mask: Tensor, is_scored: Tensor, images: Any) -> PackedBatch:
        """Samples that are scored anywhere, by what they begin with."""
        options = self.sharing.options
        if images or options.min_shared is None:
            message = "scored tokens are not one completion at the end of each sample, which needs min_shared"
            raise Refused("samples", message + " and no images")
        if (mask[:, 1:] & ~mask[:, :-1]).any():
            raise Refused("samples", "padding stands before tokens")
        lengths = mask.sum(1).tolist()
        # Nothing scores the first token, which the stock forward leaves out too.
        scored = torch.cat([torch.zeros_like(is_scored[:, :1]), is_scored[:, 1:]], 1)
        try:
            return pack_prefix_tree(
                ids[mask].split(lengths),
                loss_mask=scored[mask].split(lengths),
                boundary=BOUNDARY,
                min_shared=options.min_shared,
            )
        except SharedPromptError as error:
            raise Refused("samples", str(error)) from None

    def _check(self, inputs: dict[str, Any]) -> None:
        """Raise Refused for what trainer and model do not allow, before samples are looked at."""
        if self.sharing.off is not None:
            raise Refused(*self.sharing.off)
        if self.sharing.args.use_liger_kernel:
            raise Refused("liger", "use_liger_kernel=True replaces layers of the model")
        devices = [one.device for one in inputs.values() if isinstance(one, Tensor)]
        self._check_model(devices[0] if devices else self.causal_lm.device)

    def _check_savings(self, batch: PackedBatch) -> None:
        """Raise Refused where little is shared."""
        least = self.sharing.options.min_dedup_ratio
        if batch.dedup_ratio < least:
            message = f"{batch.dedup_ratio:.3f} is below min_dedup_ratio={least} (larger micro-batches share more)"
            raise Refused("dedup_ratio", message)

    def _check_model(self, device: torch.device) -> None:
        """Raise Refused for what the model does not allow."""
        if self._unsupported is not None:
            raise Refused(*self._unsupported)
        advice = " (TRL's disable_dropout=True does so for all but LoRA's lora_dropout)"
        check_model(self.causal_lm, device, about_dropout=advice, **self.sharing.options.first_use)

    @torch.compiler.disable(recursive=False)
    def _run(self, batch: PackedBatch, row: dict[str, Any]) -> Any:
        """TRL's output for the packed row."""
        config = self.causal_lm.config
        wants_router = row.get("output_router_logits") or getattr(text_config(config), "output_router_logits", 0)
        inputs = {**row, "shift_labels": batch.row_labels[None]}
        without_mask: Any = nullcontext()
        if wants_router:
            # The loss that balances experts is a mean over tokens, weighted by its mask.
            inputs["attention_mask"] = batch.multiplicity[None]
            without_mask = _without_mask(getattr(self.causal_lm, backbone_name(self.causal_lm) or ""))
        try:
            expected = expect_shared_prompt(batch.layout, num_mixing_layers(self.causal_lm))
            with expected, without_mask, towers_without_layout(self.causal_lm, batch):
                return self.stock(fused_lm_head=True, **inputs)
        except SharedPromptUnsupportedError as error:
            # An option that no configuration tells: the first layer of a forward finds it.
            self._unsupported = Refusal("unsupported", str(error))
            raise Refused(*self._unsupported) from None


class SharedValues(SharedForward):
    """Takes the place of a reward model's forward: one value of each sequence, which share what they begin with.

    Raises:
        SharedPromptError: a model without the generic head of sequence classification; options about prompts.
    """

    def __init__(self, sharing: Sharing, causal_lm: Any) -> None:
        check_classifier(causal_lm)
        kind, options = type(causal_lm).__name__, sharing.options
        if not isinstance(causal_lm, GenericForSequenceClassification):
            raise SharedPromptError(explain("model", "a *ForSequenceClassification", kind))
        got = f"{{}} for a {kind}, whose sequences have no prompts of their own"
        if options.min_shared is None:
            raise SharedPromptError(explain("min_shared", "a number", got.format(None)))
        super().__init__(sharing, causal_lm)

    @torch.compiler.disable(recursive=False)
    def answer(self, *args: Any, **inputs: Any) -> Any:
        """The stock output: logits (B, num_labels)."""
        try:
            self._check(inputs)
            rows, batch, row = self._packed(args, inputs)
            values = self._values(rows, batch, row)
        except Refused as refused:
            self.sharing.fall_back(refused.refusal, inputs)
            return self.stock(*args, **inputs)
        layout = row["shared_prompt_layout"]
        self.sharing.tally.add(batch.num_replicated_tokens, layout.num_tokens, unread=layout.num_unread)
        return SequenceClassifierOutputWithPast(logits=values)

    @torch.compiler.disable
    def _packed(self, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[Tensor, PackedBatch, dict[str, Any]]:
        """The row whose value each sequence has, the batch, and what the model is given. Raises Refused."""
        given = {name for name, value in inputs.items() if value is not None and value is not False}
        wanted = {"input_ids", "attention_mask"}
        # TRL hands a pair's margin to the model too, which has no use for it.
        others = sorted(given - wanted - _WITHOUT_EFFECT - {"margin"})
        if args or others or not given >= wanted:
            raise Refused("arguments", f"the model is given {', '.join(others) or sorted(given)} (needs {wanted})")
        ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
        lengths = mask.sum(1)
        columns = torch.arange(ids.shape[1], device=ids.device)
        # Where the stock forward reads, whatever the mask says.
        padding = text_config(self.causal_lm.config).pad_token_id
        last = torch.where(ids == padding, 0, columns).amax(1) if padding is not None else lengths - 1
        if ((columns < lengths[:, None]) != mask).any() or (last >= lengths).any():
            raise Refused("samples", "the real tokens of a sequence do not stand together at its beginning")
        sequences = [row[:length] for row, length in zip(ids, lengths.tolist())]
        try:
            nothing = [torch.zeros_like(one) for one in sequences]  # is scored
            batch = pack_prefix_tree(sequences, loss_mask=nothing, min_shared=self.sharing.options.min_shared)
        except SharedPromptError as error:
            raise Refused("samples", str(error)) from None
        self._check_savings(batch)
        rows = batch.rows_of(batch.jagged_offsets[:-1] + last)
        return rows, batch, row_inputs(self.causal_lm, batch)

    @torch.compiler.disable(recursive=False)
    def _values(self, rows: Tensor, batch: PackedBatch, row: dict[str, Any]) -> Tensor:
        try:
            with expect_shared_prompt(batch.layout, num_mixing_layers(self.causal_lm)):
                return values_of_rows(self.causal_lm, rows, row)
        except SharedPromptUnsupportedError as error:
            self._unsupported = Refusal("unsupported", str(error))
            raise Refused(*self._unsupported) from None


@contextmanager
def _without_mask(backbone: torch.nn.Module) -> Iterator[None]:
    """Keep from a backbone the mask that is meant for what comes after it."""

    def drop(_module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, "attention_mask": None}

    handle = backbone.register_forward_pre_hook(drop, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


@torch.compiler.disable
def _unpack(output: Any, is_scored: Tensor, batch: PackedBatch) -> Any:
    """The output for a padded batch: values of scoring rows where the scored tokens stand."""

    def placed(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.shape != (1, batch.layout.num_tokens):
            return value
        # Row by row, the tokens that are scored are the responses in their original order.
        values = value[0].index_select(0, batch.token_index)
        return values.new_zeros(is_scored.shape).masked_scatter(is_scored, values)

    return type(output)(**{name: placed(value) for name, value in output.items()})


@torch.compiler.disable
def _loss(output: Any, num_items: Any, aux_weight: float) -> Tensor:
    """The loss of TRL's forward for a padded batch; that of the packed row counts scored rows that samples share once.

    Args:
        output: for the padded batch.
        num_items: scored tokens of all micro-batches of a step, which divide the sum; None: those of this one.
        aux_weight: of the loss that balances experts, where there is one.
    """
    loss: Tensor = -output.log_probs.sum() / (output.label_mask.sum().clamp(min=1) if num_items is None else num_items)
    return loss if output.aux_loss is None else loss + aux_weight * output.aux_loss
