# SPDX-License-Identifier: BSD-3-Clause
"""What the benchmark commands have in common: their arguments, result files, the run over all shapes."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
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
from measure import LEFT_OUT, Config, Matmul, Row, ShapeRun
from peers import Implementation, own_kernels
from shapes import parse, title

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PRESETS = json.loads((ROOT / "benchmarks" / "presets.json").read_text())  # by benchmarks
# What the header gives versions of.
VERSIONS = ("nvidia-cudnn-frontend", "flash-attn-4", "transformers", "triton", "fla-core", "causal-conv1d", "mamba-ssm")


# --- result files -----------------------------------------------------------------------------------------------------


def parser_of(description: str | None, epilog: str = "", on_cpu: bool = False) -> argparse.ArgumentParser:
    """With the options of every benchmark about its result; `on_cpu`: there are trial runs without a GPU."""
    parser = argparse.ArgumentParser(
        description=description, epilog=epilog, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    text = "what is measured, for a copy of a clean tree that git does not know (default: DUALKV_COMMIT)"
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="of the result (default: in benchmarks/results)")
    parser.add_argument("--name", help="of the result file (default: what is measured)")
    if on_cpu:
        text_of_device = "cpu: a trial run, never a result"
        parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help=text_of_device)
    parser.add_argument("--commit", default=os.environ.get("DUALKV_COMMIT"), help=text)
    return parser


def place_of(device: str, index: int = 0) -> tuple[torch.device, torch.dtype, str]:
    """Device, type of the weights, and name of the GPU; "CPU" for a trial run."""
    if device == "cpu":
        return torch.device("cpu"), torch.float32, "CPU"
    return torch.device("cuda", index), torch.bfloat16, torch.cuda.get_device_name()


class Result:
    """A result file: a header with GPU, versions and commit, and rows.

    Args:
        options: those of `parser_of`.
        folder, name: where they say nothing else.
        more: of the header.
    """

    def __init__(self, options: argparse.Namespace, folder: Path, name: str, gpu: str, **more: Any) -> None:
        self.path, self.rows = Path(options.out or folder) / f"{options.name or name}.json", list[Row]()
        print(f"The result goes to {self.path}.")
        commit, is_dirty = tree_state(options.commit)
        if is_dirty:
            print("The tree is dirty or unknown to git: this result will be refused.", file=sys.stderr)
        versions = {}
        for package in VERSIONS:
            with contextlib.suppress(metadata.PackageNotFoundError):
                versions[package] = metadata.version(package)
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self.header: Row = {"gpu": gpu, "torch": torch.__version__, "cuda": torch.version.cuda or "none"}
        self.header |= {"commit": commit, "dirty": is_dirty, "date": date, "versions": versions, **more}

    def add(self, *rows: Row, line: Callable[[Row], object] = str) -> None:
        """Print rows, and write the file with them."""
        print(*map(line, rows), sep="\n", flush=True)
        self.rows += rows
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps({"header": self.header, "rows": self.rows}, indent=1) + "\n")


def kernels_digest() -> str:
    """Of the kernels' code. Commits that differ elsewhere, or in comments and spaces alone, have the same."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "csrc").rglob("*.*")):
        if path.suffix in (".cpp", ".cu", ".h"):
            code = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
            digest.update(" ".join([path.relative_to(ROOT).as_posix(), *code.split()]).encode() + b"\n")
    return digest.hexdigest()[:12]


