# SPDX-License-Identifier: BSD-3-Clause
"""What would silently compute something else raises: lost layouts, inexact layers, dropout, foreign arguments."""

from __future__ import annotations

import copy
import dataclasses
import threading
from typing import Any

import pytest
import torch
from hybrid_models import KINDS, hybrid_model
from sweep import any_model
from tiny_models import (
    COMMON,
    FAMILIES,
    MIXED,
    VERSION,
    Samples,
    dualkv,
    lose_a_layout,
    row_of,
    tiny_config,
    tiny_model,
    transformers,
)

from flash_attn_dualkv import SharedPromptError, SharedPromptLayoutError, guard, kernels
from flash_attn_dualkv.integrations.transformers import forward
from flash_attn_dualkv.integrations.transformers.admission import table

BATCH = MIXED.pack()
LOST = "shared_prompt_layout: expected consumed by 2 layers that mix tokens, got "


def inputs(batch=BATCH, **more):
    return row_of(batch, attention_mask=None, **more)


# --- the guard --------------------------------------------------------------------------------------------------------


def test_a_layer_that_gets_no_layout_raises():
    model = tiny_model("llama")
    lose_a_layout(model)
    with pytest.raises(SharedPromptLayoutError, match=LOST + "1"):
        dualkv.shared_prompt_forward(model, BATCH)
    handle = dualkv.install_layout_hook(model)
    with pytest.raises(SharedPromptLayoutError, match=LOST + "1"):
        model(**inputs())
    handle.remove()
    # Nobody counts here, but the layer is given positions that it knows; of others nothing is seen.
    with pytest.raises(SharedPromptLayoutError, match="expected batch.layout beside the positions of its packed row"):
        model(**inputs())
    alone = dataclasses.replace(BATCH.layout, position_ids=None)
    model(**inputs(shared_prompt_layout=alone, position_ids=BATCH.position_ids[None].clone()))


def test_a_model_on_stock_attention_does_not_take_a_layout():
    """Unknown arguments are swallowed there: without an error there would be numbers, and wrong ones."""
    model = tiny_model("llama", attention="sdpa")
    with pytest.raises(SharedPromptError, match=r"model: expected a registered or wrapped attention.*'sdpa'"):
        dualkv.shared_prompt_forward(model, BATCH)
    with pytest.raises(SharedPromptLayoutError, match="a registered or wrapped attention in every layer"):
        model(**inputs())
    eager = tiny_model("llama", attention="eager")  # which lies in the model's own file
    dualkv.install_layout_hook(eager)
    with pytest.raises(SharedPromptLayoutError, match=LOST + "0"):
        eager(**inputs())


EQUALLY_LONG = [Samples.random([(3, lengths)]).pack() for lengths in ([5, 3, 1], [3, 5, 1])]


@pytest.mark.parametrize(
    ("given", "expected", "layers", "message"),
    [
        (MIXED.take([0, 1]).pack(), BATCH, 2, "the layout of the enclosing expect_shared_prompt"),
        (*EQUALLY_LONG, 2, "the layout of the enclosing expect_shared_prompt"),
        (BATCH, BATCH, 1, "consumed by 1 layers that mix tokens, got 2$"),
    ],
)
def test_another_forward_than_the_expected_one(given, expected, layers, message):
    with pytest.raises(SharedPromptLayoutError, match=message), dualkv.expect_shared_prompt(expected.layout, layers):
        tiny_model("llama")(**inputs(given))


def test_a_layer_that_runs_twice_counts_once():
    """Else a recomputation would stand in for a layer that never got the layout."""
    model = tiny_model("llama").train()
    model.gradient_checkpointing_enable(dict(use_reentrant=False))
    with dualkv.expect_shared_prompt(BATCH.layout, 2):
        # The backward belongs outside; on the CPU it recomputes in this very thread.
        model(**inputs()).logits.sum().backward()
    attention = model.model.layers[0].self_attn
    with pytest.raises(SharedPromptLayoutError, match=LOST + "1"), dualkv.expect_shared_prompt(BATCH.layout, 2):
        _ = [guard.consume(attention, BATCH.layout) for _ in range(2)]


