# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of a batch that no micro-batch holds, each prompt computed once for all of its responses.

def loss_of(part):
    return grpo_loss(part.unpack(part.logps), advantages[list(part.sequences)]) / num_tokens

shared_prompt_backward(model, batch, loss_of, max_tokens=16384)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as Ddp

from ... import checks
from ...data.batch import PackedBatch
from ...data.parts import Cut, plan_parts
from ...errors import SharedPromptError, SharedPromptTypeError, SharedPromptUnsupportedError
from ...host import untraced
from ...model_shape import ModelShape
from ...parallel.agreement import largest_of_ranks
from ...parallel.sharded import check_group
from .admission.unwrap import causal_lm_of, layer_configs, text_config
from .forward import COMPILE_THE_MODEL, shared_prompt_forward
from .hybrid.families import family_of, is_a, mixers_of, state_columns
from .passes import Due, Part, Passes, letters_of, slots_of
from .trunk import Keep, Loss, PartScores, Pieces, check_can_be_cut, checked_loss, root_of

Backward = Callable[[Tensor], Any]


@functools.partial(untraced, reason=COMPILE_THE_MODEL)
def shared_prompt_backward(
    model: nn.Module,
    batch: PackedBatch,
    loss_of: Loss,
    *,
    max_tokens: int,
    keep: Literal["auto", "kv", "graph"] = "auto",
    offload: bool = False,
    temperature: float = 1.0,
    with_entropy: bool = False,
    backward: Backward = Tensor.backward,
    no_sync: Callable[[], AbstractContextManager[Any]] | None = None,
    group: Any = None,
    self_check: bool = True,
) -> PartScores:
    """Gradients of a batch of any size within the memory of a micro-batch, with every shared row computed once.

    What does not fit is cut: nodes that all responses continue (a prompt, a trunk) run once to keep their keys and
    values; then what continues them runs part by part, forward and backward; then the trunk runs forward and backward,
    and gets the gradients of all parts. A batch that fits runs as with `shared_prompt_forward`.

    Args:
        model: of `shared_prompt_forward`; also inside DDP, FSDP 1 and FSDP 2, whose gradients are synchronised as those
            of one backward.
        batch: of `shared_prompt_forward`; of text, if it has to be cut and the model is wrapped.
        loss_of: of the scores of some sequences, the part of the loss that is theirs, a tensor of one number; it is
            called once for each part, and its values are added. Each sequence is in one part. Divide by counts of the
            whole batch.
        max_tokens: rows of a micro-batch that fits. Kept keys and sums of their gradients count as rows, as many as
            their bytes make.
        keep: "kv": a trunk runs twice; "graph": once, and its activations stay, which saves a forward of its rows, for
            a model that is not wrapped or in FSDP 2; "auto": that where it needs no more parts.
        offload: of a model on a GPU, kept keys, values, states and sums of their gradients lie in pinned memory of the
            host. A layer copies its own when it runs, in its stream, so that one layer's share of them counts against
            `max_tokens`. Needs gradient checkpointing: else the graphs of all layers would hold copies.
        temperature, with_entropy: of `shared_prompt_forward`.
        backward: of a scalar: `accelerator.backward`, or `lambda loss: scaler.scale(loss).backward()`.
        no_sync: context of all backwards but the last one. None: `model.no_sync` of DDP and FSDP 1; FSDP 2 reduces in
            each backward.
        group: with DDP and FSDP, the ranks that have the model, all of which call; None: all ranks. They agree that
            each has a plan, and with FSDP, by two reductions more of a few numbers, on their passes: ranks with fewer
            run one row in the others.
        self_check: of `shared_prompt_forward`; the keys of a trunk's second pass are compared with the first's, too.

    Returns:
        The scores of all sequences, detached.

    Raises:
        SharedPromptError: an argument is not as described; the model or the batch cannot be cut, or `max_tokens` leaves
            no room for a part beside what is kept, on any rank; what `shared_prompt_forward` refuses; a loss that is no
            tensor of one number; a trunk's second pass was not like the first. Gradients of parts that have run are in
            `.grad` then, as for any error of a later part, which says so.
    """
    checks.instance("batch", batch, PackedBatch, " (of pack_shared_prompts)")
    checks.choice("keep", keep, ("auto", "kv", "graph"))
    for name, function in (("loss_of", loss_of), ("backward", backward), ("no_sync", no_sync)):
        if not callable(function) and (name, function) != ("no_sync", None):
            raise SharedPromptTypeError(name, "a function", checks.describe(function))
    if group is not None:
        check_group(group)
    if not torch.is_grad_enabled():
        raise SharedPromptError("grad mode", "on, for a backward", "off")
    causal_lm_of(model)  # or there is none
    wrapper = Wrapper.of(model, no_sync)
    ranks = (dist.group.WORLD if group is None else group) if wrapper.is_sharded or wrapper.kind == "DDP" else None
    plan = _agreed_plan(model, batch, max_tokens, keep, checks.flag("offload", offload), wrapper, ranks)
    options: dict[str, Any] = dict(temperature=temperature, with_entropy=with_entropy, self_check=self_check)
    alike = ranks if wrapper.is_sharded else None
    return _Backward(model, batch, plan, loss_of, backward, wrapper, alike, options).run()


