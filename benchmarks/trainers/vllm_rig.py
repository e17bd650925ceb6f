# SPDX-License-Identifier: BSD-3-Clause
"""Engines of vLLM with random weights of a known shape, each in a process of its own, and what they sample.

bench_vllm.py, check_vllm.py and mismatch_vllm.py start themselves again for each engine, with --child and its settings;
such a process says what it has found by `tell`. sglang_rig.py has what differs for SGLang.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

from flash_attn_dualkv.model_shape import MODELS

Found = TypeVar("Found")
MARK = "RESULT "  # in front of lines of results
# Settings and environment of engines, by the names under which they are measured, and settings of
# features. Arctic Inference's forest cascade takes the first runner, and its graphs leave attention
# out. In speculation tokens are few, so that one that is sampled has been in the prompt. Models are
# shapes that `flash_attn_dualkv.predict` lacks: of layers with states, 1 of 4 attends. Qwen3-Next's
# code needs experts: every eighth layer of qwen3.5-27b has three, which all tokens take, of the size
# of its MLP together. FlashInfer's prefill of states would be compiled where the engine starts.
_READ: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("vllm_engines.json").read_text())
ENGINES, HYBRIDS, FEATURES = _READ["engines"], _READ["models"], _READ["features"]
PLACEMENTS: dict[str, str] = _READ["placements"]  # see replicas.py


@dataclass
class Engine:
    """What is run.

    Attributes:
        model, layers: its shape, by its name in `flash_attn_dualkv.predict`, and how many layers of it.
        backend: of attention, as vLLM names it; None: vLLM's default; CUSTOM: this package.
        exact: of this package.
        graphs: vLLM's mode of CUDA graphs; None: its default.
        compiles: vLLM's compilation, of its own operators and without code that is generated.
        runner: "1" or "2", vLLM's model runner; None: its default.
        rollouts: groups, responses of each, tokens of a prompt, fewest and most tokens of a response.
        routers: which divide a rollout among replicas; then the last of its numbers is the mean of lengths.
        replicas, replica: how many, and which one is run; None: the one that replicas.py expects to end last.
        repeat: runs of each of them behind the warm-up.
        options: more arguments of vLLM's LLM.
        config: entries of the model's configuration, in place of those of its shape.
        sleeps: levels at which the engine sleeps, one after the other, to wake up with other weights.
        adapters: how many of LoRA its requests take in turn, in front of those that take none.
    """

    model: str = "qwen3-8b"
    layers: int = 8
    backend: str | None = None
    exact: str | None = None
    graphs: str | None = None
    compiles: bool = True
    runner: str | None = None
    rollouts: list[list[int]] = field(default_factory=list)
    routers: list[str] = field(default_factory=list)
    replicas: int = 1
    replica: int | None = None
    repeat: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    sleeps: list[int] = field(default_factory=list)
    adapters: int = 0


def parsed(
    parser: argparse.ArgumentParser, arguments: list[str] | None, limit: float = 240.0
) -> tuple[argparse.Namespace, Engine | None]:
    """A script's options, with the time limit of an engine; and in the process of an engine, that engine."""
    parser.add_argument("--limit-s", type=float, default=limit, help="of an engine")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    return options, Engine(**json.loads(options.child)) if options.child else None


def run_child(
    script: str, arguments: list[str], environment: dict[str, str], limit: float
) -> tuple[list[Any], str, str]:
    """A Python script in a process of its own: its results, its other output, and how it ended.

    Results that it has printed are kept when it fails or runs out of time.
    """
    command = [sys.executable, script, *arguments]
    try:
        done = subprocess.run(command, env=os.environ | environment, timeout=limit, capture_output=True, text=True)
        out, err, end = done.stdout, done.stderr, f"exit status {done.returncode}"
    except subprocess.TimeoutExpired as error:
        out, err = ((one or b"").decode(errors="replace") for one in (error.stdout, error.stderr))
        end = "time limit"
    lines = out.splitlines()
    rows = [json.loads(line[len(MARK) :]) for line in lines if line.startswith(MARK)]
    return rows, "\n".join(line for line in [*lines, *err.splitlines()] if not line.startswith(MARK)), end


