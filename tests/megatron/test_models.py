# SPDX-License-Identifier: BSD-3-Clause
"""Megatron's models on packed rows: log-probabilities and every parameter's gradient of each sequence alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: see docs/megatron.md")

import tiny_megatron as tiny
import torch
from megatron.core.transformer.module import Float16Module
from megatron_cpu import megatron_on_the_cpu
from tiny_megatron import alone, check_close, check_gradients, gradients, megatron, tiny_chunk, tiny_config, weights_of

from flash_attn_dualkv import scores as lm_head
from flash_attn_dualkv import shared_prompt_attention
from flash_attn_dualkv.integrations.megatron import attention

BATCHES = {"prompts": tiny.prompts_and_responses, "tree": tiny.tree}
VALUE, GRADIENT = 5e-6, 2e-5


@pytest.fixture(autouse=True, scope="module")
def _cpu() -> Iterator[None]:
    with megatron_on_the_cpu():
        yield


def compare(model: Any, make: Any, **options: Any) -> None:
    """A packed row against each sequence alone, with a loss of all log-probabilities."""
    sequences, batch = make()
    expected = alone(model, sequences)
    (expected * weights_of(len(expected))).sum().backward()
    expected_gradients = gradients(model)
    megatron.install(model)
    logps, entropy = megatron.shared_prompt_forward(model, batch, **options)
    assert entropy is None
    check_close(logps.detach(), expected.detach(), VALUE)
    (logps * weights_of(len(logps))).sum().backward()
    check_gradients(gradients(model), expected_gradients, GRADIENT)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_equals_each_sequence_alone(kind: str, batch: str) -> None:
    compare(tiny_chunk(kind, tiny_config(kind)), BATCHES[batch])


RECOMPUTATIONS: dict[str, dict[str, Any]] = {
    "full": tiny.RECOMPUTED,
    "attention": dict(recompute_granularity="selective", recompute_modules=["core_attn"]),
}


@pytest.mark.parametrize("recomputation", RECOMPUTATIONS)
@pytest.mark.parametrize("kind", ["sinks", "latent, yarn"])
def test_recomputation(kind: str, recomputation: str) -> None:
    compare(tiny_chunk(kind, tiny_config(kind, **RECOMPUTATIONS[recomputation])), tiny.tree)


@pytest.mark.parametrize("kind", ["gqa, q/k norm", "nemotron"])
def test_heads_in_chunks_temperature_and_entropy(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, batch = tiny.tree()
    model = tiny_chunk(kind, tiny_config(kind))
    megatron.install(model)

    def logits() -> torch.Tensor:
        return model(batch.input_ids[None], None, None, packed_seq_params=megatron.SharedPackedSeqParams(batch))

    wanted = (logits()[0, batch.token_index] / 0.7).log_softmax(-1)
    loss = (wanted.gather(-1, batch.targets[:, None])[:, 0] - 0.3 * (wanted.exp() * wanted).sum(-1)).square().sum()
    loss.backward()
    expected = gradients(model)

    monkeypatch.setattr(lm_head, "LOGIT_ELEMENTS", 5 * tiny.VOCABULARY)
    options: dict[str, Any] = dict(temperature=0.7, with_entropy=True)
    for logps, entropy in (
        megatron.shared_prompt_forward(model, batch, **options),
        megatron.score_logits(logits(), batch, **options),
    ):
        check_close(logps.detach(), wanted.gather(-1, batch.targets[:, None])[:, 0].detach(), VALUE)
        (logps + 0.3 * entropy).square().sum().backward()
        check_gradients(gradients(model), expected, GRADIENT)


class _ValueHead(torch.nn.Linear):
    """What frameworks put in the place of a critic's output layer."""

    def forward(self, hidden: torch.Tensor, **_: Any) -> Any:
        return super().forward(hidden), None


@pytest.mark.parametrize("kind", ["gqa, q/k norm", "mamba, delta nets, rotary, tied"])
def test_values_of_a_critic(kind: str) -> None:
    """Those of the tokens before the scored ones, of each sequence alone."""
    sequences, batch = tiny.tree()
    model = tiny_chunk(kind, tiny_config(kind))
    model.output_layer = _ValueHead(32, 1, bias=False)
    expected = []
    for tokens, mask in zip(sequences.tokens, sequences.masks):
        length = len(tokens)
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        values = model(torch.tensor([tokens]), torch.arange(length)[None], hidden)[0, :, 0]
        expected.append(values[torch.tensor(mask).nonzero()[:, 0] - 1])
    whole = torch.cat(expected)
    (whole * weights_of(len(whole))).sum().backward()
    expected_gradients = gradients(model)
    megatron.install(model)
    values = megatron.shared_prompt_values(model, batch)
    check_close(values.detach(), whole.detach(), VALUE)
    (values * weights_of(len(values))).sum().backward()
    check_gradients(gradients(model), expected_gradients, GRADIENT)


@pytest.mark.parametrize("kind", ["gqa, q/k norm", "delta nets", "nemotron"])
def test_16_bits(kind: str) -> None:
    """No further from float32 than each sequence alone in bf16 is."""
    sequences, batch = tiny.prompts_and_responses()
    exact = alone(tiny_chunk(kind, tiny_config(kind)), sequences).detach()
    config = tiny_config(kind, bf16=True, params_dtype=torch.bfloat16)
    model = tiny_chunk(kind, config)
    wrapped = Float16Module(config, model)
    stock = alone(model, sequences).detach()
    megatron.install([wrapped])
    logps, _ = megatron.shared_prompt_forward(wrapped, batch)
    assert logps.dtype == torch.float32
    assert (logps - exact).abs().max() <= 2 * (stock - exact).abs().max() + 1e-2
    logps.sum().backward()
    assert all(one.grad is not None and one.grad.dtype == torch.bfloat16 for one in wrapped.parameters())


def test_calls_without_a_layout_do_not_change() -> None:
    for kind in ("sinks", "yarn", "mrope", "latent, yarn"):
        model = tiny_chunk(kind, tiny_config(kind))
        sequences, _ = tiny.tree()
        before, names = alone(model, sequences), list(model.state_dict())
        megatron.install(model)
        megatron.install([model])  # twice is once
        assert torch.equal(alone(model, sequences), before)
        assert list(model.state_dict()) == names


def test_rows_of_cosines_and_sines() -> None:
    """What MLA's fused RoPE reads: those of the rows' positions."""
    model = tiny_chunk("latent, yarn", tiny_config("latent, yarn"))
    _, batch = tiny.tree()
    megatron.install(model)
    rotary = model.decoder.layers[0].self_attention.rotary_pos_emb
    params = megatron.SharedPackedSeqParams(batch)
    length = rotary.get_rotary_seq_len(None, None, None, model.config, params)
    assert length == batch.layout.num_tokens
    for packed, plain in zip(rotary.get_cached_cos_sin(length), rotary.get_cached_cos_sin(64)):
        assert torch.equal(packed, plain[batch.position_ids])


def test_values_of_mla_have_their_own_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron pads them to the width of queries, which attention would pay for."""
    widths = []

    def watched(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        widths.append((query.shape[-1], value.shape[-1]))
        return shared_prompt_attention(query, key, value, *args, **kwargs)

    monkeypatch.setattr(attention, "shared_prompt_attention", watched)
    model = tiny_chunk("latent", tiny_config("latent"))
    megatron.install(model)
    megatron.shared_prompt_forward(model, tiny.tree()[1])
    assert widths == [(24, 16)] * 2
