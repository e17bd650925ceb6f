# SPDX-License-Identifier: BSD-3-Clause
"""Groups of layers, as the installed vLLM's runners have them; hybrids and their pages; the log's first line."""

from __future__ import annotations

import importlib
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: .ci/run puts its Python code on the path")

import vllm
import vllm_steps as steps
from vllm.config.compilation import CUDAGraphMode
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState
from vllm.v1.worker.utils import AttentionGroup
from vllm_steps import DECODING, Calls, Layer, Request, run

from flash_attn_dualkv.integrations.common.patching import stock_of
from flash_attn_dualkv.integrations.vllm import backend, log, prompts

HYBRID = {"model__is_hybrid": True, "model__max_model_len": 8192}


@AttentionLayerBase.register
class Attention(Layer):
    """A layer that vLLM knows as one with a cache."""


@AttentionLayerBase.register
class GatedDeltaNet:
    """A layer with a state."""


def requests_of(page: int) -> list[Request]:
    """Two siblings with two pages of a prompt, one with its first, and a request by itself."""
    prompt, few = 2 * page + page // 2, page // 4
    return [
        Request(prompt + few, 1, prompt, [3, 9, 11]),
        Request(page + few, 1, page + 1, [40, 41]),
        Request(prompt + 1, 1, prompt, [3, 9, 12]),
        Request(page + 2 * few, 1, page + few, [3, 20]),
    ]


def with_room(cache: torch.Tensor, pages: int) -> torch.Tensor:
    """A cache in whose memory other things lie behind each page, as those of layers that share a block do."""
    place = [*cache.shape].index(pages)
    room = cache.new_full((*cache.shape[: place + 1], cache.shape[place + 1 :].numel() + 48), torch.nan)
    return room[..., :-48].view(cache.shape)


@pytest.mark.parametrize(("page", "block"), [(528, 528), (784, 784), (2096, 2096), (16, 528), (32, 1056)])
def test_pages(page: int, block: int, calls: Calls) -> None:
    """Pages as large as a state, or the parts of them that FlashAttention takes beside states in fp32.

    The plan is made for them where there is no cache yet, and stays.
    """
    blocks, parts = steps.PAGES if page == block else 2, block // page
    layer = Layer(page=page, pages=blocks * parts)
    cache, layer.kv_cache = with_room(layer.kv_cache, blocks * parts), torch.empty(0)
    builder = steps.builder(layer, steps.config(cache__block_size=block, cache__num_gpu_blocks=blocks, **HYBRID))
    plan = builder._sharing._plan
    assert (plan.limits.num_pages, plan.limits.page_size) == (blocks * parts, page)
    layer.kv_cache = cache
    run(layer, builder, requests_of(page))
    assert not calls.rows
    run(layer, builder, [*requests_of(page), Request(5, 5, 5, [30])])
    assert calls.rows == [5]
    assert builder._sharing._plan is plan and builder._sharing.statistics.steps == {"decode": 1, "mixed": 1}


class State:
    """Stands for the metadata builder of layers with a state: notes the block tables that it gets."""

    supports_update_block_table = True
    reorder_batch_threshold = 1

    def __init__(self) -> None:
        self.tables: list[torch.Tensor] = []

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        self.tables.append(common_attn_metadata.block_table_tensor)
        return None

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        return self.build(0, common_attn_metadata)


class Groups:
    """A hybrid's groups of layers: two with states, two of attention with builders here, each with a block table."""

    def __init__(self, **changes: Any) -> None:
        made = steps.config(**changes)
        self.layers = {f"attention.{number}": Layer() for number in range(2)}
        self.ours = [steps.builder(layer, made, {name: layer}) for name, layer in self.layers.items()]
        self.builders = [State(), self.ours[0], State(), self.ours[1]]
        self.names = ["gdn.0", "attention.0", "gdn.1", "attention.1"]
        self.specs = [f"spec {name}" for name in self.names]
        self.groups = [
            [AttentionGroup(backend.SharedPrefixBackend, [name], spec, place)]
            for place, (name, spec) in enumerate(zip(self.names, self.specs))
        ]
        for (group,), builder in zip(self.groups, self.builders):
            group.metadata_builders = [builder]
        self.config = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in self.specs])

    def check(self, found: dict[str, Any], tables: list[torch.Tensor]) -> None:
        """Each builder has got its group's table; those here have planned all requests in it, cut at their prompts."""
        for builder, table in zip(self.builders, tables):
            if isinstance(builder, State):
                assert torch.equal(builder.tables.pop(), table) and not builder.tables
        for name in self.layers:
            table = tables[self.names.index(name)]
            shared = getattr(found[name], backend._SHARED)
            assert torch.equal(shared.plan.step.block_table, table)
            assert (shared.requests, shared.tokens, shared.behind) == (8, 8, 0)
            assert shared.plan.step.boundaries[: len(DECODING)].tolist() == [each.prompt - 1 for each in DECODING]


