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
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import Tensor
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import SequenceClassifierOutputWithPast

from ...data.batch import IGNORED_LABEL, PackedBatch, pack
from ...data.samples import Beside, Samples, read_padded
from ...errors import SharedPromptError, SharedPromptUnsupportedError
from ..common import pipeline
from ..common.options import REASONS, Options, Refusal, Refused, refusing
from ..transformers.admission import table, unwrap
from ..transformers.classifiers import check_classifier, values_of_rows
from ..transformers.images import images_of_samples
from ..transformers.packed_forward import LAYOUT, PackedRow, packed_forward, packed_row

logger = get_logger(__name__)

_SAMPLES = {"input_ids", "attention_mask", "labels"}
_PASSED_ON = {"num_items_in_batch", "output_router_logits"}
_WITHOUT_EFFECT = {"return_dict", "use_cache"}


class Sharing(pipeline.Sharing):
    """State that the models of one trainer have in common."""

    def __init__(self, options: Options, args: Any) -> None:
        super().__init__(options, logger.warning)
        self.args = args  # of the trainer
        self.off: Refusal | None = None
        self.tried: Any = None  # the outermost module, where it has been checked from outside

    def numbers(self, device: torch.device) -> Tensor:
        """Calls, replicated tokens, tokens, unread ones and fallbacks by reason, since this was last asked."""
        tally = self.take()
        counts = [tally.calls, tally.replicated, tally.tokens, tally.unread]
        counts += [tally.fallbacks[reason] for reason in REASONS]
        return torch.stack([torch.as_tensor(count, dtype=torch.float64, device=device) for count in counts])

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Forwards inside are stock ones and are not counted."""
        off, tally, announced = self.off, self.tally, self.announced
        self.off, self.tally, self.announced = Refusal("switched_off", "paused"), pipeline.Tally(), {"switched_off"}
        try:
            yield
        finally:
            self.off, self.tally, self.announced = off, tally, announced

    def install(self, model: Any) -> None:
        """Let a model that has TRL's forward share prompts."""
        stock = unwrap.causal_lm_of(model)
        pipeline.take_layouts(stock)
        # What TRL scores has an LM head.
        kind = SharedValues if stock.get_output_embeddings() is None else SharedForward
        kind(self, stock)