# --- plan ---


@dataclass(frozen=True)
class Plan:
    """A cut, how trunks are kept, and whether in the host's memory."""

    cut: Cut
    keep: Keep
    offload: bool = False


def plan_backward(
    model: nn.Module, batch: PackedBatch, max_tokens: int, keep: Literal["auto", "kv", "graph"], offload: bool,
    wrapper: Wrapper,
) -> Plan:  # fmt: skip
    """How a batch is cut for a model; arguments of `shared_prompt_backward`."""
    if keep == "graph" and not wrapper.keeps_graphs:
        raise SharedPromptUnsupportedError("keep", '"kv" inside of DDP and FSDP 1', repr(keep))
    tree, budget = batch.tree, checks.integer("max_tokens", max_tokens, 1)
    if sum(tree.node_lens) <= budget:
        return Plan(plan_parts(tree, budget), "kv")
    if wrapper.kind == "DeepSpeed":
        raise SharedPromptUnsupportedError("model", "no DeepSpeed engine, to be cut", "one")
    if batch.images and wrapper.kind != "none":
        expected = "text, to be cut inside of a wrapper"
        raise SharedPromptUnsupportedError("batch", expected, ", ".join(batch.images))
    check_can_be_cut(model, batch)
    causal_lm = causal_lm_of(model)
    share = 1.0
    if offload:
        if not _is_checkpointed(causal_lm):
            raise SharedPromptError("offload", "False, or a model with gradient checkpointing", True)
        share = 1 / len(layer_configs(text_config(causal_lm.config)))
    costs: dict[str, Any] = dict(kept=share * kept_cost(causal_lm), state=share * state_cost(causal_lm))
    cut = functools.partial(plan_parts, tree, budget, **costs)
    if keep == "graph":
        return Plan(cut(held=True), "graph", offload)
    plan = Plan(cut(), "kv", offload)
    if keep == "auto" and wrapper.keeps_graphs:
        with suppress(SharedPromptError):
            graph = Plan(cut(held=True), "graph", offload)
            return graph if len(graph.cut.passes) <= len(plan.cut.passes) else plan
    return plan


def kept_cost(causal_lm: Any, element_bytes: int | None = None) -> float:
    """How many rows' activations the kept keys, values and sums of a row take, in all layers of a model.

    `element_bytes`: of activations; None: as weights are.
    """
    config = text_config(causal_lm.config)
    layers, family = layer_configs(config), family_of(config)
    count = len(layers) - (getattr(config, "num_kv_shared_layers", None) or 0)
    if family is not None:
        count = sum(is_a(module, family.attention) for module in causal_lm.modules())
    return _cost(causal_lm, element_bytes, sum(map(_kept_columns, layers[:count])))


