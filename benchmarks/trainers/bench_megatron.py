#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Measure an update and log-probabilities of Megatron's models, prompts shared beside replicated, in one start.

    torchrun --nproc-per-node 2 benchmarks/trainers/bench_megatron.py --tensor 2
    torchrun --nproc-per-node 2 benchmarks/trainers/bench_megatron.py --pipeline 2 --vpp 7 --group 4 \\
        --layout 'E(tt|)*12ttt|tL'
    torchrun --nproc-per-node 4 benchmarks/trainers/bench_megatron.py --tensor 2 --pipeline 2 --vpp 6 --group 4 \\
        --model qwen3-30b-a3b-L12
    torchrun --nproc-per-node 1 benchmarks/trainers/bench_megatron.py --tokens 81920 --model qwen3.5-27b-L8
    torchrun --nproc-per-node 1 benchmarks/trainers/bench_megatron.py --tokens 81920 --model nemotron-h-8b
    python benchmarks/report.py                                                    # the page, of the result files

Random weights of Qwen3's or Nemotron's shapes and random tokens; bf16 with float32 gradients (Megatron's DDP),
Megatron's schedules, recomputation of whole layers, micro-batches of so many tokens. Both run the same layers and the
same head, over the rows that score tokens. Sharing makes these no fewer, so that the head weighs more beside the layers
and the last stage wants fewer of them: `--layout`. Replicated prompts lie in one THD row, on this library's
flash_attn_varlen_func: Megatron's own local attention takes no packed rows. An update is all forwards and backwards and
the reduction of gradients, without the optimizer's step, which is the same for both. Times are those of the slowest
rank, the best of all rounds. Routers balance nothing, experts are grouped products. Needs megatron-core, and no
Transformer Engine or apex; gated delta nets (qwen3.5-27b: three of four layers) need fla-core, whose kernels take the
sequences of a THD row; a HybridModel (nemotron-h: Mamba-2, MLPs and four attention layers) mamba-ssm and causal-conv1d,
which take its seq_idx.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import megatron.core
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.ssm.mamba_mixer import MambaMixer
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, get_transformer_layer_offset
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1]))

from command import RESULTS, Result, gpu_folder, parser_of
from measure import Row, largest, timed
from megatron_layers import grouped_experts, hybrid_spec, local_norms, with_delta_net
from verl_inputs import MODELS, Model

from flash_attn_dualkv import PackedBatch, flash_attn_varlen_func, pack_shared_prompts, split_by_token_budget
from flash_attn_dualkv.integrations.megatron import install, shared_prompt_forward
from flash_attn_dualkv.integrations.megatron.forward import Request, score_hidden
from flash_attn_dualkv.integrations.megatron.install import WithOutputProcessor

FOLDER = RESULTS / "trainers" / "megatron"


# The hidden size of a feed-forward layer is that of one expert, where there are experts.
SIZES = {
    "qwen3-0.6b": MODELS["Qwen3-0.6B"],
    "qwen3-1.7b": MODELS["Qwen3-1.7B"],
    "qwen3-8b": MODELS["Qwen3-8B"],
    "qwen3-30b-a3b-L12": MODELS["Qwen3-30B-A3B, 12 layers"],
    "qwen3.5-27b-L8": Model(
        layers=8, hidden=5120, intermediate=17408, heads=24, kv_heads=4, head_dim=256, vocabulary=248320
    ),
    "nemotron-h-8b": Model(
        layers=52, hidden=4096, intermediate=21504, heads=32, kv_heads=8, head_dim=128, vocabulary=131072
    ),
    "tiny": Model(hidden=32, intermediate=48, head_dim=8, vocabulary=96),
    "tiny-4-layers": Model(layers=4, hidden=32, intermediate=48, head_dim=8, vocabulary=96),
    "tiny-experts": Model(hidden=32, intermediate=24, head_dim=8, vocabulary=96, experts=4, experts_per_token=2),
    "tiny-delta-nets": Model(layers=4, hidden=32, intermediate=48, head_dim=8, vocabulary=96),
    "tiny-hybrid": Model(layers=4, hidden=32, intermediate=48, head_dim=8, vocabulary=96),
}
# Key heads, value heads and their head dim of models in which three of four layers have gated delta
# nets.
DELTA_NETS = {"qwen3.5-27b-L8": (16, 48, 128), "tiny-delta-nets": (2, 4, 8)}
# Layers of hybrid models as Megatron writes them, and heads, head dim, groups and states of their
# Mamba mixers.
HYBRIDS = {
    "nemotron-h-8b": ("M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-" * 5, (128, 64, 8, 128)),
    "tiny-hybrid": ("M-M*", (4, 8, 2, 8)),
}


