# SPDX-License-Identifier: BSD-3-Clause
"""The tree attention of TRL's AsyncGRPO on this library: exact for every tree, in one call that copies no keys."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import tiny_trl
import torch
from tiny_models import Samples as Sequences
from tiny_models import check_equal, check_gradients, gradients, replicated_logps, stock_twin, tiny_model
from torch import Tensor
from transformers import AttentionInterface
from tree_cases import dense
from trl.experimental.async_grpo import packing
from trl.trainer.utils import add_fused_lm_head

tree = tiny_trl.importlib.import_module("flash_attn_dualkv.integrations.trl.tree")
trees = tiny_trl.importlib.import_module("flash_attn_dualkv.integrations.trees")

# Token sequences; what they begin with in common is shared.
TREES = {
    "one level": [[7, 8, 9, 10, *end] for end in ([11, 12], [13], [14, 15, 16, 17])],
    "two trees": [[7, 8, 9, 11, 12], [7, 8, 9, 13], [20, 21, 22, 23], [20, 21, 30]],
    "no sharing": [[7, 8, 9], [20, 21, 22, 23]],
    "prompts that begin alike": [[5, 6, *prompt, *end] for prompt in ([7] * 9, [8] * 12) for end in ([1, 2], [3], [4])],
    "deep": [[1, 2, 3], [1, 2, 4, 5, 6], [1, 2, 4, 5, 7, 8], [1, 2, 4, 9, 10], [1, 30, 31, 32]],
}


@pytest.fixture
def hook(restored_registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook for the length of a test, without kernels to fall back to."""
    monkeypatch.setattr(packing, "tree_attention", packing.tree_attention)
    monkeypatch.setattr(packing, "_flash_attn", lambda: pytest.fail("TRL's own attention was called"))
    tree.use_dualkv_for_tree_attention()
    packing.register_tree_attention()  # as the trainer does when it is made


def pack(sequences: list[list[int]]) -> dict[str, Any]:
    """TRL's row of the samples, whose tokens are trained from the third on."""
    row = packing.TreeRow()
    for one in sequences:
        row.add(
            dict(
                input_ids=torch.tensor(one),
                completion_mask=torch.tensor([0, 0] + [1] * (len(one) - 2)),
                old_log_probs=torch.zeros(len(one)),
                advantage=1.0,
                group_id=0,
            )
        )
    return dict(row.pack())


def tree_kwargs(packed: dict[str, Any]) -> dict[str, Any]:
    """As the trainer's compute_loss passes them to the model."""
    kwargs = {name: packed[name] for name in ("tree_kv_index", "tree_cu_seqlens_q", "tree_cu_seqlens_k")}
    kwargs["tree_max_seqlen_q"], kwargs["tree_max_seqlen_k"] = packed["tree_max_seqlens"].tolist()
    return kwargs


def by_path(
    q: Tensor, k: Tensor, v: Tensor, packed: dict[str, Any], scale: float, window: int | None = None, softcap: float = 0
) -> Tensor:
    """Each segment's queries see the keys of its path."""
    bounds = zip(pairwise(packed["tree_cu_seqlens_q"].tolist()), pairwise(packed["tree_cu_seqlens_k"].tolist()))
    sees = torch.zeros(q.shape[2], q.shape[2], dtype=torch.bool)
    for (begin, end), keys in bounds:
        path = packed["tree_kv_index"][slice(*keys)].tolist()
        for row in range(begin, end):
            behind = len(path) - (end - begin) + row - begin + 1
            sees[row, path[max(behind - window, 0) if window else 0 : behind]] = True
    return dense(*(one[0].transpose(0, 1) for one in (q, k, v)), sees, scale, softcap)[0][None]


@pytest.mark.parametrize("name", TREES)
def test_attention_and_its_gradients(name: str, hook: None) -> None:
    packed = pack(TREES[name])
    tokens = len(packed["input_ids"])
    torch.manual_seed(0)
    tensors = [torch.randn(1, heads, tokens, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    attention = AttentionInterface._global_mapping["tree_fa3"]
    got, nothing = attention(None, *tensors, None, **tree_kwargs(packed), scaling=0.3)
    assert nothing is None
    expected = by_path(*tensors, packed, 0.3)
    check_equal(got, expected, 1e-12)
    weights = torch.randn_like(expected)
    found = torch.autograd.grad((got * weights).sum(), tensors)
    wanted = torch.autograd.grad((expected * weights).sum(), tensors)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["one level", "deep"])
def test_a_model_as_the_trainer_runs_it(name: str, checkpointing: bool, hook: None) -> None:
    """Log-probabilities and gradients are those of each sample alone; the tree is read once for all layers."""
    sequences = TREES[name]
    model = tiny_model("qwen3", dtype=torch.float32, attention="tree_fa3").train()
    samples = Sequences([one[:2] for one in sequences], [one[2:] for one in sequences])
    twin = stock_twin(model, "sdpa")
    expected, _ = replicated_logps(twin, samples)
    expected.sum().backward()
    add_fused_lm_head(model)
    if checkpointing:
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
    packed = pack(sequences)
    builds: list[int] = []
    build = tree.read_tree
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree, "read_tree", lambda *args: builds.append(1) or build(*args))
        inputs = {one: packed[one][None] for one in ("input_ids", "position_ids", "shift_labels")}
        output = model(**inputs, fused_lm_head=True, **tree_kwargs(packed))
        logps = output.log_probs.flatten()[packed["token_index"]]
        logps.sum().backward()
    assert len(builds) == 1
    check_equal(logps, expected, 5e-6)
    check_gradients(gradients(model), gradients(twin), 5e-6)


@pytest.mark.parametrize("head_dim", [12, 520])
def test_what_the_kernels_lack_goes_to_the_original(head_dim: int, hook: None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    class Kernels:
        @staticmethod
        def flash_attn_varlen_func(q: Tensor, k: Tensor, *rest: Any, **kwargs: Any) -> Tensor:
            calls.append(len(k))
            return q

    monkeypatch.setattr(packing, "_flash_attn", lambda: Kernels)
    packed = pack(TREES["one level"])
    q = torch.randn(1, 2, len(packed["input_ids"]), head_dim, dtype=torch.bfloat16)
    packing.tree_attention(None, q, q, q, None, **tree_kwargs(packed))
    assert calls == [len(packed["tree_kv_index"])]


@pytest.mark.parametrize(("window", "softcap"), [(None, 1.5), (1, 0.0), (3, 1.5), (6, 0.0)])
def test_windows_and_softcaps(window: int | None, softcap: float, hook: None) -> None:
    packed = pack(TREES["deep"])
    q = torch.randn(1, 2, len(packed["input_ids"]), 8, dtype=torch.float64)
    options = {"sliding_window": window, "softcap": softcap or None}
    got, _ = packing.tree_attention(None, q, q, q, None, **tree_kwargs(packed), **options)
    check_equal(got, by_path(q, q, q, packed, 8**-0.5, window, softcap), 1e-12)


def test_before_or_after_the_trainer_and_twice(restored_registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = packing.tree_attention
    monkeypatch.setattr(packing, "tree_attention", stock)
    packing.register_tree_attention()
    assert AttentionInterface._global_mapping["tree_fa3"] is stock
    tree.use_dualkv_for_tree_attention()
    tree.use_dualkv_for_tree_attention()
    ours = AttentionInterface._global_mapping["tree_fa3"]
    assert ours is packing.tree_attention and ours.dualkv_stock is stock
    packing.register_tree_attention()
    assert AttentionInterface._global_mapping["tree_fa3"] is ours
