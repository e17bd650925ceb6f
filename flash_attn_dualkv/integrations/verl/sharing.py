# SPDX-License-Identifier: BSD-3-Clause
"""Steps of all of verl's engines with packed micro-batches: options, plans, fallbacks, metrics, verification."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils.device import get_device_name, get_torch_device
from verl.utils.flops_counter import FlopsCounter
from verl.workers.engine import EngineRegistry

from ...data.batch import PackedBatch
from ...data.divided import Trunks
from ...errors import SharedPromptError
from ...parallel.agreement import all_ranks, largest_of_ranks
from ..common.options import PREFIX, REASONS, Options, Refusal, kernels_refusal
from ..common.patching import replace_once
from ..common.pipeline import Verification
from ..transformers.admission.table import FirstUseError
from .losses import of_micro_batches
from .micro_batches import Lengths, grouped_micro_batches, why_not
from .prompt_once import Passes
from .route_keys import divided_prompts
from .statistics import Statistics
from .verify import run_both

logger = logging.getLogger(__name__)

# The engine whose forward_backward_batch runs: verl's function for micro-batches knows no engine.
_running: ContextVar[SharedPrompts | None] = ContextVar("dualkv_verl_engine", default=None)


class SharedPrompts:
    """Methods that the plug-in's engines add to verl's; mixed in front of one."""

    # verl's
    model_config: Any

    config: Any  # of transformers, what the kernels are asked about
    takes_routes = False  # of experts, to record and replay
    shares = True  # unless verl's own path is to run
    refusal_now: Refusal | None = None  # why the model cannot be shared in the call that runs
    budget: int | None = None  # of tokens, for the micro-batches of the call that runs
    division: str | None = None  # why the loss of this call needs verl's own micro-batches
    has_gradients = False  # of an earlier call, to which the next one adds its own
    is_forward_only = False  # the call that runs
    passes: Passes | None = None  # of the call that runs, if micro-batches share prompts

    # What each engine says for itself

    def _check_mode(self) -> None:
        """SharedPromptError for a model that cannot share in its mode with its adapters; on all ranks together."""
        raise NotImplementedError

    def _dtype(self) -> torch.dtype:
        """That attention computes in."""
        raise NotImplementedError

    def gradient_norm(self) -> float:
        """The norm over all parameters on all ranks; the gradients stay as they are."""
        raise NotImplementedError

    def _takes_images(self, data: TensorDict) -> bool:
        """True if the model is exact with the images of these samples in shared prompts; it says why not."""
        return False

    def _keys(self, data: TensorDict) -> Tensor | None:
        """(sum L,) which tokens of these samples may share a row: those with equal ones; None: equal tokens."""
        return None

    def _apart(self, data: TensorDict) -> Sequence[int]:
        """Samples that get micro-batches of their own."""
        return ()

    def _trunks(self, data: TensorDict, reason: str | None, dp_group: Any) -> Trunks | None:
        """How micro-batches share prompts, on all ranks alike; None where each computes its own.

        `reason`: why nothing can be shared.
        """
        if self.options.prompt_once:
            self._announce("micro-batches compute their own prompts: prompt_once is for verl's FSDP engines")
        return None

    # What all engines do

    def _begin(self, name: str, config: Any, ranks: int, attach: Callable[[], str | None]) -> None:
        """When the model is there.

        Args:
            name: of the model.
            config: of transformers, what the kernels are asked about.
            ranks: that work on the same samples.
            attach: prepares the model, or says why it cannot be. Where one rank cannot, no rank shares: stages of a
                pipeline would wait for each other.
        """
        self.config = config
        self.options = Options.of(self.model_config.override_config)
        self.order: list[int] = []
        self.verification = Verification(self.options.verify_first_steps, "train", "infer")
        self.announced: set[str] = set()
        self.refusal: str | None = "switched off"
        self.statistics = Statistics(FlopsCounter(self.model_config.hf_config), ranks)
        if not self.options.enabled:
            return
        self.refusal = own = attach()
        (is_refused,) = largest_of_ranks([own is not None], all_ranks())
        if is_refused and own is None:
            self.refusal = "another rank cannot share its part of the model, and says why"
        if own is not None or not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            state = "are shared" if self.refusal is None else f"are NOT shared: {self.refusal}"
            logger.warning("flash_attn_dualkv: prompts of %s %s", name, state)

    def _refusal_now(self, data: TensorDict) -> Refusal | None:
        """Why the model cannot share in its mode, said once of these samples."""
        if self.refusal is not None:
            return Refusal("unsupported", self.refusal)
        try:
            self._check_mode()
        except SharedPromptError as error:
            reason = error.reason if isinstance(error, FirstUseError) else "unsupported"
            refusal = Refusal(reason, str(error))
            if refusal.message not in self.announced:
                self.announced.add(refusal.message)
                self._announce(f"prompts are NOT shared: {refusal.told(data['input_ids'])}")
            return refusal
        return None

    def _announce(self, message: str) -> None:
        """Logs a warning once per message."""
        if message not in self.announced:
            self.announced.add(message)
            logger.warning("flash_attn_dualkv: %s", message)

    def forward_backward_batch(self, data: TensorDict, loss_function: Any, forward_only: bool = False) -> Any:
        if not self.options.enabled:
            return super().forward_backward_batch(data, loss_function, forward_only)  # type: ignore[misc]
        self.refusal_now = self._refusal_now(data)
        run = functools.partial(self._run, data, loss_function, forward_only)
        kind = "infer" if forward_only else "train"
        # Verification drops the gradients of the first of its two runs, and would drop all others.
        can_verify = forward_only or not self.has_gradients
        if not (can_verify and self.verification.is_due(kind)):
            return run(not self.verification.has_failed)
        output, agree = run_both(self, data, forward_only, run)
        if agree is None:
            self.verification.repeat(kind)
        else:
            self.verification.has_failed = not agree
        return output

    def optimizer_zero_grad(self) -> None:
        super().optimizer_zero_grad()  # type: ignore[misc]
        self.has_gradients = False

    def _run(self, data: TensorDict, loss_function: Any, forward_only: bool, shares: bool) -> Any:
        self.statistics.begin()
        self.order = []
        self.shares = shares
        self.has_gradients |= not forward_only
        self.is_forward_only = forward_only
        self.division = None if forward_only else of_micro_batches(loss_function, data)
        begin = time.perf_counter()
        with ExitStack() as self.call:
            self.call.callback(_running.reset, _running.set(self))
            self.call.callback(setattr, self, "passes", None)
            output = super().forward_backward_batch(data, loss_function, forward_only)  # type: ignore[misc]
        get_torch_device().synchronize()
        if not output:  # of other pipeline stages than the last
            return output
        if self.order:  # of fixed micro-batches, which verl takes for the batch's own order
            back = torch.tensor(self.order).argsort().tolist()
            for name, values in output["model_output"].items():
                rows = values.unbind()
                output["model_output"][name] = torch.nested.as_nested_tensor(
                    [rows[i] for i in back], layout=torch.jagged
                )
        seconds = time.perf_counter() - begin
        output["metrics"].update(self.statistics.metrics(seconds, forward_only))
        return output

    def _is_mine(self) -> bool:
        """True if a micro-batch comes from `forward_backward_batch`, with sharing on."""
        return self.options.enabled and _running.get() is self

    def _count_stock(self, micro_batch: TensorDict, reason: str) -> None:
        self.statistics.count_stock(Lengths.of(micro_batch), reason)
        self._announce(f"micro-batches run on verl's own path where this holds ({reason}): {REASONS[reason]}")

    def _count_divided(self, prompts: int) -> None:
        self.statistics.divided += prompts
        if prompts:
            self._announce(
                "samples of a prompt share it up to the first token whose recorded routes differ; "
                f"{PREFIX}/fallback_prompts counts these prompts"
            )

    def _why_not(self, data: TensorDict, apart: Sequence[int] = ()) -> str | None:
        if not self.shares:
            return "switched_off"
        if self.refusal_now is not None:
            return self.refusal_now.reason
        reason = why_not(data, apart, self._takes_images(data), self.takes_routes)
        return reason or (self._kernels_lack() if get_device_name() == "cuda" else None)

    def _kernels_lack(self) -> str | None:
        refusal = kernels_refusal(self.config, self._dtype())
        return None if refusal is None else refusal.reason

    def _is_worth_it(self, batch: PackedBatch) -> bool:
        # A micro-batch was filled by packed tokens: for the way back replicated ones must fit, too.
        fits = self.budget is None or batch.num_replicated_tokens <= self.budget
        return batch.dedup_ratio >= self.options.min_dedup_ratio or not fits

    def micro_batches(self, data: TensorDict, dp_group: Any, stock: Callable[[], Any], multiple: int = 1) -> Any:
        """Micro-batches, a multiple of so many, and their samples' indices, as verl's function gives them."""
        self.budget = None
        apart = self._apart(data)
        reason = self._why_not(data, apart)
        keys = self._keys(data) if reason is None else None
        if keys is not None:
            self._count_divided(divided_prompts(keys, data["input_ids"], Lengths.of(data).prompts))
        if self.division is not None:  # on all ranks alike
            if reason is None:
                self._announce(f"micro-batches stay as verl makes them, and share what is in each: {self.division}")
            return stock()
        trunks = None if self.options.prompt_once is False else self._trunks(data, reason, dp_group)
        found = grouped_micro_batches(data, dp_group, self.options, reason, apart, keys, multiple, trunks)
        if found is None and trunks is None:
            return stock()
        if found is None:
            micro_batches, indices = stock()
        else:
            self.budget, self.order = found.budget, found.order or []
            micro_batches, indices = found.micro_batches, found.indices
        divided = None if found is None else found.divided
        if trunks is not None and any(largest_of_ranks([divided is not None], dp_group)):
            self.passes = Passes(self, data, len(micro_batches), divided, not self.is_forward_only, dp_group)
            self.call.enter_context(self.passes)
        return micro_batches, indices


def register(backend: str, model_type: str, engine: Any) -> None:
    """Make verl take an engine of the plug-in; once."""
    known = EngineRegistry._engines.get(model_type, {}).get(backend, {})
    # A vendor's engine is preferred to one for all; "cpu" is the vendor in tests there.
    for vendor in ("nvidia", "cpu"):
        if ("cuda", vendor) not in known:
            EngineRegistry.register(model_type=model_type, backend=backend, device="cuda", vendor=vendor)(engine)


def take_micro_batches(module: Any) -> None:
    """Let the engines of a module of verl's have micro-batches of the engine that runs; once."""
    replace_once(module, "prepare_micro_batches", _prepare)


def _prepare(stock: Callable[..., Any]) -> Callable[..., Any]:
    """Micro-batches of the engine that runs, if one does."""

    def prepare_micro_batches(data: TensorDict, dp_group: Any = None, **options: Any) -> Any:
        run_stock = functools.partial(stock, data=data, dp_group=dp_group, **options)
        engine = _running.get()
        if engine is None:
            return run_stock()
        # Virtual stages of Megatron's take micro-batches in groups.
        return engine.micro_batches(data, dp_group, run_stock, options.get("num_batches_divided_by") or 1)

    return prepare_micro_batches
