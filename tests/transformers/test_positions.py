# SPDX-License-Identifier: BSD-3-Clause
"""A layout reaches a model together with the positions and labels of its batch, or the forward raises."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
import weakref

import pytest
import torch
from calls import Operators
from sweep import any_model
from tiny_models import (
    MIXED,
    VERSION,
    Samples,
    check_equal,
    dualkv,
    replicated_logps,
    row_of,
    stock_twin,
    tiny_model,
)

from flash_attn_dualkv import (
    SharedPromptError,
    SharedPromptLayoutError,
    pack_jagged,
    pack_padded,
    pack_prefix_tree,
    pack_shared_prompts,
)
from flash_attn_dualkv.host import to_device
from flash_attn_dualkv.integrations.transformers.admission import check

BATCH = MIXED.pack()
POSITIONS = "position_ids: expected (those of the layout's batch|batch.position_ids)"
LABELS = "labels: expected shift_labels=batch.labels"


def call(model, batch=BATCH, **inputs):
    return model(batch.input_ids[None], use_cache=False, shared_prompt_layout=batch.layout, **inputs)


@pytest.fixture(params=["nothing", "hook", "expectation", "both"])
def guarded(request):
    """Makes a call under one of the guards, or under none."""

    def run(model, *args, **inputs):
        if request.param in ("hook", "both"):
            dualkv.install_layout_hook(model)
        if request.param in ("nothing", "hook"):
            return call(model, *args, **inputs)
        with dualkv.expect_shared_prompt(BATCH.layout, 2):
            return call(model, *args, **inputs)

    return run


def test_no_positions(guarded):
    """The model counts the rows of the pack: log-probabilities would be off by several nats."""
    with pytest.raises(SharedPromptLayoutError, match=POSITIONS):
        guarded(tiny_model("llama"))


def test_positions_of_another_batch_of_equal_length(guarded):
    """The same lengths in another order have the same number of rows; the same lengths even the same positions."""
    others = MIXED.take([5, 4, 3, 2, 1, 0]).pack(), MIXED.pack()
    for other in others:
        assert other.layout.num_tokens == BATCH.layout.num_tokens
        with pytest.raises(SharedPromptLayoutError, match=POSITIONS):
            guarded(tiny_model("llama"), position_ids=other.position_ids[None])
    assert torch.equal(others[1].position_ids, BATCH.position_ids)


def test_labels_that_the_model_would_shift(guarded):
    model = tiny_model("llama")
    positions = dict(position_ids=BATCH.position_ids[None])
    with pytest.raises(SharedPromptError, match=LABELS):
        guarded(model, **positions, labels=BATCH.labels[None])
    loss = guarded(model, **positions, labels=BATCH.labels[None], shift_labels=BATCH.labels[None]).loss
    expected, _ = replicated_logps(stock_twin(model), MIXED)
    # The first tokens of responses have a label too: the batch is packed with boundary "replicate".
    assert loss.item() == pytest.approx(-expected.mean().item(), abs=1e-6)
    assert isinstance(model.loss_function(torch.zeros(1, 3, 97), torch.zeros(1, 3).long(), 97), torch.Tensor)


def test_positions_given_by_position(guarded):
    """The hook looks at arguments without names too."""
    model = tiny_model("llama")
    dualkv.install_layout_hook(model)
    inputs = dict(use_cache=False, shared_prompt_layout=BATCH.layout)
    model(BATCH.input_ids[None], None, BATCH.position_ids[None], **inputs)
    with pytest.raises(SharedPromptLayoutError, match=POSITIONS):
        model(BATCH.input_ids[None], None, BATCH.position_ids[None] + 0, **inputs)


@pytest.mark.parametrize("shape", [(-1,), (1, -1)])
def test_positions_of_ones_own_for_text(shape):
    """One dimension, or the form of several: the guards know both."""
    model = tiny_model("llama")
    whole = [torch.arange(len(one) + len(other)) for one, other in zip(MIXED.prompts, MIXED.responses)]
    batch = MIXED.pack(row_values={"position_ids": [one.view(shape) for one in whole]})
    got, expected = (dualkv.shared_prompt_forward(model, one)[0] for one in (batch, BATCH))
    assert torch.equal(got, expected)
    inputs = dualkv.row_inputs(model, batch)
    assert inputs["position_ids"].shape == (1, batch.layout.num_tokens)
    with pytest.raises(SharedPromptLayoutError, match=NO_LAYOUT):
        model(**{**inputs, "shared_prompt_layout": None})


FOUR_ROWS = pack_shared_prompts([[5, 6]] * 2, [[7], [8]], boundary="gather")  # as many as the model has heads


@pytest.mark.parametrize("hooked", [False, True])
def test_positions_without_the_dimension_of_rows(hooked):
    """They would be broadcast over heads, silently where there are as many of these as rows; else RoPE stumbles."""
    model = tiny_model("llama", num_key_value_heads=4)
    if hooked:
        dualkv.install_layout_hook(model)
    for batch in (FOUR_ROWS, BATCH):
        own = batch.position_ids
        for positions in (own, own[:, None], own.expand(2, -1)):
            with pytest.raises(SharedPromptLayoutError, match=POSITIONS):
                call(model, batch, position_ids=positions)
        call(model, batch, position_ids=own[None])


# --- positions without a layout ---------------------------------------------------------------------------------------

NO_LAYOUT = "shared_prompt_layout: expected batch.layout beside the positions of its packed row"
TREE = pack_prefix_tree([[5, 6, 7, 8], [5, 6, 9]], min_shared=1)
# How callers hand a batch's positions on, all of them views or the tensor itself.
VIEWS = {
    "[None]": lambda positions: positions[None],
    "unsqueeze": lambda positions: positions.unsqueeze(0),
    "view": lambda positions: positions.view(1, -1),
    "expand": lambda positions: positions.expand(1, -1),
    "a view of a view": lambda positions: positions[None][:, :],
    "contiguous": lambda positions: positions[None].contiguous(),
    "to": lambda positions: positions[None].to("cpu", torch.int64),
}
BATCHES = {
    "packed": lambda: BATCH,
    "gather": lambda: MIXED.pack(boundary="gather"),
    "padded": lambda: MIXED.pack(pad_to_multiple_of=16),
    "tree": lambda: TREE,
    "deepcopy": lambda: copy.deepcopy(BATCH),
    "pickle": lambda: pickle.loads(pickle.dumps(TREE)),
    "replace": lambda: dataclasses.replace(BATCH, targets=BATCH.targets.clone()),
    "forms": lambda: pack_padded(torch.tensor([[5, 6, 7]] * 2), torch.ones(2, 3, dtype=torch.long), 2),
}


def without_layout(model, batch, positions, **options):
    return model(batch.input_ids[None], position_ids=positions, use_cache=False, **options)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("view", VIEWS)
def test_positions_of_a_batch_without_its_layout(view, hooked):
    model = tiny_model("llama")
    if hooked:
        dualkv.install_layout_hook(model)
    with pytest.raises(SharedPromptLayoutError, match=NO_LAYOUT):
        without_layout(model, BATCH, VIEWS[view](BATCH.position_ids))
    with torch.inference_mode(), pytest.raises(SharedPromptLayoutError, match=NO_LAYOUT):
        without_layout(model, BATCH, VIEWS[view](BATCH.position_ids))


@pytest.mark.parametrize("attention", ["dualkv", "sdpa"])
@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("padding", [None, 0, 3])
def test_a_mask_that_transformers_makes_stands_for_no_layout(attention, use_cache, padding, restored_registry):
    """It is made of positions, without a cache, or of padding, T x T, and knows nothing of sharing."""
    dualkv.wrap("sdpa")
    model = tiny_model("qwen3", attention=attention)
    mask = None if padding is None else (torch.arange(BATCH.layout.num_tokens) >= padding)[None].long()
    row = row_of(BATCH, use_cache=use_cache, attention_mask=mask, shared_prompt_layout=None)
    with pytest.raises(SharedPromptLayoutError, match=NO_LAYOUT):
        model(**row)


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("form", BATCHES)
def test_positions_of_any_batch_are_known(form, hooked):
    model, batch = tiny_model("qwen3"), BATCHES[form]()
    if hooked:
        dualkv.install_layout_hook(model)
    with pytest.raises(SharedPromptLayoutError, match=NO_LAYOUT):
        without_layout(model, batch, batch.position_ids[None])
    if hooked:
        with pytest.raises(SharedPromptLayoutError, match=IDS_ALONE):
            model(batch.input_ids[None], use_cache=False)
    call(model, batch, position_ids=batch.position_ids[None])
    if batch.position_ids is not BATCH.position_ids and len(batch.position_ids) == len(BATCH.position_ids):
        with pytest.raises(SharedPromptLayoutError, match=POSITIONS):
            call(model, batch, position_ids=BATCH.position_ids[None])


def test_positions_that_only_look_alike():
    """Copies are not known."""
    model = tiny_model("llama")
    dualkv.install_layout_hook(model)
    copied = dataclasses.replace(BATCH, input_ids=BATCH.input_ids.clone())
    without_layout(model, copied, BATCH.position_ids[None].clone())
    # Other tensors of a batch lie in the same buffer.
    without_layout(model, copied, BATCH.multiplicity[None])
    alive = weakref.ref(MIXED.pack().position_ids)
    assert alive() is None  # nothing keeps the positions of a batch


@pytest.mark.parametrize("attention", ["dualkv", "sdpa"])
@pytest.mark.parametrize("hooked", [False, True])
def test_a_mask_of_ones_own_may_stand_for_the_layout(attention, hooked, restored_registry):
    """Rows that see what the layout would let them see, in a mask of all pairs."""
    dualkv.wrap("sdpa")
    model = tiny_model("llama", attention=attention)
    if hooked:
        dualkv.install_layout_hook(model)
    prompt, batch = [5, 6, 7], pack_shared_prompts([[5, 6, 7]] * 2, [[1, 2], [3]], boundary="gather")
    sees = torch.ones(6, 6).tril().bool()
    sees[5, 3:5] = False
    got = without_layout(model, batch, batch.position_ids[None], attention_mask=sees[None, None]).logits
    expected = model(torch.tensor([[*prompt, 3]]), use_cache=False).logits
    check_equal(got[0, 5], expected[0, 3], 1e-7)
    for mask in (torch.ones(1, 6), None):
        with pytest.raises(SharedPromptLayoutError, match=NO_LAYOUT):
            without_layout(model, batch, batch.position_ids[None], attention_mask=mask)


def test_known_positions_can_be_saved_alone():
    stream = io.BytesIO()
    torch.save(BATCH.position_ids, stream)
    stream.seek(0)
    assert torch.equal(torch.load(stream, weights_only=True), BATCH.position_ids)


# --- ids of another batch, and ids alone ------------------------------------------------------------------------------

OTHER_IDS = "input_ids: expected those of the layout's batch, batch.input_ids.None., got those of another batch"
IDS_ALONE = "shared_prompt_layout: expected batch.layout beside the ids of its packed row, got none"
# What stands for the same memory, and what does not.
VIEWS_OF_IDS = {
    **VIEWS,
    "detach": lambda ids: ids.detach()[None],
    "data": lambda ids: ids.data[None],
    "a view of a detached view": lambda ids: ids[None].detach()[:, :],
}
COPIES = {
    "clone": lambda ids: ids[None].clone(),
    "sum": lambda ids: ids[None] + 0,
    "int32": lambda ids: ids[None].int(),
}
SINGLE = pack_shared_prompts([[5, 6, 7]], [[8, 9]], pad_to_multiple_of=8)


@pytest.fixture
def hooked_model():
    model = tiny_model("llama")
    dualkv.install_layout_hook(model)
    return model


def others_with_equal_trees():
    """Other tokens, and the same lengths in the same order."""
    changed = Samples(MIXED.prompts, [[one % 90 + 3 for one in response] for response in MIXED.responses])
    return changed.pack(), copy.deepcopy(changed.pack()), pickle.loads(pickle.dumps(changed.pack())).to("cpu")


@pytest.mark.parametrize("view", VIEWS_OF_IDS)
def test_ids_of_another_batch(view, hooked_model):
    """Whose tree is the same, so that they fit: log-probabilities would be off by what the tokens differ."""
    own = dict(position_ids=BATCH.position_ids[None], shared_prompt_layout=BATCH.layout, use_cache=False)
    for other in others_with_equal_trees():
        assert other.layout.is_like(BATCH.layout) and not torch.equal(other.input_ids, BATCH.input_ids)
        with pytest.raises(SharedPromptLayoutError, match=OTHER_IDS):
            hooked_model(VIEWS_OF_IDS[view](other.input_ids), **own)
    expected = hooked_model(BATCH.input_ids[None], **own).logits
    assert torch.equal(hooked_model(VIEWS_OF_IDS[view](BATCH.input_ids), **own).logits, expected)


@pytest.mark.parametrize("view", VIEWS_OF_IDS)
def test_ids_without_a_layout(view, hooked_model):
    ids = VIEWS_OF_IDS[view](BATCH.input_ids)
    for inputs in ({}, dict(attention_mask=torch.ones_like(ids)), dict(position_ids=torch.arange(ids.shape[1])[None])):
        with pytest.raises(SharedPromptLayoutError, match=IDS_ALONE):
            hooked_model(ids, use_cache=False, **inputs)
    with torch.inference_mode(), pytest.raises(SharedPromptLayoutError, match=IDS_ALONE):
        hooked_model(VIEWS_OF_IDS[view](BATCH.input_ids), use_cache=False)


@pytest.mark.parametrize("form", COPIES)
def test_copies_of_ids_are_not_known(form, hooked_model):
    """As docs/limits.md says."""
    hooked_model(COPIES[form](BATCH.input_ids), use_cache=False)
    hooked_model(**row_of(BATCH, input_ids=COPIES[form](others_with_equal_trees()[0].input_ids)))


def test_ids_that_need_no_layout(hooked_model):
    """One sequence is the same row with its layout and without."""
    expected = hooked_model(torch.tensor([[5, 6, 7, 8, 9]]), use_cache=False).logits
    got = hooked_model(SINGLE.input_ids[None], position_ids=SINGLE.position_ids[None], use_cache=False).logits
    check_equal(got[:, :5], expected, 1e-7)
    check_equal(hooked_model(**row_of(SINGLE)).logits[:, :5], expected, 1e-7)
    own = pack_shared_prompts([[1, 2, 3]] * 2, [[4, 5], [6, 7]], boundary="gather", pad_to_multiple_of=8)
    with pytest.raises(SharedPromptLayoutError, match=OTHER_IDS):
        hooked_model(**row_of(own, input_ids=SINGLE.input_ids[None]))


def test_ids_whose_batch_is_gone(hooked_model):
    """What lies in memory where the ids of a batch were is no batch: nothing of it is kept."""
    addresses = set()
    for _ in range(20):
        batch = MIXED.pack()
        addresses |= {batch.input_ids.data_ptr(), batch.position_ids.data_ptr()}
        alive = weakref.ref(batch.input_ids)
        del batch
        assert alive() is None
    seen = 0
    for _ in range(20):
        rows = [torch.full((BATCH.layout.num_tokens,), 5) for _ in range(9)]
        for one in rows:
            seen += one.data_ptr() in addresses
            hooked_model(one[None], use_cache=False)
            hooked_model(**row_of(BATCH, input_ids=one[None]))
            hooked_model(torch.full_like(one, 6)[None], position_ids=one[None], use_cache=False)
    assert seen


def test_other_tensors_of_a_batch_are_no_ids(hooked_model):
    """They lie in one buffer after a copy to a device."""
    ids, positions, targets = to_device([BATCH.input_ids, BATCH.position_ids, BATCH.targets], torch.device("cpu"))
    assert ids.untyped_storage().data_ptr() == targets.untyped_storage().data_ptr()
    layout = dataclasses.replace(BATCH.layout, input_ids=ids, position_ids=positions)
    moved = dataclasses.replace(BATCH, input_ids=ids, position_ids=positions, layout=layout)
    hooked_model(**row_of(moved))
    hooked_model(targets[None], use_cache=False)
    with pytest.raises(SharedPromptLayoutError, match=IDS_ALONE):
        hooked_model(ids[None], use_cache=False)


# --- no false alarm ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation(reentrant, guarded):
    """A checkpointed layer runs again in the backward; what hooks for saved tensors give it there may be copies."""
    model = tiny_model("llama").train()
    model.gradient_checkpointing_enable(dict(use_reentrant=reentrant))
    model.enable_input_require_grads()
    with torch.autograd.graph.save_on_cpu():
        guarded(model, position_ids=BATCH.position_ids[None]).logits.sum().backward()
    assert all(one.grad is not None for one in model.model.parameters())


@pytest.mark.slow
def test_compiled_model():
    model = tiny_model("llama", dtype=torch.float32, num_hidden_layers=1)
    torch._dynamo.reset()
    expected = call(model, position_ids=BATCH.position_ids[None]).logits
    compiled = torch.compile(model, backend="eager")
    dualkv.install_layout_hook(compiled)
    with torch.no_grad(), dualkv.expect_shared_prompt(BATCH.layout, 1):
        got = call(compiled, position_ids=BATCH.position_ids[None]).logits
    check_equal(got, expected, 1e-5)
    # What looks at every module is not compiled for each.
    assert not torch._dynamo.eval_frame._debug_get_cache_entry_list(check._role.__wrapped__.__code__)


def test_compiled_without_a_layout():
    """One graph: the guard of a packed forward is none of it, where there is none."""
    model = tiny_model("llama", dtype=torch.float32, num_hidden_layers=2)
    torch._dynamo.reset()
    graphs = torch._dynamo.explain(model)(torch.arange(8)[None], use_cache=False)
    assert (graphs.graph_count, graphs.graph_break_count) == (1, 0), graphs.break_reasons


def test_compiled_step():
    """Scores and logits are computed as they are, and fullgraph says why not."""
    model, rows = tiny_model("llama", dtype=torch.float32, num_hidden_layers=1), BATCH.token_index

    def step(batch):
        (best,) = dualkv.shared_prompt_logits(model, batch, rows, lambda logits, at: (logits.argmax(-1),))
        return dualkv.shared_prompt_forward(model, batch)[0] * 2, best

    scores, best = step(BATCH)
    torch._dynamo.reset()
    got = torch.compile(step, backend="eager")(BATCH)
    check_equal(got[0], scores, 1e-5)
    assert torch.equal(got[1], best)
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"compile the model \(model.compile\(\)\)"):
        torch.compile(step, backend="eager", fullgraph=True)(BATCH)


def test_a_layout_that_is_rebuilt_or_goes_alone():
    """As FSDP1 rebuilds it; a layout without its batch says nothing of positions."""
    model = tiny_model("llama")
    rebuilt = dataclasses.replace(BATCH, layout=dataclasses.replace(BATCH.layout))
    call(model, rebuilt, position_ids=BATCH.position_ids.view(1, -1))
    alone = dataclasses.replace(BATCH, layout=pickle.loads(pickle.dumps(BATCH.layout)))
    call(model, alone, position_ids=BATCH.position_ids[None].clone())


def test_slices_of_positions():
    """Sequence parallelism gives every rank a part of the positions, and attention all rows."""
    half = BATCH.layout.num_tokens // 2
    for positions in (BATCH.position_ids[None, :half], BATCH.position_ids[None, half:].clone(), None):
        BATCH.layout.check_positions(positions)
    # Models with images have positions of three dimensions, which are not the batch's.
    BATCH.layout.check_positions(BATCH.position_ids.expand(3, 1, -1).clone())


def test_the_check_reads_no_values():
    """On a GPU it would wait for all that was launched before."""
    with Operators() as operators:
        BATCH.layout.check_positions(BATCH.position_ids)
        with pytest.raises(SharedPromptLayoutError, match=POSITIONS):
            BATCH.layout.check_positions(MIXED.pack().position_ids)
    assert not {"aten::_local_scalar_dense", "aten::equal"} & set(operators.names)


# --- what else does not reach the attention functions -----------------------------------------------------------------


def logits_of_last_rows(model, batch):
    return dualkv.shared_prompt_logits(model, batch, batch.last_rows, lambda logits, at: (logits[:, 0],))


def hooked_call(model, batch):
    hook = dualkv.install_layout_hook(model)
    try:
        model(**row_of(batch))
    finally:
        hook.remove()


@pytest.mark.parametrize("run", [dualkv.shared_prompt_forward, logits_of_last_rows, hooked_call])
@pytest.mark.parametrize("name", ["gpt2", "biogpt", "gptj", "llama"])
def test_sequences_beyond_the_table_of_positions(name, run):
    """Embeddings of positions, some with an offset, and buffers; RoPE has no table."""
    if VERSION < (5, 17) and name != "llama":
        pytest.skip("drops the layout in older versions")
    model = any_model(name, max_position_embeddings=24, n_positions=24)
    run(model, pack_shared_prompts([[5] * 22] * 2, [[6], [7, 8]]))
    longer = pack_shared_prompts([[5] * 23] * 2, [[6], [7, 8]])
    if name == "llama":
        run(model, longer)
        return
    expected = "batch: expected sequences of at most 24 tokens, as .* has no more positions, got 25"
    with pytest.raises(SharedPromptError, match=expected):
        run(model, longer)


def test_tokens_outside_the_vocabulary():
    """Where they are is known from packing: on a GPU the embedding would only say "device-side assert"."""
    model = tiny_model("llama")
    forms = (
        pack_shared_prompts([[96]], [[97, 2]]),
        pack_padded(torch.tensor([[500, 96, 97]]), torch.tensor([[0, 1, 1]]), 2),
        pack_jagged(torch.nested.nested_tensor([torch.tensor([96, 97])], layout=torch.jagged), [1]),
    )
    for batch in forms:
        assert batch.max_token == 97
        with pytest.raises(SharedPromptError, match="batch: expected token ids below 97, the vocabulary, got 97"):
            dualkv.shared_prompt_forward(model, batch)
