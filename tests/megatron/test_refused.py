# SPDX-License-Identifier: BSD-3-Clause
"""What is not exact on packed rows of Megatron's models raises an error that names it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: see docs/megatron.md")

import megatron.core
import tiny_megatron as tiny
import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron_cpu import megatron_on_the_cpu
from tiny_megatron import megatron as shared
from tiny_megatron import tiny_chunk, tiny_config

from flash_attn_dualkv import SharedPromptError, SharedPromptLayoutError, SharedPromptUnsupportedError
from flash_attn_dualkv.layout import SharedPromptLayout
from flash_attn_dualkv.parallel.context import ContextLayout

KIND = "gqa, q/k norm"


@pytest.fixture(autouse=True, scope="module")
def _cpu() -> Iterator[None]:
    with megatron_on_the_cpu():
        yield


def chunk(kind: str = KIND, **settings: Any) -> Any:
    """A model whose configuration says these things, whatever it was built with."""
    model = tiny_chunk(kind, tiny_config(kind))
    for name, value in settings.items():
        assert hasattr(model.config, name)
        setattr(model.config, name, value)
    return model


SETTINGS: list[tuple[str, Any]] = [
    ("hybrid_context_parallel", True), ("qk_clip", True), ("log_max_attention_logit", True),
    ("fp8_dot_product_attention", True), ("fp8_multi_head_attention", True), ("mtp_num_layers", 1),
    ("cuda_graph_impl", "local"), ("enable_cuda_graph", True),
    ("experimental_attention_variant", "dsa"), ("defer_embedding_wgrad_compute", True),
    ("moe_expert_capacity_factor", 1.0), ("moe_router_force_load_balancing", True), ("window_size", (4, 4)),
    ("moe_input_jitter_eps", 0.1), ("moe_router_force_biased", 1.0), ("moe_expert_rank_capacity_factor", 1.0),
    ("external_cuda_graph", True), ("moe_router_load_balancing_type", "quantile_balancing"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), SETTINGS)
def test_settings(name: str, value: Any) -> None:
    model = chunk("experts", **{name: value})
    with pytest.raises(SharedPromptError, match=name):
        shared.install(model)
    # As a whole or not at all.
    assert type(model.decoder.layers[0].self_attention.core_attention) is DotProductAttention


TRAINING: list[tuple[str, dict[str, Any]]] = [
    (KIND, dict(attention_dropout=0.1)),
    (KIND, dict(hidden_dropout=0.1)),
    ("experts", dict(moe_aux_loss_coeff=0.01, moe_router_load_balancing_type="aux_loss")),
    ("experts", dict(moe_aux_loss_coeff=[0.01, 0.0], moe_router_load_balancing_type=["seq_aux_loss", "aux_loss"])),
    ("experts", dict(moe_z_loss_coeff=1e-3)),
    ("experts", dict(moe_router_load_balancing_type="sinkhorn")),
    ("experts, sigmoid, shared", dict(moe_router_bias_update_rate=1e-3)),
]


@pytest.mark.parametrize(("kind", "settings"), TRAINING)
def test_settings_of_training(kind: str, settings: dict[str, Any]) -> None:
    model = chunk(kind, **settings)
    shared.install(model)
    _, batch = tiny.tree()
    with pytest.raises(SharedPromptError, match=next(iter(settings))):
        shared.shared_prompt_forward(model, batch)
    if "sinkhorn" not in settings.values():  # it routes otherwise in eval mode
        logps, _ = shared.shared_prompt_forward(model.eval(), batch)
        assert logps.isfinite().all()


def test_a_module_of_dropout() -> None:
    model = chunk()
    model.decoder.layers[1].mlp.extra = torch.nn.Dropout(0.1)
    shared.install(model)
    with pytest.raises(SharedPromptError, match="dropout of decoder.layers.1.mlp.extra"):
        shared.shared_prompt_forward(model, tiny.tree()[1])


def test_an_older_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron.core, "__version__", "0.17.1")
    expected = "megatron-core: expected 0.18.2 or 0.19.2, .* got 0.17.1: its GPTModel takes no output_processor"
    with pytest.raises(SharedPromptUnsupportedError, match=expected):
        importlib.reload(shared)


class _OtherAttention(DotProductAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


class _OtherSelfAttention(SelfAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


LINEAR = torch.nn.Linear(2, 2)
OTHERS: dict[str, tuple[str, str, Any]] = {  # by what the message names: the module, its attribute and another value
    "layers.1.self_attention.core_attention.*_OtherAttention": (
        "decoder.layers.1.self_attention.core_attention", "__class__", _OtherAttention,
    ),
    "layers.0.self_attention.*Linear": ("decoder.layers.0", "self_attention", LINEAR),
    "layers.0.self_attention.*_OtherSelfAttention": (
        "decoder.layers.0.self_attention", "__class__", _OtherSelfAttention,
    ),
    "layers.0.cross_attention": ("decoder.layers.0", "cross_attention", LINEAR),
    "decoder.layers.2.*TransformerLayer.*Linear": ("decoder.layers", "2", LINEAR),
    "rotary_pos_emb.*OtherRotary": ("", "rotary_pos_emb", type("OtherRotary", (torch.nn.Module,), {})()),
}  # fmt: skip


def test_an_unknown_mixer() -> None:
    model = chunk("nemotron")
    model.decoder.layers[4].mixer = LINEAR
    with pytest.raises(SharedPromptUnsupportedError, match="decoder.layers.4.mixer: expected MambaMixer .*Linear"):
        shared.install(model)


@pytest.mark.parametrize("message", OTHERS)
def test_unknown_layers(message: str) -> None:
    place, name, other = OTHERS[message]
    model = chunk()
    setattr(model.get_submodule(place), name, other)
    with pytest.raises(SharedPromptUnsupportedError, match=message):
        shared.install(model)


def test_a_model_without_layers() -> None:
    with pytest.raises(SharedPromptUnsupportedError, match="one GPTModel or HybridModel in each chunk.*got 0: Linear"):
        shared.install(torch.nn.Linear(2, 2))


class _LikeTransformerEngine(torch.nn.Module):
    """Copies the fields of packed_seq_params that it knows, as Transformer Engine's attention does."""

    def forward(self, query: Any, *args: Any, packed_seq_params: PackedSeqParams, **kwargs: Any) -> Any:
        known = {name: getattr(packed_seq_params, name) for name in PackedSeqParams.__dataclass_fields__}
        return query + known["max_seqlen_q"]


