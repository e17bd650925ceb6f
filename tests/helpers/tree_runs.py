# SPDX-License-Identifier: BSD-3-Clause
"""The trees of the kernel tests, and results on them: by the operators, exactly, and by ordinary PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest.mock import patch

import oracle
import torch
from launches import DEVICE, kernels_ran, poison_free_memory
from shared_prompts import Inputs, inputs_of
from torch import Tensor
from tree_cases import DEEP, Tree, random_tree

from flash_attn_dualkv import SharedPromptLayout, ops
from flash_attn_dualkv import reference as specification

PAD = 37

# Borders of tiles on all sides, combs, bushes with gradients that sum over all leaves, forests with
# empty nodes. What "turns" leave over in tiles of 80 keys fills others to the last row. On the host
# they are smaller.
_scale, _teeth, _turns, _leaves, _bushes, _nodes, _longest = (
    (37, 12, 9, 64, 8, 60, 90) if DEVICE == "cuda" else (13, 4, 4, 16, 3, 25, 70)
)
TREES: dict[str, Tree] = {
    "deep": ([length * _scale for length in DEEP[0]], DEEP[1]),
    "borders": ([128, 64, 0, 63, 1, 129, 256, 127, 65], [-1, 0, 1, 2, 1, 0, -1, 6, 7]),
    "comb": ([65, 40] * _teeth, [-1 if i == 0 else i - 1 if i % 2 else i - 2 for i in range(2 * _teeth)]),
    "turns": ([208] + [20, 128] * _turns, [-1] + [2 * (i // 2) for i in range(2 * _turns)]),
    "bush": ([200] + [33] * _leaves, [-1] + [0] * _leaves),
    "bush of bushes": (
        [90] + [40, *[7] * 15] * _bushes,
        [-1] + [one for b in range(_bushes) for one in (0, *[16 * b + 1] * 15)],
    ),
    "prompts": (
        [length for g in range(16) for length in (64 + g, g, 128, 64 - g)],
        [parent for g in range(16) for parent in (-1, *[4 * g] * 3)],
    ),
    "chain": ([50, 1, 0, 130, 64, 3, 90], [-1, 0, 1, 2, 3, 4, 5]),
    "forest": random_tree(1, _nodes, _longest, 0.4),
}


def data(tree: Tree, pad: int = PAD, **options: Any) -> tuple[SharedPromptLayout, Inputs]:
    layout = SharedPromptLayout.from_tree(*tree, pad=pad, device=DEVICE)
    return layout, inputs_of(layout, **options)


class Variant(NamedTuple):
    """What a row sees of its path, and what becomes of its scores."""

    window: int = -1  # positions before its own; -1: all
    softcap: float = 0.0
    causal: bool = True


ALL = Variant()
MANY_KEYS = 1 << 20  # by so many dQ is summed


def run_forward(
    inputs: Inputs,
    nodes: Tensor,
    variant: Variant = ALL,
    deterministic: bool = False,
    reference: bool = False,
    mean_keys: int = MANY_KEYS,
) -> dict[str, Tensor]:
    """out and lse by the operator; free memory holds NaN before."""
    poison_free_memory()
    out, lse = ops.forward(
        inputs.q, inputs.k, inputs.v, None, None, inputs.sinks, nodes, inputs.q.shape[2] ** -0.5, variant.causal,
        variant.window, variant.softcap, reference, mean_keys, deterministic,
    )  # fmt: skip
    return {"out": out, "lse": lse}


def run(inputs: Inputs, nodes: Tensor, deterministic: bool = False, **options: Any) -> dict[str, Tensor]:
    """out, lse and the gradients by the operators."""
    leaves = inputs.leaves()
    found = run_forward(leaves, nodes, deterministic=deterministic, **options)
    gradients = torch.autograd.grad(found["out"], leaves.tensors, inputs.dout)
    whole = {**found, **dict(zip(("dq", "dk", "dv", "dsinks"), gradients))}
    return {name: one.detach() for name, one in whole.items()}


def exact(inputs: Inputs, nodes: Tensor, variant: Variant = ALL) -> dict[str, Tensor]:
    """In fp64 by the package's own reference, with large blocks."""
    wide = Inputs(*(one.double() for one in inputs if one is not None))
    sizes = {"SCORE_ELEMENTS": 1 << 25, "KEY_BLOCK": 1 << 13, "ACCUMULATOR_ELEMENTS": 1 << 40}
    with patch.multiple(specification, **sizes):
        return run(wide, nodes, reference=True, variant=variant)


def check_errors(found: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype) -> None:
    """The LSE by its own rule; of all else the relative error, which has a bound for each type."""
    if "lse" in found:
        assert oracle.lse_violations(found["lse"], expected["lse"]) == []
    for key, one in found.items():
        if key != "lse":
            error = (one.double() - expected[key]).norm() / expected[key].norm().clamp(min=1e-9)
            assert one.isfinite().all() and error <= oracle.FROBENIUS_BOUND[dtype], f"{key}: {error:.3g}"


def plain(inputs: Inputs, nodes: Tensor, variant: Variant = ALL) -> dict[str, Tensor]:
    """In the input type by ordinary PyTorch operations."""
    scale = inputs.q.shape[2] ** -0.5
    keys = inputs.k, inputs.v
    out, _, *gradients = oracle.plain_of_nodes(inputs.q, keys, inputs.dout, nodes, scale=scale, **variant._asdict())
    return {name: one.to(inputs.q.dtype) for name, one in zip(("out", "dq", "dk", "dv"), (out, *gradients))}


def check_accuracy(
    tree: Tree,
    options: dict[str, Any],
    variant: Variant = ALL,
    make: Callable[[Inputs], Inputs] = lambda one: one,
    mean_keys: int = MANY_KEYS,
) -> dict[bool, dict[str, Tensor]]:
    """Both modes by the accuracy rule; rows of padding are zeros. Returns the results of each."""
    layout, inputs = data(tree, **options)
    inputs = make(inputs)
    with kernels_ran("forward", "backward"):
        results = {
            mode: run(inputs, layout.nodes, mode, variant=variant, mean_keys=mean_keys) for mode in (False, True)
        }
    expected, of_torch = exact(inputs, layout.nodes, variant), plain(inputs, layout.nodes, variant)
    for found in results.values():
        problems = oracle.lse_violations(found["lse"], expected["lse"])
        for key, value in of_torch.items():
            assert found[key].dtype == inputs.q.dtype and found[key].is_contiguous()
            problems += oracle.violations(key, found[key], value, expected[key], inputs.q.dtype)
            assert not found[key][-layout.pad :].any()
        assert not problems, "; ".join(problems)
    return results
