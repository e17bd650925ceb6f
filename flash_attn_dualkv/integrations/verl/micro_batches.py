# SPDX-License-Identifier: BSD-3-Clause
"""Which samples share a micro-batch, and its packed form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tensordict import NonTensorData, TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from ...checks import explain
from ...data.batch import PackedBatch, pack
from ...data.divided import DividedTrees, Trunks, divided_trees, split_with_trunks
from ...data.given import position_rows
from ...data.plan import checked_tree, plan
from ...data.prefix_tree import PrefixTree
from ...data.samples import Beside, Samples, read_jagged
from ...data.split import below, on_equal_terms, split_by_token_budget
from ...errors import SharedPromptError
from ...host import offsets_of, take
from ...layout import SharedPromptLayout
from ...parallel.agreement import largest_of_ranks
from ..common.options import Options
from ..transformers.admission.table import is_mark_of_text
from ..transformers.packed_forward import without_positions

OutputsOf = Callable[[dict[str, Tensor]], dict[str, Tensor]]

# The tree of a micro-batch, as a part of that of its mini-batch.
TREE = "shared_prompt_tree"


class Lengths(NamedTuple):
    """Tokens of prompts and responses, of each sample."""

    prompts: list[int]
    responses: list[int]

    @staticmethod
    def of(data: TensorDict) -> Lengths:
        totals = data["input_ids"].offsets().diff()
        prompts = prompt_lengths(data)
        return Lengths(prompts.tolist(), (totals.to(prompts.device) - prompts).tolist())


def prompt_lengths(data: TensorDict) -> Tensor:
    """(B,) lengths, by offsets of jagged prompts or the mask of padded ones; 0 without prompts."""
    if "prompts" not in data:
        return torch.zeros_like(data["input_ids"].offsets().diff())
    prompts = data["prompts"]
    if prompts.is_nested:
        return prompts.offsets().diff()
    return data["attention_mask"][:, : prompts.shape[1]].ne(0).sum(1)


def _media_of(data: TensorDict) -> list[dict[str, Any]]:
    """Inputs of samples in addition to their text, without marks of text."""
    inputs = [item.data if isinstance(item, NonTensorData) else item for item in data.get("multi_modal_inputs", [])]
    # Processors mark the tokens of texts as well.
    return [
        {name: value for name, value in (item or {}).items() if value is not None and not is_mark_of_text(name, value)}
        for item in inputs
    ]


def samples_with_media(data: TensorDict) -> list[int]:
    """Samples that have images or other inputs in addition to their text."""
    return [index for index, media in enumerate(_media_of(data)) if media]


def samples_with_late_images(data: TensorDict, placeholders: Sequence[int]) -> list[int]:
    """Samples that have images in their responses, of tools say, or at the end of their prompts.

    Args:
        data: of verl.
        placeholders: tokens that stand for images.
    """
    media = samples_with_media(data)
    if not media:
        return []
    tokens, offsets = data["input_ids"].values(), data["input_ids"].offsets()
    sums = offsets_of(torch.isin(tokens, torch.tensor(placeholders, device=tokens.device)).long())
    begins = offsets[:-1] + prompt_lengths(data).to(offsets.device) - 1
    are_late = (take(sums, offsets[1:]) > take(sums, begins)).tolist()
    return [index for index in media if are_late[index]]


def images_of(data: TensorDict) -> dict[str, list[Tensor | None]]:
    """By the names of a model's inputs the images of each sample, as they are packed.

    Positions are in the batch: a model needs no marks of images.
    """
    media = _media_of(data)
    names = sorted({name for images in media for name in images if not name.endswith("token_type_ids")})
    return {name: [images.get(name) for images in media] for name in names}


def why_not(
    data: TensorDict, apart: Sequence[int] = (), takes_images: bool = False, takes_routes: bool = False
) -> str | None:
    """Reason why the samples cannot be shared, if any.

    Args:
        data: of verl.
        apart: samples that do not count, because they get micro-batches of their own.
        takes_images: whether samples with images can be shared.
        takes_routes: whether routes of experts can be recorded and replayed.
    """
    if "prompts" not in data:
        return "no_prompts"  # of verl's SFT trainer
    media = samples_with_media(data)
    if len(apart) == len(data) or (set(media) - set(apart) and not takes_images):
        return "multimodal"
    temperature = data["temperature"]
    if isinstance(temperature, Tensor) and temperature.numel() > 1 and temperature.min() != temperature.max():
        return "temperature"
    distills = any(tu.get_non_tensor_data(data, key, False) for key in ("distillation_use_topk", "distillation_only"))
    if distills and tu.get_non_tensor_data(data, "use_fused_kernels", False):
        return "distillation"  # a fused head makes no logits
    if tu.get_non_tensor_data(data, "enable_routing_replay", False) and not takes_routes:
        return "routing_replay"
    if tu.get_non_tensor_data(data, "force_group_size", 1) > 1:
        return "forced_groups"
    # Those of images are compared where samples share them.
    return None if _are_of_text(data, [*apart, *media]) else "positions"


def _are_of_text(data: TensorDict, apart: Sequence[int]) -> bool:
    """True if all position ids but those of `apart` count the tokens of their sample, in each row.

    One comparison, and one answer of the device.
    """
    offsets = data["input_ids"].offsets()
    rows = position_rows(data["position_ids"])
    begins, lengths, total = offsets[:-1], offsets.diff(), rows.shape[-1]
    if len(apart):
        # Below all positions: no position of these is another one than it should be.
        begins = begins.index_fill(0, torch.tensor(apart, device=begins.device), -total)
    expected = torch.arange(total, device=rows.device) - begins.repeat_interleave(lengths, output_size=total)
    return bool(((rows == expected) | (expected >= total)).all())


@dataclass(frozen=True)
class PackedMicroBatch:
    """A micro-batch that is shared.

    Attributes:
        batch: how it is packed.
        layout: for attention.
        micro_batch: the packed row, as verl holds one.
        scored: as verl would hold the rows that score response tokens, those of `batch.distinct`,
            if the LM head is to compute only these; None for all rows.
        outputs_of: of a piece, the model's output for verl, of what was made of the rows that score tokens.
    """

    batch: PackedBatch
    layout: SharedPromptLayout
    micro_batch: TensorDict
    scored: TensorDict | None
    outputs_of: OutputsOf | None = None


def pack_micro_batch(
    micro_batch: TensorDict, multiple: int, options: Options, scored_rows: bool = False
) -> PackedMicroBatch:
    """The micro-batch as one sequence; each response follows a last prompt token, for labels.

    Raises:
        SharedPromptError: images of prompts that do not fit these, or positions that differ where they are equal.
    """
    return packed_as(micro_batch, packed_batch(micro_batch, multiple, options), scored_rows)


def packed_as(micro_batch: TensorDict, batch: PackedBatch, scored_rows: bool) -> PackedMicroBatch:
    """A packed row with all that verl says of a micro-batch."""
    images = images_of(micro_batch)
    offsets = torch.tensor([0, batch.layout.num_tokens], device=batch.input_ids.device)
    positions = batch.row_values.get("position_ids", batch.position_ids)
    if not images and micro_batch["position_ids"].dim() == 3:  # the model's own form, all rows of it alike
        positions = positions.repeat(len(position_rows(micro_batch["position_ids"])), 1)
    row: dict[str, Any] = {
        name: torch.nested.nested_tensor_from_jagged(values, offsets, jagged_dim=values.dim())
        for name, values in (("input_ids", batch.input_ids), ("position_ids", positions))
    }
    if batch.images:
        row["multi_modal_inputs"] = [batch.images]
    row |= _teacher_of(micro_batch, batch.source_index.clamp(min=0), offsets)
    flags = {}
    for name in micro_batch.keys():  # noqa: SIM118, of tensors that are no mapping
        value = tu.get(micro_batch, name)
        if name != TREE and not isinstance(value, (Tensor, TensorDict, list)):
            flags[name] = value
    temperature = micro_batch["temperature"]
    flags["temperature"] = float(temperature.reshape(-1)[0]) if isinstance(temperature, Tensor) else temperature
    flags["use_remove_padding"] = True
    layout = without_positions(batch)
    scored = None
    if scored_rows and len(batch.token_index):
        rows = batch.distinct.pick(batch.token_index)
        ends = torch.tensor([0, len(rows)], device=rows.device)
        ids = torch.nested.nested_tensor_from_jagged(batch.input_ids[rows], ends)
        teacher = _teacher_of(micro_batch, batch.distinct.pick(batch.jagged_index), ends)
        scored = tu.get_tensordict({"input_ids": ids, **teacher}, flags)
    return PackedMicroBatch(batch, layout, tu.get_tensordict(row, flags), scored)


def packed_batch(micro_batch: TensorDict, multiple: int, options: Options, keys: Tensor | None = None) -> PackedBatch:
    """A micro-batch's samples, by the tree that its mini-batch was planned with, else by what is best for only these.

    `keys`: (sum L,) int64, only tokens with equal ones share a row; None: equal tokens do.
    """
    images = images_of(micro_batch)
    positions = {"position_ids": micro_batch["position_ids"]} if images else None
    beside = Beside(row_values=positions, images=images)
    samples = read_jagged(micro_batch["input_ids"], prompt_lengths(micro_batch), beside, keys=keys)
    tree = tu.get_non_tensor_data(micro_batch, TREE, None)
    tree = _planned(micro_batch, samples, options) if tree is None else checked_tree(tree, samples)
    return pack(samples, tree, multiple)


def _planned(data: TensorDict, samples: Samples, options: Options) -> PrefixTree:
    """Samples share more than prompts where no teacher has scored each of them."""
    return plan(samples, min_shared=None if "teacher_logprobs" in data else options.min_shared)


def _teacher_of(micro_batch: TensorDict, index: Tensor, offsets: Tensor) -> dict[str, Tensor]:
    """A teacher's scores of these tokens, if it has any: verl's losses on its top-k are those of logits by row."""
    given = {name: micro_batch[name].values() for name in ("teacher_logprobs", "teacher_ids") if name in micro_batch}
    return {
        name: torch.nested.nested_tensor_from_jagged(values.index_select(0, index), offsets)
        for name, values in given.items()
    }


@dataclass(frozen=True)
class Grouped:
    """Micro-batches that keep groups together; `order` where verl does not restore it.

    With `divided` the last ones are parts, in the order of its numbers.
    """

    micro_batches: list[TensorDict]
    indices: list[list[int]] | None
    order: list[int] | None
    budget: int | None
    divided: DividedTrees | None = None


def grouped_micro_batches(
    data: TensorDict,
    dp_group: Any,
    options: Options,
    reason: str | None,
    apart: Sequence[int] = (),
    keys: Tensor | None = None,
    multiple: int = 1,
    trunks: Trunks | None = None,
) -> Grouped | None:
    """Micro-batches by unique tokens; None where verl's own are to be used, on all ranks alike.

    Args:
        data: a mini-batch of this rank.
        dp_group: whose ranks get equally many.
        options: of the engine.
        reason: why nothing of it can be shared, if so.
        apart: samples that come last, in micro-batches of their own where these are dynamic.
        keys: of `packed_batch`.
        multiple: dynamic micro-batches are as many as one of it; of fixed ones verl's engine checks that.
        trunks: None: each micro-batch computes its own prompts. Then there are none `apart`.
    """
    together = [index for index in range(len(data)) if index not in {*apart}]
    tree = lonely = PrefixTree((), (), (), ())
    wants = False
    if reason is None:
        shared = tu.index_select_tensor_dict(data, together) if len(apart) else data
        samples = read_jagged(shared["input_ids"], prompt_lengths(shared), Beside(images=images_of(shared)), keys=keys)
        tree = _planned(shared, samples, options)
        wants = sum(tree.sequence_lens) >= options.min_dedup_ratio * sum(tree.node_lens)
        prompts, responses = ([lens[index] for index in apart] for lens in Lengths.of(data))
        lonely = PrefixTree.of_prompts([[at] for at in range(len(apart))], prompts, responses)

    def parts_of(parts: list[list[int]], indices: Sequence[int]) -> list[list[int]]:
        return [[indices[at] for at in part] for part in parts]

    def groups() -> list[list[int]]:
        """Samples that share anything, and each of the others."""
        return [*parts_of(below(tree, tree.roots), together), *([index] for index in apart)]

    def selected(part: list[int]) -> TensorDict:
        chosen = tu.index_select_tensor_dict(data, part)
        places = {index: at for at, index in enumerate(together)}
        if {*part} <= {*places}:
            tu.assign_non_tensor(chosen, **{TREE: tree.take([places[index] for index in part])})
        return chosen

    def with_trunks(parts: list[list[int]], budget: int | None = None) -> tuple[list[list[int]], DividedTrees | None]:
        """The parts in the order in which they run."""
        if trunks is None:
            return parts, None
        divided = divided_trees(tree, parts, trunks, budget)
        ordered = [parts[number] for number in (*divided.lonely, *divided.numbers)]
        return ordered, divided if divided.numbers else None

    if not tu.get_non_tensor_data(data, "use_dynamic_bsz", True):
        if not wants:
            return None
        order = [index for group in groups() for index in group]
        size = data["micro_batch_size_per_gpu"]
        if len(order) % size:
            expected = f"a divisor of the {len(order)} samples of a mini-batch and GPU"
            raise ValueError(explain("micro_batch_size_per_gpu", expected, size))
        parts, divided = with_trunks([order[at : at + size] for at in range(0, len(order), size)])
        order = [index for part in parts for index in part]
        return Grouped([*map(selected, parts)], None, order, None, divided)
    is_refused, is_wanted = largest_of_ranks((reason is not None, wants), dp_group)
    if is_refused or not is_wanted:
        return None
    budget = int(data["max_token_len_per_gpu"]) * tu.get_non_tensor_data(data, "sp_size", 1)

    def fill() -> tuple[list[list[int]], list[list[int]]]:
        if trunks is None:
            own = split_by_token_budget(tree, max_tokens=budget)
        else:
            own = split_with_trunks(tree, budget, trunks)
        parts = parts_of(own, together)
        return parts + parts_of(split_by_token_budget(lonely, max_tokens=budget), apart), groups()

    try:
        parts = on_equal_terms(fill, dp_group, multiple)
    except SharedPromptError as error:
        settings = (
            "ppo_max_token_len_per_gpu (of log-probabilities log_prob_max_token_len_per_gpu, of critics "
            "ppo_infer_max_token_len_per_gpu), times the sequence-parallel ranks"
        )
        raise ValueError(f"{settings}, must hold the longest sequence, and each rank enough of them: {error}") from None
    parts, divided = with_trunks(parts, budget)
    return Grouped([*map(selected, parts)], parts, None, budget, divided)
