"""The LM head of `shared_prompt_forward`: in chunks, with the model's own arithmetic, in bounded memory."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from tiny_models import MIXED, VOCABULARY, check_equal, check_gradients, dualkv, gradients, tiny_model
from torch.utils._python_dispatch import TorchDispatchMode

from flash_attn_dualkv import SharedPromptError
from flash_attn_dualkv.integrations import lm_head
from flash_attn_dualkv.integrations.transformers import forward

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


@pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "cohere"])
def test_chunks_change_nothing(name, monkeypatch):
    model = tiny_model(name)
    batch = MIXED.pack()

    def run():
        logps, entropy = dualkv.shared_prompt_forward(model, batch, temperature=1.3, with_entropy=True)
        (logps.sum() + 0.1 * entropy.sum()).backward()
        return logps.detach(), entropy.detach(), gradients(model)

    whole = run()
    monkeypatch.setattr(lm_head, "LOGIT_ELEMENTS", 4 * VOCABULARY + 1)
    chunked = run()
    check_equal(chunked[0], whole[0], 1e-12)
    check_equal(chunked[1], whole[1], 1e-12)
    check_gradients(chunked[2], whole[2], 1e-6)


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


def test_the_watch_sees_logits_that_stay(monkeypatch):
    """What the test before would say of a head without recomputation."""

    def score(head, hidden, targets, **_):
        logps = head(hidden).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
        return logps, logps

    monkeypatch.setattr(forward, "score_in_chunks", score)
    with Logits() as watched:
        logps, _ = dualkv.shared_prompt_forward(tiny_model("llama"), MIXED.pack())
        assert watched.alive() > 0
        assert logps.requires_grad


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


def test_a_forward_that_something_has_wrapped_is_called_as_wrapped():
    """accelerate puts autocast around a model's forward in this way."""
    model = tiny_model("llama")
    stock = model.forward
    calls = []

    def wrapped(*args, **kwargs):
        calls.append(1)
        return stock(*args, **kwargs)

    model.forward = wrapped
    logps, _ = dualkv.shared_prompt_forward(model, MIXED.pack())
    assert len(calls) == 3  # the backbone, a row of the head to see its parameters, and its only chunk
    logps.sum().backward()
    assert len(calls) == 4
    assert model.forward is wrapped


@pytest.mark.parametrize(("temperature", "error"), [(0.0, SharedPromptError), (float("nan"), SharedPromptError),
                                                    (True, TypeError), (torch.ones(3), TypeError)])  # fmt: skip
def test_temperature_is_a_positive_number(temperature, error):
    with pytest.raises(error, match="temperature: expected"):
        dualkv.shared_prompt_forward(tiny_model("llama"), MIXED.pack(), temperature=temperature)
