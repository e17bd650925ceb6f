"""The mutants of mutants.py fit the sources, and the tests that need no GPU catch theirs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mutants import GEOMETRY_MUTANTS, MUTANTS, PYTHON_MUTANTS, ROOT, Mutant, Tree
from test_geometry import COMPILER

# One of each kind; the others are run by -m slow, and all of them by mutants.py.
QUICK = (
    "forward: no causal mask within a tile",
    "backward: a foreign row behind a sequence is taken for its own",
    "ranges that see a part of the tile are merged",
    "backwards: a merged range has the positions of its last sequence",
    "an owner skips the first sequence of its group",
    "parts overlap by a step",
    "prompts do not attend to themselves",
    "prompts that begin alike are merged",
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_fits_the_sources(mutant: Mutant) -> None:
    assert mutant.broken(ROOT) != (ROOT / mutant.file).read_text()
    assert (ROOT / mutant.tests).is_file()


def test_names_are_unique() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(set(names)) == len(names)
    assert set(QUICK) <= set(names)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return Tree(tmp_path_factory.mktemp("mutants"))


@pytest.fixture(scope="module")
def collected(tree: Tree) -> dict[str, list[str]]:
    """Ids of the tests in each file that mutants name, found in a tree as mutants are built in."""
    files = sorted({mutant.tests for mutant in MUTANTS})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *files]
    result = subprocess.run(command, cwd=tree.root, env=tree.environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return {file: [line for line in result.stdout.splitlines() if line.startswith(file)] for file in files}


@pytest.mark.parametrize("mutant", [one for one in MUTANTS if not one.needs_gpu], ids=lambda mutant: mutant.name)
def test_the_selection_of_a_mutant_is_some_tests(mutant: Mutant, collected: dict[str, list[str]]) -> None:
    words = mutant.select.split(" and ")
    assert any(all(word in test for word in words) for test in collected[mutant.tests])


@pytest.mark.parametrize("mutant", [one for one in MUTANTS if one.needs_gpu], ids=lambda mutant: mutant.name)
def test_the_selection_of_a_kernel_mutant_is_some_tests_of_its_family(
    mutant: Mutant, collected: dict[str, list[str]]
) -> None:
    words = mutant.select.split(" and ")
    assert not any(" " in word for word in words), "more than words with `and` between them"
    selected = [test for test in collected[mutant.tests] if all(word in test for word in words)]
    assert selected
    assert mutant.head_dim == 64 or any(word.startswith(f"{mutant.head_dim}-") for word in words)
    if mutant.file.startswith("csrc/sm90"):
        assert mutant.needs_hopper and not any("sm80" in test for test in selected)
    if mutant.file.startswith("csrc/sm80"):
        assert not any("sm90" in test for test in selected)


def each_of(mutants: list[Mutant]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "mutant",
        [pytest.param(one, marks=() if one.name in QUICK else pytest.mark.slow, id=one.name) for one in mutants],
    )


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
@each_of(GEOMETRY_MUTANTS)
def test_geometry_tests_catch_their_mutants(mutant: Mutant, tree: Tree) -> None:
    assert tree.verdict(mutant) == "caught"


@each_of(PYTHON_MUTANTS)
def test_python_tests_catch_their_mutants(mutant: Mutant, tree: Tree) -> None:
    assert tree.verdict(mutant) == "caught"


def test_a_mutant_that_changes_nothing_survives(tree: Tree) -> None:
    harmless = Mutant(
        "harmless", "csrc/core/kv_regions.h", "#pragma once\n", "#pragma once\n\n", "tests/test_geometry.py", "border"
    )
    assert tree.verdict(harmless) == "SURVIVED"


def test_a_text_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a a")
    for old in ("a", "b"):
        with pytest.raises(ValueError, match="expected 1"):
            Mutant("x", "file", old, "c", "tests").broken(tmp_path)
