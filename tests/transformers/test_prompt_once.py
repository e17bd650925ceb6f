# SPDX-License-Identifier: BSD-3-Clause
"""Gradients of batches in pieces equal those of the batch in one, and of each sequence by itself."""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cuts import random_cut
from hybrid_models import in_float64
from piece_runs import compare, expected_of, losses, turns, use_cut, whole
from sweep import CAUSAL_LMS, any_model, largest_error
from tiny_models import (
    EVERY_EXPERT,
    FAMILIES,
    MASKS,
    SEQUENCES,
    TOLERANCES,
    VERSION,
    Samples,
    check_equal,
    check_gradients,
    dualkv,
    gradients,
    replicated_logps,
    stock_twin,
    tiny_model,
    transformers,
)
from torch import Tensor

from flash_attn_dualkv import PackedBatch, SharedPromptError, pack_prefix_tree
from flash_attn_dualkv.data.parts import Cut, Piece, plan_parts, walk
from flash_attn_dualkv.integrations.transformers import prompt_once

GROUP = Samples.random([(30, [6, 9, 4, 8, 3]), (7, [5])])


@pytest.fixture
def cuts(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    return functools.partial(use_cut, monkeypatch)


def transcripts() -> PackedBatch:
    return pack_prefix_tree(SEQUENCES, loss_mask=MASKS, min_shared=1)


@pytest.mark.parametrize("keep", ["kv", "graph"])
@pytest.mark.parametrize("seed", range(8))
def test_random_cuts(seed: int, keep: str, cuts: Callable[..., None]) -> None:
    """Of sequences that leave each other anywhere, with scored tokens in trunks, and sequences that end there."""
    draw = random.Random(seed)
    batch = transcripts() if seed % 2 else GROUP.pack(boundary=draw.choice(["gather", "replicate"]))
    model = tiny_model(draw.choice(["qwen3", "mistral"])).train()
    if seed > 4:
        model.gradient_checkpointing_enable(dict(use_reentrant=seed > 6))
        model.enable_input_require_grads()
    cut = random_cut(draw, batch.layout.node_lens, batch.layout.node_parents, 3)
    while cut.is_whole:
        cut = random_cut(draw, batch.layout.node_lens, batch.layout.node_parents, 3)
    cuts(cut, keep)
    compare(model, batch, with_entropy=bool(seed & 2), temperature=0.7)


@pytest.mark.parametrize(
    "name", ["qwen3", "mistral", "gpt_oss", "gemma2", "gemma3n_text", "gemma4_text", "qwen3_moe", "deepseek_v3"]
)
def test_families(name: str, cuts: Callable[..., None]) -> None:
    """Windows, sinks, softcap, keys of other layers, experts, latent attention; a trunk in a trunk."""
    if name not in transformers.CONFIG_MAPPING:
        pytest.skip("this transformers has no such model")
    model = tiny_model(name, **EVERY_EXPERT.get(name, {})) if name in FAMILIES else any_model(name).double()
    batch, cut = turns()
    cuts(cut)
    compare(model.train(), batch, TOLERANCES[model.dtype].gradient)


@pytest.mark.slow
@pytest.mark.parametrize("name", CAUSAL_LMS)
def test_every_model(name: str, cuts: Callable[..., None]) -> None:
    """In float64 as exact as the batch in one pass, where that is not refused itself."""
    batch, cut = turns()
    cuts(cut)
    try:
        model = any_model(name).double().train()
        with in_float64():  # after the model's file was imported
            _, expected = expected_of(model, batch)
    except (SharedPromptError, NotImplementedError):
        pytest.skip("is refused in one pass, too")
    with in_float64():
        if name in ("diffllama", "dory", "zamba2"):
            with pytest.raises(SharedPromptError, match="layers that run once"):
                dualkv.shared_prompt_backward(model, batch, losses(batch), max_tokens=1)
        else:
            dualkv.shared_prompt_backward(model, batch, losses(batch), max_tokens=1)
            assert largest_error(gradients(model), expected) < 1e-11


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], ["k_proj"]])
def test_lora(targets: list[str], cuts: Callable[..., None]) -> None:
    """The first layer's keys (or values) need no gradient: nothing of a trunk's own may stand for what is kept."""
    peft = pytest.importorskip("peft")
    options = dict(r=4, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False)
    model = peft.get_peft_model(tiny_model("qwen3"), peft.LoraConfig(**options)).double()
    batch, cut = turns()
    cuts(cut)
    compare(model.train(), batch)


def test_only_the_values_of_the_first_layer(cuts: Callable[..., None]) -> None:
    model = tiny_model("qwen3").train()
    first = model.model.layers[0]
    for module in (model.model.embed_tokens, first.input_layernorm, first.self_attn.k_proj, first.self_attn.q_proj):
        module.requires_grad_(False)
    batch, cut = turns()
    cuts(cut)
    compare(model, batch)


