# SPDX-License-Identifier: BSD-3-Clause
"""Does the installation work? Attends over one group twice: the prompt stored once, and copied for every response.

    python -m flash_attn_dualkv.demo

Both must give the same output and the same gradients. Where a row of the group has several copies, the gradients of its
key, value and query are the sums of theirs; only the first copy's output has a gradient, so that it counts once.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from .. import build_info, flash_attn_dualkv_varlen_func
from ..kernels import how_to_build
from .command import CommandLine, add_group, spread

HEADS, HEAD_DIM = {"q": 32, "k": 8, "v": 8, "out": 32}, 128
# Settings of each device: prompt, responses, their lengths, element type, timed repetitions (the
# CPU's reference is not what is fast), and the largest difference by rounding, relative to a
# tensor's largest value.
DEFAULTS: dict[str, tuple[int, int, range, torch.dtype, int, float]] = {
    "cuda": (8192, 16, range(131, 2049), torch.bfloat16, 5, 3e-2),
    "cpu": (128, 4, range(16, 33), torch.float32, 0, 1e-5),
}
TOO_LARGE = "arguments --prompt, --responses, --response: expected a group that fits in"
# Name and source rows of each leaf; rows of each part of the output; what computes these parts.
Way = tuple[list[tuple[str, Tensor]], list[Tensor], Callable[..., Any]]


def shared(prompt: int, responses: list[int]) -> Way:
    """Each token once. The prompt is a sequence without keys of its own: it attends to the context, which is itself."""
    rows, longest = torch.arange(prompt + sum(responses)), max(responses)
    context, decoded = rows[:prompt], rows[prompt:]
    offsets = [torch.tensor([0, *accumulate((first, *responses))], dtype=torch.int32) for first in (prompt, 0)]
    rest: Any = (*offsets, max(prompt, longest), prompt, longest)
    leaves = [("q", rows), ("k", context), ("v", context), ("k", decoded), ("v", decoded)]
    return leaves, [rows], lambda *leaves: [flash_attn_dualkv_varlen_func(*leaves, *rest)]


def replicated(prompt: int, responses: list[int]) -> Way:
    """The usual way: the prompt in front of every response, by PyTorch's own attention."""
    ends = pairwise(accumulate(responses, initial=prompt))
    sequences = [torch.cat([torch.arange(prompt), torch.arange(begin, end)]) for begin, end in ends]

    def attend(*leaves: Any) -> list[Tensor]:
        x = [leaf.transpose(0, 1)[None] for leaf in leaves]
        triples = zip(x[::3], x[1::3], x[2::3])
        outs = [scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True) for q, k, v in triples]
        return [out[0].transpose(0, 1) for out in outs]

    return [(name, rows) for rows in sequences for name in "qkv"], sequences, attend


def measure(way: Way, group: dict[str, Tensor], repeats: int) -> tuple[dict[str, Tensor], float, float]:
    """Output and gradients by row, float32; MiB of inputs and results; milliseconds of a forward and backward."""
    leaf_rows, out_rows, attend = way
    leaves = [group[name][rows].requires_grad_() for name, rows in leaf_rows]
    douts, is_copy = [], torch.zeros(len(group["q"]), dtype=torch.bool)
    for rows in out_rows:
        douts.append(group["out"][rows].masked_fill(is_copy[rows][:, None, None], 0))
        is_copy[rows] = True
    synchronize = torch.cuda.synchronize if leaves[0].is_cuda else lambda: None
    milliseconds = []
    for _ in range(repeats + 1):  # the first warms up
        synchronize()
        begin = time.perf_counter()
        outs = attend(*leaves)
        gradients = torch.autograd.grad(outs, leaves, douts)
        synchronize()
        milliseconds.append(1e3 * (time.perf_counter() - begin))
    found = {name: torch.zeros(x.shape) for name, x in group.items()}
    for rows, out in zip(out_rows, outs):
        found["out"][rows] = out.detach().float()
    for (name, rows), gradient in zip(leaf_rows, gradients):
        found[name].index_add_(0, rows, gradient.float())
    size = sum(x.nbytes for x in (*leaves, *douts, *outs, *gradients)) / 2**20
    return found, size, statistics.median(milliseconds[-repeats:])


