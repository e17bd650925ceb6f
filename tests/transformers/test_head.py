# SPDX-License-Identifier: BSD-3-Clause
"""The LM head of `shared_prompt_forward`: in chunks, with the model's own arithmetic; and heads of other kinds."""

from __future__ import annotations

import contextlib
import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tiny_models import (
    MIXED,
    TOLERANCES,
    VOCABULARY,
    check_equal,
    dualkv,
    replicated_logps,
    row_of,
    tiny_config,
    tiny_model,
    transformers,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.modeling_outputs import BaseModelOutputWithPooling, SequenceClassifierOutput

from flash_attn_dualkv import SharedPromptError
from flash_attn_dualkv import scores as lm_head
from flash_attn_dualkv.errors import SharedPromptTypeError

TOKENS = sum(map(len, MIXED.responses))


class Logits(TorchDispatchMode):
    """Watches tensors with a column per token of the vocabulary: the most rows of one, and which are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.most_rows = 0
        self.seen: list[weakref.ref[torch.Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else [result]:
            # Not the transposed weight of the head, which has as many columns.
            if isinstance(one, torch.Tensor) and one.dim() > 0 and one.shape[-1] == VOCABULARY and not is_view(func):
                self.most_rows = max(self.most_rows, one.numel() // VOCABULARY)
                self.seen.append(weakref.ref(one))
        return result

    def alive(self) -> int:
        gc.collect()
        return sum(one() is not None for one in self.seen)


def is_view(func) -> bool:
    return func in (torch.ops.aten.t.default, torch.ops.aten.transpose.int, torch.ops.aten.detach.default)


def test_logits_exist_for_one_chunk_at_a_time(monkeypatch):
    """Neither forward nor backward holds logits of more rows than a chunk has, and none outlive their chunk."""
    rows = 4
    monkeypatch.setattr(lm_head, "LOGIT_ELEMENTS", rows * VOCABULARY)
    model = tiny_model("llama")
    # The weight's gradient has the other orientation, (vocabulary, hidden): it is not counted.
    with Logits() as watched:
        logps, entropy = dualkv.shared_prompt_forward(model, MIXED.pack(), with_entropy=True, self_check=False)
        assert watched.most_rows == rows < TOKENS
        assert watched.alive() == 0
        (logps.sum() + entropy.sum()).backward()
        assert watched.most_rows == rows
        del logps, entropy
        assert watched.alive() == 0


@pytest.mark.parametrize("kind", ["linear", "of ones own", "another weight"])
def test_a_head_smaller_than_the_embeddings(kind: str) -> None:
    """Tokens that are read alone need no logit, as those of images in some models."""
    model, size = tiny_model("llama"), 90
    if kind == "another weight":
        model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach()[:size])
    else:
        head = nn.Linear(32, size, bias=False, dtype=torch.float64)
        model.set_output_embeddings(head if kind == "linear" else nn.Sequential(head))
    samples = type(MIXED)([[95, 5, 96], [95, 5, 96]], [[size - 1, 7], [6, 96]])
    with pytest.raises(SharedPromptError, match="batch: expected scored token ids below 90, .* LM head .*, got 96"):
        dualkv.shared_prompt_forward(model, samples.pack())
    samples.responses[1][1] = 0
    got, expected = dualkv.shared_prompt_forward(model, samples.pack())[0], replicated_logps(model, samples)[0]
    check_equal(got, expected, TOLERANCES[torch.float64].value)


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(fails):
    model = tiny_model("llama")
    before = (model.model, dict(model.__dict__), list(model._modules), model.forward)
    if fails:
        model.lm_head.register_forward_pre_hook(lambda module, args: 1 / 0)
    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        dualkv.shared_prompt_forward(model, MIXED.pack(), self_check=not fails)[0].sum().backward()
    assert (model.model, dict(model.__dict__), list(model._modules), model.forward) == before
    assert not model.model._forward_hooks


@pytest.mark.parametrize(("option", "value", "error"), [
    ("temperature", 0.0, SharedPromptError), ("temperature", float("nan"), SharedPromptError),
    ("temperature", True, TypeError), ("temperature", torch.ones(3), TypeError),
    ("drop_unread", 1, SharedPromptError), ("share_lora_dropout", 1, SharedPromptError),
])  # fmt: skip
def test_wrong_options(option, value, error):
    with pytest.raises(error, match=f"^{option}: expected"):
        dualkv.shared_prompt_forward(tiny_model("llama"), MIXED.pack(), **{option: value})


BATCH = MIXED.pack()
POOLED = "expected one value for each row of the packed batch .* for the whole row"


def run(model: Any, **options: Any) -> Any:
    return model(**row_of(BATCH, **options))


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
    assert run(model).start_logits.shape == (1, BATCH.layout.num_tokens)
    with pytest.raises(SharedPromptError, match="^labels: expected shift_labels="):
        run(model, start_positions=torch.tensor([1]), end_positions=torch.tensor([2]))


@pytest.mark.parametrize("kept", [{}, dict(logits_to_keep=BATCH.token_index), dict(logits_to_keep=3)])
@pytest.mark.parametrize("output", [{}, dict(return_dict=False), dict(output_hidden_states=True)])
def test_what_causal_lms_return(kept: dict[str, Any], output: dict[str, Any]) -> None:
    model = transformers.MixtralForCausalLM(tiny_config("mixtral", num_local_experts=2)).eval()
    model.set_attn_implementation("dualkv")
    dualkv.install_layout_hook(model)
    run(model, output_router_logits=True, **kept, **output)
    run(model.model, **output)


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "cohere"])
@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_logits_of_any_rows(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in any order and several times, a chunk at a time; scores as of shared_prompt_forward, softcap included."""
    monkeypatch.setattr(lm_head, "LOGIT_ELEMENTS", chunk * VOCABULARY)
    model, batch = tiny_model(name), MIXED.pack()
    order = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0)).repeat(2)
    targets, sizes = batch.targets[order], []

    def reduce(logits: Tensor, at: slice) -> tuple[Tensor, Tensor]:
        sizes.append(len(logits))
        logps = logits.log_softmax(-1)
        return logps.gather(-1, targets[at, None])[:, 0], logps.topk(3)[1]

    logps, top = dualkv.shared_prompt_logits(model, batch, batch.token_index[order], reduce)
    expected, _ = dualkv.shared_prompt_forward(model, batch)
    assert max(sizes) <= chunk and sum(sizes) == 2 * TOKENS and not logps.requires_grad
    check_equal(logps, expected[order].detach(), TOLERANCES[logps.dtype].value)
    (whole,) = dualkv.shared_prompt_logits(model, batch, batch.token_index, lambda logits, _: (logits.topk(3)[1],))
    assert torch.equal(top, whole[order]) and top.shape == (2 * TOKENS, 3)
    (none,) = dualkv.shared_prompt_logits(model, batch, batch.token_index[:0], lambda logits, _: (logits[:, :2],))
    assert none.shape == (0, 2)


