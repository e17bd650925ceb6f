# SPDX-License-Identifier: BSD-3-Clause
"""Texts on multimodal checkpoints in real verl 0.9: the plug-in beside verl's own engines."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed: see docs/trainers.md")

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import nn
from verl.workers.engine.fsdp import transformer_impl
from verl_inputs import Batch, Case, Found, Model
from verl_runs import ACTOR, PICTURE_TOKEN, UNEQUAL, Pair, both, case, each, ours, run, run_beside

from flash_attn_dualkv.errors import SharedPromptError
from flash_attn_dualkv.integrations.common.options import Options
from flash_attn_dualkv.integrations.verl import engine as plugin
from flash_attn_dualkv.integrations.verl import patches

ROPE = {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e4}
INTERLEAVED = ROPE | {"mrope_interleaved": True, "partial_rotary_factor": 1.0}
SMALL = dict(hidden_size=16, intermediate_size=16)
# Patches of 4 x 4 pixels of two frames in three colours, four of them a token.
QWEN_TOWER = dict(SMALL, depth=1, num_heads=2, patch_size=4, out_hidden_size=64, spatial_merge_size=2)
OTHER_TOWER = dict(SMALL, num_hidden_layers=1, num_attention_heads=2, image_size=16, patch_size=8)
GEMMA4_TOWER = dict(OTHER_TOWER, num_key_value_heads=2, head_dim=8, position_embedding_size=16)
NAMES = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
IDS = {name: PICTURE_TOKEN + number for number, name in enumerate(NAMES)}
KINDS = ["sliding_attention", "full_attention"]
WINDOWS = dict(sliding_window=16, query_pre_attn_scalar=16)
LINEAR = dict(
    linear_num_value_heads=4,
    linear_num_key_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    layer_types=["linear_attention", "full_attention"],
)


def model(family: str, text: dict[str, Any], layers: int = 2, **others: Any) -> Model:
    others["text_config"] = dict(text, vocab_size=PICTURE_TOKEN + len(NAMES))
    return Model(family, layers=layers, others=json.dumps(others))


QWEN3_VL = model(
    "qwen3_vl",
    dict(rope_parameters=INTERLEAVED),
    vision_config=dict(QWEN_TOWER, num_position_embeddings=16, deepstack_visual_indexes=[0]),
    **IDS,
)
QWEN3_5 = model(
    "qwen3_5",
    dict(rope_parameters=INTERLEAVED, **LINEAR),
    vision_config=dict(QWEN_TOWER, num_position_embeddings=16),
    **IDS,
)
GEMMA4 = model(
    "gemma4",
    dict(
        WINDOWS, global_head_dim=32, layer_types=KINDS * 2, vocab_size_per_layer_input=516,
        hidden_size_per_layer_input=8, num_kv_shared_layers=2,
    ),
    4,
    vision_config=GEMMA4_TOWER,
    image_token_id=512,
    video_token_id=513,
    audio_token_id=514,
)  # fmt: skip
GEMMA3 = model("gemma3", dict(WINDOWS, layer_types=KINDS), vision_config=OTHER_TOWER, mm_tokens_per_image=4)
PADDED = "actor_rollout_ref.model.use_remove_padding=False"
ROUNDED = (f"{ACTOR}.pad_to_length=True", f"{ACTOR}.fsdp_config.pad_to_length_bucket=64")
MIXED = Batch(prompts=4, responses=4, shuffled=True)  # pictures in two of the prompts


def text(name: str, model: Model, *overrides: str, **settings: Any) -> Case:
    rows = 4 if model.family.startswith("qwen3") else 1
    if "tokens" not in settings:
        settings.setdefault("micro", 4)
    return case(name, *overrides, model=model, attention="sdpa", **{"position_rows": rows, **settings})


# Padded in verl: packed rows mix neighbours.
EQUAL = [
    text("Qwen3-VL, dynamic, several prompts", QWEN3_VL, tokens=150, batch=UNEQUAL),
    text("Qwen3-VL, rounded up", QWEN3_VL, *ROUNDED),
    text("Qwen3.5", QWEN3_5, PADDED),
]
# Prompts that leave before the layers without keys. Logits are large: steps of a usual size make differences of what
# Adam divides by nearly nothing.
UNREAD = text("Gemma 4, long prompts", GEMMA4, learning_rate=1e-4, batch=Batch(prompt_tokens=160, shortest=0.7))
STRETCHED = text("positions that differ", QWEN3_VL, extra="stretched")
ALONE = text("nothing to share in Qwen3.5", QWEN3_5, batch=Batch(prompts=8, responses=1))
PICTURES = [
    text("pictures, dynamic", QWEN3_VL, extra="pictures", tokens=150, batch=MIXED),
    # Texts are among their samples.
    text("pictures, v0, fsdp1", QWEN3_VL, extra="pictures", trainer="v0", engine="fsdp", micro=16, batch=MIXED),
    text("pictures, Qwen3.5", QWEN3_5, PADDED, extra="pictures", micro=16, batch=MIXED),
]
LATE = text("pictures in responses", QWEN3_VL, extra="late", tokens=150, batch=MIXED)
STOCK = [*EQUAL, UNREAD, STRETCHED, ALONE, *PICTURES, LATE]


@pytest.fixture(scope="module")
def one_rank() -> dict[str, Found]:
    packed = [replace(one, overrides=tuple(other for other in one.overrides if other != PADDED)) for one in STOCK]
    return run_beside(STOCK, [*map(ours, packed)])


@each([*EQUAL, UNREAD])
def test_texts_are_shared(one_rank: dict[str, Found], one: Case) -> None:
    pair = both(one_rank, one)
    pair.check_shared()
    assert all((metrics["unread_tokens"] > 0) == (one is UNREAD) for metrics in pair.metrics)


def test_positions_that_differ(one_rank: dict[str, Found]) -> None:
    """The micro-batch with rows of its own is verl's, the other one is shared."""
    pair = both(one_rank, STRETCHED)
    pair.check_shared(fallbacks=1)
    assert all((one["micro_batches"], one["fallback/positions"]) == (2, 1) for one in pair.metrics)