def test_a_layer_that_is_not_installed() -> None:
    _, batch = tiny.tree()
    model = chunk()
    with pytest.raises(SharedPromptError, match="install"):
        shared.shared_prompt_forward(model, batch)
    params = shared.SharedPackedSeqParams(batch)
    for name in ("max_seqlen_q", "max_seqlen_kv"):
        with pytest.raises(SharedPromptLayoutError, match="install"):
            getattr(params, name)
    row = batch.input_ids[None], batch.position_ids[None], None
    with pytest.raises(SharedPromptLayoutError, match="install"):  # by its RoPE
        model(*row, packed_seq_params=params)
    shared.install(model)
    stock = model.decoder.layers[1].self_attention.core_attention
    model.decoder.layers[1].self_attention.core_attention = _LikeTransformerEngine()
    with pytest.raises(SharedPromptLayoutError, match="install"):
        model(*row, packed_seq_params=params)
    # One that reads nothing is missing among the layers.
    model.decoder.layers[1].self_attention.core_attention = _Silent()
    with pytest.raises(SharedPromptLayoutError, match="consumed by 2 layers that mix tokens, got 1"):
        model(*row, packed_seq_params=params)
    model.decoder.layers[1].self_attention.core_attention = stock
    assert shared.shared_prompt_forward(model, batch)[0].isfinite().all()
    own = tiny_chunk(KIND, tiny_config(KIND))
    own.decoder.layers[0].self_attention.core_attention.__class__ = shared.SharedPromptAttention
    own.position_embedding_type = "none"
    with pytest.raises(SharedPromptLayoutError, match="install"):
        own(*row, packed_seq_params=params)


