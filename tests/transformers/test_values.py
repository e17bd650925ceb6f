# SPDX-License-Identifier: BSD-3-Clause
"""Reward models, classifiers and critics on packed rows, beside each sequence in a row of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import (
    COMMON,
    MIXED,
    TOLERANCES,
    VERSION,
    Outcome,
    check_equal,
    dualkv,
    tiny_config,
    transformers,
)
from torch import Tensor

from flash_attn_dualkv import SharedPromptError, pack_prefix_tree
from flash_attn_dualkv.integrations.transformers.classifiers import check_classifier

PADDING = 0  # of the tiny configurations
PROMPT = [*range(3, 30)]
# Equal ones, a beginning of another, a branch in the middle, one that ends with padding and one of
# nothing else.
ENDS = [[40, 41, 42], [40, 41, 42], [40], [50, PADDING, PADDING]]
SEQUENCES = [*([*PROMPT, *end] for end in ENDS), [*PROMPT[:15], 9, 8, 7], [PADDING, PADDING], [5]]
TOLERANCE = TOLERANCES[torch.float64]


def head_of(kind: str, name: str = "qwen3", labels: int = 1, **options: Any) -> Any:
    torch.manual_seed(1)
    config = tiny_config(name, num_labels=labels, **options)
    model = getattr(transformers, f"AutoModelFor{kind}").from_config(config, attn_implementation="dualkv")
    return model.double().eval()


def check(model: Any, got: Tensor, alone: list[Tensor]) -> None:
    expected = torch.cat(alone)
    assert expected.std() > 1e-3
    Outcome.of(model, got).check(Outcome.of(model, expected), TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "phi3"])
@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("padding", [PADDING, None])
def test_sequence_classification(name: str, labels: int, padding: int | None) -> None:
    """The value that the stock forward pools of each sequence, and every parameter's gradient."""
    model = head_of("SequenceClassification", name, labels, pad_token_id=padding)
    batch = pack_prefix_tree(SEQUENCES, min_shared=1, pad_to_multiple_of=8)
    assert batch.layout.num_tokens < batch.num_replicated_tokens / 2
    got = dualkv.shared_prompt_values(model, batch)
    assert got.shape == (len(SEQUENCES), labels)
    check(model, got, [model(torch.tensor([one]), use_cache=False).logits for one in SEQUENCES])


def test_values_of_chosen_rows() -> None:
    """A critic: one value for each response token, as of `token_index`; any others by `rows_of`."""
    model = head_of("TokenClassification", classifier_dropout=0.0, hidden_dropout=0.0)
    batch = MIXED.pack()
    alone = []
    for prompt, response in zip(MIXED.prompts, MIXED.responses):
        values = model(torch.tensor([prompt + response]), use_cache=False).logits[0]
        alone.append(values[len(prompt) - 1 : len(prompt) - 1 + len(response)])
    check(model, dualkv.shared_prompt_values(model, batch, batch.token_index), alone)
    first = dualkv.shared_prompt_values(model, batch, batch.rows_of(batch.jagged_offsets[:-1]))
    expected = [model(torch.tensor([prompt[:1]]), use_cache=False).logits[0] for prompt in MIXED.prompts]
    check_equal(first, torch.cat(expected), TOLERANCE.value)


def test_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = pack_prefix_tree(SEQUENCES[:2])
    model = head_of("SequenceClassification")
    for other, message in (
        (head_of("CausalLM"), "ForSequenceClassification"),
        (head_of("SequenceClassification", "gpt2"), "got GPT2ForSequenceClassification"),
    ):
        with pytest.raises(SharedPromptError, match=message):
            dualkv.shared_prompt_values(other, batch)
    with pytest.raises(SharedPromptError, match="^rows: expected rows whose values are wanted"):
        dualkv.shared_prompt_values(head_of("TokenClassification"), batch)
    with pytest.raises(SharedPromptError, match="sequence 1 without any"):
        dualkv.shared_prompt_values(model, pack_prefix_tree([[3, 4], []]))
    with pytest.raises(SharedPromptError, match="int64"):
        dualkv.shared_prompt_values(model, batch, batch.token_index.int())
    with pytest.raises(SharedPromptError, match="below 97"):
        dualkv.shared_prompt_values(model, pack_prefix_tree([[3, 97]]))
    # Other tests may have wrapped those that there are.
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "unknown", lambda *args, **options: None)
    model.set_attn_implementation("unknown")
    with pytest.raises(SharedPromptError, match="registered or wrapped"):
        dualkv.shared_prompt_values(model, batch)
    noisy = head_of("TokenClassification", classifier_dropout=0.3).train()
    remedy = r"dropout of dropout: .*, got 0.3\. .* set classifier_dropout=0.0 in its configuration"
    with pytest.raises(SharedPromptError, match=remedy):
        dualkv.shared_prompt_values(noisy, batch, batch.token_index)


