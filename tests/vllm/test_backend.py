# SPDX-License-Identifier: BSD-3-Clause
"""The plug-in on the code of the installed vLLM: its classes, metadata builder and layers, without a GPU."""

from __future__ import annotations

import dataclasses
import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: .ci/run puts its Python code on the path")

import vllm_steps as steps
from vllm.sampling_params import SamplingParams
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends import flash_attn, utils
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.worker import gpu_input_batch, gpu_model_runner
from vllm.v1.worker.gpu import input_batch, model_runner, states
from vllm.v1.worker.utils import AttentionGroup
from vllm_steps import DECODING, PREFILL, Calls, Layer, Request, run, speculator

from flash_attn_dualkv.integrations.common.patching import stock_of
from flash_attn_dualkv.integrations.engines.settings import FIRST_PROMPT
from flash_attn_dualkv.integrations.vllm import backend, prompts, sharing, versions

# --- decoding -------------------------------------------------------------------------------------


def test_decoding(calls: Calls) -> None:
    layer = Layer()
    with torch.inference_mode():  # as vLLM runs it
        builder = steps.builder(layer)
        out = run(layer, builder, DECODING)
    again = run(layer, builder, DECODING[::-1], padded=8)  # as in a CUDA graph, whose last requests have no keys
    assert not calls.rows and out.shape[0] == 6 and again.shape[0] == 8
    assert builder._sharing.statistics.steps == {"decode": 2}


MIXED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # attributes of the layer, changes of the configuration
    "plain": ({}, {}),
    "a window": (dict(sliding_window=(9, 0)), {}),
    "speculation": ({}, dict(threshold=4, use_v2_model_runner=False)),
    # Prompts run on vLLM's kernels and walks are divided, unless rows are to have the trainer's bits.
    "trainer": ({}, dict(additional_config={"flash_attn_dualkv": {"exact": "trainer"}})),
}


@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("name", MIXED)
def test_mixed_steps(name: str, heads_first: bool, calls: Calls) -> None:
    """Heads lie in front of rows or behind them, as vLLM's VLLM_KV_CACHE_LAYOUT has it: views of one shape."""
    attributes, changes = MIXED[name]
    layer = Layer(**attributes)
    if heads_first:
        layer.kv_cache = layer.kv_cache.transpose(-3, -2).contiguous().transpose(-3, -2)
    builder = steps.builder(layer, steps.config(**changes))
    some = DECODING
    if name == "speculation":
        assert builder.reorder_batch_threshold == 4
        some = [Request(one.keys, 1 + row % 4, one.prompt, one.pages) for row, one in enumerate(DECODING)]
    run(layer, builder, [*some, *PREFILL])
    assert calls.rows == ([] if name == "trainer" else [42])
    assert builder._sharing._plan.exact == ("split" if name in ("plain", "speculation") else "trainer")


@pytest.mark.parametrize("name", ["plain", "trainer"])
def test_steps_of_resumed_samples(name: str, calls: Calls) -> None:
    """Rows before and after the first prompt's end in one chunk; then the same request decodes, with the same cut."""
    layer = Layer()
    builder = steps.builder(layer, steps.config(**MIXED[name][1]))
    resumed = Request(64, 40, 30, [55, 56, 57, 58])
    run(layer, builder, [*DECODING, resumed])
    cuts = builder._sharing._plan.step.boundaries.tolist()
    assert (cuts.count(29), calls.rows) == ((1, []) if name == "trainer" else (0, [40]))
    run(layer, builder, [*DECODING, dataclasses.replace(resumed, queries=1)])
    assert builder._sharing._plan.step.boundaries.tolist().count(29) == 1


def test_steps_of_prompts_alone(calls: Calls) -> None:
    layer = Layer()
    run(layer, builder := steps.builder(layer), [*DECODING, *PREFILL])
    run(layer, builder, PREFILL)
    assert calls.rows == [42, 42]
    assert builder._sharing.statistics.steps == {"mixed": 1}
    assert builder._sharing.statistics.stock == {"prompts alone": 1}


def test_sinks_and_softcap() -> None:
    layer = Layer(sinks=torch.tensor([0.0, 2.0, -1.0, 4.0]), logits_soft_cap=0.5)
    run(layer, steps.builder(layer), DECODING)


