# SPDX-License-Identifier: BSD-3-Clause
"""The plug-in on the code of the installed vLLM: its classes, metadata builder and layers, without a GPU."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
import math
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: .ci/run puts its Python code on the path")

import vllm.config.vllm
import vllm_steps as steps
from launches import DEVICE
from vllm.model_executor.layers import layernorm
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType
from vllm.v1.attention.backends import flash_attn, utils
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker import gpu_input_batch, gpu_model_runner, gpu_worker
from vllm.v1.worker.gpu import input_batch, model_runner, states
from vllm.v1.worker.gpu.attn_utils import build_attn_metadata
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.spec_decode import speculator
from vllm.v1.worker.utils import AttentionGroup
from vllm_steps import Calls, Layer, Request

import flash_attn_dualkv.integrations.vllm as plugin
from flash_attn_dualkv.decode import plan as plan_module
from flash_attn_dualkv.errors import SharedPromptError, SharedPromptUnsupportedError
from flash_attn_dualkv.integrations.replacing import stock_of
from flash_attn_dualkv.integrations.vllm import backend, log, prompts, selection, sharing, versions
from flash_attn_dualkv.integrations.vllm.settings import KEY, Settings, read_settings
from flash_attn_dualkv.integrations.vllm.statistics import Reading, Statistics, read_table

PROMPT = [3, 9, 5]
# Two groups of siblings and a request by itself, shuffled.
DECODING = [
    Request(60, 1, 50, [*PROMPT, 11]),
    Request(20, 1, 18, [40, 41]),
    Request(49, 1, 48, [*PROMPT, 12]),
    Request(33, 1, 32, [20, 21, 22]),
    Request(70, 1, 50, [*PROMPT, 13, 14]),
    Request(40, 1, 32, [20, 21, 23]),
]
PREFILL = [Request(37, 37, 37, [50, 51, 52]), Request(64, 5, 70, [55, 56, 57, 58])]


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the plug-in says in vLLM's log."""
    found: list[str] = []
    monkeypatch.setattr(selection, "_process", SimpleNamespace())
    monkeypatch.setattr(log.logger, "warning", lambda message, *rest: found.append(message % rest))
    return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Calls of vLLM's own attention, which a plain one stands for."""
    found = Calls()
    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", steps.flash_attention(found), raising=False)
    return found


def run(layer: Layer, builder: Any, requests: list[Request], padded: int | None = None, **changes: Any) -> torch.Tensor:
    """A step: output of its rows, each checked against plain attention."""
    common = steps.metadata(requests, padded, **changes)
    steps.fill(layer, requests)
    q = torch.randn(common.num_actual_tokens, steps.HEADS, steps.HEAD_DIM).to(steps.DTYPE)
    kv = torch.zeros(common.num_actual_tokens, steps.KV_HEADS, steps.HEAD_DIM).to(steps.DTYPE)
    out = torch.full_like(q, torch.nan)
    metadata = builder.build(0, common)
    assert layer.impl.forward(layer, q, kv, kv, layer.kv_cache, metadata, out) is out
    row, impl = 0, layer.impl
    options = impl.scale, impl.sliding_window[0], impl.logits_soft_cap, impl.sinks
    for one in requests:
        expected = steps.plain(q[row : row + one.queries], *steps.halves(layer.kv_cache), one, *options)
        torch.testing.assert_close(out[row : row + one.queries].double(), expected, atol=2e-2, rtol=2e-2)
        row += one.queries
    assert not out[row:].any() and not out.isnan().any()
    return out


# --- what vLLM is told ----------------------------------------------------------------------------


def test_registration() -> None:
    custom = AttentionBackendEnum.CUSTOM
    custom.clear_override()
    plugin.register()
    plugin.register()
    found = custom.get_class()
    assert found is backend.SharedPrefixBackend and AttentionBackendEnum[found.get_name()] is custom
    assert issubclass(found.get_impl_cls(), flash_attn.FlashAttentionImpl)
    assert issubclass(found.get_builder_cls(), flash_attn.FlashAttentionMetadataBuilder)
    assert found.supports_batch_invariance()
    builder = found.get_builder_cls()
    assert builder.get_cudagraph_support(None, None) is AttentionCGSupport.UNIFORM_BATCH
    assert not builder.supports_update_block_table, "a plan belongs to a block table"
    overrides = vllm.v1.attention.backends.registry._ATTN_OVERRIDES
    overrides[custom] = "another.Plugin"
    try:
        plugin.register()
        assert custom.get_path() == "another.Plugin"
    finally:
        custom.clear_override()


