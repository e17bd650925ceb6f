# SPDX-License-Identifier: BSD-3-Clause
"""Images in the prompts of a packed row: models that take them, positions of their tokens, towers without a layout.

A tower sees the pixels of one sample of each group, in the order of the row, and its model puts what comes out where
the placeholders stand. Nothing else changes: tokens of images are rows of a prompt, and its responses see them.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ... import checks
from ...data.batch import PackedBatch
from ...errors import SharedPromptError, SharedPromptUnsupportedError
from ...parallel.sharded import DividedLayout, check_divided
from ...pieces import PieceLayout
from .admission import table, unwrap

# Multimodal models, by `model_type`, whose images are exact in a shared prompt.
FAMILIES = frozenset(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"))
# Models in which the tokens of an image see each other both ways, which no layout stands for.
BOTH_WAYS = frozenset(("gemma3", "gemma4", "gemma4_unified", "paligemma", "shieldgemma2"))


class Medium(NamedTuple):
    """Names of a model's inputs for a kind of image."""

    pixels: str
    grids: str
    token: str  # field of the configuration: the placeholder
    mark: int  # in mm_token_type_ids


MEDIA = (
    Medium("pixel_values", "image_grid_thw", "image_token_id", 1),
    Medium("pixel_values_videos", "video_grid_thw", "video_token_id", 2),
)
INPUTS = frozenset(name for one in MEDIA for name in (one.pixels, one.grids)) | {"second_per_grid_ts"}


def check_images(model: nn.Module, names: Iterable[str]) -> None:
    """Refuse images of a model that is not known to be exact with them in a shared prompt.

    Args:
        model: of transformers, wrapped or not.
        names: inputs of the model that are images, or say where these are.

    Raises:
        SharedPromptUnsupportedError: names the model, the input, or dropout of a tower.
    """
    causal_lm = unwrap.causal_lm_of(model)
    kind = getattr(causal_lm.config, "model_type", None)
    if kind in BOTH_WAYS:
        expected = "text alone with a shared prompt (tokens of an image see each other both ways)"
        raise SharedPromptUnsupportedError(f"images of {kind}", expected, ", ".join(sorted(names)))
    if kind not in FAMILIES:
        expected = f"text alone with a shared prompt, or one of {', '.join(sorted(FAMILIES))}"
        raise SharedPromptUnsupportedError("images", expected, f"{kind} with {', '.join(sorted(names))}")
    if others := sorted({*names} - INPUTS - {"mm_token_type_ids"}):
        raise SharedPromptUnsupportedError(f"images of {kind}", ", ".join(sorted(INPUTS)), ", ".join(others))
    for tower in towers_of(causal_lm):
        for name, module in tower.named_modules():
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
                expected = "0 in training mode (images of a group have one mask, not one for each of its samples)"
                raise SharedPromptUnsupportedError(f"dropout of a tower's {name}", expected, module.p)


def row_inputs(model: nn.Module, batch: PackedBatch, layout: DividedLayout | None = None) -> dict[str, Any]:
    """Inputs of a model's forward for a packed batch, images included.

    Args:
        model: a causal LM of transformers, wrapped or not.
        batch: packed with its `images`, if it has any. Positions of several dimensions are those of
            `row_values["position_ids"]`, (n, T), or, where these were not given, the model's own; (T,) or (1, T) of
            text.
        layout: of the batch, divided among ranks (`UlyssesLayout`, `ContextLayout`): the inputs are this rank's rows.
            None where this process has the whole row.

    Returns:
        Keyword arguments of the model: the row, the layout and the images.

    Raises:
        SharedPromptError: images of a model that is not exact with them; images that do not fit the placeholders of
            their prompts; placeholders outside of prompts; a divided layout of another batch, or with images.
    """
    checks.instance("batch", batch, PackedBatch, " (of pack_shared_prompts)")
    if layout is not None:
        return _divided_inputs(model, batch, layout)
    causal_lm = unwrap.causal_lm_of(model)
    ids, whole = batch.input_ids, batch.layout
    positions = batch.row_values.get("position_ids")
    if positions is not None and positions.dim() > 1 and len(positions) == 1:
        # Those of text, in the form of several dimensions. A copy, since the layout marks its
        # positions, and a view has the mark of what it is a view of.
        positions = positions[0].clone()
    if batch.images and not isinstance(whole, PieceLayout):  # else of a batch that was checked
        check_images(causal_lm, batch.images)
        check_placeholders(causal_lm.config, batch)
        if positions is None:
            positions = row_positions(causal_lm, batch)
    if positions is not None:
        whole = replace(whole, position_ids=positions)
    rows = (batch.position_ids if positions is None else positions)[..., None, :]
    marks = {"mm_token_type_ids": _marks(causal_lm.config, batch)[None]} if _is_marked(causal_lm) else {}
    inputs = {"input_ids": ids[None], "position_ids": rows, "attention_mask": None, "use_cache": False}
    return {**inputs, "shared_prompt_layout": whole, **marks, **batch.images}


