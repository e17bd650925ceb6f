# SPDX-License-Identifier: BSD-3-Clause
"""Shapes for the tests of the benchmarks, dense attention on them, and stand-ins for packages of peers."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fake_cudnn
import fake_fa4
import packing
import pytest
import shapes
import torch
from peers import Implementation
from shapes import Shape, nodes_of
from tree_cases import dense

CPU = torch.device("cpu")
RAGGED = Shape("ragged", nodes_of([(70, (33, 1, 90))]), 4, 2, 16)
SMALL = (
    RAGGED,
    shapes.parse("4x96x24-H4-Hk2-d16"),
    Shape("two groups", nodes_of([(50, (20, 31)), (64, (64,))]), 4, 1, 16),
    Shape("no prompt", nodes_of([(0, (70, 3, 128))]), 4, 4, 16),
    Shape("one token", nodes_of([(1, (1,))]), 2, 1, 8),
    Shape("mqa", nodes_of([(130, (2, 2, 2))]), 6, 1, 8),
)
FOREST = ((40, -1), (7, 0), (1, 1), (20, 1), (33, 0), (12, -1), (3, 5), (64, 5), (5, 7), (6, 7))
TREES = (
    shapes.parse("tree-tiny-H4-Hk2-d16"),
    Shape("tree-chain", ((5, -1), (30, 0), (9, 1), (4, 2)), 4, 1, 16),
    Shape("tree-forest", FOREST, 4, 2, 16),
)


def dense_mask(shape: Shape) -> torch.Tensor:
    """(T, T) bool: which packed row sees which, token by token from what each token is."""
    tokens = [
        (node, end - length + at)
        for node, (end, (length, _)) in enumerate(zip(shape.ends, shape.nodes))
        for at in range(length)
    ]

    def sees(query: tuple[int, int], key: tuple[int, int]) -> bool:
        behind = query[1] - key[1]
        return key[0] in shape.paths[query[0]] and behind >= 0 and (not shape.window or behind < shape.window)

    return torch.tensor([[sees(query, key) for key in tokens] for query in tokens])


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return dense(q, k, v, mask, q.shape[2] ** -0.5)[0]


def outcome(impl: Implementation, shape: Shape, prepare: Any = packing.prepare_attention) -> list[torch.Tensor]:
    """Output and gradients of the packed rows, then gradients of what has no rows: sums over micro-batches."""
    shares, rows, computed = [], torch.arange(shape.packed_tokens), 0
    for one in impl.arrange(shape, CPU):
        prepared = prepare(shape, torch.float64, CPU, one)
        out = prepared.run()
        assert prepared.dout.shape == out.shape
        gradients = prepared.backward(out)
        shares.append([*prepared.sampled(out, gradients, rows), *gradients[prepared.with_rows + prepared.whole :]])
        computed += len(out)
    is_replicated = impl.name.endswith(("_replicated", "_flattened"))
    assert computed == (shape.replicated_tokens if is_replicated else shape.packed_tokens)
    return [sum(parts) for parts in zip(*shares)]


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlashAttention-4 and cuDNN Flex Attention with functions of their signatures that compute on the CPU."""
    for module, stand_in in (("flash_attn/cute", fake_fa4), ("cudnn/flex_attention", fake_cudnn)):
        package = tmp_path / module  # as in the wheel, nothing makes flash_attn itself a package
        package.mkdir(parents=True)
        shutil.copy(Path(str(stand_in.__file__)), package / "__init__.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("flash_attn", "flash_attn.cute", "cudnn", "cudnn.flex_attention"):
        sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def several_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a tree is flattened."""
    monkeypatch.setattr(shapes, "MICRO_BATCH_TOKENS", 1)
