"""Runs a small matrix of calls under compute-sanitizer.

    python tests/sanitize.py                      every tool; prints a table, exit status 1 if one found something
    python tests/sanitize.py --tools memcheck     some of the tools
    python tests/sanitize.py --run hostile        part of the matrix in this process, without a sanitizer

Memory is allocated tensor by tensor (no caching allocator), so that an access past a tensor is an access past an
allocation. racecheck looks at a build of its own on Hopper, see FOLLOWED.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from groups import Batch, Group, build_groups, pack, run
from launches import CHOICE, DEVICE, kernel_families, only_kernels_of, use_kernels
from mutants import Tree, has_hopper

HEAD_DIMS = (64, 80, 96, 128, 192, 256)
HOSTILE_HEAD_DIMS = (64, 128, 256)  # one of each shape of kernel: what happens to offsets does not depend on it
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
UNSUPPORTED = ("Device not supported", "No attachable process", "InitializationError")


class Change(NamedTuple):
    """Text that stands exactly once in a file, and what takes its place."""

    file: str
    old: str
    new: str

    def apply(self, root: Path) -> None:
        text = (root / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file}: {text.count(self.old)} places have the text {self.old!r}, expected 1")
        (root / self.file).write_text(text.replace(self.old, self.new))


# racecheck knows neither that __syncwarp orders the accesses of a warp before the arrival of its first lane, nor what
# bar.arrive orders: it reports hazards between accesses that these separate. For it every lane arrives, all warps wait.
FOLLOWED = (
    Change(
        "csrc/sm90/tile.h",
        "ptx::mbarrier_init(empty(), consumer_warps);",
        "ptx::mbarrier_init(empty(), consumer_warps * 32);",
    ),
    Change("csrc/sm90/tile.h", "if (lane == 0) ptx::mbarrier_arrive(empty());", "ptx::mbarrier_arrive(empty());"),
    Change(
        "csrc/sm90/backward.h",
        "ptx::named_barrier_arrive(kBarrierWarpgroup + group, kWarpgroup);",
        "ptx::named_barrier_sync(kBarrierWarpgroup + group, kWarpgroup);",
    ),
    Change(
        "csrc/sm90/backward_wide.h",
        "probabilities_ready(buffer).init(4, 4);",
        "probabilities_ready(buffer).init(4, 128);",
    ),
    Change(
        "csrc/sm90/backward_wide.h",
        "if (lane == 0) ptx::mbarrier_arrive(ready.full());",
        "ptx::mbarrier_arrive(ready.full());",
    ),
)

RAGGED = (
    Group(70, ((70, 0), (33, 33), (1, 1), (0, 0), (65, 65))),
    Group(0, ((40, 40), (9, 4))),
    Group(5, ()),
    Group(129, ((140, 11), (0, 30), (64, 64))),
)


class Call(NamedTuple):
    name: str
    batch: Batch
    trusted: bool  # offsets are honest, so that results must be finite


def dtype_of(index: int) -> torch.dtype:
    return (torch.bfloat16, torch.float16)[index % 2]


def ragged_calls(head_dim: int) -> Iterator[Call]:
    for index, (causal, packed) in enumerate(product((True, False), (False, True))):
        batch = build_groups(
            RAGGED, head_dim=head_dim, heads=(4, 2), dtype=dtype_of(index), causal=causal, device=DEVICE, slack=(3, 70)
        )
        yield Call(f"ragged, causal={causal}, packed={packed}", pack(batch) if packed else batch, True)


def split_calls(head_dim: int) -> Iterator[Call]:
    """Enough queries of one KV head that the owners of the context are split."""
    groups = [Group(40, ((40, 0), *(((16, 16),) * 40)))]
    for index, causal in enumerate((True, False)):
        batch = build_groups(
            groups, head_dim=head_dim, heads=(8, 1), dtype=dtype_of(index), causal=causal, device=DEVICE
        )
        yield Call(f"split owners, causal={causal}", batch, True)


HOSTILE_OFFSETS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "negative": lambda cu, rows: cu - rows - 7,
    "huge": lambda cu, rows: cu * 0 + torch.iinfo(torch.int32).max,
    "most negative": lambda cu, rows: cu * 0 + torch.iinfo(torch.int32).min,
    "alternating extremes": lambda cu, rows: torch.where(
        torch.arange(len(cu), device=cu.device) % 2 == 0, torch.iinfo(torch.int32).min, torch.iinfo(torch.int32).max
    ).to(torch.int32),
    "decreasing": lambda cu, rows: cu.flip(0),
    "past the end": lambda cu, rows: cu + rows // 2,
    "everything each time": lambda cu, rows: (torch.arange(len(cu), device=cu.device) % 2 * rows).to(torch.int32),
    "random": lambda cu, rows: torch.randint(-2 * rows - 2, 3 * rows + 3, cu.shape, dtype=torch.int32).to(cu.device),
}
OFFSETS = ("cu_seqlens_q", "cu_seqlens_k_decoded", "cu_seqlens_context", "cu_seqs_per_context")


def hostile_calls(head_dim: int) -> Iterator[Call]:
    """Each kind of hostile offsets in every single argument, and in all of them at once."""
    torch.manual_seed(0)
    for index, (kind, names) in enumerate(product(HOSTILE_OFFSETS, (*((name,) for name in OFFSETS), OFFSETS))):
        batch = build_groups(
            RAGGED, head_dim=head_dim, heads=(4, 2), dtype=dtype_of(index), causal=index % 3 != 0, device=DEVICE
        )
        limits = dict(zip(OFFSETS, (len(batch.q), len(batch.k_decoded), len(batch.k_context), len(batch.table))))
        changed = {name: HOSTILE_OFFSETS[kind](getattr(batch, name), limits[name]) for name in names}
        yield Call(f"hostile, {kind} {' '.join(names)}", batch.replace(**changed), False)


PARTS: dict[str, Callable[[int], Iterator[Call]]] = {
    "ragged": ragged_calls,
    "split": split_calls,
    "hostile": hostile_calls,
}


def check_finite(call: Call) -> None:
    for name, value in run(call.batch)._asdict().items():
        host = value.cpu()  # a device-side check would be one more kernel under the sanitizer
        good = host.isfinite() | host.isneginf() if name == "lse" else host.isfinite()
        if not bool(good.all()):
            raise AssertionError(f"{call.name}: {int((~good).sum())} of {good.numel()} values of {name} are not finite")


def run_hostile_tables(head_dim: int) -> None:
    """The operators with tables of arbitrary numbers, as a caller with ready-made tables could pass them."""
    import flash_attn_dualkv  # noqa: F401  (registers the operators)

    operators = torch.ops.flash_attn_dualkv
    batch = build_groups(RAGGED, head_dim=head_dim, heads=(4, 2), device=DEVICE)
    for bits in (4, 9, 31):
        size = 2**bits - 1
        segments = torch.randint(-size, size, (9, 8), dtype=torch.int32, device=DEVICE)
        groups = torch.randint(-size, size, (4, 4), dtype=torch.int32, device=DEVICE)
        for causal in (True, False):
            arguments = (*batch.inputs, segments, groups, 0.1, causal)
            out, lse = operators.forward(*arguments)
            for deterministic in (True, False):
                operators.backward(
                    batch.dout, None, *batch.inputs, out, lse, segments, groups, 0.1, causal, deterministic
                )
    torch.cuda.synchronize()


def run_call(call: Call) -> None:
    """Default and deterministic."""
    if call.trusted:
        check_finite(call)
    else:
        run(call.batch)
    run(call.batch, deterministic=True)
    torch.cuda.synchronize()


def run_part(part: str, head_dims: tuple[int, ...]) -> None:
    """Every call of a part in this process, by the family of kernels that the environment asks for, or by each.

    Raises AssertionError if the kernels of another family took over some of the work.
    """
    families = [os.environ[CHOICE]] if CHOICE in os.environ else kernel_families()
    if part == "hostile":
        head_dims = tuple(dim for dim in head_dims if dim in HOSTILE_HEAD_DIMS) or head_dims
    for family, head_dim in product(families, head_dims):
        with use_kernels(family), only_kernels_of(family):
            for call in PARTS[part](head_dim):
                print(f"{family} d={head_dim} {call.name}", flush=True)
                run_call(call)
            if part == "hostile":
                run_hostile_tables(head_dim)


class Outcome(NamedTuple):
    tool: str
    verdict: str  # "clean", "N errors", "timeout", "unsupported", "no build", "failed"
    seconds: float
    log: str


def sanitizer_path() -> str | None:
    """compute-sanitizer from PATH, CUDA_HOME or the usual place."""
    folders = [folder for folder in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if folder]
    candidates = [f"{folder}/bin/compute-sanitizer" for folder in folders]
    return shutil.which("compute-sanitizer") or next((path for path in candidates if Path(path).exists()), None)


def command_for(tool: str, path: str, script: Path, parts: list[str], head_dims: tuple[int, ...]) -> list[str]:
    # initcheck must see every write to memory; the others look at this library's kernels alone.
    which = [] if tool == "initcheck" else ["--kernel-regex", "kns=dualkv"]
    # Hostile offsets are a question of memory, and by far the most calls.
    chosen = [part for part in parts if part != "hostile" or tool == "memcheck"] or parts
    run_these = [word for part in chosen for word in ("--run", part)]
    dims = [word for dim in head_dims for word in ("--head-dim", str(dim))]
    return [path, "--tool", tool, "--error-exitcode", "99", *which, sys.executable, str(script), *run_these, *dims]


def judge(text: str, returncode: int) -> str:
    """What a tool's output says."""
    if any(phrase in text for phrase in UNSUPPORTED):
        return "unsupported"
    counts = [int(first or second) for first, second in SUMMARY.findall(text)]
    if not counts:
        return "failed"
    if sum(counts):
        return f"{sum(counts)} errors"
    return "clean" if returncode == 0 else "failed"


