# SPDX-License-Identifier: BSD-3-Clause
"""Processes that find each other as the ranks of a group."""

from __future__ import annotations

import importlib.util
import multiprocessing
import sys
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
        module = function.__module__
        called = (module, sys.modules[module].__file__, function.__name__, *arguments, results)
        torch.multiprocessing.start_processes(_call, called, nprocs=ranks, start_method=method)
        return dict(results)


def _call(rank: int, module: str, file: str, function: str, *arguments: Any) -> None:
    """Calls a function of a test module, which no path for imports leads to."""
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None and spec.loader is not None
    sys.modules[module] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[module])
    getattr(sys.modules[module], function)(rank, *arguments)
