# SPDX-License-Identifier: BSD-3-Clause
"""Models whose layers lie on several devices, as accelerate places them: layouts, masks and scores follow the layers.

On the CPU accelerate's hooks run as they do between GPUs, with one device at both ends; what a layer on another GPU is
given (copies of all tensors, a layout that was moved) is made by a hook of our own. Two GPUs run the real thing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hybrid_models import KINDS, hybrid_model
from tiny_models import MIXED, Outcome, Samples, Tolerance, check_equal, dualkv, logps_of, row_of, tiny_model
from torch import Tensor, nn
from transformers.masking_utils import sdpa_mask

from flash_attn_dualkv import SharedPromptError, SharedPromptLayout, guard
from flash_attn_dualkv.integrations.transformers.masks import DeferredMask, deferred_mask

accelerate = pytest.importorskip("accelerate")
BATCH = MIXED.pack()
NAMES = ["llama", "qwen3", "gemma3_text", "gpt_oss", *KINDS]


def make(name: str, **options: Any) -> Any:
    return hybrid_model(name, **options) if name in KINDS else tiny_model(name, **options)


def scored(model: Any, batch: Any) -> Tensor:
    return dualkv.shared_prompt_forward(model, batch)[0]


def hooked(model: Any, batch: Any) -> Tensor:
    """A forward of one's own, for the same tokens."""
    handle = dualkv.install_layout_hook(model)
    logits = model(**row_of(batch)).logits.to(batch.token_index.device)
    handle.remove()
    return logps_of(logits.float() if logits.dtype == torch.bfloat16 else logits, batch)


FORWARDS = pytest.mark.parametrize("forward", [scored, hooked])


def results(forward: Callable[..., Tensor], model: Any, batch: Any) -> Outcome:
    values, found = Outcome.of(model, forward(model, batch))
    return Outcome(values.cpu(), {name: one.cpu() for name, one in found.items()})


@FORWARDS
@pytest.mark.parametrize("name", NAMES)
def test_hooks_of_accelerate(name: str, forward: Any) -> None:
    """On every block and on the model, as `dispatch_model` puts them there."""
    expected = results(forward, make(name), BATCH)
    model = make(name)
    blocks = {"": "cpu", **{one: "cpu" for one, _ in model.named_modules() if one.count(".") == 2 or one == "lm_head"}}
    accelerate.hooks.attach_align_device_hook_on_blocks(model, execution_device=blocks, offload=dict.fromkeys(blocks))
    assert hasattr(model.model.layers[0], "_hf_hook") and hasattr(model, "_hf_hook")
    results(forward, model, BATCH).check(expected, Tolerance(1e-6, 1e-6))


def as_elsewhere(given: Any) -> Any:
    """What `send_to_device` makes of an argument for a layer on another GPU, on the same one."""
    if isinstance(given, SharedPromptLayout):
        return dataclasses.replace(given, nodes=given.nodes.clone(), position_ids=None)
    if isinstance(given, DeferredMask):
        return given.to("cpu", non_blocking=True)
    if isinstance(given, tuple):
        return tuple(map(as_elsewhere, given))
    return given.clone() if isinstance(given, Tensor) else given