class _Silent(torch.nn.Module):
    def forward(self, query: Any, *args: Any, **kwargs: Any) -> Any:
        return query


@pytest.mark.parametrize("kind", [KIND, "mamba, delta nets, rotary, tied"])
def test_what_a_packed_call_passes(kind: str) -> None:
    _, batch = tiny.tree()
    model = chunk(kind)
    shared.install(model)
    params, ids = shared.SharedPackedSeqParams(batch), batch.input_ids[None]
    rows = batch.layout.num_tokens
    mask = torch.ones(1, 1, rows, rows, dtype=torch.bool).triu(1)
    with pytest.raises(SharedPromptError, match="attention_mask"):
        model(ids, None, mask, packed_seq_params=params)
    other = tiny.Sequences([ids[0].tolist()], [[0] + [1] * (rows - 1)]).pack()
    for wrong in (ids[:, 1:], other.input_ids[None]):
        with pytest.raises(SharedPromptLayoutError, match="input_ids"):
            model(wrong, None, None, packed_seq_params=params)
    with pytest.raises(SharedPromptLayoutError, match="shared_prompt_layout"):  # the layout got lost
        model(ids, batch.position_ids[None], None)
    model.config.sequence_parallel, model.config.tensor_model_parallel_size = True, rows - 1
    with pytest.raises(SharedPromptLayoutError, match=f"pad_to_multiple_of={rows - 1}"):
        model(ids, None, None, packed_seq_params=params)
    attention = model.decoder.layers[int(kind != KIND)].self_attention
    with pytest.raises(SharedPromptError, match="in place of all masks, got attention_bias"):
        attention.core_attention(*torch.ones(3, rows, 2, 8), None, attention_bias=mask, packed_seq_params=params)
    attention.attn_mask_type, attention.config.sequence_parallel = AttnMaskType.padding, False
    with pytest.raises(SharedPromptError, match="attn_mask_type"):
        model(ids, None, None, packed_seq_params=params)


@pytest.mark.parametrize("kind", ["mrope", "multi-head, biases, gpt 2"])
def test_positions_that_a_model_reads(kind: str) -> None:
    _, batch = tiny.tree()
    model = chunk(kind)
    shared.install(model)
    params, rows = shared.SharedPackedSeqParams(batch), batch.layout.num_tokens
    own = batch.position_ids.expand(3, 1, -1) if kind == "mrope" else batch.position_ids[None]
    for wrong in (None, own.clone(), torch.arange(rows).expand_as(own), batch.position_ids):
        with pytest.raises(SharedPromptLayoutError, match="position_ids"):
            model(batch.input_ids[None], wrong, None, packed_seq_params=params)
    assert model(batch.input_ids[None], own, None, packed_seq_params=params).isfinite().all()


class _TwoRanks:
    def size(self) -> int:
        return 2


def test_an_output_layer_with_state() -> None:
    """It runs for some rows at a time, and again in the backward; its buffer is as it was."""
    _, batch = tiny.tree()
    model = chunk()
    shared.install(model)
    layer = model.output_layer
    layer.register_buffer("calls", torch.zeros(()))
    layer.register_forward_pre_hook(lambda module, _: setattr(module, "calls", module.calls + 1))
    with pytest.raises(SharedPromptError, match="without state .* buffer 'calls'"):
        shared.shared_prompt_forward(model, batch)
    assert layer.calls == 0


