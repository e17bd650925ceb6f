# SPDX-License-Identifier: BSD-3-Clause
"""Stock models compute with one prompt for all responses, or on a tree, what they compute on each sequence alone."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hybrid_models import EXACT, alone, check_no_worse, in_float64, shared
from tiny_models import (
    EVERY_EXPERT,
    FAMILIES,
    MASKS,
    MIXED,
    SEQUENCES,
    SUPPORTED,
    TOLERANCES,
    VERSION,
    Samples,
    check_equal,
    check_gradients,
    dualkv,
    gradients,
    replicated_logps,
    stock_twin,
    tiny_model,
)

from flash_attn_dualkv import SharedPromptLayoutError, pack_prefix_tree, unpack_logprobs

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


@pytest.mark.parametrize("name", SUPPORTED)
def test_both_types(name):
    """In float64 throughout rounding is all that is left; in float32 the errors are those of the stock model."""
    model = tiny_model(name, dtype=torch.float64)
    if VERSION >= (5, 0):
        model.set_experts_implementation("eager")  # the other one has no float64
    with in_float64():
        exact, got = alone(model, MIXED), shared(model, MIXED.pack())
    check_equal(got[0], exact[0], EXACT.value)
    assert got[1].keys() == exact[1].keys()
    largest = max(one.abs().max().item() for one in exact[1].values())
    for parameter, one in exact[1].items():
        # Some biases of keys change nothing: their gradients are rounding on both sides.
        bound = EXACT.gradient * max(one.abs().max().item(), 1e-3 * largest)
        assert (got[1][parameter] - one).abs().max() <= bound, parameter
    model = model.float()
    check_no_worse(shared(model, MIXED.pack()), alone(model, MIXED), exact)


OPTIONS_THAT_MATTER = [
    ("gemma2", dict(attn_logit_softcapping=None)),
    ("gemma2", dict(final_logit_softcapping=None)),
    ("granite", dict(logits_scaling=1.0)),
    ("cohere", dict(logit_scale=1.0)),
    ("mistral", dict(sliding_window=None)),
    ("phi3", dict(sliding_window=None)),
    ("gpt_oss", dict(layer_types=["full_attention", "full_attention"])),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS_THAT_MATTER)
def test_the_models_are_sensitive_to_what_is_tested(name, options):
    """Each of these options moves the numbers by far more than the tolerance: losing one would be seen."""
    without, _ = replicated_logps(stock_twin(tiny_model(name, **options)), MIXED)
    with_option, _ = replicated_logps(stock_twin(tiny_model(name)), MIXED)
    assert (with_option - without).abs().max() > 100 * TOLERANCES[FAMILIES[name].dtype].value


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


def logps_of(model, samples: Samples) -> list[torch.Tensor]:
    with torch.no_grad():
        return samples.split(dualkv.shared_prompt_forward(model, samples.pack())[0])


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral", "qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_a_response_does_not_see_the_others(name):
    """Other tokens in one response: the log-probabilities of all others stay equal to the last bit."""
    model = tiny_model(name, **EVERY_EXPERT.get(name, {}))
    before = logps_of(model, MIXED)
    changed = Samples(MIXED.prompts, [list(one) for one in MIXED.responses])
    changed.responses[2] = [(token + 1) % 90 + 3 for token in changed.responses[2]]
    after = logps_of(model, changed)
    for index, (one, other) in enumerate(zip(before, after)):
        assert torch.equal(one, other) == (index != 2)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_gradients_reach_only_what_a_response_depends_on(name):
    """Loss on one response: no gradient at the embeddings of the others; the prompt's is the replicated one's."""
    model = tiny_model(name)
    chosen = 2
    batch = MIXED.pack(boundary="gather")
    embedded = []
    handle = model.get_input_embeddings().register_forward_hook(lambda module, args, out: embedded.append(out))
    logps = MIXED.split(dualkv.shared_prompt_forward(model, batch)[0])
    handle.remove()
    (gradient,) = torch.autograd.grad(logps[chosen].sum(), embedded[0])
    gradient = gradient[0]
    parts = zip(pairwise(accumulate(batch.layout.node_lens, initial=0)), batch.layout.node_parents)
    for place, ((begin, end), parent) in enumerate(parts):
        if parent < 0:
            continue
        # The last token of the response itself scores nothing.
        is_seen = gradient[begin:end].abs().sum(-1) > 0
        expected = [batch.tree.leaves[chosen] == place] * (end - begin - 1) + [False]
        assert is_seen.tolist() == (expected if end > begin else [])


# --- what comes out ---------------------------------------------------------------------------------------------------


def test_errors_that_are_not_numbers_are_seen():
    """By the comparison on which these tests rely."""
    good = {name: torch.ones(3) for name in "abc"}
    check_gradients(good, good, 1e-6)
    for name in "abc":
        with pytest.raises(AssertionError):
            check_gradients({**good, name: torch.tensor([1.0, float("nan"), 1.0])}, good, 1e-6)


def test_labels_and_rows_are_those_of_a_plain_forward():
    """A head of one's own: the logits of all rows with `labels`, or those of `token_index`, give the same."""
    model = tiny_model("qwen3")
    batch = MIXED.pack()
    inputs = dict(input_ids=batch.input_ids[None], position_ids=batch.position_ids[None])
    layout = dict(attention_mask=None, use_cache=False, shared_prompt_layout=batch.layout)
    with torch.no_grad():
        expected, _ = dualkv.shared_prompt_forward(model, batch)
        with dualkv.expect_shared_prompt(batch.layout, 2):
            all_logps = model(**inputs, **layout).logits[0].log_softmax(-1)
        kept = model(**inputs, **layout, logits_to_keep=batch.token_index).logits[0].log_softmax(-1)
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
    inputs = dict(input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False)
    with torch.no_grad():
        logits = model(**inputs, shared_prompt_layout=batch.layout).logits[0, batch.token_index]
        expected, _ = replicated_logps(stock_twin(model), MIXED)
    got = logits.log_softmax(-1).gather(-1, batch.labels[batch.token_index][:, None])[:, 0]
    check_equal(got, expected, TOLERANCES[FAMILIES[name].dtype].value)


