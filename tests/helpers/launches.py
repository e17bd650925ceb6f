# SPDX-License-Identifier: BSD-3-Clause
"""Device, configurations and families of kernels for their tests, evidence that these ran, and poisoned memory."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from flash_attn_dualkv.checks import PORTABLE_HEAD_DIM

# Where the kernel tests run. "cuda": on the GPU. "host": the same kernels compiled for the host
# (host_kernels.py), with fewer heads and rows.
DEVICE = {"cuda": "cuda", "host": "cpu"}[os.environ.get("DUALKV_TEST_DEVICE", "cuda")]
GPU_MARKS = [pytest.mark.gpu] if DEVICE == "cuda" else []
if DEVICE == "cpu":
    import host_kernels

    host_kernels.install()
# More of them find races, see jitter.py.
REPEATS = int(os.environ.get("DUALKV_TEST_REPEATS", 10 if DEVICE == "cuda" else 2))
needs_gpu = pytest.mark.skipif(DEVICE != "cuda", reason="about the device")
DIRECTIONS = {"forward": "forward", "backward": "backward(?!_dq)", "backward_dq": "backward_dq"}
DETERMINISTIC = {"backward_dq", "backward_in_order"}  # one of them is launched in deterministic mode
# One for each instance, both types, groups of several sizes.
CONFIGURATIONS = [
    dict(head_dim=head_dim, heads=heads, dtype=dtype, device=DEVICE)
    for head_dim, heads, dtype in (
        (64, (8, 2), torch.bfloat16),
        (80, (4, 4), torch.float16),
        (96, (6, 2), torch.bfloat16),
        (128, (8, 1), torch.bfloat16),
        (128, (4, 4), torch.float16),
        (192, (4, 2), torch.float16),
        (256, (4, 2), torch.bfloat16),
        (320, (6, 2), torch.float16),
        (512, (4, 1), torch.bfloat16),
    )
]
if DEVICE == "cpu":
    fewer = {(8, 2): (4, 2), (4, 4): (2, 2), (6, 2): (3, 1), (8, 1): (4, 1), (4, 2): (2, 1), (4, 1): (2, 1)}
    CONFIGURATIONS = [options | {"heads": fewer[options["heads"]]} for options in CONFIGURATIONS]
configurations = pytest.mark.parametrize(
    "options", CONFIGURATIONS, ids=lambda one: "d{head_dim}-H{heads[0]}-{heads[1]}-{dtype}".format(**one)
)
POISON_BYTES = [512] * 64 + [1 << 16] * 32 + [1 << 20] * 8 + [1 << 22] * 8 + [1 << 26] * 4
CHOICE = "DUALKV_KERNELS"  # sm80: the portable kernels on any GPU; sm90: Hopper's where there are some


def multiprocessors() -> int:
    """Of the GPU, or of the one that the host stands in for."""
    return torch.cuda.get_device_properties(DEVICE).multi_processor_count if DEVICE == "cuda" else 132


def kernel_families(head_dim: int = 0) -> list[str]:
    """The families of kernels that can serve a call of a head dim here."""
    from flash_attn_dualkv import build_info

    capability = torch.cuda.get_device_capability() if DEVICE == "cuda" else (9, 0)
    hopper = capability[0] == 9 and "90" in build_info()["archs"]
    portable = ["sm80"] if head_dim <= PORTABLE_HEAD_DIM else []
    return [*portable, "sm90"] if hopper else portable


@contextmanager
def use_kernels(family: str) -> Iterator[None]:
    """Calls in the block go to this family of kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CHOICE, family)
        yield


@pytest.fixture(params=["sm90", "sm80"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs the test once with each family of kernels that has its head dims: of `options` or its own arguments."""
    family: str = request.param
    arguments = request.node.callspec.params
    arguments = {**arguments, **arguments.get("options", {})}
    head_dim = max(arguments.get("head_dim", 0), arguments.get("head_dim_v", 0))
    if family not in kernel_families(head_dim):
        pytest.skip(f"no {family} kernels of head dim {head_dim} here")
    with use_kernels(family):
        yield family


def kernel_pattern(direction: str) -> re.Pattern[str]:
    """What the names of the kernels of a direction look like, of the family that is chosen or of any."""
    family = os.environ.get(CHOICE, r"sm\d+")
    return re.compile(f"dualkv_{family}_{DIRECTIONS[direction]}")


def launch_counts() -> dict[str, int]:
    """Launches of each kernel since the process began, as the library counts them."""
    from flash_attn_dualkv import kernels

    return kernels.launch_counts()


@contextmanager
def counted_launches() -> Iterator[dict[str, int]]:
    """Yields a dictionary that holds, once the block has ended, how often each kernel was launched in it."""
    counts: dict[str, int] = {}
    before = launch_counts()
    yield counts
    after = launch_counts()
    counts |= {name: count - before.get(name, 0) for name, count in after.items() if count > before.get(name, 0)}


@contextmanager
def only_kernels_of(family: str) -> Iterator[None]:
    """Asserts that the family's kernels ran in the block in both directions and modes, and none of another family."""
    with counted_launches() as counts:
        yield
    ran = {name for name in counts if name.startswith("dualkv_sm")}
    kernels = {name.removeprefix(f"dualkv_{family}_").removesuffix("_narrow") for name in ran}
    repeated = kernels & DETERMINISTIC
    assert repeated and kernels - repeated == {"forward", "backward"}, f"launched: {', '.join(sorted(ran))}"


@contextmanager
def profiled() -> Iterator[list[str]]:
    """Yields a list that holds, once the block has ended, the names of what ran on the device."""
    names: list[str] = []
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        yield names
        torch.cuda.synchronize()
    events = profiler.events() or []
    names += [event.name for event in events if event.device_type == torch.autograd.DeviceType.CUDA]


@contextmanager
def kernels_ran(*directions: str) -> Iterator[None]:
    """Asserts that kernels of every direction were launched in the block."""
    with counted_launches() as counts:
        yield
    for direction in directions:
        assert any(map(kernel_pattern(direction).search, counts)), f"no {direction}: {counts}"


def captured(step: Callable[[], tuple[Tensor, ...]]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    """A CUDA graph of `step`, after a warm-up on a stream of its own, and the tensors that replays write."""
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def poison_free_memory() -> None:
    """Leaves NaN (in every floating-point type) in the GPU memory that the allocator will hand out next."""
    if DEVICE != "cuda":
        return
    blocks = [torch.full((size,), 255, dtype=torch.uint8, device=DEVICE) for size in POISON_BYTES]
    del blocks
