# SPDX-License-Identifier: BSD-3-Clause
"""Unread rows leave before the layers without keys of their own; nothing else changes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_models import (
    COMMON,
    FAMILIES,
    TOLERANCES,
    Outcome,
    Samples,
    check_equal,
    dualkv,
    replicated_logps,
    row_of,
    stock_twin,
    tiny_model,
    transformers,
)
from torch import Tensor, nn

from flash_attn_dualkv import PackedBatch, layout, pack_prefix_tree
from flash_attn_dualkv.integrations.transformers.admission.unwrap import decoder_of
from flash_attn_dualkv.integrations.transformers.query_pruning import late_layers

LAYERS, SHARED = 6, 4
TOLERANCE = TOLERANCES[torch.float64]
_MIXED = ["sliding_attention", "full_attention"] * 3
# As Gemma 4 E2B: windows, per-layer inputs, wider MLPs and other head dims of full attention.
_SIZES = dict(
    COMMON, num_hidden_layers=LAYERS, num_kv_shared_layers=SHARED, layer_types=_MIXED, head_dim=16, sliding_window=5,
    hidden_size_per_layer_input=8, vocab_size_per_layer_input=97,
)  # fmt: skip
SIZES = {
    "gemma4_text": dict(_SIZES, global_head_dim=32, use_double_wide_mlp=True, final_logit_softcapping=0.5),
    "gemma4_unified_text": dict(_SIZES, use_double_wide_mlp=True),
    # A quarter of the first layer's MLP is active.
    "gemma3n_text": dict(_SIZES, laurel_rank=8, activation_sparsity_pattern=[0.75, *[0.0] * (LAYERS - 1)]),
}
# Two long prompts, one that is too short to leave; an answer without tokens, and rows of padding.
SAMPLES = Samples.random([(90, [5, 9, 0]), (130, [70, 3]), (2, [8])]).take([0, 3, 1, 5, 2, 4])
PACKINGS = (dict(boundary="gather"), dict(pad_to_multiple_of=256))


def model_of(name: str, **options: Any) -> Any:
    """In float64, of random parameters, in eval mode; a skip where its late layers have projections of keys."""
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip("not in this version")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        config = transformers.AutoConfig.for_model(name, **{**SIZES[name], **options})
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="dualkv")
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.15)
    if not late_layers(decoder_of(model)):
        pytest.skip("the layers own keys in this version")
    return model.double().eval()


@contextmanager
def counted(model: Any) -> Iterator[list[int]]:
    """Rows that the MLP of each layer computes, without a hook."""
    rows: list[int] = []

    def counting(forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def count(hidden: Tensor) -> Tensor:
            rows.append(hidden.shape[-2])
            return forward(hidden)

        return count

    layers = [one.mlp for one in decoder_of(model).layers]
    for one in layers:
        one.forward = counting(one.forward)
    try:
        yield rows
    finally:
        for one in layers:
            del one.forward


def computed(model: Any, batch: PackedBatch, **options: Any) -> Outcome:
    options = dict(temperature=0.7, with_entropy=True, self_check=False) | options
    return Outcome.of(model, *dualkv.shared_prompt_forward(model, batch, **options))


def rows_of_layers(model: Any, batch: PackedBatch, **options: Any) -> list[int]:
    with torch.no_grad(), counted(model) as rows:
        dualkv.shared_prompt_forward(model, batch, self_check=False, **options)
    return rows


def check_leaves(model: Any, batch: PackedBatch) -> None:
    """Rows leave, where they may, and all results are those of all rows."""
    tokens, queries = batch.layout.num_tokens, batch.late_layout.num_queries
    assert queries < tokens
    layers, late = (len(one) for one in (decoder_of(model).layers, late_layers(decoder_of(model))))
    assert rows_of_layers(model, batch) == [tokens] * (layers - late) + [queries] * late
    assert rows_of_layers(model, batch, drop_unread=False) == [tokens] * layers
    computed(model, batch).check(computed(model, batch, drop_unread=False), TOLERANCE)


@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in SIZES), *(("gemma4_text", options) for options in PACKINGS)],
    ids=str,
)
def test_prompts_leave(name: str, options: dict[str, Any]) -> None:
    check_leaves(model_of(name), SAMPLES.pack(**options))


@pytest.mark.parametrize("name", SIZES)
def test_a_single_row_leaves_and_comes_between(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees, whose masks have several spans in a node: every row that scores nothing leaves."""
    monkeypatch.setattr(layout, "MIN_LEAVING", 1)
    model = model_of(name)
    stem, *turns = Samples.random([(length, [0]) for length in (30, 25, 11, 20, 16)]).prompts
    sequences = [stem + turns[0] + turns[1], stem + turns[0] + turns[2], stem + turns[3], turns[3]]
    masks = [[int(at % 9 > 5) for at in range(len(one))] for one in sequences]
    for boundary in ("gather", "replicate"):
        batch = pack_prefix_tree(sequences, loss_mask=masks, min_shared=1, boundary=boundary, pad_to_multiple_of=16)
        assert batch.layout.depth == 3
        assert torch.equal(batch.late_layout.query_rows, batch.token_index.unique())
        assert (batch.late_layout.nodes[:, 4] == 0).any()  # further runs of queries of a node
        check_leaves(model, batch)


@pytest.mark.parametrize("name", SIZES)
def test_equals_replicated_prompts(name: str) -> None:
    model = model_of(name)
    twin = stock_twin(model, FAMILIES[name].stock if name in FAMILIES else "sdpa")
    expected = Outcome.of(twin, *replicated_logps(twin, SAMPLES, temperature=0.7))
    computed(model, SAMPLES.pack()).check(expected, TOLERANCE)