def _squash(model: Any) -> None:
    """A subclass, as users write rewards of their own."""
    stock = type(model).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = stock(self, *args, **kwargs)
        output.logits = output.logits.tanh()
        return output

    model.__class__ = type("Squashed", (type(model),), {"forward": forward})


def _wrap(model: Any) -> None:
    """What patches a class names itself after the forward that it changes."""
    _squash(model)
    functools.update_wrapper(type(model).forward, type(model).__mro__[1].forward)


@pytest.mark.parametrize("change", [_squash, _wrap])
@pytest.mark.parametrize("kind", ["SequenceClassification", "TokenClassification"])
def test_a_forward_of_ones_own_is_refused(kind: str, change: Callable[[Any], None]) -> None:
    """What it makes of the head's values is no part of a packed forward."""
    model = head_of(kind)
    batch = pack_prefix_tree(SEQUENCES[:2])
    dualkv.shared_prompt_values(model, batch, batch.token_index)
    change(model)
    with pytest.raises(SharedPromptError, match="^model: expected transformers' own forward .* got a Squashed with"):
        dualkv.shared_prompt_values(model, batch, batch.token_index)


@pytest.mark.parametrize("kind", ["Gemma3", "Qwen3_5"])
def test_forwards_that_hand_on_are_transformers_own(kind: str) -> None:
    """Those of multimodal classifiers name the inputs of images, and do nothing else."""
    classifier = getattr(transformers, f"{kind}ForSequenceClassification", None)
    if classifier is None or VERSION < (5, 0):
        pytest.skip("not in this version, or with a forward that picks rows itself, which is refused")
    with torch.device("meta"):
        check_classifier(classifier(classifier.config_class()))


@pytest.mark.parametrize("pooling", [None, "eos", "bos", "mean"])
def test_pooling_by_configuration(pooling: str | None) -> None:
    """Cohere Compass takes the last row, the first, or the mean of all; the last alone is here."""
    if "cohere_compass_text" not in transformers.CONFIG_MAPPING:
        pytest.skip("not in this version")
    options = dict(
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters=dict(full_attention=None, sliding_attention=dict(rope_type="default", rope_theta=1e4)),
        num_labels=1,
        pooling=pooling,
    )
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model("cohere_compass_text", **COMMON, **options)
    options = dict(attn_implementation="dualkv")
    model = transformers.AutoModelForSequenceClassification.from_config(config, **options).double().eval()
    batch = pack_prefix_tree(SEQUENCES, min_shared=1)
    if pooling in ("bos", "mean"):
        with pytest.raises(SharedPromptError, match=f'^pooling of CohereCompass.*: expected "eos".*, got {pooling!r}'):
            dualkv.shared_prompt_values(model, batch)
        return
    alone = [model(torch.tensor([one]), use_cache=False).logits for one in SEQUENCES]
    check(model, dualkv.shared_prompt_values(model, batch), alone)


@pytest.mark.parametrize("kind", ["SequenceClassification", "TokenClassification"])
def test_a_forward_that_accelerate_has_wrapped(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mixed precision is an attribute of the model, around whose forward everything runs."""
    accelerate = pytest.importorskip("accelerate")
    for state in (accelerate.state.AcceleratorState, accelerate.state.PartialState):  # a process has one
        monkeypatch.setattr(state, "_shared_state", {})
    model = head_of(kind, classifier_dropout=0.0, hidden_dropout=0.0).float()
    batch = pack_prefix_tree(SEQUENCES, min_shared=1)
    expected = dualkv.shared_prompt_values(model, batch, batch.last_rows)
    prepared = accelerate.Accelerator(cpu=True, mixed_precision="bf16").prepare_model(model)
    types = []
    model.model.layers[0].mlp.register_forward_hook(lambda _module, _args, output: types.append(output.dtype))
    got = dualkv.shared_prompt_values(prepared, batch, batch.last_rows)
    assert {*types} == {torch.bfloat16}
    assert got.shape == expected.shape
    assert 0 < (got - expected).abs().max() < 0.02
    assert len(Outcome.of(model, got).gradients) == len([*model.parameters()])
