# SPDX-License-Identifier: BSD-3-Clause
"""TRL's trainers on shared prompts train as the stock ones do: the same rollouts, losses, gradients, parameters."""

from __future__ import annotations

import copy
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_trl
import pytest
import tiny_trl
import torch
import trl
from tiny_models import check_equal, check_gradients, gradients, tiny_model
from tiny_trl import (
    GRADIENT,
    VALUE,
    StockInGroups,
    batch,
    both,
    lora,
    model_on_disk,
    pair,
    refused,
    score,
    shared,
    train,
    trainer,
)
from torch import Tensor
from trl.trainer.utils import add_fused_lm_head

from flash_attn_dualkv import SharedPromptError
from flash_attn_dualkv.integrations.common.options import Options

pytestmark = pytest.mark.usefixtures("restored_registry")
ROOT = Path(__file__).resolve().parents[2]
GRPO = shared.SharedPromptGRPOTrainer
sharing = tiny_trl.importlib.import_module("flash_attn_dualkv.integrations.trl.sharing")


# --- training ---------------------------------------------------------------------------------------------------------

RUNS: dict[str, dict[str, Any]] = {
    "grpo": dict(loss_type="grpo", beta=0.1),
    "dapo": dict(
        loss_type="dapo", steps_per_generation=4, gradient_accumulation_steps=2, per_device_train_batch_size=4
    ),
    "dr_grpo": dict(loss_type="dr_grpo", num_iterations=2, per_device_train_batch_size=4),
    "entropy": dict(loss_type="cispo", entropy_coef=0.01, top_entropy_quantile=0.5, gradient_checkpointing=False),
    "fp32 head": dict(cast_lm_head_to_fp32=True, pad_to_multiple_of=16, mask_truncated_completions=True),
}


@pytest.mark.parametrize("name", RUNS)
def test_training_equals_stock(name: str, tmp_path: Path) -> None:
    got, _ = both(GRPO, StockInGroups, model_on_disk(tmp_path), tmp_path, **RUNS[name])
    assert min(got.metric("dedup_ratio")) > 1.2
    assert min(got.metric("tokens_saved")) > 0


def test_training_with_lora_equals_stock(tmp_path: Path) -> None:
    """The reference is the model with a copy of the adapter that training starts from."""
    got, _ = both(GRPO, trl.GRPOTrainer, tiny_trl.lora_model, tmp_path, beta=0.1, num_iterations=2)
    # The embeddings and all that is frozen have not moved.
    frozen = [name for name, one in got.before.items() if torch.equal(one, got.after[name])]
    assert not any("lora_B" in name and ".ref." not in name for name in frozen)
    assert any("embed_tokens" in name for name in frozen)


def test_mixture_of_experts_with_its_auxiliary_loss(tmp_path: Path) -> None:
    """Experts are balanced over the tokens of replicated prompts, although each prompt is computed once."""
    model = model_on_disk(tmp_path, "mixtral", router_aux_loss_coef=0.1)
    _, stock = both(GRPO, StockInGroups, model, tmp_path, steps_per_generation=2)
    assert all(one["aux_loss"] > 0 for one in stock.logs)


def test_rloo_equals_stock(tmp_path: Path) -> None:
    both(shared.SharedPromptRLOOTrainer, trl.RLOOTrainer, model_on_disk(tmp_path), tmp_path, beta=0.1)


@pytest.mark.parametrize("options", [dict(precompute_ref_log_probs=True), dict(ld_alpha=0.5, max_length=20)], ids=str)
def test_dpo_equals_stock(options: dict[str, Any], tmp_path: Path) -> None:
    options = dict(per_device_train_batch_size=4, **options)
    got, _ = both(shared.SharedPromptDPOTrainer, trl.DPOTrainer, model_on_disk(tmp_path), tmp_path, **options)
    assert min(got.metric("dedup_ratio")) > 1.1


