"""Looks for races in the Hopper kernels with a build whose warps pause at random in front of every barrier.

    python tests/jitter.py                        head dims 64 and 128, 200 runs of every call
    python tests/jitter.py --head-dim 256 --runs 1000

The tree is copied to a temporary folder and built there with -DDUALKV_JITTER (csrc/ptx/jitter.h). The tests that
results repeat bit for bit run there, in a process of their own: races can also hang.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from mutants import Tree, has_hopper

FLAGS = {"NVCC_APPEND_FLAGS": "-DDUALKV_JITTER"}
HEAD_DIMS = (64, 128, 192, 256)


def serialised(objects: Path) -> list[str]:
    """What the compiler says of products that wait for each other: a race with one of them cannot show."""
    logs = sorted(objects.glob("sm90_*.log"))
    assert logs, f"no messages of the compiler in {objects}"
    return [f"{log.stem}: {line}" for log in logs for line in log.read_text().splitlines() if "(C75" in line]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dim", type=int, action="append", choices=HEAD_DIMS, help="may be repeated")
    parser.add_argument("--runs", type=int, default=200, help="of every call, in each mode")
    arguments = parser.parse_args()
    if not has_hopper():
        print("needs a GPU of compute capability 9.x")
        return 2
    head_dims = arguments.head_dim or [64, 128]
    settings = {"DUALKV_ARCHS": "90", "DUALKV_HEAD_DIMS": ",".join(map(str, head_dims))}
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder), **FLAGS, **settings, DUALKV_TEST_REPEATS=str(arguments.runs))
        try:
            tree.build()
        except subprocess.CalledProcessError as error:
            print(f"FAILED: the build\n{error.stdout}{error.stderr}"[-6000:])
            return 1
        print("\n".join(serialised(tree.root / "build/objects")), flush=True)
        chosen = " or ".join(f"d{head_dim}-" for head_dim in head_dims)
        verdict = tree.test("tests/test_kernels_properties.py", f"repeat_bit_for_bit and sm90 and ({chosen})")
    print(f"{tree.output if verdict != 'passed' else ''}{arguments.runs} runs of every call: {verdict}")
    return int(verdict != "passed")


if __name__ == "__main__":
    sys.exit(main())
