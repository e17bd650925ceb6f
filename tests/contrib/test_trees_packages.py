# SPDX-License-Identifier: BSD-3-Clause
"""The adapters of trees against the packages whose signatures they have: AReaL and NeMo Automodel.

    pip install --no-deps areal==1.0.4 nemo-automodel==0.7.0

is enough: of either one module is used, and its tables come from its own functions.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from tree_cases import check, inputs, path_to

from flash_attn_dualkv.contrib import trees

pytestmark = pytest.mark.slow


def package(name: str) -> Path:
    """Where a package lies, which is not imported: all of AReaL needs a cluster's worth of others."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"needs {name}: see above")
    return Path(spec.submodule_search_locations[0])


def parameters_of(source: Path, function: str) -> dict[str, str | None]:
    """Names and defaults of a function in a file; of several with that name, of the one that names its arguments."""
    found: dict[str, str | None] = {}
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.FunctionDef) and node.name == function and node.args.args:
            names = [one.arg for one in node.args.args]
            values = [None] * (len(names) - len(node.args.defaults)) + [*map(ast.unparse, node.args.defaults)]
            found = dict(zip(names, values))
    return found


def parameters(function: Any) -> dict[str, str | None]:
    given = inspect.signature(function).parameters.items()
    return {name: None if one.default is one.empty else repr(one.default) for name, one in given}


# --- AReaL ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def areal() -> ModuleType:
    source = package("areal") / "models/tree_attn/triton_kernel.py"
    spec = importlib.util.spec_from_file_location("triton_kernel_of_areal", source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_signature_of_areal(areal: ModuleType) -> None:
    assert areal.__file__ is not None
    assert parameters(trees.tree_attention) == parameters_of(Path(areal.__file__), "tree_attention")


@pytest.mark.parametrize("padding", [0, 5])
@pytest.mark.parametrize("rows", [1, 63, 64, 130])
def test_tables_of_areal(rows: int, padding: int, areal: ModuleType) -> None:
    """Of the row that each row continues; AReaL's padding continues none."""
    draw = random.Random(rows)
    parents = [-1] + [draw.choice([row - 1] * 6 + [draw.randrange(-1, row)]) for row in range(1, rows)]
    total = rows + padding
    tables = areal.precompute_tree_attention_data(torch.tensor([parents + [-1] * padding], dtype=torch.int32))
    mask = torch.eye(total, dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            mask[row] |= mask[parent]
    given = inputs(total)
    fields = (tables.packed_mask, tables.kv_indices, tables.kv_offsets, tables.q_indices, tables.q_offsets)
    out = trees.tree_attention(*(one.transpose(1, 2) for one in given), *fields, sm_scale=0.3)
    check(out.transpose(1, 2), given, mask, 0.3)


# --- Automodel --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mask_spec() -> Any:
    package("nemo_automodel")
    return importlib.import_module("nemo_automodel.components.distributed.context_parallel.magi").AttnMaskSpec


def visible(spec: Any, rows: int) -> Tensor:
    """(rows, rows), from the rectangles that MagiAttention would be given."""
    mask = torch.zeros(rows, rows, dtype=torch.bool)
    for (q, q_end), (k, k_end), kind in zip(spec.q_ranges, spec.k_ranges, spec.mask_types):
        seen = torch.ones(q_end - q, k_end - k, dtype=torch.bool)
        mask[q:q_end, k:k_end] |= seen.tril() if kind == "causal" else seen
    return mask


@pytest.mark.parametrize("seed", range(5))
def test_trees_of_automodel(seed: int, mask_spec: Any) -> None:
    draw = random.Random(seed)
    parents = [draw.randrange(-1, node) for node in range(8)]
    order = draw.sample(range(8), 8)  # where they lie in the row
    lens = [draw.randrange(5) for _ in parents]
    paths = [[order[one] for one in path_to(node, parents)] for node in range(8)]
    spec, expected = mask_spec.prefix_tree(lens, paths)
    forest, ranges = trees.prefix_tree(lens, paths)
    assert ranges == expected
    given = inputs(sum(lens))
    check(forest.attend(*given, 0.5), given, visible(spec, sum(lens)), 0.5)


def test_signature_of_automodel(mask_spec: Any) -> None:
    assert [*parameters(trees.prefix_tree)] == [*parameters(mask_spec.prefix_tree)]
