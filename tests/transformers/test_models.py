# SPDX-License-Identifier: BSD-3-Clause
"""Stock models compute with one prompt for all responses, or on a tree, what they compute on each sequence alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import (
    EVERY_EXPERT,
    FAMILIES,
    MASKS,
    MIXED,
    SEQUENCES,
    SUPPORTED,
    TOLERANCES,
    TRAINED,
    VOCABULARY,
    WHOLE,
    Outcome,
    Samples,
    check_equal,
    dualkv,
    logps_of,
    replicated_logps,
    row_of,
    stock_twin,
    tiny_model,
)

from flash_attn_dualkv import pack_prefix_tree, scores

PACKINGS = {
    "replicate": {},
    "gather": dict(boundary="gather"),
    "replicate, padded": dict(pad_to_multiple_of=16),
}


def check_packed(name, samples, batches, scored=slice(None), **options) -> None:
    """Log-probabilities, entropies and the gradients of all parameters of every batch of the samples."""
    tolerance = TOLERANCES[FAMILIES[name].dtype]
    model = tiny_model(name, **options)
    twin = stock_twin(model)
    logps, entropy = (one[scored] for one in replicated_logps(twin, samples, temperature=0.7))
    expected = Outcome.of(twin, logps, entropy)
    for batch in batches:
        got, got_entropy = dualkv.shared_prompt_forward(model, batch, temperature=0.7, with_entropy=True)
        check_equal(got_entropy, entropy, tolerance.value)
        Outcome.of(model, got, got_entropy).check(expected, tolerance)


@pytest.mark.parametrize("name", SUPPORTED)
def test_equals_replicated_prompts(name, monkeypatch):
    """The head in chunks; below, in one."""
    monkeypatch.setattr(scores, "LOGIT_ELEMENTS", 4 * VOCABULARY + 1)
    check_packed(name, MIXED, [MIXED.pack(**options) for options in PACKINGS.values()])


# --- what comes out ---------------------------------------------------------------------------------------------------


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
    # A rank without tokens takes part in the backward all the same: wrappers that communicate wait
    # for it.
    logps.sum().backward()
    assert all((one.grad == 0).all() for one in model.model.layers.parameters())


OPTIONS = (
    dict(boundary="gather"),
    dict(boundary="replicate", pad_to_multiple_of=16),
    dict(min_shared=5),
    dict(group_ids=[0, 0, 0, 1, 1, 1, 0, 0, 0]),
)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_head_scores_shared_tokens_once(options: dict[str, Any]) -> None:
    batch = pack_prefix_tree(SEQUENCES, loss_mask=MASKS, **{"min_shared": 1, **options})
    model = tiny_model("qwen3")
    rows: list[int] = []
    model.get_output_embeddings().register_forward_hook(lambda head, given, out: rows.append(out.shape[:-1].numel()))
    with torch.no_grad():
        dualkv.shared_prompt_forward(model, batch, self_check=False)
    own = batch.rows_of(batch.jagged_index + 1)
    assert rows[-1] == len(own.unique()) < len(own)


@pytest.mark.parametrize("name", SUPPORTED)
def test_equals_each_sequence_alone(name: str) -> None:
    """Windows, softcaps and sinks are the models'."""
    batches = [pack_prefix_tree(SEQUENCES, loss_mask=MASKS, **{"min_shared": 1, **options}) for options in OPTIONS]
    assert all(one.layout.depth >= 4 and one.dedup_ratio > 1.5 for one in batches[:2])
    assert all(one.layout.depth > 1 and one.dedup_ratio > 1.1 for one in batches)
    check_packed(name, WHOLE, batches, TRAINED, **(EVERY_EXPERT[name] if name == "deepseek_v3" else {}))
