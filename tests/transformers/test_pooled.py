"""Heads of a hooked model: one output a token is exact, one output a row raises, whatever the class is called."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from tiny_models import MIXED, TOLERANCES, check_equal, check_gradients, dualkv, gradients, tiny_config, transformers
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPooling, SequenceClassifierOutput

from flash_attn_dualkv import SharedPromptError

BATCH = MIXED.pack()
INPUTS = dict(input_ids=BATCH.input_ids[None], position_ids=BATCH.position_ids[None], use_cache=False)
POOLED = "expected one value for each row of the packed batch .* for the whole row"


def head_of(kind: str, name: str, **options: Any) -> Any:
    torch.manual_seed(1)
    config = tiny_config(name, num_labels=1, **options)
    model = getattr(transformers, f"AutoModelFor{kind}").from_config(config, attn_implementation="dualkv")
    return model.double().eval()


def run(model: Any, **options: Any) -> Any:
    return model(**INPUTS, shared_prompt_layout=BATCH.layout, **options)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "gpt2"])
def test_sequence_classification_is_refused_at_once(name: str) -> None:
    with pytest.raises(SharedPromptError, match=f"^model: {POOLED}"):
        dualkv.install_layout_hook(head_of("SequenceClassification", name))


class Pooling(transformers.PreTrainedModel):
    """A model as users write it, for embeddings or rewards: one result from all rows, in one of many forms."""

    config_class = transformers.LlamaConfig
    base_model_prefix = "inner"
    _supports_attention_backend = True

    def __init__(self, config: Any, form: str) -> None:
        super().__init__(config)
        self.inner = transformers.LlamaModel(config)
        self.score = nn.Linear(config.hidden_size, 1)
        self.form = form

    def get_input_embeddings(self) -> nn.Module:
        module: nn.Module = self.inner.embed_tokens
        return module

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **kwargs: Any) -> Any:
        hidden = self.inner(input_ids, position_ids=position_ids, **kwargs).last_hidden_state
        if self.form == "the mean":
            return BaseModelOutputWithPooling(last_hidden_state=hidden, pooler_output=hidden.mean(1))
        if self.form == "the last":
            return SequenceClassifierOutput(logits=self.score(hidden[:, -1]))
        if self.form == "a tuple":
            return hidden, (hidden.amax(1),)
        if self.form == "a tensor":
            return self.score(hidden[:, -1]).squeeze(-1)
        return SequenceClassifierOutput(logits=self.score(hidden), loss=self.score(hidden).mean())


FORMS = {
    "the mean": f"^pooler_output of the model: {POOLED}",
    "the last": f"^logits of the model: {POOLED}",
    "a tuple": f"^1 of the model: {POOLED}",
    "a tensor": f"^0 of the model: {POOLED}",
    "a loss": "^loss: expected that of shift_labels=",
}


@pytest.mark.parametrize("expects", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_pooling_of_ones_own(form: str, expects: bool) -> None:
    config = tiny_config("llama")
    config._attn_implementation = "dualkv"
    model = Pooling(config, form).eval()
    dualkv.install_layout_hook(model)
    context = dualkv.expect_shared_prompt(BATCH.layout, 2) if expects else contextlib.nullcontext()
    with context, pytest.raises(SharedPromptError, match=FORMS[form]):
        run(model)
    model(torch.arange(3, 9)[None], use_cache=False)  # without a layout it is as it was


def test_question_answering() -> None:
    """Two outputs a token; its loss is one of the whole row."""
    model = transformers.LlamaForQuestionAnswering(tiny_config("llama")).double().eval()
    model.set_attn_implementation("dualkv")
    dualkv.install_layout_hook(model)
    assert run(model).start_logits.shape == (1, BATCH.num_rows)
    with pytest.raises(SharedPromptError, match="^labels: expected shift_labels="):
        run(model, start_positions=torch.tensor([1]), end_positions=torch.tensor([2]))


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_values_of_tokens(name: str) -> None:
    """A critic, as verl has it: the value and the gradients of each response token's row are those of its sequence."""
    model = head_of("TokenClassification", name, classifier_dropout=0.0, hidden_dropout=0.0)
    rows = []
    for prompt, response in zip(MIXED.prompts, MIXED.responses):
        values = model(torch.tensor([prompt + response]), use_cache=False).logits[0, :, 0]
        rows.append(values[len(prompt) - 1 : len(prompt) - 1 + len(response)])
    expected = torch.cat(rows)
    weights = torch.linspace(-1, 2, len(expected), dtype=expected.dtype)
    (weights @ expected).backward()
    expected_gradients = gradients(model)
    dualkv.install_layout_hook(model)
    got = run(model).logits[0, BATCH.token_index, 0]
    check_equal(got, expected, TOLERANCES[torch.float64].value)
    (weights @ got).backward()
    check_gradients(gradients(model), expected_gradients, TOLERANCES[torch.float64].gradient)


@pytest.mark.parametrize("kept", [{}, dict(logits_to_keep=BATCH.token_index), dict(logits_to_keep=3)])
@pytest.mark.parametrize("output", [{}, dict(return_dict=False), dict(output_hidden_states=True)])
def test_what_causal_lms_return(kept: dict[str, Any], output: dict[str, Any]) -> None:
    model = transformers.MixtralForCausalLM(tiny_config("mixtral", num_local_experts=2)).eval()
    model.set_attn_implementation("dualkv")
    dualkv.install_layout_hook(model)
    run(model, output_router_logits=True, **kept, **output)
    run(model.model, **output)