def test_a_trainer_of_ones_own(tmp_path: Path) -> None:
    class Mine(trl.GRPOTrainer):
        def __init__(self, *args: Any, bonus: float, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.bonus = bonus

        def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
            return super()._compute_loss(model, inputs) * self.bonus

    class Shared(shared.SharedPromptMixin, Mine):
        pass

    own = dict(verify_first_steps=2)
    got, _ = both(Shared, Mine, model_on_disk(tmp_path), tmp_path, own, arguments=dict(bonus=2.0))
    assert got.trainer.bonus == 2.0
    assert [one.get("shared_prompt/logp_difference", 1.0) < VALUE for one in got.logs] == [True, True, False]


@pytest.mark.gpu
def test_training_on_a_gpu(tmp_path: Path) -> None:
    """In bf16 on the kernels, compared with stock attention in every step; in 32 bits on stock attention."""
    model = model_on_disk(tmp_path, hidden_size=256, head_dim=64)
    options = dict(arguments=dict(verify_first_steps=3), beta=0.1, use_cpu=False)
    got = train(trainer(GRPO, model, tmp_path, bf16=True, **options))
    assert sum(got.metric("fallbacks")) == 0
    assert 0 < max(got.metric("logp_difference")) < 0.1
    in_32_bits = train(trainer(GRPO, model, tmp_path, **options))
    assert in_32_bits.metric("fallbacks/dtype") == [1.0] * 3


def test_evaluation_and_generation_are_stock(tmp_path: Path) -> None:
    results = []
    for cls in (trl.GRPOTrainer, GRPO):
        model = tiny_model("qwen3", dtype=torch.float32, attention="eager")
        made = trainer(cls, model, tmp_path, arguments=dict(eval_dataset=tiny_trl.prompts()))
        with tiny_trl.quiet():
            torch.manual_seed(1)
            metrics = made.evaluate()
            ids = torch.randint(3, 90, (3, 6))
            generated = made.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=9, do_sample=False)
            logits = made.model(ids).logits
        results.append((metrics, generated, logits))
    (stock, expected, stock_logits), (metrics, generated, logits) = results
    assert torch.equal(generated, expected)
    assert torch.equal(logits, stock_logits)
    assert metrics["eval_loss"] == pytest.approx(stock["eval_loss"], abs=1e-6)
    assert metrics["eval_entropy"] == pytest.approx(stock["eval_entropy"], rel=1e-5)
    assert metrics["eval_shared_prompt/fallbacks"] == 0


# --- one forward ------------------------------------------------------------------------------------------------------


def scored_alike() -> dict[str, Tensor]:
    """Completions of one prompt that begin alike: the packed row has fewer scored rows than they have tokens."""
    draw = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 90, (1, 30), generator=draw).repeat(4, 1)
    ids[:, 25:] = torch.randint(3, 90, (4, 5), generator=draw)
    labels = ids.clone()
    labels[:, :12] = -100
    return dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels)


def with_trls_forward(name: str) -> Any:
    options = dict(router_aux_loss_coef=0.1, output_router_logits=True) if name == "mixtral" else {}
    model = tiny_model(name, attention="sdpa", **options).train()
    add_fused_lm_head(model)
    return model


def share(model: Any) -> Any:
    made = sharing.Sharing(Options(min_shared=4), SimpleNamespace(use_liger_kernel=False))
    made.install(model)
    return made


@pytest.mark.parametrize("items", [None, 200])
@pytest.mark.parametrize("name", ["qwen3", "mixtral"])
def test_the_loss_of_an_output(name: str, items: int | None) -> None:
    """Scored rows that completions share count as often as they are scored, in the gradients too."""
    found = []
    for shares in (False, True):
        model = with_trls_forward(name)
        made = share(model) if shares else None
        given = {} if items is None else dict(num_items_in_batch=torch.tensor(items))
        loss = model(**scored_alike(), fused_lm_head=True, **given).loss
        loss.backward()
        found.append((loss.detach(), gradients(model)))
    # The last row that they share is each one's own, as it scores different tokens.
    assert made is not None and not made.tally.fallbacks and made.tally.tokens == 24 + 4 * 6
    (expected, wanted), (got, own) = found
    check_equal(got, expected, VALUE)
    check_gradients(own, wanted, GRADIENT)


