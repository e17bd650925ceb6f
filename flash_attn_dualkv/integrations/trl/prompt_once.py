# SPDX-License-Identifier: BSD-3-Clause
"""A prompt once for all slices of an optimizer step: they run one after the other while its keys are kept.

The first slice of a prompt runs it to keep its keys and values, each slice is a part, and after the last one the prompt
runs with the gradients of all of them. Trainers score their slices by `model(...)`: what is handed to them instead of
the model answers for the slice.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from trl.trainer.utils import FusedCausalLMOutput

from ...data.batch import IGNORED_LABEL, PackedBatch, pack
from ...data.divided import PASSES, Trunks, divided_trees
from ...data.plan import checked_tree
from ...data.samples import read_padded
from ...errors import SharedPromptError
from ...parallel.agreement import all_ranks
from ..common import pipeline
from ..common.options import AUTOCAST_DTYPES, REASONS, Refusal, Refused, refusing
from ..transformers.admission.unwrap import causal_lm_of, lora_dropouts
from ..transformers.packed_forward import packed_forward, packed_row
from ..transformers.passes import Due, Part, Passes, letters_of
from ..transformers.prompt_once import kept_cost, state_cost
from ..transformers.trunk import Keep, Pieces, Scores, check_can_be_cut, root_of

# Methods of accelerators.
_CLIPPING = ("clip_grad_norm_", "clip_grad_value_")


class PromptOnce:
    """The slices of a trainer that share prompts, window by window: those of an optimizer step."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.refused: Refusal | None = None  # by a layer
        self._window_end = -1  # the step with which the next window begins
        self._planned_end = -1  # the step up to which slices have been looked at
        self._run: _Run | None = None

    @contextmanager
    def step(self, model: Any) -> Iterator[None]:
        """The context of a training step; the passes of prompts that follow it run behind it."""
        trainer = self.trainer
        if trainer._step >= self._window_end:
            self._window_end = trainer._step + trainer.current_gradient_accumulation_steps
        try:
            with nullcontext() if self._run is None else self._run.slice_context():
                yield
            if self._run is not None and self._run.end_slice():
                self._drop()
        except Exception as error:
            if self._run is not None:
                self._run.explain(error)
            self._drop()
            self._window_end = self._planned_end = -1
            raise

    def _drop(self) -> None:
        if self._run is not None:
            self._run.close()
        self._run = None

    def scorer(
        self, model: Any, ids: Tensor, mask: Tensor, width: int, batch_size: int | None = None, **options: Any
    ) -> Any:
        """Stand-in of the model that scores slices, or the model; for arguments of the trainer's own method."""
        if torch.is_grad_enabled():
            return self._scorer_of_step(options, model) or model
        bounds = [*range(0, len(ids), batch_size or len(ids)), len(ids)]
        return self._planned(model, ids, mask, width, bounds, options) or model

    def _scorer_of_step(self, options: dict[str, Any], model: Any) -> _Run | None:
        """The slices of this step and those behind it, in its window and of its rollouts."""
        trainer, step = self.trainer, self.trainer._step
        if trainer.model.training and self._planned_end <= step < self._window_end:
            slices = trainer._buffered_inputs[step % trainer.args.steps_per_generation :][: self._window_end - step]
            self._planned_end = step + len(slices)
            prompts, completions, *masks = (
                torch.cat([inputs[f"{side}_{kind}"] for inputs in slices])
                for kind in ("ids", "mask")
                for side in ("prompt", "completion")
            )
            bounds = [*accumulate((len(inputs["prompt_ids"]) for inputs in slices), initial=0)]
            ids, mask = torch.cat([prompts, completions], 1), torch.cat(masks, 1)
            self._run = self._planned(model, ids, mask, completions.shape[1], bounds, options)
        return self._run

    def _planned(
        self, model: Any, ids: Tensor, mask: Tensor, width: int, bounds: Sequence[int], options: dict[str, Any]
    ) -> _Run | None:
        """The run of slices, which are rows between `bounds`; None if none of them share prompts on any rank."""
        if len(bounds) < 3:
            return None
        found: tuple[Sequence[int], Pieces | None] = (), None
        try:
            with self.trainer.accelerator.autocast():
                found = self._parts_of(model, ids, mask, width, bounds, options)
        except Refused as refused:
            self.say(*refused.refusal)
        run = _Run(self, model, ids, mask, bounds, *found)
        return run if run.has_prompts else None

    def forgo(self) -> bool:
        """Let the slice that runs, and its siblings, run prompts themselves; False if one of them has run as a part."""
        return self._run is None or self._run.forgo()

    def say(self, reason: str, message: str) -> None:
        """Warn once a reason; unasked, where a micro-batch has no room for the completions of a prompt."""
        args, is_asked = self.trainer.args, self.trainer._sharing_options.prompt_once
        if not is_asked and args.per_device_train_batch_size >= args.num_generations:
            return
        spite = ", in spite of prompt_once" if is_asked else ""
        text = f"A prompt is computed anew in each of its micro-batches{spite}: {message}"
        self.trainer._sharing.say(f"prompt_once, {reason}", text)

    def _parts_of(
        self, model: Any, ids: Tensor, mask: Tensor, width: int, bounds: Sequence[int], options: dict[str, Any]
    ) -> tuple[Sequence[int], Pieces | None]:
        """The slices that share prompts, and the pieces whose parts they are. Raises Refused."""
        trainer, causal_lm = self.trainer, causal_lm_of(model)
        sharing, args = trainer._sharing, trainer.args
        if sharing.off is not None:
            raise Refused(*sharing.off)
        for is_set, lack in (
            (args.use_liger_kernel, REASONS["liger"]),
            (trainer.is_deepspeed_enabled, "DeepSpeed reduces gradients in other backwards than the last one"),
            (args.torch_compile, "torch_compile=True traces each pass anew"),
            (args.n_gpu > 1, "DataParallel divides batches among threads"),
        ):
            if is_set:
                raise Refused("unsupported", lack)
        # A trial of a sharded model communicates: all ranks get here, or none. What runs as without
        # asks for the same.
        dtype = AUTOCAST_DTYPES.get(trainer.accelerator.mixed_precision)
        pipeline.check_model(causal_lm, ids.device, model=model, dtype=dtype, **sharing.options.first_use)
        if sharing.options.share_lora_dropout and any(each.training and each.p for each in lora_dropouts(causal_lm)):
            raise Refused("dropout", REASONS["dropout"])  # the two passes over a prompt would draw two masks
        if self.refused is not None:
            raise Refused(*self.refused)
        others = [name for name, value in options.items() if value is not None and value is not False]
        if others := sorted({*others} - {"compute_entropy"}):
            raise Refused("arguments", f"the model is given {', '.join(others)}")
        with refusing("samples"):
            samples = read_padded(ids, mask, ids.shape[1] - width)
        if not all(samples.prompt_lens or ()):
            raise Refused("no_prompts", REASONS["no_prompts"])
        tree = pipeline.planned(samples, sharing.options._replace(min_shared=None))
        # Kept keys come on top where it is asked for; no pass has more rows in either case.
        kept = 0.0, 0.0
        if not sharing.options.prompt_once:
            kept = kept_cost(causal_lm, None if dtype is None else dtype.itemsize), state_cost(causal_lm)
        passes = PASSES if torch.is_grad_enabled() else 1.0
        trunks = Trunks(*kept, sharing.options.trunk_ratio, passes, is_bounded=True, in_order=True)
        divided = divided_trees(tree, [range(*pair) for pair in pairwise(bounds)], trunks)
        if not divided.numbers:
            return (), None
        order = [index for chosen in divided.sequences for index in chosen]
        samples = read_padded(ids[order], mask[order], ids.shape[1] - width)
        batch = pack(samples, checked_tree(divided.tree, samples))
        with refusing("unsupported"):
            check_can_be_cut(model, batch)
        pieces = _Pieces(
            model, batch, divided.cut, with_entropy=bool(options.get("compute_entropy")),
            self_check=sharing.options.self_check, counts=[*map(len, divided.sequences)],
        )  # fmt: skip
        return divided.numbers, pieces