def _divided_inputs(model: nn.Module, batch: PackedBatch, layout: DividedLayout) -> dict[str, Any]:
    check_divided(layout, batch.layout)
    if batch.images:
        expected = "none in a row that ranks divide: the tokens of an image may lie on several"
        raise SharedPromptUnsupportedError("images", expected, ", ".join(batch.images))
    inputs = row_inputs(model, batch)
    for name, one in inputs.items():
        if isinstance(one, Tensor):
            inputs[name] = layout.shard(one, dim=-1)
    return {**inputs, "shared_prompt_layout": layout}


def _is_marked(causal_lm: Any) -> bool:
    """True if a model of text and images is told which tokens are which, as some require in training mode."""
    parameters = inspect.signature(type(causal_lm).forward).parameters
    return "mm_token_type_ids" in parameters and bool(unwrap.tower_configs(causal_lm.config))


def _marks(config: Any, batch: PackedBatch) -> Tensor:
    """(T,) of each token the kind of its medium, 0 for text."""
    marks = torch.zeros_like(batch.input_ids)
    for one in _given(batch):
        marks += one.mark * (batch.input_ids == _token(config, one))
    return marks


def image_rows(model: nn.Module, batch: PackedBatch) -> Tensor:
    """(n,) int64, the rows whose tokens stand for images."""
    return _marks(unwrap.causal_lm_of(model).config, batch).nonzero()[:, 0]


def _given(batch: PackedBatch) -> list[Medium]:
    """What a batch has: a placeholder of something else is a token like any other, which a response may have drawn."""
    return [one for one in MEDIA if {one.pixels, one.grids} & batch.images.keys()]


def images_of_samples(
    model: nn.Module, input_ids: Tensor, attention_mask: Tensor, media: Mapping[str, Tensor]
) -> dict[str, list[Tensor | None]]:
    """The images of each sample of a padded batch, which its model takes one sample after the other.

    Args:
        model: a causal LM of transformers, wrapped or not.
        input_ids, attention_mask: (B, S).
        media: inputs of the model that are images, or say where these are.

    Returns:
        What `pack_padded` takes as `images`.

    Raises:
        SharedPromptError: images of a model that is not exact with them; those of a sample do not fit its placeholders.
    """
    found: dict[str, list[Tensor | None]] = {}
    if not media:
        return found
    config = unwrap.causal_lm_of(model).config
    check_images(model, media)
    merged = config.vision_config.spatial_merge_size**2
    for medium in MEDIA:
        if medium.pixels not in media:
            continue
        pixels, grids = media[medium.pixels], media.get(medium.grids)
        if grids is None:
            raise SharedPromptError(medium.grids, f"grids beside {medium.pixels}", "none")
        is_placeholder = (input_ids == _token(config, medium)) & attention_mask.bool()
        counts, patches = is_placeholder.sum(1).tolist(), grids.prod(-1).tolist()
        ends = [0, *accumulate(patches)]
        if ends[-1] != len(pixels):
            raise SharedPromptError(medium.pixels, f"{ends[-1]} patches, as {medium.grids}", len(pixels))
        found |= {medium.pixels: [], medium.grids: []}
        begin = 0
        for sample, end in enumerate(accumulate(counts)):
            last = bisect_left(ends, end * merged, begin)
            if last == len(ends) or ends[last] != end * merged:
                expected, got = "images that fill its placeholders", f"{counts[sample]} of these"
                raise SharedPromptError(f"{medium.pixels} of sample {sample}", expected, got)
            found[medium.pixels].append(pixels[ends[begin] : ends[last]] if last > begin else None)
            found[medium.grids].append(grids[begin:last] if last > begin else None)
            begin = last
        if begin + 1 < len(ends):
            raise SharedPromptError(medium.grids, f"{begin} images, as placeholders say", len(grids))
    if not found:
        raise SharedPromptError("images", "pixels of the tokens that are marked as images", ", ".join(media))
    return found


# Placeholders


def _token(config: Any, medium: Medium) -> int:
    return getattr(config, medium.token)


def placeholders_of(config: Any) -> list[int]:
    """The tokens of a supported model that stand for images."""
    return [_token(config, medium) for medium in MEDIA]


