# SPDX-License-Identifier: BSD-3-Clause
"""Text on models of more than text: exact on shared prompts or refused, with towers that stay on stock attention."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
    MIXED,
    VERSION,
    Samples,
    check_equal,
    dualkv,
    logps_of,
    replicated_logps,
    row_of,
    stock_twin,
    transformers,
)
from tiny_multimodal import IMAGES, image, multimodal_model

from flash_attn_dualkv import SharedPromptError
from flash_attn_dualkv.integrations.transformers.admission.unwrap import tower_configs

pytestmark = pytest.mark.usefixtures("restored_registry")
USED = [
    name
    for name in ("qwen3_5", "qwen3_vl", "qwen2_5_vl", "gemma3", "gemma4", "mistral3", "glm4v", "llava")
    # 4.57's GLM-4V cannot make a mask of text.
    if name in transformers.CONFIG_MAPPING and (VERSION >= (5, 0) or name != "glm4v")
]


# --- the attention of towers ------------------------------------------------------------------------------------------


def implementations(model: Any) -> tuple[set[Any], set[Any]]:
    """Of the text and of the towers."""
    towers = tower_configs(model.config)
    found: tuple[set[Any], set[Any]] = (set(), set())
    for one in model.modules():
        if isinstance(one, transformers.PreTrainedModel):
            found[any(one.config is config for config in towers)].add(one.config._attn_implementation)
    return found


# Audio beside images; towers without sdpa, whose stock choice is eager; one of before transformers'
# interface.
OTHERS = ("qwen2_5_omni_thinker", "got_ocr2", "blip-2", "muse_spark", "deepseek_vl_hybrid")
OF_TOWERS = [*USED, *(name for name in OTHERS if name in transformers.CONFIG_MAPPING and VERSION >= (5, 0))]


@pytest.mark.parametrize("model_type", OF_TOWERS)
def test_towers_choose_as_stock_ones_do(model_type: str, tmp_path: Path) -> None:
    """However the name is given: for a new model, for one from disk, for one that exists, for some parts alone."""
    _, stock = implementations(multimodal_model(model_type, attention=None))
    model = multimodal_model(model_type)
    assert implementations(model) == ({"dualkv"}, stock)
    model.save_pretrained(tmp_path)
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation="dualkv")
    assert implementations(loaded) == ({"dualkv"}, stock)
    every: Any = dict.fromkeys((*model.config.sub_configs, ""), "dualkv")
    if VERSION < (5, 0):  # where some parts do not find themselves in it
        every = "dualkv"
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path, attn_implementation=every)
    assert implementations(loaded) == ({"dualkv"}, stock)
    for towers in (stock, {"eager"} if stock else set()):
        for given in ("dualkv", every):
            if towers != stock:
                model.set_attn_implementation("eager")
            model.set_attn_implementation(given)
            assert implementations(model) == ({"dualkv"}, towers)
    logps, _ = dualkv.shared_prompt_forward(model, MIXED.pack()) if model_type in USED else (torch.zeros(1), None)
    assert logps.isfinite().all()


@pytest.mark.parametrize("model_type", IMAGES)
@pytest.mark.parametrize("attention", ["dualkv", "sdpa"])
def test_images_with_and_without_a_layout(model_type: str, attention: str) -> None:
    model = multimodal_model(model_type)
    inputs = image(model_type)
    if attention == "sdpa":
        dualkv.wrap("sdpa")
        model.set_attn_implementation("sdpa")
    with torch.no_grad():
        expected = stock_twin(model, "eager")(**inputs, use_cache=False).logits
        check_equal(model(**inputs, use_cache=False).logits, expected, 1e-5)
        # There is an image.
        others = {**inputs, "pixel_values": inputs["pixel_values"].flip(0, -1)}
        assert not torch.allclose(model(**others, use_cache=False).logits, expected, atol=1e-4)
    row = inputs["input_ids"][0].tolist()
    batch = Samples([row[:-1]], [row[-1:]]).pack()
    more = dict(position_ids=batch.position_ids[None], use_cache=False, shared_prompt_layout=batch.layout)
    # The tower gets what its model passes on to it, and takes no layout.
    message = "every layer that gets a layout, got 'sdpa'" if attention == "dualkv" else "as the layout"
    logits, said = expected, message
    try:
        with torch.no_grad(), dualkv.expect_shared_prompt(batch.layout, 2):
            logits = model(**inputs, **more).logits
    except SharedPromptError as error:
        said = str(error)
    assert message in said
    # Stock Qwen3-VL has positions of its own beside an image.
    assert model_type == "qwen3_vl" or torch.allclose(logits, expected, atol=1e-5)


# --- what models are told of the kinds of tokens ----------------------------------------------------------------------

BLOCKS = [
    (name, mark, options)
    for name, mark, options in (
        ("gemma3", "token_type_ids", {}),
        ("gemma4", "mm_token_type_ids", dict(use_bidirectional_attention="vision")),
        ("gemma4_unified", "mm_token_type_ids", {}),
        ("shieldgemma2", "token_type_ids", {}),
    )
    if name in transformers.CONFIG_MAPPING and VERSION >= (5, 10)
]


@pytest.mark.parametrize("attention", ["dualkv", "sdpa"])
@pytest.mark.parametrize(("model_type", "mark", "options"), BLOCKS, ids=str)
def test_images_that_see_each_other_are_refused_and_text_is_exact(
    model_type: str, mark: str, options: dict[str, Any], attention: str
) -> None:
    """Masks with a part for the tokens of images, which hides nothing of a row that is text."""
    if attention == "sdpa":
        dualkv.wrap("sdpa")
    model = multimodal_model(model_type, attention=attention, dtype=torch.float64, **options)
    batch = MIXED.pack()
    got, _ = dualkv.shared_prompt_forward(model, batch)
    expected, _ = replicated_logps(stock_twin(model, "eager"), MIXED)
    check_equal(got.detach(), expected.detach(), 1e-9)
    marks = torch.zeros_like(batch.input_ids)[None]
    with torch.no_grad():
        for image in (False, True):
            marks[0, 2:5] = int(image)
            refused = pytest.raises(SharedPromptError, match="blockwise_overlay") if image else nullcontext()
            with refused, dualkv.expect_shared_prompt(batch.layout, model.config.text_config.num_hidden_layers):
                logits = model(**row_of(batch, **{mark: marks})).logits
    check_equal(logps_of(logits, batch), expected.detach(), 1e-9)


@pytest.mark.skipif(VERSION < (5, 0), reason="some stock models make masks of positions of one kind")
@pytest.mark.parametrize("model_type", [name for name in USED if name.startswith(("qwen", "glm"))])
def test_positions_of_three_kinds(model_type: str) -> None:
    """What models of images call the positions of text: one row of them, or three equal ones."""
    model = multimodal_model(model_type)
    dualkv.install_layout_hook(model)
    batch = MIXED.pack()
    logits = []
    for position_ids in (batch.position_ids[None], batch.position_ids.expand(3, 1, -1)):
        with torch.no_grad():
            logits.append(model(**row_of(batch, position_ids=position_ids)).logits)
    assert torch.equal(*logits)
