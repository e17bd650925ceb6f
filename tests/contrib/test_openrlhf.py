# SPDX-License-Identifier: BSD-3-Clause
"""OpenRLHF's own actor and PPO trainer, with shared prompts and without, on tiny models."""

from __future__ import annotations

import contextlib
import copy
import importlib
import sys
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import pytest
import torch
from stand_ins import stand_ins
from tiny_models import Samples, check_gradients, gradients, tiny_model
from torch import Tensor

from flash_attn_dualkv.errors import SharedPromptError, SharedPromptUnsupportedError

pytest.importorskip("openrlhf", reason="needs OpenRLHF")

plugin = importlib.import_module("flash_attn_dualkv.contrib.openrlhf")
pytestmark = pytest.mark.slow
flash = importlib.import_module("transformers.modeling_flash_attention_utils")


def load() -> tuple[Any, Any]:
    """OpenRLHF's modules, imported after `share_prompts` has been called, as in a worker of Ray."""
    bert = dict(
        index_first_axis=lambda rows, indices: rows[indices],
        pad_input=flash._pad_input,
        unpad_input=flash._unpad_input,
        rearrange=importlib.import_module("einops").rearrange,
    )
    plugin.share_prompts(min_shared=1)
    assert "openrlhf.models" not in sys.modules
    ray = dict(remote=lambda *args, **kwargs: lambda one: one)
    names = "flash_attn", "ray", "vllm", "pylatexenc", "aiohttp", "torchdata"
    with stand_ins(*names, flash_attn__bert_padding=bert, ray=ray):
        return importlib.import_module("openrlhf.models.actor"), importlib.import_module(
            "openrlhf.trainer.ray.ppo_actor"
        )


actor_module, trainer_module = load()
Actor = actor_module.Actor
stock_forward = Actor.forward.dualkv_stock

# Prompts of several lengths, each with several responses, in mixed order.
SAMPLES = Samples.random([(30, [5, 9, 7]), (12, [1, 7]), (21, [4, 6])], seed=3).take([0, 3, 1, 5, 2, 4, 6])


@pytest.fixture(autouse=True)
def eager_entropy() -> Any:
    """OpenRLHF compiles a function of three operators."""
    with patch.object(actor_module, "compute_entropy", actor_module.compute_entropy._torchdynamo_orig_callable):
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("model"))
    tiny_model("qwen3", dtype=torch.float32, attention="sdpa").save_pretrained(folder)
    return folder


def make_actor(path: str, **options: Any) -> Any:
    return Actor(path, attn_implementation="sdpa", **options).to(torch.float32)


def batch_of(samples: Samples, *, left: bool = False, whole: bool = True) -> dict[str, Tensor]:
    """As OpenRLHF pads them: tokens, which are there, and which of them are actions (of the second to the last)."""
    width = max(map(len, (p + r for p, r in zip(samples.prompts, samples.responses)))) + 2
    rows = {name: torch.zeros(len(samples), width, dtype=torch.int64) for name in ("sequences", "attention_mask")}
    actions = torch.zeros(len(samples), width, dtype=torch.bool)
    for at, (prompt, response) in enumerate(zip(samples.prompts, samples.responses)):
        begin = width - len(prompt) - len(response) if left else 0
        end = begin + len(prompt) + len(response)
        rows["sequences"][at, begin:end] = torch.tensor(prompt + response)
        rows["attention_mask"][at, begin:end] = 1
        actions[at, begin + len(prompt) : end] = True
        if not whole and len(response) > 4:  # what a tool has said, between two actions
            actions[at, begin + len(prompt) + 1 : begin + len(prompt) + 3] = False
    return {**rows, "action_mask": actions[:, 1:]}


def compare(actor: Any, batch: dict[str, Tensor], tolerance: float = 5e-6) -> None:
    """Log-probabilities, entropies and gradients of a loss with both, shared against stock."""
    mask = batch["action_mask"]
    torch.manual_seed(0)
    weights = torch.randn(mask.shape) * mask
    found = []
    for forward in (Actor.forward, stock_forward):
        logps, output = forward(actor, **batch, return_output=True, return_entropy=True)
        entropy = output.entropy[:, -mask.shape[1] :]
        ((logps * weights).sum() + 0.1 * (entropy * mask).sum()).backward()
        found.append((logps.detach(), (entropy * mask).detach(), gradients(actor)))
    (logps, entropy, grads), (expected, expected_entropy, expected_grads) = found
    assert logps.shape == expected.shape and logps.dtype == expected.dtype
    assert (logps - expected).abs().max() <= tolerance
    assert (entropy - expected_entropy).abs().max() <= tolerance
    check_gradients(grads, expected_grads, tolerance)


