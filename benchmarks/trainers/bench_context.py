#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Measure a step on one long tree, of one rank and divided among ranks: context parallelism and Ulysses.

    torchrun --nproc-per-node 2 benchmarks/trainers/bench_context.py                       # Qwen3-1.7B, 128K tokens
    torchrun --nproc-per-node 4 benchmarks/trainers/bench_context.py --modes context crossed
    torchrun --nproc-per-node 4 benchmarks/trainers/bench_context.py --shape qwen3-1.7b-4-groups-of-4x2Kx512 \
        --modes one context ulysses crossed stock stock_pairs
    torchrun --nproc-per-node 1 benchmarks/trainers/bench_context.py --shape qwen3-1.7b-16x32Kx4K \
        --modes budget once --steps 2
    torchrun --nproc-per-node 2 benchmarks/trainers/bench_context.py --device cpu          # a tiny model, a trial run

bf16, random weights, activation checkpointing, the LM head in chunks over the leaves' tokens. A step is
log-probabilities and all gradients, with their sum over the ranks, and no optimizer. In the mode "one" every rank has
the whole row; "crossed" is heads over pairs of ranks, and rows over the pairs. Time is that of the slowest rank, memory
the peak above weights and gradients of the rank that has most. "stock" is transformers' own model on sdpa, a sequence
at a time with its prompt, on every rank; "stock_pairs" two at a time: how far a model is from itself in other batches.
"budget" divides the row into micro-batches of `--max-tokens`, each with a copy of what its sequences share; "once" is
`shared_prompt_backward` with that budget.
"""

from __future__ import annotations

import atexit
import gc
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[1]))

from bench_model import make_ids, pack, stock_step
from command import RESULTS, Result, gpu_folder, parser_of, place_of
from measure import Row, relative_difference, timed
from models import make_model
from shapes import ALL_MODELS, Shape, parse

FOLDER = RESULTS / "trainers" / "context"
DIVIDED = ("context", "ulysses", "crossed")
BUDGETED = ("budget", "once")
BUDGET = 49408  # 48K, and rows of a prompt's in front of responses: four of 4K beside 32K
STOCK = {"stock": 1, "stock_pairs": 2}  # sequences of a micro-batch
MODES = ("one", *DIVIDED, *STOCK, *BUDGETED)
Step = Callable[[], Tensor]
Results = tuple[Tensor, list[Tensor]]  # log-probabilities, gradients


def long_tree(tokens: int, model: str, layers: int | None) -> Shape:
    """A quarter of the tokens in the root, the others in three levels of two children each: eight sequences."""
    root, below = (part // 8 * 8 for part in (tokens // 4, 3 * tokens // 4 // 14))
    nodes = [(root, -1)]

    def grow(parent: int, levels: int) -> None:
        for _ in range(2 if levels else 0):
            nodes.append((below, parent))
            grow(len(nodes) - 1, levels - 1)

    grow(0, 3)
    sizes = ALL_MODELS[model]
    sizes = replace(sizes, layers=layers or sizes.layers)
    heads: dict[str, Any] = dict(heads=sizes.heads, kv_heads=sizes.kv_heads, head_dim=sizes.head_dim)
    return Shape(f"{model}-L{sizes.layers}-tree-{tokens}", tuple(nodes), **heads, model=sizes)


def divided(mode: str, layout: Any) -> Any:
    """The layout of this rank; None for the whole row."""
    from flash_attn_dualkv.parallel.context import ContextLayout
    from flash_attn_dualkv.parallel.ulysses import UlyssesLayout

    if mode == "one":
        return None
    world: Any = dist.group.WORLD
    if mode == "context":
        return ContextLayout.of(layout, world)
    if mode == "ulysses":
        return UlyssesLayout.of(layout, world)
    mesh = dist.device_mesh.init_device_mesh(layout.device.type, (dist.get_world_size() // 2, 2))
    rows, heads = mesh.get_group(0), mesh.get_group(1)
    return UlyssesLayout.of(ContextLayout.of(layout, rows, pad_to_multiple_of=2), heads)


def stock_steps(model: Any, shape: Shape, mode: str, device: torch.device) -> tuple[Step, Row]:
    """Micro-batches of so many sequences, padded to the longest."""
    (ids, dout), sequences = make_ids(shape, device), STOCK[mode]
    leaves = [shape.leaves[begin : begin + sequences] for begin in range(0, len(shape.leaves), sequences)]
    micro_batches = [stock_step(shape, ids, model, one, max(shape.ends[leaf] for leaf in one)) for one in leaves]

    def step() -> Tensor:
        logps = torch.empty_like(dout)
        for run, scored in micro_batches:
            found = run()
            found.backward(dout[scored])
            logps[scored] = found.detach().float()
        return logps

    return step, {"ranks": 1, "rows_per_rank": shape.replicated_tokens, "tokens": shape.packed_tokens}


def shared_step(model: Any, shape: Shape, mode: str, device: torch.device) -> tuple[Step, Row]:
    """One packed row, whole or divided."""
    from flash_attn_dualkv.integrations.transformers import shared_prompt_forward

    ids, dout = make_ids(shape, device)
    batch = pack(shape, ids)
    layout = divided(mode, batch.layout)
    ranks = 1 if layout is None else layout.num_ranks

    def step() -> Tensor:
        logps, _ = shared_prompt_forward(model, batch, layout=layout)
        logps.backward(dout / ranks)
        if layout is not None:
            for one in model.parameters():
                dist.all_reduce(one.grad)
        return logps.detach()

    rows = batch.layout.num_tokens if layout is None else layout.num_local_tokens
    return step, {"ranks": ranks, "rows_per_rank": rows, "tokens": batch.layout.num_tokens}


def budgeted_step(max_tokens: int, model: Any, shape: Shape, mode: str, device: torch.device) -> tuple[Step, Row]:
    """Micro-batches of a budget, prompts computed in each; or their keys kept."""
    from flash_attn_dualkv import split_by_token_budget
    from flash_attn_dualkv.integrations.transformers import shared_prompt_backward, shared_prompt_forward

    ids, dout = make_ids(shape, device)
    batch = pack(shape, ids)
    tokens = batch.layout.num_tokens
    if mode == "once":
        gradient = lambda part: (part.logps * dout[part.tokens]).sum()  # noqa: E731
        step = partial(shared_prompt_backward, model, batch, gradient, max_tokens=max_tokens)
        return lambda: step().logps, {"ranks": 1, "rows_per_rank": tokens, "tokens": tokens, "max_tokens": max_tokens}
    places = torch.arange(len(dout), device=device).split(batch.response_lens)
    chosen = split_by_token_budget(batch.tree, max_tokens=max_tokens)
    micro_batches = [(pack(shape, ids, one), torch.cat([places[index] for index in one])) for one in chosen]

    def step_of_all() -> Tensor:
        logps = torch.empty_like(dout)
        for part, scored in micro_batches:
            found, _ = shared_prompt_forward(model, part)
            found.backward(dout[scored])
            logps[scored] = found.detach()
        return logps

    rows = sum(part.layout.num_tokens for part, _ in micro_batches)
    return step_of_all, {"ranks": 1, "rows_per_rank": rows, "tokens": tokens, "max_tokens": max_tokens}


def useful_flops(model: Any, shape: Shape) -> float:
    """Operations of a step: six a weight and token, and attention; not what checkpointing computes again."""
    of_layers = sum(one.numel() for one in model.model.layers.parameters())
    linear = 6 * (of_layers * shape.packed_tokens + model.lm_head.weight.numel() * sum(shape.responses))
    return linear + shape.model.layers * (shape.flops("forward") + shape.flops("backward"))


def measure(
    model: Any, shape: Shape, mode: str, device: torch.device, steps: int, max_tokens: int
) -> tuple[Row, Results]:
    """Figures of a mode, its log-probabilities, and its gradients, which leave the device."""
    makers = dict.fromkeys(STOCK, stock_steps) | dict.fromkeys(BUDGETED, partial(budgeted_step, max_tokens))
    is_cuda = device.type == "cuda"
    model.set_attn_implementation("sdpa" if mode in STOCK else "dualkv")
    step, row = makers.get(mode, shared_step)(model, shape, mode, device)
    times, peaks, logps = [], [], torch.empty(0)
    for _ in range(steps + 1):  # the first one tries the model, and warms up
        model.zero_grad(set_to_none=True)
        gc.collect()
        if is_cuda:
            torch.cuda.empty_cache()
        logps, seconds, peak = timed(step, device)
        times.append(seconds)
        peaks.append(peak)
    parameters = sum(one.numel() * one.element_size() for one in model.parameters())
    row = {"mode": mode, **row, "step_ms": 1e3 * statistics.median(times[1:]), "weights_bytes": parameters}
    if mode not in STOCK:
        row["tflops_per_rank"] = useful_flops(model, shape) / row["step_ms"] / row["ranks"] / 1e9
    if is_cuda:
        row["peak_bytes"] = int(max(peaks[1:]))
        row["above_bytes"] = row["peak_bytes"] - 2 * parameters
    gradients = [one.grad.cpu() for one in model.parameters()]
    return row, (logps.float().cpu(), gradients)


def compared(row: Row, found: Results, base: Results, device: torch.device) -> None:
    """Add to a row how far its log-probabilities and gradients are from those of another."""
    away = (found[0] - base[0]).abs()
    row["logps_difference"], row["logps_mean_difference"] = away.max().item(), away.mean().item()
    most, squares = 0.0, torch.zeros(2, dtype=torch.float64, device=device)
    for pair in zip(found[1], base[1]):
        one, other = (gradient.to(device) for gradient in pair)
        most = max(most, relative_difference(one, other))
        squares += torch.stack([one.double().square().sum(), other.double().square().sum()])
    row["gradient_difference"] = most
    row["norm_difference"] = abs((squares[0] / squares[1]).sqrt().item() - 1)


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__, on_cpu=True)
    parser.add_argument("--model", choices=sorted(ALL_MODELS), help="its shape (default: qwen3-1.7b; tiny on the CPU)")
    parser.add_argument("--layers", type=int, help="as many of its layers (default: all)")
    parser.add_argument("--tokens", type=int, help="of the tree (default: 128K; 600 on the CPU)")
    parser.add_argument("--shape", type=parse, help="instead of a tree of so many tokens, as in bench_model.py")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES[:3])
    parser.add_argument("--max-tokens", type=int, default=BUDGET, help="of budget and once (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="that are timed, behind one that is not")
    options = parser.parse_args(arguments)
    is_cuda = options.device == "cuda"
    device, dtype, gpu = place_of(options.device, int(os.environ.get("LOCAL_RANK", 0)))
    if is_cuda:
        torch.cuda.set_device(device)
    if not dist.is_initialized():  # else by a test
        dist.init_process_group("nccl" if is_cuda else "gloo")
        atexit.register(dist.destroy_process_group)
    from flash_attn_dualkv.integrations.transformers import register

    register()
    tokens = options.tokens or (131072 if is_cuda else 600)
    shape = options.shape or long_tree(tokens, options.model or ("qwen3-1.7b" if is_cuda else "tiny"), options.layers)
    model = make_model(shape.model, "dualkv", dtype, device)
    ranks = dist.get_world_size()
    result = Result(options, FOLDER, f"{gpu_folder(gpu)}-x{ranks}", gpu, shape=shape.name, ranks=ranks)
    first: Row = {}
    bases: dict[str, Results] = {}
    for mode in options.modes:
        row, found = measure(model, shape, mode, device, options.steps, options.max_tokens)
        base = "stock" if mode in STOCK else next((name for name in ("one", "budget") if name in bases), "")
        if base in bases:
            compared(row, found, bases[base], device)
        if first.get("mode") in ("one", "budget"):
            row["rate_of_one"] = first["step_ms"] / row["step_ms"]
            if is_cuda:
                row["memory_of_one"] = row["above_bytes"] / first["above_bytes"]
        bases.setdefault(mode, found)
        first = first or row
        if dist.get_rank() == 0:
            result.add(row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