@pytest.mark.parametrize("is_late", [False, True])
def test_flag_beside_another_plugin(is_late: bool, warnings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """DUALKV_VLLM=1 asks for this backend: where another plug-in has CUSTOM, also later on, the log says so."""
    overrides, custom = vllm.v1.attention.backends.registry._ATTN_OVERRIDES, AttentionBackendEnum.CUSTOM
    monkeypatch.setattr(current_platform, "get_attn_backend_cls", lambda asked, *_, **__: str(asked), raising=False)
    try:
        custom.clear_override()
        if is_late:
            plugin.register()
        overrides[custom] = "another.Plugin"
        plugin.register()
        found = current_platform.get_attn_backend_cls
        assert found(custom, "dense") == str(custom) and found(None, "dense") == "None" and not warnings
        monkeypatch.setenv("DUALKV_VLLM", "1")
        for _ in range(2):
            assert found(None, "dense") == "None"
        assert len(warnings) == 1 and "DUALKV_VLLM=1 has no effect" in warnings[0]
        assert "another.Plugin" in warnings[0] and "VLLM_PLUGINS=flash_attn_dualkv" in warnings[0]
    finally:
        custom.clear_override()


@pytest.mark.parametrize("invariant", [False, True])
def test_norms_behind_residuals(invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In batch-invariant mode who takes the backend gets the kernel of norms alone behind the sum, put there once."""
    calls = []

    def stock(
        input: torch.Tensor, weight: torch.Tensor | None, eps: float = 1e-6, residual: torch.Tensor | None = None
    ) -> Any:
        calls.append(residual)
        normed = torch.nn.functional.rms_norm(input, input.shape[-1:], weight, eps)
        return normed if residual is None else (normed, residual)

    assert "rms_norm_batch_invariant" in layernorm.RMSNorm.forward_cuda.__code__.co_names
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(invariant)))
    monkeypatch.setattr(layernorm, "rms_norm_batch_invariant", stock)
    for _ in range(2):
        assert plugin.SharedPrefixBackend is backend.SharedPrefixBackend
    assert stock_of(layernorm.rms_norm_batch_invariant) is stock
    assert (layernorm.rms_norm_batch_invariant is stock) is not invariant
    if invariant:
        x, residual, weight = torch.randn(3, 8), torch.randn(3, 8), torch.rand(8)
        total = x + residual
        expected = stock(total, weight, 1e-5)
        torch.testing.assert_close(layernorm.rms_norm_batch_invariant(x, weight, 1e-5), stock(x, weight, 1e-5))
        out, added = layernorm.rms_norm_batch_invariant(x, weight, 1e-5, residual=residual)
        assert torch.equal(out, expected) and torch.equal(added, total)
        assert calls == [None] * 4, "the kernel that adds is not taken"


@pytest.mark.parametrize("version", ["0.25.1", "0.27.0", "1.0.0"])
def test_other_versions(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    plugin.register()  # does nothing to who does not ask for it
    try:
        with pytest.raises(SharedPromptUnsupportedError, match=rf"0\.24\.x or .* or 0\.33\.x for .*, got {version}"):
            AttentionBackendEnum.CUSTOM.get_class()
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()


def test_what_versions_differ_in() -> None:
    """The table says of the installed version what its code says."""
    found = versions.installed()
    assert found.packs_halves == (len(steps.cache_shape()) == 4) and found.has_rswa == steps.HAS_RSWA
    assert found.keeps_captures == ("attn_states" in steps.parameters(speculator.DraftModelSpeculator.capture))
    assert found.keeps_captures == (found is versions.SUPPORTED["0.24"])
    # Builders make plans where vLLM makes the cache, once it knows how many pages there are.
    source = inspect.getsource(gpu_worker.Worker.initialize_from_config)
    order = ("num_gpu_blocks = ", "_maybe_get_memory_pool_context(", "model_runner.initialize_kv_cache(")
    assert [*order] == sorted(order, key=source.index)
    assert "initialize_metadata_builders(" in inspect.getsource(gpu_model_runner.GPUModelRunner.initialize_kv_cache)
    assert " init_attn_backend(" in inspect.getsource(model_runner.GPUModelRunner.initialize_kv_cache)
    module, owner, method = found.wakes_by
    assert steps.parameters(getattr(getattr(importlib.import_module(module), owner), method)) == ["self", "tags"]
    cache = torch.arange(math.prod(steps.cache_shape())).view(steps.cache_shape())
    k, v = found.keys_and_values(cache, steps.HEAD_DIM)
    assert k.shape == v.shape == (steps.PAGES, steps.PAGE, steps.KV_HEADS, steps.HEAD_DIM)
    assert all(torch.equal(one, other) for one, other in zip((k, v), steps.halves(cache)))


def test_signatures() -> None:
    """Every method has the parameters of the one that it stands for."""
    for kind in (backend.SharedPrefixBackend, backend.SharedPrefixMetadataBuilder, backend.SharedPrefixImpl):
        for name, function in vars(kind).items():
            function = getattr(function, "__func__", function)
            if callable(function) and name not in ("use_cascade_attention", "refuse", "_unplanned"):
                assert steps.parameters(function) == steps.parameters(getattr(kind.__mro__[1], name)), name


# --- decoding -------------------------------------------------------------------------------------


def test_decoding(calls: Calls) -> None:
    layer = Layer()
    with torch.inference_mode():  # as vLLM runs it
        builder = steps.builder(layer)
        out = run(layer, builder, DECODING)
    again = run(layer, builder, DECODING[::-1], padded=8)  # as in a CUDA graph, whose last requests have no keys
    assert not calls.rows and out.shape[0] == 6 and again.shape[0] == 8
    assert builder._sharing.statistics.steps == {"decode": 2}


def test_memory_layouts(calls: Calls) -> None:
    """Heads in front of rows or behind them, as vLLM's VLLM_KV_CACHE_LAYOUT has it: views of one shape."""
    layer = Layer()
    heads_and_rows = (-3, -2)
    layer.kv_cache = layer.kv_cache.transpose(*heads_and_rows).contiguous().transpose(*heads_and_rows)
    assert not layer.kv_cache.is_contiguous()
    run(layer, steps.builder(layer), [*DECODING, *PREFILL])
    assert calls.rows == [42]


def test_mixed_steps(calls: Calls) -> None:
    layer = Layer()
    run(layer, builder := steps.builder(layer), [*DECODING, *PREFILL])
    assert calls.rows == [42]
    run(layer, builder, PREFILL)
    assert calls.rows == [42, 42]
    assert builder._sharing.statistics.steps == {"mixed": 1}
    assert builder._sharing.statistics.stock == {"prompts alone": 1}


def test_speculation(calls: Calls) -> None:
    layer = Layer()
    builder = steps.builder(layer, steps.config(threshold=4, use_v2_model_runner=False))
    assert builder.reorder_batch_threshold == 4
    some = [Request(one.keys, 1 + row % 4, one.prompt, one.pages) for row, one in enumerate(DECODING)]
    run(layer, builder, [*some, *PREFILL])
    assert calls.rows == [42]


def test_windows_and_trainer(calls: Calls) -> None:
    run(layer := Layer(sliding_window=(9, 0)), steps.builder(layer), [*DECODING, *PREFILL])
    assert calls.rows == [42]
    settings = {"flash_attn_dualkv": {"exact": "trainer"}}
    run(layer := Layer(), steps.builder(layer, steps.config(additional_config=settings)), [*DECODING, *PREFILL])
    assert calls.rows == [42]


@pytest.mark.parametrize("exact", ["trainer", None])
def test_divided_walks(exact: str | None, calls: Calls) -> None:
    """Walks are divided, and prompts run on vLLM's kernels, unless rows are to have the trainer's bits."""
    settings = {"flash_attn_dualkv": {"exact": exact}}
    builder = steps.builder(layer := Layer(), steps.config(additional_config=settings))
    run(layer, builder, [*DECODING, *PREFILL])
    assert builder._sharing._plan.exact == (exact or "split")
    assert calls.rows == ([] if exact == "trainer" else [42])


def test_plans_of_windows_have_no_room_for_splits(calls: Calls) -> None:
    """No launch divides a window: the plan of layers with windows alone is that of serial walks, with the same bits."""
    for window, exact in (((9, 0), "trainer"), ((-1, -1), "split")):
        builder = steps.builder(layer := Layer(sliding_window=window))
        run(layer, builder, [*DECODING, *PREFILL])
        plan = builder._sharing._plan
        assert plan.exact == exact and (plan.limits.split_keys == 0) == (exact == "trainer")
        assert not builder._sharing.settings.decodes_prompts, "prompts stay vLLM's"
    assert calls.rows == [42, 42]


def test_memory_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that runs out of memory for a plan says whose it is, and which of vLLM's settings make room."""

    def none_left(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("a SharedPrefixPlan takes 580 MiB.")

    monkeypatch.setattr(sharing, "SharedPrefixPlan", none_left)
    with pytest.raises(torch.OutOfMemoryError, match=r"^1 layers: .* 580 MiB\. In vLLM lower max_num_seqs, .* gpu_mem"):
        run(layer := Layer(), steps.builder(layer), DECODING)


def test_tables_of_any_width(calls: Calls, warnings: list[str]) -> None:
    """Plans have room for max_model_len: a table that is wider than the first step's, or than that, changes nothing."""
    builder = steps.builder(layer := Layer())
    wide = steps.metadata(DECODING).block_table_tensor
    for columns in (8, 12, 200):
        table = torch.cat([wide, torch.full((len(wide), 200), -7, dtype=torch.int32)], 1)[:, :columns]
        run(layer, builder, DECODING, block_table_tensor=table)
    assert not calls.rows and not warnings
    # vLLM has no longer ones. Where graphs hold the plan they would replay that of another step.
    captured = steps.builder(layer)
    captured.build_for_cudagraph_capture(steps.metadata(DECODING))
    for _ in range(2):
        run(layer, builder, DECODING, max_seq_len=1200)
    assert (
        calls.rows == [6, 6] and len(warnings) == 1 and "requests of 1200 keys, more than max_model_len" in warnings[0]
    )
    with pytest.raises(
        SharedPromptError, match=r"^max_seq_len: expected at most 1040 keys \(max_model_len\), got 1200"
    ):
        captured.build(0, steps.metadata(DECODING, max_seq_len=1200))


def test_plans_look_at_the_columns_of_the_longest_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's host knows a bound of it: a table for 1M keys costs a plan of short requests nothing."""
    planned: list[int] = []
    monkeypatch.setattr(plan_module, "make_plan", lambda step: planned.append(step.block_table.shape[1]))
    builder = steps.builder(Layer())
    for bound, columns in ((70, 5), (80, 5), (81, 6), (1024, steps.COLUMNS)):
        metadata = builder.build(0, steps.metadata(DECODING, max_seq_len=bound))
        assert planned[-1] == columns
        step = getattr(metadata, backend._SHARED).plan.step
        assert step.block_table.shape[1] == steps.COLUMNS, "graphs have the whole table"
    # It is a bound of all requests, also where steps are scheduled ahead, and of a capture max_model_len.
    first, second = gpu_model_runner.GPUModelRunner._build_attention_metadata, DefaultModelState.prepare_attn
    for function, bound in ((first, "optimistic_seq_lens_cpu"), (second, "seq_lens_cpu_upper_bound[:num_reqs].max()")):
        source = inspect.getsource(stock_of(function))
        assert "max_seq_len = self.max_model_len" in source and bound in source


def test_an_engine_that_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan lies where vLLM makes the cache, and survives that its memory is given up and comes back as garbage.

    With DUALKV_TEST_DEVICE=host kernels read that memory.
    """
    if DEVICE == "cuda":
        monkeypatch.setattr(plan_module, "make_memory", lambda *_: torch.zeros(4096, dtype=torch.uint8))
    said: list[str] = []
    monkeypatch.setattr(log.logger, "info", lambda message, *rest: said.append(message % rest))
    monkeypatch.setattr(gpu_worker.Worker, "wake_up", stock_of(gpu_worker.Worker.wake_up))
    layer = Layer()
    cache, layer.kv_cache = layer.kv_cache, torch.empty(0)  # not made yet
    builder = steps.builder(layer)
    plan = builder._sharing._plan
    memory, cuts = plan._memory, builder._sharing._cuts
    size = f"{len(memory) // 10**6} MB"
    assert len(said) == 1 and f"the plan of 1 layers takes {size} beside vLLM's cache" in said[0]
    layer.kv_cache = cache

    def two_steps() -> list[torch.Tensor]:
        torch.manual_seed(0)
        return [run(layer, builder, some) for some in (DECODING, DECODING[::-1])]

    before = two_steps()
    for tags in (["weights"], ["kv_cache"]):  # as verl wakes it, by the worker's own method
        memory.fill_(0xFF), cuts.fill_(7), layer.kv_cache.fill_(torch.nan)
        gpu_worker.Worker.wake_up(steps.sleeping_worker(monkeypatch, gpu_worker), tags=tags)
    for seen, expected in zip(two_steps(), before, strict=True):
        assert torch.equal(seen, expected)
    assert builder._sharing._plan is plan and plan._memory is memory, "graphs hold the addresses"
    assert (memory == 0xFF).sum() < len(memory) // 2
    assert plan.step.boundaries.tolist() == [one.prompt - 1 for one in DECODING[::-1]]
    assert plan.step.boundaries.data_ptr() == cuts.data_ptr()


def test_a_cache_of_other_pages(calls: Calls) -> None:
    """The first step knows the pages: a plan that was made for others, or for none yet, is made anew."""
    for pages in (None, steps.PAGES + 1):
        layer, made = Layer(), steps.config(cache__num_gpu_blocks=pages)
        builder = steps.builder(layer, made)
        assert (builder._sharing._plan is None) == (pages is None)
        run(layer, builder, DECODING)
        assert builder._sharing._plan.limits.num_pages == steps.PAGES
    assert not calls.rows


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
        ("a hybrid", {"model__is_hybrid": True}, {}),
        *[("reference sliding windows", {"model__rswa_window": 4}, {})] * steps.HAS_RSWA,
        ("in both directions", {"model__is_mm_prefix_lm": True}, {}),
        ("more than 4096 requests", {"scheduler__max_num_seqs": 5000}, {}),
        ("ALiBi", {}, {"alibi_slopes": [1.0]}),
        ("of the type encoder_only", {}, {"attn_type": AttentionType.ENCODER_ONLY.value}),
    ],
)
def test_reasons(reason: str, changes: dict[str, Any], attributes: dict[str, Any]) -> None:
    made = steps.config(**changes)
    found = backend.why_stock(made, {"layer": Layer(**attributes)})
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
    monkeypatch.setattr(utils, "async_tensor_h2d", lambda data, *_, **__: torch.as_tensor(data))  # pins memory
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
            reason = backend.why_stock(made, {"layer": Layer()})
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


def test_build_attn_metadata(calls: Calls) -> None:
    """Metadata as vLLM's second model runner has it built, with padded requests, also for a capture."""
    assert "positions=input_batch.positions" in inspect.getsource(DefaultModelState.prepare_attn)
    layer = Layer()
    builder = steps.builder(layer)
    group = AttentionGroup(backend.SharedPrefixBackend, [steps.NAME], builder.kv_cache_spec, 0)
    group.metadata_builders = [builder]
    common = steps.metadata(DECODING, padded=8)
    for capture in (True, False):
        found = build_attn_metadata(
            attn_groups=[[group]],
            num_reqs=8,
            num_tokens=8,
            query_start_loc_gpu=common.query_start_loc,
            query_start_loc_cpu=common.query_start_loc_cpu,
            max_query_len=1,
            seq_lens=common.seq_lens,
            max_seq_len=1024,
            block_tables=[common.block_table_tensor],
            slot_mappings=common.slot_mapping[None],
            kv_cache_config=SimpleNamespace(kv_cache_groups=[None]),
            positions=common.positions,
            for_cudagraph_capture=capture,
        )
        shared = getattr(found[steps.NAME], backend._SHARED)
        assert (shared.requests, shared.tokens, shared.behind) == (8, 8, 0)
        assert builder._sharing.statistics.steps == ({} if capture else {"decode": 1})


def test_seams_of_the_runners(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts' lengths are where the plug-in looks for them, in the order of a step's requests."""
    assert "self.num_prompt_tokens = " in inspect.getsource(gpu_input_batch.InputBatch.__init__)
    assert "idx_mapping_np" in {one.name for one in dataclasses.fields(input_batch.InputBatch)}
    assert "self.prompt_len = UvaBackedTensor(" in inspect.getsource(states.RequestState.__init__)
    first = SimpleNamespace(input_batch=SimpleNamespace(num_prompt_tokens=np.array([5, 6, 0])))
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


def test_selection(warnings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where vLLM finds the backend invalid, its own choice serves, and every engine's log says why."""

    def choose(selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None) -> str:
        if selected_backend is AttentionBackendEnum.CUSTOM and attn_selector_config == "mla":
            raise ValueError("Reason: ['MLA not supported']")
        if selected_backend is AttentionBackendEnum.CUSTOM and attn_selector_config == "version":
            raise SharedPromptUnsupportedError("vllm: expected another")
        return str(selected_backend)

    platform = current_platform
    monkeypatch.setattr(platform, "get_attn_backend_cls", choose, raising=False)
    plugin.register()
    try:
        custom, found = AttentionBackendEnum.CUSTOM, platform.get_attn_backend_cls
        assert found(custom, attn_selector_config="dense", num_heads=2) == str(custom)
        assert found(None, "dense") == "None"
        assert found(custom, "mla") == found(custom, "mla") == "None"
        assert len(warnings) == 1 and "MLA not supported" in warnings[0]
        monkeypatch.setattr(vllm.config.vllm, "_current_vllm_config", SimpleNamespace())  # another engine's
        assert found(custom, "mla") == found(custom, "mla") == "None" and len(warnings) == 2
        with pytest.raises(SharedPromptUnsupportedError):
            found(custom, "version")
        monkeypatch.setenv("DUALKV_VLLM", "1")
        assert found(None, "dense") == str(custom) and found(None, "mla") == "None"
        assert found(AttentionBackendEnum.FLASH_ATTN, "dense") == str(AttentionBackendEnum.FLASH_ATTN)
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()


# --- settings and statistics ----------------------------------------------------------------------


def test_settings() -> None:
    assert read_settings({}, False) == Settings() and read_settings({}, True).exact == "trainer"
    given = {"exact": "trainer", "boundary": "gather", "log_interval": 0}
    assert read_settings({KEY: given, "other": 1}, False) == Settings("trainer", "gather", 0.0)
    for wrong, message in (
        ({"exact": "fast"}, "'exact'.*expected 'trainer', got 'fast'"),
        ({"boundary": "here"}, "boundary"),
        ({"log_interval": -1}, "'log_interval'"),
        ({"exakt": "trainer"}, "a dict of exact, boundary, log_interval, got 'exakt'"),
        ("trainer", "a dict"),
    ):
        with pytest.raises(SharedPromptError, match=message):
            read_settings({KEY: wrong}, False)


def test_statistics(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    common = steps.metadata(DECODING, padded=8)
    cuts = np.array([one.prompt - 1 for one in DECODING] + [0, 0], dtype=np.int32)
    table, keys = common.block_table_tensor.numpy(), common.seq_lens.numpy()
    # Whole pages before the cut: 3, 2 and 3 of the first group, 1 and 1 of the second.
    reading = read_table(table, keys, cuts, steps.PAGE)
    assert reading == Reading(sum(one.keys for one in DECODING), (3 + 2 + 3 - 3 + 1 + 1 - 1) * 16, 6, 2, 5)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    statistics = Statistics(1e-9, "4 layers")
    statistics.count_stock("prompts alone")
    with caplog.at_level("INFO"):
        for _ in range(2):
            statistics.count_shared(common.block_table_tensor, common.seq_lens, torch.from_numpy(cuts), 16, False)
    assert "4 layers: a step of 6 requests reads" in caplog.text and "2 groups of 2.5 siblings" in caplog.text
    assert "steps: 2 of decoding, 0 mixed, vLLM's own 1 (prompts alone)" in caplog.text


def test_statistics_of_many_pages() -> None:
    """A line stops the worker of a long step for no more than a moment: 2.5M pages were hashed for seconds."""
    rng = np.random.default_rng(0)
    table = rng.permutation(1024 * 2500).astype(np.int32).reshape(1024, 2500)
    table[1::2, :100] = table[::2, :100]
    keys = np.full(1024, 2500 * 16, dtype=np.int32)
    began = time.process_time()
    reading = read_table(table, keys, keys, 16)
    assert time.process_time() - began < 1.0
    assert reading == Reading(1024 * 40_000, 512 * 1600, 1024, 512, 1024)
    nothing = np.zeros(0, dtype=np.int32)
    assert read_table(table[:0], nothing, nothing, 16) == Reading(0, 0, 0, 0, 0)


def test_first_runner(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metadata as vLLM's first model runner builds it, with padded requests: the plug-in sees its prompts' lengths."""
    layer = Layer()
    builder = steps.builder(layer)
    group = AttentionGroup(backend.SharedPrefixBackend, [steps.NAME], builder.kv_cache_spec, 0)
    group.metadata_builders = [builder]
    common = steps.metadata(DECODING, padded=8)
    prompts.note(np.zeros(0, dtype=np.int32))
    lengths = np.array([one.prompt for one in DECODING] + [99, 99], dtype=np.int32)  # those behind are of earlier steps
    computed = common.seq_lens - 1

    def buffer(tensor: torch.Tensor) -> Any:
        return SimpleNamespace(gpu=tensor, cpu=tensor)

    table = SimpleNamespace(get_device_tensor=lambda count: common.block_table_tensor[:count])
    runner = SimpleNamespace(
        kv_cache_config=SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=builder.kv_cache_spec)]),
        optimistic_seq_lens_cpu=common.seq_lens, seq_lens=common.seq_lens, positions=common.positions,
        query_start_loc=buffer(common.query_start_loc), device=torch.device("cpu"), attn_groups=[[group]],
        input_batch=SimpleNamespace(
            block_table=[table], num_computed_tokens_cpu_tensor=computed, num_prompt_tokens=lengths,
            num_prompt_tokens_cpu_tensor=torch.from_numpy(lengths), req_ids=list("abcdef"),
        ),
        model_config=SimpleNamespace(rswa_window=None),
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=False, use_replayssm=False),
        routed_experts_initialized=False, use_async_spec_decode=False, is_mm_prefix_lm=False, dcp_world_size=1,
        speculative_config=None, max_model_len=1024, _get_encoder_seq_lens=lambda *_, **__: (None, None),
    )  # fmt: skip
    kind = gpu_model_runner.GPUModelRunner
    monkeypatch.setattr(kind, "_build_attention_metadata", stock_of(kind._build_attention_metadata))
    prompts.install()
    found, _ = kind._build_attention_metadata(
        runner, num_tokens=6, num_reqs=6, max_query_len=1, num_tokens_padded=8, num_reqs_padded=8,
        slot_mappings={0: common.slot_mapping},
    )  # fmt: skip
    shared = getattr(found[steps.NAME], backend._SHARED)
    assert (shared.requests, shared.tokens, shared.behind) == (8, 8, 0) and not calls.rows
    assert shared.plan.step.boundaries[:6].tolist() == [one.prompt - 1 for one in DECODING]
