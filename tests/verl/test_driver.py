# SPDX-License-Identifier: BSD-3-Clause
"""The plug-in where verl's trainers run: which samples go to which rank; and its figures and options."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import pytest

pytest.importorskip("verl", reason="verl is not installed: see docs/trainers.md")

import torch
from processes import run_ranks
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorData, NonTensorStack
from verl import DataProto
from verl.utils import tensordict_utils as tu
from verl.utils.flops_counter import FlopsCounter

import flash_attn_dualkv.integrations.verl as plugin
from flash_attn_dualkv import pack_shared_prompts
from flash_attn_dualkv.integrations.verl import sharing
from flash_attn_dualkv.integrations.verl.balance import expected_tree, partitions
from flash_attn_dualkv.integrations.verl.losses import of_micro_batches
from flash_attn_dualkv.integrations.verl.micro_batches import (
    Lengths,
    grouped_micro_batches,
    position_rows,
    samples_with_late_images,
    samples_with_media,
    why_not,
)
from flash_attn_dualkv.integrations.verl.sharing import SharedPrompts
from flash_attn_dualkv.integrations.verl.statistics import Statistics

UIDS = [f"uid_{index % 4}" for index in range(16)]  # a prompt's responses lie apart
PROMPTS = [(5, 40, 300, 90)[index % 4] for index in range(16)]
RESPONSES = [7 * (index % 5) + 1 for index in range(16)]


def trainer(**override_config: Any) -> Any:
    model = {"override_config": override_config}
    return SimpleNamespace(
        config=SimpleNamespace(actor_rollout_ref=SimpleNamespace(model=model)),
        actor_rollout_wg=SimpleNamespace(_dispatch_info={"actor": [0, 1]}),
        tokenizer=SimpleNamespace(eos_token_id=1),
        use_prefix_grouper=False,
        _get_required_batch_multiple=lambda size: size,
        _get_dp_size=lambda *args: 2,
    )


def v1(**override_config: Any) -> tuple[list[str], dict[str, Any]]:
    keys = [f"{uid}_0_{index}" for index, uid in enumerate(UIDS)]
    found, metrics = v1_keys(keys, PROMPTS, RESPONSES, **override_config)
    return [key.rsplit("_", 2)[0] for key in found], metrics


def v1_keys(
    keys: list[str], prompts: list[int], responses: list[int], **override_config: Any
) -> tuple[list[str], dict[str, Any]]:
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer
    from verl.utils.transferqueue_utils import KVBatchMeta

    tags = [{"prompt_len": p, "response_len": r, "seq_len": p + r} for p, r in zip(prompts, responses)]
    batch = KVBatchMeta(partition_id="train", keys=keys, tags=tags)
    metrics: dict[str, Any] = {}
    found = PPOTrainer._balance_batch(trainer(**override_config), batch, metrics)
    assert sorted(found.keys) == sorted(keys)
    return found.keys, metrics


def v0(dtype: torch.dtype = torch.int64, **override_config: Any) -> tuple[list[str], dict[str, Any]]:
    import numpy
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    left = torch.tensor([[column >= 300 - p for column in range(300)] for p in PROMPTS])
    right = torch.tensor([[column < r for column in range(32)] for r in RESPONSES])
    batch = DataProto.from_dict(
        tensors={"prompts": torch.zeros(16, 300), "attention_mask": torch.cat((left, right), 1).to(dtype)},
        non_tensors={"uid": numpy.array(UIDS, dtype=object)},
    )
    metrics: dict[str, Any] = {}
    RayPPOTrainer._balance_batch(trainer(**override_config), batch, metrics)
    return list(batch.non_tensor_batch["uid"]), metrics


@pytest.mark.parametrize("balance", [v1, v0, partial(v0, torch.float32)])
def test_balance(balance: Any) -> None:
    """Groups stay whole, ranks have as many samples, verl's own figures are those of the new order."""
    uids, metrics = balance()
    assert sorted(uids) == sorted(UIDS)
    first, second = set(uids[:8]), set(uids[8:])
    assert first.isdisjoint(second) and len(first) == 2
    tokens = {uid: sum(p + r for u, p, r in zip(UIDS, PROMPTS, RESPONSES) if u == uid) for uid in set(UIDS)}
    parts = sorted(sum(tokens[uid] for uid in part) for part in (first, second))
    assert [metrics["global_seqlen/balanced_min"], metrics["global_seqlen/balanced_max"]] == parts