class SharedForward:
    """Takes the place of the forward that TRL has given to one causal LM, or of a reward model's own.

    Where the trainer compiles its model, this is a part of it. Compilers trace what the model
    computes, `stock`, and nothing else here: packing looks into tokens, in other groups each time.
    """

    needed = frozenset(_SAMPLES)  # inputs
    unused = frozenset(_WITHOUT_EFFECT | _PASSED_ON)  # inputs that say nothing about the row

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
        if LAYOUT in inputs:  # a row that is packed already: a piece of one, or a trial
            return self.stock(*args, fused_lm_head=fused_lm_head, **inputs)
        if fused_lm_head:
            return self.score(args, {**inputs, "fused_lm_head": True})
        if torch.is_grad_enabled():
            message = "the loss is made of logits (label_smoothing_factor, compute_loss_func), not of scores"
            self._fall_back(Refusal("arguments", message), inputs)
        return self.stock(*args, **inputs)

    @torch.compiler.disable(recursive=False)
    def score(self, args: tuple[Any, ...], inputs: dict[str, Any]) -> Any:
        """The output for a padded batch, of a packed row or else of the stock forward."""
        try:
            row, given, found = self._pack(args, {name: inputs[name] for name in inputs if name != "fused_lm_head"})
            output = self._run(row, given, found)
        except Refused as refused:
            self._fall_back(refused.refusal, inputs)
            return self.stock(*args, **inputs)
        self.sharing.count(row.batch, row.layout)
        return self._unpack(output, row.batch, inputs)

    def _fall_back(self, refusal: Refusal, inputs: dict[str, Any]) -> None:
        self.sharing.fall_back(refusal, inputs.get("input_ids"), inputs.get("attention_mask"))

    @torch.compiler.disable
    def _pack(self, args: tuple[Any, ...], inputs: dict[str, Any]) -> tuple[PackedRow, dict[str, Any], Any]:
        """The row, what the model is given, and what `_compute` needs in addition. Raises Refused."""
        if self.sharing.off is not None:
            raise Refused(*self.sharing.off)
        if self.sharing.args.use_liger_kernel:
            raise Refused("liger", REASONS["liger"])
        if self._unsupported is not None:
            raise Refused(*self._unsupported)
        devices = [value.device for value in inputs.values() if isinstance(value, Tensor)]
        pipeline.check_model(
            self.causal_lm,
            devices[0] if devices else self.causal_lm.device,
            about_dropout=" (TRL's disable_dropout=True does so for all but LoRA's lora_dropout)",
            model=self.sharing.tried,
            **self.sharing.options.first_use,
        )
        media = table.media_among(inputs)
        marks = {name for name, value in inputs.items() if table.is_mark_of_text(name, value)}
        given = {name for name, value in inputs.items() if value is not None and value is not False} - marks
        others = sorted(given - self.needed - self.unused - {*media})
        if args or others or not given >= self.needed:
            got = ", ".join(others) or sorted(given)
            raise Refused("arguments", f"the model is given {got} (needs {sorted(self.needed)})")
        samples, found = self._samples(inputs, media)
        batch = pack(samples, pipeline.planned(samples, self.sharing.options))
        wants_routers = bool(inputs.get("output_router_logits"))
        row = packed_row(self.causal_lm, batch, drop_unread=self._drops_unread and not wants_routers)
        passed_on = {name: inputs[name] for name in ("output_router_logits",) if name in inputs}
        # The packed row is text too.
        passed_on |= {name: torch.zeros_like(batch.input_ids)[None] for name in marks}
        with refusing("multimodal"):
            return row, {**passed_on, **row.inputs}, found

    @property
    def _drops_unread(self) -> bool:
        return self.sharing.options.drop_unread

    def _samples(self, inputs: dict[str, Any], media: Any) -> tuple[Samples, Any]:
        """Samples to be packed: with scored ends, or with tokens that are scored anywhere."""
        ids, mask, labels = (inputs[name] for name in ("input_ids", "attention_mask", "labels"))
        is_scored = labels != IGNORED_LABEL
        is_prompt = mask.bool() & ~is_scored
        is_odd = (is_scored & ((mask == 0) | (labels != ids))).any()
        # Samples of supervised fine-tuning may have no prompt, or several turns that are scored.
        has_turns = (is_scored[:, :-1] & is_prompt[:, 1:]).any() | ~is_prompt.any(1).all()
        is_odd, has_turns = torch.stack([is_odd, has_turns]).tolist()  # one wait for a GPU
        if is_odd:
            raise Refused("samples", "tokens are labelled with others, or are padding")
        with refusing("multimodal"):
            images = images_of_samples(self.causal_lm, ids, mask, {name: inputs[name] for name in media})
        if has_turns:
            if images or self.sharing.options.min_shared is None:
                message = "scored tokens are not one completion at the end of each sample, which needs min_shared"
                raise Refused("samples", message + " and no images")
            if (mask[:, 1:].bool() & ~mask[:, :-1].bool()).any():
                raise Refused("samples", "padding stands before tokens")
            # Nothing scores the first token, which the stock forward leaves out too.
            scored = torch.cat([torch.zeros_like(is_scored[:, :1]), is_scored[:, 1:]], 1)
            return pipeline.samples_of(ids, mask.bool(), scored), None
        with refusing("samples"):
            return read_padded(ids, mask, is_prompt.sum(1), Beside(images=images)), None

    @torch.compiler.disable(recursive=False)
    def _run(self, row: PackedRow, given: dict[str, Any], found: Any) -> Any:
        """The model's output for the packed row. Raises Refused."""
        try:
            with packed_forward(row):
                return self._compute(row.batch, given, found)
        except SharedPromptUnsupportedError as error:
            # An option that no configuration tells: the first layer of a forward finds it.
            self._unsupported = Refusal("unsupported", str(error))
            raise Refused(*self._unsupported) from None

    @torch.compiler.disable(recursive=False)
    def _compute(self, batch: PackedBatch, given: dict[str, Any], found: Any) -> Any:
        """TRL's output for the packed row."""
        config = unwrap.text_config(self.causal_lm.config)
        inputs = {**given, "shift_labels": batch.row_labels[None]}
        without_mask: Any = nullcontext()
        if given.get("output_router_logits") or getattr(config, "output_router_logits", 0):
            # The loss that balances experts is a mean over tokens, weighted by its mask.
            inputs["attention_mask"] = batch.multiplicity[None]
            without_mask = _without_mask(getattr(self.causal_lm, unwrap.backbone_name(self.causal_lm) or ""))
        with without_mask:
            return self.stock(fused_lm_head=True, **inputs)

    def _unpack(self, output: Any, batch: PackedBatch, inputs: dict[str, Any]) -> Any:
        """Fields (B, S - 1), 0 where no label is next."""
        output = _unpack(output, inputs["labels"][:, 1:] != IGNORED_LABEL, batch)
        weight = getattr(unwrap.text_config(self.causal_lm.config), "router_aux_loss_coef", 0.0)
        output["loss"] = _loss(output, inputs.get("num_items_in_batch"), weight)
        return output


