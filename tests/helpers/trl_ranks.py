# SPDX-License-Identifier: BSD-3-Clause
"""TRL's trainers on several ranks, in processes that each test file starts once."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny_trl
from processes import run_ranks
from torch import Tensor

RANKS = 2


def join(rank: int, port: int) -> None:
    """Set what accelerate reads of a rank."""
    environment = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=RANKS)
    os.environ.update({name: str(value) for name, value in {**environment, "LOCAL_WORLD_SIZE": RANKS}.items()})


def free_port() -> int:
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return int(own.getsockname()[1])


def on_ranks(run: Callable[..., None], folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """Results of run(rank, port, model, folder, results) on all ranks, and the parameters that they begin with."""
    model = tiny_trl.model_on_disk(folder)
    results = run_ranks(run, RANKS, free_port(), model, str(folder), backend=None)
    start = tiny_trl.trainer(tiny_trl.trl.GRPOTrainer, model, folder).model.state_dict()
    return results, {name: tensor.clone() for name, tensor in start.items()}


def run_of(result: Any, start: dict[str, Tensor]) -> tiny_trl.Run:
    """The run of logs and parameters, DDP's names of which have a prefix."""
    logs, after = result
    after = {name.removeprefix("module."): tensor for name, tensor in after.items()}
    return tiny_trl.Run(None, logs, {name: start[name] for name in after}, after)
