"""Breaks the sources on purpose, one line at a time, and demands that the named tests notice.

    python tests/mutants.py              all mutants; those of the kernels need a GPU and a compiler
    python tests/mutants.py --cpu        the mutants of geometry and Python that tests must catch on any machine
    python tests/mutants.py --list

The tree is copied to a temporary folder first. For the kernels it is built there with one head dim alone, and again
after each change; the unchanged build must pass the same tests.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from hopper_mutations import HOPPER_MUTANTS
from kernel_mutations import PORTABLE_MUTANTS, SHARED_MUTANTS
from mutations import GEOMETRY_MUTANTS, Mutant
from python_mutations import PYTHON_MUTANTS

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("benchmarks", "csrc", "flash_attn_dualkv", "tests", "tools")
FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE")
IGNORED = shutil.ignore_patterns("*.so", "__pycache__", "results")
TEST_SECONDS = 600  # a mutant that hangs is caught, too

MUTANTS = [*GEOMETRY_MUTANTS, *PYTHON_MUTANTS, *SHARED_MUTANTS, *PORTABLE_MUTANTS, *HOPPER_MUTANTS]


class Tree:
    """A copy of the repository that is changed, built and tested, with `settings` in its environment."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.root = folder / "tree"
        for name in FOLDERS:
            shutil.copytree(ROOT / name, self.root / name, ignore=IGNORED)
        for name in FILES:
            shutil.copy(ROOT / name, self.root / name)
        self.environment = {**os.environ, **settings}
        self.environment["PYTHONPATH"] = os.pathsep.join([str(self.root), str(self.root / "tests")])

    def build(self) -> None:
        """Compiles the extension into the tree. CalledProcessError if that fails."""
        command = [sys.executable, "setup.py", "build_ext", "--inplace"]
        subprocess.run(command, cwd=self.root, env=self.environment, check=True, capture_output=True, text=True)

    def test(self, tests: str, select: str) -> str:
        """What pytest says: "passed", "failed", "hung", or "broken" where it could not run the tests at all."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", tests]
        command += ["-k", select] if select else []
        try:
            result = subprocess.run(
                command, cwd=self.root, env=self.environment, timeout=TEST_SECONDS, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            return "hung"
        summary = result.stdout.strip().rpartition("\n")[2]
        if " error" in summary or result.returncode not in (0, 1):
            return "broken"
        return next((word for word in ("failed", "passed") if f" {word}" in summary), "broken")

    def verdict(self, mutant: Mutant) -> str:
        """Applies the mutant, builds, tests, and takes it back."""
        path = self.root / mutant.file
        original = path.read_text()
        path.write_text(mutant.broken(self.root))
        try:
            if mutant.needs_gpu:
                self.build()
            outcome = self.test(mutant.tests, mutant.select)
        except subprocess.CalledProcessError as error:
            print(f"{error.stdout}{error.stderr}"[-3000:], file=sys.stderr)
            outcome = "does not compile"
        finally:
            path.write_text(original)
        return {"failed": "caught", "hung": "caught", "passed": "SURVIVED"}.get(outcome, outcome.upper())

    def baseline(self, mutants: Iterable[Mutant]) -> list[str]:
        """Selections of tests that the unchanged tree does not pass."""
        selections = sorted({(mutant.tests, mutant.select) for mutant in mutants})
        return [f"{tests} -k '{select}'" for tests, select in selections if self.test(tests, select) != "passed"]


def has_hopper() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9


def count_missed(mutants: list[Mutant], head_dim: int) -> int:
    """Prints a line for each mutant. Returns how many were not caught; all, if the unchanged tree fails."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder), DUALKV_HEAD_DIMS=str(head_dim))
        if any(mutant.needs_gpu for mutant in mutants):
            print(f"building the unchanged tree for head dim {head_dim}", flush=True)
            tree.build()
        failing = tree.baseline(mutants)
        if failing:
            print("the unchanged tree does not pass: " + "; ".join(failing))
            return len(mutants)
        missed = 0
        for mutant in mutants:
            started = time.monotonic()
            verdict = tree.verdict(mutant)
            missed += verdict != "caught"
            print(f"{verdict:<18}{time.monotonic() - started:6.0f} s  {mutant.name}", flush=True)
        return missed


def run_mutants(mutants: list[Mutant]) -> int:
    """The mutants that this machine can run, by the head dim that they need. Returns the exit status."""
    hopper = has_hopper()
    chosen = [mutant for mutant in mutants if hopper or not mutant.needs_hopper]
    if len(chosen) < len(mutants):
        print(f"{len(mutants) - len(chosen)} mutants need a GPU of compute capability 9.x and are left out")
    missed = 0
    for head_dim in sorted({mutant.head_dim for mutant in chosen}):
        missed += count_missed([mutant for mutant in chosen if mutant.head_dim == head_dim], head_dim)
    print(f"{len(chosen) - missed} of {len(chosen)} mutants caught")
    return int(missed > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="only what needs no GPU")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--only", metavar="TEXT", help="mutants with this in their name or file, such as csrc/sm90")
    arguments = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if not (arguments.cpu and mutant.needs_gpu)]
    if arguments.only:
        chosen = [mutant for mutant in chosen if arguments.only in f"{mutant.file} {mutant.name}"]
    if arguments.list:
        print("\n".join(f"{'gpu' if mutant.needs_gpu else 'cpu'}  {mutant.name}" for mutant in chosen))
        return 0
    return run_mutants(chosen)


if __name__ == "__main__":
    sys.exit(main())