def test_the_path_of_verl_stays_what_it_was(one_rank: dict[str, Found]) -> None:
    """Packed rows in layers that the plug-in has changed: convolutions see no neighbour."""
    pair = both(one_rank, ALONE)
    pair.check_equal()
    assert all(metrics["fallback/ratio"] == metrics["micro_batches"] == 2 for metrics in pair.metrics)


@each(PICTURES)
def test_pictures_are_shared(one_rank: dict[str, Found], one: Case) -> None:
    """With texts in their micro-batch and without."""
    both(one_rank, one).check_shared()


def test_pictures_in_responses_are_left_to_verl(one_rank: dict[str, Found]) -> None:
    """In micro-batches of their own, so that texts are shared."""
    pair = both(one_rank, LATE)
    pair.check_equal()
    for metrics in pair.metrics:
        left, every = (metrics[f"{name}micro_batches"] for name in ("fallback_", ""))
        assert 0 < left < every and metrics["fallback/multimodal"] == left and metrics["dedup_ratio"] > 1.1


ULYSSES = dict(sp=2, batch=UNEQUAL, attention="flash_attention_2", position_rows=4)
TWO_RANKS = [
    (replace(PICTURES[0], balance="none"), PICTURES[0]),
    (case("Ulysses", model=QWEN3_VL, **ULYSSES), EQUAL[0]),
    (case("Ulysses, pictures", model=QWEN3_VL, extra="pictures", **{**ULYSSES, "batch": MIXED}), PICTURES[0]),
]


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, Found]:
    return run([replace(one, shares=True) for one, _ in TWO_RANKS], 2)


@pytest.mark.parametrize(("one", "alone"), TWO_RANKS, ids=lambda one: one.name)
def test_two_ranks(one_rank: dict[str, Found], two_ranks: dict[str, Found], one: Case, alone: Case) -> None:
    """What verl computes on one rank, with pictures of each group on one of them."""
    pair = Pair(one_rank[alone.name], two_ranks[one.name])
    pair.check_values()
    norms, expected = ([metrics["grad_norm"] for metrics in found.metrics] for found in (pair.ours, pair.stock))
    assert norms == pytest.approx(expected, rel=3e-5)
    for metrics in pair.metrics:
        assert metrics["dedup_ratio"] > 1.1 and metrics["fallback_micro_batches"] == 0


# --- parts of it, in this process -------------------------------------------------------------------------------------


def of_verl(answer: str) -> Any:
    def forward(self: nn.Module, **kwargs: Any) -> str:
        return answer

    forward.__module__ = "verl.models"
    return forward


def test_a_layer_chooses_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers' with a layout, otherwise what verl has put there last."""

    class Layer(nn.Module):
        def forward(self, **kwargs: Any) -> str:
            return "transformers"

    class Other(Layer): ...

    answers = iter(["one", "two", "three"])

    def patch(model: nn.Module, **options: Any) -> None:
        Layer.forward = of_verl(next(answers))  # type: ignore[method-assign]

    monkeypatch.setattr(transformer_impl, "apply_monkey_patch", patch)
    patches.install()
    patches.install()
    layer = Layer()
    for expected in ("one", "two", "three"):
        # The third time for another model, whose patches come to this class as well.
        model = nn.Sequential(nn.Linear(1, 1), *([layer] if expected != "three" else []))
        transformer_impl.apply_monkey_patch(model=model, use_remove_padding=True)
        assert layer() == layer(shared_prompt_layout=None) == expected
        assert layer(shared_prompt_layout="one") == "transformers"
        assert not patches.is_replaced(layer)
    assert Other()(shared_prompt_layout="one") == "transformers"  # as FSDP 2 makes classes


