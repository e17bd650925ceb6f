# SPDX-License-Identifier: BSD-3-Clause
"""Calls of SGLang's own attention, and lines of the plug-in in its log, as fixtures of tests that need its code."""

from __future__ import annotations

from typing import Any

import launches  # noqa: F401, with DUALKV_TEST_DEVICE=host steps run on the kernels
import pytest


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Calls of SGLang's own attention, which a plain one stands for, as for its other kernels."""
    import sglang_steps

    return sglang_steps.replace_kernels(monkeypatch)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Messages of the plug-in in SGLang's log."""
    from flash_attn_dualkv.integrations.sglang.log import SGLANG

    found: list[str] = []
    monkeypatch.setattr(SGLANG.logger, "log", lambda level, message, *rest: found.append(message % rest))
    return found
