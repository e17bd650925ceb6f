# SPDX-License-Identifier: BSD-3-Clause
"""Images in shared prompts: computed once a group, exact, and never shared by equal tokens alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import (
    TOLERANCES,
    VERSION,
    Outcome,
    Tolerance,
    check_equal,
    dualkv,
    logps_of,
    stock_twin,
    transformers,
)
from tiny_multimodal import IMAGE, QWEN, Pictured, marks_of, multimodal_model

from flash_attn_dualkv import PackedBatch, SharedPromptError, pack_shared_prompts
from flash_attn_dualkv.integrations.transformers.images import check_images, images_of_samples

pytestmark = pytest.mark.usefixtures("restored_registry")
# One image, text alone, two images of other sizes; siblings apart.
MIXED = Pictured.random([([(1, 4, 4)], [5, 3, 0]), ([], [2, 4]), ([(1, 4, 6), (1, 2, 4)], [3, 1])]).take(
    [0, 3, 5, 1, 4, 2, 6]
)


def calls_of_tower(model: Any) -> list[int]:
    """Counts patches in each call."""
    found: list[int] = []
    tower = next(one for name, one in model.named_modules() if name.endswith("visual"))
    tower.register_forward_pre_hook(lambda _, args, kwargs: found.append(len(args[0])), with_kwargs=True)
    return found


@pytest.mark.parametrize("boundary", ["replicate", "gather"])
@pytest.mark.parametrize("model_type", QWEN)
def test_images_are_exact(model_type: str, boundary: str) -> None:
    """Log-probabilities and the gradients of all parameters, those of the tower too, which runs once a group."""
    is_wide = "moe" not in model_type  # experts have no float64
    dtype = torch.float64 if is_wide else torch.float32
    options = dict(num_experts_per_tok=4) if not is_wide else {}
    model = multimodal_model(model_type, dtype=dtype, **options).train()
    stock = stock_twin(model, "eager")
    batch = MIXED.pack(boundary=boundary, pad_to_multiple_of=8)
    patches = calls_of_tower(model)
    got, expected = dualkv.shared_prompt_forward(model, batch)[0], Outcome.of(stock, MIXED.stock_logps(stock))
    assert any("visual" in name for name in expected.gradients)
    Outcome.of(model, got).check(expected, Tolerance(TOLERANCES[dtype].value * 2, 1e-5))
    assert patches[-1] == 16 + 24 + 8 and len([one for one in patches if one == patches[-1]]) == 1


@pytest.mark.parametrize("model_type", [one for one in QWEN if one in ("qwen2_5_vl", "qwen3_vl")])
def test_videos_are_exact(model_type: str) -> None:
    """Frames of 4 x 4 patches, each of which Qwen3-VL puts between tokens of its own."""
    model = multimodal_model(model_type, dtype=torch.float64)
    frames = 2 if model_type == "qwen3_vl" else 1
    given = Pictured.random([([(frames, 4, 4)], [5, 3]), ([], [2])], video=True)
    got, _ = dualkv.shared_prompt_forward(model, given.pack())
    check_equal(got.detach(), given.stock_logps(stock_twin(model, "eager")).detach(), 2e-7)


def test_own_positions() -> None:
    """Those of a trainer, of four rows as verl's, in the place of the model's."""
    model = multimodal_model("qwen3_vl", dtype=torch.float64)
    samples, positions = MIXED.samples, []
    for index, (prompt, response) in enumerate(zip(samples.prompts, samples.responses)):
        ids = torch.tensor([prompt + response])
        grids = {name: one for name, one in MIXED.of(index).items() if name == "image_grid_thw"}
        known = dict(mm_token_type_ids=marks_of(ids)) if VERSION >= (5, 0) else {}
        three, _ = model.model.get_rope_index(ids, **grids, **known)
        positions.append(torch.cat([torch.arange(ids.shape[1])[None], three[:, 0]]))
    batch = MIXED.pack(row_values={"position_ids": positions})
    assert dualkv.row_inputs(model, batch)["position_ids"].shape == (4, 1, batch.layout.num_tokens)
    got, _ = dualkv.shared_prompt_forward(model, batch)
    assert torch.equal(got, dualkv.shared_prompt_forward(model, MIXED.pack())[0])


def test_a_plain_call_of_the_model() -> None:
    """With a hook, which keeps the layout from the tower, and with towers on a wrapped attention."""
    model = multimodal_model("qwen3_vl", dtype=torch.float64)
    batch = MIXED.pack()
    expected, _ = dualkv.shared_prompt_forward(model, batch)
    inputs = dualkv.row_inputs(model, batch)
    hook = dualkv.install_layout_hook(model)
    with torch.no_grad():
        check_equal(logps_of(model(**inputs).logits, batch), expected.detach(), 1e-12)
    hook.remove()
    dualkv.wrap("sdpa")
    model.set_attn_implementation("sdpa")
    dualkv.install_layout_hook(model)
    with torch.no_grad():
        check_equal(logps_of(model(**inputs).logits, batch), expected.detach(), 1e-7)


def test_groups_that_are_divided_have_their_images_each() -> None:
    four = Pictured.random([([(1, 4, 4)], [3, 2, 4, 1])])
    model = multimodal_model("qwen3_vl", dtype=torch.float64)
    batch = four.pack(group_ids=[0, 0, 1, 1])
    assert batch.images["image_grid_thw"].tolist() == [[1, 4, 4]] * 2
    got, _ = dualkv.shared_prompt_forward(model, batch)
    check_equal(got.detach(), dualkv.shared_prompt_forward(model, four.pack())[0].detach(), 1e-12)


# --- what is refused --------------------------------------------------------------------------------------------------


def changed(**images: Any) -> PackedBatch:
    """One prompt with other images."""
    one = Pictured.random([([(1, 4, 4)], [3, 2])])
    return Pictured(one.samples, {**one.images, **images}).pack()


def with_placeholder(at_end: bool) -> PackedBatch:
    """A further placeholder, at the end of the prompt or in a response."""
    one = Pictured.random([([(1, 4, 4)], [3, 2])])
    prompts = [prompt + [IMAGE] * at_end for prompt in one.samples.prompts]
    responses = [response + [IMAGE] * (not at_end) for response in one.samples.responses]
    return pack_shared_prompts(prompts, responses, images=one.images)


GRID, PIXELS = torch.tensor([[1, 4, 4]]), torch.zeros(16, 384)
MISFITS: list[tuple[Callable[[], PackedBatch], str]] = [
    (lambda: changed(image_grid_thw=[torch.tensor([[1, 4, 8]])] * 2), "of sample 0: expected 32 patches"),
    (lambda: changed(image_grid_thw=[None] * 2), "of sample 0: expected 0 patches"),
    (lambda: changed(pixel_values=[None] * 2), "of sample 0: expected 16 patches"),
    (
        lambda: changed(pixel_values=[torch.zeros(32, 384)] * 2, image_grid_thw=[torch.tensor([[1, 4, 8]])] * 2),
        "expected 8 placeholders .* got 4",
    ),
    (lambda: changed(pixel_values=[torch.zeros(0, 384)] * 2, image_grid_thw=[GRID[:0]] * 2), "expected 0 placeholders"),
    (lambda: with_placeholder(at_end=True), "its last token none .* got 4, and 2 behind it"),
    (lambda: with_placeholder(at_end=False), "got 4, and 2 behind it"),
    (lambda: changed(image_sizes=[GRID] * 2), "images of qwen3_vl: .* got image_sizes"),
    (lambda: changed(pixel_values=[PIXELS]), r"^images\['pixel_values'\]: expected 2 of them"),
    (lambda: changed(pixel_values=[PIXELS, 1]), r"^images\['pixel_values'\]\[1\]: expected a tensor"),
    (lambda: changed(pixel_values=[PIXELS, PIXELS[:, :4]]), r"^images\['pixel_values'\]\[1\]: expected \(any, 384\)"),
    (lambda: pack_shared_prompts([[1]], [[2]], images=[PIXELS]), "^images: expected a dict of names"),
]  # fmt: skip


@pytest.mark.parametrize(("pack", "message"), MISFITS, ids=range(len(MISFITS)))
def test_images_that_do_not_fit(pack: Callable[[], PackedBatch], message: str) -> None:
    model = multimodal_model("qwen3_vl")
    with pytest.raises(SharedPromptError, match=message):
        dualkv.shared_prompt_forward(model, pack())


def test_positions_of_another_batch() -> None:
    model = multimodal_model("qwen3_vl")
    dualkv.install_layout_hook(model)
    batch = MIXED.pack()
    inputs, others = (dualkv.row_inputs(model, one) for one in (batch, MIXED.pack()))
    for positions, message in (
        (others["position_ids"], "no copy of them"),
        (batch.position_ids[None], r"\(n, 1, T\) as row_inputs gives them"),
        (batch.position_ids.expand(3, 1, -1), "no copy of them"),
    ):
        with pytest.raises(SharedPromptError, match=message):
            model(**{**inputs, "position_ids": positions})
    model(**inputs)


def test_padded_batches_whose_images_do_not_fit() -> None:
    model = multimodal_model("qwen3_vl")
    ids = torch.tensor([[5, IMAGE, IMAGE, 6], [IMAGE, IMAGE, 7, 8]])
    media = dict(pixel_values=torch.randn(16, 384), image_grid_thw=torch.tensor([[1, 2, 4]] * 2))
    mask = torch.ones_like(ids)
    found = images_of_samples(model, ids, mask, media)
    for name, (first, second) in found.items():
        assert first is not None and second is not None
        assert torch.equal(first, media[name].chunk(2)[0]) and torch.equal(second, media[name].chunk(2)[1])
    for other, message in (
        (dict(image_grid_thw=torch.tensor([[1, 4, 4]])), "pixel_values of sample 0: expected images that fill"),
        (dict(image_grid_thw=torch.tensor([[1, 2, 4]] * 3), pixel_values=torch.randn(24, 384)), "got 3"),
        (dict(pixel_values=torch.randn(8, 384)), "pixel_values: expected 16 patches"),
        (dict(image_sizes=GRID), "got image_sizes"),
    ):
        with pytest.raises(SharedPromptError, match=message):
            images_of_samples(model, ids, mask, {**media, **other})
    with pytest.raises(SharedPromptError, match="^image_grid_thw: expected grids beside pixel_values"):
        images_of_samples(model, ids, mask, dict(pixel_values=media["pixel_values"]))
    with pytest.raises(SharedPromptError, match="pixels of the tokens that are marked"):
        images_of_samples(model, ids, mask, dict(mm_token_type_ids=marks_of(ids)))


@pytest.mark.parametrize("model_type", ["gemma3", "gemma4"])
def test_images_that_see_themselves_both_ways_are_refused_by_name(model_type: str) -> None:
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip("another transformers")
    model = multimodal_model(model_type)
    batch = pack_shared_prompts(
        [[5, 6, 7]] * 2, [[1], [2, 3]], images={"pixel_values": [torch.zeros(1, 3, 32, 32)] * 2}
    )
    with pytest.raises(SharedPromptError, match=f"^images of {model_type}: .* see each other both ways"):
        dualkv.shared_prompt_forward(model, batch)
    with pytest.raises(SharedPromptError, match="^images: expected text alone .* got llava with pixel_values"):
        check_images(multimodal_model("llava"), ["pixel_values"])


def test_dropout_of_a_tower_is_refused() -> None:
    """In training mode alone."""
    model = multimodal_model("qwen3_vl")
    model.model.visual.blocks[0].mlp.add_module("dropout", torch.nn.Dropout(0.1))
    model.eval()
    dualkv.shared_prompt_forward(model, MIXED.pack())
    model.train()
    with pytest.raises(SharedPromptError, match="dropout of a tower's blocks.0.mlp.dropout"):
        dualkv.shared_prompt_forward(model, MIXED.pack())
