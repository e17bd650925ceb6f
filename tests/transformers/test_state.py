# SPDX-License-Identifier: BSD-3-Clause
"""Modules whose forward changes their own buffers: to the same values as in stock's forwards, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import (
    MIXED,
    TOLERANCES,
    Outcome,
    Samples,
    check_equal,
    dualkv,
    tiny_config,
    tiny_model,
    transformers,
)
from torch import Tensor, nn

from flash_attn_dualkv import SharedPromptError

# One prompt, responses of one length: stock has them in one batch without padding.
SAMPLES = Samples.random([(30, [6, 6, 6])])
TOLERANCE = TOLERANCES[torch.float64]


class Watching(nn.Linear):
    """A projection times a buffer that each forward changes by its inputs, rows of all sequences: (B, T, D)."""

    def __init__(self, base: nn.Linear, change: Callable[[Tensor, Tensor], Tensor], always: bool = True) -> None:
        super().__init__(base.in_features, base.out_features, bias=False, dtype=base.weight.dtype)
        self.weight, self.change, self.always = base.weight, change, always
        self.register_buffer("state", torch.tensor(2.0, dtype=torch.promote_types(base.weight.dtype, torch.float32)))

    def forward(self, x: Tensor) -> Tensor:
        if self.training or self.always:
            with torch.no_grad():
                self.state = self.change(self.state, x.to(self.state.dtype))
        return super().forward(x) * self.state.to(x.dtype)


def calls(state: Tensor, x: Tensor) -> Tensor:
    """Towards 1, by calls alone, as the iterations of a spectral norm."""
    return (state + 1) / 2


def largest(state: Tensor, x: Tensor) -> Tensor:
    """As observers of quantisation do: the largest magnitude, moved a little."""
    return state + 0.3 * (x.abs().max() - state)


def mean(state: Tensor, x: Tensor) -> Tensor:
    return state + 0.01 * (x.abs().mean() - state)


def tokens(state: Tensor, x: Tensor) -> Tensor:
    return state + x.shape[:-1].numel()


SHARED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"calls": calls, "largest": largest}
REFUSED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"mean": mean, "tokens": tokens}
PLACES = ("model.layers.0.self_attn.k_proj", "model.layers.1.mlp.down_proj")


def put(model: Any, place: str, change: Callable[[Tensor, Tensor], Tensor], **options: bool) -> Watching:
    owner, _, name = place.rpartition(".")
    made = Watching(model.get_submodule(place), change, **options)
    setattr(model.get_submodule(owner), name, made)
    return made


def stock_logps(model: Any) -> Tensor:
    """Of one forward of all sequences."""
    ids = torch.tensor([prompt + response for prompt, response in zip(SAMPLES.prompts, SAMPLES.responses)])
    logits = model(input_ids=ids, use_cache=False).logits[:, len(SAMPLES.prompts[0]) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(SAMPLES.responses)[..., None]).flatten()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("training", [True, False])
def test_state_that_is_the_same_is_shared(name: str, place: str, training: bool) -> None:
    """Over two steps: log-probabilities, gradients and the state after each."""
    stock, ours = (tiny_model("llama", attention=one).train(training) for one in ("sdpa", "dualkv"))
    theirs, own = put(stock, place, SHARED[name]), put(ours, place, SHARED[name])
    for _ in range(2):
        got, _ = dualkv.shared_prompt_forward(ours, SAMPLES.pack())
        Outcome.of(ours, got).check(Outcome.of(stock, stock_logps(stock)), TOLERANCE)
        check_equal(own.state[None], theirs.state[None], TOLERANCE.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHARED)
def test_rounding_is_no_difference(name: str, dtype: torch.dtype) -> None:
    model = tiny_model("llama", dtype=dtype).train()
    put(model, PLACES[1], SHARED[name])
    dualkv.shared_prompt_forward(model, MIXED.pack())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", REFUSED)
def test_other_state_is_refused(name: str, place: str, dtype: torch.dtype) -> None:
    """Module and buffer are named, and the state is as it was."""
    model = tiny_model("llama", dtype=dtype).train()
    module = put(model, place, REFUSED[name])
    with pytest.raises(SharedPromptError, match=f"buffer 'state' of .*{place} .Watching"):
        dualkv.shared_prompt_forward(model, MIXED.pack())
    assert float(module.state) == 2.0


def test_state_of_training_mode_alone() -> None:
    model = tiny_model("llama").train()
    put(model, PLACES[0], mean, always=False)
    with pytest.raises(SharedPromptError, match="buffer 'state'"):
        dualkv.shared_prompt_forward(model, MIXED.pack())
    dualkv.shared_prompt_forward(model.eval(), MIXED.pack())


@pytest.mark.parametrize("self_check", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", SHARED)
def test_a_head_with_state_is_refused(name: str, training: bool, self_check: bool) -> None:
    """It runs for some rows at a time; nothing of that is left in its buffer."""
    model, batch = tiny_model("llama").train(training), MIXED.pack()
    head = put(model, "lm_head", SHARED[name])
    for run in (
        lambda: dualkv.shared_prompt_forward(model, batch, self_check=self_check),
        lambda: dualkv.shared_prompt_logits(
            model, batch, batch.last_rows, lambda logits, _: (logits,), self_check=self_check
        ),
    ):
        with pytest.raises(SharedPromptError, match="without state .* buffer 'state' of .*Watching"):
            run()
        assert float(head.state) == 2.0


def test_values_run_their_head_once() -> None:
    config = tiny_config("llama", num_labels=1, classifier_dropout=0.0)
    auto = transformers.AutoModelForTokenClassification
    classifier = auto.from_config(config, attn_implementation="dualkv").double().train()
    made = put(classifier, PLACES[1], calls)
    dualkv.shared_prompt_values(classifier, MIXED.pack(), MIXED.pack().token_index)
    assert float(made.state) == 1.5
