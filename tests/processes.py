"""Processes that find each other as the ranks of a group."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch

# Imported once, by the process from which all ranks on the CPU are forked: it takes longer than what most of them do.
_PRELOADED = ["torch.distributed.fsdp", "transformers.modeling_utils", "flash_attn_dualkv.integrations.transformers"]


def run_ranks(function: Callable[..., None], ranks: int, *arguments: Any, forked: bool = True) -> dict[Any, Any]:
    """What `function(rank, *arguments, results)` writes to the dict `results`, in so many processes.

    `forked`: they begin with a few modules, which is for those only that leave CUDA alone.
    """
    method = "forkserver" if forked else "spawn"
    context = multiprocessing.get_context(method)
    if forked:
        context.set_forkserver_preload(_PRELOADED)
    with context.Manager() as manager:
        results = manager.dict()
        torch.multiprocessing.start_processes(function, (*arguments, results), nprocs=ranks, start_method=method)
        return dict(results)
