# SPDX-License-Identifier: BSD-3-Clause
"""Tensor, sequence, pipeline, expert and data parallelism with Megatron's own schedules, against one process alone."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: see docs/megatron.md")

import tiny_megatron as tiny
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron_cpu import megatron_on_the_cpu
from processes import run_ranks
from tiny_megatron import alone, check_close, check_gradients, gradients, megatron, tiny_chunk, tiny_config, weights_of
from torch import Tensor

from flash_attn_dualkv.parallel.sharded import all_gather

RANKS = 4
MICRO_BATCHES = (tiny.prompts_and_responses, tiny.tree)


@dataclass(frozen=True)
class Setup:
    """How the four ranks divide a model."""

    kind: str
    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    sequence: bool = False
    context: int = 1
    experts: dict[str, int] = field(default_factory=dict)  # sizes of their own
    loss: str = "mean"  # how Megatron takes losses: by micro-batch, by micro-batch with its tokens, or by token
    distributed: bool = False  # the gradients of a distributed optimizer
    config: dict[str, Any] = field(default_factory=dict)
    replays: bool = False  # routes of experts, other ones than those that routers find

    @property
    def differs_by_ranks(self) -> bool:
        """Whether Megatron itself computes other gradients on several tensor-parallel ranks than on one.

        Its local layers lose a part of the gradient of MLA's RoPE, and add another twice. Without sequence parallelism
        the norm of a gated delta net has on each rank the gradient of that rank's heads.
        """
        return self.tensor > 1 and ("latent" in self.kind or ("delta nets" in self.kind and not self.sequence))


SETUPS = {
    "tp 2, pp 2": Setup("gqa, q/k norm", 2, 2),
    "tp 2, sp, pp 2, recompute": Setup("sinks", 2, 2, sequence=True, config=tiny.RECOMPUTED),
    "tp 4, sp, fewer groups": Setup("query groups of 1", 4, sequence=True),
    "pp 2, vpp 2, dp 2": Setup("windows and full", 1, 2, 2, distributed=True),
    "tp 2, sp, experts": Setup("experts, sigmoid, shared", 2, sequence=True),
    "ep 4, expert bias": Setup("experts, sigmoid, shared", experts=dict(expert_model_parallel_size=4)),
    "ep 2, pp 2, latent": Setup("latent, yarn, experts", pipeline=2, experts=dict(expert_model_parallel_size=2)),
    "ep 2, tp 2, sp, divided experts": Setup(
        "experts", 2, sequence=True, experts=dict(expert_model_parallel_size=2, expert_tensor_parallel_size=2)
    ),
    "ep 2, cp 2, replayed": Setup("experts", context=2, experts=dict(expert_model_parallel_size=2), replays=True),
    "cp 2, tp 2, sp, replayed": Setup("experts", 2, sequence=True, context=2, replays=True),
    "tp 2, sp, pp 2, latent": Setup("latent, yarn", 2, 2, sequence=True),
    "tp 2, sp, pp 2, delta nets": Setup("delta nets", 2, 2, sequence=True),
    "tp 2, pp 2, vpp 2, delta nets": Setup("delta nets", 2, 2, 2),
    "tp 2, sp, recompute, qwen3 next": Setup("qwen3 next", 2, sequence=True, config=tiny.RECOMPUTED),
    "tp 2, sp, pp 2, nemotron": Setup("nemotron", 2, 2, sequence=True, config=tiny.RECOMPUTED),
    "pp 2, vpp 2, dp 2, nemotron": Setup("nemotron", 1, 2, 2, distributed=True),
    "tp 2, mamba": Setup("mamba, delta nets, rotary, tied", 2),
    "tied, tp 2, pp 2": Setup("tied", 2, 2),
    "mrope, tp 2, pp 2": Setup("mrope", 2, 2, sequence=True),
    "cp 4": Setup("windows and full", context=4),
    "cp 2, dp 2, learned positions": Setup("multi-head, biases, gpt 2", context=2, distributed=True),
    "cp 2, tp 2, sp, recompute": Setup("sinks", 2, sequence=True, context=2, config=tiny.RECOMPUTED),
    "cp 2, dp 2, latent": Setup("latent, yarn, experts", context=2),
    "cp 2, yarn, losses with tokens": Setup("yarn", context=2, loss="tokens"),
    "cp 4, losses by token": Setup(
        "half rotary, interleaved, llama 3 scaling", context=4, loss="by token",
        config=dict(calculate_per_token_loss=True),
    ),
}  # fmt: skip


class Found:
    """Of all setups, in one start of the processes."""

    everything: dict[Any, Any] | None = None

    @classmethod
    def get(cls) -> dict[Any, Any]:
        if cls.everything is None:
            cls.everything = run_ranks(_run_rank, RANKS, SETUPS)
        return cls.everything


@pytest.mark.parametrize("name", SETUPS)
def test_equals_each_sequence_alone(name: str) -> None:
    setup, found = SETUPS[name], Found.get()
    ranks = [found[rank, name] for rank in range(RANKS)]
    with megatron_on_the_cpu():
        config = tiny_config(setup.kind, moe_enable_routing_replay=setup.replays)
        model = tiny_chunk(setup.kind, config)
        whole = {name: one for rank in ranks for name, one in rank["parameters"].items()}
        with torch.no_grad():
            for parameter_name, one in model.named_parameters():
                one.copy_(whole[parameter_name])
        expected = []
        for make in MICRO_BATCHES:
            sequences, batch = make()
            if setup.replays:
                logps = tiny.replayed_alone(model, sequences, tiny.drawn(batch, 2))
            else:
                logps = alone(model, sequences)
            ((logps * weights_of(len(logps))).sum() / _divisor(setup, len(logps))).backward()
            expected.append(logps.detach())
        expected_gradients = gradients(model)
    RouterReplay.clear_global_router_replay_instances()
    scored = [rank["logps"] for rank in ranks if rank["logps"]]
    assert len(scored) == RANKS // setup.pipeline
    for logps in scored:
        for got, wanted in zip(logps, expected):
            check_close(got, wanted, 1e-5 if "next" in setup.kind else 5e-6)  # four layers, three of them of experts
    got = {name: one for rank in ranks for name, one in rank["gradients"].items()}
    if setup.kind == "tied":  # the last stage has a copy
        assert torch.equal(got.pop("output_layer.weight"), got["embedding.word_embeddings.weight"])
    if setup.differs_by_ranks:  # from what it computes of each sequence alone on the same ranks
        stock = [found[rank, name, "stock"] for rank in range(RANKS)]
        expected_gradients = {name: one for rank in stock for name, one in rank["gradients"].items()}
    check_gradients(got, expected_gradients, 2e-5)


def _divisor(setup: Setup, tokens: int) -> int:
    """What the schedule divides the loss of a micro-batch by."""
    if setup.loss == "by token":
        return sum(len(make()[1].targets) for make in MICRO_BATCHES)
    return len(MICRO_BATCHES) * (tokens if setup.loss == "tokens" else 1)


def _run_rank(rank: int, setups: dict[str, Setup], results: Any) -> None:
    for name, setup in setups.items():
        with megatron_on_the_cpu(setup.tensor, setup.pipeline, setup.virtual, setup.context, **setup.experts):
            # Ranks that exchange rows of their experts have different ones.
            step = -1 if setup.experts and parallel_state.get_data_parallel_rank() % 2 else 1
            batches = [make()[1] for make in MICRO_BATCHES[::step]]
            found = _step(setup, batches, partial(_score_shared, setup))
            results[rank, name] = {**found, "logps": found["logps"][::step]}
            RouterReplay.clear_global_router_replay_instances()
            if setup.differs_by_ranks:
                results[rank, name, "stock"] = _step(setup, _sequences_with_weights(setup.tensor), _score_stock)


def _step(setup: Setup, micro_batches: list[Any], score: Any) -> dict[str, Any]:
    """One step without its optimizer: what this rank scores, and its share of parameters and gradients, made whole."""
    config = tiny_config(
        setup.kind, tensor_model_parallel_size=setup.tensor, pipeline_model_parallel_size=setup.pipeline,
        virtual_pipeline_model_parallel_size=setup.virtual, sequence_parallel=setup.sequence,
        context_parallel_size=setup.context, **setup.experts, moe_enable_routing_replay=setup.replays,
        variable_seq_lengths=setup.pipeline > 1, batch_p2p_comm=False, overlap_p2p_comm=bool(setup.virtual),
        **setup.config,
    )  # fmt: skip
    stages = range(setup.virtual or 1)
    last = dict(ignore_virtual=False)
    chunks = [
        tiny_chunk(
            setup.kind, config, vp_stage=stage if setup.virtual else None,
            pre_process=parallel_state.is_pipeline_first_stage(vp_stage=stage, **last),
            post_process=parallel_state.is_pipeline_last_stage(vp_stage=stage, **last),
        )
        for stage in stages
    ]  # fmt: skip
    for chunk in chunks:
        for parameter_name, one in chunk.named_parameters():
            _fill_share(_global_name(chunk, parameter_name), one)
    megatron.install(chunks)
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer=setup.distributed, overlap_grad_reduce=False
    )
    wrapped = [
        DistributedDataParallel(config, options, one, disable_bucketing=bool(at)) for at, one in enumerate(chunks)
    ]
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = None
    scored: list[Tensor] = []
    for one in wrapped:
        one.zero_grad_buffer()
    iterators = [iter(micro_batches) for _ in stages]
    get_forward_backward_func()(
        forward_step_func=partial(score, scored),
        data_iterator=iterators if setup.virtual else iterators[0],
        model=wrapped if setup.virtual else wrapped[0],
        num_microbatches=len(micro_batches),
        seq_length=64,
        micro_batch_size=1,
        forward_only=False,
    )
    for one in wrapped if setup.distributed else ():
        _gather_gradients(one)
    parameters, found = {}, {}
    for chunk in chunks:
        for parameter_name, one in chunk.named_parameters():
            name = _global_name(chunk, parameter_name)
            parameters[name] = _whole(chunk, parameter_name, one, one.data)
            found[name] = _whole(chunk, parameter_name, one, one.main_grad)
    return dict(logps=scored, parameters=parameters, gradients=found)


def _gather_gradients(chunk: Any) -> None:
    """The parts that the ranks of a distributed optimizer have, to all of them."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    for buffer in chunk.buffers:
        for bucket in buffer.buckets:
            part = bucket.grad_data.chunk(group.size())[group.rank()].clone()
            bucket.grad_data.copy_(all_gather(part, group)[0])


