# SPDX-License-Identifier: BSD-3-Clause
"""What vLLM is told and chooses, versions, settings and statistics of the plug-in."""

from __future__ import annotations

import importlib
import inspect
import logging
import math
import pickle
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: .ci/run puts its Python code on the path")

import vllm.config.vllm
import vllm_steps as steps
from vllm.config import AttentionConfig
from vllm.model_executor.layers import layernorm
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.worker import gpu_model_runner, gpu_worker
from vllm.v1.worker.gpu import model_runner
from vllm_steps import DECODING, speculator

import flash_attn_dualkv.integrations.vllm as plugin
from flash_attn_dualkv.errors import SharedPromptError, SharedPromptUnsupportedError
from flash_attn_dualkv.integrations.common.patching import stock_of
from flash_attn_dualkv.integrations.engines.settings import KEY, Settings, read_settings
from flash_attn_dualkv.integrations.engines.statistics import Reading, Statistics, read_table
from flash_attn_dualkv.integrations.vllm import backend, log, versions


def test_registration() -> None:
    custom = AttentionBackendEnum.CUSTOM
    custom.clear_override()
    plugin.register()
    plugin.register()
    found = custom.get_class()
    assert found is backend.SharedPrefixBackend and AttentionBackendEnum[found.get_name()] is custom
    assert (
        AttentionConfig(backend="dualkv").backend
        is custom
        is pickle.loads(pickle.dumps(AttentionBackendEnum["DUALKV"]))
    )
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


def test_other_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number alone decides: older ones are refused by name, newer ones taken for the newest."""
    for version, expected in (("0.22.1", (0, 22)), ("0.24.0", (0, 23)), ("0.25.1", (0, 25)), ("0.29.1rc1", (0, 26))):
        monkeypatch.setattr(vllm, "__version__", version)
        assert versions.installed() is versions.DIFFERENCES[expected]
    for version in ("0.34.0", "1.0.0", "dev"):
        monkeypatch.setattr(vllm, "__version__", version)
        assert versions.installed() is versions.DIFFERENCES[0, 26]
        assert plugin.SharedPrefixBackend is backend.SharedPrefixBackend
    monkeypatch.setattr(vllm, "__version__", "0.21.2")
    plugin.register()  # does nothing to who does not ask for it
    try:
        with pytest.raises(SharedPromptUnsupportedError, match=r"expected 0\.22 to 0\.33, or newer, .*, got 0\.21\.2"):
            AttentionBackendEnum.CUSTOM.get_class()
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()


def _no_field(monkeypatch: pytest.MonkeyPatch) -> None:
    config = "vllm.config.CacheConfig"
    monkeypatch.setitem(versions.NAMES, config, f"{versions.NAMES[config]} renamed")


def _no_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(vllm.config, "ParallelConfig")


def _no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, backend.__name__, None)


def _other_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_attn.FlashAttentionMetadataBuilder, "build", lambda self, common_attn_metadata: None)


def _no_seam(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(gpu_model_runner.GPUModelRunner, "_build_attention_metadata")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_no_field, "vllm.config.CacheConfig: expected one with renamed"),
        (_no_class, "vllm.config.ParallelConfig: expected one with decode_context_parallel_size"),
        (_no_module, "backend"),
        (_other_call, "FlashAttentionMetadataBuilder.build: expected the signature"),
        (_no_seam, "GPUModelRunner._build_attention_metadata: expected a function"),
    ],
)
def test_a_vllm_that_lacks_a_name(change: Any, said: str, warnings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its engines run on vLLM's own backend, and the log of each says once which name it is."""
    change(monkeypatch)
    plugin.register()
    try:
        for _ in range(2):
            assert AttentionBackendEnum.CUSTOM.get_class() is flash_attn.FlashAttentionBackend
        assert len(warnings) == 1 and "all layers run on vLLM's own FlashAttention backend" in warnings[0]
        assert said in warnings[0]
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()


