# SPDX-License-Identifier: BSD-3-Clause
"""Breaks the sources on purpose, one place at a time; test_mutants.py demands that the named tests notice.

The mutants are in mutants.txt:

    @ a file of tests | pytest's -k (or neither) | host (only there they are sure to be noticed), for those that follow
    # source: what the change does
    - text that stands once in the source
    + what takes its place (without such a line nothing)

The tree is copied to a temporary folder first. For the kernels it is built there with one head dim alone, and again
after each change: for the GPU where there is one of Hopper, else for the host (host_kernels.py).
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_suffix(".txt")
FOLDERS = ("benchmarks", "csrc", "docs", "flash_attn_dualkv", "tests", "tools")
FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE")
IGNORED = shutil.ignore_patterns("*.so", "__pycache__", "results")
COMPILED_FOR_THE_HOST = tuple(
    f"tests/kernels/test_{name}.py"
    for name in ("geometry", "block_order", "work_list", "balance", "node_tables", "plan")
)
TEST_SECONDS = 600  # a mutant that hangs is caught, too
NONE_COLLECTED = 5  # pytest's exit status for a module that skips itself, and for words that select no test


@dataclass
class Mutant:
    """`old`, which stands once in `file`, becomes `new`; then the tests selected in the file `tests` must fail."""

    name: str
    file: str
    tests: str
    select: str = ""  # pytest's -k
    old: str = ""
    new: str = ""
    only_on_host: bool = False

    @property
    def is_of_kernels(self) -> bool:
        return not self.file.endswith(".py") and self.tests not in COMPILED_FOR_THE_HOST

    @property
    def needs_gpu(self) -> bool:
        """Its tests do: a host has less memory."""
        return self.select == "past_2_31"

    @property
    def head_dim(self) -> int:
        """The one to build for tests of kernels: configurations are named after theirs."""
        named = re.search(r"\bd(\d+)-", self.select)
        return int(named[1]) if named else 64

    def apply(self, root: Path) -> str:
        """Changes the file and returns its former text. ValueError unless the old text stands there exactly once."""
        path = root / self.file
        text = path.read_text()
        if not self.old or text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {text.count(self.old)} places in {self.file} have the text, expected 1")
        path.write_text(text.replace(self.old, self.new))
        return text


def read_mutants(text: str) -> list[Mutant]:
    """The mutants of a table in the format of mutants.txt."""
    mutants: list[Mutant] = []
    tests = select = place = ""
    for line in text.splitlines():
        kind, rest = line[:2], line[2:]
        if kind == "@ ":
            tests, select, place = (*rest.split(" | "), "", "")[:3]
        elif kind == "# ":
            file, _, name = rest.partition(": ")
            mutants.append(Mutant(name, file, tests, select, only_on_host=place == "host"))
        elif kind == "- ":
            mutants[-1].old = "\n".join(filter(None, [mutants[-1].old, rest]))
        elif kind == "+ ":
            mutants[-1].new = "\n".join(filter(None, [mutants[-1].new, rest]))
        elif line:
            raise ValueError(f"expected a line with @, #, - or +, got {line!r}")
    return mutants


class Tree:
    """A copy of the repository that is changed, built and tested, with `settings` in its environment.

    `is_there`: the copy is there already, built, maybe by another machine.
    """

    def __init__(self, folder: Path, is_there: bool = False, **settings: str) -> None:
        self.root, self.output = folder.resolve() / "tree", ""
        for name in () if is_there else FOLDERS:
            shutil.copytree(ROOT / name, self.root / name, ignore=IGNORED)
        for name in () if is_there else FILES:
            shutil.copy(ROOT / name, self.root / name)
        self.environment = {**os.environ, **settings}
        places = [self.root / name for name in ("", "tests/helpers", "tools", "benchmarks")]
        self.environment["PYTHONPATH"] = os.pathsep.join(map(str, places))

    def build(self) -> None:
        """Compiles the extension into the tree. CalledProcessError if that fails."""
        if self.environment.get("DUALKV_TEST_DEVICE") == "host":
            command = [sys.executable, "-c", "import host_kernels; host_kernels.build()"]
        else:
            command = [sys.executable, "setup.py", "build_ext", "--inplace"]
        subprocess.run(command, cwd=self.root, env=self.environment, check=True, capture_output=True, text=True)

    def test(self, tests: str, select: str) -> str:
        """The word of pytest: "passed", "failed", "hung", "crashed", "skipped" where a package is missing that all of
        the tests need, or "broken" where it could not run the tests at all.

        The end of all that it says is in `output`.
        """
        # Slow tests are asked, too: some mutants are noticed by no other.
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "", tests]
        # These need neither conftest.py nor hypothesis, which its plugin imports at the end.
        command += ["--noconftest", "-p", "no:hypothesispytest"] if tests in COMPILED_FOR_THE_HOST else []
        command += ["-k", select] if select else []
        # In a session of its own, so that ranks that hang end with it.
        with subprocess.Popen(
            command, cwd=self.root, env=self.environment, text=True, start_new_session=True, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:  # fmt: skip
            try:
                output, _ = process.communicate(timeout=TEST_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return "hung"
        self.output = output[-6000:]
        if process.returncode < 0:
            return "crashed"  # by a signal, in the middle of a test
        summary = output.strip().rpartition("\n")[2]
        if " error" in summary or process.returncode not in (0, 1, NONE_COLLECTED):
            return "broken"
        return next((word for word in ("failed", "passed", "skipped") if f" {word}" in summary), "broken")

    def verdict(self, mutant: Mutant) -> str:
        """Applies the mutant, builds, tests, and takes it back."""
        original = mutant.apply(self.root)
        try:
            if mutant.is_of_kernels:
                self.build()
            outcome = self.test(mutant.tests, mutant.select)
        except subprocess.CalledProcessError as error:
            print(f"{error.stdout}{error.stderr}"[-3000:], file=sys.stderr)
            outcome = "does not compile"
        finally:
            (self.root / mutant.file).write_text(original)
        verdicts = {"failed": "caught", "hung": "caught", "crashed": "caught", "passed": "SURVIVED"}
        return verdicts.get(outcome, outcome.upper())


def has_hopper() -> bool:
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