def count_rows(actor: Any) -> list[int]:
    """Filled with the tokens of each forward of the backbone."""
    rows: list[int] = []
    backbone = next(one for one in actor.modules() if type(one).__name__.endswith("Qwen3Model"))
    backbone.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    return rows


@pytest.mark.parametrize(("packing", "left", "whole"), [(False, True, True), (True, False, False), (True, True, True)])
def test_policy_equals_stock(path: str, packing: bool, left: bool, whole: bool) -> None:
    actor = make_actor(path, packing_samples=packing, temperature=0.7).train()
    batch = batch_of(SAMPLES, left=left, whole=whole)
    compare(actor, batch)
    rows = count_rows(actor)
    with torch.no_grad():
        logps = actor(batch["sequences"], batch["action_mask"], batch["attention_mask"])
        expected = stock_forward(actor, **batch)
    assert (logps - expected).abs().max() <= 5e-6
    # Each response has a copy of its prompt's last token.
    assert rows[0] == 30 + 12 + 21 - 3 + len(SAMPLES) + sum(map(len, SAMPLES.responses)) < rows[1]


def test_experts(tmp_path: Any) -> None:
    tiny_model("qwen3_moe", dtype=torch.float32, attention="sdpa", num_experts_per_tok=4).save_pretrained(tmp_path)
    actor, batch = make_actor(str(tmp_path)), batch_of(SAMPLES)
    assert actor.model.config.output_router_logits
    compare(actor, batch)
    _, output = actor(**batch, return_output=True)
    assert "aux_loss" in stock_forward(actor, **batch, return_output=True)[1] and "entropy" not in output
    with pytest.raises(SharedPromptUnsupportedError, match="aux_loss: expected --actor.aux_loss_coef 0 with shared"):
        _ = output.aux_loss
    with pytest.raises(AttributeError, match="logits: an actor that shares prompts returns"):
        _ = output.logits


def test_fallbacks(path: str, caplog: pytest.LogCaptureFixture) -> None:
    actor, batch = make_actor(path), batch_of(SAMPLES)
    alone = batch_of(SAMPLES.take([0, 1]))
    scores = plugin.PaddedScores.of(min_dedup_ratio=1.1, self_check=True, min_shared=1)
    forward = plugin._forward(MagicMock(return_value="stock"), scores)
    odd = {**batch, "action_mask": torch.ones_like(batch["action_mask"])}  # padding is no action
    dropout = make_actor(path, lora_rank=2, target_modules=["q_proj"], lora_dropout=0.1).train()
    moe = SimpleNamespace(
        model=tiny_model("qwen3_moe", attention="sdpa", output_router_logits=True), temperature=1.0
    )  # fmt: skip
    whole = {name: one for name, one in batch.items() if name != "action_mask"}
    for reason, one, given, more in [
        ("arguments", actor, batch, dict(ring_attn_group=object())),
        ("multimodal", actor, batch, dict(pixel_values=torch.zeros(1))),
        ("dedup_ratio", actor, alone, {}),
        ("samples", actor, odd, {}),
        ("dropout", dropout, batch, {}),
        ("arguments", moe, whole, dict(return_logprobs=True, return_output=True)),
        (None, actor, whole, dict(return_output=True)),  # logits are wanted: nothing to count
    ]:
        for _ in range(2):
            caplog.clear()
            before = scores.tally.fallbacks[reason]
            assert forward(one, **given, **more) == "stock"
            assert reason is None or scores.tally.fallbacks[reason] == before + 1
            is_told = "share_lora_dropout=True" in caplog.text and "times fewer tokens" in caplog.text
            assert is_told == (reason == "dropout" and len(caplog.records) == 1)
        assert not caplog.records  # said once
    assert scores.tally.tokens == scores.tally.replicated > 0


def test_wrong_uses() -> None:
    for wrong in (dict(min_dedup_ratio=0), dict(self_check=1), dict(min_shared=0), dict(min_shared=None)):
        with pytest.raises(SharedPromptError, match=f"{next(iter(wrong))}: expected"):
            plugin.share_prompts(**wrong)
    older = patch.object(type(plugin.OPENRLHF), "version", return_value="0.11.0")
    expected = "openrlhf: expected 0.11.2, which this is written for, got 0.11.0: its entropies are those of logits"
    with older, pytest.raises(SharedPromptUnsupportedError, match=expected):
        plugin.share_prompts()
    before = Actor.forward
    plugin.share_prompts()
    assert Actor.forward is before


class Strategy(MagicMock):
    """What a trainer asks of OpenRLHF's, in one process and without an optimizer."""

    def all_reduce(self, data: Any, op: str = "mean") -> Any:
        return data

    def backward(self, loss: Tensor, model: Any, optimizer: Any) -> None:
        (loss / self.accumulated_gradient).backward()


