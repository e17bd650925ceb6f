"""Hybrid models under what training puts around them: activation checkpointing, LoRA, autocast, compilation."""

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
    weights_of,
    without_packages,
)
from tiny_models import (
    MIXED,
    SEQUENCES,
    TOLERANCES,
    Samples,
    Tolerance,
    check_equal,
    check_gradients,
    dualkv,
    gradients,
    replicated_logps,
    stock_twin,
)

from flash_attn_dualkv import pack_prefix_tree


@pytest.mark.parametrize(
    ("name", "use_reentrant"), [*((name, False) for name in HYBRIDS), *((name, True) for name in KINDS)]
)
def test_gradient_checkpointing(name: str, use_reentrant: bool) -> None:
    """The recomputation, in the backward, mixes tokens by the layout as well."""
    model = hybrid_model(name)
    with in_float64():
        expected, expected_gradients = alone(model, RAGGED)
        model.train().gradient_checkpointing_enable(dict(use_reentrant=use_reentrant))
        if use_reentrant:
            model.enable_input_require_grads()
        got, got_gradients = shared(model, RAGGED.pack())
    check_equal(got, expected, EXACT.value)
    check_gradients(got_gradients, expected_gradients, EXACT.gradient)


@pytest.mark.parametrize("name", KINDS)
def test_checkpointing_of_trees_with_the_hook(name: str) -> None:
    """A forward of one's own; the backward runs when the expectation is over."""
    model = hybrid_model(name, torch.float32)
    batch = pack_prefix_tree(SEQUENCES, min_shared=1)
    expected, expected_gradients = shared(model, batch)
    model.train().gradient_checkpointing_enable(dict(use_reentrant=False))
    dualkv.install_layout_hook(model)
    logits = model(
        batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False, shared_prompt_layout=batch.layout
    ).logits[0]
    got = logits.log_softmax(-1)[batch.token_index, batch.targets]
    (weights_of(got) @ got).backward()
    check_equal(got.detach(), expected, 2e-6)
    check_gradients(gradients(model), expected_gradients, 1e-5)


TARGETS = {
    "qwen3_5_text": ["in_proj_qkv", "out_proj", "down_proj", "q_proj"],
    "bamba": ["in_proj", "out_proj", "down_proj", "q_proj"],
    "lfm2": ["in_proj", "out_proj", "w1", "q_proj"],
}


@pytest.mark.parametrize("name", [name for name in TARGETS if name in HYBRIDS])
def test_lora(name: str) -> None:
    """Adapters in front of and behind what mixes the tokens; stock Mamba-2 kernels may leave those behind it out."""
    peft = pytest.importorskip("peft", reason="needs peft")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS[name], init_lora_weights=False)
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = peft.get_peft_model(hybrid_model(name), config).double().train()
    twin = copy.deepcopy(model)
    twin.get_base_model().set_attn_implementation("eager")
    with in_float64():
        expected, _ = replicated_logps(twin, RAGGED)
        (weights_of(expected) @ expected).backward()
        got, got_gradients = shared(model, RAGGED.pack())
    check_equal(got, expected.detach(), EXACT.value)
    assert len(got_gradients) >= 2 * len(TARGETS[name])
    check_gradients(got_gradients, gradients(twin), EXACT.gradient)


@pytest.mark.parametrize("name", KINDS)
def test_autocast(name: str) -> None:
    """float32 parameters, 16-bit arithmetic: as far from exact as the stock model under autocast."""
    model = hybrid_model(name, torch.float32)
    twin = stock_twin(model, "eager")
    with torch.no_grad():
        exact, _ = replicated_logps(twin, RAGGED)
        with torch.autocast("cpu", torch.bfloat16):
            got, _ = dualkv.shared_prompt_forward(model, RAGGED.pack())
            stock, _ = replicated_logps(twin, RAGGED)
    assert 0 < (got - exact).abs().max() <= 1.5 * (stock - exact).abs().max()


@pytest.mark.parametrize(
    ("name", "device"),
    [*((name, "cpu") for name in KINDS), *(pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in HYBRIDS)],
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


def test_compiled_layers() -> None:
    """What mixes the tokens is left out of the graph; all else is compiled."""
    model = hybrid_model(KINDS[0], torch.float32)
    expected, expected_gradients = shared(model, MIXED.pack())
    model.model.compile(backend="eager")
    got, got_gradients = shared(model, MIXED.pack())
    check_equal(got, expected, 1e-5)
    check_gradients(got_gradients, expected_gradients, 1e-4)


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
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, str], ranks.Found]:
    return ranks.run(SETUP, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("wrapper", SETUP.wrappers)
def test_wrapped_models(found: Any, wrapper: str) -> None:
    """Log-probabilities of each rank's own samples, and the mean of the ranks' gradients, with checkpointing."""
    exact = Tolerance(TOLERANCES[torch.float32].value, 2e-5)
    ranks.check(SETUP, found, wrapper, Tolerance(0.05, 0.2) if "mixed" in wrapper else exact)
