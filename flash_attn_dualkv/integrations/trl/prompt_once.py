# SPDX-License-Identifier: BSD-3-Clause
"""A prompt once for all slices of an optimizer step: they run one after the other while its keys are kept.

The first slice of a prompt runs it to keep its keys and values, each slice is a part, and after the last one the prompt
runs with the gradients of all of them. Trainers score their slices by `model(...)`: what is handed to them instead of
the model answers for the slice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import TrainerCallback
from trl.trainer.utils import FusedCausalLMOutput

from ...data.batch import IGNORED_LABEL, PackedBatch, pack
from ...data.parts import Cut, Piece
from ...data.prefix_tree import PrefixTree
from ...data.samples import read_padded
from ...errors import SharedPromptError, SharedPromptUnsupportedError
from ...parallel.agreement import all_ranks, largest_of_ranks
from ..common import pipeline
from ..common.options import AUTOCAST_DTYPES, REASONS, Refusal, Refused, refusing
from ..common.siblings import linked
from ..transformers.admission.unwrap import causal_lm_of, lora_dropouts
from ..transformers.packed_forward import packed_forward, packed_row
from ..transformers.prompt_once import add_note
from ..transformers.trunk import Pieces, Scores, Trunk, check_can_be_cut, root_of

# Methods of accelerators.
_CLIPPING = ("clip_grad_norm_", "clip_grad_value_")


class _Siblings(NamedTuple):
    """Slices that share prompts, in their order.

    Attributes:
        trunk: their prompts.
        replicated: tokens of each slice with a prompt for each completion.
        rows: that each slice runs, the first one those of the prompts too.
    """

    slices: tuple[int, ...]
    trunk: Trunk
    replicated: list[int]
    rows: list[int]


class PromptOnce:
    """The slices of a trainer that share prompts, window by window: those of an optimizer step."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.callback = _Windows(self)
        self.refused: Refusal | None = None  # by a layer
        self._window_end = -1  # the step with which the next window begins
        self._planned_end = -1  # the step up to which slices have been looked at
        self._run: _Run | None = None

    def begin_window(self) -> None:
        self.drop()
        self._planned_end = -1
        self._window_end = self.trainer._step + self.trainer.current_gradient_accumulation_steps

    def drop(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.guard.close()

    @contextmanager
    def step(self, model: Any) -> Iterator[None]:
        """The context of a training step; where that is the last one of prompts, they run behind it."""
        accelerator, run = self.trainer.accelerator, self._run
        # Gradients are reduced in the last of an optimizer step's backwards alone.
        is_followed = run is not None and run.is_followed and accelerator.gradient_state.sync_gradients
        try:
            with accelerator.no_sync(model) if is_followed else nullcontext():
                yield
            if self._run is not None and self._run.end_slice():
                self.drop()
        except Exception as error:
            if self._run is not None:
                add_note(error, f"in {self._run.name} (prompt_once): .grad has gradients of the passes before it")
            self.drop()
            raise

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
        count = len(bounds) - 1
        if count < 2:
            return None
        siblings: list[_Siblings] = []
        try:
            with self.trainer.accelerator.autocast():
                siblings = self._siblings_of(model, ids, mask, width, bounds, options)
        except Refused as refused:
            self.say(*refused.refusal)
        passes = [0] * (2 * count)
        for group in siblings:
            passes[group.slices[0]] = passes[count + group.slices[-1]] = 1
        found = [*map(bool, largest_of_ranks(passes, all_ranks()))]
        if not any(found):
            return None
        return _Run(self, model, ids, mask, bounds, siblings, found[:count], found[count:])

    def forgo(self) -> bool:
        """Let the slice that runs, and its siblings, run prompts themselves; False if one of them has run as a part."""
        return self._run is None or self._run.forgo()

    def say(self, reason: str, message: str) -> None:
        """Warn once a reason."""
        text = f"A prompt is computed anew in each of its micro-batches, in spite of prompt_once: {message}"
        self.trainer._sharing.say(f"prompt_once, {reason}", text)

    def _siblings_of(
        self, model: Any, ids: Tensor, mask: Tensor, width: int, bounds: Sequence[int], options: dict[str, Any]
    ) -> list[_Siblings]:
        """The groups of slices that share prompts. Raises Refused."""
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
            with refusing("unsupported"):
                if is_set:
                    raise SharedPromptUnsupportedError(lack)
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
        batch = pack(samples, pipeline.planned(samples, sharing.options._replace(min_shared=None)))
        with refusing("unsupported"):
            check_can_be_cut(model, batch)
            found = cut_of_slices(batch.tree, bounds)
            with_entropy = bool(options.get("compute_entropy"))
            options = dict(with_entropy=with_entropy, self_check=sharing.options.self_check)
            lens, replicated = batch.tree.node_lens, batch.sequence_lens
            cut = Cut(lens, batch.tree.node_parents, tuple(piece for _, piece in found))
            siblings = []
            for place, (slices, piece) in enumerate(found):
                if piece.parts:  # keep keys of their own each: slices of several prompts may alternate
                    pieces = _Pieces(model, batch, cut, **options)
                    rows = [sum(lens[node] for node in part.nodes) for part in piece.parts]
                    rows[0] += sum(lens[node] for node in piece.nodes)
                    tokens = [sum(replicated[bounds[index] : bounds[index + 1]]) for index in slices]
                    siblings.append(_Siblings(slices, pieces.outermost.inner(place), tokens, rows))
                elif len(slices) > 1:
                    self.say("samples", "shared ones have no rows, or more than any of the micro-batches")
        return siblings


def cut_of_slices(tree: PrefixTree, bounds: Sequence[int]) -> list[tuple[tuple[int, ...], Piece]]:
    """Groups of slices that share prompts, and of each a piece of the tree: prompts of several slices, and its slices.

    It has no parts where its slices have to run as they are: a single one; prompts longer than any of the slices with
    their own, whose second pass would need more memory.

    Args:
        tree: of `PrefixTree.of_prompts`, with rows for each sequence.
        bounds: of slices, between sequences.
    """
    lens, parents = tree.node_lens, tree.node_parents
    leaves = [tree.leaves[begin:end] for begin, end in pairwise(bounds)]
    roots = [{parents[leaf] for leaf in own} for own in leaves]
    counts = Counter(chain.from_iterable(roots))

    def piece(nodes: Iterable[int], parts: Iterable[Piece] = ()) -> Piece:
        return Piece(tuple(sorted(nodes)), tuple(parts))

    found = []
    for slices in linked(roots):
        whole = [{*leaves[index], *roots[index]} for index in slices]
        shared = {root for index in slices for root in roots[index] if counts[root] > 1}
        longest = max(sum(lens[node] for node in nodes) for nodes in whole)
        if 0 < sum(lens[root] for root in shared) <= longest:
            found.append((tuple(slices), piece(shared, (piece(nodes - shared) for nodes in whole))))
        else:
            found.append((tuple(slices), piece(set().union(*whole))))
    return found


class _Pieces(Pieces):
    """Passes that are scored by TRL's own head, which divides by the trainer's temperature."""

    def score(self, row: PackedBatch) -> Scores:
        packed = packed_row(self.model, row, ancestors=self.keys)
        labels = torch.full_like(row.input_ids, IGNORED_LABEL).index_copy_(0, row.token_index, row.targets)
        with packed_forward(packed):
            output = self.model(**packed.inputs, shift_labels=labels[None], fused_lm_head=True)
        values = (output.log_probs, output.entropy) if self.with_entropy else (output.log_probs,)
        return tuple(value[0].index_select(0, row.token_index) for value in values)


class _Windows(TrainerCallback):
    """Says where the steps begin that one optimizer step accumulates."""

    def __init__(self, once: PromptOnce) -> None:
        self._once = once

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._once.begin_window()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._once.drop()


class _Run:
    """Slices that run one after the other, on all ranks alike; called as a model is, it scores the next one.

    Wrappers communicate in forwards and backwards: where another rank has a pass over prompts, this one runs two tokens
    that owe nothing to any loss.

    Attributes:
        guard: closed when all gradients of prompts are there.
        name: of the pass that runs.
    """

    def __init__(
        self, once: PromptOnce, model: Any, ids: Tensor, mask: Tensor, bounds: Sequence[int],
        siblings: Sequence[_Siblings], keeps: Sequence[bool], injects: Sequence[bool],
    ) -> None:  # fmt: skip
        self._once, self._trainer, self._model = once, once.trainer, model
        self._ids, self._mask, self._bounds = ids, mask, bounds
        self._siblings = {place: group for group in siblings for place in group.slices}
        self._keeps, self._injects = keeps, injects
        self._has_gradients = torch.is_grad_enabled()
        self._place, self._has_run = 0, False  # the slice, and whether it has been scored
        self._part = ExitStack()  # of the slice, until its backward has run
        self.guard, self.name = ExitStack(), ""
        if self._has_gradients:
            self.guard.enter_context(_without_steps(self._trainer))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @property
    def is_followed(self) -> bool:
        """True if prompts run behind the slice, on any rank."""
        return self._injects[self._place]

    def __call__(self, **inputs: Any) -> Any:
        """The output of TRL's forward for a slice."""
        if self._has_run or torch.is_grad_enabled() != self._has_gradients:  # for something else
            return self._as_without(inputs)
        self._has_run, place = True, self._place
        if place in self._siblings and not self._is_slice(inputs):
            message = "the trainer scores other tokens than its rollouts'"
            self._once.say("samples", message)
            if not self.forgo():
                raise SharedPromptError("prompt_once", f"False, as {message}", True)
        group = self._siblings.get(place)
        self.name = f"the first pass of prompts of slice {place}"
        if group is not None and group.slices[0] == place:
            try:
                with refusing("unsupported"):
                    group.trunk.keep()
            except Refused as refused:  # by layers that no configuration tells of
                self._once.refused = refused.refusal
                self._once.say(*refused.refusal)
                self.forgo()
        elif self._keeps[place]:
            with torch.no_grad():
                self._dummy()
        self.name = f"slice {place}"
        group = self._siblings.get(place)
        output = self._as_without(inputs) if group is None else self._scores(group, inputs)
        if not self._has_gradients:
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
        rows = slice(*self._bounds[self._place : self._place + 2])
        given = inputs["input_ids"], inputs["attention_mask"]
        return all(torch.equal(own[rows], other) for own, other in zip((self._ids, self._mask), given))

    def _scores(self, group: _Siblings, inputs: dict[str, Any]) -> FusedCausalLMOutput:
        index = group.slices.index(self._place)
        part = self._part.enter_context(group.trunk.part(index))
        self._trainer._sharing.tally.add(group.replicated[index], group.rows[index])
        places = inputs["labels"][:, 1:] != IGNORED_LABEL
        entropy = None if part.entropy is None else pipeline.scattered(part.entropy, places)
        return FusedCausalLMOutput(log_probs=pipeline.scattered(part.logps, places), entropy=entropy)

    def forgo(self) -> bool:
        """`PromptOnce.forgo`."""
        group = self._siblings.get(self._place)
        if group is not None and group.slices[0] != self._place:
            return False
        if group is not None:
            self._part = ExitStack()  # not closed, which would say that a backward has run
            group.trunk.close()
            for place in group.slices:
                del self._siblings[place]
        return True

    def end_slice(self) -> bool:
        """After the backward of a slice: run the prompts whose last slice that was; True after the last slice."""
        self._part.close()
        group, place = self._siblings.get(self._place), self._place
        is_last = group is not None and group.slices[-1] == place
        if self._has_gradients and self._injects[place]:
            self.name = f"the last pass of prompts of slice {place}"
            accelerator = self._trainer.accelerator
            with accelerator.autocast():
                root = group.trunk.finish() if group is not None and is_last else self._dummy()
            accelerator.backward(root)
        if group is not None and is_last:
            group.trunk.close()
        self._place, self._has_run = place + 1, False
        return self._place == len(self._keeps)

    def _dummy(self) -> Tensor:
        """The root of a pass whose gradients are zeros."""
        ids = torch.zeros_like(self._ids[:1, :2])
        with self._trainer._sharing.paused():
            output = self._model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, fused_lm_head=True)
        return root_of(None, (output.log_probs,))


@contextmanager
def _without_steps(trainer: Any) -> Iterator[None]:
    """Refuse clipping and optimizer steps: gradients of prompts lack until their last pass."""

    def refuse(*_: Any, **__: Any) -> None:
        expected = "neither clipped gradients nor an optimizer step before the trainer's training_step returns"
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
