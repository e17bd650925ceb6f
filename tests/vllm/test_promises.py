# SPDX-License-Identifier: BSD-3-Clause
"""Promises about a running engine, on the code of the installed vLLM.

Calls of a layer that were recorded at a capture are replayed after later builds, as CUDA graphs are. With
DUALKV_TEST_DEVICE=host kernels run in them.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: .ci/run puts its Python code on the path")

import vllm_steps as steps
from vllm.v1.attention.backends import flash_attn
from vllm.v1.worker.gpu import input_batch
from vllm_steps import DECODING, PREFILL, PROMPT, Calls, Layer, Request, run

from flash_attn_dualkv.decode import attention
from flash_attn_dualkv.integrations.vllm import backend, prompts

operators: Any = attention.operators
SIZE = 8


class Engine:
    """A layer, its builder, and the buffers of steps, in which graphs of some sizes are captured first."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *sizes: int, layer: Layer | None = None) -> None:
        self.layer = layer or Layer()
        self.builder = steps.builder(self.layer)
        self.buffers = {
            "seq_lens": steps.ints([0] * SIZE),
            "query_start_loc": steps.ints([0] * (SIZE + 1)),
            "block_table_tensor": torch.zeros(SIZE, steps.COLUMNS, dtype=torch.int32),
        }
        self.q, self.out = (torch.zeros(SIZE, steps.HEADS, steps.HEAD_DIM, dtype=steps.DTYPE) for _ in range(2))
        self.graphs: dict[int, list[Any]] = {}
        stock = operators.decode
        for size in sizes:
            with monkeypatch.context() as patch:
                recorded = self.graphs.setdefault(size, [])
                patch.setattr(operators, "decode", lambda call: recorded.append(call) or stock(call))  # noqa: B023
                common = self.fill([Request(1, 1, 0, [0])] * size, size)
                self.forward(self.builder.build_for_cudagraph_capture(common), size)
            assert len(recorded) == 1

    def fill(self, requests: list[Request], size: int, **changes: Any) -> Any:
        """Metadata of a step in the buffers."""
        common = steps.metadata(requests, size)
        for name, buffer in self.buffers.items():
            new = getattr(common, name)
            buffer[: len(new)] = new
        return common.replace(
            **{name: buffer[: len(getattr(common, name))] for name, buffer in self.buffers.items()} | changes
        )

    def forward(self, metadata: Any, size: int) -> None:
        kv = torch.zeros(size, steps.KV_HEADS, steps.HEAD_DIM, dtype=steps.DTYPE)
        self.layer.impl.forward(self.layer, self.q[:size], kv, kv, self.layer.kv_cache, metadata, self.out[:size])

    def step(self, requests: list[Request], size: int = SIZE, **changes: Any) -> None:
        """A build, and the replay of a graph: each row is that of plain attention."""
        assert hasattr(self.builder.build(0, self.fill(requests, size, **changes)), backend._SHARED)
        steps.fill(self.layer, requests)
        self.q.normal_()
        self.out.fill_(torch.nan)
        for call in self.graphs[size]:
            operators.decode(call)
        for row, one in enumerate(requests):
            expected = steps.plain(
                self.q[row : row + 1], *steps.halves(self.layer.kv_cache), one, self.layer.impl.scale
            )
            torch.testing.assert_close(self.out[row : row + 1].double(), expected, atol=2e-2, rtol=2e-2)
        assert not self.out[len(requests) : size].any()


def test_preemption(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is preempted comes back in other pages, between other requests, and shares again."""
    engine = Engine(monkeypatch, SIZE)
    engine.step(DECODING)
    left = [*DECODING[:4], DECODING[5]]  # the last one takes the place of the fifth
    engine.step(left)
    back = Request(70, 70, 50, [*PROMPT, 30, 31])  # all of it is computed anew, behind those that decode
    run(engine.layer, engine.builder, [*left, back])
    assert calls.rows == [70]
    again = [dataclasses.replace(back, queries=1), *left[::-1]]
    engine.step(again)
    plan = engine.builder._sharing._plan
    assert plan.step.boundaries[:6].tolist() == [one.prompt - 1 for one in again]


def test_steps_that_are_scheduled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host knows bounds of the keys alone where it is a step ahead; those on the device count."""
    engine = Engine(monkeypatch, SIZE)
    for ahead in (1, 60, 900):
        bounds = steps.ints([one.keys + ahead for one in DECODING] + [0, 0])
        engine.step(DECODING, max_seq_len=int(bounds.max()), seq_lens_cpu_upper_bound=bounds)


def test_idle_steps_of_data_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine without requests takes part in the others' steps: a key each, in tables that earlier requests left."""
    engine = Engine(monkeypatch, 4, SIZE)
    engine.step(DECODING)
    for size, lengths in ((4, [50, 18, 48, 32]), (SIZE, [50, 18, 48, 32, 50, 32]), (4, [])):
        table = engine.buffers["block_table_tensor"].clone()
        common = engine.fill([Request(1, 1, 0, one.pages) for one in DECODING[:4]] * (size // 4), size)
        engine.buffers["block_table_tensor"].copy_(table)
        prompts.note(np.array(lengths, dtype=np.int32))
        engine.builder.build(0, common)
        engine.layer.kv_cache.fill_(0.0)  # of finished requests: no NaN
        for call in engine.graphs[size]:
            operators.decode(call)
        assert not engine.out[:size].any()
    engine.step(DECODING[::-1])
    names = inspect.getsource(input_batch.InputBatch.make_dummy)
    assert "idx_mapping_np=" in names, "the second runner's idle steps have indices of requests"


def test_connectors(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connectors get metadata of the whole step, and may keep all layers of a page side by side; prompts that they have
    loaded need no prefill here.
    """
    layer = Layer()
    pages = [*layer.kv_cache.shape].index(steps.PAGES)
    across = layer.kv_cache.movedim(pages, 0).unsqueeze(1).repeat_interleave(3, 1)  # (pages, layers, ...)
    layer.kv_cache = across[:, 1].movedim(0, pages)
    engine = Engine(monkeypatch, SIZE, layer=layer)
    engine.step(DECODING[1:3])  # their first steps
    run(layer, engine.builder, [*DECODING, *PREFILL])
    assert calls.rows == [42] and across[:, ::2].isnan().all()
    common = steps.metadata([*DECODING, *PREFILL])
    ours, stock = (
        build(engine.builder, 0, common)
        for build in (backend.SharedPrefixMetadataBuilder.build, flash_attn.FlashAttentionMetadataBuilder.build)
    )
    for field in dataclasses.fields(flash_attn.FlashAttentionMetadata):
        assert str(getattr(ours, field.name)) == str(getattr(stock, field.name)), field.name
