# SPDX-License-Identifier: BSD-3-Clause
"""Looks for races with a build whose warps pause at random in front of every barrier.

    pytest -m slow tests/kernels/test_races.py                                        everything, 200 times
    python tests/helpers/jitter.py FOLDER --cases trees packs --runs 40               some of it
    python tests/helpers/jitter.py FOLDER --head-dim 128 --only build                 first here, then where a GPU is:
    python tests/helpers/jitter.py FOLDER --head-dim 128 --only run --cases packs

The tree is copied to a folder and built there with -DDUALKV_JITTER (csrc/ptx/jitter.h). The tests that results repeat
bit for bit run there, in a process of their own: races can also hang.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mutants import Tree

# By the name of a case: the file of its tests, what their names begin with, and the head dims it is
# about if not all.
CASES: dict[str, tuple[str, str, tuple[int, ...] | None]] = {
    "sequences": ("tests/kernels/test_properties.py", "test_results_repeat_bit_for_bit", None),
    "trees": ("tests/kernels/test_tree.py", "test_results_repeat_bit_for_bit", None),
    "packs": ("tests/kernels/test_tree.py", "test_packs_repeat_bit_for_bit", (64, 128)),
    "decode": ("tests/kernels/test_decode.py", "test_results_repeat_bit_for_bit", (64, 128, 256, 576)),
}
FLAGS = {"NVCC_APPEND_FLAGS": "-DDUALKV_JITTER"}


def serialised(objects: Path) -> list[str]:
    """What the compiler says of products that wait for each other: a race with one of them cannot show."""
    logs = sorted(objects.glob("sm90_*.log"))
    assert logs, f"no messages of the compiler in {objects}"
    return [f"{log.stem}: {line}" for log in logs for line in log.read_text().splitlines() if "(C75" in line]


def jittered(folder: Path, head_dims: Sequence[int], runs: int, is_built: bool = False) -> Tree:
    """The tree in the folder; ``is_built``: it is there already, from an earlier call with these head dims."""
    settings = {"DUALKV_ARCHS": "90", "DUALKV_HEAD_DIMS": ",".join(map(str, head_dims))}
    return Tree(folder, is_there=is_built, **FLAGS, **settings, DUALKV_TEST_REPEATS=str(runs))


def build(tree: Tree) -> None:
    tree.build()
    print(*serialised(tree.root / "build/objects"), sep="\n")


def search(tree: Tree, head_dims: Sequence[int], cases: Sequence[str] = tuple(CASES)) -> str:
    """The verdict of all runs of every call in each mode: "passed", or what the tests say."""
    for case in cases:
        file, name, of_case = CASES[case]
        chosen = [dim for dim in head_dims if of_case is None or dim in of_case]
        if not chosen:
            continue
        verdict = tree.test(file, f"{name} and sm90 and ({' or '.join(f'd{dim}-' for dim in chosen)})")
        if verdict != "passed":
            return f"{case}: {tree.output}\n{verdict}"
        print(f"{case}: {tree.output.strip().rpartition(chr(10))[2]}", flush=True)
    return "passed"


def main(arguments: list[str] | None = None) -> int:
    """The command: 1 if something was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the copy of the tree")
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--runs", type=int, default=200, help="of every call in each mode (%(default)s)")
    parser.add_argument("--only", choices=("build", "run"), help="default: both")
    options = parser.parse_args(arguments)
    tree = jittered(options.folder, options.head_dim, options.runs, is_built=options.only == "run")
    if options.only != "run":
        build(tree)
    verdict = "built" if options.only == "build" else search(tree, options.head_dim, options.cases)
    print(verdict)
    return 0 if verdict in ("built", "passed") else 1


if __name__ == "__main__":
    sys.exit(main())
