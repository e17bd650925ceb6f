# SPDX-License-Identifier: BSD-3-Clause
"""Adapters of PEFT on shared prompts: every kind is exact, or refused by what its configuration says."""

from __future__ import annotations

import importlib
from typing import Any

import models_page
import pytest
import torch
from adapters import EXACT, KINDS, SAMPLES, TARGETS, Kind, adapted, base_of, peft
from sweep import check_page, switched, verdict_of
from tiny_models import TOLERANCES, check_equal, dualkv, replicated_logps, tiny_model
from torch import nn

from flash_attn_dualkv import SharedPromptError, pack_shared_prompts
from flash_attn_dualkv.integrations.transformers.admission.table import check_adapters

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's, about options of tiny models
# Of what changes a layer, and of what is refused, one of each way. All others behind -m slow.
QUICK = {
    "LoRA", "LoRA of embedding and head", "LoRA of experts", "LoRA with layer_replication", "LoRA with modules_to_save",
    "BOFT", "DoRA", "IA3", "LoHa", "OFT", "Trainable tokens", "VeRA",
    "aLoRA", "Adaption prompt", "LoRA with lora_dropout", "Poly", "Prefix tuning", "PVeRA", "VeLoRA with batch_average",
    "X-LoRA",
}  # fmt: skip
VERSION = tuple(int(part) for part in peft.__version__.split(".")[:2])


@pytest.mark.parametrize("name", [pytest.param(one, marks=[pytest.mark.slow] * (one not in QUICK)) for one in KINDS])
def test_exact_or_refused(name: str) -> None:
    """Log-probabilities and the gradients of all trained parameters, in training mode.

    What is exact does something: an adapter without an effect would show nothing.
    """
    model = adapted(KINDS[name]).train()
    verdict = verdict_of(model, SAMPLES, switched)
    assert verdict.kind != "inexact", verdict.reason
    if verdict.kind == "exact":
        with torch.no_grad():
            got, expected = (
                dualkv.shared_prompt_forward(one, SAMPLES.pack())[0] for one in (model.eval(), base_of(KINDS[name]))
            )
        assert (got - expected).abs().max() > 1e-3
    assert verdict.kind == "exact" or VERSION < (0, 21) or name not in EXACT
    check_page(models_page.ADAPTERS, "peft", name, verdict)


def alora() -> Any:
    if not hasattr(peft.LoraConfig, "alora_invocation_tokens"):
        pytest.skip("this PEFT has no aLoRA")
    return plain(alora_invocation_tokens=[1, 2])


def tried(model: Any) -> None:
    with torch.no_grad():
        dualkv.shared_prompt_forward(model, SAMPLES.pack())


def plain(**options: Any) -> Any:
    options = dict(r=4, target_modules=TARGETS[:4], init_lora_weights=False) | options
    return peft.LoraConfig(task_type="CAUSAL_LM", **options)


def check_exact(model: Any) -> None:
    """The samples have the invocation behind their prompts, as PEFT documents it."""
    prompts = [[*prompt, 1, 2, *prompt[:2]] for prompt in SAMPLES.prompts]
    samples = type(SAMPLES)(prompts, SAMPLES.responses)
    check_adapters(model)
    with torch.no_grad():
        got, _ = dualkv.shared_prompt_forward(model, samples.pack())
        with switched(model):
            expected, _ = replicated_logps(model, samples)
    check_equal(got, expected, TOLERANCES[torch.float64].value)


def test_activated_lora_is_refused_while_it_is_active() -> None:
    model = peft.get_peft_model(tiny_model("qwen3"), alora()).double()
    expected = r"PEFT adapter 'default': .*alora_invocation_tokens=\[1, 2\].*last occurrence of these tokens"
    wrapped = nn.Module()
    wrapped.module = model
    for one in (model, model.get_base_model(), wrapped):
        with pytest.raises(SharedPromptError, match=expected):
            check_adapters(one)
    with model.disable_adapter():
        check_exact(model)
    with pytest.raises(SharedPromptError, match=expected):
        check_adapters(model)
    check_adapters(model.unload())


def test_of_two_adapters_the_active_one_counts() -> None:
    model = peft.get_peft_model(tiny_model("qwen3"), plain())
    model.add_adapter("activated", alora())
    model = model.double()
    check_exact(model)
    model.set_adapter("activated")
    with pytest.raises(SharedPromptError, match="PEFT adapter 'activated'"):
        check_adapters(model)
    model.base_model.set_adapter(["default", "activated"])
    with pytest.raises(SharedPromptError, match="PEFT adapter 'activated'"):
        check_adapters(model)
    model.set_adapter("default")
    check_exact(model)


