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
from measure import DTYPES, LEFT_OUT, Config, Matmul, Row, significant
from peers import Implementation, own_families
from shapes import title
from varlen import PACKAGES, is_importable

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# What the header gives versions of.
VERSIONS = ("transformers", "triton", "flash-attn-4", "fla-core", "tilelang", "causal-conv1d", "mamba-ssm")


@dataclass(frozen=True)
class Benchmark:
    """One command.

    Attributes:
        name: as in the header of its results.
        description: of the command, for --help.
        presets: names of what is measured, by the name of the list.
        default: the preset on a GPU when none is asked for; on the CPU it is "tiny".
        parse: what a name stands for; a ValueError says why it is none.
        implementations: all that can be measured here; its argument is what ``peers.own_families`` returns, None on the
            CPU.
        run_type: measures one thing with ``(parsed, implementations, config, matmul)``: ``len`` and ``run()`` for a
            progress bar, then ``rows``.
        settings: for the ``Config``.
        conclusion: of all rows, what is printed behind them; "" for nothing.
        lists_missing: what is not installed has rows that say so, even where --impls does not name it.
    """

    name: str
    description: str
    presets: Mapping[str, Sequence[str]]
    default: str
    parse: Callable[[str], Any]
    implementations: Callable[[list[str] | None], list[Implementation]]
    run_type: Callable[[Any, list[Implementation], Config, Matmul], Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    rounds: int = 5
    limit_s: float = 20.0
    conclusion: Callable[[list[Row]], str] = lambda rows: ""
    lists_missing: bool = False


def gpu_folder(gpu: str) -> str:
    """A GPU's name as a folder name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", gpu).strip("-")


def positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return value


def parse_arguments(benchmark: Benchmark, arguments: list[str] | None = None) -> argparse.Namespace:
    """The options, with `shapes` parsed."""
    parser = argparse.ArgumentParser(
        description=benchmark.description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--preset", action="append", default=[], choices=benchmark.presets, help="a list of shapes; repeatable")
    add("--shape", nargs="+", default=[], metavar="NAME", help="shapes by name, see --list")
    add(
        "--impls",
        nargs="+",
        default=[],
        metavar="WORD",
        help="only implementations whose name contains a word, or is all that follows =",
    )
    add("--dtype", choices=DTYPES, help="default: bf16, on the CPU fp32")
    add("--rounds", type=int, default=benchmark.rounds, help="visits of every implementation (default: %(default)s)")
    add("--limit-s", type=positive, default=benchmark.limit_s, help="per implementation and shape (%(default)s)")
    add("--budget-s", type=positive, help="stop cleanly after this many seconds and write what there is")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a trial run, never a result")
    add("--out", type=Path, metavar="FOLDER", help="where the result is written (default: benchmarks/results/<gpu>)")
    add("--name", help="of the result file (default: the benchmark and its presets)")
    add("--commit", default=os.environ.get("DUALKV_COMMIT"), help="what is measured, for a copy that git does not know")
    add("--clean", action="store_true", help="the tree is that commit's, without changes")
    add("--list", action="store_true", help="print the presets and leave")
    options = parser.parse_args(arguments)
    if options.rounds < 0:
        parser.error(f"--rounds: expected at least 0, got {options.rounds}")
    default = [] if options.shape else ["tiny" if options.device == "cpu" else benchmark.default]
    options.preset = options.preset or default
    names = [name for preset in options.preset for name in benchmark.presets[preset]] + options.shape
    try:
        options.shapes = [benchmark.parse(name) for name in dict.fromkeys(names)]
    except ValueError as error:
        parser.error(str(error))
    if not options.list and (options.device == "cpu" or torch.cuda.is_available()):
        try:
            options.implementations = chosen_implementations(benchmark, options)
        except (ValueError, RuntimeError) as error:
            parser.error(str(error))
    return options


def chosen_implementations(benchmark: Benchmark, options: argparse.Namespace) -> list[Implementation]:
    """What can be measured here, or with --impls what was asked for, whether its package is there or not.

    Raises:
        ValueError: a word of --impls fits no implementation.
        RuntimeError: on a GPU, if this library has no compiled kernels for it.
    """
    families = None
    if options.device == "cuda":
        from flash_attn_dualkv import build_info

        families = own_families(dict(build_info()), torch.cuda.get_device_capability())
    found = benchmark.implementations(families)
    unknown = [word for word in options.impls if not any(fits(word, one.name) for one in found)]
    if unknown:
        known = ", ".join(one.name for one in found)
        raise ValueError(f"--impls: expected parts of the names {known}, got {' '.join(unknown)}")
    if options.impls:
        return [one for one in found if any(fits(word, one.name) for word in options.impls)]
    return [one for one in found if benchmark.lists_missing or one.missing() is None]


def fits(word: str, name: str) -> bool:
    """Whether a word of --impls asks for that implementation."""
    return word == f"={name}" or word in name


def git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(("git", *arguments), cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def tree_state(commit: str | None, is_clean: bool) -> tuple[str, bool]:
    """(commit, dirty): what the caller states, else what git says. Result files do not make a tree dirty."""
    if commit:
        return commit, not is_clean
    head = git("rev-parse", "HEAD")
    # A copy of the tree inside another repository is not that repository's commit.
    if head is None or Path(git("rev-parse", "--show-toplevel") or "/").resolve() != ROOT:
        return "unknown", True
    changes = git("status", "--porcelain", "--", ".", ":(exclude)benchmarks/results")
    return head, changes != ""


def make_header(benchmark: Benchmark, options: argparse.Namespace) -> Row:
    commit, is_dirty = tree_state(options.commit, options.clean)
    return {
        "benchmark": benchmark.name,
        "gpu": torch.cuda.get_device_name() if options.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "commit": commit,
        "dirty": is_dirty,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "matmul_tflops": None,
        "rounds": options.rounds,
        "limit_s": options.limit_s,
        "not_installed": [package for label, (_, package) in PACKAGES.items() if not is_importable(label)],
        "versions": installed(VERSIONS),
    }


def installed(distributions: Sequence[str]) -> dict[str, str]:
    """The versions of those that are there."""
    found = {}
    for name in distributions:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def run(benchmark: Benchmark, options: argparse.Namespace, config: Config, header: Row, path: Path) -> list[Row]:
    """Measure shape after shape; the file is written again and again. What time does not reach has rows that say so."""
    from tqdm import tqdm

    matmul = Matmul(config)
    runs = [benchmark.run_type(shape, options.implementations, config, matmul) for shape in options.shapes]
    rows: list[Row] = []

    def write(unfinished: list[Row]) -> None:
        header["matmul_tflops"] = significant(statistics.median(matmul.readings)) if matmul.readings else None
        path.write_text(json.dumps({"header": header, "rows": [*rows, *unfinished]}, indent=1) + "\n")

    finished, written = 0, time.monotonic()
    with tqdm(total=sum(map(len, runs)), unit="step", dynamic_ncols=True, disable=None) as bar:
        for measured in runs:
            torch._dynamo.reset()  # one compilation per shape; otherwise a limit on their number ends in eager mode
            failure = None
            try:
                for step in measured.run():
                    bar.set_description(f"{measured.name} {step}")
                    bar.update()
                    if time.monotonic() - written > 10:
                        write(measured.rows)
                        written = time.monotonic()
            except Exception as error:  # a peer's kernel can leave the GPU unusable: no reason to lose what there is
                failure = f"a failure before: {type(error).__name__}"
            finished += len(measured)
            bar.update(finished - bar.n)  # the steps of what failed or had no time left
            found = measured.rows
            for row in found:
                if failure and row.get("skipped") == LEFT_OUT:
                    row["skipped"] = failure
                bar.write(summary(row))
            rows += found
            write([])
    return rows


def summary(row: Row) -> str:
    """A line about one row."""
    name = f"{title(row['shape']):<32} {row['impl']:<26} {row['direction']:<8}"
    peak = "" if row.get("peak_gib") is None else f"{row['peak_gib']:8.2f} GiB"
    if row["ms"] is None:
        return f"{name} {why_no_time(row)} {peak}"
    rate = "" if row["tflops"] is None else f"{row['tflops']:8.1f} TFLOP/s"
    share = "" if row["fraction"] is None else f"{100 * row['fraction']:5.1f}% of matmul"
    return f"{name} {row['ms']:10.3f} ms {rate} {share} {peak}"


def why_no_time(row: Row) -> str:
    return "out of memory" if row.get("oom") else str(row.get("error") or row.get("skipped"))


def main(benchmark: Benchmark, arguments: list[str] | None = None) -> int:
    """The command: 1 if an implementation of this library failed, 2 if there is no GPU."""
    begin = time.monotonic()
    options = parse_arguments(benchmark, arguments)
    if options.list:
        for preset, names in benchmark.presets.items():
            print(f"{preset}:", *(f"  {name:<32} {title(name)}" for name in names), sep="\n")
        return 0
    if options.device == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA GPU here. --device cpu makes a trial run with plain PyTorch.", file=sys.stderr)
        return 2
    header = make_header(benchmark, options)
    name = options.name or "-".join([benchmark.name, *(options.preset or ["shapes"])])
    path = (options.out or RESULTS / gpu_folder(header["gpu"])) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    device = torch.device(options.device)
    # A CPU's rate in plain PyTorch.
    settings = benchmark.settings if options.device == "cuda" else {**benchmark.settings, "assumed_tflops": 0.01}
    config = Config(
        dtype=options.dtype or ("bf16" if options.device == "cuda" else "fp32"),
        device=device,
        rounds=options.rounds,
        limit_s=options.limit_s,
        deadline=begin + options.budget_s if options.budget_s else float("inf"),
        **settings,
    )
    if header["dirty"]:
        print("The tree is dirty or unknown to git: this result will be refused.", file=sys.stderr)
    for one in options.implementations:
        if missing := one.missing():
            print(f"{one.name} is left out: {missing}.", file=sys.stderr)
    rows = run(benchmark, options, config, header, path)
    if text := benchmark.conclusion(rows):
        print(text)
    print(path)
    return 1 if any(row.get("error") and row["impl"].startswith("dualkv") for row in rows) else 0
