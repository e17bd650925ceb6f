"""The search for races of jitter.py: every barrier of the kernels takes part, and what the repeated tests notice."""

from __future__ import annotations

import re
from ctypes import CDLL
from pathlib import Path

import jitter
import pytest
import test_kernels_properties as properties
import torch
from groups import Batch, Group, Results, build_groups
from mutants import has_hopper
from test_geometry import Tables, record, shim  # noqa: F401

from flash_attn_dualkv.segments import build_segment_tables

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


@pytest.mark.parametrize("tiles", [(64, 128), (128, 128)], ids=str)
def test_the_calls_have_long_walks_and_split_owners(
    tiles: tuple[int, int],
    shim: CDLL,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU of 132 multiprocessors; the steps of an owner are several rounds of every buffer."""

    def recorded(batch: Batch) -> object:
        rows = [len(one) for one in (batch.q, batch.k_context, batch.k_decoded)]
        offsets = (batch.cu_seqlens_q, batch.cu_seqlens_k_decoded, batch.cu_seqlens_context, batch.cu_seqs_per_context)
        tables = Tables(*(one.numpy() for one in build_segment_tables(*offsets, rows[1])), *rows)
        heads, kv_heads = batch.q.shape[1], batch.k_context.shape[1]
        return record(shim.record_backward, tables.problem(True, tiles, heads // kv_heads, kv_heads, 132), None, 0)

    monkeypatch.setattr(properties, "DEVICE", "cuda")  # its sizes, not its memory
    options = dict(head_dim=8, heads=(8, 2), dtype=torch.float32)
    mixed, long = (recorded(build_groups(groups, **options)) for groups in (properties.MIXED, properties.LONG))
    assert recorded(properties.split_owner_batch(options)).slots > 0
    assert min(mixed.masked_steps, mixed.steps - mixed.masked_steps) > 0
    assert long.steps / long.parts > 12


@pytest.mark.parametrize("deterministic", [True, False], ids=["deterministic", "default"])
@pytest.mark.parametrize("name", Results._fields)
def test_one_bit_that_differs_is_noticed(name: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the last run; but the default mode may differ in the last bits of dQ, as long as it is right."""
    batch = build_groups([Group(20, ((20, 0), (9, 9))), Group(3, ((5, 5),))], head_dim=16, dtype=torch.bfloat16)
    correct, calls, runs = properties.run, {True: 0, False: 0}, 3
    bit = 14 if name == "dq" and not deterministic else 0

    def faulty_run(batch: Batch, **options: bool) -> Results:
        mode = options.get("deterministic", False)
        calls[mode] += 1
        results = correct(batch, **options)
        if mode == deterministic and calls[mode] == runs:
            value = getattr(results, name)
            value.view({2: torch.int16, 4: torch.int32}[value.element_size()])[1, 1] ^= 1 << bit
        return results

    monkeypatch.setattr(properties, "poison_free_memory", lambda: None)
    properties.check_repeats(batch, runs)
    monkeypatch.setattr(properties, "run", faulty_run)
    with pytest.raises(AssertionError, match=name):
        properties.check_repeats(batch, runs)


@pytest.mark.slow
@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_no_races(head_dim: int, tmp_path: Path) -> None:
    if not has_hopper():
        pytest.skip("needs a GPU of compute capability 9.x")
    assert jitter.search(tmp_path, head_dim, runs=200) == "passed"
