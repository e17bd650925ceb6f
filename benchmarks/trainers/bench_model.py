#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Measure a training step in stock transformers: log-probabilities of all responses, and all gradients.

    python benchmarks/trainers/bench_model.py                              # Qwen3-8B at 16 x 8K, 8 x 16K and 8 x 1K
    python benchmarks/trainers/bench_model.py --preset qwen3-0.6b
    python benchmarks/trainers/bench_model.py --preset tree --rounds 1  # Qwen3-1.7B on the agentic tree
    python benchmarks/trainers/bench_model.py --preset models              # gpt-oss, Gemma 3, Qwen3.5, DeepSeek-V3
    python benchmarks/trainers/bench_model.py --preset images              # Qwen3-VL-8B, tower included
    python benchmarks/trainers/bench_model.py --preset unread              # Gemma 4 E2B, with rows that nobody reads

All layers, bf16, random weights, activation checkpointing, the LM head in chunks over the response tokens; without
an optimizer. This library goes through `shared_prompt_forward`, as its README says. Peers of Qwen3 get one packed row
of the tokens that they compute through the same model on their attention, and the LM head over the same rows. Models of
models.py are compared with themselves as transformers offers them: batches of sequences, prompts replicated, padded on
the right, the longest first. No mask says what is padding: causal layers do not see what lies behind a token, and
without a mask attention has its fast kernels. Images in a prompt go through the tower once for each sequence there.

The forward keeps the input of each layer and no more: its time is that of log-probabilities without gradients. Peak
memory includes weights and gradients.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

sys.path.append(str(Path(__file__).resolve().parents[1]))

import command
from bench_layer import LayerRun
from measure import Config, Matmul
from models import UNREAD, FamilyModel, VisionModel, make_model
from packing import Attention, Prepared, first_copy, packed_positions, path_rows, response_rows, wide
from peers import Implementation, layer_implementations
from shapes import Shape

PEER = "benchmark_peer"  # transformers takes a name with "flash" in it for that of a package
ALL_ROWS = "_all_rows"  # this library, with rows that nobody reads in all layers
LATE_TYPES = {one.model_type for one in UNREAD.values()}
ROW_TILE = 128  # lengths of padded sequences are multiples of it
# Attention of stock models, and the key of ``PACKAGES`` that it needs.
STOCK: dict[str, str | None] = {"eager": None, "sdpa": None, "flash_attention_4": "fa4"}


Step = tuple[Callable[[], Tensor], Tensor]  # log-probabilities of one micro-batch, and which of all these are


def make_ids(shape: Shape, device: torch.device) -> tuple[Tensor, Tensor]:
    """Random token ids of the packed rows, and the gradient of every log-probability: random advantages."""
    generator = torch.Generator(device).manual_seed(0)
    reserved = 2 if isinstance(shape.model, VisionModel) else 0
    ids = torch.randint(shape.model.vocab - reserved, (shape.packed_tokens,), device=device, generator=generator)
    scored = sum(shape.responses)
    if isinstance(shape.model, VisionModel):
        tokens = math.prod(shape.model.grid) // 4
        for begin in (root + place for root in image_roots(shape) for place in shape.model.places):
            ids[begin : begin + tokens] = shape.model.placeholder
    return ids, torch.randn(scored, device=device, generator=generator) / scored


def image_roots(shape: Shape) -> list[int]:
    """The first row of each prompt."""
    return [begin for begin, (_, parent) in zip(shape.begins, shape.nodes) if parent < 0]


def make_images(shape: Shape, device: torch.device) -> list[dict[str, Tensor]]:
    """Random images of the prompt of each sequence, by the names of a model's inputs; none for a model of text."""
    model, found = shape.model, dict[int, dict[str, Tensor]]()
    if not isinstance(model, VisionModel):
        return []
    generator = torch.Generator(device).manual_seed(1)
    size = (len(model.places) * math.prod(model.grid), model.patch_values)
    grids = torch.tensor([model.grid] * len(model.places), device=device)
    roots = [shape.paths[leaf][0] for leaf in shape.leaves]
    for root in roots:
        if root not in found:
            found[root] = {
                "pixel_values": torch.randn(size, device=device, generator=generator),
                "image_grid_thw": grids,
            }
    return [found[root] for root in roots]


