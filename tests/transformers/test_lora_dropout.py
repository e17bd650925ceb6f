# SPDX-License-Identifier: BSD-3-Clause
"""LoRA's dropout with one mask for the one copy of a prompt: what it computes, and what stays refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from adapters import KINDS, TARGETS, adapted, peft
from tiny_models import TOLERANCES, Outcome, Samples, check_equal, dualkv, tiny_model
from torch import Tensor, nn

from flash_attn_dualkv import PackedBatch, SharedPromptError
from flash_attn_dualkv.integrations.common.options import Refusal
from flash_attn_dualkv.integrations.transformers.admission.check import check_first_use
from flash_attn_dualkv.integrations.transformers.admission.unwrap import lora_dropouts

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's, about options of tiny models
RATE = 0.4
TOLERANCE = TOLERANCES[torch.float64]
REMEDIES = "set lora_dropout=0.0, or share_lora_dropout=True for one mask of the one copy"
# A prompt of which rows would leave before the last layer.
SAMPLES = Samples.random([(90, [5, 7]), (4, [6])]).take([0, 2, 1])
BATCH = SAMPLES.pack()


def with_dropout(name: str = "qwen3", base: dict[str, Any] | None = None, **options: Any) -> Any:
    options = dict(r=4, target_modules=TARGETS, init_lora_weights=False, lora_dropout=RATE) | options
    config = peft.LoraConfig(task_type="CAUSAL_LM", **options)
    return peft.get_peft_model(tiny_model(name, **base or {}), config).double().train()


@contextmanager
def one_mask_a_copy(model: Any, batch: PackedBatch, rows: Tensor) -> Iterator[None]:
    """Let LoRA's layers draw masks for the packed row, and give a token that of its row; rows: (B, S)."""

    def drop(x: Tensor) -> Tensor:
        ones = torch.ones(1, batch.layout.num_tokens, x.shape[-1], dtype=x.dtype)
        return x * nn.functional.dropout(ones, RATE)[0][rows]

    dropouts = lora_dropouts(model)
    assert dropouts
    for one in dropouts:
        one.forward = drop
    yield
    for one in dropouts:
        del one.forward


def by_hand(model: Any, batch: PackedBatch) -> Tensor:
    """Log-probabilities of the responses from a stock forward of all sequences, each with a copy of its prompt."""
    samples = [prompt + response for prompt, response in zip(SAMPLES.prompts, SAMPLES.responses)]
    pad = nn.utils.rnn.pad_sequence
    ids = pad([torch.tensor(one) for one in samples], batch_first=True)
    mask = pad([torch.ones(len(one), dtype=torch.int64) for one in samples], batch_first=True)
    rows = pad([*batch.row_index.split([*map(len, samples)])], batch_first=True)
    with one_mask_a_copy(model, batch, rows):
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    scores = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    lengths = zip(map(len, SAMPLES.prompts), map(len, samples))
    return torch.cat([own[begin - 1 : end - 1] for own, (begin, end) in zip(scores, lengths)])