@pytest.mark.parametrize("model", [QWEN3_VL, GEMMA3], ids=lambda one: one.family)
def test_only_the_decoder_gets_a_layout(model: Model) -> None:
    whole: Any = built(model)
    engine: Any = SimpleNamespace(ulysses_sequence_parallel_size=1, has_lm_head=True)
    assert plugin._SharedPrompts._attach(engine, whole) is None
    assert engine.decoder is whole.model.language_model
    hooked = [name for name, one in whole.named_modules() if one._forward_pre_hooks]
    assert hooked == ["model.language_model"]


def test_layers_that_verl_alone_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made before the process loaded the plug-in: what transformers had there is gone."""
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextAttention

    model = built(QWEN3_VL)
    monkeypatch.setattr(Qwen3VLTextAttention, "forward", of_verl(""))
    with pytest.raises(SharedPromptError, match=r"layers.0.self_attn: expected .* before .* got that of verl.models"):
        patches.decoder_of(model)


def with_picture(name: str = "pixel_values") -> TensorDict:
    data = TensorDict({"one": torch.zeros(1)}, batch_size=1)
    data["multi_modal_inputs"] = NonTensorStack.from_list([NonTensorData({name: torch.zeros(1, 3, 16, 16)})])
    data["uid"] = NonTensorStack.from_list([NonTensorData("prompt7")])
    return data


def built(model: Model) -> nn.Module:
    from transformers import AutoModelForImageTextToText

    made: nn.Module = AutoModelForImageTextToText.from_config(model.config())
    return made


def engine_of(model: Model) -> Any:
    engine = plugin.SharedPromptFSDPEngine.__new__(plugin.SharedPromptFSDPEngine)
    engine.stock_module, engine.announced = built(model), set()
    engine.runs_towers_on_text, engine.use_ulysses_sp, engine.pad_to_length = True, False, False
    return engine


def test_pictures_that_are_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    """The model's family, or the input; and nothing is taken where ranks disagree on who runs a tower."""
    engine = engine_of(GEMMA3)
    assert not engine._takes_images(with_picture()) and "images of gemma3" in caplog.text
    engine = engine_of(QWEN3_VL)
    assert engine._takes_images(with_picture()) and not engine._takes_images(with_picture("pixel_masks"))
    assert "got pixel_masks" in caplog.text
    engine.runs_towers_on_text = False
    assert not engine._takes_images(with_picture())


def test_the_prompts_of_pictures_that_do_not_fit_are_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: Any) -> None:
        raise SharedPromptError("they do not fit", "")

    engine = engine_of(QWEN3_VL)
    engine._why_not, engine.options, engine.keeps_logits = lambda data: None, None, True
    monkeypatch.setattr(plugin, "pack_micro_batch", refuse)
    assert engine._plan_of(with_picture()) == "multimodal"
    assert "prompts prompt7 images are not shared" in caplog.text


@pytest.mark.parametrize("is_divided", [True, False])
def test_rows_that_nobody_divides(monkeypatch: pytest.MonkeyPatch, is_divided: bool) -> None:
    """Under Ulysses verl leaves the rows of such a model to the decoder, but patches few decoders."""

    class Decoder(nn.Module):
        forward = of_verl("") if is_divided else nn.Module.forward

    engine: Any = plugin.SharedPromptFSDPEngine.__new__(plugin.SharedPromptFSDPEngine)
    engine.use_ulysses_sp, engine.ulysses_sequence_parallel_size = True, 2
    engine.stock_module, engine.decoder = SimpleNamespace(config=SimpleNamespace(vision_config={})), Decoder()
    engine.pad_to_length = False
    monkeypatch.setattr(plugin.SharedPrompts, "_why_not", lambda *args: None)

    def pack(*args: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(plugin, "pack_micro_batch", pack)
    engine.options = Options(prompt_once=False)
    if is_divided:
        with pytest.raises(NotImplementedError):
            engine._plan_of(TensorDict(batch_size=0))
    else:
        assert engine._plan_of(TensorDict(batch_size=0)) == "multimodal"
        monkeypatch.setattr(engine, "_apart", lambda data: ())
        # Micro-batches filled by unique tokens would exceed the budget on verl's path.
        data = TensorDict(batch_size=0)
        assert engine.micro_batches(data, None, lambda: "verl's") == "verl's"