def pack(shape: Shape, ids: Tensor, chosen: Sequence[int] | None = None) -> Any:
    """The micro-batch as this library packs it, or some of its sequences; in a tree their last nodes are trained."""
    from flash_attn_dualkv import pack_prefix_tree, pack_shared_prompts

    pairs = [tuple(ids[rows.to(ids.device)] for rows in pair) for pair in response_rows(shape)]
    pairs = pairs if chosen is None else [pairs[index] for index in chosen]
    if not shape.is_tree:
        images = make_images(shape, ids.device)
        by_name = {name: [one[name] for one in images] for name in images[0]} if images else None
        return pack_shared_prompts(*map(list, zip(*pairs)), images=by_name)
    masks = [torch.cat([torch.zeros_like(above), torch.ones_like(own)]) for above, own in pairs]
    # The nodes as they are.
    return pack_prefix_tree([*map(torch.cat, pairs)], loss_mask=masks, min_shared=1, boundary="gather")


def shared_step(shape: Shape, ids: Tensor, model: Any, drop_unread: bool) -> Step:
    """This library, called as its README says."""
    from flash_attn_dualkv.integrations.transformers import shared_prompt_forward

    batch = pack(shape, ids)
    step = partial(shared_prompt_forward, model, batch, drop_unread=drop_unread)
    return lambda: step()[0], torch.arange(sum(shape.responses), device=ids.device)


def attend(
    attention: Attention, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any
) -> tuple[Tensor, None]:
    """A peer's attention as transformers calls one."""
    return attention(*(one[0].transpose(0, 1) for one in (q, k, v)))[None], None


def peer_step(shape: Shape, ids: Tensor, model: Any, rows: Tensor) -> Step:
    """The same with one packed row of the implementation's tokens."""
    rows = rows.to(ids.device)
    inputs = {"input_ids": ids[rows][None], "position_ids": packed_positions(shape).to(ids.device)[rows][None]}
    at, targets, which = scored_rows(shape, rows)
    return partial(log_probabilities, shape, model, inputs, at, ids[targets]), which


def stock_step(shape: Shape, ids: Tensor, model: Any, leaves: list[int], length: int) -> Step:
    """The stock model on one micro-batch: the sequences of these leaves, padded to a length."""
    sequences = [pad(rows, (0, length - len(rows)), value=shape.packed_tokens) for rows in path_rows(shape, leaves)]
    rows = torch.stack(sequences).to(ids.device)  # where a token is padding, the one behind all others
    at, targets, which = scored_rows(shape, rows.flatten())
    inputs = {"input_ids": torch.cat([ids, ids.new_zeros(1)])[rows]}
    if images := dict(zip(shape.leaves, make_images(shape, ids.device))):
        names = images[leaves[0]]
        inputs |= {name: torch.cat([images[leaf][name] for leaf in leaves]) for name in names}
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == shape.model.vocab - 1).long()
    return partial(log_probabilities, shape, model, inputs, at, ids[targets]), which


def log_probabilities(shape: Shape, model: Any, inputs: dict[str, Tensor], at: Tensor, targets: Tensor) -> Tensor:
    """Log-probabilities of the targets (n,) by rows ``at`` of the output; the LM head in checkpointed chunks."""
    from flash_attn_dualkv.scores import rows_of_a_chunk

    def of_chunk(rows: Tensor, wanted: Tensor) -> Tensor:
        logits = wide(model.lm_head(rows))
        return logits.gather(-1, wanted[:, None])[:, 0] - logits.logsumexp(-1)

    hidden = model.model(**inputs, use_cache=False).last_hidden_state.flatten(0, 1).index_select(0, at)
    size = rows_of_a_chunk(shape.model.vocab)
    chunks = zip(hidden.split(size), targets.split(size))
    return torch.cat([checkpoint(of_chunk, *chunk, use_reentrant=False) for chunk in chunks])