def test_prompts_decide_where_requests_are_cut() -> None:
    layer = Layer()
    builder = steps.builder(layer)
    run(layer, builder, DECODING)
    step = builder._sharing._plan.step
    assert step.boundaries.tolist() == [one.prompt - 1 for one in DECODING]
    memory = step.boundaries.data_ptr()
    run(layer, builder, DECODING[::-1])
    step = builder._sharing._plan.step
    assert step.boundaries.tolist() == [one.prompt - 1 for one in DECODING[::-1]]
    assert step.boundaries.data_ptr() == memory, "graphs read the same memory"
    gathered = {"flash_attn_dualkv": {"boundary": "gather"}}
    builder = steps.builder(layer, steps.config(additional_config=gathered))
    run(layer, builder, DECODING)
    assert builder._sharing._plan.step.boundaries.tolist() == [one.prompt for one in DECODING]


def test_checked_contents_of_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """With DUALKV_DEBUG=1, requests as capture steps have them: unknown ones, or of no prompt, with a key each."""
    monkeypatch.setenv("DUALKV_DEBUG", "1")
    builder = steps.builder(Layer())
    builder.build_for_cudagraph_capture(steps.metadata([Request(1, 1, 0, [0]), Request(1, 1, 9, [0])]))
    assert builder._sharing._plan.step.boundaries.tolist() == [0, 8]
    common = steps.metadata([Request(1, 1, 0, [0]), Request(1, 1, 0, [0])])
    prompts.note(np.zeros(1, dtype=np.int32))
    builder.build_for_cudagraph_capture(common)
    assert builder._sharing._plan.step.boundaries.tolist() == [0, np.iinfo(np.int32).max]


# --- what is vLLM's own ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "changes", "attributes"),
    [
        ("decode context parallelism", {"parallel__decode_context_parallel_size": 2}, {}),
        ("dual batch overlap", {"parallel__use_ubatching": True}, {}),
        ("fast prefill", {"cache__kv_sharing_fast_prefill": True}, {}),
        ("a head dim of 80", {}, {"head_size": 80}),
        *[("reference sliding windows", {"model__rswa_window": 4}, {})] * steps.HAS_RSWA,
        ("in both directions", {"model__is_mm_prefix_lm": True}, {}),
        ("more than 4096 requests", {"scheduler__max_num_seqs": 5000}, {}),
        ("ALiBi", {}, {"alibi_slopes": [1.0]}),
        ("of the type encoder_only", {}, {"attn_type": AttentionType.ENCODER_ONLY.value}),
    ],
)
def test_reasons(reason: str, changes: dict[str, Any], attributes: dict[str, Any]) -> None:
    made = steps.config(**changes)
    found = backend.why_stock(made, Layer(**attributes))
    assert found is not None and reason in found


def test_stock_steps(calls: Calls) -> None:
    layer = Layer()
    layer.impl.kv_cache_dtype, layer.kv_cache_torch_dtype = "fp8", torch.uint8
    made = steps.builder(layer)
    assert "fp8" in made._sharing.lacking
    layer.impl.kv_cache_dtype = "auto"
    layer = Layer()
    builder = steps.builder(layer)
    run(layer, builder, DECODING, positions=None)  # as draft models are built
    common = steps.metadata(DECODING)
    assert not hasattr(builder.build_for_drafting(common, 0), backend._SHARED)
    assert hasattr(builder.build(0, common), backend._SHARED)
    assert not hasattr(builder.build(0, steps.metadata(DECODING, causal=False)), backend._SHARED)
    assert calls.rows == [6]
    assert not builder.use_cascade_attention()


def test_requests_that_vllm_divides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of local attention are rows of other block tables, whose requests are not the step's."""
    monkeypatch.setattr(utils, "async_tensor_h2d", lambda data, *_, **__: torch.as_tensor(data), raising=False)
    builder = steps.builder(Layer())
    chunks, _ = utils.make_local_attention_virtual_batches(32, steps.metadata([*DECODING, *PREFILL]), steps.PAGE)
    assert chunks.num_reqs > len(DECODING) + len(PREFILL)
    assert not hasattr(builder.build(0, chunks), backend._SHARED)
    assert builder._sharing.statistics.stock == {"a draft model, or requests that vLLM divides": 1}


def test_drafts_of_the_second_runner() -> None:
    """Where it keeps metadata of captures for the draft model, no step has a plan; the first runner's have."""
    keeps = versions.installed().keeps_captures
    for speculates in (False, True):
        for second in (False, True):
            made = steps.config(threshold=1 + speculates, use_v2_model_runner=second)
            reason = backend.why_stock(made, Layer())
            assert (reason is None) == (not (keeps and speculates and second))
            assert reason is None or "VLLM_USE_V2_MODEL_RUNNER=0" in reason