def tell(result: dict[str, Any]) -> None:
    """Print what `run_child` returns."""
    print(MARK + json.dumps(result), flush=True)


def gpus() -> list[str]:
    """Those that this process may use, as CUDA_VISIBLE_DEVICES has them; "0" where there is none."""
    known = os.environ.get("CUDA_VISIBLE_DEVICES")
    return known.split(",") if known else [str(place) for place in range(max(1, torch.cuda.device_count()))]


def side_by_side(
    tasks: Sequence[Callable[[dict[str, str]], Found]], width: int = 1, engines_per_gpu: int = 1
) -> list[Found]:
    """What the tasks give, in their order; each gets the environment of so many GPUs, which so many share."""
    free: SimpleQueue[str] = SimpleQueue()
    all_gpus = gpus() * engines_per_gpu
    places = [",".join(all_gpus[start : start + width]) for start in range(0, len(all_gpus) - width + 1, width)]
    for place in places:
        free.put(place)

    def run(task: Callable[[dict[str, str]], Found]) -> Found:
        place = free.get()
        try:
            return task({"CUDA_VISIBLE_DEVICES": place})
        finally:
            free.put(place)

    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(run, tasks))


def run_engines(
    script: str, engines: Sequence[tuple[str, dict[str, Any]]], limit: float, *arguments: str, engines_per_gpu: int = 1,
    known: dict[str, dict[str, Any]] = ENGINES,
) -> list[list[Any]]:  # fmt: skip
    """Results of engines, each of a known name and settings; prints the output of one that has failed.

    Engines run side by side, each on as many GPUs as its tensor parallelism takes.
    """

    def run(name: str, settings: dict[str, Any], gpu: dict[str, str]) -> list[Any]:
        engine = known[name]
        given = [*arguments, "--child", json.dumps(settings | engine["settings"])]
        rows, output, end = run_child(script, given, engine["environment"] | gpu, limit)
        print(f"{name}: {len(rows)} results, {end}", flush=True)
        if end != "exit status 0":
            print(f"{name} {settings} has FAILED: {end}\n{output[-6000:]}", flush=True)
        return rows

    width = max(settings.get("options", {}).get("tensor_parallel_size", 1) for _, settings in engines)
    return side_by_side([partial(run, *engine) for engine in engines], width, engines_per_gpu)


def write_model(engine: Engine, folder: str, length: int) -> None:
    """A configuration of transformers that vLLM reads."""
    shape = MODELS[engine.model]
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": shape.vocab,
        "hidden_size": shape.hidden, "intermediate_size": shape.intermediate, "num_hidden_layers": engine.layers,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": max(40960, length),
        "attention_bias": False, "tie_word_embeddings": shape.tied, "torch_dtype": "bfloat16",
        "bos_token_id": 151643, "eos_token_id": 151645,
    }  # fmt: skip
    (Path(folder) / "config.json").write_text(json.dumps(config | engine.config))


def graph_sizes(requests: int, tokens: int) -> list[int]:
    """Rows for which CUDA graphs are captured, for steps of at most so many requests and tokens."""
    return sorted({size for size in (1, 2, 4, 8, 16, 32, 64, 128) if size < tokens} | {requests, tokens})


def prepare_environment(folder: str, runner: str | None) -> None:
    """No network, nothing kept, the engine in this process."""
    os.environ |= {
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_DISABLE_COMPILE_CACHE": "1", "TOKENIZERS_PARALLELISM": "false",
        "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_CACHE_ROOT": f"{folder}/vllm", "VLLM_CONFIG_ROOT": f"{folder}/config",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
    }  # fmt: skip
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    if runner is not None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(runner == "2"))