@contextmanager
def script_for(tool: str) -> Iterator[tuple[Path, Mapping[str, str]]]:
    """This script, with the build that the tool is to look at, and the environment in which it finds that build."""
    if tool != "racecheck" or not has_hopper():
        yield Path(__file__).resolve(), {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        return
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder), DUALKV_ARCHS="90")
        for change in FOLLOWED:
            change.apply(tree.root)
        tree.build()
        yield tree.root / "tests/sanitize.py", tree.environment


def run_tool(tool: str, path: str, parts: list[str], head_dims: tuple[int, ...], timeout: float) -> Outcome:
    started = time.monotonic()
    try:
        with script_for(tool) as (script, settings):
            environment = {**settings, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
            environment.pop("DUALKV_DEBUG", None)
            result = subprocess.run(
                command_for(tool, path, script, parts, head_dims), env=environment, timeout=timeout, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
    except subprocess.TimeoutExpired as expired:
        text = expired.stdout.decode(errors="replace") if isinstance(expired.stdout, bytes) else expired.stdout or ""
        return Outcome(tool, "timeout", time.monotonic() - started, text)
    except subprocess.CalledProcessError as error:
        return Outcome(tool, "no build", time.monotonic() - started, f"{error.stdout}{error.stderr}")
    return Outcome(tool, judge(result.stdout, result.returncode), time.monotonic() - started, result.stdout)


def report(outcomes: list[Outcome]) -> int:
    """Prints the table, and the end of the log of every tool that is not content. Returns the exit status."""
    for outcome in outcomes:
        if outcome.verdict != "clean":
            print(f"--- {outcome.tool} ---\n{outcome.log[-6000:]}")
    print(f"{'tool':<12}{'verdict':<16}{'seconds':>8}")
    for outcome in outcomes:
        print(f"{outcome.tool:<12}{outcome.verdict:<16}{outcome.seconds:>8.0f}")
    return 0 if all(outcome.verdict == "clean" for outcome in outcomes) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS), help="of the matrix")
    parser.add_argument("--head-dim", type=int, action="append", choices=HEAD_DIMS, help="may be repeated")
    parser.add_argument("--run", action="append", choices=list(PARTS), help="in this process, without a sanitizer")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds a tool may take")
    arguments = parser.parse_args()
    head_dims = tuple(arguments.head_dim or HEAD_DIMS)
    if arguments.run:
        for part in arguments.run:
            run_part(part, head_dims)
        # Autograd's worker thread may still be letting go of the last graph, and dies if the interpreter goes first.
        time.sleep(0.5)
        return 0
    path = sanitizer_path()
    if path is None:
        print("compute-sanitizer is neither in PATH nor in CUDA_HOME/bin; it comes with the CUDA toolkit")
        return 1
    outcomes = []
    for tool in arguments.tools:
        print(f"{tool} ...", flush=True)
        outcomes.append(run_tool(tool, path, arguments.parts, head_dims, arguments.timeout))
    return report(outcomes)


if __name__ == "__main__":
    sys.exit(main())
