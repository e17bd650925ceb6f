# SPDX-License-Identifier: BSD-3-Clause
"""Without a layout a model on the registered attention is a stock model; so is one whose stock attention is wrapped."""

from __future__ import annotations

import copy

import pytest
import torch
from tiny_models import (
    FAMILIES,
    MIXED,
    SUPPORTED,
    TOLERANCES,
    VERSION,
    check_equal,
    check_gradients,
    dualkv,
    gradients,
    replicated_logps,
    stock_twin,
    tiny_model,
    transformers,
)

from flash_attn_dualkv import SharedPromptError
from flash_attn_dualkv.integrations.transformers import masks

AttentionMaskInterface = transformers.masking_utils.AttentionMaskInterface
sdpa_mask = transformers.masking_utils.sdpa_mask

PROMPTS = torch.tensor([[0, 0, 0, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15], [0, 0, 3, 4, 5, 6, 7]])
PADDING = torch.tensor([[0, 0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize("rows", [[0, 1, 2], [1]], ids=["padded", "one"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(
    "name", [one for one in ("llama", "mistral", "gemma2", "gemma4_text", "gpt_oss", "deepseek_v3") if one in SUPPORTED]
)
def test_generate(name, cache, rows):
    """Greedy tokens and their scores, from a left-padded batch and of one sequence, with a KV cache."""
    if cache == "static" and name == "deepseek_v3" and VERSION < (5, 0):
        pytest.skip("this transformers has no static cache for values narrower than keys")
    model = tiny_model(name, dtype=torch.float32)
    options = dict(
        attention_mask=PADDING[rows],
        max_new_tokens=8,
        do_sample=False,
        cache_implementation=None if cache == "dynamic" else cache,
        disable_compile=True,
        return_dict_in_generate=True,
        output_scores=True,
    )
    got = model.generate(PROMPTS[rows], **options)
    expected = stock_twin(model).generate(PROMPTS[rows], **options)
    assert torch.equal(got.sequences, expected.sequences)
    for one, other in zip(got.scores, expected.scores):
        # Of one sequence, Gemma 4 computes its last layers for the last row alone, stock for all.
        check_equal(one, other, TOLERANCES[torch.float32].value if name == "gemma4_text" and len(rows) == 1 else 0.0)


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("name", [one for one in ("llama", "mistral", "gemma2", "gemma4_text") if one in SUPPORTED])
def test_static_cache_without_a_mask(name, kept):
    """Of one sequence, also in a cache that is used again: its counter moves while layers run."""
    model, ids = tiny_model(name, dtype=torch.float32), PROMPTS[1:2]
    cuts = [5, *[1] * 2, 2] if name in ("llama", "gemma4_text") else [5, *[1] * 4]  # rings take one token at a time
    found = []
    for one in (model, stock_twin(model)):
        cache, logits = transformers.StaticCache(config=model.config, max_cache_len=9), []
        for _ in range(2):
            cache.reset()
            begin = 0
            for part in cuts:
                rows = torch.arange(begin, begin + part)
                with torch.no_grad():
                    step = one(ids[:, rows % 7], past_key_values=cache, cache_position=rows, logits_to_keep=kept)
                logits.append(step.logits[:, -1])
                begin += part
        found.append(torch.cat(logits))
    check_equal(*found, TOLERANCES[torch.float32].value)


@pytest.mark.skipif(VERSION < (5, 10), reason="has another continuous batching")
@pytest.mark.parametrize(("name", "fallback"), [("llama", "sdpa"), ("gpt_oss", "auto")])
def test_generate_with_continuous_batching(name, fallback, restored_registry):
    """On stock attention by its name, and afterwards on the registered one again, errors or not."""
    dualkv.register("batched", fallback=fallback)
    model = tiny_model(name, dtype=torch.float32, attention="batched")
    config = transformers.GenerationConfig(max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=-1)

    def generate(model):
        batching = transformers.ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64)
        prompts = [row[mask.bool()].tolist() for row, mask in zip(PROMPTS, PADDING)]
        got = model.generate_batch(prompts, generation_config=config, continuous_batching_config=batching)
        return [one.generated_tokens for one in got.values()]

    expected = generate(stock_twin(model, FAMILIES[name].stock if fallback == "auto" else fallback))
    assert generate(model) == expected and len(expected) == 3
    assert model.config._attn_implementation == "batched"
    with pytest.raises(AttributeError):
        model.generate_batch([[3, 4]], generation_config="none")
    assert model.config._attn_implementation == "batched"


@pytest.mark.parametrize(
    ("name", "fallback"),
    [
        *((name, "auto") for name in SUPPORTED if name != "deepseek_v3"),
        *((name, fallback) for name in ("llama", "mistral", "gemma2", "gpt_oss") for fallback in ("sdpa", "eager")),
    ],
)
def test_padded_batches(name, fallback, restored_registry):
    """Logits and gradients of real tokens are bit-equal to those of the implementation that is fallen back to."""
    dualkv.register("fallback_of_a_test", fallback=fallback)
    # float32: in float64 the stock eager attention makes NaN of rows that see nothing, which
    # padding has.
    model = tiny_model(name, attention="fallback_of_a_test", dtype=torch.float32)
    if fallback == "sdpa" and FAMILIES[name].stock == "eager":
        with pytest.raises(SharedPromptError, match="fallback: expected attention that sdpa offers"):
            model(PROMPTS, attention_mask=PADDING)
        return
    twin = stock_twin(model, FAMILIES[name].stock if fallback == "auto" else fallback)
    results = []
    for one in (model, twin):
        logits = one(PROMPTS, attention_mask=PADDING, use_cache=False).logits[PADDING.bool()]
        logits.square().sum().backward()
        results.append((logits.detach(), gradients(one)))
    assert torch.equal(results[0][0], results[1][0])
    check_gradients(results[0][1], results[1][1], 0.0)


@pytest.mark.skipif("gemma4_text" not in SUPPORTED, reason="this transformers has no Gemma 4")
@pytest.mark.parametrize("fallback", ["auto", "eager"])
@pytest.mark.parametrize("window", [5, 100])
@pytest.mark.parametrize("mask", [None, torch.ones_like(PADDING), PADDING], ids=["no mask", "ones", "padding"])
def test_rows_that_a_model_drops(mask, window, fallback, restored_registry):
    """Layers with the keys of others compute the last rows alone, where only their logits are asked for."""
    dualkv.register("fallback_of_a_test", fallback=fallback)
    model = tiny_model("gemma4_text", attention="fallback_of_a_test", dtype=torch.float32, sliding_window=window)
    for rows in ([0, 1, 2], [1]):
        inputs = dict(attention_mask=None if mask is None else mask[rows], use_cache=False)
        with torch.no_grad():
            expected = stock_twin(model)(PROMPTS[rows], **inputs).logits
            for kept in (1, 2, 5):
                got = model(PROMPTS[rows], **inputs, logits_to_keep=kept).logits
                real = PADDING[rows, -kept:].bool()
                check_equal(got[real], expected[:, -kept:][real], TOLERANCES[torch.float32].value)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_packed_sequences_without_a_layout(name):
    """Padding-free training as transformers knows it: position ids that start again tell the sequences apart."""
    model = tiny_model(name)
    ids = torch.arange(3, 20)[None]
    positions = torch.tensor([[*range(9), *range(8)]])
    with torch.no_grad():
        got = model(ids, position_ids=positions, use_cache=False).logits
        expected = stock_twin(model)(ids, position_ids=positions, use_cache=False).logits
        alone = model(ids[:, 9:], use_cache=False).logits
    assert torch.equal(got, expected)
    check_equal(got[:, 9:], alone, 1e-6)


# --- wrapped names ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_wrapped_sdpa(name, restored_registry):
    """With a layout it is this library's attention, without one it is stock."""
    model = tiny_model(name, attention="sdpa")
    stock = copy.deepcopy(model)(PROMPTS, attention_mask=PADDING, use_cache=False).logits
    expected, _ = replicated_logps(model, MIXED)
    dualkv.wrap()
    dualkv.wrap(["sdpa"])  # once more changes nothing
    assert torch.equal(model(PROMPTS, attention_mask=PADDING, use_cache=False).logits, stock)
    again, _ = replicated_logps(model, MIXED)
    assert torch.equal(again, expected)
    got, _ = dualkv.shared_prompt_forward(model, MIXED.pack())
    check_equal(got, expected, TOLERANCES[torch.float64].value)


@pytest.mark.parametrize("attention", ["dualkv", "sdpa"])
def test_no_mask_is_built_with_a_layout(attention, restored_registry, monkeypatch):
    """transformers makes one of T x T elements for packed positions: 4 GB at 64K tokens."""
    built = []

    def watched(*args, **kwargs):
        built.append(kwargs)
        return sdpa_mask(*args, **kwargs)

    monkeypatch.setattr(masks, "sdpa_mask", watched)
    AttentionMaskInterface.register("sdpa", watched)
    dualkv.wrap("sdpa")
    model = tiny_model("gemma3_text", attention=attention)
    dualkv.shared_prompt_forward(model, MIXED.pack(), self_check=False)
    assert not built
    batch = MIXED.pack()
    model(batch.input_ids[None], position_ids=batch.position_ids[None].clone(), use_cache=False)
    assert len(built) == 2  # one for windows and one for full attention, shared by the layers


def test_wrapped_sdpa_with_the_hook(restored_registry):
    """A caller that cannot pass the layout through the model: the backbone takes it from the enclosing expectation."""
    dualkv.wrap("sdpa")
    model = tiny_model("qwen3", attention="sdpa")
    batch = MIXED.pack()
    inputs = dict(input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False)
    with pytest.raises(SharedPromptError, match="attention_mask: expected None with a layout"):
        model(**inputs, shared_prompt_layout=batch.layout)
    handle = dualkv.install_layout_hook(model)
    with dualkv.expect_shared_prompt(batch.layout, 2):
        injected = model(**inputs).logits
    passed = model(**inputs, shared_prompt_layout=batch.layout).logits
    assert torch.equal(injected, passed)
    handle.remove()
    assert not model.model._forward_hooks
    assert not model.model._forward_pre_hooks


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_masks_of_models_that_look_at_theirs(name):
    """Without a layout it is the stock mask, also for one row; with one they are refused."""
    model, seen = tiny_model(name), []

    def look(module, args, kwargs):
        mask = kwargs["attention_mask"]
        if mask is not None:
            seen.append((mask.shape, mask[:, :, -1:], torch.where(mask, 0.0, 1.0), mask.dtype))

    model.model.layers[0].self_attn.register_forward_pre_hook(look, with_kwargs=True)
    batch = MIXED.pack()
    ids = dict(input_ids=batch.input_ids[None], use_cache=False)
    model(**ids)
    # One plainly causal row needs no mask, here and in stock models; 4.57 makes one.
    assert len(seen) == (name != "llama" or VERSION < (5, 0))
    model(**ids, position_ids=batch.position_ids[None].clone())  # as of another library's packed row
    shape, last, hidden, dtype = seen[-1]
    tokens = batch.layout.num_tokens
    assert (shape, dtype) == ((1, 1, tokens, tokens), torch.bool)
    assert torch.equal(last, hidden[:, :, -1:] == 0)
    with pytest.raises(SharedPromptError, match="one that computes with the mask itself"):
        dualkv.shared_prompt_forward(model, batch)


def test_only_known_names_are_wrapped(restored_registry):
    for name in ("eager", "no_such_attention"):
        with pytest.raises(SharedPromptError, match="names: expected one of"):
            dualkv.wrap([name])


def test_the_backend_is_the_registered_one(restored_registry):
    dualkv.register("kernels_only", backend="cuda")
    with pytest.raises(SharedPromptError, match="backend"):
        dualkv.shared_prompt_forward(tiny_model("llama", attention="kernels_only"), MIXED.pack())