def test_prompts_stay_in_the_order_of_the_batch() -> None:
    """A rank's mini-batches are cut from its list: sorted by length, the first would have all long prompts."""
    for part in partitions(PROMPTS, RESPONSES, UIDS, 2):
        assert [UIDS[index] for index in part] == sorted(UIDS[index] for index in part)
        assert part[:4] == sorted(part[:4]) and part[4:] == sorted(part[4:])


def test_steps_of_agents_stay_together() -> None:
    """Where a step has room for the one before, their tokens count once; a rollout that starts anew has its own."""
    steps = [(10, 5), (20, 5), (30, 5)]  # prompt, response
    prompts, responses = ([step[at] for _ in range(6) for step in steps] for at in (0, 1))
    uids = [f"uid{index // 6}" for index in range(18)]
    sessions = [str(index // 3 % 2) for index in range(18)]
    assert partitions(prompts, responses, uids, 3, sessions) == [[*range(at, at + 6)] for at in (0, 6, 12)]
    keys = [f"uid_{index // 6}_{index // 3 % 2}_{index % 3}" for index in range(12)]
    found, _ = v1_keys(keys, [*prompts[:6], *(10, 40, 80) * 2], responses[:12])
    assert [{key.rsplit("_", 2)[0] for key in part} for part in (found[:6], found[6:])] == [{"uid_1"}, {"uid_0"}]
    tree, ids = expected_tree(prompts[:6], responses[:6], uids[:6], sessions[:6])
    assert set(ids) == {("uid0", 10)}
    assert tree.node_lens == (9, 6, 10, 10, 6, 10, 10) and tree.node_parents == (-1, 0, 1, 2, 0, 4, 5)
    assert tree.leaves == (1, 2, 3, 4, 5, 6)
    prompts[2] = 24  # the last step has forgotten a part of the one before
    tree, ids = expected_tree(prompts[:3], responses[:3], uids[:3], sessions[:3])
    assert ids == [("uid0", 10), ("uid0", 10), ("uid0", 24)]
    assert tree.node_lens == (9, 6, 10, 23, 6)


@pytest.mark.parametrize("balance", [v1, v0])
def test_balance_switched_off(balance: Any) -> None:
    uids, _ = balance(shared_prompt=False)
    assert not set(uids[:8]).isdisjoint(uids[8:])


def statistics(config: Any) -> Statistics:
    return Statistics(FlopsCounter(config), 2)


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Any:
    from transformers import Qwen3Config

    monkeypatch.setattr("verl.utils.flops_counter.get_device_flops", lambda *args: 400.0)
    return Qwen3Config(num_hidden_layers=2, hidden_size=64, intermediate_size=128, head_dim=16, num_attention_heads=4)


def test_executed_mfu(config: Any) -> None:
    """Without sharing it is verl's own; with it, that of a causal mask over the tokens and pairs that are computed."""
    counted = statistics(config)
    counted.count_stock(Lengths([300, 50], [20, 30]), "multimodal")
    flops, promised = FlopsCounter(config).estimate_flops([320, 80], 2.0)
    found = counted.metrics(2.0, forward_only=False)
    # verl takes T * T for twice the pairs, of which there are T * (T + 1).
    assert found["shared_prompt/mfu_executed"][0] == pytest.approx(flops / promised / 2, rel=1e-2)
    assert found["shared_prompt/fallback/multimodal"] == [1.0]

    shared = statistics(config)
    prompt = torch.arange(300)
    batch = pack_shared_prompts([prompt] * 8, [torch.arange(20)] * 8)
    shared.count_shared(batch, unread=7)
    metrics = {name.removeprefix("shared_prompt/"): value[0] for name, value in shared.metrics(2.0, True).items()}
    assert metrics["dedup_ratio"] == pytest.approx(8 * 320 / (299 + 8 * 21))
    assert metrics["effective_tokens_per_s"] == 8 * 320 / 2
    assert metrics["tokens_saved"] == 8 * 320 - (299 + 8 * 21)
    assert metrics["unread_tokens"] == 7
    one, _ = FlopsCounter(config).estimate_flops([320], 2.0)
    assert metrics["mfu_executed"] < 8 * one / promised / 2 / 3
    # With its backward a forward is three times as much.
    in_training = shared.metrics(2.0, False)["shared_prompt/mfu_executed"][0]
    assert in_training == pytest.approx(3 * metrics["mfu_executed"])


def jagged(rows: list[torch.Tensor]) -> torch.Tensor:
    return tu.nested_tensor_from_tensor_list(rows)


def of_text(rows: int, *lengths: int) -> torch.Tensor:
    """Position ids of samples without images, in so many rows."""
    return jagged([torch.arange(length).repeat(rows, 1) for length in lengths])


def media(*inputs: Any) -> NonTensorStack:
    return NonTensorStack.from_list([NonTensorData(one) for one in inputs])


def other_positions(at: tuple[int, ...], change: int = 1) -> torch.Tensor:
    positions = of_text(4, 3, 4)
    positions.values()[at] += change
    return positions


REFUSED: dict[str, dict[str, Any]] = {
    "multimodal": dict(multi_modal_inputs=media({}, {"grid": torch.ones(1)})),
    "positions": dict(position_ids=other_positions((2, 5))),
    "temperature": dict(temperature=torch.tensor([0.7, 1.3])),
    "distillation": dict(distillation_only=True, use_fused_kernels=True),
    "routing_replay": dict(enable_routing_replay=True),
    "forced_groups": dict(force_group_size=2),
    "no_prompts": {},
}


def samples(**given: Any) -> TensorDict:
    """Two samples of 3 and 4 tokens."""
    given = dict(temperature=torch.ones(2), input_ids=jagged([torch.arange(3), torch.arange(4)])) | given
    data = TensorDict({name: one for name, one in given.items() if isinstance(one, torch.Tensor)}, batch_size=2)
    if "multi_modal_inputs" in given:
        data["multi_modal_inputs"] = given["multi_modal_inputs"]
    settings = {name: one for name, one in given.items() if isinstance(one, (bool, int))}
    tu.assign_non_tensor(data, **settings)
    return data


def test_replayed_routes_are_for_who_takes_them() -> None:
    given: dict[str, Any] = dict(position_ids=of_text(4, 3, 4), prompts=torch.ones(2, 3))
    data = samples(**given, enable_routing_replay=True, routed_experts=jagged([torch.zeros(3), torch.zeros(4)]))
    assert (why_not(data), why_not(data, takes_routes=True)) == ("routing_replay", None)
    # Those of the sampler that nobody replays.
    assert why_not(samples(**given, routed_experts=data["routed_experts"])) is None


@pytest.mark.parametrize("reason", [None, *REFUSED])
def test_what_in_the_samples_is_left_to_verl(reason: str | None) -> None:
    given: dict[str, Any] = dict(position_ids=of_text(4, 3, 4), distillation_use_topk=True, force_group_size=1)
    given |= dict(prompts=torch.ones(2, 3)) if reason != "no_prompts" else {}
    assert why_not(samples(**given | REFUSED.get(reason or "", {}))) == reason


POSITIONS = {
    "one row": (jagged([torch.arange(3), torch.arange(4)]), True),
    "three rows": (of_text(3, 3, 4), True),
    "the first row": (other_positions((0, 0)), False),
    "the last token": (other_positions((3, 6), -2), False),
    "all rows, alike": (other_positions((slice(None), slice(3, 7))), False),  # where verl sees no new sequence
    "one row that counts on": (jagged([torch.arange(3), torch.arange(3, 7)]), False),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_positions_of_text(name: str) -> None:
    """All rows count the tokens of their sample from 0; anything else is left to verl."""
    positions, is_text = POSITIONS[name]
    data = samples(position_ids=positions, prompts=torch.ones(2, 3))
    assert why_not(data) == (None if is_text else "positions")
    assert position_rows(positions).shape[1] == 7


def test_positions_of_samples_of_one_length() -> None:
    """PyTorch takes the rows for what differs between samples of one length."""
    positions = torch.nested.as_nested_tensor([torch.arange(3).repeat(4, 1)] * 2, layout=torch.jagged)
    assert positions.values().shape == (8, 3)
    assert torch.equal(position_rows(positions), torch.tensor([[0, 1, 2, 0, 1, 2]] * 4))


def test_positions_of_samples_that_are_apart() -> None:
    """Those of images are what they are; the other samples' are looked at."""
    inputs = media({"pixel_values": torch.ones(1)}, {})
    first, second = (
        samples(position_ids=other_positions(at), prompts=torch.ones(2, 3), multi_modal_inputs=inputs)
        for at in ((2, 1), (2, 5))
    )
    assert (why_not(first), why_not(first, [0])) == ("multimodal", None)
    assert why_not(second, [0]) == "positions"
    assert why_not(first, [0, 1]) == "multimodal"  # nothing is left


def test_which_samples_have_images() -> None:
    """Not those whose processor says of each token that it is text."""
    kinds = torch.zeros(1, 3, dtype=torch.int64)
    inputs = [{}, {"mm_token_type_ids": kinds}, {"token_type_ids": kinds + 1}, None, {"pixel_values": torch.ones(1)}]
    data = TensorDict({"one": torch.zeros(6)}, batch_size=6)
    data["multi_modal_inputs"] = media(*inputs, {"pixel_values": None})
    assert samples_with_media(data) == [2, 4]
    assert samples_with_media(data[:2]) == samples_with_media(data.exclude("multi_modal_inputs")) == []


def test_which_samples_have_late_images() -> None:
    """At the end of a prompt, of which each response has a copy, or behind it; a text may have drawn such a token."""
    rows = [torch.tensor(one) for one in ([9, 9, 1, 2], [1, 9, 2], [1, 2, 3, 9, 4], [1, 2, 9], [9, 1, 2, 3, 4])]
    data = TensorDict({"input_ids": jagged(rows), "prompts": jagged([torch.zeros(n) for n in (3, 2, 3, 2, 4)])}, 5)
    data["multi_modal_inputs"] = media(*[{"pixel_values": torch.ones(1)}] * 3, {}, {"pixel_values": torch.ones(1)})
    assert samples_with_late_images(data, [9, 8]) == [1, 2]
    assert samples_with_late_images(data.exclude("multi_modal_inputs"), [9]) == []


@pytest.mark.parametrize("is_dynamic", [True, False])
def test_samples_with_images_do_not_take_texts_along(is_dynamic: bool) -> None:
    """Dynamic micro-batches hold one kind; of fixed ones at most one holds both."""
    lengths = [(8, 4), (8, 6), (5, 3), (8, 4), (5, 5), (5, 2), (8, 4), (5, 1)]
    ids = jagged([torch.cat((torch.full((p,), p), torch.arange(r))) for p, r in lengths])
    data = TensorDict({"input_ids": ids, "prompts": jagged([torch.zeros(p) for p, _ in lengths])}, batch_size=8)
    apart = [0, 4, 6]
    tu.assign_non_tensor(
        data, use_dynamic_bsz=is_dynamic, micro_batch_size_per_gpu=2, max_token_len_per_gpu=24, temperature=1.0
    )
    found = grouped_micro_batches(data, None, plugin.Options(), None, apart)
    assert found is not None
    parts = found.indices
    if parts is None:
        assert found.order is not None
        parts = [found.order[at : at + 2] for at in range(0, 8, 2)]
    assert sorted(index for part in parts for index in part) == list(range(8))
    mixed = [part for part in parts if 0 < len(set(part) & set(apart)) < len(part)]
    assert len(mixed) == (0 if is_dynamic else 1)
    assert is_dynamic or found.order == [1, 3, 2, 5, 7, 0, 4, 6]


def test_what_the_kernels_lack(monkeypatch: pytest.MonkeyPatch, config: Any) -> None:
    """On a GPU what they cannot run is left to verl before any layer runs: other ranks may have nothing to refuse."""
    from flash_attn_dualkv.integrations.verl import SharedPromptFSDPEngine
    from flash_attn_dualkv.integrations.verl import sharing as module

    ids = jagged([torch.arange(30), torch.arange(20)])
    data = TensorDict({"input_ids": ids, "position_ids": ids, "prompts": ids}, batch_size=2)
    tu.assign_non_tensor(data, temperature=1.0)
    engine = SharedPromptFSDPEngine.__new__(SharedPromptFSDPEngine)
    engine.refusal, engine.use_ulysses_sp = None, False
    engine.noise = {False: None}
    engine.stock_module, engine.config = SimpleNamespace(training=False, config=config), config
    assert engine._why_not(data) is None
    head_dim, config.head_dim = config.head_dim, 20
    monkeypatch.setattr(module, "get_device_name", lambda: "cpu")
    assert engine._why_not(data) is None  # on the CPU the reference has every head dim
    monkeypatch.setattr(module, "get_device_name", lambda: "cuda")
    assert engine._why_not(data) == "kernels"
    config.head_dim = head_dim
    assert engine._why_not(data) is None
    engine._autocast_dtype = torch.float32
    assert engine._why_not(data) == "dtype"


def _begin(rank: int, results: Any) -> None:
    engine: Any = SharedPrompts()
    config = SimpleNamespace(model_type="qwen3")
    engine.model_config = SimpleNamespace(override_config={}, hf_config=config)
    for refusing in ([], [1], [0, 1]):
        own = f"of rank {rank}" if rank in refusing else None
        with patch.object(sharing.logger, "warning") as warning:
            engine._begin("Model", config, 2, Mock(return_value=own))
        messages = [text % tuple(args) for text, *args in (call.args for call in warning.call_args_list)]
        results[rank, len(refusing)] = engine.refusal, messages


def test_ranks_agree_on_whether_a_model_is_shared() -> None:
    """Stages of a pipeline have other layers; those that share would wait for those that do not."""
    found = run_ranks(_begin, 2)
    said = "flash_attn_dualkv: prompts of Model are"
    assert found[0, 0] == (None, [f"{said} shared"]) and found[1, 0] == (None, [])
    refusal, messages = found[0, 1]
    assert "another rank" in refusal and messages == [f"{said} NOT shared: {refusal}"]
    assert found[1, 1] == ("of rank 1", [f"{said} NOT shared: of rank 1"])
    assert [found[rank, 2][0] for rank in range(2)] == ["of rank 0", "of rank 1"]


def test_samples_without_prompts() -> None:
    """verl's SFT trainer has none: its micro-batches are its own, and count."""
    data = TensorDict({"input_ids": jagged([torch.arange(30), torch.arange(20)])}, batch_size=2)
    assert Lengths.of(data) == Lengths([0, 0], [30, 20])
    assert grouped_micro_batches(data, None, plugin.Options(), "no_prompts") is None


@pytest.mark.parametrize("keeps", [True, False])
def test_the_head_computes_the_rows_that_score(keeps: bool) -> None:
    """Of 3 x (8 + 4) tokens there are 7 + 3 x 5 rows, and logits for 3 x 4 of them."""
    from flash_attn_dualkv.integrations.verl.engine import SharedPromptFSDPEngine
    from flash_attn_dualkv.integrations.verl.micro_batches import pack_micro_batch

    rows = [torch.cat((torch.arange(8), torch.tensor([20, 30, 40, 50]) + index)) for index in range(3)]
    lists = {"input_ids": rows, "prompts": [one[:8] for one in rows], "position_ids": [torch.arange(12)] * 3}
    data = TensorDict({name: jagged(rows) for name, rows in lists.items()}, batch_size=3)
    tu.assign_non_tensor(data, temperature=1.0, use_fused_kernels=False, calculate_entropy=False)
    engine = SharedPromptFSDPEngine.__new__(SharedPromptFSDPEngine)
    engine.use_ulysses_sp = engine.pad_to_length = False
    engine.plan = pack_micro_batch(data, 1, plugin.Options(), keeps)
    inputs, output_args = engine.prepare_model_inputs(data)
    assert inputs["input_ids"].shape == (1, 22)
    labels = output_args["input_ids_rmpad_rolled"]
    if keeps:
        assert torch.equal(labels, torch.cat([one[8:] for one in rows]))
        assert inputs["logits_to_keep"].shape == labels.shape == output_args["temperature_rmpad"].shape == (12,)
    else:
        assert "logits_to_keep" not in inputs and labels.shape == (22,)


WEIGHTS = {"loss_type": "reinforce", "rollout_is_batch_normalize": True}


@pytest.mark.parametrize(
    ("word", "config"),
    [
        (None, {}),
        (None, {"loss_agg_mode": "seq-mean-token-sum"}),
        ("loss_scale_factor", {"loss_agg_mode": "seq-mean-token-sum-norm"}),
        (None, {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 24}),
        (None, {"policy_loss": {"loss_mode": "gspo"}}),
        ("geo_mean", {"policy_loss": {"loss_mode": "geo_mean"}}),
        ("kl_cov", {"policy_loss": {"loss_mode": "kl_cov"}}),
        ("rollout_is_batch_normalize", {"policy_loss": {"loss_mode": "bypass_mode", "rollout_correction": WEIGHTS}}),
        (None, {"policy_loss": {"loss_mode": "bypass_mode", "rollout_correction": {"loss_type": "ppo_clip"}}}),
    ],
)
def test_losses_that_depend_on_micro_batches(word: str | None, config: dict[str, Any]) -> None:
    def loss(config: Any, **_: Any) -> None: ...

    data = TensorDict({"response_mask": jagged([torch.ones(2), torch.ones(3)])}, batch_size=2)
    found = of_micro_batches(partial(loss, config=config), data)
    assert (found is None) == (word is None) and (word or "") in (found or "")
    assert of_micro_batches(None, data) is None and of_micro_batches(loss, data) is None


def test_padded_masks_are_of_one_width() -> None:
    config = {"loss_agg_mode": "seq-mean-token-sum-norm"}
    data = TensorDict({"response_mask": torch.ones(2, 3)}, batch_size=2)
    assert of_micro_batches(partial(print, config=config), data) is None
