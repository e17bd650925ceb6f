# SPDX-License-Identifier: BSD-3-Clause
"""What SGLang is told: the backend's name, its page size, and the versions that it is made for."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_python

if not sglang_python.install():
    pytest.skip("SGLang is not installed: .ci/run puts its Python code on the path", allow_module_level=True)

import sglang
import sglang_steps as steps
from sglang.srt import server_args
from sglang.srt.layers.attention import attention_registry as registry
from sglang.srt.plugins import hook_registry
from sglang_steps import Calls, layer, run, runner

from flash_attn_dualkv.errors import SharedPromptUnsupportedError
from flash_attn_dualkv.integrations import sglang as plugin
from flash_attn_dualkv.integrations.sglang import __main__ as command
from flash_attn_dualkv.integrations.sglang import versions

BACKENDS = "ATTENTION_BACKEND"


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A process in which SGLang has loaded the plug-in, and nothing of it afterwards."""
    hooks = hook_registry.HookRegistry
    monkeypatch.setattr(registry, "ATTENTION_BACKENDS", dict(registry.ATTENTION_BACKENDS))
    owner, _, name = versions.installed().page_seam.rpartition(".")
    place, _, kind = owner.rpartition(".")
    found = getattr(importlib.import_module(place), kind) if kind == "ServerArgs" else importlib.import_module(owner)
    stock = getattr(found, name)
    kinds = f"{BACKENDS}_CHOICES", f"DETERMINISTIC_{BACKENDS}_CHOICES", f"RADIX_SUPPORTED_DETERMINISTIC_{BACKENDS}"
    choices = [getattr(server_args, kind) for kind in kinds]
    before = [[*known] for known in choices]
    plugin.register()
    plugin.register()
    hooks.apply_hooks()
    yield SimpleNamespace(owner=found, name=name, choices=[[*known] for known in choices])
    for known, earlier in zip(choices, before):
        known[:] = earlier
    setattr(found, name, stock)
    hooks.reset()