def test_a_deep_copy_has_its_own_weights() -> None:
    model = with_trls_forward("qwen3")
    made = share(model)
    before = model(**scored_alike(), fused_lm_head=True).log_probs.detach()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for one in twin.parameters():
            one.mul_(1.1)
    stock = with_trls_forward("qwen3")
    stock.load_state_dict(twin.state_dict())
    expected = stock(**scored_alike(), fused_lm_head=True).log_probs
    assert (expected - before).abs().max() > 0.01
    check_equal(twin(**scored_alike(), fused_lm_head=True).log_probs.detach(), expected.detach(), VALUE)
    with made.paused():
        assert torch.equal(twin(**scored_alike(), fused_lm_head=True).log_probs, expected)
    assert torch.equal(model(**scored_alike(), fused_lm_head=True).log_probs, before)
    assert made.tally.calls == 3 and not made.tally.fallbacks


# --- what is not shared -----------------------------------------------------------------------------------------------


def test_calls_that_are_not_shared(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stock, ours = pair(lambda: model_on_disk(tmp_path), tmp_path)
    single = batch([(9, [5]), (7, [2])])
    ids, mask, width = batch([(9, [5, 9, 3])])
    holes = mask.clone()
    holes[1, 4] = 0
    empty = mask.clone()
    empty[0, :9] = 0
    calls: dict[str, tuple[str, tuple[Any, ...]]] = {
        "unique prompts": ("dedup_ratio", single),
        "holes": ("samples", (ids, holes, width)),
        "no prompt": ("samples", (ids, empty, width)),
    }
    for reason, call in calls.values():
        got, scores = refused(ours, *call, compute_entropy=True)
        assert got == reason
        for one, expected in zip(scores, score(stock, *call, compute_entropy=True)):
            assert one is expected is None or torch.equal(one, expected)
    ours.args.use_liger_kernel = True
    assert refused(ours, ids, mask, width)[0] == "liger"
    warnings = [one.getMessage() for one in caplog.records if one.name == sharing.__name__]
    assert len(warnings) == 3  # once for each reason
    assert "dedup_ratio" in warnings[0] and "1.000 is below min_dedup_ratio=1.02" in warnings[0]
    assert "samples" in warnings[1]


def test_one_mask_of_lora_for_the_one_copy_of_a_prompt(tmp_path: Path) -> None:
    """In training mode, for who asks for it. Stock attention draws other masks: nothing is to be verified with it."""
    adapter, call = lora(lora_dropout=0.1, init_lora_weights=False), batch([(9, [5, 9, 3])])
    made = trainer(GRPO, model_on_disk(tmp_path), tmp_path, arguments=dict(peft_config=adapter))
    made.model.train()
    assert refused(made, *call)[0] == "dropout"
    arguments = dict(peft_config=adapter, share_lora_dropout=True)
    made = trainer(GRPO, model_on_disk(tmp_path), tmp_path, arguments=arguments)
    made.model.train()
    torch.manual_seed(0)
    first = score(made, *call)[0]
    assert made._sharing.tally.calls == 1 and not made._sharing.tally.fallbacks
    assert not torch.equal(score(made, *call)[0], first)
    torch.manual_seed(0)
    assert torch.equal(score(made, *call)[0], first)
    with pytest.raises(SharedPromptError, match="^share_lora_dropout: expected False with verify_first_steps"):
        trainer(GRPO, model_on_disk(tmp_path), tmp_path, arguments={**arguments, "verify_first_steps": 1})


def test_reasons_are_metrics_from_when_they_come_up(tmp_path: Path) -> None:
    """Shares of forwards, beside the trainer's own metrics; steps without a reason that was seen before count as 0."""
    run = train(trainer(GRPO, model_on_disk(tmp_path), tmp_path, arguments=dict(min_dedup_ratio=1.8)))
    ratios = run.metric("dedup_ratio")
    shares = run.metric("fallbacks")
    assert {0.0, 1.0} == set(shares)
    for ratio, share in zip(ratios, shares):
        assert (ratio == 1.0) == (share == 1.0)
    first = shares.index(1.0)
    assert [one.get("shared_prompt/fallbacks/dedup_ratio") for one in run.logs[first:]] == shares[first:]
    assert not any("shared_prompt/fallbacks/dedup_ratio" in one for one in run.logs[:first])
    assert not any(f"shared_prompt/fallbacks/{name}" in one for one in run.logs for name in ("samples", "liger"))


def test_verification_switches_off_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed row with other tokens: the loss of that very step is stock's already."""
    call = batch([(9, [5, 9, 3])])
    model = model_on_disk(tmp_path)
    made = trainer(GRPO, model, tmp_path, arguments=dict(verify_first_steps=1))
    pack = sharing.read_padded
    monkeypatch.setattr(sharing, "read_padded", lambda ids, *rest, **kw: pack(ids.clamp(max=50), *rest, **kw))
    logps, _, _ = score(made, *call)
    expected, _, _ = score(trainer(trl.GRPOTrainer, model, tmp_path), *call)
    assert torch.equal(logps, expected)
    assert made._metrics["train"]["shared_prompt/logp_difference"][0] > 0.01
    assert refused(made, *call)[0] == "switched_off"


def test_wrong_options(tmp_path: Path) -> None:
    """Those that all trainers have are in test_fallback.py."""
    with pytest.raises(SharedPromptError, match="^min_dedup_ratio: expected a float > 0, got '2'$"):
        trainer(GRPO, "nowhere", tmp_path, arguments=dict(min_dedup_ratio="2"))
    with pytest.raises(SharedPromptError, match="verify_first_steps: expected 0 for a trainer without rollouts, got 1"):
        trainer(shared.SharedPromptDPOTrainer, "nowhere", tmp_path, arguments=dict(verify_first_steps=1))


# --- documentation ----------------------------------------------------------------------------------------------------


def test_the_page_has_all_options_reasons_and_metrics() -> None:
    page = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("trainers.md", "limits.md"))
    options = {*Options._fields} - {"enabled"}
    assert options <= {*re.findall(r"(\w+): ", shared.SharedPromptMixin.__doc__)}
    for name in (*options, *sharing.REASONS):
        assert f"| `{name}` |" in page
    metrics = ("dedup_ratio", "tokens", "tokens_saved", "unread_tokens", "fallbacks", "fallbacks/<reason>")
    for name in (*metrics, "logp_difference"):
        assert f"`shared_prompt/{name}`" in page