def _sequences_with_weights(multiple: int) -> list[Any]:
    """Ids, padded at the end, scored places and weights in the loss of each sequence of all micro-batches."""
    found: list[Any] = []
    for make in MICRO_BATCHES:
        sequences, batch = make()
        weights = weights_of(len(batch.targets)).split([sum(one) for one in sequences.masks])
        for tokens, mask, own in zip(sequences.tokens, sequences.masks, weights):
            ids = torch.tensor(tokens + [0] * (-len(tokens) % multiple))
            found.append((ids, torch.tensor(mask).nonzero()[:, 0], own))
    # The schedule divides by the number of micro-batches, which are more than with shared prompts.
    return [(ids, places, own * len(found) / len(MICRO_BATCHES)) for ids, places, own in found]


def _score_stock(scored: list[Tensor], batches: Any, chunk: Any) -> Any:
    ids, places, weights = next(batches)
    hidden = torch.ones(len(ids), len(ids), dtype=torch.bool).triu(1)[None, None]
    output = chunk(ids[None], torch.arange(len(ids))[None], hidden)

    def loss(logits: Tensor) -> Any:
        whole = gather_from_tensor_model_parallel_region(logits)[0].log_softmax(-1)
        logps = whole[places - 1].gather(-1, ids[places][:, None])[:, 0]
        scored.append(logps.detach())
        return (logps * weights).sum(), {}

    return output, loss


