# SPDX-License-Identifier: BSD-3-Clause
"""TRL's trainers on two processes: what is shared differs between the ranks, what comes out does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_trl
import torch
from processes import run_ranks
from tiny_models import check_equal, check_gradients, gradients
from tiny_trl import StockInGroups, check_runs, model_on_disk, shared, train, trainer
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from trl_ranks import RANKS, free_port, join, on_ranks, run_of

SETUPS: dict[str, dict[str, Any]] = {
    "ddp": dict(beta=0.1, steps_per_generation=2, per_device_train_batch_size=4, num_iterations=2),
    "ddp, groups across ranks": dict(num_generations=8, per_device_train_batch_size=4, gradient_accumulation_steps=2),
}


class SomeRanks(shared.SharedPromptGRPOTrainer):
    """The first rank refuses to share every other forward: the other one goes on sharing."""

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        self.forwards = getattr(self, "forwards", 0) + 1
        if self.accelerator.process_index == 0:
            ratio = 99.0 if self.forwards % 2 else 1.1
            self._sharing.options = self._sharing.options._replace(min_dedup_ratio=ratio)
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)


def _run_rank(rank: int, port: int, model: str, folder: str, results: Any) -> None:
    join(rank, port)
    for cls in (StockInGroups, shared.SharedPromptGRPOTrainer, SomeRanks):
        arguments = {} if cls is StockInGroups else dict(arguments=dict(verify_first_steps=1))
        for name, config in SETUPS.items():
            run = train(trainer(cls, model, Path(folder), **arguments, **config))
            results[rank, name, cls.__name__] = (run.logs, run.after)
        made = trainer(cls, model, Path(folder), **arguments)
        results[rank, "fsdp2", cls.__name__] = _sharded_step(made, rank)
    torch.distributed.destroy_process_group()


def _sharded_step(made: Any, rank: int) -> Any:
    """Log-probabilities, and the whole gradients, of two forwards; accelerate shards with FSDP2 on GPUs only."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (RANKS,))
    for layer in made.model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(made.model, mesh=mesh)
    made.model.train()
    ids = torch.randint(3, 90, (3, 20 + 5 * rank), generator=torch.Generator().manual_seed(rank))
    ids[:, :12] = ids[0, :12]
    logps = []
    for _ in range(2):
        scores = tiny_trl.score(made, ids, torch.ones_like(ids), ids.shape[1] - 12)[0]
        (scores * torch.linspace(-1, 1, scores.shape[1])).sum().backward()
        logps.append(scores.detach())
    calls = made._sharing.tally if hasattr(made, "_sharing") else None
    return logps, {name: one.full_tensor() for name, one in gradients(made.model).items()}, calls


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What all trainers do on both ranks, in one start of the processes; and the model that they begin with."""
    return on_ranks(_run_rank, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("cls", ["SharedPromptGRPOTrainer", "SomeRanks"])
@pytest.mark.parametrize("setup", SETUPS)
def test_two_ranks_equal_stock(setup: str, cls: str, found: Any) -> None:
    results, start = found
    for rank in range(RANKS):
        runs = [run_of(results[rank, setup, name], start) for name in (cls, "StockInGroups")]
        got, stock = runs
        check_runs(got, stock)
        shares = got.metric("fallbacks")
        assert got.metric("dedup_ratio")[0] > 1.0
        # Of the forwards of both ranks: on one of them, every other one.
        assert max(shares) <= 0.5
        assert (sum(shares) > 0) == (cls == "SomeRanks")
        assert got.logs[0]["shared_prompt/logp_difference"] < 1e-5


@pytest.mark.parametrize("cls", ["SharedPromptGRPOTrainer", "SomeRanks"])
def test_fsdp2_equals_stock(cls: str, found: Any) -> None:
    """One rank shares and the other does not, or both do: no one waits, and gradients are the same."""
    results, _ = found
    for rank in range(RANKS):
        logps, whole, tally = results[rank, "fsdp2", cls]
        expected, wanted, _ = results[rank, "fsdp2", "StockInGroups"]
        assert tally.calls == 2
        assert sum(tally.fallbacks.values()) == (rank == 0 and cls == "SomeRanks")
        for one, stock in zip(logps, expected):
            check_equal(one, stock, 1e-5)
        check_gradients(whole, wanted, 5e-6)


# --- on GPUs ----------------------------------------------------------------------------------------------------------

ON_GPUS: dict[str, Any] = dict(
    use_cpu=False,
    bf16=True,
    max_steps=1,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    beta=0.1,
    fsdp=True,
    fsdp_config=dict(version=2, transformer_layer_cls_to_wrap=["Qwen3DecoderLayer"]),
)


def _run_gpu(rank: int, port: int, model: str, folder: str, config: dict[str, Any], results: Any) -> None:
    join(rank, port)
    for cls in (StockInGroups, shared.SharedPromptGRPOTrainer):
        arguments = {} if cls is StockInGroups else dict(arguments=dict(verify_first_steps=2))
        made = trainer(cls, model, Path(folder), **arguments, **config)
        run = train(made)
        # Each rank has a part of every parameter and of the reference model's.
        parts = [*run.after.values(), *made.ref_model.parameters()]
        assert made.accelerator.is_fsdp2 and all(isinstance(one, DTensor) for one in parts)
        changes = [after.full_tensor() - run.before[name].to(after.device) for name, after in run.after.items()]
        change = torch.cat([one.flatten().float().cpu() for one in changes])
        results[rank, cls.__name__] = (run.logs, change.numpy())
    torch.distributed.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs")
def test_fsdp2_of_accelerate_on_gpus(tmp_path: Path) -> None:
    """Policy and reference model sharded by accelerate, in bf16 on the kernels: the step of stock attention."""
    model = model_on_disk(tmp_path, hidden_size=256, head_dim=64)
    call = free_port(), model, str(tmp_path), ON_GPUS
    results = run_ranks(_run_gpu, RANKS, *call, forked=False, backend=None)
    for rank in range(RANKS):
        (stock_logs, stock), (logs, ours) = (results[rank, cls] for cls in ("StockInGroups", "SharedPromptGRPOTrainer"))
        log = logs[0]
        assert log["shared_prompt/fallbacks"] == 0 and log["shared_prompt/dedup_ratio"] > 1.1
        assert 0 < log["shared_prompt/logp_difference"] < 0.1
        assert log["reward"] == stock_logs[0]["reward"]  # rollouts are the same
        assert log["grad_norm"] == pytest.approx(stock_logs[0]["grad_norm"], rel=0.03)
        assert np.linalg.norm(stock) > 0
        assert np.linalg.norm(ours - stock) <= 0.05 * np.linalg.norm(stock)
