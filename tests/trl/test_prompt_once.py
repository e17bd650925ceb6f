# SPDX-License-Identifier: BSD-3-Clause
"""TRL's trainers with prompt_once: slices of an optimizer step that share prompts compute them once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_trl
import torch
import trl
from hybrid_models import HYBRIDS, hybrid_model
from tiny_models import check_equal, check_gradients, gradients, tiny_model
from tiny_trl import (
    GRADIENT,
    VALUE,
    Run,
    batch,
    check_runs,
    in_windows,
    lora,
    model_on_disk,
    prepared,
    score,
    shared,
    slices_of,
    train,
    trainer,
    window,
)
from torch import Tensor

from flash_attn_dualkv import SharedPromptError
from flash_attn_dualkv.integrations.transformers.trunk import Trunk

pytestmark = pytest.mark.usefixtures("restored_registry")
GRPO = shared.SharedPromptGRPOTrainer
once = tiny_trl.importlib.import_module("flash_attn_dualkv.integrations.trl.prompt_once")
ONCE, OFF = dict(prompt_once=True), dict(prompt_once=False)
# A prompt's 8 completions are 4 slices of an optimizer step.
STEP: dict[str, Any] = dict(per_device_train_batch_size=2, gradient_accumulation_steps=4, num_generations=8)


def runs(model: Any, out: Path, cls: Any = GRPO, stock: Any = tiny_trl.StockInGroups, **config: Any) -> tuple[Run, Run]:
    """A training with prompt_once and one without, which equal the stock one."""
    window = config.get("gradient_accumulation_steps", 1)
    found = []
    for kind, own in ((in_windows(stock, window), {}), (in_windows(cls, window), OFF), (cls, ONCE)):
        start = model() if callable(model) else model
        found.append(
            train(
                trainer(
                    kind,
                    start,
                    out,
                    arguments={**config.get("arguments", {}), **own},
                    **{name: value for name, value in config.items() if name != "arguments"},
                )
            )
        )
    expected, off, got = found
    check_runs(off, expected)
    check_runs(got, expected)
    assert sum(got.metric("fallbacks")) == 0
    return got, off


# --- training ---------------------------------------------------------------------------------------------------------

RUNS: dict[str, dict[str, Any]] = {
    "dapo": dict(STEP, loss_type="dapo"),
    "old and reference scores": dict(STEP, loss_type="grpo", beta=0.1, num_iterations=2, steps_per_generation=8),
    "several generations in a step": dict(STEP, loss_type="dr_grpo", steps_per_generation=2, num_generations=4),
    "slices of two prompts": dict(
        loss_type="bnpo", num_generations=6, per_device_train_batch_size=4, gradient_accumulation_steps=3
    ),
    "entropy, without checkpoints": dict(
        STEP, loss_type="cispo", entropy_coef=0.01, top_entropy_quantile=0.5, gradient_checkpointing=False
    ),
    "sequences' ratios, fp32 head": dict(
        STEP, importance_sampling_level="sequence", cast_lm_head_to_fp32=True, mask_truncated_completions=True,
        temperature=0.8, pad_to_multiple_of=16,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_training_equals_stock(name: str, tmp_path: Path) -> None:
    got, off = runs(model_on_disk(tmp_path), tmp_path, **RUNS[name])
    for tokens, without in zip(got.metric("tokens"), off.metric("tokens")):
        assert tokens < without
    replicated = [sum(pair) for pair in zip(got.metric("tokens"), got.metric("tokens_saved"))]
    assert replicated == [sum(pair) for pair in zip(off.metric("tokens"), off.metric("tokens_saved"))]


def test_rloo(tmp_path: Path) -> None:
    class Stock(tiny_trl.parts.SiblingsTogetherMixin, trl.RLOOTrainer):
        pass

    config = dict(STEP, beta=0.1)
    got, off = runs(model_on_disk(tmp_path), tmp_path, shared.SharedPromptRLOOTrainer, Stock, **config)
    assert sum(got.metric("tokens")) < sum(off.metric("tokens"))


def test_steps_that_hold_their_prompts_run_as_without(tmp_path: Path) -> None:
    """One slice for each optimizer step; and slices of one prompt in several of these, but for old scores."""
    for config in (dict(num_generations=8), dict(STEP, gradient_accumulation_steps=1, steps_per_generation=4)):
        got, off = runs(model_on_disk(tmp_path), tmp_path, **config)
        begin = "steps_per_generation" in config
        assert got.metric("tokens")[begin:] == off.metric("tokens")[begin:]


def test_evaluation_between_steps(tmp_path: Path) -> None:
    arguments = dict(eval_dataset=tiny_trl.prompts().select(range(2)))
    config = dict(STEP, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8, arguments=arguments)
    got, off = runs(model_on_disk(tmp_path), tmp_path, **config)
    losses = [[log["eval_loss"] for log in run.trainer.state.log_history if "eval_loss" in log] for run in (got, off)]
    assert len(losses[0]) == 3 and losses[0] == pytest.approx(losses[1], rel=1e-5, abs=1e-6)


# --- one window -------------------------------------------------------------------------------------------------------


GROUPS = {
    "a prompt": ([(9, [5, 9, 3, 7])], 2, None),
    "slices of prompts that alternate": ([(9, [5, 9]), (12, [4, 7])], 1, [0, 2, 1, 3]),
    "equal and empty completions": ([(7, [4, 0, 0, 0, 3, 1])], 2, None),
    "a slice of its own": ([(9, [5, 9, 3, 7]), (4, [2, 5])], 2, None),
    "a prompt of one token": ([(1, [5, 9, 3, 7])], 2, None),
    "a prompt that begins another": ([(4, [3, 3]), (5, [2, 2])], 1, None),
}
CASES = [
    *(("qwen3", name) for name in GROUPS),
    *((family, "a prompt") for family in ("gemma3_text", "gemma4_text", "qwen3_5_text", "lfm2")),
    ("lfm2", "slices of prompts that alternate"),
]


@pytest.mark.parametrize(("family", "groups"), CASES)
def test_a_window(family: str, groups: str, tmp_path: Path) -> None:
    """Losses of slices, and the gradients that they and the prompts have left."""
    slices = slices_of(*GROUPS[groups])
    if groups.startswith("equal"):
        slices[1]["completion_ids"][0] = slices[0]["completion_ids"][0]
        slices[1]["completion_mask"][0] = slices[0]["completion_mask"][0]
    found = []
    make = hybrid_model if family in HYBRIDS else tiny_model
    for cls, options in ((trl.GRPOTrainer, {}), (GRPO, OFF), (GRPO, ONCE)):
        made = prepared(cls, make(family, dtype=torch.float64, attention="sdpa"), tmp_path, slices, **options)
        found.append((window(made), gradients(made.model), made))
    (losses, expected, _), _, (got_losses, got, made) = found
    assert got_losses == pytest.approx(losses, rel=VALUE, abs=1e-7)
    check_gradients(got, expected, GRADIENT)
    check_gradients(found[1][1], expected, GRADIENT)
    tokens = [own._metrics["train"]["shared_prompt/tokens"][0] for _, _, own in found[1:]]
    assert (tokens[1] < tokens[0]) == (groups != "a prompt of one token")
    assert made._once._run is None and "clip_grad_norm_" not in vars(made.accelerator)


def test_scores_without_gradients(tmp_path: Path) -> None:
    """Chunks of old and reference log-probabilities: a prompt runs in the first that has it."""
    ids, mask, width = batch([(40, [5, 9, 3, 7, 2]), (31, [6, 4, 8])])
    stock, off, made = (
        trainer(cls, tiny_model("qwen3", dtype=torch.float64, attention="sdpa"), tmp_path, arguments=arguments)
        for cls, arguments in ((trl.GRPOTrainer, {}), (GRPO, OFF), (GRPO, ONCE))
    )
    tokens = []
    for own in (stock, off, made):
        own.model.train()
        with torch.no_grad():
            logps, entropies, _ = score(own, ids, mask, width, batch_size=2, compute_entropy=True)
        if own is stock:
            expected = logps, entropies
            continue
        check_equal(logps, expected[0], VALUE)
        check_equal(entropies, expected[1], VALUE)
        tokens.append(int(own._sharing.tally.tokens))
    # The last two slices are the second prompt's; the third has both. A row before a completion is
    # its own.
    completions = int(mask.sum()) - 5 * 40 - 3 * 31 + 8
    assert tokens == [completions + 3 * 39 + 2 * 30, completions + 39 + 30]


def test_unasked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Prompts are kept where that pays and no pass needs more rows; not between steps that are no TRL's."""

    class Slices(trl.GRPOTrainer):
        def _prepare_inputs(self, *args: Any) -> Any:
            return super()._prepare_inputs(*args)

    class Above(GRPO):
        def training_step(self, *args: Any) -> Tensor:
            return super().training_step(*args)

    mine = type("Mine", (shared.SharedPromptMixin, Slices), {})
    tokens: dict[str, list[int]] = {}
    for prompt in (9, 2):  # tokens; with 2 of them a prompt's pass costs more than 5% of what it saves
        slices, found = slices_of([(prompt, [5, 9, 3, 7])], 2), {}
        for name, cls, options in (
            ("off", GRPO, OFF), ("once", GRPO, ONCE), ("unasked", GRPO, {}), ("slices", mine, {}), ("steps", Above, {})
        ):  # fmt: skip
            model = tiny_model("qwen3", dtype=torch.float64, attention="sdpa", intermediate_size=256)
            made = prepared(cls, model, tmp_path, slices, **options)
            window(made)
            tokens.setdefault(name, []).append(made._metrics["train"]["shared_prompt/tokens"][0])
            found[name] = gradients(made.model)
            check_gradients(found[name], found["off"], GRADIENT)
    assert tokens["slices"] == tokens["steps"] == tokens["off"] and not sayings(caplog)
    assert tokens["unasked"] == [tokens["once"][0], tokens["off"][1]] and tokens["once"][0] < tokens["off"][0]


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_part_that_raises_and_a_right_next_step(tmp_path: Path) -> None:
    slices = slices_of(*GROUPS["a prompt"])
    stock = prepared(trl.GRPOTrainer, tiny_model("qwen3", dtype=torch.float64, attention="sdpa"), tmp_path, slices)

    class Fails(GRPO):
        fails = True

        def _compute_loss(self, model: Any, inputs: Any) -> Tensor:
            loss = super()._compute_loss(model, inputs)
            if self.fails and self._step == 1:
                raise RuntimeError("no memory")
            return loss

    made = prepared(Fails, tiny_model("qwen3", dtype=torch.float64, attention="sdpa"), tmp_path, slices, **ONCE)
    with pytest.raises(RuntimeError, match="no memory") as caught:
        window(made)
    told = "".join(getattr(caught.value, "__notes__", caught.value.args))
    assert "in slice 1 (prompt_once): .grad has gradients of the passes before it" in told
    made.model.zero_grad()
    made.fails, made._step = False, 0
    assert window(made) == pytest.approx(window(stock), rel=VALUE, abs=1e-7)
    check_gradients(gradients(made.model), gradients(stock.model), GRADIENT)