def _score_shared(setup: Setup, scored: list[Tensor], batches: Any, chunk: Any) -> Any:
    batch = next(batches)
    if setup.replays:
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        megatron.replay_routes(chunk, batch, tiny.drawn(batch, 2))
    output = megatron.shared_prompt_forward(chunk, batch)

    def loss(scores: Any) -> Any:
        logps, _ = scores
        scored.append(logps.detach())
        total = (logps * weights_of(len(logps))).sum()
        if setup.loss == "mean":
            return total, {}
        return total * setup.context, torch.tensor(len(logps), dtype=torch.int), {}

    return output, loss


def _global_name(chunk: Any, name: str) -> str:
    """With the number of a layer in the whole model."""
    parts = name.split(".")
    if parts[0] == "decoder" and parts[1] == "layers":
        parts[2] = str(chunk.decoder.layers[int(parts[2])].layer_number - 1)
    if "local_experts" in parts:
        place = parts.index("local_experts") + 1
        group = parallel_state.get_expert_model_parallel_group()
        parts[place] = str(int(parts[place]) + group.rank() * chunk.config.num_moe_experts // group.size())
    return ".".join(parts)


def _fill_share(name: str, parameter: Tensor) -> None:
    """Other values on every rank, where the ranks have parts."""
    rank = _group_of_parts(name).rank() if _part_dim(name, parameter) is not None else 0
    # The copy of tied embeddings on the last stage.
    tiny.fill("embedding.word_embeddings.weight" if name == "output_layer.weight" else name, parameter, rank)


def _part_dim(name: str, parameter: Tensor) -> int | None:
    """In which tensor-parallel ranks have parts of a parameter; the sinks of their heads are not marked as such."""
    if name.endswith("softmax_offset"):
        return 0
    return parameter.partition_dim if getattr(parameter, "tensor_model_parallel", False) else None


def _group_of_parts(name: str) -> Any:
    if "local_experts" in name:
        return parallel_state.get_expert_tensor_parallel_group()
    return parallel_state.get_tensor_model_parallel_group()


def _whole(chunk: Any, name: str, parameter: Tensor, value: Tensor) -> Tensor:
    """The parts of all tensor-parallel ranks."""
    dim = _part_dim(name, parameter)
    if dim is None:
        return value.clone()
    group = _group_of_parts(name)
    parts = [torch.empty_like(value) for _ in range(group.size())]
    torch.distributed.all_gather(parts, value.contiguous(), group=group)
    sizes = _sections(chunk, name, len(value))
    if sizes:  # each of them in parts
        return torch.cat([torch.cat(section) for section in zip(*(one.split(sizes) for one in parts))])
    return torch.cat(parts, dim)


def _sections(chunk: Any, name: str, rows: int) -> list[int]:
    """Of a matrix that is several: gates and values of an MLP, all that a recurrence projects and convolves."""
    if ".mixer." in name:
        return list(getattr(chunk.get_parameter(name), "partition_sizes", ()))
    if "linear_fc1" in name and chunk.config.gated_linear_unit:
        return [rows // 2, rows // 2]
    if "in_proj" not in name and "conv1d" not in name:
        return []
    layer = chunk.get_submodule(name.partition(".self_attention.")[0]).self_attention
    keys, values, heads = layer.qk_dim_local_tp, layer.v_dim_local_tp, layer.num_v_heads_local_tp
    return [keys, keys, values, *([values, heads, heads] if "in_proj" in name else [])]


# --- ranks of one context-parallel group with other micro-batches -----------------------------------------------------


def _other_batch(rank: int, **changes: Any) -> Any:
    sequences = tiny.prompts_and_responses()[0]
    if rank:
        sequences = replace(sequences, **{name: change(getattr(sequences, name)) for name, change in changes.items()})
    return sequences.pack(pad_to_multiple_of=4, min_shared=1)


def _replayed(chunk: Any, rank: int) -> Any:
    batch = _other_batch(0)
    routes = tiny.drawn(batch, 2)
    megatron.replay_routes(chunk, batch, routes[:-1] if rank else routes)
    return megatron.shared_prompt_forward(chunk, batch)


# Calls of both ranks, and what rank 0 and rank 1 say.
_BATCH = "batch: expected the same on all ranks that divide its row .*, got other input_ids on some"
_FAILED = "group: expected ranks that all come to this micro-batch, got an error on rank 1"
DIFFERENT: dict[str, tuple[Any, str, str]] = {
    **{
        name: (
            lambda chunk, rank, score=score: score(
                chunk, _other_batch(rank, tokens=lambda all: [[*one[:-1], 7] for one in all])
            ),
            *[_BATCH] * 2,
        )
        for name, score in (
            ("scores", megatron.shared_prompt_forward),
            ("values", megatron.shared_prompt_values),
            ("a forward of one's own", lambda chunk, batch: megatron.divided_layout(batch, chunk.pg_collection.cp)),
        )
    },
    "no temperature": (
        lambda chunk, rank: megatron.shared_prompt_forward(chunk, _other_batch(0), temperature=1.0 - rank),
        _FAILED,
        "temperature: expected",
    ),
    "routes": (_replayed, _FAILED, "routes: expected"),
}


def _run_differing(rank: int, names: list[str], results: Any) -> None:
    with megatron_on_the_cpu(context=2):
        chunk = tiny_chunk("experts", tiny_config("experts", context_parallel_size=2, moe_enable_routing_replay=True))
        megatron.install([chunk])
        for name in names:
            try:
                DIFFERENT[name][0](chunk, rank)
                results[rank, name] = "no error"
            except ValueError as error:
                results[rank, name] = str(error)
        results[rank, "equal"] = megatron.shared_prompt_forward(chunk, _other_batch(0))[0].detach()


def test_ranks_that_differ() -> None:
    """All of them say it, and none waits for another; afterwards they score as before."""
    found = run_ranks(_run_differing, 2, [*DIFFERENT])
    for name, (_, *expected) in DIFFERENT.items():
        for rank in range(2):
            assert re.match(expected[rank], found[rank, name]), (name, rank, found[rank, name])
    assert torch.equal(found[0, "equal"], found[1, "equal"])
