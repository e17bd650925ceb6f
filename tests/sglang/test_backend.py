# SPDX-License-Identifier: BSD-3-Clause
"""The plug-in on the code of the installed SGLang: its backend and cache, without a GPU."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sglang_python
import torch

if not sglang_python.install():
    pytest.skip("SGLang is not installed: .ci/run puts its Python code on the path", allow_module_level=True)

import sglang_steps as steps
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang_steps import ALONE, CONTEXT, DECODING, PROMPTS, Calls, Request, layer, run, runner

from flash_attn_dualkv.decode.calls import MOST_REQUESTS
from flash_attn_dualkv.errors import SharedPromptError, SharedPromptUnsupportedError
from flash_attn_dualkv.integrations import sglang as plugin
from flash_attn_dualkv.integrations.sglang import backend

# --- decoding -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "requests", [DECODING, DECODING[::-1], ALONE, DECODING[:1]], ids=["shared", "back", "alone", "1"]
)
def test_decoding(requests: list[Request], calls: Calls) -> None:
    made = plugin.create(runner())
    with torch.inference_mode():  # as SGLang runs it
        run(made, layer(), requests)
    assert not calls.rows
    assert made._statistics.steps == {"decode": 1}


@pytest.mark.parametrize(
    "attributes",
    [dict(sliding_window_size=9), dict(logit_cap=0.5), dict(scaling=0.3)],
    ids=["window", "softcap", "scale"],
)
def test_options_of_layers(attributes: dict[str, Any], calls: Calls) -> None:
    run(plugin.create(runner()), layer(**attributes), DECODING)
    assert not calls.rows


def test_sinks(calls: Calls) -> None:
    run(plugin.create(runner()), layer(), DECODING, sinks=torch.tensor([0.0, 2.0, -1.0, 4.0]))
    assert not calls.rows


def test_shared_pages_are_found(calls: Calls) -> None:
    """Pages that lie in several rows of the table change no bits: each request has those that it has by itself."""
    made = plugin.create(runner())
    steps.fill(made)
    together = steps.output(made, layer(), DECODING)
    for row, request in enumerate(DECODING):
        assert torch.equal(steps.output(made, layer(), [request], first=row)[0], together[row])


def test_layers_that_share_keys(calls: Calls) -> None:
    """A layer without keys of its own reads those that another has written."""
    made = plugin.create(runner())
    steps.fill(made)
    before = [cache.clone() for cache in made._pool.get_kv_buffer(0)]
    step = steps.batch(made, DECODING)
    made.init_forward_metadata(step)
    q = torch.randn(len(DECODING), steps.HEADS * steps.HEAD_DIM).to(steps.DTYPE)
    made.forward(q, None, None, layer(), step)
    made.forward(q, *torch.zeros(2, 6, steps.KV_HEADS, steps.HEAD_DIM, dtype=steps.DTYPE), layer(), step, False)
    assert all(map(torch.equal, before, made._pool.get_kv_buffer(0))) and not calls.rows


def test_output_that_sglang_gives(calls: Calls) -> None:
    made = plugin.create(runner())
    steps.fill(made)
    step = steps.batch(made, DECODING)
    step._attn_output = torch.empty(len(DECODING), steps.HEADS * steps.HEAD_DIM, dtype=steps.DTYPE)
    made.init_forward_metadata(step)
    out = made.forward(torch.randn_like(step._attn_output), None, None, layer(), step)
    assert out.data_ptr() == step._attn_output.data_ptr()


# --- the trainer's bits ---------------------------------------------------------------------------

DETERMINISTIC = {"server_args__enable_deterministic_inference": True}


def test_prompts_with_the_trainers_bits(calls: Calls, said: list[str]) -> None:
    """Prompts, prefixes that are in the cache, chunks and rows that decode beside them run on one plan."""
    made = plugin.create(runner(**DETERMINISTIC))
    assert made._plan.exact == "trainer" and made._plan.limits.max_queries == CONTEXT + steps.MAX_REQUESTS
    for requests in (PROMPTS, PROMPTS[:1], PROMPTS[1:3], DECODING):
        run(made, layer(), requests)
    assert not calls.rows and made._statistics.steps == {"mixed": 3, "decode": 1}
    assert "so do prompts, with the bits of training that packs samples with boundary='replicate'" in said[0]


def test_bits_of_chunks(calls: Calls) -> None:
    """Whatever chunks a prompt is computed in, each row has the bits that it has when it is decoded."""
    made = plugin.create(runner(**DETERMINISTIC))
    made.prompt_lengths = np.array([30], dtype=np.int32)
    steps.fill(made)
    pages = [3, 9, 5]
    whole = steps.output(made, layer(), [Request(40, pages, 40)])
    for chunk in (16, 7, 1):
        begins = range(0, 40, chunk)
        ends = [min(begin + chunk, 40) for begin in begins]
        parts = [steps.output(made, layer(), [Request(end, pages, end - at)], at) for at, end in zip(begins, ends)]
        assert torch.equal(torch.cat(parts), whole)


def test_prompts_decide_where_requests_are_cut(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their own lengths, which a retracted request keeps; rows that pad a graph, and captures, are cut nowhere."""
    monkeypatch.setattr(ForwardBatch, "init_new", classmethod(lambda cls, batch, model_runner: batch))
    nowhere = 2**31 - 1
    for boundary, shift in (("replicate", 1), ("gather", 0)):
        monkeypatch.setenv("DUALKV_SGLANG", json.dumps({"exact": "trainer", "boundary": boundary}))
        made = plugin.create(on := runner())
        on.attn_backend = made
        made.init_cuda_graph_state(8, 8)
        steps.capture(made, steps.batch(made, [], 8))
        assert made._plan.step.boundaries.tolist() == [nowhere] * 8
        places = steps.places(made)
        for lengths in ([40, 12, 33, 20, 60, 35], [5, 1, 2, 3, 4, 6]):
            step = SimpleNamespace(reqs=[SimpleNamespace(origin_input_ids=[7] * length) for length in lengths])
            assert ForwardBatch.init_new(step, on) is step
            run(made, layer(), DECODING, 8, steps.replay)
            assert made._plan.step.boundaries.tolist() == [*(length - shift for length in lengths), nowhere, nowhere]
            assert steps.places(made) == places, "graphs read the same memory"