class VarlenAttention(DotProductAttention):
    """The measuring stick: every sequence of a THD row for itself."""

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, packed_seq_params: Any, **_: Any
    ) -> Tensor:
        offsets, longest = packed_seq_params.cu_seqlens_q, packed_seq_params.max_seqlen_q
        options: dict[str, Any] = dict(softmax_scale=self.softmax_scale, causal=True)
        out = flash_attn_varlen_func(query, key, value, offsets, offsets, longest, longest, **options)
        return out.flatten(1)


def is_sliced(options: argparse.Namespace) -> bool:
    """Whether there is sequence parallelism, which Megatron wants of experts on tensor-parallel ranks."""
    return options.tensor > 1 and SIZES[options.model].experts > 0


def seed(number: int) -> None:
    torch.manual_seed(number)
    model_parallel_cuda_manual_seed(number)  # Megatron draws weights from a generator of its own on a GPU


@contextlib.contextmanager
def drawn_by_layer() -> Iterator[None]:
    """Weights of a layer follow from its number, in whatever stage it is; those of the head, from the last layer's."""
    stock = TransformerLayer.__init__

    def init(self: Any, config: Any, submodules: Any, layer_number: int = 1, *args: Any, **more: Any) -> None:
        seed(layer_number + get_transformer_layer_offset(config, more.get("vp_stage")))
        stock(self, config, submodules, layer_number, *args, **more)

    with patch.object(TransformerLayer, "__init__", init):
        yield


def build(options: argparse.Namespace, shares: bool, device: torch.device) -> list[Any]:
    """This rank's stages, with the same weights in both runs."""
    size = SIZES[options.model]
    seed(0)
    on_gpu, is_virtual = device.type == "cuda", options.vpp > 1
    dtype = torch.bfloat16 if on_gpu else torch.float32
    more: dict[str, Any] = {"pipeline_model_parallel_layout": options.layout} if shares and options.layout else {}
    if size.experts:
        more |= dict(
            num_moe_experts=size.experts, moe_router_topk=size.experts_per_token, moe_ffn_hidden_size=size.intermediate,
            moe_router_load_balancing_type="none", moe_router_dtype="fp32",
            sequence_parallel=is_sliced(options),
        )  # fmt: skip
    has_delta_nets = options.model in DELTA_NETS
    if has_delta_nets:
        key_heads, value_heads, head_dim = DELTA_NETS[options.model]
        more |= dict(
            experimental_attention_variant="gated_delta_net", linear_attention_freq=4, linear_conv_kernel_dim=4,
            linear_num_key_heads=key_heads, linear_num_value_heads=value_heads, linear_key_head_dim=head_dim,
            linear_value_head_dim=head_dim, attention_output_gate=True,
        )  # fmt: skip
    is_hybrid = options.model in HYBRIDS
    if is_hybrid:
        pattern, mamba = HYBRIDS[options.model]
        names = ("mamba_num_heads", "mamba_head_dim", "mamba_num_groups", "mamba_state_dim")
        more |= dict(zip(names, mamba), activation_func=squared_relu)
    else:
        more |= dict(qk_layernorm=True, gated_linear_unit=True, activation_func=torch.nn.functional.silu)
    config = TransformerConfig(
        num_layers=size.layers, hidden_size=size.hidden, ffn_hidden_size=size.intermediate,
        num_attention_heads=size.heads, num_query_groups=size.kv_heads, kv_channels=size.head_dim,
        normalization="RMSNorm", add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, bf16=on_gpu,
        params_dtype=dtype, pipeline_dtype=dtype, use_cpu_initialization=not on_gpu, persist_layer_norm=False,
        gradient_accumulation_fusion=False, masked_softmax_fusion=False, tensor_model_parallel_size=options.tensor,
        pipeline_model_parallel_size=options.pipeline, variable_seq_lengths=options.pipeline > 1,
        moe_token_dispatcher_type="alltoall", batch_p2p_comm=on_gpu and not is_virtual,
        overlap_p2p_comm=is_virtual, virtual_pipeline_model_parallel_size=options.vpp if is_virtual else None,
        microbatch_group_size_per_vp_stage=options.group, recompute_granularity="full", recompute_method="uniform",
        recompute_num_layers=1,
        **more,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=size.experts or None, qk_layernorm=True, normalization="RMSNorm")
    if not shares:
        spec.submodules.self_attention.submodules.core_attention = VarlenAttention
    if has_delta_nets:
        kinds = [spec if layer % 4 == 3 else with_delta_net(spec) for layer in range(size.layers)]
        spec = TransformerBlockSubmodules(layer_specs=kinds, layer_norm=spec.submodules.input_layernorm)
    positions = "none" if is_hybrid else "rope"
    model_of, shape = GPTModel, dict(transformer_layer_spec=spec, rotary_base=1000000)
    if is_hybrid:
        # One class for both runs: the stock forward takes no function that scores hidden states.
        model_of = type("ScoringHybridModel", (WithOutputProcessor, HybridModel), {})
        shape = dict(hybrid_stack_spec=hybrid_spec(), hybrid_layer_pattern=pattern)
        if not shares:
            attention = shape["hybrid_stack_spec"].submodules.attention_layer.submodules.self_attention
            attention.submodules.core_attention = VarlenAttention
    config.finalize_model_grads_func = finalize_model_grads
    chunks = []
    for at in range(options.vpp):
        place: dict[str, Any] = dict(ignore_virtual=False, vp_stage=at)
        with local_norms(), grouped_experts(), drawn_by_layer():
            stage = model_of(
                config=config, vocab_size=size.vocabulary, max_sequence_length=2**20, **shape,
                position_embedding_type=positions, vp_stage=at if is_virtual else None,
                rotary_percent=0.25 if has_delta_nets else 1.0,
                pre_process=parallel_state.is_pipeline_first_stage(**place),
                post_process=parallel_state.is_pipeline_last_stage(**place),
            ).to(device)  # fmt: skip
        if shares:
            install(stage)
        module = Float16Module(config, stage) if on_gpu else stage
        sums = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
        chunks.append(DistributedDataParallel(config, sums, module, disable_bucketing=at > 0))
    config.no_sync_func = None
    return chunks


