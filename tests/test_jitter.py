"""The search for races of jitter.py, and that every barrier of the kernels takes part.

That results which differ are noticed, and that owners are split, mutants.txt shows.
"""

from __future__ import annotations

import re
from pathlib import Path

import jitter
import pytest
from mutants import has_hopper

PTX = Path(__file__).resolve().parent.parent / "csrc/ptx"
BARRIER = re.compile(r"mbarrier\.(?:arrive|try_wait|test_wait)|bar\.(?:sync|arrive|red)|barrier\.(?:sync|arrive|red)")
FUNCTION = re.compile(r"__device__ __forceinline__ \w+ (\w+)\([^)]*\) \{(.*?)\n?\}\n", re.S)


def test_every_barrier_pauses_first() -> None:
    """All functions of csrc/ptx that arrive on a barrier or wait for one, and nothing else has barriers."""
    found = []
    for path in sorted(PTX.glob("*.h")):
        text = path.read_text()
        bodies = {name: body for name, body in FUNCTION.findall(text) if BARRIER.search(body)}
        assert all(body.index("jitter(") < body.index("asm") for body in bodies.values()), path
        code = re.sub(r"//.*", "", text)
        assert sum(len(BARRIER.findall(body)) for body in bodies.values()) == len(BARRIER.findall(code)), path
        found += bodies
    assert {"mbarrier_arrive", "mbarrier_wait", "named_barrier_sync", "named_barrier_arrive"} <= set(found)
    assert f"#ifdef {jitter.FLAGS['NVCC_APPEND_FLAGS'].removeprefix('-D')}\n" in (PTX / "jitter.h").read_text()
    kernels = [path for path in PTX.parent.rglob("*") if path.suffix in (".h", ".cu") and path.parent != PTX]
    assert not [path for path in kernels if BARRIER.search(re.sub(r"//.*", "", path.read_text()))]


@pytest.mark.parametrize("file", jitter.TESTS)
def test_the_search_has_tests(file: str) -> None:
    assert "def test_results_repeat_bit_for_bit(" in (PTX.parent.parent / file).read_text()


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 512])
def test_no_races(head_dim: int, tmp_path: Path) -> None:
    if not has_hopper():
        pytest.skip("needs a GPU of compute capability 9.x")
    assert jitter.search(tmp_path, head_dim, runs=200) == "passed"