def state_cost(causal_lm: Any) -> float:
    """How many rows' activations the kept end state of a node and its sum take, in all layers; 0 without such layers.

    These are the last inputs of convolutions, and the states of recurrences, in float32.
    """
    family = family_of(text_config(causal_lm.config))
    if family is None:
        return 0.0
    mixers = [mixer for _, mixer in mixers_of(causal_lm, family)]
    kernels = [module for mixer in mixers for module in mixer.modules() if isinstance(module, nn.Conv1d)]
    columns = sum((kernel.kernel_size[0] - 1) * kernel.out_channels for kernel in kernels)
    cost = _cost(causal_lm, None, columns)
    if len(family.functions) > 1:
        size = causal_lm.get_input_embeddings().weight.element_size()
        wider = 2 * max(4, size) / (size + max(4, size))  # than a key and its sum
        cost += wider * _cost(causal_lm, None, sum(map(state_columns, mixers)))
    return cost


def _cost(causal_lm: Any, element_bytes: int | None, columns: int) -> float:
    layers = layer_configs(causal_lm.config)
    first = layers[0]
    width = getattr(first, "intermediate_size", None) or 4 * first.hidden_size
    if experts := getattr(first, "num_experts_per_tok", None):  # as wide as those that a token has
        width = experts * (getattr(first, "moe_intermediate_size", None) or width)
    if isinstance(width, (list, tuple)):  # of each layer
        width = max(width)
    heads = first.num_attention_heads
    kv_heads = getattr(first, "num_key_value_heads", None) or heads
    head_dim = max(1, _kept_columns(first) // (2 * kv_heads))
    shape = ModelShape(len(layers), first.hidden_size, width, heads, kv_heads, head_dim)
    return shape.kept_cost(
        is_checkpointed=_is_checkpointed(causal_lm),
        element_bytes=element_bytes or causal_lm.get_input_embeddings().weight.element_size(),
        kept_columns=columns,
    )


def _is_checkpointed(causal_lm: nn.Module) -> bool:
    return any(part.training and getattr(part, "gradient_checkpointing", False) for part in causal_lm.modules())


def _kept_columns(layer: Any) -> int:
    """Numbers of a key and a value of a layer, all of its heads together; expanded ones of latent attention."""
    heads = layer.num_attention_heads
    if getattr(layer, "kv_lora_rank", None):
        return int(heads * (layer.qk_nope_head_dim + layer.qk_rope_head_dim + layer.v_head_dim))
    head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // heads
    return int(2 * (getattr(layer, "num_key_value_heads", None) or heads) * head_dim)


def _agreed_plan(
    model: nn.Module, batch: PackedBatch, max_tokens: int, keep: Any, offload: bool, wrapper: Wrapper, ranks: Any
) -> Plan:
    """The plan, after all ranks have one, which keep the graph or do not."""
    plan: Plan | None = None
    error: SharedPromptError | None = None
    try:
        plan = plan_backward(model, batch, max_tokens, keep, offload, wrapper)
    except SharedPromptError as own:
        error = own
    needs_keys = plan is not None and plan.keep == "kv" and not plan.cut.is_whole
    failed, needs_keys = map(bool, largest_of_ranks((error is not None, needs_keys), ranks))
    if error is not None:
        raise error
    if failed or plan is None:
        raise SharedPromptError("batch", "one that every rank can run", "an error on another rank")
    if plan.keep == "graph" and needs_keys:
        return plan_backward(model, batch, max_tokens, "kv", offload, wrapper)
    return plan


# --- wrappers ---


@dataclass(frozen=True)
class Wrapper:
    """A wrapper that replicates or shards a model, or none.

    Attributes:
        no_sync: context of backwards whose gradients are not reduced.
        is_sharded: whether forwards communicate, so that ranks need equally many.
        keeps_graphs: whether a backward may run after forwards and backwards of others.
    """

    kind: str
    no_sync: Callable[[], AbstractContextManager[Any]]
    is_sharded: bool = False
    keeps_graphs: bool = False

    @staticmethod
    def of(model: Any, no_sync: Callable[[], AbstractContextManager[Any]] | None) -> Wrapper:
        """That of a model; `no_sync`: what to take instead of its own."""
        parts: list[Any] = [*model.modules()]
        if hasattr(model, "zero_optimization_stage") or any(hasattr(own, "ds_id") for own in model.parameters()):
            return Wrapper("DeepSpeed", no_sync or nullcontext)
        for part in parts:  # from the outermost on, torch.compile's wrapper among them
            if isinstance(part, Ddp):
                return Wrapper("DDP", no_sync or part.no_sync)
            if hasattr(part, "_fsdp_wrapped_module"):
                return Wrapper("FSDP 1", no_sync or part.no_sync, is_sharded=True)
        if any(hasattr(part, "set_requires_gradient_sync") for part in parts):
            return Wrapper("FSDP 2", no_sync or nullcontext, is_sharded=True, keeps_graphs=True)
        return Wrapper("none", no_sync or nullcontext, keeps_graphs=True)


# --- passes ---


class _Backward(Passes):
    """All passes of a batch on this rank."""

    caller = "shared_prompt_backward"

    def __init__(
        self, model: nn.Module, batch: PackedBatch, plan: Plan, loss_of: Loss, backward: Backward, wrapper: Wrapper,
        ranks: Any, options: dict[str, Any],
    ) -> None:  # fmt: skip
        self.model, self.batch, self.plan, self.wrapper, self.options = model, batch, plan, wrapper, options
        self._loss_of, self._run_backward = loss_of, backward
        self._found: list[PartScores] = []
        super().__init__(slots_of(letters_of(plan.cut.passes, plan.keep)), ranks)

    @functools.cached_property
    def _pieces(self) -> Pieces:
        plan = self.plan
        return Pieces(self.model, self.batch, plan.cut, keep=plan.keep, offload=plan.offload, **self.options)

    def own_passes(self) -> Generator[Due | None, None, None]:
        balances = getattr(text_config(causal_lm_of(self.model).config), "output_router_logits", False)
        if self.plan.cut.is_whole and not balances:
            self.name = "the only pass"
            yield True
        else:
            yield from self.below(self._pieces.outermost, self._loss)

    def dummy_root(self, *, with_gradients: bool) -> Tensor:
        return self._pieces.run_dummy(with_gradients=with_gradients)

    def synchronised(self, is_last: bool) -> AbstractContextManager[Any]:
        return nullcontext() if is_last else self.wrapper.no_sync()

    def run_backward(self, root: Tensor) -> None:
        self._run_backward(root)

    def run(self) -> PartScores:
        """Run all passes; the scores of all sequences."""
        with self:
            while self.advance():
                with self.context():
                    due = self.take()
                    if isinstance(due, Part):
                        with due.trunk.part(due.number) as part:
                            self._give(part)
                    else:
                        self._give(self._whole())
        return self._scores()

    def _loss(self, part: PartScores) -> Tensor:
        entropy = None if part.entropy is None else part.entropy.detach()
        self._found.append(replace(part, logps=part.logps.detach(), entropy=entropy, balance=None, own=()))
        return checked_loss(self._loss_of(part))

    def _give(self, part: PartScores) -> None:
        self.run_backward(root_of(self._loss(part) if part.sequences else None, part.own))

    def _whole(self) -> PartScores:
        """The scores of a batch that is not cut."""
        logps, entropy = shared_prompt_forward(self.model, self.batch, **self.options)
        lens, scores = self.batch.response_lens, (logps,) if entropy is None else (logps, entropy)
        tokens = torch.arange(len(logps), device=logps.device)
        return PartScores(tuple(range(len(lens))), tokens, lens, logps, entropy, own=scores)

    def _scores(self) -> PartScores:
        found, lens = self._found, self.batch.response_lens
        tokens = torch.cat([part.tokens for part in found])

        def placed(values: list[Tensor]) -> Tensor:
            joined = torch.cat(values)
            return torch.empty_like(joined).index_copy_(0, tokens, joined)

        entropies = [part.entropy for part in found if part.entropy is not None]
        logps = placed([part.logps for part in found])
        own = torch.arange(len(logps), device=logps.device)
        return PartScores(tuple(range(len(lens))), own, lens, logps, placed(entropies) if entropies else None)
