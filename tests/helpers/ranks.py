# SPDX-License-Identifier: BSD-3-Clause
"""Models under what replicates or shards them over processes, each process with samples of its own."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from processes import run_ranks
from tiny_models import MIXED, Samples, Tolerance, check_equal, check_gradients, dualkv, gradients
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from flash_attn_dualkv import scores

# Ranks with different prompts and different numbers of chunks of the head.
SHARES = [[0, 1, 2, 3], [4, 5]]
WRAPPERS = ["ddp", "fsdp1", "fsdp1, flat parameters", "fsdp2", "fsdp2, mixed precision"]


@dataclass(frozen=True)
class Setup:
    """What the processes of one start have in common."""

    backend: str
    device_type: str
    dtype: torch.dtype
    samples: Samples
    wrappers: list[str]
    shape: dict[str, Any] = field(default_factory=dict)
    # The function that makes the model, as module:name, and the model's type.
    make: str = "tiny_models:tiny_model"
    name: str = "qwen3"

    def model(self, rank: int, dtype: torch.dtype) -> Any:
        """As `from_pretrained` makes it: what is no parameter, the frequencies of RoPE, stays float32."""
        module, function = self.make.split(":")
        make = getattr(importlib.import_module(module), function)
        model = make(self.name, dtype=torch.float32, **self.shape).to(self.device(rank)).train()
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        return model

    def device(self, rank: int) -> torch.device:
        return torch.device(self.device_type, rank) if self.device_type == "cuda" else torch.device("cpu")

    def share(self, rank: int) -> Samples:
        return self.samples.take(SHARES[rank])


CPU = Setup("gloo", "cpu", torch.float32, MIXED, WRAPPERS)
GPUS = Setup(
    "cpu:gloo,cuda:nccl",
    "cuda",
    torch.bfloat16,
    Samples.random([(700, [130, 65, 0]), (129, [300, 64]), (1, [90])]).take([0, 3, 1, 5, 2, 4]),
    [*WRAPPERS, "fsdp2, parameters on the host"],
    dict(hidden_size=256, intermediate_size=512, num_attention_heads=8, head_dim=64),
)


class Found(NamedTuple):
    """Of one rank: its log-probabilities without and with gradients, and all ranks' gradients; on the CPU."""

    old: torch.Tensor
    logps: torch.Tensor
    gradients: dict[str, torch.Tensor]


def run(setup: Setup) -> dict[tuple[int, str], Found]:
    """What all ranks compute under all wrappers, in one start of the processes."""
    return run_ranks(_run_rank, len(SHARES), setup, forked=setup.device_type == "cpu", backend=setup.backend)


def check(setup: Setup, found: dict[tuple[int, str], Found], wrapper: str, tolerance: Tolerance) -> None:
    """Against one process that has the samples of all ranks."""
    model = setup.model(0, setup.dtype)
    for rank in range(len(SHARES)):
        got = found[rank, wrapper]
        assert torch.equal(got.old, got.logps)
        assert got.logps.dtype == torch.float32
        logps, _ = dualkv.shared_prompt_forward(model, setup.share(rank).pack(device=setup.device(0)))
        check_equal(got.logps, logps.detach().cpu(), tolerance.value)
        (logps.sum() / len(SHARES)).backward()
    expected = {name: one.float().cpu() for name, one in gradients(model).items()}
    for rank in range(len(SHARES)):
        check_gradients(found[rank, wrapper].gradients, expected, tolerance.gradient)


def _run_rank(rank: int, setup: Setup, results: Any) -> None:
    device = setup.device(rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    scores.LOGIT_ELEMENTS = 97 * 8
    for wrapper in setup.wrappers:
        model = setup.model(rank, torch.float32 if "mixed" in wrapper else setup.dtype)
        model.gradient_checkpointing_enable(dict(use_reentrant=False))
        wrapped = wrap(model, wrapper, device)
        batch = setup.share(rank).pack(device=device)
        with torch.no_grad():
            old, _ = dualkv.shared_prompt_forward(wrapped, batch)
        logps, _ = dualkv.shared_prompt_forward(wrapped, batch)
        logps.sum().backward()
        whole = {name: one.float().cpu() for name, one in whole_gradients(wrapped, model).items()}
        results[rank, wrapper] = Found(old.cpu(), logps.detach().cpu(), whole)


def wrap(model: Any, wrapper: str, device: torch.device) -> Any:
    if wrapper == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if "fsdp1" in wrapper:
        layers = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={type(model.model.layers[0])})
        return Fsdp1(model, auto_wrap_policy=layers, device_id=device, use_orig_params="flat" not in wrapper)
    mesh = dist.device_mesh.init_device_mesh(device.type, (len(SHARES),))
    policies: dict[str, Any] = dict(
        mp_policy=MixedPrecisionPolicy(torch.bfloat16) if "mixed" in wrapper else MixedPrecisionPolicy(),
        offload_policy=CPUOffloadPolicy() if "host" in wrapper else OffloadPolicy(),
    )
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, **policies)
    return fully_shard(model, mesh=mesh, **policies)


def whole_gradients(wrapped: Any, model: Any) -> dict[str, torch.Tensor]:
    """The gradients of all parameters, unsharded."""
    if not isinstance(wrapped, Fsdp1):
        found = gradients(model)
        return {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in found.items()}

    # What a step of length 1 makes of zeros: FSDP1 does not unshard the gradients of flat
    # parameters.
    with torch.no_grad():
        for one in wrapped.parameters():
            one.zero_()
    torch.optim.SGD(wrapped.parameters(), lr=1.0).step()
    with Fsdp1.summon_full_params(wrapped):
        return {name.replace("_fsdp_wrapped_module.", ""): -one.detach() for name, one in wrapped.named_parameters()}