@pytest.mark.parametrize("name", ["qwen3", "phi3", "gemma3_text"])
@pytest.mark.parametrize("drop_unread", [False, True])
def test_a_forward_with_one_mask_for_each_copy(name: str, drop_unread: bool) -> None:
    """With the same seed: log-probabilities and gradients. Layers in which rows leave early would draw once more."""
    targets = {"phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]}.get(name, TARGETS)
    model = with_dropout(name, target_modules=targets)
    options: Any = dict(share_lora_dropout=True, drop_unread=drop_unread)
    torch.manual_seed(7)
    got = Outcome.of(model, dualkv.shared_prompt_forward(model, BATCH, **options)[0])
    torch.manual_seed(7)
    got.check(Outcome.of(model, by_hand(model, BATCH)), TOLERANCE)
    torch.manual_seed(8)
    other = dualkv.shared_prompt_forward(model, BATCH, **options)[0]
    assert (other - got.values).abs().max() > 1e-3  # it is drawn
    with torch.no_grad():
        stock = dualkv.shared_prompt_forward(model.eval(), BATCH)[0]
    assert (stock - got.values).abs().max() > 1e-3


def test_checkpoints_draw_the_same_masks_again() -> None:
    model = with_dropout()
    found = []
    for checkpoint in (False, True):
        if checkpoint:
            model.enable_input_require_grads()
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
        torch.manual_seed(7)
        found.append(Outcome.of(model, dualkv.shared_prompt_forward(model, BATCH, share_lora_dropout=True)[0]))
    found[1].check(found[0], TOLERANCE)


def test_who_does_not_ask_for_it() -> None:
    """The error names both remedies, before and after somebody else has asked."""
    model = with_dropout()
    layer = "base_model.model.model.layers.0.self_attn.q_proj"
    for share in (False, True, False):
        forward = lambda: dualkv.shared_prompt_forward(model, BATCH, share_lora_dropout=share)  # noqa: B023, E731
        if share:
            forward()
        else:
            with pytest.raises(SharedPromptError, match=f"dropout of .*q_proj.lora_dropout.default.*{REMEDIES}"):
                forward()
    assert model.get_submodule(layer).lora_dropout["default"].training


def test_plain_forwards_with_the_hook() -> None:
    model = with_dropout()
    inputs = dict(position_ids=BATCH.position_ids[None], shared_prompt_layout=BATCH.layout, use_cache=False)
    handle = dualkv.install_layout_hook(model.get_base_model())
    with pytest.raises(SharedPromptError, match=REMEDIES):
        model(input_ids=BATCH.input_ids[None], **inputs)
    handle.remove()
    dualkv.install_layout_hook(model.get_base_model(), share_lora_dropout=True)
    torch.manual_seed(7)
    logits = model(input_ids=BATCH.input_ids[None], **inputs).logits[0]
    got = logits.log_softmax(-1)[BATCH.token_index].gather(-1, BATCH.targets[:, None])[:, 0]
    torch.manual_seed(7)
    check_equal(got, by_hand(model, BATCH), TOLERANCE.value)


def noisy_hook(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output + torch.randn_like(output))


def averaging_hook(model: Any) -> None:
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output + output.mean(1, True))


def dropout_elsewhere(model: Any) -> None:
    model.model.layers[0].mlp.extra = nn.Dropout(0.1)


OTHERS: dict[str, tuple[Any, str]] = {
    "attention": (lambda: with_dropout(base=dict(attention_dropout=0.1)), "config.attention_dropout: expected 0"),
    "module": (dropout_elsewhere, r"dropout of model.layers.0.mlp.extra: expected 0 .*set it to 0 before"),
    "hook": (noisy_hook, "a forward without random numbers in training mode"),
    "mean": (averaging_hook, "the same in a packed row as in rows of their own"),
    "head": (
        lambda: with_dropout(target_modules=[*TARGETS, "lm_head"]),
        r"dropout of lm_head.*set lora_dropout=0.0, or leave this module out of LoRA's target_modules",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_all_else_is_looked_at_and_tried(name: str) -> None:
    change, message = OTHERS[name]
    if name in ("attention", "head"):
        model = change()
    else:
        model = with_dropout()
        change(model.get_base_model())
    with pytest.raises(SharedPromptError, match=message):
        dualkv.shared_prompt_forward(model, BATCH, share_lora_dropout=True)
    assert all(one.training for one in lora_dropouts(model))


@pytest.mark.parametrize("name", ["BOFT with boft_dropout", "DeLoRA with module_dropout", "LoKr with module_dropout"])
def test_dropout_of_other_adapters(name: str) -> None:
    model = adapted(KINDS[name]).train()
    with pytest.raises(SharedPromptError):
        check_first_use(model.get_base_model(), torch.device("cpu"), model=model, share_lora_dropout=True)


def test_what_trainers_say() -> None:
    """A refusal for dropout says how many tokens it costs."""
    samples = [torch.tensor(prompt + response) for prompt, response in zip(SAMPLES.prompts, SAMPLES.responses)]
    ids = nn.utils.rnn.pad_sequence(samples, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([*map(torch.ones_like, samples)], batch_first=True)
    given = [(ids, mask), (ids, mask.float()), (torch.nested.nested_tensor(samples, layout=torch.jagged), None)]
    for one in given:
        told = Refusal("dropout", "It drops").told(*one)
        assert told == f"It drops. Without it these samples would have {BATCH.dedup_ratio:.2f} times fewer tokens"
        assert Refusal("noise", "It draws").told(*one) == "It draws"
    assert Refusal("dropout", "It drops").told(None, None) == "It drops"  # a call of something else
