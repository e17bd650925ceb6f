"""The search for races of jitter.py: its calls, what it notices, and that every barrier of the kernels takes part."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from ctypes import CDLL
from pathlib import Path

import extension
import jitter
import launches
import numpy as np
import pytest
import toolchain
import torch
from build_plan import CudaBuild, TorchBuild, plan_build
from groups import Batch, Group, Results, build_groups, rows_of
from test_geometry import Tables, record, shim  # noqa: F401
from toolchain import Nvcc

PTX = Path(__file__).resolve().parent.parent / "csrc/ptx"
HEADERS = ("ptx/mbarrier.h", "ptx/warpgroup.h")
BARRIER = re.compile(r"mbarrier\.(?:arrive|try_wait|test_wait)|bar\.(?:sync|arrive|red)|barrier\.(?:sync|arrive|red)")
FUNCTION = re.compile(r"__device__ __forceinline__ \w+ (\w+)\([^)]*\) \{(.*?)\n?\}\n", re.S)
KERNEL = """
__global__ void kernel(uint32_t barrier) {
  using namespace dualkv::ptx;
  mbarrier_arrive(barrier);
  mbarrier_arrive_expect(barrier, 16);
  mbarrier_wait(barrier, 0);
  named_barrier_sync(1, 32);
  named_barrier_arrive(2, 64);
}
"""


# --- the build --------------------------------------------------------------------------------------------------------


def barrier_functions() -> dict[str, str]:
    """Body of every function of csrc/ptx that arrives on a barrier or waits for one."""
    found = {}
    for path in sorted(PTX.glob("*.h")):
        text = path.read_text()
        bodies = {name: body for name, body in FUNCTION.findall(text) if BARRIER.search(body)}
        code = re.sub(r"//.*", "", text)
        assert sum(len(BARRIER.findall(body)) for body in bodies.values()) == len(BARRIER.findall(code)), path
        found |= bodies
    return found


def test_every_barrier_pauses_first() -> None:
    functions = barrier_functions()
    assert {"mbarrier_arrive", "mbarrier_arrive_expect", "mbarrier_wait"} < set(functions)
    assert {"named_barrier_sync", "named_barrier_arrive"} < set(functions)
    for name, body in functions.items():
        assert body.index("jitter(") < body.index("asm"), name
    kernels = [path for path in PTX.parent.rglob("*") if path.suffix in (".h", ".cu") and path.parent != PTX]
    assert not [path for path in kernels if BARRIER.search(re.sub(r"//.*", "", path.read_text()))]


@pytest.mark.parametrize("defines", [(), ("-DDUALKV_JITTER",)])
def test_the_compiler_pauses_only_if_asked(defines: tuple[str, ...], tmp_path: Path) -> None:
    nvcc = toolchain.find_nvcc(None)
    if nvcc is None:
        pytest.skip("needs nvcc")
    source, output = tmp_path / "kernel.cu", tmp_path / "kernel.ptx"
    source.write_text("".join(f'#include "{name}"\n' for name in HEADERS) + KERNEL)
    command = [str(nvcc.path), "-std=c++17", f"-I{PTX.parent}", "-arch=compute_90a", "-ptx", *defines]
    subprocess.run([*command, str(source), "-o", str(output)], check=True)
    text = output.read_text()
    assert len(BARRIER.findall(text)) == 5
    assert text.count("nanosleep") == (5 if defines else 0)


def test_the_settings_make_a_build_that_pauses() -> None:
    nvcc = Nvcc(Path("/cuda-13.0/bin/nvcc"), (13, 0))
    nvcc.__dict__["archs"] = frozenset({"80", "90"})
    torch_build = TorchBuild("2.13.0", "13.0", None, True, Path("/torch"), ((9, 0),))
    plan = plan_build(jitter.settings((64, 128)), lambda: torch_build, lambda cuda: nvcc, "linux")
    assert isinstance(plan, CudaBuild)
    assert plan.jitter and plan.archs == ("90",) and plan.head_dims == (64, 128)
    assert set(jitter.DEFAULT_HEAD_DIMS) <= set(jitter.HEAD_DIMS) <= set(toolchain.HEAD_DIMS)


def test_products_that_wait_for_each_other_are_reported(tmp_path: Path) -> None:
    assert Path(jitter.OBJECTS) == extension.OBJECTS
    with pytest.raises(AssertionError, match="no messages"):
        jitter.serialised(tmp_path)
    line = "ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized"
    (tmp_path / "sm90_forward_d64_bf16.log").write_text("")
    (tmp_path / "sm90_backward_d64_bf16.log").write_text(f"something else\n{line}\n")
    assert jitter.serialised(tmp_path) == [f"sm90_backward_d64_bf16: {line}"]


# --- the calls --------------------------------------------------------------------------------------------------------


def tables_of(groups: tuple[Group, ...]) -> Tables:
    owners = [index for index, group in enumerate(groups) for _ in group.sequences]
    rows = [
        (row.q_begin, row.q_len, row.q_pos0, *row[2:], owner)
        for row, owner in zip(rows_of(groups), owners, strict=True)
    ]
    contexts = np.cumsum([0, *(group.context for group in groups)])
    ends = np.searchsorted(owners, np.arange(len(groups) + 1))
    table = [(contexts[g], group.context, ends[g], ends[g + 1]) for g, group in enumerate(groups)]
    decoded = sum(decoded for group in groups for _, decoded in group.sequences)
    queries = sum(q for group in groups for q, _ in group.sequences)
    return Tables(
        np.array(rows, np.int32), np.array(table, np.int32), queries, int(contexts[-1]), decoded
    )  # fmt: skip


@pytest.mark.parametrize("tiles", [(64, 128), (128, 128)], ids=str)
def test_the_calls_have_long_walks_and_split_owners(tiles: tuple[int, int], shim: CDLL) -> None:  # noqa: F811
    """On a GPU of 132 multiprocessors; the most steps that an owner takes are several rounds of every buffer."""
    ragged, long, split = (
        record(shim.record_backward, tables_of(groups).problem(True, tiles, heads, kv_heads, 132), None, 0)
        for groups, heads, kv_heads in ((jitter.RAGGED, 4, 2), (jitter.LONG, 4, 2), (jitter.SPLIT, 8, 1))
    )
    assert split.slots > 0
    assert min(ragged.masked_steps, ragged.steps - ragged.masked_steps) > 0
    assert long.steps / long.parts > 12


def test_the_calls_are_ragged_and_of_several_groups() -> None:
    calls = list(jitter.calls(16, "cpu"))
    assert len({call.name for call in calls}) == len(calls)
    for call in calls:
        assert call.batch.cu_seqs_per_context is not None and len(call.batch.cu_seqs_per_context) > 2
        assert len({row.q_len for row in call.batch.table}) > 1
        assert any(row.q_len % 64 for row in call.batch.table)
    assert {call.batch.causal for call in calls} == {True, False}
    assert {call.batch.q.dtype for call in calls} == {torch.bfloat16, torch.float16}
    assert any(not call.batch.q.is_contiguous() for call in calls)


def test_the_kernels_for_hopper_must_do_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("dualkv_sm90_forward", "dualkv_sm90_backward", "dualkv_sm90_backward_dq", "dualkv_convert")
    before = {"dualkv_sm80_forward": 3}

    def pretend(after: dict[str, int]) -> None:
        counts = iter((before, after))
        monkeypatch.setattr(launches, "launch_counts", lambda: next(counts))
        with launches.only_kernels_of("sm90"):
            pass

    pretend(before | dict.fromkeys(names, 1))
    for missing in names[:3]:
        with pytest.raises(AssertionError, match="launched: "):
            pretend(before | {name: 1 for name in names if name != missing})
    with pytest.raises(AssertionError, match="launched: .*sm80_forward"):
        pretend(dict.fromkeys((*names, "dualkv_sm80_forward"), 4))


# --- what is noticed --------------------------------------------------------------------------------------------------


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch) -> Batch:
    monkeypatch.setattr(jitter, "poison_free_memory", lambda: None)
    return build_groups([Group(20, ((20, 0), (9, 9))), Group(3, ((5, 5),))], head_dim=16, dtype=torch.bfloat16)


def faulty(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[Results], None], *, deterministic: bool, call: int
) -> None:
    """Makes the given call of a mode, counted from 0, return what `fault` does to its results."""
    correct, calls = jitter.run, {True: 0, False: 0}

    def run(batch: Batch, deterministic_call: bool) -> Results:
        results = correct(batch, deterministic=deterministic_call)
        if deterministic_call == deterministic and calls[deterministic_call] == call:
            fault(results)
        calls[deterministic_call] += 1
        return results

    monkeypatch.setattr(jitter, "run", lambda batch, deterministic=False: run(batch, deterministic))


def flip_a_bit(name: str) -> Callable[[Results], None]:
    def fault(results: Results) -> None:
        value = getattr(results, name)
        value.view({2: torch.int16, 4: torch.int32}[value.element_size()])[1, 1] ^= 1

    return fault


def lose_a_part_of_dq(results: Results) -> None:
    results.dq[:8] = 0


def test_results_that_repeat_pass(batch: Batch) -> None:
    jitter.repeat(batch, runs=3)


@pytest.mark.parametrize("name", Results._fields)
def test_one_bit_that_differs_is_noticed(name: str, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty(monkeypatch, flip_a_bit(name), deterministic=True, call=2)
    with pytest.raises(AssertionError, match=f"run 3: {name}"):
        jitter.repeat(batch, runs=3)


def test_the_default_mode_may_differ_in_the_last_bits_of_dq_alone(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    faulty(monkeypatch, flip_a_bit("dq"), deterministic=False, call=1)
    jitter.repeat(batch, runs=3)
    faulty(monkeypatch, flip_a_bit("dk_context"), deterministic=False, call=1)
    with pytest.raises(AssertionError, match="run 2: dk_context"):
        jitter.repeat(batch, runs=3)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("call", [0, 1])
def test_a_wrong_dq_is_noticed(call: int, deterministic: bool, batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    faulty(monkeypatch, lose_a_part_of_dq, deterministic=deterministic, call=call)
    with pytest.raises(AssertionError, match="dq: "):
        jitter.repeat(batch, runs=2)