def choose_device(requested: str) -> tuple[str, str]:
    """The device, and why it is not a GPU."""
    if requested == "cpu":
        return "cpu", "asked for with --device cpu"
    if torch.version.cuda is None:
        return "cpu", f"this PyTorch ({torch.__version__}) is built without CUDA"
    if not torch.cuda.is_available():
        return "cpu", "PyTorch sees no CUDA GPU"
    if not (build := build_info())["compiled"]:
        cause = build["compiled_error"] or build["not_built"]
        return "cpu", f"the kernels are not there: {cause}; install a wheel with kernels, or {how_to_build()}"
    return "cuda", ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if a difference exceeds its bound. Exits with 2 and one line if it cannot be run as asked."""
    parser = CommandLine("demo", __doc__)
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add_group(parser)
    options = parser.parse_args(arguments)
    device, reason = choose_device(options.device)
    if options.device == "cuda" and reason:
        parser.error(f"argument --device: expected a GPU that can be used, got cuda, but {reason}")
    prompt, count, lengths, dtype, repeats, bound = DEFAULTS[device]
    prompt = options.prompt or prompt
    responses = spread(parser, options.response or lengths, options.responses, count)
    tokens, copied = prompt + sum(responses), len(responses) * prompt + sum(responses)

    # Inputs and as many results of both ways; the group; results in float32.
    needed = sum(HEADS.values()) * HEAD_DIM * (dtype.itemsize * (2 * copied + 3 * tokens) + 8 * tokens)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if reason else torch.cuda.mem_get_info()[0]
    if needed > memory:
        parser.error(f"{TOO_LARGE} {memory >> 30:,} GiB, got one that needs {needed >> 30:,} GiB")
    print(f"device    {torch.cuda.get_device_name() if device == 'cuda' else f'CPU: {reason}'}, {dtype}")
    print(f"group     a prompt of {prompt:,}, {len(responses)} responses of {min(responses)} to {max(responses)}")
    print(f"tokens    replicated {copied:,}, shared {tokens:,}: rho = {copied / tokens:.2f}\n", flush=True)
    if device == "cpu" and copied < 4096:  # threads would wait for each other longer than they compute
        torch.set_num_threads(1)
    try:
        with torch.device(device):
            torch.manual_seed(0)
            group = {name: torch.randn(tokens, heads, HEAD_DIM, dtype=dtype) for name, heads in HEADS.items()}
            new, *costs = measure(shared(prompt, responses), group, repeats)
            old, *old_costs = measure(replicated(prompt, responses), group, repeats)
    except torch.OutOfMemoryError:
        parser.error(f"{TOO_LARGE} the GPU's memory, got a larger one")

    print(f"{'attention, forward and backward':<34}{'replicated':>12}{'shared':>12}{'ratio':>8}")
    names = ("inputs and results, MiB", *(["time, ms"] if repeats else []))
    for what, before, after in zip(names, old_costs, costs):
        print(f"{what:<34}{before:>12,.1f}{after:>12,.1f}{before / after:>7.1f}x")
    is_same = True
    print(f"\n{'difference, of the largest value':<34}{'prompt':>12}{'responses':>12}")
    for name, expected in old.items():
        largest, differences = expected.abs().max(), (new[name] - expected).abs()
        parts = [(differences[rows].max() / largest).item() for rows in (slice(prompt), slice(prompt, None))]
        is_same = is_same and all(part <= bound for part in parts)  # false for NaN too
        print(f"{name if name == 'out' else f'd{name.upper()}':<34}{parts[0]:>12.2e}{parts[1]:>12.2e}")
    print(f"\n{'the same' if is_same else 'NOT THE SAME'}: the bound is {bound:.0e}")
    if not is_same:
        print("flash_attn_dualkv DOES NOT WORK here: please report this output, with flash_attn_dualkv.build_info()")
    else:
        print(f"flash_attn_dualkv works {'with its kernels' if device == 'cuda' else f'on the CPU: {reason}'}")
    return int(not is_same)


if __name__ == "__main__":
    sys.exit(main())