def test_chunks_bound_the_plan(calls: Calls) -> None:
    made = plugin.create(runner(**DETERMINISTIC, server_args__chunked_prefill_size=16))
    assert made._plan.limits.max_queries == 16 + steps.MAX_REQUESTS
    with pytest.raises(SharedPromptError, match="forward_mode.*outside of CUDA graphs.*EXTEND"):
        made._prepare(ForwardMode.EXTEND, None, True)
    made._make_plan(4)
    with pytest.raises(SharedPromptError, match="requests.*1 to 4 .*with exact='trainer'.*6"):
        run(made, layer(), DECODING)


# --- CUDA graphs ----------------------------------------------------------------------------------


def test_graphs(calls: Calls) -> None:
    """Replays of a captured size read the same memory, with other forests, and rows that pad them share nothing."""
    made = plugin.create(runner())
    made.init_cuda_graph_state(8, 8)
    places = {}
    for size in (8, 4):
        steps.capture(made, steps.batch(made, [], size))
        places[size] = steps.places(made)
    for requests, size in ((DECODING, 8), (ALONE, 4), (DECODING[::-1], 8), (DECODING[:2], 4), (ALONE, 8)):
        out = run(made, layer(), requests, size, steps.replay)
        assert out.shape[0] == size and steps.places(made) == places[size]
    assert not calls.rows and made._statistics.steps == {"decode": 5}, "captures are not counted"
    run(made, layer(), DECODING)
    run(made, layer(), DECODING, 8, steps.replay)
    assert steps.places(made) == places[8]


def test_graphs_of_more_requests_than_the_pool(calls: Calls) -> None:
    made = plugin.create(runner())
    made.init_cuda_graph_state(16, 16)
    assert made._plan.limits.max_requests == 16
    steps.capture(made, steps.batch(made, [], 16))
    run(made, layer(), DECODING, 16, steps.replay)


def test_graph_that_no_plan_has_room_for(calls: Calls) -> None:
    made = plugin.create(runner())
    made.init_cuda_graph_state(16, 16)
    made._make_plan(8)
    with pytest.raises(SharedPromptError, match="requests.*1 to 8 in a CUDA graph.*16"):
        steps.capture(made, steps.batch(made, [], 16))