def test_context_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    _, batch = tiny.tree()
    group = parallel_state.get_context_parallel_group()
    with pytest.raises(SharedPromptUnsupportedError, match="position_embedding_type.*mrope"):
        shared.install(chunk("mrope", context_parallel_size=2))
    odd = ContextLayout.of(batch.layout, group, pad_to_multiple_of=59)
    with pytest.raises(SharedPromptLayoutError, match="even number of rows"):
        shared.SharedPackedSeqParams(batch, odd)
    with pytest.raises(SharedPromptError, match="layout"):
        shared.SharedPackedSeqParams(batch, batch.layout)
    with pytest.raises(SharedPromptLayoutError, match="another batch"):
        shared.SharedPackedSeqParams(tiny.prompts_and_responses()[1], shared.divided_layout(batch, group))

    model = chunk()
    shared.install(model)
    expected, _ = shared.shared_prompt_forward(model, batch)
    layout = shared.divided_layout(batch, group, 4)
    assert layout.num_local_tokens % 4 == 0
    params, ids = shared.SharedPackedSeqParams(batch, layout), layout.shard(batch.input_ids)[None]
    logits = model(ids, params.position_ids[None], None, packed_seq_params=params)
    logps, _ = shared.score_logits(logits, batch, layout=layout)
    tiny.check_close(logps, expected, 1e-6)
    with pytest.raises(SharedPromptError, match="logits"):
        shared.score_logits(logits[:, 1:], batch, layout=layout)
    other = shared.divided_layout(batch, torch.distributed.group.WORLD)
    with pytest.raises(SharedPromptLayoutError, match="of another group"):
        model(ids, None, None, packed_seq_params=shared.SharedPackedSeqParams(batch, other))
    monkeypatch.setattr(model.pg_collection, "cp", _TwoRanks())
    with pytest.raises(SharedPromptLayoutError, match="2 ranks of Megatron's context-parallel group.*a whole row"):
        model(batch.input_ids[None], None, None, packed_seq_params=shared.SharedPackedSeqParams(batch))

    own = tiny_chunk("no positions", tiny_config("no positions", context_parallel_size=2))
    shared.install(own)
    with pytest.raises(SharedPromptLayoutError, match="packed_seq_params.*with context parallelism"):
        own(torch.tensor([[1, 2]]), torch.arange(2)[None], None)


def test_arguments() -> None:
    _, batch = tiny.tree()
    model = chunk()
    shared.install(model)
    for options in (dict(temperature=0.0), dict(with_entropy=1)):
        with pytest.raises(SharedPromptError, match=next(iter(options))):
            shared.shared_prompt_forward(model, batch, **options)
    with pytest.raises(SharedPromptError, match="batch"):
        shared.shared_prompt_forward(model, batch.layout)
    with pytest.raises(SharedPromptError, match="backend"):
        shared.install(model, backend="fast")
    with pytest.raises(SharedPromptError, match="batch"):
        shared.SharedPackedSeqParams(batch.input_ids)
    plain = SharedPromptLayout.from_tree(batch.layout.node_lens, batch.layout.node_parents, pad=batch.layout.pad)
    with pytest.raises(SharedPromptLayoutError, match="positions"):
        shared.SharedPackedSeqParams(plain)
    with pytest.raises(SharedPromptError, match="logits"):
        shared.score_logits(torch.zeros(batch.layout.num_tokens, 4), batch)
    with pytest.raises(SharedPromptLayoutError, match="scored token ids below 4, "):
        shared.score_logits(torch.zeros(1, batch.layout.num_tokens, 4), batch)
    with pytest.raises(SharedPromptError, match=f"output layer: expected one value a row, got {tiny.VOCABULARY}"):
        shared.shared_prompt_values(model, batch)
    for name in ("labels", "loss_mask"):
        for function in (shared.shared_prompt_forward, shared.shared_prompt_values):
            with pytest.raises(SharedPromptError, match=f"{name}: expected None .*the batch says"):
                function(model, batch, **{name: batch.input_ids[None]})
    last = tiny_chunk(KIND, tiny_config(KIND), pre_process=False)
    shared.install(last)
    for one in (model, last):  # stages that went on would wait for the one that raised
        one.vocab_size = 3
        with pytest.raises(SharedPromptError, match="token ids below 3"):
            shared.shared_prompt_forward(one, batch)
    assert "rows of" in repr(shared.SharedPackedSeqParams(batch))