def scored_rows(shape: Shape, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Which of an implementation's ``rows`` score response tokens, the packed rows of those tokens, and which they are.

    The row in front of a token scores it: that of a response's first token is the last of its prompt, in any copy. One
    of several micro-batches has the tokens of some responses.
    """
    pairs = response_rows(shape)
    before = torch.cat([torch.cat([prompt[-1:], response[:-1]]) for prompt, response in pairs]).to(rows.device)
    targets = torch.cat([response for _, response in pairs]).to(rows.device)
    which = torch.isin(targets, rows).nonzero().view(-1)
    return first_copy(rows, shape.packed_tokens + 1)[before[which]], targets[which], which


def padded_batches(shape: Shape, device: torch.device) -> list[tuple[list[int], int]]:
    """Leaves from the longest sequence to the shortest, as many at a time as the family says, and their length."""
    assert isinstance(shape.model, FamilyModel)
    leaves, size = sorted(shape.leaves, key=lambda leaf: -shape.ends[leaf]), shape.model.sequences
    chosen = [leaves[begin : begin + size] for begin in range(0, len(leaves), size)]
    return [(one, -(-shape.ends[one[0]] // ROW_TILE) * ROW_TILE) for one in chosen]


class StepRun(LayerRun):
    """All measurements of one model's step over one micro-batch. All implementations share one model."""

    # Roundings to bf16 over 36 layers: shared and replicated prompts differ by 6 to 8% of the
    # spread on an H200.
    largest_difference = 0.1
    is_centred = True  # the common part, the logarithm of the vocabulary's size, would hide what attention adds

    def __init__(self, shape: Shape, implementations: list[Implementation], config: Config, matmul: Matmul) -> None:
        super().__init__(shape, implementations, config, matmul)
        self.model: Any = None
        if isinstance(shape.model, FamilyModel):
            self.largest_difference = shape.model.largest_difference

    def run(self) -> None:
        super().run()
        self.model = None
        self.config.clear()

    def model_on(self, attention: str) -> Any:
        if self.model is None:
            self.model = make_model(self.shape.model, attention, self.config.dtype, self.config.device)
        self.model.set_attn_implementation(attention)
        return self.model

    def prepared(self, impl: Implementation) -> Iterator[Prepared]:
        """The leaves are all parameters; rows of the output are scored tokens."""
        dout = make_ids(self.shape, self.config.device)[1]
        for run, scored in self.steps(impl):
            once = torch.ones_like(dout, dtype=torch.int64)
            yield Prepared(tuple(self.model.parameters()), dout[scored], run, scored, once)

    def steps(self, impl: Implementation) -> Iterator[Step]:
        from transformers import AttentionInterface, AttentionMaskInterface

        from flash_attn_dualkv.integrations.transformers import register

        shape, device = self.shape, self.config.device
        ids, _ = make_ids(shape, device)
        how = impl.arrange(shape, device)
        if impl.is_ours:
            register()
            yield shared_step(shape, ids, self.model_on("dualkv"), not impl.name.endswith(ALL_ROWS))
        elif impl.name.startswith("stock_"):
            name = impl.name.removeprefix("stock_").removesuffix("_replicated")
            for leaves, length in how:
                yield stock_step(shape, ids, self.model_on(name), leaves, length)
        else:
            AttentionMaskInterface.register(PEER, lambda *_, **options: None)
            for one in how:
                AttentionInterface.register(PEER, partial(attend, one.attention))
                yield peer_step(shape, ids, self.model_on(PEER), one.rows)


def implementations(kernels: str | None) -> list[Implementation]:
    """Ours first; peers of Qwen3, and other models as they are."""
    ours, *others = layer_implementations(kernels)
    keeping = replace(ours, name=f"{ours.name}{ALL_ROWS}")
    found = [ours, keeping.only(has_late_layers, "measured where rows leave before the last layers")]
    found += [one.only(lambda shape: not of_family(shape), "measured on Qwen3") for one in others]
    for name, package in STOCK.items():
        impl = Implementation(f"stock_{name}_replicated", padded_batches, package=package)
        found.append(impl.only(partial(of_family, attention=name), "measured on families that have it"))
    return found


def has_late_layers(shape: Shape) -> bool:
    """Whether the model is one of those that rows leave which score nothing."""
    return isinstance(shape.model, FamilyModel) and shape.model.model_type in LATE_TYPES


def of_family(shape: Shape, attention: str = "") -> bool:
    """Whether the model is one of models.py's families, and measured on that attention."""
    return isinstance(shape.model, FamilyModel) and (not attention or attention in shape.model.stock)


SETTINGS = {"target_ms": 250.0, "max_calls": 5, "rounds": 2}
BENCHMARK = command.Benchmark("model", __doc__ or "", implementations, run_type=StepRun, settings=SETTINGS)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
