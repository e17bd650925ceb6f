"""verl's policy update on random weights and a random batch, in processes of their own.

`run` saves the models, starts one process a rank, all cases one after another in each, and returns what they found.
What such a process does is in verl_rank.py.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from verl_cases import Case, Found

RANK_SCRIPT = Path(__file__).with_name("verl_rank.py")


def run(
    cases: Sequence[Case],
    ranks: int,
    environment: dict[str, str],
    timeout_s: float,
    on_ray: bool = False,
    keep: Callable[[dict[str, Found]], None] | None = None,
) -> dict[str, Found]:
    """All cases, in this order, in processes of one start; on GPUs one each. Their output goes to this process's.

    `on_ray`: each case in actors of its own under verl's RayWorkerGroup, which then cuts the batch into shares.
    `keep`: is called with all that there is, behind each case; what there was before a failure or the end of the time
    is then enough.

    Raises:
        RuntimeError: a rank has failed; its output says why.
    """
    with tempfile.TemporaryDirectory() as folder:
        # In a process of its own, whose memory is freed with it.
        models = json.dumps([asdict(model) for model in dict.fromkeys(case.model for case in cases)])
        maker = _start(["models", folder, models], environment)
        try:
            if maker.wait(timeout_s):
                raise RuntimeError("a model could not be saved; the output says why")
        finally:
            maker.kill()
        torch.save(list(cases), Path(folder) / "cases.pt")
        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        visible = [one for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one]
        children = []
        for rank in range(1 if on_ray else ranks):
            own = dict(RANK=rank, WORLD_SIZE=ranks, LOCAL_RANK=0, LOCAL_WORLD_SIZE=1, MASTER_ADDR="127.0.0.1")
            own |= dict(MASTER_PORT=port, CUDA_VISIBLE_DEVICES=visible[rank] if visible else rank)
            if on_ray:
                own = dict(RIG_RANKS=ranks, RAY_USAGE_STATS_ENABLED=0, RAY_memory_monitor_refresh_ms=0)
            own |= dict(TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1", VERL_LOGGING_LEVEL="WARN")
            children.append(_start(["ray" if on_ray else "rank", folder], {**_text(own), **environment}))
        path, saved = Path(folder) / "found.pt", 0.0
        end = time.monotonic() + timeout_s
        codes: list[int | None] = [None]
        try:
            # One that failed leaves the others waiting for it.
            while None in codes and not any(codes) and time.monotonic() < end:
                time.sleep(0.2)
                if keep and path.exists() and (now := path.stat().st_mtime) > saved:
                    keep(torch.load(path, weights_only=False))
                    saved = now
                codes = [child.poll() for child in children]
        finally:
            for child in children:
                child.kill()
                child.wait()
        found: dict[str, Found] = torch.load(path, weights_only=False) if path.exists() else {}
        if any(code != 0 for code in codes):
            message = f"verl's ranks ended with {codes} behind {list(found)}"
            if not found or keep is None:
                raise RuntimeError(message)
            print(message, file=sys.stderr)
        if keep:
            keep(found)
        return found


def _text(values: dict[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items()}


def _start(arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, RANK_SCRIPT, *arguments], env={**os.environ, **environment})
