# SPDX-License-Identifier: BSD-3-Clause
"""Which tests can run here, and the devices that the others are run on."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator

import pytest
import torch
from calls import Call, packed, separate, tree

from flash_attn_dualkv import build_info

# Tensors are small: threads that wait for each other would cost more than they compute. So would
# those of the processes that tests start.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


def _why_no_gpu() -> str | None:
    """The reason to skip GPU tests. A compiled module that does not load is none: those tests must fail and say so."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    info = build_info()
    if not info["compiled"] and info["compiled_error"] is None:
        return "installed without the compiled module"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = _why_no_gpu()
    if reason is None:
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


_frozen_modules = 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Leaves what has been collected, and imported so far, out of garbage collections, which trainers ask for."""
    global _frozen_modules
    if len(sys.modules) != _frozen_modules:
        _frozen_modules = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """For `-n auto` as many as cores; with a GPU none, as tests that share its memory or time would fail."""
    return None if _why_no_gpu() else 0


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Runs the test on the CPU, and marked `gpu` on a GPU."""
    name: str = request.param
    return name


@pytest.fixture(params=[separate, packed, tree], ids=lambda make: make.__name__)
def call(request: pytest.FixtureRequest, device: str) -> Call:
    """A small call of each of the public functions."""
    made: Call = request.param(device=device)
    return made


@pytest.fixture
def restored_registry() -> Iterator[None]:
    """For tests that register or wrap attention implementations of transformers: takes that back."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    mappings = [one._global_mapping for one in (AttentionInterface, AttentionMaskInterface)]
    before = [dict(one) for one in mappings]
    yield
    for mapping, items in zip(mappings, before):
        mapping.clear()
        mapping.update(items)


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Without what other tests have compiled, and for them without what this one has."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
