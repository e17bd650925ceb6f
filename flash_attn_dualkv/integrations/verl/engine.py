# SPDX-License-Identifier: BSD-3-Clause
"""verl's FSDP engines, on packed micro-batches that hold every prompt once."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.utils.fsdp_utils import fsdp2_clip_grad_norm_
from verl.workers.engine.fsdp import transformer_impl
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead, FSDPEngineWithValueHead

from ...data.batch import PackedBatch
from ...data.divided import PASSES, Trunks
from ...data.unpack import unpack_to_jagged
from ...errors import SharedPromptError
from ...parallel.agreement import largest_of_ranks
from ...parallel.sharded import same_on_all_ranks
from ...parallel.ulysses import UlyssesLayout
from ...pieces import KeptKeys
from ..transformers import install_layout_hook, wrap
from ..transformers.admission import check, table, unwrap
from ..transformers.images import check_images, check_placeholders, placeholders_of
from ..transformers.packed_forward import PackedRow, packed_forward, packed_row
from ..transformers.prompt_once import kept_cost, state_cost
from ..transformers.rope import rope_of_ranks
from ..transformers.trunk import check_model_can_be_cut
from . import patches
from .micro_batches import (
    Lengths,
    OutputsOf,
    PackedMicroBatch,
    images_of,
    pack_micro_batch,
    packed_as,
    samples_with_late_images,
    samples_with_media,
)
from .sharing import SharedPrompts, register, take_micro_batches


class _SharedPrompts(SharedPrompts):
    """Methods that both engines add to verl's; mixed in front of one."""

    # verl's
    module: Any
    use_ulysses_sp: bool
    ulysses_sequence_parallel_size: int
    pad_to_length: bool
    pad_to_length_bucket: int

    has_lm_head = True
    keeps_logits = False  # whether the model takes the rows that its LM head is to compute
    runs_towers_on_text = False  # as verl lets some models do, so that all ranks do the same

    def _build_module(self) -> Any:
        module = super()._build_module()  # type: ignore[misc]
        self.plan: PackedMicroBatch | None = None
        self.stock_module = module
        ranks = self.ulysses_sequence_parallel_size
        self._begin(type(module).__name__, module.config, ranks, functools.partial(self._attach, module))
        return module

    def _attach(self, module: Any) -> str | None:
        """Let the model take layouts; or why it does not."""
        if self.ulysses_sequence_parallel_size > 1 and table.is_hybrid(module.config):
            return "a layer that carries a state along the sequence needs the whole row on one GPU (no Ulysses)"
        try:
            wrap([unwrap.text_config(module.config)._attn_implementation])
            head, self.decoder = unwrap.causal_lm_of(module), patches.decoder_of(module)
            # Not on the whole model: verl's forwards drop arguments, and towers must get no layout.
            # Nor is it tried there: whether the model can be shared is known before samples are.
            install_layout_hook(self.decoder, self_check=False)
        except SharedPromptError as error:
            return str(error)
        name = unwrap.backbone_name(head)
        self.runs_towers_on_text = name is not None and patches.is_replaced(getattr(head, name))
        self.keeps_logits = self.has_lm_head and "logits_to_keep" in inspect.signature(type(head).forward).parameters
        return None

    def _check_mode(self) -> None:
        if get_device_name() == "cuda" and self._kernels_lack():
            return
        device = torch.empty(0, device=get_device_id()).device
        dtype = self._dtype()
        is_cast = dtype != torch.float32  # as in verl's forward_step
        autocast = torch.autocast(get_device_name(), dtype=dtype if is_cast else None, enabled=is_cast)
        with patches.stock_layers(), autocast:
            # Micro-batches are other ones than verl's, and as many as they need.
            options = dict(self.options.first_use, stateless=[self.stock_module])
            check.check_first_use(self.decoder, device, model=self.module, **options)

    def _dtype(self) -> torch.dtype:
        return getattr(self, "_autocast_dtype", torch.bfloat16)

    # The engine's steps, in the order in which verl calls them

    def forward_step(self, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> Any:
        if not self._is_mine():
            return super().forward_step(micro_batch, loss_function, forward_only)  # type: ignore[misc]
        step = functools.partial(self._forward_step, micro_batch.to(get_device_id()), loss_function, forward_only)
        return step() if self.passes is None else self.passes.run(micro_batch, loss_function, step)

    def _forward_step(self, micro_batch: TensorDict, loss_function: Any, forward_only: bool) -> Any:
        """That of a micro-batch which has all of its prompts."""
        divides = self.refusal is None and self._ulysses_ranks() > 1
        with same_on_all_ranks(*[transformer_impl.get_ulysses_sequence_parallel_group()] * divides) as common:
            found = self._plan_of(micro_batch)
            common["sharing"] = found if isinstance(found, str) else "shared"
        if isinstance(found, str):
            self._count_stock(micro_batch, found)
            return super().forward_step(micro_batch, loss_function, forward_only)  # type: ignore[misc]
        self.statistics.count_shared(found.batch, found.layout.num_unread)
        row = packed_row(self.stock_module, found.batch, found.layout)
        return self._run_plan(found, row, micro_batch, loss_function, forward_only)

    def _run_plan(self, plan: PackedMicroBatch, row: PackedRow, *step: Any) -> Any:
        self.plan = plan
        try:
            with packed_forward(row):
                return super().forward_step(*step)  # type: ignore[misc]
        finally:
            self.plan = None

    def run_row(
        self, micro_batch: TensorDict, batch: PackedBatch, keys: KeptKeys, outputs_of: OutputsOf, loss_function: Any,
        forward_only: bool,
    ) -> Any:  # fmt: skip
        """verl's forward step of a pass over some rows of a tree.

        Args:
            micro_batch: whose settings hold.
            batch: of the pass.
            keys: of trunks.
            outputs_of: of what the rows of its scored tokens give, the model's output for the loss.
            loss_function, forward_only: verl's.
        """
        micro_batch = micro_batch.to(get_device_id())
        plan = replace(packed_as(micro_batch, batch, self._keeps_logits(micro_batch)), outputs_of=outputs_of)
        row = packed_row(self.stock_module, batch, plan.layout, ancestors=keys)
        return self._run_plan(plan, row, micro_batch, loss_function, forward_only)

    @contextmanager
    def _gradient_sync_context(self, *, is_last_micro_batch: bool) -> Iterator[None]:
        # Passes that verl does not know come behind and before its own, in contexts of theirs.
        is_last = is_last_micro_batch if self.passes is None else self.passes.advance() and self.passes.is_last
        with self.synchronised(is_last):
            yield

    def synchronised(self, is_last: bool) -> AbstractContextManager[None]:
        """verl's context of a backward, in whose last one gradients are synchronised."""
        context: AbstractContextManager[None] = super()._gradient_sync_context(is_last_micro_batch=is_last)  # type: ignore[misc]
        return context

    def prepare_model_inputs(self, micro_batch: TensorDict) -> Any:
        plan = self.plan
        if plan is None:
            return super().prepare_model_inputs(micro_batch)  # type: ignore[misc]
        inputs, output_args = super().prepare_model_inputs(plan.micro_batch)  # type: ignore[misc]
        for name in ("cu_seqlens", "cu_seqlens_cpu"):  # for verl's own layers: the layout says more
            inputs.pop(name, None)
        if plan.outputs_of is not None:  # the token behind a row may be another piece's
            rows, labels = plan.batch.token_index, output_args["input_ids_rmpad_rolled"]
            output_args["input_ids_rmpad_rolled"] = labels = labels.index_copy(0, rows, plan.batch.targets)
            if "shift_labels" in inputs:
                inputs["shift_labels"] = labels[None]
        if plan.scored is not None:
            rows = plan.batch.distinct.pick(plan.batch.token_index)
            inputs["logits_to_keep"] = rows
            for name in ("input_ids_rmpad_rolled", "temperature_rmpad"):
                output_args[name] = output_args[name][rows]
            output_args["pad_size"] = 0  # padding is not among them
        return inputs, output_args

    def prepare_model_outputs(
        self, output: Any, output_args: Any, micro_batch: TensorDict, logits_processor_func: Any
    ) -> Any:
        plan = self.plan
        if plan is None:
            return super().prepare_model_outputs(output, output_args, micro_batch, logits_processor_func)  # type: ignore[misc]
        row = plan.micro_batch if plan.scored is None else plan.scored
        found = super().prepare_model_outputs(output, output_args, row, logits_processor_func)  # type: ignore[misc]
        if plan.outputs_of is not None:
            rows = slice(None) if plan.scored is not None else plan.batch.token_index
            return plan.outputs_of({name: out.values()[rows] for name, out in found.items()})
        if plan.scored is None:
            return {name: unpack_to_jagged(out.values(), plan.batch, per_row=True) for name, out in found.items()}
        expand = plan.batch.distinct.expand
        return {name: unpack_to_jagged(expand(out.values()), plan.batch, per_row=False) for name, out in found.items()}

    def _takes_images(self, data: TensorDict) -> bool:
        names = images_of(data)
        if not names or not self.runs_towers_on_text:
            return False
        try:
            check_images(self.stock_module, names)
        except SharedPromptError as error:
            self._announce(f"prompts with images are not shared: {error}")
            return False
        return True

    def _keeps_logits(self, micro_batch: TensorDict) -> bool:
        """A fused head makes no logits."""
        return self.keeps_logits and not tu.get_non_tensor_data(micro_batch, "use_fused_kernels", False)

    def _ulysses_ranks(self) -> int:
        return self.ulysses_sequence_parallel_size if self.use_ulysses_sp else 1

    def _why_not(self, data: TensorDict, apart: Sequence[int] = ()) -> str | None:
        if (reason := super()._why_not(data, apart)) is not None or self._ulysses_ranks() == 1:
            return reason
        # Multimodal models: verl leaves it to the decoder to divide the row, if that is patched.
        is_undivided = hasattr(self.stock_module.config, "vision_config") and not patches.is_replaced(self.decoder)
        return "multimodal" if is_undivided else None

    def _plan_of(self, micro_batch: TensorDict) -> PackedMicroBatch | str:
        """The packed form of a micro-batch, or the word for why it stays as it is."""
        if (reason := self._why_not(micro_batch)) is not None:
            return reason
        ranks = self._ulysses_ranks()
        bucket = self.pad_to_length_bucket if self.pad_to_length else 1
        # Ranks of Ulysses have unequal numbers of response tokens.
        keeps = self._keeps_logits(micro_batch) and ranks == 1
        try:
            plan = pack_micro_batch(micro_batch, math.lcm(ranks, bucket), self.options, keeps)
            if plan.batch.images:
                check_placeholders(self.stock_module.config, plan.batch)
        except SharedPromptError as error:
            if not samples_with_media(micro_batch):
                raise
            uids = ", ".join(map(str, dict.fromkeys(tu.get(micro_batch, "uid", []))))
            self._announce(f"in a micro-batch of the prompts {uids} images are not shared: {error}")
            return "multimodal"
        if not self._is_worth_it(plan.batch):
            return "dedup_ratio"
        if ranks > 1:
            lacking = rope_of_ranks(self.stock_module.config, plan.layout.max_sequence)
            if lacking is not None:
                self._announce(f"a micro-batch is not shared: {lacking}")
                return "positions"
            group = transformer_impl.get_ulysses_sequence_parallel_group()
            # Compared over the ranks in `forward_step`, with those that do not share.
            plan = replace(plan, layout=UlyssesLayout.of(plan.layout, group))
        elif plan.scored is not None and self.options.drop_unread:
            row = packed_row(self.stock_module, plan.batch, plan.layout, drop_unread=True)
            plan = replace(plan, layout=row.layout)
        return plan

    def _apart(self, data: TensorDict) -> Sequence[int]:
        # Images that are not shared get micro-batches of their own where towers run on texts as
        # well: elsewhere a rank with images would wait for one without.
        if self._takes_images(data):
            return samples_with_late_images(data, placeholders_of(self.stock_module.config))
        return samples_with_media(data) if self.runs_towers_on_text else ()

    def _trunks(self, data: TensorDict, reason: str | None, dp_group: Any) -> Trunks | None:
        lacking = reason or self._why_not_cut(data)
        (lacks,) = largest_of_ranks([lacking is not None], dp_group)
        if lacks:
            if reason is None and self.options.prompt_once:
                lacking = lacking or "another rank cannot keep them, and says why"
                self._announce(f"micro-batches compute their own prompts, without prompt_once: {lacking}")
            return None
        causal_lm = unwrap.causal_lm_of(self.stock_module)
        kept, state = kept_cost(causal_lm, self._dtype().itemsize), state_cost(causal_lm)
        passes = 1.0 if self.is_forward_only else PASSES
        return Trunks(kept, state, self.options.trunk_ratio, passes, is_bounded=not self.options.prompt_once)

    def _why_not_cut(self, data: TensorDict) -> str | None:
        """Why a prompt and what continues it have to run in one pass."""
        flags = ("distillation_use_topk", "distillation_only")
        reasons = {
            "Ulysses divides rows among ranks": self._ulysses_ranks() > 1,
            "pad_to_length rounds rows up": self.pad_to_length,
            "samples have images, video or audio": bool(samples_with_media(data)),
            "a teacher scores tokens": "teacher_logprobs" in data
            or any(tu.get_non_tensor_data(data, flag, False) for flag in flags),
            "LoRA's dropout draws other masks in a prompt's second pass": self.options.share_lora_dropout,
        }
        if (lacking := next((text for text, holds in reasons.items() if holds), None)) is not None:
            return lacking
        try:
            check_model_can_be_cut(self.stock_module, max(map(sum, zip(*Lengths.of(data)))))
        except SharedPromptError as error:
            return str(error)
        return None

    def gradient_norm(self) -> float:
        module: Any = self.module
        if isinstance(self.module, Fsdp1):
            norm = module.clip_grad_norm_(float("inf"))
        elif isinstance(self.module, FSDPModule):
            norm = fsdp2_clip_grad_norm_(module.parameters(), max_norm=float("inf"))
        else:
            norm = torch.nn.utils.clip_grad_norm_(module.parameters(), float("inf"))
        return float((norm.full_tensor() if isinstance(norm, DTensor) else norm).item())


class SharedPromptFSDPEngine(_SharedPrompts, FSDPEngineWithLMHead):
    """verl's FSDP engine for actors and references."""


class SharedPromptFSDPValueEngine(_SharedPrompts, FSDPEngineWithValueHead):
    """verl's FSDP engine for critics."""

    has_lm_head = False


def install() -> None:
    """Make verl take these engines for FSDP; once."""
    for backend in ("fsdp", "fsdp2"):
        register(backend, "language_model", SharedPromptFSDPEngine)
        register(backend, "value_model", SharedPromptFSDPValueEngine)
    patches.install()
    take_micro_batches(transformer_impl)