def test_equals_each_sequence_alone(cuts: Callable[..., None]) -> None:
    model = tiny_model("qwen3").train()
    batch = GROUP.pack()
    cut = plan_parts(batch.tree, 30, kept=0.5, tile=8)
    assert sorted(bool(piece.parts) for piece in walk(cut.pieces)) == [False] * 4 + [True] * 2
    cuts(cut)
    found = dualkv.shared_prompt_backward(model, batch, losses(batch), max_tokens=1)
    got = gradients(model)
    twin = stock_twin(model)
    logps, _ = replicated_logps(twin, GROUP)
    losses(batch)(whole(batch, logps)).backward()
    check_equal(found.logps, logps.detach(), 1e-7)
    check_gradients(got, gradients(twin), 2e-6)


def rows_of_passes(model: Any) -> list[tuple[int, bool]]:
    """A list that gets the rows of each forward of a model, and whether it has gradients."""
    rows: list[tuple[int, bool]] = []
    model.model.embed_tokens.register_forward_hook(
        lambda module, args, output: rows.append((args[0].shape[1], torch.is_grad_enabled()))
    )
    return rows


@pytest.mark.parametrize(("keep", "spare"), [("auto", 130), ("auto", 70), ("kv", 130), ("graph", 70)])
def test_plans(keep: Any, spare: int) -> None:
    """What fits runs in one pass; else no pass has more rows than the budget, less what is kept."""
    model = tiny_model("qwen3").train()
    model.gradient_checkpointing_enable()
    cost = prompt_once.kept_cost(model)
    assert 0.05 < cost < 0.3
    batch = Samples.random([(40, [36, 29, 34, 38, 33])]).pack(boundary="gather")
    prompt, *lens = batch.layout.node_lens
    compare(model, batch, max_tokens=prompt + sum(lens))  # with its trial
    rows = rows_of_passes(model)
    dualkv.shared_prompt_backward(model, batch, losses(batch), max_tokens=prompt + sum(lens), keep=keep)
    assert rows == [(prompt + sum(lens), True)]
    gradients(model)
    compare(model, batch, max_tokens=prompt + spare, keep=keep)
    is_graph = keep == "graph" or (keep, spare) == ("auto", 130)
    # After the two above; the trunk is first, and last again where its graph was not kept.
    parts = rows[3 : None if is_graph else -1]
    assert rows[2] == (prompt, is_graph) and (is_graph or rows[-1] == (prompt, True))
    assert sum(count for count, _ in parts) == sum(lens)
    assert all(count <= spare + prompt * (1 - is_graph) - prompt * cost for count, _ in parts)
    with pytest.raises(SharedPromptError, match="max_tokens"):
        dualkv.shared_prompt_backward(model, batch, losses(batch), max_tokens=3)


def test_offloaded_keys_leave_room() -> None:
    """One layer's share of their cost counts, so that parts have more rows."""
    model = tiny_model("qwen3").train()
    batch, most = Samples.random([(40, [36, 29, 34, 38, 33])]).pack(boundary="gather"), 111
    with pytest.raises(SharedPromptError, match="offload: expected False, or a model with gradient checkpointing"):
        dualkv.shared_prompt_backward(model, batch, losses(batch), max_tokens=most, offload=True)
    model.gradient_checkpointing_enable()
    rows = rows_of_passes(model)
    largest = []
    for offload in (False, True):
        compare(model, batch, max_tokens=most, keep="kv", offload=offload)
        largest.append(max(count for count, _ in rows[1:]))
        rows.clear()
    cost, layers = prompt_once.kept_cost(model), len(model.model.layers)
    assert largest[0] <= most - 40 * cost < largest[1] <= most - 40 * cost / layers
    pieces = dualkv.Pieces(model, batch, plan_parts(batch.tree, most), offload=True)
    first = pieces.keys
    with torch.no_grad(), pieces.outermost.inner(0) as trunk:
        trunk.keep()
    assert pieces.keys is not first and pieces.keys.offload  # of the next trunk


class InterruptError(Exception):
    pass


def test_the_example_of_the_notes() -> None:
    page = Path(__file__).parents[2] / "docs/notes/prompt_once.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    batch = GROUP.pack()
    names = dict(model=tiny_model("qwen3"), batch=batch, advantages=torch.ones(6), **vars(dualkv))
    exec(example, names)
    assert names["scores"].logps.shape == batch.targets.shape


