# SPDX-License-Identifier: BSD-3-Clause
"""Stock models compute with one prompt for all responses, or on a tree, what they compute on each sequence alone."""

from __future__ import annotations

import pytest
import torch
from hybrid_models import KINDS, RAGGED, hybrid_model
from tiny_models import (
    EVERY_EXPERT,
    FAMILIES,
    MASKS,
    MIXED,
    SEQUENCES,
    SUPPORTED,
    TOLERANCES,
    TRAINED,
    WHOLE,
    Samples,
    check_equal,
    check_gradients,
    dualkv,
    gradients,
    logps_of,
    replicated_logps,
    row_of,
    stock_twin,
    tiny_model,
)

from flash_attn_dualkv import pack_prefix_tree, unpack_logprobs

PACKINGS = {
    "replicate": {},
    "gather": dict(boundary="gather"),
    "replicate, padded": dict(pad_to_multiple_of=16),
    "gather, split": dict(boundary="gather", max_responses_per_group=1),
}


def weights(count: int, dtype: torch.dtype) -> torch.Tensor:
    """What a loss might multiply log-probabilities with: of both signs, different for each token."""
    return torch.randn(count, generator=torch.Generator().manual_seed(5), dtype=dtype)


def check_packed(name, samples, batches, scored=slice(None), **options) -> None:
    """Log-probabilities, entropies and the gradients of all parameters of every batch of the samples."""
    dtype = FAMILIES[name].dtype
    tolerance = TOLERANCES[dtype]
    model = tiny_model(name, **options)
    twin = stock_twin(model)
    logps, entropy = (one[scored] for one in replicated_logps(twin, samples, temperature=0.7))
    loss_weights = weights(len(logps), dtype)
    (loss_weights @ logps + 0.3 * entropy.sum()).backward()
    expected = gradients(twin)
    for batch in batches:
        got, got_entropy = dualkv.shared_prompt_forward(model, batch, temperature=0.7, with_entropy=True)
        check_equal(got, logps, tolerance.value)
        check_equal(got_entropy, entropy, tolerance.value)
        (loss_weights @ got + 0.3 * got_entropy.sum()).backward()
        check_gradients(gradients(model), expected, tolerance.gradient)


@pytest.mark.parametrize("name", SUPPORTED)
def test_equals_replicated_prompts(name):
    check_packed(name, MIXED, [MIXED.pack(**options) for options in PACKINGS.values()])


# A strict prefix of another prompt, one prompt at distant places and the padding token inside a prompt only look alike.
EDGES = {
    **{f"a prompt of {length} tokens": Samples.random([(length, [3, 1])]) for length in (511, 512, 513)},
    "prompts that only look alike": Samples(
        [[7, 8, 9], [7, 8], [0, 7, 0, 8], [7, 8, 9], [7, 8]], [[5, 6], [9, 5, 6], [0, 4], [6], [5, 5, 5]]
    ),
    "one sample": Samples.random([(6, [4])]),
    "unique prompts": Samples.random([(6, [4]), (3, [2]), (9, [5])]),
}


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_edges(name, edge):
    model = tiny_model(name)
    with torch.no_grad():
        got, _ = dualkv.shared_prompt_forward(model, EDGES[edge].pack())
        expected, _ = replicated_logps(stock_twin(model), EDGES[edge])
    check_equal(got, expected, TOLERANCES[FAMILIES[name].dtype].value)


# --- isolation -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral", "qwen3_moe", "gpt_oss", "deepseek_v3", *KINDS])
def test_a_response_does_not_see_the_others(name):
    """Other tokens in one response: all others stay equal to the last bit, and the gradients of a loss on them too."""
    is_hybrid = name in KINDS
    model = hybrid_model(name, torch.float32) if is_hybrid else tiny_model(name, **EVERY_EXPERT.get(name, {}))
    samples = RAGGED if is_hybrid else MIXED
    changed = Samples(samples.prompts, [list(one) for one in samples.responses])
    index = max(range(len(samples)), key=lambda one: len(samples.responses[one]))
    changed.responses[index] = [(token + 1) % 90 + 3 for token in changed.responses[index]]
    found = []
    for one in (samples, changed):
        logps = one.split(dualkv.shared_prompt_forward(model, one.pack())[0])
        sum(part.sum() for at, part in enumerate(logps) if at != index).backward()
        found.append((logps, gradients(model)))
    for at, (one, other) in enumerate(zip(found[0][0], found[1][0])):
        assert torch.equal(one, other) == (at != index)
    check_gradients(found[1][1], found[0][1], 1e-5)


