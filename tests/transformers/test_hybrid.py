"""Hybrid models on shared prompts and prefix trees compute what they compute on every sequence alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hybrid_models import (
    EXACT,
    HYBRIDS,
    KINDS,
    RAGGED,
    alone,
    check_no_worse,
    hybrid_model,
    in_float64,
    shared,
    weights_of,
)
from tiny_models import (
    MASKS,
    SEQUENCES,
    Samples,
    check_equal,
    check_gradients,
    dualkv,
    gradient_errors,
    gradients,
    replicated_logps,
    stock_twin,
)
from torch import Tensor

from flash_attn_dualkv import pack_prefix_tree
from flash_attn_dualkv.integrations.transformers.hybrid import delivery, mixers, rows


@pytest.mark.parametrize("name", HYBRIDS)
def test_prompts_and_responses(name: str) -> None:
    """Ragged groups, responses of no and of one token, prompts shorter than the convolution; all parameters."""
    model = hybrid_model(name)
    with in_float64():
        expected, expected_gradients = alone(model, RAGGED)
        for options in (dict(boundary="replicate"), dict(boundary="gather", pad_to_multiple_of=16)):
            got, got_gradients = shared(model, RAGGED.pack(**options))
            check_equal(got, expected, EXACT.value)
            check_gradients(got_gradients, expected_gradients, EXACT.gradient)


@pytest.mark.parametrize("name", HYBRIDS)
def test_trees(name: str) -> None:
    model = hybrid_model(name)
    whole = Samples([one[:1] for one in SEQUENCES], [one[1:] for one in SEQUENCES])
    trained = torch.tensor([value for mask in MASKS for value in mask[1:]]).bool()
    batch = pack_prefix_tree(SEQUENCES, loss_mask=MASKS, min_shared=1, pad_to_multiple_of=8)
    assert batch.depth >= 4
    with in_float64():
        twin = stock_twin(model, "eager")
        expected = replicated_logps(twin, whole)[0][trained]
        (weights_of(expected) @ expected).backward()
        got, got_gradients = shared(model, batch)
        check_equal(got, expected, EXACT.value)
        check_gradients(got_gradients, gradients(twin), EXACT.gradient)


@pytest.mark.parametrize("name", KINDS)
def test_float32(name: str) -> None:
    """As models are: no further from float64 than the stock model."""
    model = hybrid_model(name)
    with in_float64():
        exact = alone(model, RAGGED)
    model = model.float()
    check_no_worse(shared(model, RAGGED.pack()), alone(model, RAGGED), exact)


# --- what the comparison must notice ----------------------------------------------------------------------------------


def forget(states: Tensor, parents: Tensor, children: Tensor) -> Tensor:
    return torch.zeros_like(states).index_select(0, parents)


def detach(states: Tensor, parents: Tensor, children: Tensor) -> Tensor:
    return states.detach().index_select(0, parents)


def without_tails(values: Tensor, tails: Any) -> Tensor:
    return values.new_zeros(tails.total, values.shape[1]).index_copy(0, tails.own, values)


def with_detached_tails(values: Tensor, tails: Any) -> Tensor:
    return rows.insert_tails(values.detach(), tails).index_copy(0, tails.own, values)


@pytest.mark.parametrize(
    ("function", "mutant"),
    [("hand_on", forget), ("hand_on", detach), ("insert_tails", without_tails), ("insert_tails", with_detached_tails)],
)
@pytest.mark.parametrize("name", KINDS)
def test_mutants_differ(name: str, function: str, mutant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """State and convolution matter in these models, and so do the gradients through them."""
    if name == "lfm2" and function == "hand_on":
        pytest.skip("has no state")
    model = hybrid_model(name, torch.float32)
    batch = Samples.random([(9, [5, 4])]).pack()
    expected, expected_gradients = shared(model, batch)
    monkeypatch.setattr(mixers, function, mutant)
    got, got_gradients = shared(model, batch)
    assert got.equal(expected) == ("detach" in mutant.__name__)
    assert max(gradient_errors(got_gradients, expected_gradients).values()) > 1e-3


# --- independence -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_a_response_does_not_see_the_others(name: str) -> None:
    """Other tokens in one response: all others stay equal to the last bit, and the gradients of a loss on them too."""
    model = hybrid_model(name, torch.float32)
    changed = Samples(RAGGED.prompts, [list(one) for one in RAGGED.responses])
    index = max(range(len(RAGGED)), key=lambda one: len(RAGGED.responses[one]))
    changed.responses[index] = [(token + 1) % 90 + 3 for token in changed.responses[index]]
    found = []
    for samples in (RAGGED, changed):
        logps = samples.split(dualkv.shared_prompt_forward(model, samples.pack())[0])
        sum(one.sum() for at, one in enumerate(logps) if at != index).backward()
        found.append((logps, gradients(model)))
    for at, (one, other) in enumerate(zip(found[0][0], found[1][0])):
        assert torch.equal(one, other) == (at != index or not len(one))
    check_gradients(found[1][1], found[0][1], 1e-5)


def test_inference_before_training() -> None:
    """What is kept of a layout for the next forward may be needed in a backward."""
    model = hybrid_model(KINDS[0], torch.float32)
    batch = Samples.random([(11, [5, 4, 2])]).pack()
    with torch.inference_mode():
        before, _ = dualkv.shared_prompt_forward(model, batch)
    logps, _ = shared(model, batch)
    assert torch.equal(before, logps)


@pytest.mark.parametrize("name", KINDS)
def test_calls_without_a_layout_stay_as_they_are(name: str) -> None:
    """Plain forwards, padded batches and generation with a cache, of a model whose functions take layouts."""
    model = hybrid_model(name, torch.float32)
    twin = copy.deepcopy(model)
    ids = torch.arange(3, 12)[None]
    expected = twin(ids, use_cache=False).logits
    dualkv.shared_prompt_forward(model, RAGGED.pack())
    assert torch.equal(model(ids, use_cache=False).logits, expected)
    options = dict(max_new_tokens=4, do_sample=False, attention_mask=torch.ones_like(ids))
    assert torch.equal(model.generate(ids, **options), twin.generate(ids, **options))


def test_the_convolution_without_its_package_keeps_sequences_apart() -> None:
    """As the package does for seq_idx; what a neighbour has is not seen, be it a number or not."""
    generator = torch.Generator().manual_seed(0)
    lengths, width = (5, 1, 9), 4
    x = torch.randn(1, 3, sum(lengths), generator=generator, dtype=torch.float64)
    weight, bias = torch.randn(3, width, generator=generator).double(), torch.randn(3, generator=generator).double()
    parts = x.split(lengths, 2)
    alone = [delivery._causal_conv1d(part, weight, bias, "silu") for part in parts]
    index = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    got = delivery._causal_conv1d(x, weight, bias, "silu", seq_idx=index)
    torch.testing.assert_close(got, torch.cat(alone, 2))
    x[:, :, :6] = torch.nan
    got = delivery._causal_conv1d(x, weight, bias, "silu", seq_idx=index)
    torch.testing.assert_close(got[:, :, 6:], alone[2])