class Clips(trl.GRPOTrainer):
    def training_step(self, *args: Any) -> Tensor:
        loss = super().training_step(*args)
        self.accelerator.clip_grad_norm_(self.model.parameters(), 1.0)
        return loss


class Steps(trl.GRPOTrainer):
    def training_step(self, *args: Any) -> Tensor:
        loss = super().training_step(*args)
        self.optimizer.step()
        return loss


@pytest.mark.parametrize("kind", [Clips, Steps])
def test_a_trainer_that_does_not_wait_for_prompts(kind: Any, tmp_path: Path) -> None:
    cls = type("Shared", (shared.SharedPromptMixin, kind), {})
    made = trainer(cls, model_on_disk(tmp_path), tmp_path, arguments=ONCE, **STEP)
    with pytest.raises(SharedPromptError, match="^prompt_once: expected False, or neither clipped gradients"):
        train(made)
    # Nothing of it stays.
    made.accelerator.clip_grad_norm_(made.model.parameters(), 1.0)
    made.optimizer.step()


# --- what runs as without ---------------------------------------------------------------------------------------------


def sayings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "in spite of prompt_once" in record.getMessage()]


DYNAMIC = dict(rope_parameters=dict(rope_type="dynamic", factor=2.0, rope_theta=1e4))
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "angles by the longest sequence": (
        lambda: tiny_model("llama", dtype=torch.float32, attention="sdpa", max_position_embeddings=8, **DYNAMIC),
        {}, "angles of RoPE follow the longest one",
    ),
    "losses of routers": (
        lambda: tiny_model("mixtral", dtype=torch.float32, attention="sdpa", router_aux_loss_coef=0.1),
        {}, "the model is given compute_aux_loss",
    ),
    "compiled models": (
        lambda: tiny_model("qwen3", dtype=torch.float32, attention="sdpa"), dict(torch_compile=True), "torch_compile",
    ),
    "DeepSpeed": (
        lambda: tiny_model("qwen3", dtype=torch.float32, attention="sdpa"), dict(deepspeed=True), "DeepSpeed reduces",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_are_refused(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They run as without, which is said once."""
    model, settings, message = REFUSED[name]
    slices = slices_of(*GROUPS["a prompt"])
    found = []
    for options in (OFF, ONCE):
        made = prepared(GRPO, model(), tmp_path, slices, **options)
        if options == ONCE:  # none of these reaches into the trainer
            made.args.torch_compile = "torch_compile" in settings
            made.is_deepspeed_enabled = "deepspeed" in settings
        found.append((window(made), gradients(made.model)))
        made.model.zero_grad()
        window(made)
    assert found[0][0] == found[1][0]
    check_gradients(found[1][1], found[0][1], 0.0)
    (said,) = sayings(caplog)
    assert message in said


def test_dropout_of_lora_that_draws_one_mask(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The two passes over a prompt would draw two."""
    arguments = dict(ONCE, share_lora_dropout=True, peft_config=lora(lora_dropout=0.1))
    made = trainer(GRPO, model_on_disk(tmp_path), tmp_path, arguments=arguments, **STEP)
    train(made)
    (said,) = sayings(caplog)
    assert "dropout" in said


def test_layers_that_no_configuration_tells_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first pass over a prompt finds them, and no other is tried."""
    slices = slices_of(*GROUPS["a prompt"])
    tried = []

    def keep(trunk: Any) -> None:
        tried.append(trunk)
        raise SharedPromptError("model", "layers that run once in a forward", "0 twice")

    monkeypatch.setattr(Trunk, "keep", keep)
    stock, made = (
        prepared(cls, tiny_model("qwen3", dtype=torch.float64, attention="sdpa"), tmp_path, slices, **options)
        for cls, options in ((trl.GRPOTrainer, {}), (GRPO, ONCE))
    )
    for _ in range(2):
        assert window(made) == pytest.approx(window(stock), rel=VALUE, abs=1e-7)
    check_gradients(gradients(made.model), gradients(stock.model), GRADIENT)
    (said,) = sayings(caplog)
    assert "layers that run once" in said and len(tried) == 1


@pytest.mark.parametrize("place", [0, 1])
def test_a_trainer_that_scores_other_tokens(place: int, tmp_path: Path) -> None:
    """Than are buffered: its slices run as without, unless one of them has been a part."""

    class Cuts:
        def _compute_loss(self: Any, model: Any, inputs: Any) -> Tensor:
            if self._step >= place:
                inputs = {**inputs, **{name: inputs[name][:, :4] for name in ("completion_ids", "completion_mask")}}
                inputs["old_per_token_logps"] = inputs["old_per_token_logps"][:, :4]
            return super()._compute_loss(model, inputs)  # type: ignore[misc]

    slices = slices_of(*GROUPS["a prompt"])
    stock, made = (
        prepared(
            type("Mine", (shared.SharedPromptMixin, Cuts, trl.GRPOTrainer), {}), model, tmp_path, slices, **options
        )
        for options in (OFF, ONCE)
        for model in [tiny_model("qwen3", dtype=torch.float64, attention="sdpa")]
    )
    if place:
        with pytest.raises(SharedPromptError, match="^prompt_once: expected False, as the trainer scores other tokens"):
            window(made)
        return
    assert window(made) == window(stock)
    check_gradients(gradients(made.model), gradients(stock.model), 0.0)


@pytest.mark.parametrize("place", [0, 1])
def test_verification_compares_parts(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that differs is stock's, or the prompt's other parts would lack it; sharing is off behind it."""
    slices = slices_of(*GROUPS["a prompt"])
    stock, made = (
        prepared(cls, tiny_model("qwen3", dtype=torch.float64, attention="sdpa"), tmp_path, slices, **options)
        for cls, options in ((trl.GRPOTrainer, {}), (GRPO, dict(ONCE, verify_first_steps=2)))
    )
    scored = once.Pieces.part_scores

    def wrong(pieces: Any, *args: Any) -> Any:
        part = scored(pieces, *args)
        return once.replace(part, logps=part.logps + 1.0) if made._step == place else part

    monkeypatch.setattr(once.Pieces, "part_scores", wrong)
    monkeypatch.setattr(once, "replace", tiny_trl.importlib.import_module("dataclasses").replace, raising=False)
    losses = window(made)
    assert made._sharing.off is not None
    expected = window(stock)
    assert losses[0] == pytest.approx(expected[0], rel=VALUE)
    assert (losses[1] == pytest.approx(expected[1], rel=1e-3)) == (place == 0)
    if place == 0:
        check_gradients(gradients(made.model), gradients(stock.model), GRADIENT)


def test_a_trainer_without_rollouts(tmp_path: Path) -> None:
    with pytest.raises(SharedPromptError, match="prompt_once: expected False for a trainer without rollouts, got True"):
        trainer(shared.SharedPromptDPOTrainer, "nowhere", tmp_path, arguments=ONCE)
