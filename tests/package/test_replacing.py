# SPDX-License-Identifier: BSD-3-Clause
"""Functions that are called behind another module's first import."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

from flash_attn_dualkv.integrations.common.patching import after_import

NAME = "imported_once"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    path = tmp_path / f"{NAME}.py"
    path.write_text("value = 1")
    return path


def test_behind_a_look_and_an_import_that_fails(module: Path) -> None:
    found: list[str] = []
    after_import(NAME, lambda one: found.append(f"first {one.value}"))
    after_import(NAME, lambda one: found.append(f"second {one.value}"))
    finders = len(sys.meta_path)
    assert importlib.util.find_spec(NAME) is not None and not found
    module.write_text("raise ValueError(1)")
    with pytest.raises(ValueError, match="1"):
        importlib.import_module(NAME)
    assert not found and len(sys.meta_path) == finders
    module.write_text("value = 3")
    importlib.invalidate_caches()
    importlib.import_module(NAME)
    assert sorted(found) == ["first 3", "second 3"] and len(sys.meta_path) == finders - 2
    after_import(NAME, lambda one: found.append("at once"))
    assert found[-1] == "at once"
