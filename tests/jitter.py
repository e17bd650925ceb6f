"""Looks for races in the Hopper kernels with a build whose warps pause at random in front of every barrier.

    python tests/jitter.py                        head dims 64 and 128, 200 runs of every call
    python tests/jitter.py --head-dim 256 --runs 1000
    python tests/jitter.py --run                  with the kernels that are installed, in this process

The tree is copied to a temporary folder and built there with DUALKV_JITTER=1 (csrc/ptx/jitter.h). Every call is then
repeated forward and backward: all results of the deterministic mode, and all but dQ of the default mode, must repeat
bit for bit; the first ones, and every dQ of the default mode, must obey the accuracy rule of oracle.py.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import oracle
import torch
from groups import Batch, Group, Results, build_groups, pack, run
from launches import DEVICE, kernel_families, only_kernels_of, poison_free_memory, use_kernels
from mutants import ROOT, Tree

HEAD_DIMS = (64, 128, 192, 256)
DEFAULT_HEAD_DIMS = (64, 128)
OBJECTS = "build/objects"  # where tools/extension.py puts the compiler's messages

# Lengths on both sides of tile borders, a prompt, rows without keys, an empty sequence, a context without owners.
RAGGED = (
    Group(150, ((150, 0), (70, 70), (1, 1), (0, 0), (129, 129), (33, 65))),
    Group(0, ((40, 40), (9, 4))),
    Group(37, ()),
    Group(391, ((391, 0), (85, 20), (0, 30), (64, 64), (257, 257))),
)
# Long walks, in which every buffer is used again many times.
LONG = (Group(900, ((900, 0), (300, 300), (515, 515))), Group(130, ((250, 250), (130, 130))))
# So many queries of one KV head that the owners of the context are split.
SPLIT = (Group(200, ((200, 0), *(((64, 64),) * 48))), Group(65, ((65, 65),)))


class Call(NamedTuple):
    name: str
    batch: Batch


def calls(head_dim: int, device: str) -> Iterator[Call]:
    """The calls that are repeated, for one head dim."""
    bf16, fp16 = torch.bfloat16, torch.float16
    for name, groups, heads, dtype, causal in (
        ("ragged groups", RAGGED, (8, 2), bf16, True),
        ("ragged groups", RAGGED, (4, 4), fp16, False),
        ("long sequences", LONG, (8, 2), fp16, True),
        ("split owners", SPLIT, (8, 1), bf16, True),
    ):
        batch = build_groups(groups, head_dim=head_dim, heads=heads, dtype=dtype, causal=causal, device=device)
        yield Call(f"{name}, {'causal' if causal else 'full'}, {dtype}", batch if causal else pack(batch))


def assert_repeats(actual: Results, first: Results, *, but: str = "") -> None:
    """Every result but the named one has the bits of the first run."""
    for name, value in actual._asdict().items():
        if name != but:
            oracle.assert_bits_equal(name, value, getattr(first, name))


def repeat(batch: Batch, runs: int) -> None:
    """Raises AssertionError if any of `runs` calls in either mode differs from the first, or from fp64."""
    deterministic, default = run(batch, deterministic=True), run(batch)
    oracle.check(batch, deterministic, default)
    expected, plain = oracle.reference(batch).dq, oracle.plain(batch).dq
    for number in range(1, runs):
        try:
            poison_free_memory()  # scratch memory of the run before would hold the right values
            assert_repeats(run(batch, deterministic=True), deterministic)
            poison_free_memory()
            again = run(batch)
            assert_repeats(again, default, but="dq")  # its additions come in any order
            problems = oracle.violations("dq", again.dq, plain, expected, batch.q.dtype)
            assert not problems, "; ".join(problems)
        except AssertionError as error:
            raise AssertionError(f"run {number + 1}: {error}") from None


def run_calls(head_dims: tuple[int, ...], runs: int) -> int:
    """Repeats every call in this process and prints a line for each. Returns the exit status."""
    failures = 0
    with use_kernels("sm90"):
        for head_dim in head_dims:
            for call in calls(head_dim, DEVICE):
                started = time.monotonic()
                try:
                    with only_kernels_of("sm90"):
                        repeat(call.batch, runs)
                    verdict = f"{runs} runs in each mode repeat"
                except AssertionError as error:
                    failures += 1
                    verdict = f"FAILED: {error}"
                print(f"{time.monotonic() - started:5.1f} s  d={head_dim} {call.name}: {verdict}", flush=True)
    return int(failures > 0)


def foreign_package() -> Path | None:
    """The package's folder, where a build that pauses is asked for and this is not the one beside this file."""
    import flash_attn_dualkv

    package = Path(flash_attn_dualkv.__file__).resolve().parent
    return package if os.environ.get("DUALKV_JITTER") == "1" and package.parent != ROOT else None


def settings(head_dims: tuple[int, ...]) -> dict[str, str]:
    """The environment of the build."""
    return {"DUALKV_JITTER": "1", "DUALKV_ARCHS": "90", "DUALKV_HEAD_DIMS": ",".join(map(str, head_dims))}


def serialised(objects: Path) -> list[str]:
    """What the compiler says of products that wait for each other: a race with one of them cannot show."""
    logs = sorted(objects.glob("sm90_*.log"))
    assert logs, f"no messages of the compiler in {objects}"
    return [f"{log.stem}: {line}" for log in logs for line in log.read_text().splitlines() if "(C75" in line]


def build_and_run(head_dims: tuple[int, ...], runs: int, timeout: float) -> int:
    """Builds the kernels that pause and repeats the calls with them, in a process of its own: races can also hang."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder), **settings(head_dims))
        started = time.monotonic()
        try:
            tree.build()
        except subprocess.CalledProcessError as error:
            print(f"FAILED: the build\n{error.stdout}{error.stderr}"[-6000:])
            return 1
        print("\n".join([f"{time.monotonic() - started:5.1f} s  build", *serialised(tree.root / OBJECTS)]), flush=True)
        command = [sys.executable, str(tree.root / "tests/jitter.py"), "--run", "--runs", str(runs)]
        command += [word for head_dim in head_dims for word in ("--head-dim", str(head_dim))]
        try:
            return subprocess.run(command, cwd=tree.root, env=tree.environment, timeout=timeout).returncode
        except subprocess.TimeoutExpired:
            print(f"FAILED: not done after {timeout:.0f} s")
            return 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, action="append", choices=HEAD_DIMS, help="may be repeated")
    parser.add_argument("--runs", type=int, default=200, help="of every call, in each mode")
    parser.add_argument("--run", action="store_true", help="with the installed kernels, whether they pause or not")
    parser.add_argument("--timeout", type=float, default=600, help="seconds that all runs together may take")
    arguments = parser.parse_args()
    head_dims = tuple(arguments.head_dim or DEFAULT_HEAD_DIMS)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        print("needs a GPU of compute capability 9.x")
        return 2
    if not arguments.run:
        return build_and_run(head_dims, arguments.runs, arguments.timeout)
    if foreign_package() is not None or "sm90" not in kernel_families():
        print(f"needs kernels for compute capability 9.0, and those of {ROOT} if they shall pause")
        return 2
    return run_calls(head_dims, arguments.runs)


if __name__ == "__main__":
    sys.exit(main())
