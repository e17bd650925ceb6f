"""The mutants of mutants.txt fit the sources, and the tests that need no GPU catch theirs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mutants import COMPILED_FOR_THE_HOST, ROOT, TABLE, Mutant, Tree, read_mutants
from test_geometry import COMPILER

MUTANTS = read_mutants(TABLE.read_text())
ON_ANY_MACHINE = [mutant for mutant in MUTANTS if not mutant.needs_gpu]
# One of Python and one for each file of tests that are compiled; -m slow runs the others.
FIRST_OF_KIND: dict[str, Mutant] = {}
for one in ON_ANY_MACHINE:
    FIRST_OF_KIND.setdefault(one.tests if one.tests in COMPILED_FOR_THE_HOST else "Python", one)
QUICK = FIRST_OF_KIND.values()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_fits_sources_and_tests(mutant: Mutant, tmp_path: Path) -> None:
    (tmp_path / mutant.file).parent.mkdir(parents=True)
    (tmp_path / mutant.file).write_text((ROOT / mutant.file).read_text())
    assert mutant.apply(tmp_path) != (tmp_path / mutant.file).read_text()
    test = mutant.select.partition(" ")[0]
    assert re.search(rf"def test_\w*{test.removeprefix('test_')}", (ROOT / mutant.tests).read_text())
    for family in ("sm80", "sm90"):
        if f"csrc/{family}" in mutant.file:
            assert family in mutant.select or "64-64" in mutant.select


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    return Tree(tmp_path_factory.mktemp("mutants"))


@pytest.mark.parametrize(
    "mutant", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow, id=one.name) for one in ON_ANY_MACHINE]
)
def test_tests_catch_their_mutants(mutant: Mutant, tree: Tree) -> None:
    if COMPILER is None and mutant.tests in COMPILED_FOR_THE_HOST:
        pytest.skip("no C++ compiler")
    assert tree.verdict(mutant) == "caught"


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_a_mutant_that_changes_nothing_survives(tree: Tree) -> None:
    harmless = Mutant("harmless", "csrc/core/kv_regions.h", "tests/test_geometry.py", "border", "#pragma", "#pragma ")
    assert tree.verdict(harmless) == "SURVIVED"


def test_a_text_that_does_not_stand_once_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a a")
    for old in ("a", "b", ""):
        with pytest.raises(ValueError, match="expected 1"):
            Mutant("x", "file", "tests", old=old, new="c").apply(tmp_path)