@contextlib.contextmanager
def running(engine: Engine, requests: int, length: int) -> Iterator[Any]:
    """vLLM's LLM for so many requests of at most so many tokens."""
    with tempfile.TemporaryDirectory() as folder:
        prepare_environment(folder, engine.runner)
        write_model(engine, folder, length)
        from vllm.plugins import load_general_plugins

        from flash_attn_dualkv.integrations.vllm import register

        load_general_plugins()  # before LLM is imported: plug-ins patch what it takes
        from vllm import LLM

        register()  # where the package is on the path, but not installed
        speculation = engine.options.get("speculative_config", {})
        tokens = requests * (1 + speculation.get("num_speculative_tokens", 0))
        graphs = {} if engine.graphs is None else {"cudagraph_mode": engine.graphs}
        arguments: dict[str, Any] = {
            "load_format": "dummy", "dtype": "bfloat16", "skip_tokenizer_init": True, "enable_prefix_caching": True,
            "max_num_seqs": requests, "max_model_len": length, "gpu_memory_utilization": 0.85, "seed": 0,
            "kernel_config": {"enable_flashinfer_autotune": False},
            "compilation_config": {
                "mode": 3 if engine.compiles else 0, "backend": "eager",
                "cudagraph_capture_sizes": graph_sizes(requests, tokens), **graphs,
            },
        }  # fmt: skip
        if engine.backend is not None:
            arguments["attention_backend"] = engine.backend
        if engine.backend == "CUSTOM":
            arguments["additional_config"] = {"flash_attn_dualkv": {"exact": engine.exact, "log_interval": 2.0}}
        yield LLM(model=folder, **(arguments | engine.options))


def ask(thing: Any, path: str) -> Any:
    """An attribute of attributes, or None; numbers are places in lists."""
    for name in path.split("."):
        thing = thing[int(name)] if name.isdigit() and thing else getattr(thing, name, None)
    return thing


def runner_of(llm: Any) -> Any:
    """vLLM's model runner, in this process."""
    worker = ask(llm.llm_engine, "engine_core.engine_core.model_executor.driver_worker")
    return ask(worker, "worker.model_runner") or ask(worker, "model_runner")


def write_adapter(engine: Engine, folder: Path, seed: int) -> str:
    """A LoRA adapter of rank 8 of the projections of attention, as peft saves it; its folder."""
    from safetensors.torch import save_file

    shape, rank, draw = MODELS[engine.model], 8, torch.Generator().manual_seed(seed)
    heads, kv_heads = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "q_proj": (shape.hidden, heads), "k_proj": (shape.hidden, kv_heads),
        "v_proj": (shape.hidden, kv_heads), "o_proj": (heads, shape.hidden),
    }  # fmt: skip
    weights = {}
    for layer, (name, (wide, out)) in itertools.product(range(engine.layers), sizes.items()):
        path = f"base_model.model.model.layers.{layer}.self_attn.{name}"
        for part, size, width in (("A", (rank, wide), wide**-0.5), ("B", (out, rank), 0.3)):
            weights[f"{path}.lora_{part}.weight"] = (torch.randn(size, generator=draw) * width).bfloat16()
    made = folder / f"adapter-{seed}"
    made.mkdir()
    save_file(weights, made / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "target_modules": [*sizes]}
    (made / "adapter_config.json").write_text(json.dumps(config))
    return str(made)


