# SPDX-License-Identifier: BSD-3-Clause
"""Processes that find each other as the ranks of a group."""

from __future__ import annotations

import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch

# Imported once, by the process from which all ranks on the CPU are forked: it takes longer than
# what most of them do.
_PRELOADED = [
    "torch.distributed.fsdp",
    "transformers.modeling_utils",
    "flash_attn_dualkv.integrations.transformers",
    "flash_attn_dualkv.integrations.megatron",
]


def run_ranks(
    function: Callable[..., None], ranks: int, *arguments: Any, forked: bool = True, backend: str | None = "gloo"
) -> dict[Any, Any]:
    """What `function(rank, *arguments, results)` writes to the dict `results`, in so many processes of one group.

    Args:
        forked: they begin with a few modules, which is for those only that leave CUDA alone.
        backend: of the group; None: the function makes it.
    """
    method = "forkserver" if forked else "spawn"
    context = multiprocessing.get_context(method)
    if forked:
        context.set_forkserver_preload(_PRELOADED)
    with context.Manager() as manager, TemporaryDirectory() as folder:
        results = manager.dict()
        module = function.__module__
        group = dict(backend=backend, init_method=f"file://{folder}/store", world_size=ranks)
        called = (module, sys.modules[module].__file__, function.__name__, group, pickle.dumps(arguments), results)
        torch.multiprocessing.start_processes(_call, called, nprocs=ranks, start_method=method)
        return dict(results)


def _call(
    rank: int, module: str, file: str, function: str, group: dict[str, Any], arguments: bytes, results: dict[Any, Any]
) -> None:
    """Calls a function of a test module in the group. No path for imports leads to the module, of which the arguments
    may have objects.
    """
    spec = importlib.util.spec_from_file_location(module, file)
    assert spec is not None and spec.loader is not None
    sys.modules[module] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[module])
    gc.freeze()  # collections pass over what was imported, whose memory the ranks share
    torch.set_num_threads(1)
    if group["backend"]:
        torch.distributed.init_process_group(rank=rank, **group)
    getattr(sys.modules[module], function)(rank, *pickle.loads(arguments), results)
    if group["backend"]:
        torch.distributed.destroy_process_group()


def start_deepspeed(rank: int, ranks: int) -> Any:
    """The module, on the CPU, with its group. Its collectives in shared memory are left out: to compile them takes two
    minutes.
    """
    os.environ.update(DS_ACCELERATOR="cpu", DS_SKIP_CUDA_CHECK="1", LOCAL_RANK=str(rank), LOCAL_SIZE=str(ranks))
    import deepspeed  # looks at the environment

    with patch.object(importlib.import_module("deepspeed.comm.torch"), "build_shm_op", lambda: None):
        deepspeed.init_distributed("gloo")
    return deepspeed
