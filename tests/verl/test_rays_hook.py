# SPDX-License-Identifier: BSD-3-Clause
"""Ray's own code that runs a worker_process_setup_hook, whose errors end the job."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

setup_hook = pytest.importorskip("ray._private.runtime_env.setup_hook", reason="needs Ray")

HOOK = """
from flash_attn_dualkv.contrib.versions import PatchedPackage

def share():
    PatchedPackage("rollout-kit", "missing_rollout_kit", ("1.0",)).replace({})
"""


def test_a_refusal_is_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "named_hook.py").write_text(HOOK)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert setup_hook.load_and_execute_setup_hook("named_hook.share") is None
    assert "prompts are NOT shared, rollout-kit stays as it is: rollout-kit: expected installed" in caplog.text
    with pytest.raises(ImportError, match="rollout-kit: expected installed, got none"):
        importlib.import_module("named_hook").share()
