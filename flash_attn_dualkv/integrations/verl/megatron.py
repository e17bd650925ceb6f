# SPDX-License-Identifier: BSD-3-Clause
"""verl's Megatron engines, on packed micro-batches that hold every prompt once."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id
from verl.utils.megatron.router_replay_patch import RouterReplayAction
from verl.utils.megatron.router_replay_utils import (
    align_r3_router_replay_data,
    build_r3_replay_mask,
    set_model_router_replay_action,
)
from verl.utils.megatron_utils import unwrap_model
from verl.workers.engine.megatron import MegatronEngineWithLMHead, MegatronEngineWithValueHead, transformer_impl

from ...data.batch import PackedBatch
from ...data.unpack import unpack_to_jagged
from ...errors import SharedPromptError
from ...parallel.sharded import same_on_all_ranks
from ..common.versions import VERL
from ..megatron import install as install_in_model
from ..megatron import recorded_routes, replay_routes, shared_prompt_forward, shared_prompt_values
from ..megatron.install import replayed_routers
from ..megatron.support import check_training
from .micro_batches import packed_batch
from .route_keys import route_keys
from .sharing import SharedPrompts, register, take_micro_batches


class _SharedPrompts(SharedPrompts):
    """Methods that both engines add to verl's; mixed in front of one."""

    # verl's
    module: list[Any]
    engine_config: Any
    optimizer: Any
    param_dtype: torch.dtype
    mini_layer_topk_idx_list: list[Tensor]

    takes_routes = True

    def initialize(self) -> None:
        super().initialize()  # type: ignore[misc]
        chunk, config = unwrap_model(self.module[0]), self.engine_config
        ranks = parallel_state.get_model_parallel_group().size() * config.context_parallel_size
        self._begin(type(chunk).__name__, self.model_config.hf_config, ranks, self._attach)

    def _attach(self) -> str | None:
        """Let the model take layouts; or why it does not."""
        config, model = self.engine_config, self.model_config
        if config.dynamic_context_parallel:
            return "dynamic_context_parallel: verl divides each micro-batch by itself"
        if config.use_fused_kernels:
            return "use_fused_kernels: it replaces the model's forward, and prompts are scored in chunks without it"
        if getattr(self, "peft_cls", None) is not None:
            return "lora: adapters of Megatron-Bridge are not known to be exact"
        if hasattr(model.hf_config, "vision_config"):
            return "vision_config: multimodal models are not shared on Megatron"
        for name in ("fp8", "fp4"):
            if any(getattr(unwrap_model(chunk).config, name, None) for chunk in self.module):
                return f"{name}: packed rows are not padded as it needs them"
        if config.pad_to_length and config.context_parallel_size > 1:
            self._announce("pad_to_length is not used: context parallelism cuts rows as attention needs it")
        try:
            install_in_model(self.module)
        except SharedPromptError as error:
            return str(error)
        return None

    def _check_mode(self) -> None:
        for chunk in map(unwrap_model, self.module):
            check_training(chunk, chunk.config)

    def _why_not(self, data: TensorDict, apart: Sequence[int] = ()) -> str | None:
        wants = (reason for name, reason in _LOGITS.items() if tu.get_non_tensor_data(data, name, False))
        return super()._why_not(data, apart) or next(wants, None)

    def _dtype(self) -> torch.dtype:
        return self.param_dtype

    def gradient_norm(self) -> float:
        # Scalers of losses divide gradients where they lie, and the step would do so once more and
        # find another scale. Norms are compared with each other: both may have the scale in them.
        parts = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        scalers = [(part, part.grad_scaler) for part in parts if getattr(part, "grad_scaler", None) is not None]
        for part, _ in scalers:
            part.grad_scaler = None
        try:
            # The optimizer's own gradients are made of the model's once more in its step.
            self.optimizer.prepare_grads()
            return float(self.optimizer.get_grad_norm())
        finally:
            for part, scaler in scalers:
                part.grad_scaler = scaler

    def forward_step(
        self, batch_iter: Any, model: Any, logits_processor_func: Any, postprocess_micro_batch_func: Any
    ) -> Any:
        run_stock = functools.partial(
            super().forward_step,  # type: ignore[misc]
            model=model,
            logits_processor_func=logits_processor_func,
            postprocess_micro_batch_func=postprocess_micro_batch_func,
        )
        if not self._is_mine():
            return run_stock(batch_iter)
        micro_batch = next(batch_iter).to(get_device_id())
        groups = [parallel_state.get_context_parallel_group()] if self.refusal is None else []
        with same_on_all_ranks(*groups) as common:
            found = self._batch_of(micro_batch)
            common["sharing"] = found if isinstance(found, str) else "shared"
        is_first = model is self.module[0]  # of virtual stages, each of which gets the micro-batch
        if isinstance(found, str):
            if is_first:
                self._count_stock(micro_batch, found)
            return run_stock(iter([micro_batch]))
        if is_first:
            self.statistics.count_shared(found, unread=0)
        with self._replay(model, found, micro_batch):
            output = self._output(model, found, micro_batch)
        return output, functools.partial(postprocess_micro_batch_func, data=micro_batch)

    def _batch_of(self, micro_batch: TensorDict) -> PackedBatch | str:
        """The packed form of a micro-batch, or the word for why it stays as it is."""
        if (reason := self._why_not(micro_batch)) is not None:
            return reason
        config = self.engine_config
        ranks = config.tensor_model_parallel_size if unwrap_model(self.module[0]).config.sequence_parallel else 1
        bucket = config.pad_to_length_bucket if config.pad_to_length else 1
        batch = packed_batch(micro_batch, math.lcm(ranks, bucket), self.options, self._keys(micro_batch))
        return batch if self._is_worth_it(batch) else "dedup_ratio"

    def _keys(self, data: TensorDict) -> Tensor | None:
        found = self._routes_of(data)
        return None if found is None else route_keys(data["input_ids"], *found)

    def _routes_of(self, data: TensorDict) -> tuple[Tensor, Tensor | None] | None:
        """Recorded routes to be replayed, jagged by sample, and for which tokens; None for all, or without replay."""
        routes = data.get("routed_experts", None)
        if routes is None or not tu.get_non_tensor_data(data, "enable_routing_replay", False):
            return None
        if self.engine_config.router_replay.mode != "R3":
            return routes, None
        tokens = data["input_ids"]
        return align_r3_router_replay_data(routes, tokens), build_r3_replay_mask(tokens, data["response_mask"])

    @contextlib.contextmanager
    def _replay(self, model: Any, batch: PackedBatch, micro_batch: TensorDict) -> Iterator[None]:
        """Around a forward what verl's does with the routers of its chunk: by their action they record or replay."""
        chunk = unwrap_model(model)
        action = next((router.router_replay_action for _, router in replayed_routers(chunk)), None)
        replays = action in (RouterReplayAction.REPLAY_FORWARD, RouterReplayAction.REPLAY_BACKWARD)
        if replays:
            found = self._routes_of(micro_batch)
            if found is None:
                expected = "routes to be replayed, which compute_log_prob (R2) or the rollout (R3) has recorded"
                raise SharedPromptError("routed_experts", expected, None)
            values: list[Any] = [None if part is None else part.values().to(batch.input_ids.device) for part in found]
            replay_routes(model, batch, *values)
            set_model_router_replay_action(chunk, RouterReplayAction.REPLAY_FORWARD)
        yield
        if tu.get_non_tensor_data(micro_batch, "record_r2_routes", False):
            routes = recorded_routes(model, batch).to("cpu", torch.int16)
            offsets = batch.jagged_offsets.cpu()
            self.mini_layer_topk_idx_list.append(torch.nested.nested_tensor_from_jagged(routes, offsets))
        if replays:  # what recomputes a layer in the backward takes the routes of its own forward
            set_model_router_replay_action(chunk, RouterReplayAction.REPLAY_BACKWARD)

    def _output(self, model: Any, batch: PackedBatch, micro_batch: TensorDict) -> Any:
        """The output of verl's model: on the last stage jagged by sample, on others what the next one needs."""
        raise NotImplementedError


