# SPDX-License-Identifier: BSD-3-Clause
"""Old places of modules: their names are those of the new ones, with a warning that says where these are."""

from __future__ import annotations

import importlib
import runpy
import sys
import warnings
from unittest.mock import MagicMock

import pytest

pytest.importorskip("transformers", reason="needs transformers")

MOVED = {
    "integrations.openrlhf": ("contrib.openrlhf", "share_prompts"),
    "integrations.ms_swift": ("contrib.ms_swift", "share_prompts"),
    "integrations.llama_factory": ("contrib.llama_factory", "share_prompts"),
    "integrations.trees": ("contrib.trees", "tree_attention"),
}


@pytest.mark.parametrize("old", MOVED)
def test_old_places_give_the_names_of_new_ones(old: str) -> None:
    new, name = MOVED[old]
    module = importlib.import_module(f"flash_attn_dualkv.{old}")
    message = f"flash_attn_dualkv.{old} has moved to flash_attn_dualkv.{new}; its old place goes with the next release"
    with pytest.warns(DeprecationWarning, match=f"^{message}$") as caught:
        found = getattr(module, name)
    assert found is getattr(importlib.import_module(f"flash_attn_dualkv.{new}"), name)
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.raises(AttributeError, match=f"^module 'flash_attn_dualkv.{old}' has no attribute 'share'$"):
        _ = module.share
    if not hasattr(importlib.import_module(f"flash_attn_dualkv.{new}"), "__all__"):
        return
    names: dict[str, object] = {}
    with pytest.warns(DeprecationWarning, match=message):
        exec(f"from flash_attn_dualkv.{old} import *", names)
    assert names[name] is found


def test_modules_are_asked_for_what_they_are_without_a_warning() -> None:
    module = importlib.import_module("flash_attn_dualkv.integrations.openrlhf")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not hasattr(module, "__path__")


def test_the_old_command_of_llama_factory_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    new = importlib.import_module("flash_attn_dualkv.contrib.llama_factory")
    main = MagicMock()
    monkeypatch.setattr(new, "main", main)
    monkeypatch.delitem(sys.modules, "flash_attn_dualkv.integrations.llama_factory", raising=False)
    with pytest.warns(DeprecationWarning, match="has moved to flash_attn_dualkv.contrib.llama_factory"):
        runpy.run_module("flash_attn_dualkv.integrations.llama_factory", run_name="__main__")
    main.assert_called_once_with()