def test_a_runner_that_comes_late(calls: Any, warnings: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner without the method that tells prompts' lengths, imported after the backend: attention is vLLM's own."""
    monkeypatch.delattr(gpu_model_runner.GPUModelRunner, "_build_attention_metadata")
    steps.run(layer := steps.Layer(), steps.builder(layer), DECODING)
    assert calls.rows == [6] and len(warnings) == 1 and "_build_attention_metadata: expected a function" in warnings[0]


def test_what_versions_differ_in() -> None:
    """The table says of the installed version what its code says."""
    found = versions.installed()
    shape = [*steps.cache_shape()]
    assert found.kv_dim == (shape.index(2) if len(shape) == 5 else None) and found.has_rswa == steps.HAS_RSWA
    keeps = speculator is None or "attn_states" in steps.parameters(speculator.DraftModelSpeculator.capture)
    assert found.keeps_captures == keeps
    # Builders make plans where vLLM makes the cache, once it knows how many pages there are.
    source = inspect.getsource(gpu_worker.Worker.initialize_from_config)
    known, pool, made = map(
        source.index, ("num_gpu_blocks = ", "_maybe_get_memory_pool_context(", "model_runner.initialize_kv_cache(")
    )
    assert known < made and (pool < made or versions.release() in ((0, 29), (0, 30), (0, 31)))  # keep it asleep
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
    statistics = Statistics(1e-9, "4 layers", log.VLLM, SimpleNamespace())
    statistics.count_stock("prompts alone")
    with caplog.at_level("INFO"):
        for _ in range(2):
            statistics.count_shared(common.block_table_tensor, 6, common.seq_lens, torch.from_numpy(cuts), 16, False)
    assert "4 layers: a step of 6 requests reads" in caplog.text
    assert "2 groups of 2.5 siblings, 1 requests alone" in caplog.text
    assert "steps: 2 of decoding, 0 mixed, vLLM's own 1 (prompts alone)" in caplog.text


def test_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few siblings among many requests: the log says once what to set, but not for the last requests of a rollout."""
    said: list[str] = []
    monkeypatch.setattr(log.logger, "log", lambda level, message, *rest: said.append(message % rest))
    monkeypatch.setattr(log.logger, "info", lambda *_: None)

    def read(statistics: Statistics, groups: int, siblings: int, alone: int = 0, length: int = 80) -> str:
        """A step of so many groups of so many siblings, with a page each of their prompt, and requests alone."""
        said.clear()
        firsts = np.concatenate([np.repeat(np.arange(groups), siblings), groups + np.arange(alone)])
        table = torch.from_numpy(np.stack([firsts, 10_000 + np.arange(len(firsts))], axis=1).astype(np.int32))
        keys, cuts = (
            torch.full((len(firsts),), length, dtype=torch.int32),
            torch.full((len(firsts),), 16, dtype=torch.int32),
        )
        for _ in range(2):
            statistics.count_shared(table, 2, keys, cuts, 16, False)
        return "".join(said)

    def fresh() -> Statistics:
        return Statistics(1e-9, "4 layers", log.VLLM, SimpleNamespace())

    scattered = fresh()
    text = read(scattered, 60, 3, alone=76)
    assert "256 requests have 136 prompts" in text and "docs/notes/routers.md" in text
    assert read(scattered, 60, 3, alone=76) == ""  # once
    assert "router_config_path=$(python -m flash_attn_dualkv.integrations.verl.router)" in read(fresh(), 0, 0, alone=16)
    together = fresh()
    assert read(fresh(), 0, 0, alone=15) == read(together, 16, 3) == read(together, 0, 0, alone=20) == ""
    assert "20 requests have 20 prompts" in read(fresh(), 0, 0, alone=20)
    assert read(fresh(), 0, 0, alone=64, length=1) == ""  # of vLLM's warm-up


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
