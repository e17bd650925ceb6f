#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Compare the kernels of two checkouts, each built in place, in alternating processes on one GPU.

    python benchmarks/compare_builds.py OLD_ROOT NEW_ROOT                # every shape of a page, about 8 minutes
    python benchmarks/compare_builds.py OLD_ROOT NEW_ROOT --shape 28x16Kx2K tree-comb

Each process packs the same tokens with its own checkout's public functions, so the order of rows may differ. A time is
the median of the processes' medians; calls are warmed up by 150 ms of themselves. A ratio above 1 means that NEW is
slower; `*` marks more than 1%, or 3% in deterministic mode. Sampled rows of outputs and gradients are compared too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_kernel
import bench_tree
import torch
from measure import Config, laps_under_load
from packing import cumulative, make_source, path_rows
from shapes import parse
from torch import Tensor

KERNEL_PRESETS = ("shared", "responses", "causal", "heads", "options", "wide")
SHAPES = [*(name for preset in KERNEL_PRESETS for name in bench_kernel.PRESETS[preset]), *bench_tree.PRESETS["trees"]]
MODES = {"forward": 1.01, "backward": 1.01, "both": 1.01, "deterministic": 1.03}  # and the ratio that is marked
SAMPLED_ROWS = 64


def measure(name: str, config: Config) -> tuple[dict[str, float], list[Tensor]]:
    """Times of one shape, and sampled rows of its output and gradients in an order that no packing changes."""
    from flash_attn_dualkv import flash_attn_varlen_func, pack_prefix_tree, pack_shared_prompts, shared_prompt_attention

    shape, device = parse(name), config.device
    source, total = make_source(shape, config.dtype, device), shape.packed_tokens
    options: dict[str, Any] = {"sliding_window": shape.window or None, "softcap": float(shape.softcap)}
    if shape.sinks:
        options["sinks"] = torch.linspace(-1, 1, shape.heads, device=device, dtype=config.dtype)
    ids = torch.arange(total, device=device)  # a token's id is its place in the source, whatever row it gets
    paths = path_rows(shape, shape.leaves)
    attend: Callable[..., Any] = flash_attn_varlen_func
    if shape.depth == 1 and shape.is_plain:
        offsets, longest = cumulative(shape.responses, device), max(shape.responses)
        arguments: tuple[Any, ...] = (offsets, offsets, longest, longest)
        options = {"causal": True}
    else:
        if shape.is_tree or shape.depth == 1:
            batch: Any = pack_prefix_tree(paths, min_shared=1, device=device)
        else:
            samples = [(path[:-length], path[-length:]) for path, length in zip(paths, shape.responses)]
            batch = pack_shared_prompts(*map(list, zip(*samples)), boundary="gather", device=device)
        attend, arguments, ids = shared_prompt_attention, (batch.layout,), batch.input_ids
    q, k, v = (one[ids].requires_grad_() for one in source[:3])
    dout = source[3][ids]
    wanted = torch.randperm(total, generator=torch.Generator().manual_seed(0))[:SAMPLED_ROWS].to(device)
    rows = torch.empty_like(ids).index_copy_(0, ids, torch.arange(total, device=device))[wanted]
    times: dict[str, float] = {}
    sampled: list[Tensor] = []
    for mode, deterministic in (("backward", False), ("deterministic", True)):
        run = lambda: attend(q, k, v, *arguments, deterministic=deterministic, **options)  # noqa: B023, E731
        if not deterministic:
            times["forward"] = statistics.median(laps_under_load(config, (run,))[0])
        out = run()
        gradients = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        sampled += [one[rows].float().cpu() for one in (out.detach(), *gradients)]
        del gradients
        backward = lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)  # noqa: B023, E731
        times[mode] = statistics.median(laps_under_load(config, (backward,))[0])
    return {**times, "both": times["forward"] + times["backward"]}, sampled


def child(root: Path, names: list[str], path: Path) -> None:
    """All shapes with the package of `root`, which PYTHONPATH names first."""
    import flash_attn_dualkv

    is_cuda = torch.cuda.is_available()  # else a trial run
    config = Config(torch.device("cuda"), dtype=torch.bfloat16) if is_cuda else Config(torch.device("cpu"), warm_ms=0.0)
    if not Path(flash_attn_dualkv.__file__).resolve().is_relative_to(root):
        raise SystemExit(f"{root}: expected its package, got {flash_attn_dualkv.__file__}")
    if is_cuda and not flash_attn_dualkv.build_info()["compiled"]:
        raise SystemExit(f"{root}: expected compiled kernels beside the package")
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = measure(name, config)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        config.clear(after_failure=isinstance(found[name], str))
    torch.save(found, path)


def compared(name: str, old: list[Any], new: list[Any]) -> tuple[str, bool]:
    """A line of the table: times of the old checkout and of the new one, and their ratio, mode by mode; is all well?"""
    failures = [one[name] for one in (*old, *new) if isinstance(one[name], str)]
    if failures:
        return f"{name:40s} {failures[0]}", False
    cells = []
    for mode, most in MODES.items():
        before, after = (statistics.median(one[name][0][mode] for one in runs) for runs in (old, new))
        cells.append(f"{before:8.3f} {after:8.3f} {after / before:6.3f}{'*' if after / before > most else ' '}")
    pairs = zip(old[0][name][1], new[0][name][1])
    difference = max(((one - other).norm() / one.norm()).item() for one, other in pairs)
    is_same = difference < 0.02
    line = f"{name:40s} {'  '.join(cells)}  {difference:.1e}{'' if is_same else ' DIFFERS'}"
    return line, is_same and "*" not in line


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("roots", type=Path, nargs=2, metavar="ROOT", help="the old and the new checkout")
    parser.add_argument("--shape", nargs="+", default=SHAPES, metavar="NAME", help="as of bench_kernel.py")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each checkout (default: %(default)s)")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    roots = [root.resolve() for root in options.roots]
    if options.child:
        child(roots[0], options.shape, options.child)
        return 0
    found: list[list[Any]] = [[], []]
    with tempfile.TemporaryDirectory() as folder:
        for number in range(2 * options.rounds):
            which = (number + number // 2) % 2  # old, new, new, old, old, new
            path, root = Path(folder) / "found.pt", str(roots[which])
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
            command = [sys.executable, __file__, root, root, "--child", str(path), "--shape", *options.shape]
            subprocess.run(command, env=environment, check=True)
            found[which].append(torch.load(path))
    print("old ms, new ms, new over old:".ljust(40), "  ".join(mode.ljust(25) for mode in MODES), " difference")
    lines = [compared(name, *found) for name in options.shape]
    print(*(line for line, _ in lines), sep="\n")
    return int(not all(is_fine for _, is_fine in lines))


if __name__ == "__main__":
    sys.exit(main())