def test_activation_checkpointing() -> None:
    """Layers are computed again in the backward, where nothing of the forward is left."""
    model, batch = model_of("gemma4_text"), SAMPLES.pack()
    expected = computed(model, batch, drop_unread=False)
    model.gradient_checkpointing_enable(dict(use_reentrant=False))
    model.train()
    with counted(model) as rows:
        computed(model, batch).check(expected, TOLERANCE)
    queries, tokens = batch.late_layout.num_queries, batch.layout.num_tokens
    late = len(late_layers(decoder_of(model)))
    early = [tokens] * (len(decoder_of(model).layers) - late)
    assert rows[-2 * (len(early) + late) :] == [*early, *[queries] * 2 * late, *early]


def test_a_forward_of_ones_own() -> None:
    """With the hook, which prepares the layers; rows that have left are filled with something finite."""
    model, batch = model_of("gemma4_text"), SAMPLES.pack()
    dualkv.install_layout_hook(model, self_check=False)
    late = replace(batch.layout, late=batch.late_layout)
    with torch.no_grad(), counted(model) as rows:
        got, expected = (model(**row_of(batch, shared_prompt_layout=one)).logits[0] for one in (late, batch.layout))
    count = len(late_layers(decoder_of(model)))
    early = [late.num_tokens] * (len(decoder_of(model).layers) - count)
    assert rows == [*early, *[late.late.num_queries] * count, *early, *[late.num_tokens] * count]
    check_equal(got[batch.token_index], expected[batch.token_index], 1e-7)
    assert got.isfinite().all()


def test_logits_of_some_rows() -> None:
    """Those that are read are these, whatever the batch scores."""
    model, batch = model_of("gemma4_text"), SAMPLES.pack()
    rows = batch.last_rows[[3, 0, 3]]
    late, tokens = batch.layout.reading(rows), batch.layout.num_tokens
    with torch.no_grad(), counted(model) as seen:
        got, expected = (
            dualkv.shared_prompt_logits(
                model, batch, rows, lambda logits, _: (logits,), self_check=False, drop_unread=drops
            )[0]
            for drops in (True, False)
        )
    count = len(seen) // 2
    assert set(seen[:count]) == {tokens, late.num_queries} and set(seen[count:]) == {tokens}
    assert late.num_queries < batch.late_layout.num_queries
    check_equal(got, expected, 1e-7)


# --- who else reads rows ----------------------------------------------------------------------------------------------


def _watch(module: nn.Module) -> Any:
    return module.register_forward_hook(lambda *_: None)


WATCHERS: dict[str, Callable[[Any], Any]] = {
    "hook on a late layer": lambda model: _watch(model.model.layers[-1]),
    "hook inside of one": lambda model: _watch(model.model.layers[-2].mlp.act_fn),
    "hook of a backward": lambda model: model.model.layers[-1].register_full_backward_hook(lambda *_: None),
    "hook before one": lambda model: model.model.layers[-2].register_full_backward_pre_hook(lambda *_: None),
    "hook on the last norm": lambda model: model.model.norm.register_forward_pre_hook(functools.partial(_nothing, 1)),
    "hook on the backbone": lambda model: _watch(model.model),
    "hidden states": lambda model: setattr(model.config, "output_hidden_states", True),
    "routers": lambda model: setattr(model.config, "enable_moe_block", True),
}


def _nothing(_number: int, *_: Any) -> None: ...


@pytest.mark.parametrize("name", WATCHERS)
def test_all_rows_stay_where_something_reads_them(name: str) -> None:
    model, batch = model_of("gemma4_text"), SAMPLES.pack()
    WATCHERS[name](model)
    assert rows_of_layers(model, batch) == [batch.layout.num_tokens] * LAYERS


def test_a_hook_that_reads_no_late_rows() -> None:
    model, batch = model_of("gemma4_text"), SAMPLES.pack()
    seen: list[int] = []
    model.model.layers[0].register_forward_hook(lambda _module, _args, output: seen.append(output.shape[-2]))
    assert set(rows_of_layers(model, batch)[-SHARED:]) == {batch.late_layout.num_queries}
    assert seen[-1] == batch.layout.num_tokens


def test_models_without_late_layers() -> None:
    """Nothing is asked of the batch."""
    models = [tiny_model("llama")]
    if "gemma4_text" in transformers.CONFIG_MAPPING:
        models.append(tiny_model("gemma4_text", num_kv_shared_layers=0))
    for model in models:
        assert late_layers(decoder_of(model)) == []
        batch = SAMPLES.pack()
        dualkv.shared_prompt_forward(model, batch)
        assert "late_layout" not in vars(batch)


class _Twice:
    """Runs the forward of transformers two times, as looped models do."""

    def forward(self, *args: Any, position_ids: Tensor | None = None, **kwargs: Any) -> Any:
        kwargs["position_ids"] = position_ids
        found = super().forward(*args, **kwargs)  # type: ignore[misc]
        return super().forward(**{**kwargs, "input_ids": None, "inputs_embeds": found[0]})  # type: ignore[misc]


def test_code_of_ones_own_under_the_name_of_a_known_model() -> None:
    model, batch = model_of("gemma4_text", hidden_size_per_layer_input=0), SAMPLES.pack()
    model.model.__class__ = type("Twice", (_Twice, type(model.model)), {})
    computed(model, batch).check(computed(model, batch, drop_unread=False), TOLERANCE)