def test_16_bit_models_are_scored_in_float32():
    model = tiny_model("llama", dtype=torch.bfloat16)
    batch = MIXED.pack()
    with torch.no_grad():
        logps, entropy = dualkv.shared_prompt_forward(model, batch, with_entropy=True)
        expected, expected_entropy = replicated_logps(stock_twin(model), MIXED)
        exact, _ = replicated_logps(stock_twin(model).float(), MIXED)
    assert logps.dtype == entropy.dtype == torch.float32
    error, stock_error = ((one - exact).abs().max() for one in (logps, expected))
    assert error <= 1.5 * stock_error
    assert (entropy - expected_entropy).abs().max() < 0.02


def test_entropy_is_none_unless_asked_for():
    with torch.no_grad():
        assert dualkv.shared_prompt_forward(tiny_model("llama"), MIXED.pack())[1] is None


def test_no_response_tokens():
    model = tiny_model("llama")
    logps, entropy = dualkv.shared_prompt_forward(model, Samples([[5, 6]] * 2, [[], []]).pack(), with_entropy=True)
    assert logps.shape == entropy.shape == (0,)
    # A rank without tokens takes part in the backward all the same: wrappers that communicate wait for it.
    logps.sum().backward()
    assert all((one.grad == 0).all() for one in model.model.layers.parameters())


OPTIONS = (dict(boundary="gather"), dict(boundary="replicate", pad_to_multiple_of=16))