class Absent(SimpleNamespace):
    """Has None for what a version of vLLM looks for and these steps do not have."""

    def __getattr__(self, name: str) -> None:
        return None


def tables_of(common: Any) -> list[torch.Tensor]:
    """A block table for each group: as many different ones."""
    return [(common.block_table_tensor + shift) % steps.PAGES for shift in range(4)]


@pytest.mark.parametrize("is_capture", [False, True])
@pytest.mark.parametrize("kind", [DefaultModelState, MambaHybridModelState])
def test_second_runner(kind: Any, is_capture: bool) -> None:
    """Metadata as vLLM's second runner has it built, with padded requests; before 0.30 without a hybrid's positions."""
    groups = Groups(use_v2_model_runner=True, model__is_hybrid=kind is MambaHybridModelState)
    common = steps.metadata(DECODING, padded=8)
    tables, queries = tables_of(common), common.query_start_loc_cpu.diff().numpy()
    batch = Absent(
        num_reqs=6, num_tokens=6, num_reqs_after_padding=8, num_tokens_after_padding=8, num_scheduled_tokens=queries,
        query_start_loc_np=common.query_start_loc_cpu.numpy(), query_start_loc=common.query_start_loc,
        seq_lens=common.seq_lens, seq_lens_cpu_upper_bound=common.seq_lens, idx_mapping=torch.arange(6),
        is_prefilling_np=np.zeros(6, dtype=bool), positions=common.positions,
    )  # fmt: skip
    config = SimpleNamespace(num_speculative_tokens=0)
    accepted = torch.ones(8, dtype=torch.int32)
    state = Absent(max_model_len=1024, num_accepted_tokens_gpu=accepted, vllm_config=config)
    found = kind.prepare_attn(
        state, batch, CUDAGraphMode.FULL, tuple(tables), common.slot_mapping.expand(4, -1), groups.groups,
        groups.config, for_capture=is_capture,
    )  # fmt: skip
    groups.check(found, tables)
    assert all(builder._sharing.statistics.steps == ({} if is_capture else {"decode": 1}) for builder in groups.ours)


def test_first_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as vLLM's first runner builds it, which has told the lengths of the prompts."""
    groups, common = Groups(use_v2_model_runner=False, **HYBRID), steps.metadata(DECODING, padded=8)
    tables = tables_of(common)
    tables[0][6:] = 0
    prompts.note(np.zeros(0, dtype=np.int32))
    kind = gpu_model_runner.GPUModelRunner
    monkeypatch.setattr(kind, "_build_attention_metadata", stock_of(kind._build_attention_metadata))
    prompts.install()
    found, _ = steps.first_runner(common, tables, groups.groups, groups.config, DECODING)
    groups.check(found, tables)


def test_first_line(warnings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's log begins with the layers that decode here, those that do not and why, and what is shared."""
    said: list[str] = []
    monkeypatch.setattr(log.logger, "log", lambda level, message, *rest: said.append(message % rest))

    def first(**changes: Any) -> str:
        said.clear()
        made, layer = steps.config(**HYBRID, **changes), Attention()
        others = {"attention.1": Attention(), "odd": Attention(head_size=80)}
        others |= {f"gdn.{number}": GatedDeltaNet() for number in range(3)} | {"experts": SimpleNamespace()}
        made.compilation_config.static_forward_context = others
        for _ in range(2):
            steps.builder(layer, made, {"attention.0": layer})
        assert ["decode over" in text for text in said] == [True, *[False] * (len(said) - 1)]
        return said[0]

    line = first(cache__block_size=528)
    assert "2 of 6 layers decode over shared prefixes" in line
    assert "1 are vLLM's own: a head dim of 80" in line and "3 are vLLM's own: GatedDeltaNet" in line
    assert "requests share blocks of 528 tokens, of vLLM's prefix cache" in line and "newer" not in line
    line = first(cache__enable_prefix_caching=False)
    assert "nothing is shared, as vLLM's prefix cache is off: enable_prefix_caching=True" in line
    line = first(parallel__use_ubatching=True)
    assert "0 of 6 layers" in line and "3 are vLLM's own: steps in two halves" in line
    resumed = "samples that verl resumes are cut there"
    assert resumed not in line
    monkeypatch.setitem(sys.modules, "verl", SimpleNamespace())
    monkeypatch.delitem(sys.modules, backend._VERL_CLIENT, raising=False)
    assert resumed in first()
    importlib.import_module(backend._VERL_CLIENT)  # verl's entry point
    assert resumed not in first()
    monkeypatch.setattr(vllm, "__version__", "0.40.1")
    assert "this vLLM is newer than 0.33, the newest that is known" in first()
