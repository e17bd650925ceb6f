# SPDX-License-Identifier: BSD-3-Clause
"""The mutants of mutants.txt fit the sources, and the tests catch theirs.

Quick are one of Python and one of what is compiled for the host; -m slow runs the others. Those of the kernels need a
build each: -m slow -k csrc/sm90 are those of a folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from geometry import COMPILER
from mutants import COMPILED_FOR_THE_HOST, ROOT, TABLE, Mutant, Tree, has_hopper, read_mutants

MUTANTS = read_mutants(TABLE.read_text())
FIRST_OF_KIND: dict[str, Mutant] = {}
for one in MUTANTS:
    if not one.is_of_kernels:
        FIRST_OF_KIND.setdefault("host" if one.tests in COMPILED_FOR_THE_HOST else "Python", one)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_fits_sources_and_tests(mutant: Mutant, tmp_path: Path) -> None:
    (tmp_path / mutant.file).parent.mkdir(parents=True)
    (tmp_path / mutant.file).write_text((ROOT / mutant.file).read_text())
    assert mutant.apply(tmp_path) != (tmp_path / mutant.file).read_text()
    test = mutant.select.partition(" ")[0]
    assert re.search(rf"def test_\w*{test.removeprefix('test_')}", (ROOT / mutant.tests).read_text())
    for family in ("sm80", "sm90"):
        if f"/{family}" in mutant.file:
            assert family in mutant.select or "[64-" in mutant.select


def marks(mutant: Mutant) -> list[pytest.MarkDecorator]:
    return [] if mutant in FIRST_OF_KIND.values() else [pytest.mark.slow]


@pytest.fixture(scope="module")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, bool], Tree]:
    """Of a head dim the tree that is built for it: for the host, or else for the GPU here."""

    @cache
    def tree(head_dim: int, on_host: bool) -> Tree:
        place = {"DUALKV_TEST_DEVICE": "host"} if on_host else {}
        return Tree(tmp_path_factory.mktemp("mutants"), DUALKV_HEAD_DIMS=str(head_dim), **place)

    return tree


@cache
def unchanged(tree: Tree, tests: str, select: str) -> str:
    """What the tests say of the kernels as they are."""
    tree.build()
    return tree.test(tests, select)


@pytest.mark.parametrize("mutant", [pytest.param(m, marks=marks(m), id=f"{m.file}: {m.name}") for m in MUTANTS])
def test_tests_catch_their_mutants(mutant: Mutant, trees: Callable[[int, bool], Tree]) -> None:
    if COMPILER is None and (mutant.tests in COMPILED_FOR_THE_HOST or mutant.is_of_kernels):
        pytest.skip("no C++ compiler")
    if mutant.needs_gpu and not has_hopper():
        pytest.skip("its tests need a GPU of compute capability 9.x")
    tree = trees(mutant.head_dim, mutant.only_on_host or not has_hopper())
    if mutant.is_of_kernels:
        assert unchanged(tree, mutant.tests, mutant.select) == "passed", tree.output
    verdict = tree.verdict(mutant)
    if verdict == "SKIPPED":  # CI's job asks in the environments of all trainers
        pytest.skip(f"{mutant.tests} needs a package that is not installed")
    assert verdict == "caught"


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_a_mutant_that_changes_nothing_survives(trees: Callable[[int, bool], Tree]) -> None:
    tests = "tests/kernels/test_geometry.py"
    harmless = Mutant("harmless", "csrc/core/nodes.h", tests, "leave_few_rows", "#pragma", "#pragma ")
    assert trees(harmless.head_dim, True).verdict(harmless) == "SURVIVED"


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_a_missing_package_skips_and_a_word_that_selects_nothing_does_not(trees: Callable[[int, bool], Tree]) -> None:
    tree = trees(64, True)
    (tree.root / "tests/test_missing.py").write_text('import pytest\n\npytest.importorskip("no_such_package")\n')
    assert tree.test("tests/test_missing.py", "") == "skipped"
    assert tree.test("tests/package/test_weight.py", "no_such_name") == "broken"