def check_placeholders(config: Any, batch: PackedBatch) -> None:
    """Refuse images that do not fit the placeholders of their group's prompt, and placeholders elsewhere.

    A placeholder in a response, or at the end of a prompt, of which each response has a copy, would take what belongs
    to the next one.

    Raises:
        SharedPromptError: names the group by its first sample.
    """
    first: dict[int, int] = {}  # sample of each group
    for sample, leaf in enumerate(batch.tree.leaves):
        first.setdefault(batch.tree.roots[leaf], sample)
    roots = [node for node, parent in enumerate(batch.layout.node_parents) if parent < 0]
    ends = torch.tensor([*accumulate(batch.layout.node_lens, initial=0)], device=batch.input_ids.device)
    for medium in _given(batch):
        is_placeholder = batch.input_ids == _token(config, medium)
        counts = nn.functional.pad(is_placeholder.cumsum(0), (1, 0)).index_select(0, ends).diff().tolist()
        for group, (root, following) in enumerate(pairwise([*roots, len(counts)])):
            pixels, grids = (_of_group(batch, name, group) for name in (medium.pixels, medium.grids))
            name = f"{medium.pixels} of the group of sample {first[group]}"
            patches = 0 if grids is None else int(grids.prod(-1).sum())
            if patches != (0 if pixels is None else len(pixels)):
                raise SharedPromptError(name, f"{patches} patches, as its {medium.grids}", checks.describe(pixels))
            tokens = patches // config.vision_config.spatial_merge_size**2
            behind = sum(counts[root + 1 : following])
            if tokens != counts[root] or behind:
                expected = f"{tokens} placeholders in the prompt, its last token none (token {_token(config, medium)})"
                raise SharedPromptError(name, expected, f"{counts[root]}, and {behind} behind it")


def _of_group(batch: PackedBatch, name: str, group: int) -> Tensor | None:
    return batch.group_images[name][group] if name in batch.group_images else None


# Positions


def _counter_of(model: nn.Module) -> Any:
    """The part of a model that counts the positions of its images."""
    return next(one for one in model.modules() if hasattr(type(one), "get_rope_index"))


def row_positions(model: nn.Module, batch: PackedBatch) -> Tensor:
    """(3, T) positions of time, height and width, of which the images of each prompt take several tokens at once.

    Those that the model gives each sequence alone: what follows a prompt's images counts on from their largest one.
    """
    causal_lm = unwrap.causal_lm_of(model)
    counter = _counter_of(causal_lm)
    layout = batch.layout
    begins = [*accumulate(layout.node_lens, initial=0)]
    roots = [node for node, parent in enumerate(layout.node_parents) if parent < 0]
    marks = _marks(causal_lm.config, batch)
    parts = []
    for group, (root, following) in enumerate(pairwise([*roots, layout.num_nodes])):
        begin, behind, end = begins[root], begins[root + 1], begins[following]
        images = {name: values[group] for name, values in batch.group_images.items() if values[group] is not None}
        if not images:
            parts.append(batch.position_ids[begin:end].expand(3, -1))
            continue
        row = slice(begin, behind)
        given = {**images, "mm_token_type_ids": marks[None, row]}
        known = inspect.signature(counter.get_rope_index).parameters
        own, deltas = counter.get_rope_index(
            input_ids=batch.input_ids[None, row], **{name: one for name, one in given.items() if name in known}
        )
        rest = batch.position_ids[behind:end] + deltas.view(-1).to(own.device)
        parts += [own[:, 0], rest.expand(3, -1)]
    return torch.cat([*parts, batch.position_ids.new_zeros(3, layout.pad)], 1)


# Towers


def towers_of(model: Any) -> list[nn.Module]:
    """The outermost modules of a model that see pixels alone."""
    names = {name.removesuffix(".") for name in unwrap.tower_names(model)}
    return [model.get_submodule(name) for name in names]


def drop_layout(_tower: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Hook before the forward of a tower, to which some models hand on all arguments."""
    return args, {name: one for name, one in kwargs.items() if name != "shared_prompt_layout"}


@contextmanager
def towers_without_layout(model: Any, batch: PackedBatch) -> Iterator[None]:
    """Keep the layout of forwards inside, which have a batch, from the towers of a transformers model."""
    towers = towers_of(model) if batch.images else []
    handles = [one.register_forward_pre_hook(drop_layout, with_kwargs=True) for one in towers]
    try:
        yield
    finally:
        for one in handles:
            one.remove()


def check_row_images(model: nn.Module, position_ids: Tensor, inputs: Mapping[str, Any]) -> None:
    """Refuse images beside a layout of a model that is not exact with them, or with positions of text.

    Raises:
        SharedPromptError: says which inputs, or which positions.
    """
    media = table.media_among(inputs)
    if not media:
        return
    check_images(model, media)
    if position_ids.dim() != 3:
        expected = "those of images, (n, 1, T) as row_inputs gives them"
        raise SharedPromptError("position_ids", expected, checks.describe(position_ids))