def test_adapters_that_transformers_itself_has_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a wrapper of PEFT."""
    integration = importlib.import_module("transformers.integrations.peft")
    monkeypatch.setattr(integration, "MIN_PEFT_VERSION", "0.17.0")  # some versions ask for one that is not out
    model = tiny_model("qwen3")
    model.add_adapter(alora(), "activated")
    model.double()
    with pytest.raises(SharedPromptError, match="PEFT adapter 'activated'"):
        check_adapters(model)
    model.disable_adapters()
    check_exact(model)
    model.enable_adapters()
    model.add_adapter(plain(), "other")
    model.set_adapter("other")
    check_exact(model.double())


@pytest.mark.skipif("ensure_weight_tying" not in dir(peft.LoraConfig), reason="this PEFT ties no weights")
def test_embeddings_that_are_trained_and_tied() -> None:
    """The sizes of PEFT's copy of the head are in the wrong order: 32 is none of the vocabulary."""
    config = plain(modules_to_save=["embed_tokens"], ensure_weight_tying=True)
    model = peft.get_peft_model(tiny_model("qwen3", tie_word_embeddings=True), config).double()
    assert max(map(max, SAMPLES.prompts)) > 32
    verdict = verdict_of(model, SAMPLES, switched)
    assert verdict.kind == "exact", verdict.reason


@pytest.mark.parametrize("options", [dict(target_modules=["embed_tokens"]), dict(modules_to_save=["embed_tokens"])])
def test_tokens_outside_of_adapted_embeddings(options: dict[str, Any]) -> None:
    model = peft.get_peft_model(tiny_model("qwen3"), plain(**options)).double()
    with pytest.raises(SharedPromptError, match="batch: expected token ids below 97, the vocabulary, got 97"):
        dualkv.shared_prompt_forward(model, pack_shared_prompts([[97]], [[2]]))


@pytest.mark.parametrize("options", [dict(target_modules=["lm_head"]), dict(modules_to_save=["lm_head"])])
def test_a_head_whose_adapter_is_disabled_before_the_backward(options: dict[str, Any]) -> None:
    """The backward computes its logits again, and would get those of the base model."""
    model = peft.get_peft_model(tiny_model("qwen3"), plain(**options)).double()
    logps, _ = dualkv.shared_prompt_forward(model, SAMPLES.pack())
    message = "parameters of the LM head: .* frozen in between .its adapter was disabled"
    with model.disable_adapter(), pytest.raises(RuntimeError, match=message):
        logps.sum().backward()
    logps.sum().backward()  # now that it is enabled again


@pytest.mark.parametrize("name", ["Prefix tuning", "Prompt tuning", "Cartridge", "Lily", "Shadow", "Poly"])
def test_disabled_adapters_are_no_reason(name: str) -> None:
    model = adapted(KINDS[name])
    message = "hidden states of the model" if name == "Shadow" else f"peft_type={KINDS[name].peft_type}"
    with pytest.raises(SharedPromptError, match=message):
        tried(model)
    if not hasattr(model, "_adapters_disabled"):
        pytest.skip("this PEFT does not say whether adapters without layers are disabled")
    with model.disable_adapter():
        check_adapters(model)
        if name not in ("Prefix tuning", "Prompt tuning", "Cartridge"):  # PEFT then calls what it has kept
            tried(model)


@pytest.mark.parametrize("name", ["MonteCLoRA", "PVeRA", "VeLoRA with batch_average", "VeLoRA with batch_average_once"])
def test_what_only_training_does_is_exact_in_eval_mode(name: str) -> None:
    assert verdict_of(adapted(KINDS[name]).eval(), SAMPLES, switched).kind == "exact"


@pytest.mark.parametrize("seed", [None, 5])
def test_samples_at_inference_are_refused(seed: int | None) -> None:
    """With a generator of its own, which is not PyTorch's, as well."""
    model = adapted(Kind("PVERA", dict(sample_at_inference=True, generator_seed=seed))).eval()
    with pytest.raises(SharedPromptError, match="PVERA with sample_at_inference=True"):
        check_adapters(model)


# Kinds that a table had, and what says it now.
REPRODUCED = {
    "Adaption prompt": "a wrapper that calls the transformers model itself",
    "Shadow": "the same in a packed row as in rows of their own",
    "X-LoRA": "model: expected a model whose wrappers and adapters call it once",
}


@pytest.mark.parametrize("name", REPRODUCED)
def test_what_the_probe_sees_without_a_table(name: str) -> None:
    model = adapted(KINDS[name]).train()
    check_adapters(model)
    with pytest.raises(SharedPromptError, match=REPRODUCED[name]):
        tried(model)
