# SPDX-License-Identifier: BSD-3-Clause
"""A trial writes into no parameter: not into a rank's shard, nor into the copies that wrappers gather and may keep."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_ranks
from tiny_models import MIXED, TOLERANCES, check_equal, dualkv, gradients, replicated_logps, tiny_model
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp import ShardingStrategy, fully_shard
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

pytest.importorskip("peft", "0.17")

VALUE = TOLERANCES[torch.float32].value


def fresh_lora() -> Any:
    """A model with an adapter whose B is zero, and with a norm that is, in the root's unit."""
    import peft

    torch.manual_seed(3)
    model = tiny_model("gemma2", dtype=torch.float32)
    nn.init.zeros_(model.model.norm.weight)
    torch.manual_seed(4)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear"))
    for parameter in wrapped.parameters():
        parameter.requires_grad_()
    return wrapped


def _fsdp1(strategy: ShardingStrategy, flat: bool = False) -> Callable[[Any], Any]:
    def wrap(model: Any) -> Any:
        layers = {type(model.base_model.model.model.layers[0])}
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=layers)
        options: dict[str, Any] = dict(device_id=torch.device("cpu"), use_orig_params=not flat)
        return Fsdp1(model, sharding_strategy=strategy, auto_wrap_policy=policy, **options)

    return wrap


def _fsdp2(layers: bool, **options: Any) -> Callable[[Any], Any]:
    def wrap(model: Any) -> Any:
        mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
        for layer in model.base_model.model.model.layers if layers else ():
            fully_shard(layer, mesh=mesh, **options)
        return fully_shard(model, mesh=mesh, **options)

    return wrap


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "FSDP 1, full": _fsdp1(ShardingStrategy.FULL_SHARD),
    "FSDP 1, grad op": _fsdp1(ShardingStrategy.SHARD_GRAD_OP),
    "FSDP 1, none": _fsdp1(ShardingStrategy.NO_SHARD),
    "FSDP 1, grad op, flat": _fsdp1(ShardingStrategy.SHARD_GRAD_OP, flat=True),
    "FSDP 2, layers": _fsdp2(True),
    "FSDP 2, layers, kept": _fsdp2(True, reshard_after_forward=False),
    "FSDP 2, root": _fsdp2(False),
    "FSDP 2, root, resharded": _fsdp2(False, reshard_after_forward=True),
    "DDP": nn.parallel.DistributedDataParallel,
}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all that modules hold of parameters, gathered or not."""
    found = {}
    for name, module in model.named_modules():
        name = name.replace("_fsdp_wrapped_module", "").strip(".").replace("..", ".")
        for home in (module._parameters, vars(module)):
            for part, one in home.items():
                if isinstance(one, Tensor):
                    own = one.to_local() if hasattr(one, "to_local") else one
                    if not own.untyped_storage().size():  # views of what FSDP 1 has freed
                        continue
                    found[f"{name}.{part}"] = own.detach().clone()
    return found


def _run_rank(rank: int, results: Any) -> None:
    batch = MIXED.pack()
    for name, wrap in WRAPPERS.items():
        model = fresh_lora()
        whole = _tensors(model)
        wrapped = wrap(model)
        shards = _tensors(wrapped)
        with torch.no_grad():
            old, _ = dualkv.shared_prompt_forward(wrapped, batch)
        changed, compared = [], 0
        for place, one in _tensors(wrapped).items():
            same = [other[place] for other in (whole, shards) if place in other and other[place].shape == one.shape]
            changed += [place] * (bool(same) and not any(torch.equal(other, one) for other in same))
            compared += bool(same)
        assert compared >= len(shards) / 2
        logps, _ = dualkv.shared_prompt_forward(wrapped, batch)
        logps.sum().backward()
        norm = torch.stack([_squares(one.grad) for one in wrapped.parameters() if one.grad is not None]).sum()
        if not isinstance(wrapped, nn.parallel.DistributedDataParallel) and "none" not in name:
            dist.all_reduce(norm)
        results[rank, name] = changed, old, logps.detach(), float(norm)


def _squares(gradient: Any) -> Tensor:
    own: Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return own.double().square().sum()


@pytest.fixture(scope="module")
def found() -> dict[Any, Any]:
    return run_ranks(_run_rank, 2)


@pytest.fixture(scope="module")
def expected() -> tuple[Tensor, float]:
    """Log-probabilities of the sequences alone, and the squared norm of all gradients."""
    model = fresh_lora()
    logps, _ = replicated_logps(model, MIXED)
    logps.sum().backward()
    return logps.detach(), float(sum(_squares(one) for one in gradients(model).values()))


@pytest.mark.parametrize("name", WRAPPERS)
def test_no_copy_of_a_parameter_changes(name: str, found: dict[Any, Any], expected: tuple[Tensor, float]) -> None:
    """The first log-probabilities, and the first step's gradients, are those of the sequences alone."""
    for rank in range(2):
        changed, old, logps, norm = found[rank, name]
        assert changed == []
        check_equal(old, expected[0], VALUE)
        check_equal(logps, expected[0], VALUE)
        assert abs(norm / expected[1] - 1) < 1e-3