@pytest.mark.parametrize("where", ["forward", "loss", "backward"])
def test_a_part_that_raises(where: str, cuts: Callable[..., None]) -> None:
    """The error says which; the next step is right."""
    model = tiny_model("qwen3").train()
    batch, cut = turns()
    cuts(cut)
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise InterruptError("here")

    def loss_of(part: Any) -> Tensor:
        if where == "loss":
            count()
        return losses(batch)(part)

    def backward(loss: Tensor) -> None:
        if where == "backward":
            count()
        loss.backward()

    hook = model.model.layers[1].register_forward_hook(lambda *_: count() if torch.is_grad_enabled() else None)
    if where != "forward":
        hook.remove()
    dualkv.shared_prompt_forward(model, batch)  # with its trial
    calls = 0
    with pytest.raises(InterruptError) as caught:
        dualkv.shared_prompt_backward(model, batch, loss_of, max_tokens=1, backward=backward)
    told = getattr(caught.value, "__notes__", caught.value.args)[-1]
    assert "in part 0.1.0 (shared_prompt_backward): .grad has gradients of the passes before it" in told
    assert gradients(model)
    hook.remove()
    compare(model, batch)


def test_scaled_gradients(cuts: Callable[..., None]) -> None:
    """A loss scale multiplies each loss; what trunks are given has it already."""
    model = tiny_model("qwen3").train()
    batch = GROUP.pack(boundary="gather")  # prompts score the first tokens of responses
    cuts(plan_parts(batch.tree, 30, kept=0.5, tile=8))
    _, expected = expected_of(model, batch)
    backward = lambda loss: (loss * 1024).backward()  # noqa: E731
    dualkv.shared_prompt_backward(model, batch, losses(batch), max_tokens=1, backward=backward)
    check_gradients(gradients(model), {name: 1024 * own for name, own in expected.items()}, 1e-9)


def test_autocast(cuts: Callable[..., None]) -> None:
    """Weights that the first pass has cast have no gradients, and must not be those of the next."""
    model = tiny_model("qwen3", dtype=torch.float32).train()
    batch, cut = turns()
    cuts(cut)
    with torch.autocast("cpu", torch.bfloat16):
        logps, expected = expected_of(model, batch)
    with torch.autocast("cpu", torch.bfloat16):  # another one, whose cache is empty
        found = dualkv.shared_prompt_backward(model, batch, losses(batch), max_tokens=1)
    check_equal(found.logps, logps, 0.05)
    check_gradients(gradients(model), expected, 0.1)


def test_nan_stays_in_its_part(cuts: Callable[..., None]) -> None:
    model = tiny_model("qwen3").train()
    batch, cut = turns()
    cuts(cut)
    clean = dualkv.shared_prompt_forward(model, batch)[0].detach()
    with torch.no_grad():
        model.model.embed_tokens.weight[82] = float("nan")  # the last response's tokens
    found = dualkv.shared_prompt_backward(model, batch, losses(batch), max_tokens=1).logps
    own = batch.response_lens[-1]
    assert found[-own:].isnan().any() and not found[:-own].isnan().any()
    assert (found[:-own] - clean[:-own]).abs().max() < 1e-12


@pytest.mark.parametrize("what", ["weights", "mode"])
def test_a_second_pass_that_differs(what: str, cuts: Callable[..., None]) -> None:
    model = tiny_model("qwen3").train()
    batch, cut = turns()
    cuts(cut)

    def loss_of(part: Any) -> Tensor:
        if what == "weights":
            model.model.layers[0].self_attn.k_proj.weight.data[0, 0] += 1e-3
        else:
            model.model.layers[1].input_layernorm.variance_epsilon *= 1.5
        return part.logps.sum().detach() + 0 * part.logps.sum()

    with pytest.raises(SharedPromptError, match="the same bits in both passes of a trunk"):
        dualkv.shared_prompt_backward(model, batch, loss_of, max_tokens=1)
    gradients(model)
    dualkv.shared_prompt_backward(model, batch, loss_of, max_tokens=1, self_check=False)


def test_loops_of_ones_own() -> None:
    """Trunk, whose parts' backwards a loop calls; and what it notices."""
    model = tiny_model("qwen3").train()
    batch, cut = turns()
    loss_of = losses(batch)
    _, expected = expected_of(model, batch)

    pieces = dualkv.Pieces(model, batch, cut)

    def kept_rows() -> set[int]:
        return {len(kept.tensors[0]) for kept in pieces.keys._layers.values()}

    with pieces.outermost.inner(0) as trunk:
        trunk.keep()
        with trunk.part(0) as part:
            loss_of(part).backward()
        with trunk.inner(1) as inner:
            inner.keep()
            for index in range(inner.num_parts):
                with inner.part(index) as part:
                    loss_of(part).backward()
            assert kept_rows() == {inner.rows}
            inner.finish(loss_of).backward()
        assert inner.rows > trunk.rows
        trunk.finish().backward()
        assert kept_rows() == {trunk.rows}
    check_gradients(gradients(model), expected, 1e-9)