def train(actor: Any, items: list[Any], micro: int, steps: int, loss: str) -> Any:
    """The replay buffer's samples through PPO's training; all gradients are added up."""
    args = SimpleNamespace(
        train=SimpleNamespace(max_epochs=1, dynamic_batch_enable=False, colocate_all=False, async_enable=False),
        actor=SimpleNamespace(
            eps_clip_low_high=(0.2, 0.2), dual_clip=None, loss_agg_mode=loss, policy_loss_type="ppo",
            aux_loss_coef=0.0, entropy_coef=0.01,
        ),
        algo=SimpleNamespace(
            advantage=SimpleNamespace(
                is_correction_level="off", is_correction_mode="mask", is_correction_gating="ratio",
                is_correction_threshold=(0.5, 5.0),
            ),
            kl=SimpleNamespace(use_loss=True, init_coef=0.1, estimator="k3", unbiased_gradient=False),
        ),
        ds=SimpleNamespace(packing_samples=False, tensor_parallel_size=1),
        vllm=SimpleNamespace(sync_backend="gloo"),
    )  # fmt: skip
    strategy = Strategy(args=args, ring_attn_group=None, ds_device_mesh=None)
    strategy.accumulated_gradient = len(items) // micro // steps
    scheduler = MagicMock(get_last_lr=lambda: [1.0])
    strategy.get_grad_norm = lambda model: 0.0
    with patch.object(trainer_module, "torch_dist_barrier_and_cuda_sync"), patch("torch.cuda.current_device") as device:
        device.return_value = 0
        trainer = trainer_module.ActorPPOTrainer(
            strategy, actor, None, None, scheduler, micro_train_batch_size=micro, dataloader_pin_memory=False
        )
        device.return_value = "cpu"
        trainer.replay_buffer.items = items
        return trainer.ppo_train(0.1)


@pytest.mark.parametrize("loss", ["token-mean", "seq-mean-token-mean"])
def test_a_step_of_ppo_equals_stock(path: str, loss: str) -> None:
    experience = importlib.import_module("openrlhf.trainer.ppo_utils.experience")
    actor = make_actor(path)
    samples = Samples.random([(30, [5, 9, 7, 4]), (12, [1, 7, 8, 3]), (21, [4, 6, 6, 5])]).take(
        [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]
    )
    items = []
    for at in range(len(samples)):
        one = {name: value[0] for name, value in batch_of(samples.take([at])).items()}
        torch.manual_seed(at)
        old = -3 + 0.1 * torch.randn(one["action_mask"].shape)
        both = dict(action_log_probs=old, base_action_log_probs=old + 0.1, advantages=torch.randn(old.shape))
        items.append(experience.Experience(**one, **both, info={}))
    rows = count_rows(actor)
    found = []
    loader = patch.object(trainer_module, "DataLoader", torch.utils.data.DataLoader)
    forward = patch.object(Actor, "forward", stock_forward)
    for parts in ([loader, forward], [loader], []):
        torch.manual_seed(5)
        rows.clear()
        with contextlib.ExitStack() as stack:
            for one in parts:
                stack.enter_context(one)
            status = train(actor, copy.deepcopy(items), 4, 1, loss)
        found.append((status, gradients(actor), sum(rows)))
    (status, expected, stock_rows), (same_batches, *_), (_, _, shared_rows) = found
    for name in ("policy_loss", "entropy_loss", "kl", "ppo_kl"):  # whose means weight micro-batches
        assert same_batches[name] == pytest.approx(status[name], abs=2e-6)
    for _, got, _ in found[1:]:
        check_gradients(got, expected, 2e-5)
    assert shared_rows < 0.6 * stock_rows


def test_micro_batches_keep_samples_of_a_prompt_together() -> None:
    prompts = ["a"] * 4 + ["b"] * 4 + ["c"] * 4 + ["d"] * 3
    for rows, step in ((4, 12), (2, 4)):
        torch.manual_seed(1)
        sampler = plugin._Siblings(prompts, rows, step)
        batches = [*sampler]
        assert len(batches) == len(sampler) == len(prompts) // rows and {*map(len, batches)} == {rows}
        torch.manual_seed(1)
        order = torch.randperm(len(prompts)).tolist()
        per_step = step // rows
        for at in range(0, len(batches), per_step):
            taken = [sample for one in batches[at : at + per_step] for sample in one]
            begin = at * rows
            assert sorted(taken) == sorted(order[begin : begin + len(taken)])
    torch.manual_seed(1)
    whole = [Counter(prompts[sample] for sample in one) for one in plugin._Siblings(prompts[:12], 4, 12)]
    assert all(len(one) == 1 for one in whole)