@pytest.mark.parametrize("name", [one for one in ("gemma3n_text", "gemma4_text") if one in transformers.CONFIG_MAPPING])
@pytest.mark.parametrize("hooked", [False, True])
def test_reentrant_checkpoints_of_shared_keys(name, hooked):
    """They lose the gradients of the keys, in the stock model as well."""
    sizes = {**COMMON, **FAMILIES["gemma4_text"].options, "laurel_rank": 8, "activation_sparsity_pattern": [0.0] * 4}
    config = transformers.AutoConfig.for_model(name, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="dualkv").train()
    if hooked:
        dualkv.install_layout_hook(model)

    def score():
        return model(**inputs()) if hooked else dualkv.shared_prompt_forward(model, BATCH)

    model.gradient_checkpointing_enable(dict(use_reentrant=True))
    model.enable_input_require_grads()
    if hasattr(model.model.layers[-1].self_attn, "k_proj"):  # transformers 4: every layer makes its keys
        score()
        return
    with pytest.raises(SharedPromptError, match="use_reentrant: expected False for layers that attend to the keys of"):
        score()
    with torch.no_grad():
        score()
    model.eval()
    score()
    model.train().gradient_checkpointing_enable(dict(use_reentrant=False))
    score()
    owner = tiny_model("llama").train()
    owner.gradient_checkpointing_enable(dict(use_reentrant=True))
    dualkv.shared_prompt_forward(owner, BATCH)


class Interruption(BaseException):
    """As Ctrl-C: PyTorch does not run the hooks behind a forward that it ends."""


@pytest.mark.parametrize("through", ["model", "backbone"])
@pytest.mark.parametrize("make", [lambda: tiny_model("llama"), lambda: hybrid_model(KINDS[0], torch.float32)])
def test_a_forward_that_was_interrupted_leaves_nothing_behind(make, through):
    """Neither for the model nor for another one that has no hooks."""
    model = make()
    other = copy.deepcopy(model)
    plain = dict(input_ids=torch.arange(3, 9)[None], use_cache=False)
    expected = model(**plain).logits
    dualkv.install_layout_hook(model)
    last = model.model.layers[1]

    def interrupt(*_):
        raise Interruption

    handle = last.register_forward_pre_hook(interrupt)
    with pytest.raises(Interruption):
        (model if through == "model" else model.model)(**inputs())
    handle.remove()
    for one in (other, model):
        assert torch.equal(one(**plain).logits, expected)
    assert guard.current() is None
    model.generate(torch.arange(3, 9)[None], max_new_tokens=2, do_sample=False)
    model(**inputs())


def test_threads_wait_for_each_other():
    """Parts of the model are replaced while it scores; a plain forward of another thread must not notice."""
    model = tiny_model("llama")
    expected, _ = dualkv.shared_prompt_forward(model, BATCH)
    parameters = list(model.parameters())
    expected_gradients = torch.autograd.grad(expected.sum(), parameters)
    plain = model(**inputs()).logits
    dualkv.install_layout_hook(model)
    failures = []

    def work():
        try:
            for _ in range(5):
                logps, _ = dualkv.shared_prompt_forward(model, BATCH)
                assert torch.equal(logps, expected)
                assert all(map(torch.equal, torch.autograd.grad(logps.sum(), parameters), expected_gradients))
                assert torch.equal(model(**inputs()).logits, plain)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.parametrize("layers", [0, -1])
