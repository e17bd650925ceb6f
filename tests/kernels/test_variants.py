# SPDX-License-Identifier: BSD-3-Clause
"""Sliding windows and softcaps on the kernels, with sinks and with each other: the accuracy rule of oracle.py."""

from __future__ import annotations

from typing import Any

import oracle
import pytest
import torch
from launches import DEVICE, GPU_MARKS, configurations, counted_launches, needs_gpu
from shared_prompts import Inputs
from torch import Tensor
from tree_cases import paths_of
from tree_runs import MANY_KEYS, PAD, TREES, Variant, check_accuracy, check_errors, data, exact, run

from flash_attn_dualkv import flash_attn_varlen_func, ops

pytestmark = [*GPU_MARKS, pytest.mark.usefixtures("kernels")]

Options = dict[str, Any]
WINDOWS = [0, 1, 62, 63, 64, 127, 447, 999, 10**9]
SOFTCAPS = [5.0, 30.0, 50.0]


def loud(inputs: Inputs) -> Inputs:
    """Scores with a deviation of 4, so that caps bend them."""
    return inputs._replace(q=4 * inputs.q)


def quiet(inputs: Inputs) -> Inputs:
    """Scores with a deviation of 0.05, from whose rounded probabilities no cap's derivative could be had."""
    return inputs._replace(q=0.05 * inputs.q)


@configurations
@pytest.mark.parametrize("window", WINDOWS)
def test_windows(window: int, options: Options) -> None:
    for name in ("borders", "comb", "forest"):
        check_accuracy(TREES[name], options, Variant(window))


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("window", [59, 127])
def test_short_windows_of_many_heads(window: int, head_dim: int) -> None:
    """Tiles of few queries: at d = 64 they see so few keys that the kernels take narrow tiles, one or two of them."""
    for name in ("borders", "comb"):
        check_accuracy(TREES[name], {"heads": (16, 2), "head_dim": head_dim, "dtype": torch.bfloat16}, Variant(window))


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernels", ["sm90"], indirect=True)
def test_instances_for_long_and_for_short_nodes_agree(kernels: str, dtype: torch.dtype) -> None:
    """Nodes of 1280 tokens or more on average take another instance than the same nodes beside short ones."""
    lens, parents = [2300, 2100], [-1, 0]
    beside, more = data((lens + [7] * 6, parents + [-1] * 6), 0, heads=(4, 2), head_dim=128, dtype=dtype)
    layout, _ = data((lens, parents), 0, heads=(4, 2), head_dim=128, dtype=dtype)
    inputs = type(more)(*(one[: sum(lens)] for one in more[:4]))
    long, short = run(inputs, layout.nodes), run(more, beside.nodes)
    for key in ("out", "dk", "dv"):
        assert torch.equal(long[key], short[key][: sum(lens)]), key
    for found, given, nodes in ((long, inputs, layout.nodes), (short, more, beside.nodes)):
        check_errors(found, exact(given, nodes), dtype)


@configurations
@pytest.mark.parametrize("softcap", SOFTCAPS)
def test_softcaps(softcap: float, options: Options) -> None:
    check_accuracy(TREES["deep"], options, Variant(softcap=softcap), loud)
    check_accuracy(TREES["forest"], options, Variant(70, softcap), loud)


@configurations
@pytest.mark.parametrize("variant", [Variant(), Variant(70), Variant(softcap=5.0), Variant(70, 5.0)], ids=str)
def test_sinks(variant: Variant, options: Options) -> None:
    layout, inputs = data(TREES["forest"], **options, sinks=True)
    assert inputs.sinks is not None
    without = inputs._replace(sinks=torch.full_like(inputs.sinks, float("-inf")))
    for one, other in zip(*(run(one, layout.nodes, True).values() for one in (without, inputs._replace(sinks=None)))):
        oracle.assert_bits_equal("a sink of -inf", one, other)
    inputs = (inputs if variant == Variant() else loud(inputs))._replace(sinks=inputs.sinks.float())
    expected = exact(inputs, layout.nodes, variant)
    for deterministic in (False, True):
        check_errors(run(inputs, layout.nodes, deterministic, variant=variant), expected, inputs.q.dtype)


def test_sinks_of_many_rows_d64() -> None:
    """Their gradient where a thread adds up several rows."""
    layout, inputs = data(([64] * 40, [-1] * 40), head_dim=64, heads=(2, 1), dtype=torch.bfloat16, sinks=True)
    check_errors(run(inputs, layout.nodes), exact(inputs, layout.nodes), torch.bfloat16)


PAIRS = [(192, 128), (128, 64), (64, 128), (96, 40), (256, 8), (40, 200), (72, 72), (512, 264), (40, 328)]


@pytest.mark.parametrize(("head_dim", "head_dim_v"), PAIRS, ids=[f"d{qk}-{v}" for qk, v in PAIRS])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_values_of_another_width(head_dim: int, head_dim_v: int, dtype: torch.dtype) -> None:
    """Nothing is read or written beyond either; split tiles and packs of heads too."""
    options = {"head_dim": head_dim, "head_dim_v": head_dim_v, "dtype": dtype}
    for heads, name in (((8, 2), "deep"), ((4, 4), "forest"), ((16, 1), "bush")):
        check_accuracy(TREES[name], options | {"heads": heads}, Variant())
    check_accuracy(TREES["forest"], options | {"heads": (6, 2)}, Variant(70, 30.0), loud)
    check_accuracy(TREES["forest"], options | {"heads": (6, 2)}, Variant(70, 0.05), quiet)


