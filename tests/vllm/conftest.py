# SPDX-License-Identifier: BSD-3-Clause
"""What the plug-in says, and calls of vLLM's own attention, as fixtures of tests that need its code."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import launches  # noqa: F401, with DUALKV_TEST_DEVICE=host steps run on the kernels
import pytest


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the plug-in says in vLLM's log."""
    from flash_attn_dualkv.integrations.vllm import log

    found: list[str] = []

    def note(level: int, message: str, *rest: Any) -> None:
        if level == logging.WARNING:
            found.append(message % rest)

    monkeypatch.setattr(log, "_process", SimpleNamespace())
    monkeypatch.setattr(log.logger, "log", note)
    return found


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls of vLLM's own attention, which a plain one stands for."""
    import vllm_steps
    from vllm.v1.attention.backends import flash_attn

    found = vllm_steps.Calls()
    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", vllm_steps.flash_attention(found), raising=False)
    return found