@FORWARDS
@pytest.mark.parametrize("name", NAMES)
def test_a_layer_gets_copies(name: str, forward: Any) -> None:
    expected = results(forward, make(name), BATCH)
    model = make(name)

    def move(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        return as_elsewhere(args), {key: as_elsewhere(one) for key, one in kwargs.items()}

    model.model.layers[1].register_forward_pre_hook(move, with_kwargs=True)
    results(forward, model, BATCH).check(expected, Tolerance(1e-6, 1e-6))


def test_offloaded_layers() -> None:
    """Parameters that come for a layer and go again, as with device_map="auto" on too small a GPU; no gradients."""
    expected = scored(tiny_model("llama"), BATCH).detach()
    model = tiny_model("llama")
    accelerate.cpu_offload(model, torch.device("cpu"))
    assert model.model.layers[1].mlp.up_proj.weight.is_meta
    with torch.no_grad():
        check_equal(scored(model, BATCH), expected, 1e-7)


# --- what follows its layer -------------------------------------------------------------------------------------------


def mask_of(**options: Any) -> Any:
    size = dict(q_length=4, kv_length=4, device=torch.device("cpu"))
    try:
        sdpa_mask(batch_size=1, **size, **options)
    except TypeError:  # older versions take the positions of the queries
        size = dict(cache_position=torch.arange(4), kv_length=4)
    return deferred_mask(1, **size, **options, local_size=2)


READS = [lambda mask: mask.to(torch.float32), lambda mask: torch.where(mask, 0.0, 1.0), lambda mask: mask.shape]


@pytest.mark.parametrize("read", READS)
def test_a_mask_that_is_read_elsewhere_is_read(read: Callable[[Any], Any]) -> None:
    """By a layer on one device, where a layer on another takes a layout."""
    mask = mask_of()
    read(mask.to("cpu"))
    with pytest.raises(SharedPromptError, match="one that computes with the mask itself"):
        mask.replace()
    mask = mask_of()
    mask.replace()
    with pytest.raises(SharedPromptError, match="one that computes with the mask itself"):
        read(mask.to("cpu"))


@pytest.mark.parametrize("name", ["to", "cuda", "numpy", "detach", "no_such_thing"])
def test_wrappers_may_ask_what_a_mask_is(name: str) -> None:
    """`hasattr` in a forward that expects its layout is no use of the mask."""
    mask = mask_of()
    with dualkv.expect_shared_prompt(BATCH.layout, 1):
        hasattr(mask, name)
        mask.replace()
        guard.consume(nn.Linear(1, 1), BATCH.layout)


# --- two GPUs ---------------------------------------------------------------------------------------------------------

WIDE = dict(hidden_size=256, intermediate_size=512, num_attention_heads=8, head_dim=64)
SAMPLES = Samples.random([(130, [65, 30, 1]), (40, [90])]).take([3, 0, 2, 1])


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@FORWARDS
@pytest.mark.parametrize("owner", [0, 1])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", *KINDS])
def test_layers_on_two_gpus(name: str, owner: int, forward: Any) -> None:
    """The first layer on one GPU, all that follows on the other; the head with the embeddings on either."""
    options = WIDE if name in ("llama", "qwen3") else {}
    if name == "gemma3_text":
        options = {**WIDE, "query_pre_attn_scalar": 64}
    batch = SAMPLES.pack(device="cuda:0")
    expected = results(forward, make(name, dtype=torch.bfloat16, **options).to("cuda:0"), batch)
    model = make(name, dtype=torch.bfloat16, **options)
    last = len(model.model.layers) - 1
    places = {"lm_head": owner, **{f"model.{one}": 1 for one, _ in model.model.named_children() if one != "layers"}}
    places |= {f"model.layers.{index}": index == last for index in range(last + 1)}
    places = {one: int(place) for one, place in places.items()}
    embeddings = next(one for one, module in model.named_modules() if module is model.get_input_embeddings())
    model = accelerate.dispatch_model(model, {**places, embeddings: 0}, main_device=0)
    assert {one.device.index for one in model.parameters()} == {0, 1}
    results(forward, model, batch).check(expected, Tolerance(1e-2, 5e-2))


@pytest.mark.parametrize("place", ["cpu", "meta"])
def test_a_batch_on_meta(place):
    """It was packed for shapes alone, or moved with them: nothing of it can be computed, nor tried."""
    model = tiny_model("llama").to(place)
    batch = MIXED.pack()
    for one in (batch.to("meta"), MIXED.pack(device="meta")):
        with pytest.raises(SharedPromptError, match="^batch: expected inputs that have values .*, got one on meta"):
            dualkv.shared_prompt_forward(model, one)
    dualkv.install_layout_hook(model)
    inputs = dict(input_ids=one.input_ids[None], position_ids=one.position_ids[None], use_cache=False)
    with pytest.raises(SharedPromptError, match="got one on meta"):
        model(**inputs, shared_prompt_layout=one.layout)
