"""What the benchmark commands have in common: their arguments, the header of a result, the run over all shapes."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import report
import torch
from measure import DTYPES, Config, Matmul, ShapeRun, significant
from peers import PACKAGES, Implementation, is_importable, own_families
from schema import Row, gpu_folder, is_ours
from shapes import Shape, by_name, select

Families = dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class Benchmark:
    """One command.

    Attributes:
        name: as in the header of its results.
        description: of the command, for --help.
        presets: lists of shapes by name.
        default: the preset on a GPU when none is asked for; on the CPU it is "tiny".
        implementations: all that can be measured here; its argument is what ``peers.own_families`` returns, None on the
            CPU.
        run_type: what measures one shape.
        summary: a line about one row.
        packages: peers that are measured where they can be imported, keys of ``peers.PACKAGES``.
        add_arguments: adds the command's own arguments.
        settings: for the ``Config``, from the parsed arguments.
        choose: which implementations are measured on which of the chosen shapes.
    """

    name: str
    description: str
    presets: Mapping[str, tuple[Shape, ...]]
    default: str
    implementations: Callable[[Families | None], list[Implementation]]
    run_type: type[ShapeRun]
    summary: Callable[[Row], str]
    packages: tuple[str, ...]
    add_arguments: Callable[[argparse.ArgumentParser], object] = lambda parser: None
    settings: Callable[[argparse.Namespace], dict[str, Any]] = lambda options: {}
    choose: Callable[[list[Implementation], list[Shape]], list[Implementation]] = lambda found, shapes: found
    rounds: int = 5
    limit_s: float = 20.0
    budget_s: float | None = None
    shapes: dict[str, Shape] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shapes", by_name(self.presets))


def parse(benchmark: Benchmark, arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=benchmark.description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--preset", action="append", default=[], choices=benchmark.presets, help="a list of shapes; repeatable"
    )
    names = ", ".join(benchmark.shapes)
    parser.add_argument("--shape", nargs="+", default=[], metavar="NAME", help=f"any of {names}".replace("%", "%%"))
    parser.add_argument("--impls", nargs="+", metavar="WORD", help="only implementations whose name contains a word")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bf16, on the CPU fp32")
    parser.add_argument(
        "--rounds", type=int, default=benchmark.rounds, help="visits of every implementation (default: %(default)s)"
    )
    parser.add_argument(
        "--limit-s", type=float, default=benchmark.limit_s, help="per implementation and shape (default: %(default)s)"
    )
    parser.add_argument(
        "--budget-s",
        type=float,
        default=benchmark.budget_s,
        help="stop cleanly after this many seconds and write what there is (default: %(default)s)",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a trial run, never a result")
    parser.add_argument("--out", type=Path, help="result file (default: benchmarks/results/<gpu>/<name>.json)")
    parser.add_argument("--commit", default=os.environ.get("DUALKV_COMMIT"), help="where git cannot tell")
    parser.add_argument("--clean", action="store_true", help="the tree is that commit's, where git cannot tell")
    parser.add_argument("--list", action="store_true", help="print the shapes and leave")
    parser.add_argument("--render", type=Path, nargs="+", metavar="FILE", help="make table and plot of result files")
    parser.add_argument("--readme", action="store_true", help="fill the README's results section and leave")
    benchmark.add_arguments(parser)
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error(f"argument --rounds: expected at least 1, got {options.rounds}")
    for name in options.shape:
        if name not in benchmark.shapes:
            parser.error(f"argument --shape: expected one of {names}, got {name}")
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


def make_header(benchmark: Benchmark, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    commit, is_dirty = tree_state(options.commit, options.clean)
    is_cuda = device.type == "cuda"
    return {
        "benchmark": benchmark.name,
        "gpu": torch.cuda.get_device_name(device) if is_cuda else "cpu",
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "commit": commit,
        "dirty": is_dirty,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "matmul_tflops": None,
        "rounds": options.rounds,
        "limit_s": options.limit_s,
        "not_importable": [PACKAGES[label] for label in benchmark.packages if not is_importable(label)],
    }


def implementations(
    benchmark: Benchmark, options: argparse.Namespace, device: torch.device, shapes: list[Shape]
) -> list[Implementation]:
    """What can be measured here and was asked for.

    Raises:
        RuntimeError: on a GPU, if this library has no compiled kernels for it.
    """
    families = None
    if device.type != "cpu":
        import flash_attn_dualkv

        build = dict(flash_attn_dualkv.build_info())
        families = own_families(build, torch.cuda.get_device_capability(device))
    words = options.impls or [""]
    found = benchmark.choose(benchmark.implementations(families), shapes)
    return [implementation for implementation in found if any(word in implementation.name for word in words)]


def run(
    benchmark: Benchmark,
    shapes: list[Shape],
    options: argparse.Namespace,
    path: Path,
    header: dict[str, Any],
    config: Config,
) -> None:
    """Measure shape after shape; the file is complete after each. What time does not reach has rows that say so."""
    from tqdm import tqdm

    chosen = implementations(benchmark, options, config.device, shapes)
    matmul = Matmul(config)
    runs = [benchmark.run_type(shape, chosen, config, matmul) for shape in shapes]
    rows: list[Row] = []
    finished = 0
    with tqdm(total=sum(map(len, runs)), unit="step", dynamic_ncols=True) as bar:
        for measured in runs:
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
                bar.write(benchmark.summary(row))


def print_shapes(benchmark: Benchmark) -> None:
    for shape in benchmark.shapes.values():
        rho = shape.replicated_tokens / shape.packed_tokens
        heads = f"H={shape.heads} H_k={shape.kv_heads} d={shape.head_dim}"
        print(f"{shape.name:<24} {heads:<18} {shape.packed_tokens:>8} tokens, replicated {rho:5.2f}x as many")


def why_no_figure(row: Row) -> str:
    return "out of memory" if row.get("oom") else str(row.get("error") or row.get("skipped"))


def main(benchmark: Benchmark, arguments: list[str] | None = None) -> int:
    """The command: 1 if an implementation of this library failed, 2 if there is no GPU."""
    options = parse(benchmark, arguments)
    if options.list:
        print_shapes(benchmark)
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
    default = [] if options.shape else ["tiny" if device.type == "cpu" else benchmark.default]
    presets = options.preset or default
    shapes = select(presets, options.shape, benchmark.presets)
    header = make_header(benchmark, options, device)
    # Kernel results are named by their shapes alone.
    prefix = [] if benchmark.name == "kernel" else [benchmark.name]
    name = "-".join([*prefix, *(presets or ["shapes"])])
    path = options.out or report.RESULTS / gpu_folder(header["gpu"]) / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    config = Config(
        dtype=options.dtype or ("fp32" if device.type == "cpu" else "bf16"),
        device=device,
        rounds=options.rounds,
        limit_s=options.limit_s,
        deadline=time.monotonic() + options.budget_s if options.budget_s else float("inf"),
        **benchmark.settings(options),
    )
    if header["dirty"]:
        print("The tree is dirty or unknown to git: this result will be refused.", file=sys.stderr)
    run(benchmark, shapes, options, path, header, config)
    print(path, *report.render(path), sep="\n")
    failed = [row for row in json.loads(path.read_text())["rows"] if row.get("error") and is_ours(row)]
    return 1 if failed else 0
