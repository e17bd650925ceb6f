#!/usr/bin/env python
"""Measure shared-prompt attention against its peers, on the same tokens and in the same run.

    python benchmarks/bench_kernel.py --preset paper         # the DualKV paper's kernel table
    python benchmarks/bench_kernel.py --preset performance   # ragged and short responses, few heads, head dims, scaling
    python benchmarks/bench_kernel.py --shape 28x16Kx2K --impls dualkv flex
    python benchmarks/bench_kernel.py --render benchmarks/results/NVIDIA-H200/paper.json
    python benchmarks/bench_kernel.py --readme               # fill the README's results section

The work of every implementation is prompt self-attention and all responses. TFLOP/s count visible (query, key) pairs of
the deduplicated micro-batch, 4 H d operations per pair forward and 2.5 times that backward, whatever an implementation
computes. Times are medians of CUDA events. Results are written after every shape: a run cut short leaves what it has.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import report
import torch
from measure import DTYPES, Config, Matmul, ShapeRun, significant
from peers import Implementation, cpu_implementations, cuda_implementations, own_families
from schema import gpu_folder, is_ours
from shapes import PRESETS, SHAPES, Shape, select

from flash_attn_dualkv.predict import DIRECTIONS


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", action="append", default=[], choices=PRESETS, help="a list of shapes; repeatable")
    parser.add_argument("--shape", nargs="+", default=[], metavar="NAME", help=f"any of {', '.join(SHAPES)}")
    parser.add_argument("--impls", nargs="+", metavar="WORD", help="only implementations whose name contains a word")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16, on the CPU fp32")
    parser.add_argument("--directions", nargs="+", choices=DIRECTIONS, default=list(DIRECTIONS))
    parser.add_argument("--rounds", type=int, default=5, help="visits of every implementation (default: %(default)s)")
    parser.add_argument(
        "--limit-s", type=float, default=20.0, help="per implementation and shape (default: %(default)s)"
    )
    parser.add_argument("--budget-s", type=float, help="stop cleanly after this many seconds and write what there is")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a trial run, never a result")
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/<gpu>/<presets>.json)")
    parser.add_argument("--commit", default=os.environ.get("DUALKV_COMMIT"), help="where git cannot tell")
    parser.add_argument("--clean", action="store_true", help="the tree is that commit's, where git cannot tell")
    parser.add_argument("--list", action="store_true", help="print the shapes and leave")
    parser.add_argument("--render", type=Path, nargs="+", metavar="FILE", help="make table and plot of result files")
    parser.add_argument("--readme", action="store_true", help="fill the README's results section and leave")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"argument --rounds: expected at least 1, got {options.rounds}")
    for name in options.shape:
        if name not in SHAPES:
            parser.error(f"argument --shape: expected one of {', '.join(SHAPES)}, got {name}")
    return options


def git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(("git", *arguments), cwd=report.ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def tree_state(commit: str | None, is_clean: bool) -> tuple[str, bool]:
    """(commit, dirty): what git says, without it what the caller states. Result files do not make a tree dirty."""
    head = git("rev-parse", "HEAD")
    # A copy of the tree inside another repository is not that repository's commit.
    if head is None or Path(git("rev-parse", "--show-toplevel") or "/").resolve() != report.ROOT:
        return commit or "unknown", not (commit and is_clean)
    changes = git("status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")
    return head, changes != ""


def make_header(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    commit, is_dirty = tree_state(options.commit, options.clean)
    is_cuda = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if is_cuda else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "commit": commit,
        "dirty": is_dirty,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "matmul_tflops": None,
        "rounds": options.rounds,
        "limit_s": options.limit_s,
    }


def implementations(options: argparse.Namespace, device: torch.device) -> list[Implementation]:
    """What can be measured here and was asked for.

    Raises:
        RuntimeError: on a GPU, if this library has no compiled kernels for it.
    """
    if device.type == "cpu":
        found = cpu_implementations()
    else:
        import flash_attn_dualkv

        build = dict(flash_attn_dualkv.build_info())
        found = cuda_implementations(own_families(build, torch.cuda.get_device_capability(device)))
    words = options.impls or [""]
    return [implementation for implementation in found if any(word in implementation.name for word in words)]


def run(shapes: list[Shape], options: argparse.Namespace, path: Path, header: dict[str, Any], config: Config) -> None:
    """Measure shape after shape; the file is complete after each."""
    from tqdm import tqdm

    chosen = implementations(options, config.device)
    matmul = Matmul(config)
    runs = [ShapeRun(shape, chosen, config, matmul) for shape in shapes]
    rows: list[dict[str, Any]] = []
    finished = 0
    with tqdm(total=sum(map(len, runs)), unit="step", dynamic_ncols=True) as bar:
        for measured in runs:
            if config.is_over:
                bar.write("the time given was used up")
                break
            torch._dynamo.reset()  # one compilation per shape; otherwise a limit on their number ends in eager mode
            for step in measured.run():
                bar.set_description(f"{measured.shape.name} {step}")
                bar.update()
            finished += len(measured)
            bar.update(finished - bar.n)  # the steps of what failed or had no time left
            rows += measured.rows
            header["matmul_tflops"] = significant(statistics.median(matmul.readings)) if matmul.readings else None
            path.write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")
            for row in measured.rows:
                bar.write(summary(row))


def summary(row: dict[str, Any]) -> str:
    name = f"{row['shape']:<22} {row['impl']:<26} {row['direction']:<8}"
    if row["ms"] is None:
        return f"{name} {'out of memory' if row.get('oom') else row.get('error') or row.get('skipped')}"
    memory = "" if row["peak_gib"] is None else f"{row['peak_gib']:8.2f} GiB"
    share = "" if row["fraction"] is None else f"{100 * row['fraction']:5.1f}% of matmul"
    return f"{name} {row['ms']:10.3f} ms {row['tflops']:8.1f} TFLOP/s {share} {memory}"


def print_shapes() -> None:
    for shape in SHAPES.values():
        rho = shape.replicated_tokens / shape.packed_tokens
        heads = f"H={shape.heads} H_k={shape.kv_heads} d={shape.head_dim}"
        print(f"{shape.name:<24} {heads:<18} {shape.packed_tokens:>8} tokens, replicated {rho:5.2f}x as many")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.list:
        print_shapes()
        return 0
    for path in options.render or ():
        print(*report.render(path), sep="\n")
    if options.readme:
        report.update_readme()
    if options.render or options.readme:
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA GPU here. --device cpu makes a trial run with plain PyTorch.", file=sys.stderr)
        return 2

    device = torch.device(options.device)
    default = [] if options.shape else ["tiny" if device.type == "cpu" else "quick"]
    shapes = select(options.preset or default, options.shape)
    header = make_header(options, device)
    name = "-".join(options.preset or default) or "shapes"
    path = options.out or report.RESULTS / gpu_folder(header["gpu"]) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    config = Config(
        dtype=options.dtype or ("fp32" if device.type == "cpu" else "bf16"),
        device=device,
        directions=tuple(options.directions),
        rounds=options.rounds,
        limit_s=options.limit_s,
        deadline=time.monotonic() + options.budget_s if options.budget_s else float("inf"),
    )
    if header["dirty"]:
        print("The tree is dirty or unknown to git: this result will be refused.", file=sys.stderr)
    run(shapes, options, path, header, config)
    print(path, *report.render(path), sep="\n")
    failed = [row for row in json.loads(path.read_text())["rows"] if row.get("error") and is_ours(row)]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