VARIANTS_OF_LONG_NODES = [Variant(), Variant(causal=False), Variant(700), Variant(1300), Variant(1300, 30.0)]


@pytest.mark.parametrize("variant", VARIANTS_OF_LONG_NODES, ids=str)
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (512, 512)])
def test_split_tiles_of_heads_with_a_backward_of_their_own(head_dim: int, head_dim_v: int, variant: Variant) -> None:
    """One long node and one KV head: its parts go through fp32 slots; with a window they begin inside a head."""
    tree = ([600, *[1500] * 6], [-1, *[0] * 6])
    layout, inputs = data(tree, heads=(8, 1), head_dim=head_dim, head_dim_v=head_dim_v, dtype=torch.bfloat16)
    expected = exact(inputs, layout.nodes, variant)
    for deterministic in (False, True):
        check_errors(run(inputs, layout.nodes, deterministic, variant=variant), expected, torch.bfloat16)


@configurations
def test_a_window_of_everything_changes_no_bit(options: Options) -> None:
    """Wider than every path: the same tiles in the same order for every query.

    Sums over queries come head by head where there is a window, and dQ that is summed in order has other sums. With few
    keys tiles are narrow, with a window and without. A window of 2^30 is none.
    """
    layout, inputs = data(TREES["forest"], **options)
    with counted_launches() as counts:
        expected = run(inputs, layout.nodes, deterministic=True, mean_keys=1)
    same = {"out", "lse"} | ({"dq"} if not any("in_order" in name for name in counts) else set())
    for window in (max(map(len, paths_of(TREES["forest"]))), 2**30, 2**31 - 1):
        found = run(inputs, layout.nodes, deterministic=True, variant=Variant(window), mean_keys=1)
        for key, one in found.items():
            if window >= 2**30 or key in same:
                oracle.assert_bits_equal(key, one, expected[key])


@configurations
def test_nan_outside_a_window_stays_there(options: Options) -> None:
    """Tiles beyond every window are not read: in a chain, rows far behind the poison keep their bits."""
    tree, far = ([700, 900], [-1, 0]), 1200
    layout, inputs = data(tree, **options)
    variant = Variant(64)
    expected = run(inputs, layout.nodes, True, variant=variant)
    poisoned = inputs._replace(**{name: getattr(inputs, name).clone() for name in ("q", "k", "v", "dout")})
    for one in (poisoned.q, poisoned.k, poisoned.v, poisoned.dout):
        one[: tree[0][0]] = float("nan")
    found = run(poisoned, layout.nodes, True, variant=variant)
    for key in ("out", "dq", "dk", "dv"):
        oracle.assert_bits_equal(key, found[key][far:-PAD], expected[key][far:-PAD])


@configurations
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("window", [0, 50, 300])
def test_sequences_with_other_keys_than_queries(window: int, causal: bool, options: Options) -> None:
    """flash_attn_varlen_func: fewer and more keys than queries, and none of either."""
    q_lens, k_lens = [130, 0, 400, 64, 1], [300, 20, 150, 0, 700]
    cu_q, cu_k = (torch.tensor([0, *lens]).cumsum(0).to(DEVICE, torch.int32) for lens in (q_lens, k_lens))
    heads, kv_heads = options["heads"]
    generator = torch.Generator().manual_seed(window)

    def normal(rows: int, heads: int) -> Tensor:
        values = torch.randn(rows, heads, options["head_dim"], generator=generator)
        return values.to(DEVICE, options["dtype"])

    q, k, v = normal(sum(q_lens), heads), normal(sum(k_lens), kv_heads), normal(sum(k_lens), kv_heads)
    dout, dlse = normal(sum(q_lens), heads), torch.randn(heads, sum(q_lens), generator=generator).to(DEVICE)
    inputs = [one.requires_grad_() for one in (q, k, v)]
    out, lse = flash_attn_varlen_func(
        *inputs, cu_q, cu_k, max(q_lens), max(k_lens), causal=causal, window_size=(window, -1), return_attn_probs=True
    )[:2]
    empty = lse.isneginf()
    loss = (out * dout).sum() + (lse * dlse).masked_fill(empty, 0.0).sum()
    found = dict(zip(("out", "dq", "dk", "dv"), (out, *torch.autograd.grad(loss, inputs))))

    nodes = ops.sequence_nodes(cu_q, cu_k, None, None, None)
    wide = [one.detach().double().requires_grad_() for one in inputs]
    softmax_scale = options["head_dim"] ** -0.5
    scores = (softmax_scale, causal, window, 0.0)
    right, right_lse = ops.forward(*wide, None, None, None, nodes, *scores, True, MANY_KEYS, False)
    assert right_lse.isneginf().equal(empty)
    loss = (right * dout.double()).sum() + (right_lse * dlse.double()).masked_fill(empty, 0.0).sum()
    expected = dict(zip(found, (right, *torch.autograd.grad(loss, wide))))
    check_errors(found | {"lse": lse}, expected | {"lse": right_lse.detach()}, options["dtype"])