@pytest.mark.parametrize("name", SUPPORTED)
def test_equals_each_sequence_alone(name: str) -> None:
    """Windows, softcaps and sinks are the models'."""
    whole = Samples([one[:1] for one in SEQUENCES], [one[1:] for one in SEQUENCES])
    trained = torch.tensor([value for mask in MASKS for value in mask[1:]]).bool()
    batches = [pack_prefix_tree(SEQUENCES, loss_mask=MASKS, min_shared=1, **options) for options in OPTIONS]
    assert all(one.layout.depth >= 4 and one.dedup_ratio > 1.5 for one in batches)
    check_packed(name, whole, batches, trained, **(EVERY_EXPERT[name] if name == "deepseek_v3" else {}))


LOSSES = 256  # of one of them the error of either side is chance, of many it is a measure
DRAWS = 8  # those that are differentiated
ROUNDED = {
    "llama": dict(head_dim=64),
    "qwen3": dict(head_dim=128),
    "gemma2": dict(head_dim=128, query_pre_attn_scalar=128),
    "gpt_oss": dict(head_dim=64, **EVERY_EXPERT["gpt_oss"]),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_in_bf16_no_less_accurate_than_each_sequence_alone(name: str) -> None:
    """Errors of log-probabilities, losses and all gradients against float32 are those of the stock model in bf16."""
    shape = dict(hidden_size=128, intermediate_size=256)
    model = tiny_model(name, dtype=torch.bfloat16, **shape, **ROUNDED[name])
    whole = Samples([one[:1] for one in SEQUENCES], [one[1:] for one in SEQUENCES])
    trained = torch.tensor([value for mask in MASKS for value in mask[1:]]).bool()
    batch = pack_prefix_tree(SEQUENCES, loss_mask=MASKS, min_shared=1)

    def run(one: Any) -> dict[str, torch.Tensor]:
        if one is model:
            logps, _ = dualkv.shared_prompt_forward(one, batch)
        else:
            logps = replicated_logps(one, whole)[0][trained]
        weights = torch.randn(LOSSES, len(logps), generator=torch.Generator().manual_seed(0))
        losses = (weights * logps.float()).mean(1)
        found: dict[str, list[torch.Tensor]] = {}
        for loss in losses[:DRAWS]:
            loss.backward(retain_graph=True)
            for key, gradient in gradients(one).items():
                found.setdefault(key, []).append(gradient.float())
        of_parameters = {key: torch.stack(of_losses) for key, of_losses in found.items()}
        return {"logps": logps.detach().float(), "losses": losses.detach(), **of_parameters}

    exact, stock, got = run(stock_twin(model).float()), run(stock_twin(model)), run(model)
    assert got.keys() == exact.keys()
    ratios = {key: ((got[key] - one).norm() / (stock[key] - one).norm()).item() for key, one in exact.items()}
    assert not {key: ratio for key, ratio in ratios.items() if not ratio <= 1.5}


def test_the_layout_in_a_forward_of_the_model() -> None:
    """The hook, the guard and the check of positions, as for prompts."""
    model = tiny_model("llama")
    batch, other = (pack_prefix_tree(SEQUENCES[:count], min_shared=1) for count in (9, 8))
    inputs = dict(input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False)
    handle = dualkv.install_layout_hook(model)
    logits = model(**inputs, shared_prompt_layout=batch.layout).logits[0]
    scores = logits.log_softmax(-1)[batch.token_index, batch.targets]
    check_equal(scores, dualkv.shared_prompt_forward(model, batch)[0], 1e-12)
    wrong = torch.arange(batch.layout.num_tokens)[None]
    with pytest.raises(SharedPromptLayoutError, match="^position_ids"):
        model(**{**inputs, "position_ids": wrong}, shared_prompt_layout=batch.layout)
    handle.remove()
    with (
        pytest.raises(SharedPromptLayoutError, match="^shared_prompt_layout: expected the layout of the enclosing"),
        dualkv.expect_shared_prompt(other.layout, 2),
    ):
        model(**inputs, shared_prompt_layout=batch.layout)