def test_layers_are_counted_from_one(layers):
    with pytest.raises(ValueError, match="num_layers: expected"), dualkv.expect_shared_prompt(BATCH.layout, layers):
        pass


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model_type", "options", "message"),
    [
        ("minimax", {}, "layer_types: .*linear_attention"),
        ("llama4_text", {}, "layer_types: .*chunked_attention"),
        ("jamba", {}, "layer_types: .*(mamba|linear_attention)"),
        ("mamba", {}, "linear_attention|a transformer with attention heads"),
        ("mamba2", {}, "linear_attention|a transformer with attention heads"),
        ("zamba", {}, "layer_types: .*(hybrid|mamba)"),
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
        model(**inputs())


class Retention(torch.nn.Linear):
    """Each token with the sum of those before it."""

    def forward(self, x):
        return super().forward(x.cumsum(1))


def add_convolution(model):
    mlp = model.model.layers[0].mlp
    mlp.extra = torch.nn.Conv1d(32, 32, 4, padding=3, dtype=torch.float64)
    mlp.register_forward_hook(lambda mlp, args, out: out + mlp.extra(args[0].mT)[..., : out.shape[1]].mT)


def add_mixer(model):
    model.model.layers[1].mlp.up_proj = Retention(32, 48, bias=False, dtype=torch.float64)


ROW = "hidden states of the model: expected the same in a packed row as in rows of their own"
# What tables of modules and of configurations had, and what says it now.
REPRODUCED = {
    "a convolution": (lambda: tiny_model("llama"), add_convolution, f"{ROW}.*layers.0.mlp "),
    "a class of mixers": (lambda: tiny_model("llama"), add_mixer, f"{ROW}.*up_proj .Retention"),
    "chunks without layer_types": (lambda: any_model("llama4_text"), None, "got one made of chunked_overlay"),
}


def test_mixers_of_a_configuration_without_layer_types_are_refused():
    """A probe would lose the layout on its way through them: an error, where trainers are to run stock attention."""
    config = tiny_model("llama").config
    config.ssm_state_size = 4
    with pytest.raises(SharedPromptError, match="model: expected attention as the only mixer.*has ssm_state_size"):
        dualkv.check_supported(config)


@pytest.mark.parametrize("name", REPRODUCED)
def test_what_the_probe_sees_without_a_table(name, monkeypatch):
    make, change, message = REPRODUCED[name]
    monkeypatch.setattr(forward.table, "check_supported", lambda config: None)
    model = make()
    if change is not None:
        change(model)
    with pytest.raises(SharedPromptError, match=message):
        dualkv.shared_prompt_forward(model, BATCH)


def test_a_temperature_of_rows_is_refused():
    """Llama 4's layers without RoPE scale queries by the index of their row; its other kinds of layers are known."""
    options = dict(
        hidden_size=32, intermediate_size=48, intermediate_size_mlp=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=97, num_local_experts=2, no_rope_layers=[0, 0], floor_scale=4,
        layer_types=["full_attention"] * 2, pad_token_id=0,
    )  # fmt: skip
    dualkv.check_supported(transformers.Llama4TextConfig(**options, attn_temperature_tuning=False))
    with pytest.raises(SharedPromptError, match="attn_temperature_tuning: expected False"):
        dualkv.check_supported(transformers.Llama4TextConfig(**options))


def test_masks_that_are_not_causal_are_refused():
    """The tokens of an image see each other: the mask says so, and a layout does not."""
    text = tiny_config("gemma3_text", layer_types=["full_attention"] * 2)
    vision = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28)
    config = transformers.Gemma3Config(text_config=text.to_dict(), vision_config=vision)
    model = transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation="dualkv").eval()
    images = torch.zeros_like(BATCH.input_ids)
    with dualkv.expect_shared_prompt(BATCH.layout, 2):
        model(**inputs())
    images[:3] = 1
    with pytest.raises(SharedPromptError, match="causal or sliding-window one with a layout"):
        model(**inputs(token_type_ids=images[None]))


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
    if "attention_dropout" in options:
        with pytest.raises(SharedPromptError, match="dropout of attention"):
            model(**inputs())
    dualkv.install_layout_hook(model)
    with pytest.raises(SharedPromptError, match=message):
        model(**inputs())
    dualkv.shared_prompt_forward(model.eval(), BATCH)


def test_only_causal_lms_are_scored():
    model = tiny_model("llama")
    for other in (model.model, torch.nn.Linear(2, 2)):
        with pytest.raises(SharedPromptError, match="model: expected"):
            dualkv.shared_prompt_forward(other, BATCH)


