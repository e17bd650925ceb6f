# SPDX-License-Identifier: BSD-3-Clause
"""Engines of SGLang with random weights of a known shape, each in a process of its own; vllm_rig.py has what is common.

SGLang's scheduler is another process, which imports this module, too: `run_scheduler` adds methods that an engine's
collective_rpc calls.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import vllm_rig as rig
from vllm_rig import Engine

# "stock" is the backend that SGLang takes on Hopper by itself; "unscheduled" the same without its
# schedule of splits, which some fail to capture in a graph (sglang#22800).
ENGINES: dict[str, dict[str, Any]] = {
    name: {"settings": {"backend": backend}, "environment": {}}
    for name, backend in (("stock", "fa3"), ("flashinfer", "flashinfer"), ("triton", "triton"), ("dualkv", "dualkv"))
}
UNSCHEDULED = "BENCH_SGLANG_UNSCHEDULED"
ENGINES["unscheduled"] = ENGINES["stock"] | {"environment": {UNSCHEDULED: "1"}}
SPLIT = "BENCH_SGLANG_SPLIT"  # this package with exact=None where SGLang is deterministic, too
ENGINES["split"] = ENGINES["dualkv"] | {"environment": {SPLIT: "1"}}
# Room for several engines on a GPU.
ROOM = {"mem_fraction_static": 0.25, "max_total_tokens": 1 << 17}


def run_cases(
    script: str, cases: list[tuple[str, str]], features: dict[str, dict[str, Any]], base: dict[str, Any], limit: float,
    **more: Any,
) -> list[list[Any]]:  # fmt: skip
    """Results of engines of features: settings, options of SGLang's Engine, and an environment."""
    engines, known = [], {}
    for feature, name in cases:
        settings = base | features[feature] | {"options": base["options"] | features[feature].get("options", {})}
        environment = ENGINES[name]["environment"] | settings.pop("environment", {})
        known[f"{name}, {feature}"] = ENGINES[name] | {"environment": environment}
        engines.append((f"{name}, {feature}", settings))
    return rig.run_engines(script, engines, limit, known=known, **more)


@contextlib.contextmanager
def running(engine: Engine, requests: int, length: int) -> Iterator[Any]:
    """SGLang's Engine for so many requests of at most so many tokens."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        os.environ.setdefault("DUALKV_SGLANG", json.dumps({"log_interval": 2.0}))
        rig.write_model(engine, folder, length)
        from sglang.srt.entrypoints.engine import Engine as SGLang

        from flash_attn_dualkv.integrations.sglang import register

        register()  # where the package is on the path, but not installed
        arguments: dict[str, Any] = {
            "model_path": folder, "load_format": "dummy", "dtype": "bfloat16", "skip_tokenizer_init": True,
            "attention_backend": engine.backend, "sampling_backend": "pytorch", "grammar_backend": "none",
            "context_length": length, "max_running_requests": requests, "mem_fraction_static": 0.85, "random_seed": 0,
            "cuda_graph_bs": rig.graph_sizes(requests, requests), "disable_piecewise_cuda_graph": True,
            "log_level": "info",
        }  # fmt: skip
        watched = type("Watched", (SGLang,), {"run_scheduler_process_func": staticmethod(run_scheduler)})
        llm = watched(**(arguments | engine.options))
        try:
            yield llm
        finally:
            llm.shutdown()


def run_scheduler(*arguments: Any) -> None:
    """SGLang's scheduler process, whose scheduler has methods for `LLM.collective_rpc`."""
    from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
    from sglang.srt.layers.sampler import Sampler
    from sglang.srt.managers import scheduler
    from sglang.srt.model_executor.model_runner import ModelRunner

    from flash_attn_dualkv.integrations.sglang import register

    register()
    if os.environ.get(UNSCHEDULED):
        FlashAttentionBackend._compute_scheduler_metadata = lambda *_: None
    if os.environ.get(SPLIT):
        from flash_attn_dualkv.integrations.engines.settings import Settings
        from flash_attn_dualkv.integrations.sglang import backend

        backend.read_settings = lambda runner: Settings()

    class Watched(scheduler.Scheduler):
        """One that notes when its steps end."""

        rig_ends: list[tuple[float, bool]]

        def __init__(self, *of_scheduler: Any) -> None:
            super().__init__(*of_scheduler)
            self.rig_ends = []

        def process_batch_result(self, batch: Any, result: Any) -> None:
            super().process_batch_result(batch, result)
            self.rig_ends.append((time.perf_counter(), batch.forward_mode.is_decode()))

        def rig_weights(self, seed: int) -> None:
            rig.set_weights(self.tp_worker.model_runner.model, seed)

        def rig_train(self) -> None:
            """Load the weights of `trainer`."""
            weights = trainer(self.server_args.model_path).named_parameters()
            self.tp_worker.model_runner.model.load_weights((name, one.detach()) for name, one in weights)
            torch.cuda.empty_cache()

        def rig_force(self) -> None:
            """Sample from here on what `successors` says."""
            stock = ModelRunner.sample

            def sample(runner: Any, logits_output: Any, forward_batch: Any) -> Any:
                Sampler._sample_from_probs = lambda *_: successors(forward_batch)
                return stock(runner, logits_output, forward_batch)

            ModelRunner.sample = sample

        def rig_tell(self, path: str) -> None:
            """Write what `told` returns."""
            backend = self.tp_worker.model_runner.attn_backend
            steps = [end - begin for (begin, _), (end, is_decode) in pairwise(self.rig_ends) if is_decode]
            self.rig_ends.clear()
            about = {"backend": type(backend).__name__, "page_size": self.server_args.page_size}
            about |= {"device": torch.cuda.get_device_name(), "sglang": sys.modules["sglang"].__version__}
            counted = rig.ask(backend, "_statistics") or rig.ask(backend, "decode_backend._statistics")
            if counted is not None:
                about |= {"steps": dict(counted.steps), "stock_steps": dict(counted.stock)}
            Path(path).write_text(json.dumps({"steps": steps, "about": about}))

    scheduler.Scheduler = Watched
    scheduler.run_scheduler_process(*arguments)


def trainer(folder: str) -> Any:
    """transformers' model of a configuration in float32, with weights that are the same in every process."""
    import transformers

    from flash_attn_dualkv.integrations.transformers import register

    register()
    config, device = transformers.AutoConfig.from_pretrained(folder), "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="dualkv", dtype=torch.float32)
    model.to_empty(device=device).tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    rig.set_weights(model)
    return model.eval()


def successors(forward_batch: Any) -> torch.Tensor:
    """The next token of each request, by the last that it has: engines whose rounding differs decode the same."""
    tokens = forward_batch.input_ids
    if not forward_batch.forward_mode.is_decode():
        tokens = tokens[forward_batch.extend_seq_lens.cumsum(0) - 1]
    return ((tokens.long() * 7919 + 13) % 100003 + 1000).int()


def settle(llm: Any) -> None:
    """Wait until SGLang's last step is over, before which it neither sleeps nor empties its cache, and empty that."""
    while not llm.flush_cache().success:
        time.sleep(0.02)


def told(llm: Any) -> dict[str, Any]:
    """Seconds of the scheduler's decoding steps since the last call, and about its backend."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "told.json"
        llm.collective_rpc("rig_tell", path=str(path))
        found: dict[str, Any] = json.loads(path.read_text())
        return found