@pytest.mark.skipif("gemma4_text" not in transformers.CONFIG_MAPPING, reason="this transformers has no Gemma 4")
def test_layers_that_share_keys_keep_them_once() -> None:
    model = tiny_model("gemma4_text").train()
    batch, cut = turns()
    pieces = dualkv.Pieces(model, batch, cut)
    pieces.outermost.inner(0).keep()
    assert [*pieces.keys._layers] == ["sliding_attention", "full_attention"]  # of 4 layers


@torch.no_grad()
def test_scores_alone() -> None:
    """Of a model that has the layout's hook, without gradients: no backward, and nothing to finish."""
    model = tiny_model("qwen3").train()
    dualkv.install_layout_hook(model)
    batch, cut = turns()
    expected, _ = dualkv.shared_prompt_forward(model, batch)
    found = torch.zeros_like(expected)
    with dualkv.Pieces(model, batch, cut).outermost.inner(0) as trunk:
        trunk.keep()
        with trunk.inner(1) as inner:
            inner.keep()
            for one, index in ((trunk, 0), (inner, 0), (inner, 1)):
                with one.part(index) as part:
                    found[part.tokens] = part.logps
    check_equal(found, expected, 1e-12)


def test_loops_that_forget() -> None:
    """What a trunk notices."""
    model = tiny_model("qwen3").train()
    batch, cut = turns()
    flat = Cut(cut.node_lens, cut.node_parents, (Piece((0,), (Piece((1,)), Piece((2, 3, 4, 5)))),))

    def run(backwards: list[int], *, finishes: bool = True) -> None:
        with dualkv.Pieces(model, batch, flat).outermost.inner(0) as trunk:
            trunk.keep()
            for index, times in enumerate(backwards):
                with trunk.part(min(index, 1)) as part:
                    for time in range(times):
                        losses(batch)(part).backward(retain_graph=time == 0)
            if finishes:
                trunk.finish().backward()

    run([1, 1])
    with pytest.raises(SharedPromptError, match=r"finish\(\) and its backward before the trunk is left"):
        run([1, 1], finishes=False)
    with pytest.raises(SharedPromptError, match=r"all 2 parts before finish\(\), got none of \[1\]"):
        run([1])
    with pytest.raises(SharedPromptError, match="a part that has not run"):
        run([1, 1, 1])
    for times in (0, 2):
        with pytest.raises(SharedPromptError, match=f"gradients of layer .: expected one .*, got {times} of part 1"):
            run([1, times])
    trunk = dualkv.Pieces(model, batch, cut).outermost.inner(0)
    with pytest.raises(SharedPromptError, match="one that is kept, got new"), trunk.part(0):
        pass
    with pytest.raises(SharedPromptError, match="no trunk"), trunk.part(1):
        pass
    with pytest.raises(SharedPromptError, match="a part that is a trunk"):
        trunk.inner(0)


def test_what_is_refused(cuts: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("qwen3").train()
    batch, cut = turns()
    cuts(cut)
    backward = dualkv.shared_prompt_backward
    for loss in (1.0, torch.zeros(2)):
        with pytest.raises(SharedPromptError, match="loss_of: .* a tensor of one number"):
            backward(model, batch, lambda part, loss=loss: loss, max_tokens=1)
    with pytest.raises(SharedPromptError, match="values: expected shape"):
        backward(model, batch, lambda part: part.unpack(part.logps[1:]).sum(), max_tokens=1)
    with pytest.raises(SharedPromptError, match="keep"):
        backward(model, batch, losses(batch), max_tokens=1, keep="bits")  # type: ignore[arg-type]
    with pytest.raises(SharedPromptError, match="loss_of: expected a function"):
        backward(model, batch, None, max_tokens=1)  # type: ignore[arg-type]
    with pytest.raises(SharedPromptError, match="grad mode"), torch.no_grad():
        backward(model, batch, losses(batch), max_tokens=1)
    with pytest.raises(SharedPromptError, match="cut: expected one of the batch's"):
        dualkv.Pieces(model, batch, Cut((3, 2), (-1, 0), (Piece((0,), (Piece((1,)),)),)))
    monkeypatch.undo()  # the plan is asked
    model.model.layers[0].self_attn.q_proj.weight.ds_id = 0
    with pytest.raises(NotImplementedError, match="no DeepSpeed engine"):
        backward(model, batch, losses(batch), max_tokens=30)
    rope = dict(rope_type="dynamic", factor=2.0, rope_theta=1e4)
    options = {"rope_parameters" if VERSION >= (5, 0) else "rope_scaling": rope, "max_position_embeddings": 32}
    dynamic = tiny_model("llama", **options)
    with pytest.raises(NotImplementedError, match="as angles of RoPE follow the longest one"):
        backward(dynamic, batch, losses(batch), max_tokens=30)
