# SPDX-License-Identifier: BSD-3-Clause
"""Results of the kernels for trees: the accuracy rule of oracle.py, what a row's bits depend on, sinks, new trees."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
from launches import (
    CONFIGURATIONS,
    DEVICE,
    GPU_MARKS,
    REPEATS,
    counted_launches,
    needs_gpu,
    poison_free_memory,
)
from shared_prompts import GROUPS, inputs_of, layout_of, two_calls
from torch import Tensor
from tree_cases import Tree, offsets_and_parents, path_to, paths_of
from tree_runs import (
    ALL,
    MANY_KEYS,
    PAD,
    TREES,
    Variant,
    check_accuracy,
    check_errors,
    data,
    exact,
    run,
    run_forward,
)

from flash_attn_dualkv import flash_attn_tree_varlen_func, shared_prompt_attention

pytestmark = [*GPU_MARKS, pytest.mark.usefixtures("kernels")]

Options = dict[str, Any]
trees = pytest.mark.parametrize("name", list(TREES))
REPEATED = ["turns", "bush of bushes", "forest"]
# Packs of 16 heads, of 4, and of 6 in the forward and 2 in the backward.
PACKED = [
    dict(head_dim=head_dim, heads=heads, dtype=torch.bfloat16, device=DEVICE)
    for head_dim in (64, 128)
    for heads in ((16, 1), (8, 2), (6, 1))
]


# MLA's head dims have a backward kernel of their own on Hopper.
MLA = [
    dict(head_dim=192, head_dim_v=128, heads=heads, dtype=torch.bfloat16, device=DEVICE) for heads in ((4, 4), (8, 2))
]


def id_of(options: Options) -> str:
    dims = "-".join(str(options[one]) for one in ("head_dim", "head_dim_v") if one in options)
    return f"d{dims}-H{options['heads'][0]}-{options['heads'][1]}-{options['dtype']}"


configurations = pytest.mark.parametrize("options", [*CONFIGURATIONS, *MLA], ids=id_of)


@configurations
@trees
def test_accuracy(name: str, options: Options) -> None:
    check_accuracy(TREES[name], options)


of_narrow_tiles = pytest.mark.parametrize(("head_dim", "heads"), [(64, (4, 1)), (128, (4, 1)), (128, (3, 3))])


def narrow(name: str, head_dim: int, heads: tuple[int, int]) -> Options:
    """Of data with as much padding as makes the rows many."""
    return dict(head_dim=head_dim, heads=heads, dtype=torch.bfloat16, pad=max(PAD, 1024 - sum(TREES[name][0])))


@pytest.mark.parametrize("variant", [ALL, Variant(softcap=30.0), Variant(causal=False)], ids=["", "softcap", "all"])
@of_narrow_tiles
@trees
@pytest.mark.parametrize("kernels", ["sm90"], indirect=True)
def test_narrow_tiles(kernels: str, name: str, head_dim: int, heads: tuple[int, int], variant: Variant) -> None:
    """Of many rows with few keys each, dQ is made of narrow tiles; a caller may call any number few."""
    with counted_launches() as counts:
        results = check_accuracy(TREES[name], narrow(name, head_dim, heads), variant, mean_keys=1)
    assert "dualkv_sm90_backward_dq_narrow" in counts
    for key, one in results[False].items():
        oracle.assert_bits_equal(key, one, results[True][key])


@configurations
@trees
def test_the_public_functions_are_the_operator(name: str, options: Options) -> None:
    """Bit by bit: with a node of their own and past the dispatcher; results repeat."""
    layout, inputs = data(TREES[name], **options, sinks=True)
    table = offsets_and_parents(TREES[name], DEVICE)
    for function, mean in (
        (lambda *qkv, **more: flash_attn_tree_varlen_func(*qkv, *table, **more), layout.num_tokens),
        (lambda *qkv, **more: flash_attn_tree_varlen_func(*qkv, *table, mean_keys=1, **more), 1),
        (lambda *qkv, **more: shared_prompt_attention(*qkv, layout, **more), layout.mean_keys),
    ):
        expected = run(inputs, layout.nodes, deterministic=True, mean_keys=mean)
        leaves = inputs.leaves()
        poison_free_memory()
        out = function(leaves.q, leaves.k, leaves.v, sinks=leaves.sinks, deterministic=True)
        oracle.assert_bits_equal("out", out.detach(), expected["out"])
        for key, one in zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves.tensors, inputs.dout)):
            oracle.assert_bits_equal(key, one, expected[key])


def check_repeats(tree: Tree, options: Options, variant: Variant = ALL) -> None:
    """All but dQ of the default mode, whose additions come in any order."""
    layout, inputs = data(tree, **options)
    expected = {mode: run(inputs, layout.nodes, deterministic=mode, variant=variant) for mode in (True, False)}
    bound = oracle.FROBENIUS_BOUND[inputs.q.dtype]
    for mode in (True, False) * (REPEATS - 1):
        for key, one in run(inputs, layout.nodes, deterministic=mode, variant=variant).items():
            if key == "dq" and not mode:
                right = expected[True]["dq"].double()
                assert (one.double() - right).norm() <= bound * right.norm()
            else:
                oracle.assert_bits_equal(key, one, expected[mode][key])


@configurations
@pytest.mark.parametrize("name", REPEATED)
def test_results_repeat_bit_for_bit(name: str, options: Options) -> None:
    check_repeats(TREES[name], options)


@pytest.mark.parametrize("window", [-1, 60])
@pytest.mark.parametrize("options", PACKED, ids=lambda one: "d{head_dim}-H{heads[0]}-{heads[1]}-{dtype}".format(**one))
def test_packs_repeat_bit_for_bit(options: Options, window: int) -> None:
    """Tiles that hold rows of several heads: many short nodes, some with borders inside of tiles."""
    for name in ("turns", "bush"):
        check_repeats(TREES[name], options, Variant(window))


def spoilt_by(tree: Tree, node: int, tokens: int) -> tuple[Tensor, Tensor]:
    """Rows whose paths hold the node, and those whose keys get gradients of such rows."""
    paths, begin = paths_of(tree), sum(tree[0][:node])
    below = torch.zeros(tokens, dtype=torch.bool)
    for path, size in zip(paths, tree[0]):
        if begin in path:
            below[path[len(path) - size :]] = True
    above = below.clone()
    above[paths[node]] = True
    return below, above


def check_nan(tree: Tree, options: Options, mean_keys: int = MANY_KEYS) -> None:
    """Rows of other paths keep their bits, but for dQ that is added in any order; so do keys of nodes not above it."""
    layout, inputs = data(tree, **options)
    expected = {mode: run(inputs, layout.nodes, mode, mean_keys=mean_keys) for mode in (False, True)}
    begin = 0
    for node, length in enumerate(tree[0]):
        rows = slice(begin, begin + length)
        begin += length
        if length == 0 or node % max(1, len(tree[0]) // 6):
            continue
        poisoned = inputs._replace(**{key: getattr(inputs, key).clone() for key in ("q", "k", "v", "dout")})
        for one in (poisoned.q, poisoned.k, poisoned.v, poisoned.dout):
            one[rows] = float("nan")
        below, above = spoilt_by(tree, node, layout.num_tokens)
        for mode, right in expected.items():
            found = run(poisoned, layout.nodes, mode, mean_keys=mean_keys)
            assert bool(found["out"][rows].isnan().any())
            for key, spoilt in (("out", below), ("dq", below), ("dk", above), ("dv", above)):
                kept = (~spoilt).to(DEVICE)
                if key == "dq" and not mode:
                    torch.testing.assert_close(found[key][kept], right[key][kept], rtol=2**-7, atol=1e-4)
                else:
                    oracle.assert_bits_equal(f"{key} of node {node}", found[key][kept], right[key][kept])
            kept = (~below).to(DEVICE)
            oracle.assert_bits_equal("lse", found["lse"][:, kept], right["lse"][:, kept])


@configurations
@trees
def test_nan_in_a_node_stays_below_it(name: str, options: Options) -> None:
    check_nan(TREES[name], options)


@of_narrow_tiles
@pytest.mark.parametrize("name", ["deep", "borders", "forest"])
@pytest.mark.parametrize("kernels", ["sm90"], indirect=True)
def test_nan_in_a_node_of_narrow_tiles(kernels: str, name: str, head_dim: int, heads: tuple[int, int]) -> None:
    with counted_launches() as counts:
        check_nan(TREES[name], narrow(name, head_dim, heads), mean_keys=1)
    assert "dualkv_sm90_backward_dq_narrow" in counts


# Ragged siblings below turns whose borders share tiles, and below one of them; some see many keys
# of their own.
SIBLINGS: Tree = (
    [150, 30, 45, 5, 17, 33, 64, 16, 80, 1, 47, 0, 20, 9, 3, 12, 40, 8, 130, 4, 25],
    [-1, 0, 1, *[2] * 11, *[13] * 4, 2, 2, 2],
)
# With packs that divide a slice, and one that does not.
of_siblings = pytest.mark.parametrize(
    "options", [*PACKED, PACKED[0] | {"heads": (2, 2)}, PACKED[-1] | {"heads": (2, 1)}], ids=id_of
)


@of_siblings
@pytest.mark.parametrize(
    "variant", [ALL, Variant(softcap=30.0), Variant(causal=False), Variant(300), Variant(60)], ids=str
)
@pytest.mark.parametrize("kernels", ["sm90"], indirect=True)
def test_siblings_that_share_tiles_keep_their_bits(
    kernels: str, variant: Variant, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share none where there are too few tiles for the card. Scores move maxima, also behind siblings' keys."""
    layout, inputs = data(SIBLINGS, **options)
    inputs = inputs._replace(q=inputs.q * 8)
    expected = run_forward(inputs, layout.nodes, variant)
    monkeypatch.setenv("DUALKV_MAX_SMS", "1")
    found = run_forward(inputs, layout.nodes, variant)
    for key in ("out", "lse"):
        oracle.assert_bits_equal(key, found[key], expected[key])


