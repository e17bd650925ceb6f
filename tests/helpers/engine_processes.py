# SPDX-License-Identifier: BSD-3-Clause
"""Stand for the processes that benchmarks of engines start."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import vllm_rig


class Engines:
    """Stand for processes: each prints a result, but those whose settings have a word run out of time."""

    def __init__(self, result: dict[str, Any], slow: str) -> None:
        self.result, self.slow = result, slow
        self.commands: list[list[str]] = []
        self.environments: list[dict[str, str]] = []

    @property
    def count(self) -> int:
        return len(self.commands)

    def run(self, command: list[str], *, timeout: float, env: dict[str, str], **_: Any) -> Any:
        self.commands.append(command)
        self.environments.append(env)
        if self.slow in "".join(command):
            raise subprocess.TimeoutExpired(command, timeout, output=b"it was here", stderr=None)
        return subprocess.CompletedProcess(command, 0, f"{vllm_rig.MARK}{json.dumps(self.result)}\n", "")
