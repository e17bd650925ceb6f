# SPDX-License-Identifier: BSD-3-Clause
"""Hybrid models on shared prompts and prefix trees, also in training: what they compute on every sequence alone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import ranks
import torch
from hybrid_models import (
    EXACT,
    HYBRIDS,
    KINDS,
    RAGGED,
    alone,
    drawn_gradients,
    error_ratios,
    hybrid_model,
    in_float64,
    shared,
    without_packages,
)
from tiny_models import (
    MASKS,
    MIXED,
    SEQUENCES,
    TOLERANCES,
    TRAINED,
    WHOLE,
    Samples,
    Tolerance,
    dualkv,
    stock_twin,
)

from flash_attn_dualkv import pack_prefix_tree
from flash_attn_dualkv.integrations.transformers.hybrid import layout_context


@pytest.mark.parametrize("name", KINDS)
def test_prompts_and_responses(name: str) -> None:
    """Ragged groups, responses of no and of one token, prompts shorter than the convolution; all parameters.

    Also with activation checkpointing, whose recomputation, in the backward, mixes tokens by the layout as well.
    """
    model = hybrid_model(name)
    runs: list[tuple[dict[str, Any], bool | None]] = [(dict(boundary="replicate"), None)]
    runs += [(dict(boundary="gather", pad_to_multiple_of=16), None), ({}, False), ({}, True)]
    with in_float64():
        expected = alone(model, RAGGED)
        for options, use_reentrant in runs:
            if use_reentrant is not None:
                model.train().gradient_checkpointing_enable(dict(use_reentrant=use_reentrant))
            if use_reentrant:
                model.enable_input_require_grads()
            shared(model, RAGGED.pack(**options)).check(expected, EXACT)


@pytest.mark.parametrize("name", HYBRIDS)
def test_trees(name: str) -> None:
    model = hybrid_model(name)
    batch = pack_prefix_tree(SEQUENCES, loss_mask=MASKS, min_shared=1, pad_to_multiple_of=8)
    assert batch.layout.depth >= 4
    with in_float64():
        shared(model, batch).check(alone(model, WHOLE, TRAINED), EXACT)


# --- independence -----------------------------------------------------------------------------------------------------


def test_inference_before_training() -> None:
    """What is kept of a layout for the next forward may be needed in a backward."""
    model = hybrid_model(KINDS[0], torch.float32)
    batch = Samples.random([(11, [5, 4, 2])]).pack()
    with torch.inference_mode():
        before, _ = dualkv.shared_prompt_forward(model, batch)
    assert torch.equal(before, shared(model, batch).values)


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
    alone = [layout_context._causal_conv1d(part, weight, bias, "silu") for part in parts]
    index = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None]
    got = layout_context._causal_conv1d(x, weight, bias, "silu", seq_idx=index)
    torch.testing.assert_close(got, torch.cat(alone, 2))
    x[:, :, :6] = torch.nan
    got = layout_context._causal_conv1d(x, weight, bias, "silu", seq_idx=index)
    torch.testing.assert_close(got[:, :, 6:], alone[2])


@pytest.mark.parametrize(
    ("name", "device"),
    [
        *(pytest.param(name, "cpu", marks=[pytest.mark.slow] * (name != KINDS[0])) for name in KINDS),
        *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in HYBRIDS),
    ],
)
def test_16_bit_models(name: str, device: str) -> None:
    """As far from exact as the stock model, gradients too: many responses read one prompt's last inputs and state."""
    samples = Samples.random([(20, [6] * 16)])
    model = hybrid_model(name, torch.bfloat16).to(device)
    twin = stock_twin(model, "eager")
    with without_packages(name):
        with in_float64():
            exact = drawn_gradients(copy.deepcopy(twin).double(), samples)
        stock, got = drawn_gradients(twin, samples), drawn_gradients(model, samples, samples.pack(device=device))
    assert not {what: ratio for what, ratio in error_ratios(got, stock, exact).items() if not ratio <= 1.5}


SETUP = ranks.Setup(
    "gloo",
    "cpu",
    torch.float32,
    MIXED,
    ["fsdp1", "fsdp2", "fsdp2, mixed precision"],
    make="hybrid_models:hybrid_model",
    name=KINDS[0],
)


@pytest.fixture(scope="module")
def found() -> dict[tuple[int, str], ranks.Found]:
    return ranks.run(SETUP)


@pytest.mark.parametrize("wrapper", SETUP.wrappers)
def test_wrapped_models(found: Any, wrapper: str) -> None:
    """Log-probabilities of each rank's own samples, and the mean of the ranks' gradients, with checkpointing."""
    exact = Tolerance(TOLERANCES[torch.float32].value, 2e-5)
    ranks.check(SETUP, found, wrapper, Tolerance(0.05, 0.2) if "mixed" in wrapper else exact)
