"""Stock transformers models compute the same with one prompt for all responses as with one prompt each."""

from __future__ import annotations

import pytest
import torch
from tiny_models import (
    FAMILIES,
    MIXED,
    SUPPORTED,
    TOLERANCES,
    Samples,
    check_equal,
    check_gradients,
    dualkv,
    gradients,
    replicated_logps,
    stock_twin,
    tiny_config,
    tiny_model,
    transformers,
)

from flash_attn_dualkv import pack_padded, unpack_logprobs

PACKINGS = {
    "replicate": {},
    "gather": dict(boundary="gather"),
    "replicate, shortened, padded": dict(drop_last=True, pad_to_multiple_of=16),
    "gather, split": dict(boundary="gather", max_responses_per_group=1),
}


def weights(count: int, dtype: torch.dtype) -> torch.Tensor:
    """What a loss might multiply log-probabilities with: of both signs, different for each token."""
    return torch.randn(count, generator=torch.Generator().manual_seed(5), dtype=dtype)


@pytest.mark.parametrize("name", SUPPORTED)
def test_equals_replicated_prompts(name):
    dtype = FAMILIES[name].dtype
    model = tiny_model(name)
    twin = stock_twin(model)
    logps, entropy = replicated_logps(twin, MIXED, temperature=0.7)
    loss_weights = weights(len(logps), dtype)
    (loss_weights @ logps + 0.3 * entropy.sum()).backward()
    expected = gradients(twin)
    tolerance = TOLERANCES[dtype]
    for options in PACKINGS.values():
        got, got_entropy = dualkv.shared_prompt_forward(
            model, MIXED.pack(**options), temperature=0.7, with_entropy=True
        )
        check_equal(got, logps, tolerance.value)
        check_equal(got_entropy, entropy, tolerance.value)
        (loss_weights @ got + 0.3 * got_entropy.sum()).backward()
        check_gradients(gradients(model), expected, tolerance.gradient)


OPTIONS_THAT_MATTER = [
    ("gemma2", dict(attn_logit_softcapping=None)),
    ("gemma2", dict(final_logit_softcapping=None)),
    ("granite", dict(logits_scaling=1.0)),
    ("cohere", dict(logit_scale=1.0)),
    ("mistral", dict(sliding_window=None)),
    ("gpt_oss", dict(layer_types=["full_attention", "full_attention"])),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS_THAT_MATTER)
def test_the_models_are_sensitive_to_what_is_tested(name, options):
    """Each of these options moves the numbers by far more than the tolerance: losing one would be seen."""
    without, _ = replicated_logps(stock_twin(tiny_model(name, **options)), MIXED)
    with_option, _ = replicated_logps(stock_twin(tiny_model(name)), MIXED)
    assert (with_option - without).abs().max() > 100 * TOLERANCES[FAMILIES[name].dtype].value


def test_attention_sinks_matter():
    model = stock_twin(tiny_model("gpt_oss"))
    before, _ = replicated_logps(model, MIXED)
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(-30.0)
    after, _ = replicated_logps(model, MIXED)
    assert (after - before).abs().max() > 100 * TOLERANCES[torch.float32].value


@pytest.mark.parametrize("length", [511, 512, 513])
def test_prompt_lengths_around_a_block(length):
    samples = Samples.random([(length, [3, 1])])
    model = tiny_model("llama")
    with torch.no_grad():
        got, _ = dualkv.shared_prompt_forward(model, samples.pack())
        expected, _ = replicated_logps(stock_twin(model), samples)
    check_equal(got, expected, TOLERANCES[torch.float64].value)


def test_prompts_that_only_look_alike_stay_apart():
    """A strict prefix of another prompt, one prompt at distant places, and the padding token inside a prompt."""
    samples = Samples(
        [[7, 8, 9], [7, 8], [0, 7, 0, 8], [7, 8, 9], [7, 8]],
        [[5, 6], [9, 5, 6], [0, 4], [6], [5, 5, 5]],
    )
    model = tiny_model("qwen3")
    batch = samples.pack()
    assert batch.layout.num_groups == 3
    with torch.no_grad():
        got, _ = dualkv.shared_prompt_forward(model, batch)
        expected, _ = replicated_logps(stock_twin(model), samples)
    check_equal(got, expected, TOLERANCES[torch.float64].value)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches(side):
    """Prompts padded on the left as for generation, or on the right; responses on the right."""
    samples = MIXED
    width, length = max(map(len, samples.prompts)), max(map(len, samples.responses))
    rows, masks = [], []
    for prompt, response in zip(samples.prompts, samples.responses):
        gap, rest = [0] * (width - len(prompt)), [0] * (length - len(response))
        rows.append((gap + prompt if side == "left" else prompt + gap) + response + rest)
        real = [1] * len(prompt)
        masks.append((gap + real if side == "left" else real + gap) + [1] * len(response) + rest)
    model = tiny_model("qwen2")
    batch = pack_padded(torch.tensor(rows), torch.tensor(masks), width)
    with torch.no_grad():
        got, _ = dualkv.shared_prompt_forward(model, batch)
        expected, _ = replicated_logps(stock_twin(model), samples)
    check_equal(got, expected, TOLERANCES[torch.float64].value)
    padded = unpack_logprobs(got, batch, fill=-1.0)
    assert padded.shape == (len(samples), length)
    for row, values in zip(padded, samples.split(got)):
        assert torch.equal(row[: len(values)], values)
        assert (row[len(values) :] == -1.0).all()


def test_the_loss_of_a_plain_forward():
    """Labels are those of the next token already: transformers must not shift them again."""
    model = tiny_model("llama")
    batch = MIXED.pack()
    ids = dict(input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False)
    labels = batch.labels[None]
    loss = model(**ids, labels=labels, shift_labels=labels, shared_prompt_layout=batch.layout).loss
    logps, _ = dualkv.shared_prompt_forward(model, batch)
    check_equal(loss.double(), -logps.mean(), 1e-6)  # transformers takes the loss of float32 logits
    loss.backward()


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


def test_the_text_side_of_a_multimodal_model():
    text = tiny_config("gemma3_text").to_dict()
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=16,
                  patch_size=8)  # fmt: skip
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(1)
    model = transformers.Gemma3ForConditionalGeneration(config).double().eval()
    with torch.no_grad():
        model.set_attn_implementation("sdpa")
        expected, _ = replicated_logps(model, MIXED)
        model.set_attn_implementation("dualkv")
        got, _ = dualkv.shared_prompt_forward(model, MIXED.pack())
    check_equal(got, expected, TOLERANCES[torch.float64].value)
