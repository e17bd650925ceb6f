# SPDX-License-Identifier: BSD-3-Clause
"""What the benchmark commands have in common: their arguments, the header of a result, the run over all shapes."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from measure import LEFT_OUT, Config, Matmul, Row, ShapeRun, significant
from peers import Implementation, own_kernels
from shapes import parse, title

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# What the header gives versions of.
VERSIONS = ("nvidia-cudnn-frontend", "flash-attn-4", "transformers", "triton", "fla-core", "causal-conv1d", "mamba-ssm")


@dataclass(frozen=True)
class Benchmark:
    """One command.

    Attributes:
        name: as in the header of its results.
        description: of the command, for --help.
        presets: names of what is measured, by the name of the list; "tiny" is the CPU's.
        default: the preset on a GPU when none is asked for.
        implementations: all that can be measured here; its argument is what ``peers.own_kernels`` returns, None on the
            CPU.
        parse: what a name stands for; a ValueError says why it is none.
        run_type: measures one thing with ``(parsed, implementations, config, matmul)``: ``run()``, then ``rows``.
        settings: for the ``Config``.
    """

    name: str
    description: str
    presets: Mapping[str, Sequence[str]]
    default: str
    implementations: Callable[[str | None], list[Implementation]]
    parse: Callable[[str], Any] = parse
    run_type: Callable[[Any, list[Implementation], Config, Matmul], Any] = ShapeRun
    settings: Mapping[str, Any] = field(default_factory=dict)


def gpu_folder(gpu: str) -> str:
    """A GPU's name as a folder name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", gpu).strip("-")


def parse_arguments(benchmark: Benchmark, arguments: list[str] | None = None) -> argparse.Namespace:
    """The options, with `shapes` parsed and `implementations` chosen."""
    presets = "\n".join(f"  {name:<12} {' '.join(shapes)}" for name, shapes in benchmark.presets.items())
    parser = argparse.ArgumentParser(
        description=benchmark.description,
        epilog=f"presets:\n{presets}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    rounds = benchmark.settings.get("rounds", Config.rounds)
    limit_s = benchmark.settings.get("limit_s", Config.limit_s)
    add = parser.add_argument
    add("--preset", action="append", default=[], choices=benchmark.presets, help="a list of shapes; repeatable")
    add("--shape", nargs="+", default=[], metavar="NAME", help="shapes by name")
    add("--impls", nargs="+", default=[], metavar="WORD", help="those whose name has a word, or is all that follows =")
    add("--rounds", type=int, default=rounds, help="visits of every implementation (default: %(default)s)")
    add("--limit-s", type=float, default=limit_s, help="per implementation and shape (default: %(default)s)")
    add("--budget-s", type=float, default=float("inf"), help="stop after this many seconds and write what there is")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a trial run, never a result")
    add_result(parser)
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"--rounds: expected at least 1, got {options.rounds}")
    if options.device == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA GPU here. --device cpu makes a trial run with plain PyTorch.", file=sys.stderr)
        raise SystemExit(2)
    default = [] if options.shape else ["tiny" if options.device == "cpu" else benchmark.default]
    options.preset = options.preset or default
    names = [name for preset in options.preset for name in benchmark.presets[preset]] + options.shape
    try:
        options.shapes = [benchmark.parse(name) for name in dict.fromkeys(names)]
        options.implementations = chosen_implementations(benchmark, options)
    except (ValueError, RuntimeError) as error:
        parser.error(str(error))
    return options


def add_result(parser: argparse.ArgumentParser) -> None:
    """The options of every benchmark about its result."""
    text = "what is measured, for a copy of a clean tree that git does not know (default: DUALKV_COMMIT)"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="of the result (default: in benchmarks/results)")
    parser.add_argument("--name", help="of the result file (default: what is measured)")
    parser.add_argument("--commit", default=os.environ.get("DUALKV_COMMIT"), help=text)


def result_path(options: argparse.Namespace, folder: Path, name: str) -> Path:
    """``folder`` and ``name`` where the options of `add_result` say nothing else."""
    return Path(options.out or folder) / f"{options.name or name}.json"