class _Pieces(Pieces):
    """Passes that are scored by TRL's own head, which divides by the trainer's temperature."""

    def score(self, row: PackedBatch) -> Scores:
        packed = packed_row(self.model, row, ancestors=self.keys)
        labels = torch.full_like(row.input_ids, IGNORED_LABEL).index_copy_(0, row.token_index, row.targets)
        with packed_forward(packed):
            output = self.model(**packed.inputs, shift_labels=labels[None], fused_lm_head=True)
        values = (output.log_probs, output.entropy) if self.with_entropy else (output.log_probs,)
        return tuple(value[0].index_select(0, row.token_index) for value in values)


class _Run(Passes):
    """Slices that run one after the other, on all ranks alike; called as a model is, it scores the next one.

    Each slice is a slot, which passes over prompts begin and end.
    """

    def __init__(
        self, once: PromptOnce, model: Any, ids: Tensor, mask: Tensor, bounds: Sequence[int], numbers: Sequence[int],
        pieces: Pieces | None,
    ) -> None:  # fmt: skip
        self._once, self._trainer, self._model = once, once.trainer, model
        self._ids, self._mask, self._bounds = ids, mask, bounds
        self._slice, self._has_run = 0, False  # and whether it has been scored
        self._pieces = pieces  # whose parts are slices; None: no slice is one
        self._letters = ["P"] * (len(bounds) - 1)
        keep: Keep | None = "kv" if torch.is_grad_enabled() else None
        if pieces is not None:
            self._passes = self.below(pieces.outermost)
            for place, slot in zip(numbers, re.findall("F*PB*", pieces.cut.passes)):
                self._letters[place] = slot if keep else slot.rstrip("B")
        self._parts = {*numbers}
        super().__init__([letters_of(slot, keep) for slot in self._letters], all_ranks(), keep is not None)
        self._ends = [*accumulate(map(len, self.slots))]
        self._guard = ExitStack()
        if self.has_gradients and self.has_prompts:
            self._guard.enter_context(_without_steps(self._trainer))

    @property
    def has_prompts(self) -> bool:
        """True if slices share any, on any rank."""
        return self._ends[-1] > len(self._ends)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def own_passes(self) -> Generator[Due | None, None, None]:
        for place, slot in enumerate(self._letters):
            for letter in slot:
                due: Due | None = letter == "P" or None
                if place in self._parts:
                    try:
                        with refusing("unsupported") if letter == "F" else nullcontext():
                            due = next(self._passes)
                    except Refused as refused:  # by layers that no configuration tells of
                        self._once.refused = refused.refusal
                        self._once.say(*refused.refusal)
                        self.forgo()
                elif due is None:
                    self.run_dummy("F" if letter == "F" else "B")
                yield due

    def __call__(self, **inputs: Any) -> Any:
        """The output of TRL's forward for a slice."""
        if self._has_run or torch.is_grad_enabled() != self.has_gradients:  # for something else
            return self._as_without(inputs)
        self._has_run, place = True, self._slice
        if place in self._parts and not self._is_slice(inputs):
            message = "the trainer scores other tokens than its rollouts'"
            self._once.say("samples", message)
            if not self.forgo():
                raise SharedPromptError("prompt_once", f"False, as {message}", True)
        self.advance(self._ends[place])
        due = self.take()
        self.name = f"slice {place}"
        output = self._scores(due, inputs) if isinstance(due, Part) else self._as_without(inputs)
        if not self.has_gradients:
            self.end_slice()
        return output

    def _as_without(self, inputs: dict[str, Any]) -> Any:
        """The output of the model itself, which has been tried on all ranks: not all of them come here."""
        sharing = self._trainer._sharing
        sharing.tried = self._model
        try:
            return self._model(**inputs)
        finally:
            sharing.tried = None

    def _is_slice(self, inputs: dict[str, Any]) -> bool:
        rows = slice(*self._bounds[self._slice : self._slice + 2])
        given = inputs["input_ids"], inputs["attention_mask"]
        return all(torch.equal(own[rows], other) for own, other in zip((self._ids, self._mask), given))

    def _scores(self, due: Part, inputs: dict[str, Any]) -> FusedCausalLMOutput:
        pieces: Any = self._pieces
        with due.trunk.part(due.number) as part:
            tokens = sum(pieces.batch.sequence_lens[index] for index in part.sequences)
        rows = pieces.cut.rows_of(due.piece)  # the first slice has those of the prompts too
        self._trainer._sharing.tally.add(tokens, rows + due.trunk.rows * (due.number == 0))
        places = inputs["labels"][:, 1:] != IGNORED_LABEL
        entropy = None if part.entropy is None else pipeline.scattered(part.entropy, places)
        return FusedCausalLMOutput(log_probs=pipeline.scattered(part.logps, places), entropy=entropy)

    def forgo(self) -> bool:
        """`PromptOnce.forgo`, of all slices to come as well."""
        if self._slice not in self._parts or "F" not in self._letters[self._slice]:
            return self._slice not in self._parts
        self._passes.close()
        self._parts.clear()
        return True

    def slice_context(self) -> AbstractContextManager[Any]:
        """That of the next slice's own forward and backward."""
        return self.synchronised([letter for letter, _ in self.slots[self._slice]].count("B") < 2)

    def end_slice(self) -> bool:
        """After the backward of a slice: run the prompts whose last slice that was; True after the last slice."""
        self.advance(self._ends[self._slice])
        self._slice, self._has_run = self._slice + 1, False
        return self._slice == len(self._ends)

    def close(self) -> None:
        """Let go of everything; gradients may be clipped again."""
        self._guard.close()
        self._own.close()
        if self._pieces is not None:
            self._passes.close()

    def synchronised(self, is_last: bool) -> AbstractContextManager[Any]:
        # Gradients are reduced in the last of an optimizer step's backwards alone.
        accelerator = self._trainer.accelerator
        if is_last or not accelerator.gradient_state.sync_gradients:
            return nullcontext()
        context: AbstractContextManager[Any] = accelerator.no_sync(self._model)
        return context

    def autocast(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self._trainer.accelerator.autocast()
        return context

    def run_backward(self, root: Tensor) -> None:
        self._trainer.accelerator.backward(root)

    def dummy_root(self, *, with_gradients: bool) -> Tensor:
        ids = torch.zeros_like(self._ids[:1, :2])
        with self._trainer._sharing.paused():
            output = self._model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, fused_lm_head=True)
        return root_of(None, (output.log_probs,))


@contextmanager
def _without_steps(trainer: Any) -> Iterator[None]:
    """Refuse clipping and optimizer steps: gradients of prompts lack until their last pass."""

    def refuse(*_: Any, **__: Any) -> None:
        expected = "False, or neither clipped gradients nor a step before the trainer's training_step returns"
        raise SharedPromptError("prompt_once", expected, "one while gradients of prompts are still to come")

    attributes = vars(trainer.accelerator)
    before = {name: attributes[name] for name in _CLIPPING if name in attributes}
    attributes.update(dict.fromkeys(_CLIPPING, refuse))
    hook = getattr(trainer.optimizer, "optimizer", trainer.optimizer).register_step_pre_hook(refuse)
    try:
        yield
    finally:
        hook.remove()
        for name in _CLIPPING:
            del attributes[name]
        attributes.update(before)
