"""What would silently compute something else raises: lost layouts, inexact layers, dropout, foreign arguments."""

from __future__ import annotations

import contextlib

import pytest
import torch
from tiny_models import (
    MIXED,
    TOLERANCES,
    VERSION,
    Samples,
    check_equal,
    dualkv,
    replicated_logps,
    stock_twin,
    tiny_config,
    tiny_model,
    transformers,
)

from flash_attn_dualkv.integrations import guard
from flash_attn_dualkv.packing import SharedPromptError, SharedPromptLayoutError

BATCH = MIXED.pack()
LOST = "shared_prompt_layout: expected consumed by 2 attention layers, got "


def inputs(batch=BATCH, **more):
    ids = dict(input_ids=batch.input_ids[None], position_ids=batch.position_ids[None])
    return dict(**ids, attention_mask=None, use_cache=False, **more)


# --- the guard --------------------------------------------------------------------------------------------------------


class DropsUnknownArguments(torch.nn.Module):
    """A backbone whose code does not know of layouts."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone

    def forward(self, input_ids=None, position_ids=None, use_cache=None, **_):
        return self.backbone(input_ids=input_ids, position_ids=position_ids, use_cache=use_cache)


def test_a_dropped_layout_raises():
    model = tiny_model("llama")
    model.model = DropsUnknownArguments(model.model)
    model.get_input_embeddings = lambda: model.model.backbone.embed_tokens
    with pytest.raises(SharedPromptLayoutError, match=LOST + "0"):
        dualkv.shared_prompt_forward(model, BATCH)
    with pytest.raises(SharedPromptLayoutError, match=LOST + "0"), dualkv.expect_shared_prompt(BATCH.layout, 2):
        model(**inputs(shared_prompt_layout=BATCH.layout))


def test_a_layer_that_gets_no_layout_raises():
    model = tiny_model("llama")
    attention = model.model.layers[1].self_attn
    attention.register_forward_pre_hook(
        lambda module, args, kwargs: (args, {**kwargs, "shared_prompt_layout": None}), with_kwargs=True
    )
    with pytest.raises(SharedPromptLayoutError, match=LOST + "1"):
        dualkv.shared_prompt_forward(model, BATCH)
    handle = dualkv.install_layout_hook(model)
    with pytest.raises(SharedPromptLayoutError, match=LOST + "1"):
        model(**inputs(shared_prompt_layout=BATCH.layout))
    handle.remove()
    # Nobody expects anything here: this is what the guard is for.
    model(**inputs(shared_prompt_layout=BATCH.layout))


@pytest.mark.skipif(VERSION >= (5, 0), reason="this transformers' GPT-2 passes the layout on")
def test_a_model_that_drops_the_layout():
    model = tiny_model("gpt2")
    with pytest.raises(SharedPromptLayoutError, match=LOST + "0"):
        dualkv.shared_prompt_forward(model, BATCH)
    # The hook brings it to the backbone.
    dualkv.install_layout_hook(model)
    got, _ = dualkv.shared_prompt_forward(model, BATCH)
    expected, _ = replicated_logps(stock_twin(model), MIXED)
    check_equal(got, expected, TOLERANCES[torch.float64].value)


def test_a_model_on_stock_attention_does_not_take_a_layout():
    """Unknown arguments are swallowed: without the guard there would be numbers, and wrong ones."""
    model = tiny_model("llama", attention="sdpa")
    dualkv.install_layout_hook(model)
    with pytest.raises(SharedPromptLayoutError, match=LOST + "0"):
        model(**inputs(shared_prompt_layout=BATCH.layout))


def test_another_layout_than_the_expected_one():
    model = tiny_model("llama")
    other = MIXED.take([0, 1]).pack()
    with (
        pytest.raises(SharedPromptLayoutError, match="the layout of the enclosing expect_shared_prompt"),
        dualkv.expect_shared_prompt(BATCH.layout, 2),
    ):
        model(**inputs(other, shared_prompt_layout=other.layout))


def test_expectations_end_with_their_block():
    model = tiny_model("llama")
    with contextlib.suppress(ZeroDivisionError), dualkv.expect_shared_prompt(BATCH.layout, 2):
        raise ZeroDivisionError  # the error of the block itself is the one that is seen
    assert guard.current() is None
    dualkv.install_layout_hook(model)
    with pytest.raises(SharedPromptError):
        model(**inputs(MIXED.take([0]).pack(), shared_prompt_layout=BATCH.layout))
    assert guard.current() is None
    plain = model(torch.arange(3, 9)[None], use_cache=False)
    assert plain.logits.shape[1] == 6


def test_a_layer_that_runs_twice_counts_once():
    """Else a recomputation would stand in for a layer that never got the layout."""
    model = tiny_model("llama").train()
    model.gradient_checkpointing_enable(dict(use_reentrant=False))
    with dualkv.expect_shared_prompt(BATCH.layout, 2):
        # The backward belongs outside; on the CPU it recomputes in this very thread.
        model(**inputs(shared_prompt_layout=BATCH.layout)).logits.sum().backward()
    attention = model.model.layers[0].self_attn
    with pytest.raises(SharedPromptLayoutError, match=LOST + "1"), dualkv.expect_shared_prompt(BATCH.layout, 2):
        _ = [guard.consume(attention, BATCH.layout) for _ in range(2)]


@pytest.mark.parametrize("layers", [0, -1])
def test_layers_are_counted_from_one(layers):
    with pytest.raises(ValueError, match="num_layers: expected"), dualkv.expect_shared_prompt(BATCH.layout, layers):
        pass


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "options", "message"),
    [
        ("qwen3_next", {}, "layer_types: .*linear_attention"),
        ("llama4_text", {}, "layer_types: .*chunked_attention"),
        ("lfm2", dict(full_attn_idxs=[0], num_hidden_layers=3), "layer_types: .*conv"),
        ("jamba", {}, "layer_types: .*(mamba|linear_attention)"),
        ("mamba", {}, "linear_attention|a transformer with attention heads"),
        ("falcon_h1", {}, "hybrid|mamba_d_ssm"),
        ("recurrent_gemma", {}, "layer_types: .*(recurrent|linear_attention)"),
        ("bart", {}, "decoder-only"),
    ],
)
def test_inexact_layers_are_refused(model_type, options, message):
    with pytest.raises(SharedPromptError, match=message):
        dualkv.check_supported(transformers.AutoConfig.for_model(model_type, **options))


def test_bidirectional_attention_is_refused():
    config = tiny_config("gemma3_text")
    config.use_bidirectional_attention = True
    with pytest.raises(SharedPromptError, match="causal attention"):
        dualkv.check_supported(config)
    model = tiny_model("llama")
    with pytest.raises(SharedPromptError, match="is_causal: expected True"):
        model.model.layers[0].self_attn(
            torch.zeros(1, BATCH.layout.num_tokens, 32, dtype=torch.float64),
            position_embeddings=model.model.rotary_emb(torch.zeros(1).double(), BATCH.position_ids[None]),
            attention_mask=None,
            is_causal=False,
            shared_prompt_layout=BATCH.layout,
        )


@pytest.mark.skipif(VERSION < (5, 0), reason="this transformers has no bidirectional masks for decoders")
def test_bidirectional_masks_are_refused():
    """A model that is made bidirectional by its configuration says so in its mask only."""
    model = tiny_model("llama")
    model.config.is_causal = False
    with pytest.raises(SharedPromptError, match="is_causal: expected True"):
        model(**inputs(shared_prompt_layout=BATCH.layout))


def test_inexact_models_are_refused_before_they_run():
    config = transformers.AutoConfig.for_model(
        "lfm2", hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        vocab_size=97, full_attn_idxs=[0], pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="dualkv")
    for function in (dualkv.install_layout_hook, lambda one: dualkv.shared_prompt_forward(one, BATCH)):
        with pytest.raises(SharedPromptError, match="conv"):
            function(model)


def test_modules_that_mix_tokens_are_refused_whatever_the_configuration_says():
    model = tiny_model("llama")
    model.model.layers[0].mlp.extra = torch.nn.Conv1d(32, 32, 4)
    with pytest.raises(SharedPromptError, match=r"layers\.0\.mlp\.extra: expected a module that does not mix tokens"):
        dualkv.shared_prompt_forward(model, BATCH)


def test_positions_that_do_not_begin_at_zero_are_refused():
    config = transformers.AutoConfig.for_model(
        "roberta", hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, vocab_size=97,
        is_decoder=True,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.config._attn_implementation = "dualkv"
    for function in (dualkv.install_layout_hook, lambda one: dualkv.shared_prompt_forward(one, BATCH)):
        with pytest.raises(SharedPromptError, match="positions that begin at 0|logits_to_keep"):
            function(model)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("llama", dict(attention_dropout=0.1), "config.attention_dropout: expected 0 in training mode, got 0.1"),
        ("gpt2", dict(resid_pdrop=0.1), "dropout of .*: expected 0 in training mode, got 0.1"),
        ("phi3", dict(resid_pdrop=0.1), "dropout of .*: expected 0 in training mode, got 0.1"),
    ],
)
def test_dropout_is_refused_in_training(name, options, message):
    model = tiny_model(name, **options).train()
    with pytest.raises(SharedPromptError, match=message):
        dualkv.shared_prompt_forward(model, BATCH)
    dualkv.install_layout_hook(model)
    with pytest.raises(SharedPromptError, match=message):
        model(**inputs(shared_prompt_layout=BATCH.layout))
    dualkv.shared_prompt_forward(model.eval(), BATCH)


def test_dropout_of_attention_is_refused_without_the_hook_too():
    model = tiny_model("llama", attention_dropout=0.1).train()
    with pytest.raises(SharedPromptError, match="dropout of attention"):
        model(**inputs(shared_prompt_layout=BATCH.layout))


def test_only_causal_lms_are_scored():
    model = tiny_model("llama")
    for other in (model.model, torch.nn.Linear(2, 2)):
        with pytest.raises(SharedPromptError, match="model: expected"):
            dualkv.shared_prompt_forward(other, BATCH)


def test_a_sharded_head_is_refused():
    model = tiny_model("llama")
    model.lm_head.set_reshard_after_forward = lambda *args: None  # what FSDP2 gives to its units
    with pytest.raises(SharedPromptError, match="an LM head in the root's FSDP unit"):
        dualkv.shared_prompt_forward(model, BATCH)


# --- calls ------------------------------------------------------------------------------------------------------------


def test_arguments_that_would_be_ignored_are_refused():
    model = tiny_model("llama")
    with pytest.raises(SharedPromptError, match="expected no arguments of attention .* got position_bias"):
        model(**inputs(shared_prompt_layout=BATCH.layout, position_bias=torch.zeros(1)))
    with pytest.raises(SharedPromptError, match="output_attentions: expected False"):
        model(**inputs(shared_prompt_layout=BATCH.layout, output_attentions=True))


def test_caches_and_masks_are_refused():
    model = tiny_model("llama")
    cache = model(torch.arange(3, 9)[None], use_cache=True).past_key_values
    ids = dict(input_ids=BATCH.input_ids[None], position_ids=BATCH.position_ids[None])
    with pytest.raises(SharedPromptError, match="no KV cache"):
        model(**ids, past_key_values=cache, shared_prompt_layout=BATCH.layout)
    padding = torch.ones_like(ids["input_ids"])
    padding[0, 0] = 0
    with pytest.raises(SharedPromptError, match="attention_mask: expected None"):
        model(**ids, attention_mask=padding, use_cache=False, shared_prompt_layout=BATCH.layout)


def test_the_layout_is_that_of_the_row():
    model = tiny_model("llama")
    other = Samples([[5, 6]], [[7]]).pack()
    with pytest.raises(SharedPromptError, match="input_ids: expected 1 row of 3 tokens"):
        model(**inputs(shared_prompt_layout=other.layout))


def test_padding_of_the_row_changes_nothing():
    model = tiny_model("llama")
    with torch.no_grad():
        padded, _ = dualkv.shared_prompt_forward(model, MIXED.pack(pad_to_multiple_of=64))
        expected, _ = dualkv.shared_prompt_forward(model, BATCH)
    check_equal(padded, expected, 1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(name="dualkv_flash"), 'name: expected a name without "flash"'),
        (dict(name="sdpa"), "name: expected a name of its own"),
        (dict(name=""), "name: expected"),
        (dict(fallback="flash_attention_2"), "fallback: expected one of auto, sdpa, eager"),
        (dict(backend="gpu"), "backend: expected one of auto, cuda, reference"),
    ],
)
def test_what_can_be_registered(options, message, restored_registry):
    with pytest.raises(SharedPromptError, match=message):
        dualkv.register(**options)