# --- what comes out ---------------------------------------------------------------------------------------------------


def test_labels_and_rows_are_those_of_a_plain_forward():
    """A head of one's own: the logits of all rows with `labels`, or those of `token_index`, give the same."""
    model = tiny_model("qwen3")
    batch = MIXED.pack()
    with torch.no_grad():
        expected, _ = dualkv.shared_prompt_forward(model, batch)
        with dualkv.expect_shared_prompt(batch.layout, 2):
            all_logps = model(**row_of(batch, attention_mask=None)).logits[0].log_softmax(-1)
        kept = model(**row_of(batch, logits_to_keep=batch.token_index)).logits[0].log_softmax(-1)
    scored = batch.labels >= 0
    per_row = torch.zeros(len(scored), dtype=all_logps.dtype)
    per_row[scored] = all_logps[scored].gather(-1, batch.labels[scored][:, None])[:, 0]
    check_equal(unpack_logprobs(per_row, batch), unpack_logprobs(expected, batch), 1e-12)
    targets = batch.labels[batch.token_index]
    check_equal(kept.gather(-1, targets[:, None])[:, 0], expected, 1e-12)
    # Rolled labels, as fused heads make them: right in every row that has a label.
    rolled = batch.input_ids.roll(-1)
    assert torch.equal(rolled[scored], batch.labels[scored])


@pytest.mark.parametrize("name", SUPPORTED)
def test_a_forward_of_all_rows(name):
    """As trainers call it, with the hook and without a choice of rows: also of models that would drop some."""
    model = tiny_model(name)
    batch = MIXED.pack()
    dualkv.install_layout_hook(model)
    with torch.no_grad():
        got = logps_of(model(**row_of(batch)).logits, batch)
        expected, _ = replicated_logps(stock_twin(model), MIXED)
    check_equal(got, expected, TOLERANCES[FAMILIES[name].dtype].value)


def test_scores_of_16_bit_models_are_float32_and_entropy_is_none_unless_asked_for():
    model = tiny_model("llama", dtype=torch.bfloat16)
    with torch.no_grad():
        assert dualkv.shared_prompt_forward(model, MIXED.pack())[1] is None
        logps, entropy = dualkv.shared_prompt_forward(model, MIXED.pack(), with_entropy=True)
        _, expected = replicated_logps(stock_twin(model), MIXED)
    assert logps.dtype == entropy.dtype == torch.float32
    assert (entropy - expected).abs().max() < 0.02


def test_no_response_tokens():
    model = tiny_model("llama")
    logps, entropy = dualkv.shared_prompt_forward(model, Samples([[5, 6]] * 2, [[], []]).pack(), with_entropy=True)
    assert logps.shape == entropy.shape == (0,)
    # A rank without tokens takes part in the backward all the same: wrappers that communicate wait for it.
    logps.sum().backward()
    assert all((one.grad == 0).all() for one in model.model.layers.parameters())


OPTIONS = (
    dict(boundary="gather"),
    dict(boundary="replicate", pad_to_multiple_of=16),
    dict(min_shared=5),
    dict(group_ids=[0, 0, 0, 1, 1, 1, 0, 0, 0]),
)


@pytest.mark.parametrize("name", SUPPORTED)
def test_equals_each_sequence_alone(name: str) -> None:
    """Windows, softcaps and sinks are the models'."""
    batches = [pack_prefix_tree(SEQUENCES, loss_mask=MASKS, **{"min_shared": 1, **options}) for options in OPTIONS]
    assert all(one.layout.depth >= 4 and one.dedup_ratio > 1.5 for one in batches[:2])
    assert all(one.layout.depth > 1 and one.dedup_ratio > 1.1 for one in batches)
    check_packed(name, WHOLE, batches, TRAINED, **(EVERY_EXPERT[name] if name == "deepseek_v3" else {}))