# What verl makes of all logits of a micro-batch, which are never formed, and why it runs on verl's
# own path.
_LOGITS = {
    "distillation_use_topk": "distillation",
    "distillation_only": "distillation",
    "calculate_sum_pi_squared": "logits",
}


class SharedPromptMegatronEngine(_SharedPrompts, MegatronEngineWithLMHead):
    """verl's Megatron engine for actors and references."""

    def _output(self, model: Any, batch: PackedBatch, micro_batch: TensorDict) -> Any:
        given = micro_batch["temperature"]
        temperature = float(given.reshape(-1)[0]) if isinstance(given, Tensor) else float(given)
        with_entropy = bool(tu.get_non_tensor_data(micro_batch, "calculate_entropy", False))
        # As verl's: no logits are divided by 0.
        output = shared_prompt_forward(model, batch, temperature=max(temperature, 1e-8), with_entropy=with_entropy)
        if isinstance(output, Tensor):
            return output
        scores = zip(("log_probs", "entropy"), output)
        return {name: unpack_to_jagged(values, batch, per_row=False) for name, values in scores if values is not None}


class SharedPromptMegatronValueEngine(_SharedPrompts, MegatronEngineWithValueHead):
    """verl's Megatron engine for critics."""

    def _output(self, model: Any, batch: PackedBatch, micro_batch: TensorDict) -> Any:
        output = shared_prompt_values(model, batch)
        return unpack_to_jagged(output, batch, per_row=False) if unwrap_model(model).post_process else output


def install() -> None:
    """Make verl take these engines for Megatron; once."""
    VERL.check_classes(SharedPromptMegatronEngine, SharedPromptMegatronValueEngine)
    register("megatron", "language_model", SharedPromptMegatronEngine)
    register("megatron", "value_model", SharedPromptMegatronValueEngine)
    take_micro_batches(transformer_impl)