@torch.inference_mode()
def set_weights(model: torch.nn.Module, seed: int = 0) -> None:
    """Weights with which attention and next tokens are neither uniform nor certain, the same in every engine.

    Args:
        model: of one rank; `LLM.apply_model` takes this function to all.
    """
    weights = dict(model.named_parameters())
    has_head = any("lm_head" in name for name in weights)
    # Logits have a standard deviation of 3. Embeddings that are the head, too, have less where the
    # model multiplies them by a normalizer: with 3, a token of Gemma-2 followed itself for certain.
    is_scaled = any("normalizer" in name for name, _ in model.named_buffers())
    of_head = 0.6 if is_scaled and not has_head else 3.0
    for name, one in weights.items():
        draw = torch.Generator(one.device).manual_seed(seed + sum(name.encode()))
        if one.dim() > 1:
            # Embeddings that are the head are as small as one: with a standard deviation of 1, a
            # token was followed by itself with a probability of 1.
            is_head = "lm_head" in name or ("embed_tokens" in name and not has_head)
            width = 1.0 if "embed_tokens" in name and has_head else (of_head if is_head else 1.0) / one.shape[-1] ** 0.5
            one.normal_(0.0, width, generator=draw)
        elif name.endswith("bias"):
            one.normal_(0.0, 0.1, generator=draw)
        elif name.endswith((".A_log", ".A")):  # of states, which forget half of a token in 3 to 400 steps
            one.uniform_(-6.0, -1.0, generator=draw)
            if name.endswith(".A"):  # as vLLM keeps it
                one.exp_().neg_()
        else:  # of norms: weights of 1 hide most differences of their sums
            one.uniform_(0.5, 1.5, generator=draw).mul_(2.0 if "q_norm" in name else 1.0)
            if type(model.get_submodule(name.rpartition(".")[0])).__name__ == "GemmaRMSNorm" and not is_scaled:
                one.sub_(1.0)  # which it adds


def refuse_certain(logprob: float) -> None:
    """Comparisons of tokens that were certain find nothing.

    Args:
        logprob: the mean of what was sampled.
    """
    if not logprob < -0.1:
        raise ValueError(f"tokens were certain: the mean of their log-probabilities is {logprob:.2g}")


def describe(llm: Any) -> dict[str, Any]:
    """Which runner, backend and graphs an engine has, and how many steps this package has counted."""
    engine = llm.llm_engine
    return {
        "vllm": sys.modules["vllm"].__version__,
        "graphs": str(ask(engine, "vllm_config.compilation_config.cudagraph_mode")),
        "block_size": ask(engine, "vllm_config.cache_config.block_size"),
        **llm.collective_rpc(describe_worker)[0],
    }


def describe_worker(worker: Any) -> dict[str, Any]:
    """What one of vLLM's workers, wrapped or not, knows."""
    from vllm.v1.kv_cache_interface import AttentionSpec

    runner = ask(worker, "worker.model_runner") or ask(worker, "model_runner")
    groups = itertools.chain.from_iterable(runner.attn_groups)
    builders = [builder for group in groups for builder in group.metadata_builders]
    builder = next(builder for builder in builders if isinstance(builder.kv_cache_spec, AttentionSpec))
    found: dict[str, Any] = {"runner": type(runner).__module__, "backend": type(builder).__module__}
    counted = ask(builder, "_sharing.statistics")
    if counted is not None:
        found |= {"steps": dict(counted.steps), "stock_steps": dict(counted.stock)}
    return found


def draw_prompts(groups: int, tokens: int, seed: int) -> list[list[int]]:
    """Random tokens."""
    draw = random.Random(seed)
    return [[draw.randrange(1000, 150000) for _ in range(tokens)] for _ in range(groups)]


def sample(
    llm: Any, requests: list[dict[str, Any]], tokens: int, temperature: float, adapters: Sequence[Any] | None = None
) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens of a response to each request, and their log-probabilities; `adapters`: a LoRARequest or None of each."""
    from vllm import SamplingParams

    sampling = [
        SamplingParams(
            temperature=temperature, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=1,
            seed=seed if temperature else None,
        )
        for seed in range(len(requests))
    ]  # fmt: skip
    generated = llm.generate(requests, sampling, use_tqdm=False, lora_request=adapters)
    outputs = [output.outputs[0] for output in generated]
    logprobs = [[step[token].logprob for token, step in zip(found.token_ids, found.logprobs)] for found in outputs]
    return [list(found.token_ids) for found in outputs], logprobs
