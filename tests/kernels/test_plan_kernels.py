# SPDX-License-Identifier: BSD-3-Clause
"""What explain_plan says is what runs: on each card that DUALKV_GPU names, with exact gradients."""

from __future__ import annotations

import pytest
import torch
from launches import DEVICE, GPU_MARKS, counted_launches, kernel_families
from tree_runs import Variant, check_errors, data, exact, run

from flash_attn_dualkv import explain_plan

pytestmark = GPU_MARKS
LENS = [150, 1, 64, *(16 * one for one in range(1, 9)), 150, 83]  # 1024 rows: enough for a launch for dQ alone
HAS_DEVICE = DEVICE == "cpu" or torch.cuda.is_available()
IS_HOPPER = HAS_DEVICE and "sm90" in kernel_families()
KEYS = [80, 400, 5000]  # on either side of where an H200 and an H100 choose otherwise
CALLS = [(LENS, -1), (LENS, 60), (LENS[3:], -1)]  # a short window, and too few rows for such a launch
CASES = [(card, keys, *call) for card in ("h200", "h100") for keys in KEYS for call in CALLS] if IS_HOPPER else []


@pytest.mark.parametrize(("gpu", "mean_keys", "lens", "window"), [*CASES, ("a100", 80, *CALLS[0])])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128], ids="d{}".format)
def test_what_the_plan_says_runs(
    gpu: str,
    head_dim: int,
    lens: list[int],
    window: int,
    deterministic: bool,
    mean_keys: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A number of keys that is far from the right one does no harm; deterministic results repeat."""
    monkeypatch.setenv("DUALKV_GPU", gpu)
    layout, inputs = data((lens, [-1] * len(lens)), 0, heads=(4, 2), head_dim=head_dim, dtype=torch.bfloat16)
    plan = explain_plan(
        num_heads=4, num_kv_heads=2, head_dim=head_dim, rows=layout.num_tokens, nodes=len(lens), mean_keys=mean_keys,
        window_size=(window, 0 if window >= 0 else -1), deterministic=deterministic,
    )  # fmt: skip
    assert plan.gpu == gpu
    with counted_launches() as counts:
        found = run(inputs, layout.nodes, deterministic, variant=Variant(window), mean_keys=mean_keys)
    launched = {name for name in counts if name.startswith("dualkv_sm")}
    assert launched == {one.launch for one in (plan.forward, plan.backward, plan.dq) if one}
    check_errors(found, exact(inputs, layout.nodes, Variant(window)), torch.bfloat16)
    if deterministic:
        again = run(inputs, layout.nodes, deterministic, variant=Variant(window), mean_keys=mean_keys)
        assert all(again[key].equal(one) for key, one in found.items())


def test_a_card_that_there_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DUALKV_GPU", "b200")
    layout, inputs = data(([8], [-1]), 0, heads=(2, 1), head_dim=64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="DUALKV_GPU: expected one of h200, h100, a100, got b200"):
        run(inputs, layout.nodes)
    with pytest.raises(ValueError, match="gpu: expected one of h200, h100, a100, got b200"):
        explain_plan(num_heads=2, num_kv_heads=1, head_dim=64, rows=8, gpu="b200")
    with pytest.raises(ValueError, match=r"head_dim_v: head dim 8 \(v: 264\) is larger than every one in this build"):
        explain_plan(num_heads=2, num_kv_heads=1, head_dim=8, head_dim_v=264, rows=8, gpu="a100")


def test_the_plan_of_this_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DUALKV_GPU", raising=False)
    if DEVICE != "cuda":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # the host's card is an H200
    made = explain_plan(num_heads=32, num_kv_heads=8, head_dim=128, rows=4096)
    named = explain_plan(num_heads=32, num_kv_heads=8, head_dim=128, rows=4096, gpu=made.gpu)
    assert (made.forward, made.backward, made.dq_sums) == (named.forward, named.backward, named.dq_sums)
    assert DEVICE == "cuda" or made.gpu == "h200"