@pytest.mark.parametrize("options", PACKED[1::3], ids=id_of)
@pytest.mark.parametrize("kernels", ["sm90"], indirect=True)
def test_nan_stays_out_of_siblings_that_share_tiles(
    kernels: str, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DUALKV_MAX_SMS", "1")
    check_nan(SIBLINGS, options)


@configurations
@pytest.mark.parametrize("variant", [ALL, Variant(100, 30.0)], ids=["", "window and softcap"])
def test_bits_of_a_row_depend_on_its_path_alone(variant: Variant, options: Options) -> None:
    """Every path by itself, as a chain of its nodes."""
    tree = TREES["forest"]
    layout, inputs = data(tree, **options)
    whole = run(inputs, layout.nodes, variant=variant)
    more = {} if variant == ALL else {"window_size": (variant.window, 0), "softcap": variant.softcap}
    parents = tree[1]
    for leaf in range(len(parents)):
        chain = path_to(leaf, parents)
        rows = torch.tensor(paths_of(tree)[leaf], device=DEVICE, dtype=torch.int64)
        own = offsets_and_parents(([tree[0][one] for one in chain], [*range(-1, len(chain) - 1)]), DEVICE)
        q, k, v = (one[rows] for one in (inputs.q, inputs.k, inputs.v))
        out, lse = flash_attn_tree_varlen_func(q, k, v, *own, **more, return_lse=True)
        oracle.assert_bits_equal(f"out of node {leaf}", out, whole["out"][rows])
        oracle.assert_bits_equal(f"lse of node {leaf}", lse, whole["lse"][:, rows])


@configurations
@pytest.mark.parametrize("name", ["several", "short prompts", "large" if DEVICE == "cuda" else "long"])
def test_prompts_equal_the_two_call_form(name: str, options: Options) -> None:
    """Bit by bit: a row does not depend on what else is in the call, nor on which of two tensors its keys are in."""
    layout = layout_of(GROUPS[name], DEVICE, pad_to_multiple_of=32)
    inputs = inputs_of(layout, sinks=True, **options)
    for sinks in (None, inputs.sinks):
        out = shared_prompt_attention(inputs.q, inputs.k, inputs.v, layout, sinks=sinks)
        oracle.assert_bits_equal("out", out, two_calls(inputs, layout, sinks=sinks))


LARGE: dict[str, tuple[Tree, Tree]] = {
    # A chain is one sequence: the reference computes it as a single node.
    "1,000 deep": (([3] * 1000, [*range(-1, 999)]), ([3000], [-1])),
    "10,000 leaves": (([300] + [1, 2] * 5000, [-1] + [0] * 10_000), ([300] + [1, 2] * 5000, [-1] + [0] * 10_000)),
}


@needs_gpu
@pytest.mark.parametrize("name", LARGE)
def test_large_trees(name: str) -> None:
    tree, same = LARGE[name]
    layout, inputs = data(tree, heads=(4, 2), head_dim=64, dtype=torch.bfloat16)
    expected = exact(inputs, data(same)[0].nodes)
    for deterministic in (False, True):
        check_errors(run(inputs, layout.nodes, deterministic), expected, torch.bfloat16)