def test_what_kernels_lack(calls: Calls, warnings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that no plan can be made for stay vLLM's own, from the first step on, and every engine's log says why."""

    def refuse(*_: Any, **__: Any) -> None:
        raise NotImplementedError("head_dim: expected one of (64, 128, 256), got 80")

    monkeypatch.setattr(sharing, "SharedPrefixPlan", refuse)
    for engine in range(2):
        layer, made = Layer(), steps.config()
        for _ in range(2):  # of its block tables
            builder = steps.builder(layer, made)
            for _ in range(2):
                run(layer, builder, DECODING)
        assert calls.rows == [6] * 4 * (engine + 1)
        assert len(warnings) == engine + 1 and "head_dim" in warnings[engine]


def test_a_draft_of_other_heads(calls: Calls, warnings: list[str]) -> None:
    """Layers with the target's block table and other heads run on vLLM's own attention, and the target's do not."""
    target, draft, made = Layer(), Layer(num_heads=8, num_queries_per_kv=4), steps.config()
    layers = {"target.0": target, "target.1": Layer(), "draft": draft}
    builder = steps.builder(target, made, layers)
    run(target, builder, [*DECODING, *PREFILL])
    assert calls.rows == [42]
    metadata = builder.build(0, steps.metadata([*DECODING, *PREFILL]))
    steps.fill(draft, [*DECODING, *PREFILL])
    q, kv = (torch.zeros(48, heads, steps.HEAD_DIM, dtype=steps.DTYPE) for heads in (8, steps.KV_HEADS))
    draft.impl.forward(draft, q, kv, kv, draft.kv_cache, metadata, torch.empty_like(q))
    assert calls.rows == [42, 48]
    assert len(warnings) == 1 and "1 layers run on vLLM's own attention: other sizes than 2" in warnings[0]


def test_schedules(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlashAttention makes no schedule of rows that decode, but looks for windows in its first step, where it would."""
    fast: list[tuple[int, bool]] = []
    stock = flash_attn.FlashAttentionMetadataBuilder.build

    def build(builder: Any, prefix: int, common: Any, fast_build: bool = False) -> Any:
        fast.append((common.num_reqs, fast_build))
        return stock(builder, prefix, common, fast_build)

    monkeypatch.setattr(flash_attn.FlashAttentionMetadataBuilder, "build", build)
    builder = steps.builder(Layer())
    for _ in range(2):
        builder.build(0, steps.metadata([*DECODING, *PREFILL]))
    assert fast == [(8, False), (2, False), (8, True), (2, False)]


# --- vLLM's own code around it --------------------------------------------------------------------


def test_seams_of_the_runners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts' lengths are where the plug-in looks for them, in the order of a step's requests."""
    assert "self.num_prompt_tokens = " in inspect.getsource(gpu_input_batch.InputBatch.__init__)
    assert "idx_mapping_np" in {one.name for one in dataclasses.fields(input_batch.InputBatch)}
    assert "self.prompt_len = UvaBackedTensor(" in inspect.getsource(states.RequestState.__init__)
    rows = SimpleNamespace(num_prompt_tokens=np.array([5, 6, 0]), req_ids=["a", "b"])
    first = SimpleNamespace(input_batch=rows, requests={})
    second = SimpleNamespace(req_states=SimpleNamespace(prompt_len=SimpleNamespace(np=np.array([7, 8, 9]))))
    batch = SimpleNamespace(idx_mapping_np=np.array([2, 0]))
    for module, name, runner, arguments, lengths in (
        (gpu_model_runner, "_build_attention_metadata", first, {"num_tokens": 2}, [5, 6, 0]),
        (model_runner, "prepare_attn", second, {"input_batch": batch}, [9, 7]),
    ):
        stock = getattr(module.GPUModelRunner, name)
        assert set(arguments) <= set(steps.parameters(stock)) | {"num_tokens"}
        monkeypatch.setattr(module.GPUModelRunner, name, lambda *_, **given: given)
        prompts.install()
        prompts.install()
        replaced = getattr(module.GPUModelRunner, name)
        assert replaced(runner, **arguments) in (arguments, {})
        noted = prompts.newest()
        assert noted is not None and noted.lengths.tolist() == lengths


def carrying(first: Any) -> SamplingParams:
    return SamplingParams(extra_args={FIRST_PROMPT: first, "another's": 1})


def test_prompts_of_resumed_samples_in_the_first_runner(monkeypatch: pytest.MonkeyPatch, warnings: list[str]) -> None:
    """Lengths of first prompts travel with vLLM's own parameters and states of requests, wherever rows move."""
    runners = gpu_model_runner.GPUModelRunner
    monkeypatch.setattr(runners, "_build_attention_metadata", lambda *_, **given: given)
    prompts.install()
    assert "sampling_params" in {one.name for one in dataclasses.fields(gpu_model_runner.CachedRequestState)}
    given = {"a": carrying(50), "b": SamplingParams(), "c": None, "d": carrying(61), "e": carrying("50")}
    runner = SimpleNamespace(
        input_batch=SimpleNamespace(num_prompt_tokens=np.array([60, 60, 60, 60, 60, 9]), req_ids=[*"abcde"]),
        requests={name: SimpleNamespace(sampling_params=params) for name, params in given.items()},
    )
    batch = runner.input_batch
    for names, totals, expected in (
        ("abcde", [60] * 5, [50, 60, 60, 60, 60]),
        ("bcaed", [60] * 5, [60, 60, 50, 60, 60]),
        ("bca", [70, 70, 70], [70, 70, 50]),
        ("bca", [70, 70, 40], [70, 70, 40]),
    ):
        batch.req_ids, batch.num_prompt_tokens[: len(totals)] = [*names], totals
        runners._build_attention_metadata(runner, num_tokens=1)
        noted = prompts.newest()
        assert noted is not None and noted.lengths[: len(names)].tolist() == expected
        assert batch.num_prompt_tokens[: len(names)].tolist() == totals, "vLLM's own"
    said = "extra_args['flash_attn_dualkv_first_prompt']: expected an int from 1 to the 60 tokens of the prompt, got "
    assert [said + got in text for got, text in zip(("61", "50"), warnings)] == [True, True]


def test_prompts_of_resumed_samples_in_the_second_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are read where vLLM takes up requests, whose rows others take later."""
    runners = model_runner.GPUModelRunner
    state = SimpleNamespace(prompt_len=SimpleNamespace(np=np.zeros(4, dtype=np.int32)), req_id_to_index={})

    def add(runner: Any, scheduler_output: Any) -> None:
        for request in scheduler_output.scheduled_new_reqs:
            state.req_id_to_index[request.req_id] = request.row
            state.prompt_len.np[request.row] = 60

    monkeypatch.setattr(runners, "add_requests", add)
    monkeypatch.setattr(runners, "prepare_attn", lambda self, input_batch: input_batch)
    prompts.install()
    runner = SimpleNamespace(req_states=state)
    assert {"req_id", "sampling_params"} <= {one.name for one in dataclasses.fields(NewRequestData)}
    for added, expected in (
        ([("a", 2, carrying(50)), ("b", 0, SamplingParams())], [50, 60]),
        ([("c", 1, carrying(40))], [50, 60]),
        ([("d", 2, None), ("e", 0, carrying(30))], [60, 30]),
    ):
        new = [SimpleNamespace(req_id=name, row=row, sampling_params=params) for name, row, params in added]
        runners.add_requests(runner, SimpleNamespace(scheduled_new_reqs=new))
        runners.prepare_attn(runner, SimpleNamespace(idx_mapping_np=np.array([2, 0])))
        noted = prompts.newest()
        assert noted is not None and noted.lengths.tolist() == expected


@pytest.mark.skipif(speculator is None, reason="vLLM 0.22's drafts in the second runner are refused")
def test_drafts_are_vllms_own(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builders that a speculator of the second runner makes have no plan, whatever metadata says; others do."""
    monkeypatch.setattr(speculator.DraftModelSpeculator, "set_attn", stock_of(speculator.DraftModelSpeculator.set_attn))
    layer = Layer()
    target, draft = steps.builder(layer), steps.builder(layer)
    group = AttentionGroup(backend.SharedPrefixBackend, [steps.NAME], draft.kv_cache_spec, 0)
    another = AttentionGroup(flash_attn.FlashAttentionBackend, ["another"], draft.kv_cache_spec, 0)
    group.metadata_builders, another.metadata_builders = [draft], [SimpleNamespace()]
    monkeypatch.setattr(speculator, "init_attn_backend", lambda *_, **__: ([[group], [another]], None, None))
    runs = SimpleNamespace(
        vllm_config=None, attn_vllm_config=None, device=None, draft_attn_layer_names=set(),
        _configure_decode_metadata_update=lambda: None,
    )  # fmt: skip
    given = [None] * (len(steps.parameters(speculator.DraftModelSpeculator.set_attn)) - 1)  # fewer before 0.26
    speculator.DraftModelSpeculator.set_attn(runs, *given)
    common = steps.metadata(DECODING)
    for build in (draft.build_for_cudagraph_capture, lambda one: draft.build(0, one)):
        assert not hasattr(build(common), backend._SHARED)
    assert hasattr(target.build_for_cudagraph_capture(common), backend._SHARED)
    run(layer, draft, DECODING)
    assert calls.rows == [6] and draft._sharing.lacking == "a draft model"
    assert draft._sharing.statistics.stock == {"a draft model": 3}
