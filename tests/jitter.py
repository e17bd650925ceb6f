"""Looks for races with a build whose warps pause at random in front of every barrier.

The tree is copied to a folder and built there with -DDUALKV_JITTER (csrc/ptx/jitter.h). The tests that results repeat
bit for bit run there, in a process of their own: races can also hang.
"""

from __future__ import annotations

from pathlib import Path

from mutants import Tree

TESTS = ("tests/test_kernels_properties.py", "tests/test_tree_kernels.py")
FLAGS = {"NVCC_APPEND_FLAGS": "-DDUALKV_JITTER"}


def serialised(objects: Path) -> list[str]:
    """What the compiler says of products that wait for each other: a race with one of them cannot show."""
    logs = sorted(objects.glob("sm90_*.log"))
    assert logs, f"no messages of the compiler in {objects}"
    return [f"{log.stem}: {line}" for log in logs for line in log.read_text().splitlines() if "(C75" in line]


def search(folder: Path, head_dim: int, runs: int) -> str:
    """The verdict of `runs` runs of every call in each mode: "passed", or what the tests say."""
    settings = {"DUALKV_ARCHS": "90", "DUALKV_HEAD_DIMS": str(head_dim), "DUALKV_TEST_REPEATS": str(runs)}
    tree = Tree(folder, **FLAGS, **settings)
    tree.build()
    print(*serialised(tree.root / "build/objects"), sep="\n")
    for file in TESTS:
        verdict = tree.test(file, f"repeat_bit_for_bit and sm90 and d{head_dim}-")
        if verdict != "passed":
            return f"{file}: {tree.output}\n{verdict}"
    return "passed"