def test_rows_that_are_refused() -> None:
    model, batch = tiny_model("qwen3"), MIXED.pack()
    for rows, message in (
        (batch.token_index.int(), "int64"),
        (batch.token_index - 99, "^rows: expected rows of the batch, 0 to"),
        (torch.tensor([batch.layout.num_tokens]), "^rows: expected rows of the batch, 0 to"),
        (batch.token_index[None], "1 dimension"),
        (batch.token_index.to("meta"), "got one on meta"),
        ([0, 1], "rows"),
    ):
        with pytest.raises(SharedPromptError, match=message):
            dualkv.shared_prompt_logits(model, batch, rows, lambda logits, _: (logits,))
    with pytest.raises(SharedPromptTypeError, match="^reduce: expected a function"):
        dualkv.shared_prompt_logits(model, batch, batch.token_index, 3)
    for reduce, message in (
        (lambda logits, _: logits, "returns a tuple of tensors"),
        (lambda logits, _: [logits, None], "returns a tuple of tensors"),
        (lambda logits, _: (logits.sum(),), f"a value for each of {TOKENS} rows"),
        (lambda logits, _: (logits[1:],), f"a value for each of {TOKENS} rows"),
    ):
        with pytest.raises(SharedPromptError, match=f"^reduce: expected .*{message}"):
            dualkv.shared_prompt_logits(model, batch, batch.token_index, reduce)