def test_no_schedule(calls: Calls) -> None:
    """SGLang's schedule of splits, whose capture fails in some versions, is not made: nothing reads it."""
    made = plugin.create(runner())
    made.init_cuda_graph_state(8, 8)
    made._get_scheduler_metadata = None  # a call would fail
    step = steps.batch(made, [], 8)
    steps.capture(made, step)
    made.init_forward_metadata(step)
    assert made.forward_metadata.scheduler_metadata is None


# --- what is SGLang's own -------------------------------------------------------------------------


def test_prompts(calls: Calls) -> None:
    made = plugin.create(runner())
    run(made, layer(), DECODING)
    made._prepare(ForwardMode.EXTEND, None)
    assert not made._is_planned and made._statistics.stock == {"prompts": 1}


@pytest.mark.parametrize(
    ("reason", "attributes", "options"),
    [
        ("scales of keys", {"k_scale": torch.ones(1)}, {}),
        ("not causal", {"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, {}),
        ("options that only SGLang's kernels have: rel_bias", {}, {"rel_bias": 1}),
    ],
)
def test_stock_layers(
    reason: str, attributes: dict[str, Any], options: dict[str, Any], calls: Calls, said: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A layer that decoding here lacks runs on SGLang's attention beside others, and the log says why, once."""
    made = plugin.create(runner())
    handed: list[Any] = []
    monkeypatch.setattr(
        steps.stock.FlashAttentionBackend, "forward_decode", lambda _, q, *args, **kwargs: handed.append(kwargs) or q
    )
    steps.fill(made)
    step = steps.batch(made, DECODING)
    made.init_forward_metadata(step)
    q = torch.randn(len(DECODING), steps.HEADS * steps.HEAD_DIM).to(steps.DTYPE)
    for _ in range(2):
        assert made.forward_decode(q, None, None, layer(**attributes), step, **options) is q
        assert made.forward_decode(q, None, None, layer(), step) is not q
    assert handed == [options] * 2
    assert [reason in text for text in said] == [False, True], said


def test_stock_attention_of_another_head_dim(calls: Calls, said: list[str]) -> None:
    """SGLang's own code runs where a layer has other heads than the plan, on the metadata that it has prepared."""
    made = plugin.create(runner())
    other = layer()
    made._plan = SimpleNamespace(limits=made._plan.limits._replace(num_heads=8))
    made._is_planned = True
    step = steps.batch(made, DECODING)
    steps.fill(made)
    steps.stock.FlashAttentionBackend.init_forward_metadata(made, step)
    q = torch.randn(len(DECODING), steps.HEADS * steps.HEAD_DIM).to(steps.DTYPE)
    made.forward(q, None, None, other, step)
    assert calls.rows == [6] and "(4, 2, 64, 64)" in said[-1]


def test_steps_with_more_requests_than_the_plan(calls: Calls) -> None:
    made = plugin.create(runner())
    made._make_plan(4)
    run(made, layer(), DECODING)
    assert calls.rows == [6] and made._statistics.stock == {"no requests, or more than 4": 1}


REASONS: dict[str, dict[str, Any]] = {
    "a draft model": {"is_draft_worker": True},
    "speculative decoding": {"server_args__speculative_algorithm": "EAGLE"},
    "data parallel attention": {"server_args__enable_dp_attention": True},
    "prefill context parallelism": {"server_args__attn_cp_size": 2},
    "different engines": {"server_args__disaggregation_mode": "decode"},
    "PD multiplexing": {"server_args__enable_pdmux": True},
    "two-batch overlap": {"server_args__enable_two_batch_overlap": True},
    "torch.compile": {"server_args__enable_torch_compile": True},
    "an encoder": {"model_config__is_encoder_decoder": True},
    "local attention": {"model_config__is_local_attention_model": True},
    f"more than {MOST_REQUESTS} requests": {"req_to_token_pool__size": MOST_REQUESTS + 1},
    "a head dim of 80": {"model_config__head_dim": 80},
    "a cache of torch.bfloat16 for a model of torch.float16": {"model_config__dtype": torch.float16},
}


@pytest.mark.parametrize("reason", REASONS)
def test_reasons(reason: str, calls: Calls) -> None:
    found = backend.why_stock(runner(**REASONS[reason]))
    assert found is not None and reason in found


def test_context_parallel_decoding(calls: Calls) -> None:
    found = backend.why_stock(runner(server_args__dcp_size=2))
    assert found == ("decode context parallelism" if steps.versions.installed().decides else None)


def test_caches(calls: Calls) -> None:
    """Caches of other bytes or in another order, and pools of other types: those of hybrids, say."""
    made = runner()
    pool = made.token_to_kv_pool
    for kind in (torch.float8_e4m3fn, torch.float32):
        made.token_to_kv_pool = steps.pool(kind)
        assert str(kind) in str(backend.why_stock(made))
    pool.kv_cache_layout = "hnd"
    made.token_to_kv_pool = pool
    assert "not rows of heads" in str(backend.why_stock(made))
    made.token_to_kv_pool = type("HybridLinearKVPool", (type(pool),), {})(
        (steps.PAGES - 1) * steps.PAGE, steps.PAGE, steps.DTYPE, steps.KV_HEADS, steps.HEAD_DIM, 1, "cpu", False
    )
    assert backend.why_stock(made) == "a cache of the type HybridLinearKVPool"


def test_what_is_sglangs_own(calls: Calls, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that cannot be served gets SGLang's backend itself, and its log says why, once."""
    from sglang.srt.layers.attention import attention_registry as registry

    monkeypatch.setitem(registry.ATTENTION_BACKENDS, "fa3", steps.stock.FlashAttentionBackend)
    made = runner(server_args__speculative_algorithm="EAGLE")
    for _ in range(2):
        assert type(plugin.create(made)) is steps.stock.FlashAttentionBackend
    assert said == ["flash_attn_dualkv: all layers run on SGLang's own attention backend fa3: speculative decoding"]


def test_refusals(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SharedPromptError, match="page_size.*a multiple of 16.*--page-size 64.*got 1"):
        plugin.create(runner(page_size=1))
    with pytest.raises(SharedPromptUnsupportedError, match="multi-head latent attention"):
        plugin.create(runner(use_mla_backend=True))
    for text, message in (
        ("{", "DUALKV_SGLANG.*a JSON object"),
        ('{"interval": 1}', "DUALKV_SGLANG.*'interval'"),
        ('{"log_interval": -1}', "log_interval"),
        ('{"exact": "split"}', "exact"),
        ('{"boundary": "gather"}', "exact='trainer' beside a boundary"),
    ):
        monkeypatch.setenv("DUALKV_SGLANG", text)
        with pytest.raises(SharedPromptError, match=message):
            plugin.create(runner())
    for kind in ("prefill", "decode"):  # what another backend computes has not the trainer's bits
        with pytest.raises(SharedPromptError, match="attention_backend.*dualkv for prompts and decoding.*got fa3"):
            plugin.create(runner(**DETERMINISTIC, **{f"server_args__{kind}_attention_backend": "fa3"}))
    of_prompts = SimpleNamespace(prefill=SimpleNamespace(backend="breakable"))
    for graphs in ({"disable_piecewise_cuda_graph": False}, {"cuda_graph_config": of_prompts}):
        with pytest.raises(SharedPromptError, match="cuda_graph_backend_prefill.*'disabled'"):
            plugin.create(runner(**DETERMINISTIC, **{f"server_args__{name}": value for name, value in graphs.items()}))
    monkeypatch.setenv("DUALKV_SGLANG", '{"log_interval": 0}')
    assert plugin.create(runner())._statistics.interval == 0


def test_out_of_memory(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that runs out of memory for a plan says which of SGLang's settings make room."""

    def refuse(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("a SharedPrefixPlan takes 9 MiB.")

    monkeypatch.setattr(backend, "SharedPrefixPlan", refuse)
    with pytest.raises(torch.OutOfMemoryError, match="9 MiB.*max_running_requests.*mem_fraction_static"):
        plugin.create(runner())


def test_statistics(calls: Calls, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that pad a graph are no requests."""
    monkeypatch.setenv("DUALKV_SGLANG", '{"log_interval": 1e-9}')
    made = plugin.create(runner())
    made.init_cuda_graph_state(8, 8)
    steps.capture(made, steps.batch(made, [], 8))
    with caplog.at_level("INFO"):
        for _ in range(2):
            run(made, layer(), DECODING, 8, steps.replay)
    assert "layers: a step of 6 requests reads" in caplog.text
    assert "2 groups of 2.5 siblings, 1 requests alone; steps: 2 of decoding, 0 mixed, SGLang's own 0" in caplog.text