def chosen_implementations(benchmark: Benchmark, options: argparse.Namespace) -> list[Implementation]:
    """What can be measured here, or with --impls what was asked for, whether its package is there or not.

    This library's own is always among them: ratios are those of one process.

    Raises:
        ValueError: a word of --impls fits no implementation.
        RuntimeError: on a GPU, if this library has no compiled kernels for it.
    """
    kernels = None
    if options.device == "cuda":
        from flash_attn_dualkv import build_info

        asked = os.environ.get("DUALKV_KERNELS")
        kernels = own_kernels(dict(build_info()), torch.cuda.get_device_capability(), asked)
    ours, *others = benchmark.implementations(kernels)
    if not options.impls:
        return [ours, *(one for one in others if not one.missing() and not one.is_optional)]
    names = [one.name for one in (ours, *others)]
    # "=name" is all of a name, "name" a part of it.
    found = {word: [one for one in names if word in one or word == f"={one}"] for word in options.impls}
    if unknown := [word for word, fits in found.items() if not fits]:
        raise ValueError(f"--impls: expected parts of the names {', '.join(names)}, got {' '.join(unknown)}")
    return [ours, *(one for one in others if any(one.name in fits for fits in found.values()))]


def git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def tree_state(commit: str | None) -> tuple[str, bool]:
    """(commit, dirty): what the caller states, else what git says. Result files do not make a tree dirty."""
    if commit:
        return commit, False
    head = git("rev-parse", "HEAD")
    # A copy of the tree inside another repository is not that repository's commit.
    if head is None or Path(git("rev-parse", "--show-toplevel") or "/").resolve() != ROOT:
        return "unknown", True
    changes = git("status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")
    return head, changes != ""


def make_header(commit: str | None, gpu: str, **more: Any) -> Row:
    """GPU, versions and commit, for every result."""
    found, is_dirty = tree_state(commit)
    if is_dirty:
        print("The tree is dirty or unknown to git: this result will be refused.", file=sys.stderr)
    versions = {}
    for name in VERSIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return {
        "gpu": gpu,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "commit": found,
        "dirty": is_dirty,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "versions": versions,
        **more,
    }


def write(path: Path, header: Row, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")


def run(benchmark: Benchmark, options: argparse.Namespace, config: Config, header: Row, path: Path) -> list[Row]:
    """Measure shape after shape; the file is written behind each. What time does not reach has rows that say so."""
    matmul = Matmul(config)
    rows: list[Row] = []
    for shape in options.shapes:
        torch._dynamo.reset()  # one compilation per shape; otherwise a limit on their number ends in eager mode
        measured, failure = benchmark.run_type(shape, options.implementations, config, matmul), ""
        try:
            measured.run()
        except Exception as error:  # a peer's kernel can leave the GPU unusable: no reason to lose what there is
            failure = f"a failure before: {type(error).__name__}"
        for row in measured.rows:
            if failure and row.get("skipped") == LEFT_OUT:
                row["skipped"] = failure
            print(summary(row), flush=True)
            rows.append(row)
        header["matmul_tflops"] = significant(statistics.median(matmul.readings)) if matmul.readings else None
        write(path, header, rows)
    return rows


def summary(row: Row) -> str:
    """A line about one row."""
    name = f"{title(row['shape']):<32} {row['impl']:<26} {row['direction']:<8}"
    if row["ms"] is None:
        return f"{name} {'out of memory' if row.get('oom') else row.get('error') or row.get('skipped')}"
    units = {"ms": "ms", "tflops": "TFLOP/s", "fraction": "of matmul", "peak_gib": "GiB"}
    return name + "".join(f" {row[key]:9.2f} {unit}" for key, unit in units.items() if row.get(key) is not None)


def main(benchmark: Benchmark, arguments: list[str] | None = None) -> int:
    """The command: 1 if an implementation of this library failed."""
    begin = time.monotonic()
    options = parse_arguments(benchmark, arguments)
    is_cuda = options.device == "cuda"
    gpu = torch.cuda.get_device_name() if is_cuda else "cpu"
    header = make_header(options.commit, gpu, benchmark=benchmark.name, rounds=options.rounds)
    name = "-".join([benchmark.name, *(options.preset or ["shapes"])])
    path = result_path(options, RESULTS / gpu_folder(gpu), name)
    limits = {"rounds": options.rounds, "limit_s": options.limit_s, "deadline": begin + options.budget_s}
    dtype = torch.bfloat16 if is_cuda else torch.float32
    config = Config(torch.device(options.device), dtype=dtype, **{**benchmark.settings, **limits})
    rows = run(benchmark, options, config, header, path)
    print(path)
    return 1 if any(row.get("error") and row["impl"].startswith("dualkv") for row in rows) else 0