def micro_batches(
    options: argparse.Namespace, shares: bool, device: torch.device
) -> tuple[list[list[int]], list[PackedBatch]]:
    """By tokens, and which samples they have: with shared prompts, or with a prompt of its own for each sample."""
    drawn = torch.Generator().manual_seed(0)
    vocabulary = SIZES[options.model].vocabulary
    prompt = torch.randint(vocabulary, (options.prompt,), generator=drawn).tolist()
    responses = torch.randint(vocabulary, (options.samples, options.response), generator=drawn).tolist()
    prompts = [prompt] * options.samples
    if shares:
        lengths = [options.prompt] * options.samples, [options.response] * options.samples
        parts = split_by_token_budget([[*range(options.samples)]], *lengths, options.tokens)
    else:
        most = max(1, options.tokens // (options.prompt + options.response))
        parts = [[*range(at, min(at + most, options.samples))] for at in range(0, options.samples, most)]
    if options.vpp > 1:  # then Megatron's schedule wants a multiple of the stages
        count = -(-len(parts) // options.pipeline) * options.pipeline
        bounds = [options.samples * at // count for at in range(count + 1)]
        parts = [[*range(*pair)] for pair in itertools.pairwise(bounds)]
    return parts, [
        pack_shared_prompts(
            [prompts[i] for i in part], [responses[i] for i in part], device=device,
            group_ids=None if shares else [*range(len(part))],
            pad_to_multiple_of=options.tensor if is_sliced(options) else None,
        )
        for part in parts
    ]  # fmt: skip


def forward_replicated(chunk: Any, batch: PackedBatch) -> Any:
    """As `shared_prompt_forward`, of a batch in which nothing is shared."""
    offsets, longest = batch.jagged_offsets.int(), max(batch.sequence_lens)
    # Asked for by Mamba alone: seq_idx, which waits for the GPU.
    total_tokens = len(batch.input_ids) if any(isinstance(one, MambaMixer) for one in chunk.modules()) else None
    params = PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=offsets, cu_seqlens_kv=offsets, max_seqlen_q=longest, max_seqlen_kv=longest,
        total_tokens=total_tokens,
    )  # fmt: skip
    more = dict(output_processor=score_hidden, output_processor_context=Request(batch, None, 1.0, False))
    return chunk(batch.input_ids[None], batch.position_ids[None], None, packed_seq_params=params, **more)


def run(chunks: list[Any], batches: list[PackedBatch], forward: Callable[..., Any], trains: bool) -> list[Tensor]:
    """All micro-batches, and their log-probabilities on the last stage."""
    scored: list[Tensor] = []

    def step(iterator: Any, model: Any) -> Any:
        batch = next(iterator)

        def loss(scores: Any) -> Any:
            logps, _ = scores
            scored.append(logps.detach())
            return logps.mean() * len(logps) / 1e4, {}

        return forward(model, batch), loss

    for chunk in chunks if trains else ():
        chunk.zero_grad_buffer()
    iterators = [iter(batches) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=step, data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0], num_microbatches=len(batches),
        seq_length=max(batch.layout.num_tokens for batch in batches), micro_batch_size=1, forward_only=not trains,
    )  # fmt: skip
    return scored


def measured(options: argparse.Namespace, shares: bool, device: torch.device) -> tuple[Row, Tensor]:
    """A run's row, and its log-probabilities in the order of the samples; none but on the last stage."""
    chunks, (parts, batches) = build(options, shares, device), micro_batches(options, shares, device)
    forward = shared_prompt_forward if shares else forward_replicated
    row: Row = {"who": "shared" if shares else "replicated"}
    row |= {"tokens": sum(batch.layout.num_tokens for batch in batches), "micro_batches": len(batches)}
    logps: list[Tensor] = []
    for what, trains in (("update", True), ("log_probs", False)):
        step = partial(run, chunks, batches, forward, trains)
        with torch.set_grad_enabled(trains):
            rounds = [timed(step, device) for _ in range(options.rounds + 1)]  # the first one warms up
        logps, times = rounds[-1][0], [seconds for _, seconds, _ in rounds[1:]]
        peak = max(peak for *_, peak in rounds)
        row |= {f"{what}_s": min(times), f"{what}_rounds_s": times, f"{what}_peak_gib": peak / 2**30}
    order = torch.tensor([sample for part in parts for sample in part]).argsort().to(device)
    return row, torch.cat(logps).view(options.samples, -1)[order] if logps else torch.zeros(0)


def measure(options: argparse.Namespace, device: torch.device) -> list[Row]:
    """A row for each of both runs; the parallel state is there."""
    found = []
    for shares in (True, False):
        found.append(measured(options, shares, device))
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    (shared, scores), (replicated, others) = found
    apart = (scores - others).abs()
    shared["log_prob_mean_difference"] = largest(apart.mean().item() if apart.numel() else 0.0, device)
    shared["token_ratio"] = replicated["tokens"] / shared["tokens"]
    for what in ("update", "log_probs"):
        shared[f"{what}_times_faster"] = replicated[f"{what}_s"] / shared[f"{what}_s"]
        shared[f"{what}_of_token_ratio"] = shared[f"{what}_times_faster"] / shared["token_ratio"]
    return [shared, replicated]


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--model", choices=SIZES, default="qwen3-1.7b")
    add("--tensor", type=int, default=1, help="tensor-parallel ranks")
    add("--pipeline", type=int, default=1, help="pipeline stages")
    add("--vpp", type=int, default=1, help="parts of a stage, with equally many layers")
    add("--group", type=int, help="micro-batches that a part of a stage takes in a row (default: the stages)")
    add("--layout", help="of the shared run's stages, as Megatron writes it; default: equally many layers")
    add("--samples", type=int, default=32)
    add("--prompt", type=int, default=8192, help="its tokens")
    add("--response", type=int, default=2048, help="tokens of each")
    add("--tokens", type=int, default=40960, help="of a micro-batch, at most")
    add("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    if options.model in {*DELTA_NETS, *HYBRIDS} and options.pipeline > 1:
        parser.error(f"--pipeline: {options.model} has one stage here, got {options.pipeline}")
    if options.layout and "t" not in options.layout.rpartition("|")[2]:
        parser.error(
            f"--layout: expected a layer beside the head, behind which its weights are drawn, got {options.layout}"
        )
    return options


def main() -> int:
    options = parsed()
    if not torch.cuda.is_available():
        print("There is no CUDA GPU here.", file=sys.stderr)
        return 2
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    virtual = options.vpp if options.vpp > 1 else None
    parallel_state.initialize_model_parallel(options.tensor, options.pipeline, virtual)
    rows = measure(options, device)
    if dist.get_rank() == 0:
        gpu, what = torch.cuda.get_device_name(), {**vars(options), "version": megatron.core.__version__}
        name = f"{gpu_folder(gpu)}-{options.model}-tp{options.tensor}-pp{options.pipeline}-vpp{options.vpp}"
        del what["out"], what["name"], what["commit"]
        Result(options, FOLDER, name, gpu, gpus=dist.get_world_size(), megatron=what).add(*rows)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