class SharedValues(SharedForward):
    """Takes the place of a reward model's forward: one value of each sequence, which share what they begin with.

    Raises:
        SharedPromptError: a model without the generic head of sequence classification; options about prompts.
    """

    needed = frozenset(("input_ids", "attention_mask"))
    # TRL hands a pair's margin to the model too, which has no use for it.
    unused = frozenset((*_WITHOUT_EFFECT, "margin"))
    _drops_unread = False

    def __init__(self, sharing: Sharing, causal_lm: Any) -> None:
        check_classifier(causal_lm)
        kind = type(causal_lm).__name__
        if not isinstance(causal_lm, GenericForSequenceClassification):
            raise SharedPromptError("model", "a *ForSequenceClassification", kind)
        if sharing.options.min_shared is None:
            got = f"None for a {kind}, whose sequences have no prompts of their own"
            raise SharedPromptError("min_shared", "a number", got)
        super().__init__(sharing, causal_lm)

    def answer(self, *args: Any, **inputs: Any) -> Any:
        """The stock output: logits (B, num_labels)."""
        return self.score(args, inputs)

    def _samples(self, inputs: dict[str, Any], media: Any) -> tuple[Samples, Any]:
        """Sequences without scored tokens, and the place in each of the token whose row has its value."""
        if media:
            raise Refused("multimodal", f"a reward model is given {', '.join(media)}")
        ids, mask = inputs["input_ids"], inputs["attention_mask"].bool()
        lengths = mask.sum(1)
        columns = torch.arange(ids.shape[1], device=ids.device)
        # Where the stock forward reads, whatever the mask says.
        padding = unwrap.text_config(self.causal_lm.config).pad_token_id
        last = torch.where(ids == padding, 0, columns).amax(1) if padding is not None else lengths - 1
        if ((columns < lengths[:, None]) != mask).any() or (last >= lengths).any():
            raise Refused("samples", "the real tokens of a sequence do not stand together at its beginning")
        return pipeline.samples_of(ids, mask, torch.zeros_like(mask)), last

    @torch.compiler.disable(recursive=False)
    def _compute(self, batch: PackedBatch, given: dict[str, Any], found: Any) -> Any:
        rows = batch.rows_of(batch.jagged_offsets[:-1] + found)
        return values_of_rows(self.causal_lm, rows, given)

    def _unpack(self, output: Any, batch: PackedBatch, inputs: dict[str, Any]) -> Any:
        return SequenceClassifierOutputWithPast(logits=output)


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
        return pipeline.scattered(value[0].index_select(0, batch.token_index), is_scored)

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
