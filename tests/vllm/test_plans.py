# SPDX-License-Identifier: BSD-3-Clause
"""Plans of an engine: their memory while it runs and while it sleeps, and the tables that they are for."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: .ci/run puts its Python code on the path")

import vllm_steps as steps
from launches import DEVICE
from vllm.v1.worker import gpu_model_runner, gpu_worker
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm_steps import DECODING, PREFILL, Calls, Layer, run

from flash_attn_dualkv.decode import plan as plan_module
from flash_attn_dualkv.errors import SharedPromptError
from flash_attn_dualkv.integrations.common.patching import stock_of
from flash_attn_dualkv.integrations.vllm import backend, log, sharing


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
    # It is a bound of all requests, also of steps that are scheduled ahead; of a capture max_model_len.
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
    memory, cuts = plan._memory, builder._sharing._cuts._rows
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