@pytest.mark.parametrize("mark", ["set_reshard_after_forward", "_fsdp_wrapped_module"])  # of FSDP 2 and 1
@pytest.mark.parametrize("whole", [True, False])
def test_a_sharded_head_is_refused(mark, whole):
    """Or a part of it, as adapters are."""
    model = tiny_model("llama")
    if not whole:
        model.lm_head.adapter = torch.nn.Linear(2, 2)
    setattr(model.lm_head if whole else model.lm_head.adapter, mark, lambda *args: None)
    with pytest.raises(SharedPromptError, match="an LM head in the root's FSDP unit"):
        dualkv.shared_prompt_forward(model, BATCH)


# --- calls ------------------------------------------------------------------------------------------------------------


def test_arguments_that_would_be_ignored_are_refused():
    model = tiny_model("llama")
    with pytest.raises(SharedPromptError, match="expected no arguments of attention .* got position_bias"):
        model(**inputs(position_bias=torch.zeros(1)))
    with pytest.raises(SharedPromptError, match="output_attentions: expected False"):
        model(**inputs(output_attentions=True))


def test_caches_and_masks_are_refused():
    model = tiny_model("llama")
    cache = model(torch.arange(3, 9)[None], use_cache=True).past_key_values
    with pytest.raises(SharedPromptError, match="no KV cache"):
        model(**row_of(BATCH, past_key_values=cache, use_cache=None))
    padding = torch.ones_like(BATCH.input_ids[None])
    padding[0, 0] = 0
    with pytest.raises(SharedPromptError, match="attention_mask: expected None"):
        model(**row_of(BATCH, attention_mask=padding))


def test_the_layout_is_that_of_the_row():
    model = tiny_model("llama")
    other = Samples([[5, 6]], [[7]]).pack()
    with pytest.raises(SharedPromptError, match="input_ids: expected 1 row of 3 tokens"):
        model(**inputs(shared_prompt_layout=other.layout))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(name="dualkv_flash"), 'name: expected a name without "flash"'),
        (dict(name="sdpa"), "name: expected a name of its own"),
        (dict(name=""), "name: expected"),
        (dict(fallback="flash_attention_2"), "fallback: expected 'auto' or 'sdpa' or 'eager'"),
        (dict(backend="gpu"), "backend: expected 'auto' or 'cuda' or 'cudnn' or 'reference'"),
    ],
)
def test_what_can_be_registered(options, message, restored_registry):
    with pytest.raises(SharedPromptError, match=message):
        dualkv.register(**options)


@pytest.mark.parametrize(
    ("settings", "lack"),
    [
        (dict(attn_logit_softcapping=50.0, sliding_window=8), None),
        (dict(attn_logit_softcapping=2000.0), "a softcap of 2000"),
        (dict(head_dim=512), None),
        (dict(global_head_dim=520), "a head dim of 520"),
        (dict(head_dim=20), "a head dim of 20"),
    ],
    ids=str,
)
def test_what_the_kernels_lack(settings: dict[str, Any], lack: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # what a GPU lacks is the next test's
    found = table.kernels_lack(tiny_config("llama", **settings))
    assert found is None if lack is None else found is not None and found.startswith(lack)


@pytest.mark.parametrize(
    ("major", "built", "family", "is_refused"),
    [
        (9, [64, 512], None, False),
        (9, [64, 512], "sm80", True),
        (9, [64, 256], None, True),
        (9, None, None, True),
        (10, [64, 512], None, True),
    ],
)
def test_heads_wider_than_256_need_kernels_for_hopper(
    major: int, built: list[int] | None, family: str | None, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = {**kernels.build_info(), "head_dims": {"sm80": [64, 256]} | ({} if built is None else {"sm90": built})}
    monkeypatch.setattr(kernels, "build_info", lambda: info)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    monkeypatch.delenv("DUALKV_KERNELS", raising=False)
    if family is not None:
        monkeypatch.setenv("DUALKV_KERNELS", family)
    found = table.kernels_lack(tiny_config("llama", global_head_dim=512))
    assert found == ("a head dim of 512" if is_refused else None)