def test_entry_point() -> None:
    """SGLang finds the plug-in by the group that it looks into, once the package is installed."""
    from sglang.srt import plugins

    text = (steps.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'[project.entry-points."{plugins.GENERAL_PLUGINS_GROUP}"]' in text
    assert 'flash_attn_dualkv = "flash_attn_dualkv.integrations.sglang:register"' in text


def test_register(registered: Any, calls: Calls) -> None:
    """The name is one that the command line takes, for deterministic inference with the radix cache, too; once."""
    assert [known.count("dualkv") for known in registered.choices] == [1, 1, 1]
    made = registry.ATTENTION_BACKENDS["dualkv"](runner())
    run(made, layer(), steps.DECODING)
    assert not calls.rows


def test_a_script_with_arguments_of_sglang(registered: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As slime's and miles' are: each argument has a prefix, and files beside the script can be imported."""
    script = tmp_path / "train.py"
    (tmp_path / "beside.py").write_text("ANSWER = 42")
    script.write_text(
        "import argparse, json, sys, beside\n"
        "from sglang.srt.server_args import ServerArgs\n"
        "parser = argparse.ArgumentParser()\n"
        "add = parser.add_argument\n"
        "parser.add_argument = lambda name, *more, **options: add('--sglang-' + name.lstrip('-'), **options)\n"
        "ServerArgs.add_cli_args(parser)\n"
        "found = parser.parse_args()\n"
        "given = [__name__, beside.ANSWER, found.sglang_attention_backend, found.sglang_page_size]\n"
        "open(sys.argv[0] + '.json', 'w').write(json.dumps(given))\n"
    )
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    options = "--sglang-model-path x --sglang-attention-backend dualkv --sglang-page-size 64"
    server_args.ATTENTION_BACKEND_CHOICES.remove("dualkv")
    registry.ATTENTION_BACKENDS.pop("dualkv")
    monkeypatch.setattr(sys, "argv", ["-m", str(script), *options.split()])
    command.main()
    assert json.loads((tmp_path / "train.py.json").read_text()) == ["__main__", 42, "dualkv", 64]
    monkeypatch.setattr(sys, "argv", ["-m"])
    with pytest.raises(SystemExit, match="usage"):
        command.main()


@pytest.mark.parametrize(
    ("asked", "size", "expected"),
    [
        ({"attention_backend": "dualkv"}, None, 64),
        ({"attention_backend": "fa3", "decode_attention_backend": "dualkv"}, None, 64),
        ({"attention_backend": "dualkv"}, 16, 16),
        ({"attention_backend": "dualkv"}, 1, 1),  # which the backend refuses
        ({"attention_backend": "fa3"}, None, 1),
        ({}, None, 1),
    ],
)
def test_page_size(asked: dict[str, str], size: int | None, expected: int, registered: Any) -> None:
    names = "attention_backend", "decode_attention_backend", "prefill_attention_backend"
    arguments = SimpleNamespace(page_size=size, **dict.fromkeys(names) | asked)
    decide = getattr(registered.owner, registered.name)
    decided = decide(arguments)
    assert (decided or {}).get("page_size", arguments.page_size) == expected


def test_versions(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions.release() <= versions.NEWEST
    for text, backend in (
        ("0.5.12", "CapturedBackend"), ("0.5.12.post1", "CapturedBackend"), ("0.5.13", "PreparedBackend"),
        ("0.5.14", "PreparedBackend"), ("0.5.99", "PreparedBackend"), ("0.6.0rc1", "PreparedBackend"),
        ("main", "PreparedBackend"),
    ):  # fmt: skip
        monkeypatch.setattr(sglang, "__version__", text)
        assert versions.installed().backend == backend
        assert versions.installed().decides == (text not in ("0.5.12", "0.5.12.post1", "0.5.13", "0.5.14"))
    monkeypatch.setattr(sglang, "__version__", "0.5.11")
    with pytest.raises(SharedPromptUnsupportedError, match="0.5.12 to 0.5.23.*got 0.5.11"):
        plugin.create(runner())


def test_newer_versions(calls: Calls, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not known is taken for the newest, and the log says so."""
    if versions.installed() != versions.Version():
        pytest.skip("newer versions are not like this one")
    monkeypatch.setattr(sglang, "__version__", "0.5.99")
    run(plugin.create(runner()), layer(), steps.DECODING)
    assert not calls.rows
    assert said == [
        "flash_attn_dualkv: decoding runs over shared prefixes; requests share pages of 16 tokens, of SGLang's radix "
        "cache; this SGLang is newer than 0.5.23, the newest that is known"
    ]


def test_without_the_radix_cache(calls: Calls, said: list[str]) -> None:
    plugin.create(runner(server_args__disable_radix_cache=True))
    assert "nothing is shared, as SGLang's radix cache is off" in said[0]


def test_other_names(calls: Calls, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """An SGLang that lacks what the backend reads, or calls its methods otherwise, gets its own; the log names it."""
    monkeypatch.setitem(registry.ATTENTION_BACKENDS, "fa3", steps.stock.FlashAttentionBackend)
    kind = steps.stock.FlashAttentionBackend
    made = runner()
    del made.req_to_token_pool
    with pytest.raises(AttributeError):  # SGLang's own needs it, too
        plugin.create(made)
    assert "SimpleNamespace: expected one with req_to_token_pool" in said.pop()

    def forward_decode(self: Any, q: Any, k: Any, v: Any, layer: Any, other: Any, **_: Any) -> Any: ...

    with monkeypatch.context() as patch:
        patch.setattr(kind, "forward_decode", forward_decode)
        assert type(plugin.create(runner())) is kind
        assert "FlashAttentionBackend.forward_decode" in said.pop()
    monkeypatch.setattr(versions, "OPTIONS", f"{versions.OPTIONS} of_another_version")
    assert type(plugin.create(runner())) is kind
    assert "ServerArgs: expected one with of_another_version" in said.pop()