def gpu_folder(gpu: str) -> str:
    """A GPU's name as a folder name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", gpu).strip("-")


def git_status() -> list[str]:
    """The commit of this tree, then its changes; nothing where it is no repository of its own. Results do not count."""
    words = ("git", "status", "--porcelain=v2", "--branch", "--", ".", ":(exclude)benchmarks/results")
    # A copy of the tree inside another repository is not that repository's commit.
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(ROOT.parent)}
    with contextlib.suppress(OSError, subprocess.CalledProcessError):
        done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
        return [line for line in done.stdout.splitlines() if not re.match("# branch.(?!oid)", line)]
    return []


def tree_state(commit: str | None) -> tuple[str, bool]:
    """(commit, dirty): what the caller states, else what git says."""
    if commit:
        return commit, False
    head, *changes = git_status() or ["unknown", ""]
    return head.split()[-1], bool(changes)


# --- commands --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Benchmark:
    """One command.

    Attributes:
        name: as in the header of its results.
        description: of the command, for --help.
        implementations: all that can be measured here; its argument is what ``peers.own_kernels`` returns, None on the
            CPU.
        parse: what a name stands for; a ValueError says why it is none.
        run_type: measures one thing with ``(parsed, implementations, config, matmul)``: ``run()``, then ``rows``.
        settings: for the ``Config``.
    """

    name: str
    description: str
    implementations: Callable[[str | None], list[Implementation]]
    parse: Callable[[str], Any] = parse
    run_type: Callable[[Any, list[Implementation], Config, Matmul], Any] = ShapeRun
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def presets(self) -> dict[str, list[str]]:
        """Names of what is measured, by the name of the list: the first if none is asked for, "tiny" on the CPU."""
        found: dict[str, list[str]] = PRESETS[self.name]
        return found

    def options(self, arguments: list[str] | None = None) -> argparse.Namespace:
        """The options, with `shapes` parsed and `implementations` chosen."""
        presets = "\n".join(f"  {name:<12} {' '.join(shapes)}" for name, shapes in self.presets.items())
        parser = parser_of(self.description, f"presets:\n{presets}", on_cpu=True)
        rounds, add = self.settings.get("rounds", Config.rounds), parser.add_argument
        add("--preset", action="append", default=[], choices=self.presets, help="a list of shapes; repeatable")
        add("--shape", nargs="+", default=[], metavar="NAME", help="shapes by name")
        add("--impls", nargs="+", default=[], metavar="WORD", help="whose name has the word, or is what follows =")
        add("--rounds", type=int, default=rounds, help="visits of every implementation (default: %(default)s)")
        add("--warm-ms", type=float, default=Config.warm_ms, help="of calls before those timed (default: %(default)s)")
        add("--budget-s", type=float, default=float("inf"), help="stop after this many seconds and write what there is")
        options = parser.parse_args(arguments)
        if options.rounds < 1:
            parser.error(f"--rounds: expected at least 1, got {options.rounds}")
        if options.device == "cuda" and not torch.cuda.is_available():
            print("There is no CUDA GPU here. --device cpu makes a trial run with plain PyTorch.", file=sys.stderr)
            raise SystemExit(2)
        if not options.preset and not options.shape:
            options.preset = ["tiny" if options.device == "cpu" else next(iter(self.presets))]
        names = [name for preset in options.preset for name in self.presets[preset]] + options.shape
        try:
            options.shapes = [self.parse(name) for name in dict.fromkeys(names)]
            every = self.implementations(own_kernels() if options.device == "cuda" else None)
            options.implementations = chosen(every, options.impls)
        except (ValueError, RuntimeError) as error:
            parser.error(str(error))
        return options

    def main(self, arguments: list[str] | None = None) -> int:
        """Measure shape after shape; the file is written behind each. What time does not reach has rows that say so.

        Returns:
            1 if an implementation of this library failed.
        """
        begin = time.monotonic()
        options = self.options(arguments)
        device, dtype, gpu = place_of(options.device)
        settings = {**self.settings, "rounds": options.rounds, "warm_ms": options.warm_ms}
        settings["deadline"] = begin + options.budget_s
        config = Config(device, dtype=dtype, **settings)
        name = "-".join([self.name, *(options.preset or ["shapes"])])
        more = {"benchmark": self.name, "rounds": options.rounds, "warm_ms": options.warm_ms}
        more["kernels"] = kernels_digest()
        result = Result(options, RESULTS / gpu_folder(gpu), name, gpu, **more)
        matmul = Matmul(config)
        for shape in options.shapes:
            torch._dynamo.reset()  # one compilation per shape; otherwise a limit on their number ends in eager mode
            measured, failure = self.run_type(shape, options.implementations, config, matmul), ""
            try:
                measured.run()
            except Exception as error:  # a peer's kernel can leave the GPU unusable: no reason to lose what there is
                failure = f"a failure before: {type(error).__name__}"
            rows = measured.rows
            for row in rows:
                if failure and row.get("skipped") == LEFT_OUT:
                    row["skipped"] = failure
            result.add(*rows, line=summary)
        return 1 if any(row.get("error") and row["impl"].startswith("dualkv") for row in result.rows) else 0


def chosen(every: list[Implementation], words: Sequence[str]) -> list[Implementation]:
    """What can be measured here, or what was asked for by --impls, whether its package is there or not.

    This library's own, the first, is always among them: ratios are those of one process.

    Raises:
        ValueError: a word fits no implementation.
    """
    ours, *others = every
    if not words:
        return [ours, *(impl for impl in others if not (impl.missing() or impl.is_deterministic or impl.is_optional))]
    fitting = {word: [impl for impl in every if word in impl.name or word == f"={impl.name}"] for word in words}
    if unknown := [word for word, found in fitting.items() if not found]:
        names = ", ".join(impl.name for impl in every)
        raise ValueError(f"--impls: expected parts of the names {names}, got {' '.join(unknown)}")
    return [ours, *(impl for impl in others if any(impl in found for found in fitting.values()))]


def summary(row: Row) -> str:
    """A line about one row."""
    name = f"{title(row['shape']):<32} {row['impl']:<26} {row['direction']:<8}"
    if row["ms"] is None:
        return f"{name} {'out of memory' if row.get('oom') else row.get('error') or row.get('skipped')}"
    units = {"ms": "ms", "tflops": "TFLOP/s", "fraction": "of matmul", "peak_gib": "GiB"}
    return name + "".join(f" {row[key]:9.2f} {unit}" for key, unit in units.items() if row.get(key) is not None)
