# SPDX-License-Identifier: BSD-3-Clause
"""Shared prompts under what training puts around a model: activation checkpointing, LoRA, DDP, FSDP."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from doc_examples import examples
from hybrid_models import KINDS, RAGGED, hybrid_model
from processes import run_ranks
from tiny_models import (
    MIXED,
    TOLERANCES,
    Tolerance,
    dualkv,
    gradients,
    replicated_logps,
    stock_twin,
    tiny_model,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


@pytest.mark.parametrize("name", ["qwen3", *KINDS])
def test_autocast(name):
    """float32 parameters, 16-bit arithmetic: as far from exact as the stock model under autocast."""
    model, samples = tiny_model("qwen3", dtype=torch.float32), MIXED
    if name in KINDS:
        model, samples = hybrid_model(name, torch.float32), RAGGED
    twin = stock_twin(model, "eager")
    with torch.no_grad():
        exact, _ = replicated_logps(twin, samples)
        with torch.autocast("cpu", torch.bfloat16):
            got, _ = dualkv.shared_prompt_forward(model, samples.pack())
            stock, _ = replicated_logps(twin, samples)
    assert got.dtype == torch.float32
    assert 0 < (got - exact).abs().max() <= 1.5 * (stock - exact).abs().max()


def test_norms_in_float32():
    """As PEFT's preparation for training on quantised weights leaves them: q and k come out wider than v."""
    model = tiny_model("qwen3", dtype=torch.bfloat16)
    for layer in model.model.layers:
        layer.self_attn.q_norm.float()
        layer.self_attn.k_norm.float()
    with torch.no_grad():
        got, _ = dualkv.shared_prompt_forward(model, MIXED.pack())
        exact, _ = replicated_logps(stock_twin(model.float()), MIXED)
    assert (got - exact).abs().max() < 0.1


# --- several processes ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def on_cpu() -> dict[tuple[int, str], ranks.Found]:
    return ranks.run(ranks.CPU)


@pytest.mark.parametrize("wrapper", ranks.CPU.wrappers)
def test_wrapped_models(on_cpu, wrapper):
    """Log-probabilities of each rank's own samples, and the mean of the ranks' gradients."""
    exact = TOLERANCES[torch.float32]
    ranks.check(ranks.CPU, on_cpu, wrapper, Tolerance(0.05, 0.1) if "mixed" in wrapper else exact)


@pytest.fixture(scope="module")
def on_gpus() -> dict[tuple[int, str], ranks.Found]:
    if torch.cuda.device_count() < len(ranks.SHARES):
        pytest.skip(f"needs {len(ranks.SHARES)} GPUs")
    return ranks.run(ranks.GPUS)


@pytest.mark.gpu
@pytest.mark.parametrize("wrapper", ranks.GPUS.wrappers)
def test_wrapped_models_on_gpus(on_gpus, wrapper):
    """The same with a GPU for each rank, bfloat16 and NCCL, against one GPU that has all samples."""
    ranks.check(ranks.GPUS, on_gpus, wrapper, Tolerance(0.05, 0.1) if "mixed" in wrapper else Tolerance(0.02, 0.02))


def _rounded_output(rank: int, results: Any) -> None:
    model = tiny_model("qwen3", dtype=torch.float32)
    batch = MIXED.pack()

    def scores() -> list[torch.Tensor]:
        logps, entropy = dualkv.shared_prompt_forward(model, batch, with_entropy=True)
        (logps.sum() + entropy.sum()).backward()
        whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in gradients(model).values()]
        model.zero_grad()
        top = dualkv.shared_prompt_logits(model, batch, batch.token_index, lambda logits, at: (logits.amax(-1),))[0]
        return [logps.detach(), entropy.detach(), top, *whole]

    results["expected"] = scores()
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16))
    results["found"] = scores()
    results["again"] = scores()
    with torch.no_grad():
        assert model(batch.input_ids[None]).logits.dtype == torch.bfloat16


def test_fsdp_2_rounds_logits_and_no_scores() -> None:
    """A policy's output_dtype, which accelerate sets for bf16, is for what the model itself returns."""
    found = run_ranks(_rounded_output, 1)
    for run in ("found", "again"):
        assert [one.dtype for one in found[run]] == [torch.float32] * len(found["expected"])
        torch.testing.assert_close(found[run], found["expected"], rtol=1e-6, atol=1e-6)


# --- the recipe for ranks ---------------------------------------------------------------------------------------------

SIZES = (([5, 6, 7], 3), ([5, 6, 7], 9), ([8, 9], 4), ([5, 6, 7], 1), ([3] * 12, 6))  # five samples for two ranks


def _recipe(rank: int, world: int, results: Any) -> None:
    """The gradients of the page's step on a rank, as DDP averages them."""
    names: dict[str, Any] = {}
    exec(*examples("training", "ranks"), names)
    model = tiny_model("qwen3")
    prompts, responses = [prompt for prompt, _ in SIZES], [[*range(10, 10 + count)] for _, count in SIZES]
    advantages = torch.tensor([1.0, -1.0, 0.5, 2.0, -0.5], dtype=torch.float64)
    names["step"](model, prompts, responses, advantages, 24, dist.group.WORLD)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    results[rank] = [parameter.grad for parameter in model.parameters()]


def test_the_recipe_for_ranks() -> None:
    """On two ranks, in micro-batches of 24 rows, and with unequal counts of samples: the gradient of one process."""
    expected, *found = (run_ranks(_recipe, world, world) for world in (1, 2))
    for rank in range(2):
        torch.testing.assert_close(found[0][rank], expected[0], rtol=1e-8, atol=1e-10)