def test_the_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The same rollouts and rewards in both runs and a table in the end; the benchmark makes one file of them."""

    def in_this_process(command: list[Any], check: bool, timeout: float) -> None:
        with monkeypatch.context() as patch, tiny_trl.quiet():
            patch.setattr(sys, "argv", list(map(str, command[1:])))
            runpy.run_path(sys.argv[0], run_name="__main__")

    errors = {name: getattr(subprocess, name) for name in ("TimeoutExpired", "CalledProcessError")}
    monkeypatch.setattr(bench_trl, "subprocess", SimpleNamespace(run=in_this_process, **errors))
    where = ["--out", str(tmp_path), "--name", "run", "--commit", "abc"]
    assert bench_trl.main([*where, "--", "--steps", "3", "--preset", "cpu"]) == 0
    result = json.loads((tmp_path / "run.json").read_text())
    assert result["header"]["gpu"] == "CPU" and not result["header"]["dirty"]
    stock, got = result["rows"]
    assert [stock["arguments"]["stock"], got["arguments"]["stock"]] == [True, False]
    table = capsys.readouterr().out
    assert got["rewards"] == pytest.approx(stock["rewards"], abs=1e-6)
    assert got["grad_norms"] == pytest.approx(stock["grad_norms"], rel=1e-3)
    assert len(got["rewards"]) == 3 and min(got["dedup_ratio"]) > 3 and stock["dedup_ratio"] == [None] * 3
    for name, seconds in got["phases"].items():
        assert len(seconds) == 3 and min(seconds) > 0
        assert f"\n{name} " in table


def test_the_example_takes_all_samples_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Micro-batches that do not divide them would leave some out."""
    arguments = ["--out", str(tmp_path), "--preset", "cpu", "--steps", "1", "--prompts", "3", "--responses", "16"]
    monkeypatch.setattr(sys, "argv", [str(bench_trl.EXAMPLE), *arguments])
    with pytest.raises(SystemExit):
        runpy.run_path(sys.argv[0], run_name="__main__")
    assert "--micro-batch: expected a divisor of the 48 samples of a step, got 32" in capsys.readouterr().err
