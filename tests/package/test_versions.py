# SPDX-License-Identifier: BSD-3-Clause
"""Versions of other packages: which run silently, with a warning, or not at all; and CI installs those compared."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from flash_attn_dualkv.contrib import versions as contrib
from flash_attn_dualkv.errors import SharedPromptUnsupportedError
from flash_attn_dualkv.integrations.common import versions
from flash_attn_dualkv.integrations.common.patching import after_import, check_signature, in_front_of, replace_all
from flash_attn_dualkv.integrations.common.versions import Package

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [one for rows in (versions, contrib) for one in vars(rows).values() if isinstance(one, Package)]
STOCK = """
class Actor:
    def forward(self, tokens, mask=None):
        return "stock"

def train(*args, **kwargs):
    return "stock"
"""


class Kit(contrib.PatchedPackage):
    """A package that can be installed in a test, in any version and with other functions."""

    def share(self) -> None:
        self.replace({"kit.actor": {"Actor.forward": _forward, "train": _any}, "kit.trainer": {"loop": _any}})


def _any(stock: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: "shared"


def _forward(stock: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, tokens, mask=None: "shared"


KIT = Kit("rollout-kit", "kit", ("1.2.1", "1.4"), {"<1.1": "it sums where others take means"})


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(versions, "_warned", set())

    def write(version: str | None, code: str = STOCK, module: str = "actor") -> None:
        folder = tmp_path / "kit"
        folder.mkdir()
        (folder / "__init__.py").touch()
        (folder / f"{module}.py").write_text(code)
        (folder / "trainer.py").write_text("from kit.actor import Actor\ndef loop(steps):\n    return 'stock'\n")
        if version is not None:
            about = tmp_path / f"rollout_kit-{version}.dist-info"
            about.mkdir()
            (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rollout-kit\nVersion: {version}\n")
        importlib.invalidate_caches()

    yield write
    for name in ("kit", "kit.actor", "kit.trainer"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


def actor() -> Any:
    return importlib.import_module("kit.actor")


def loop() -> Any:
    return importlib.import_module("kit.trainer").loop(3)


@pytest.mark.parametrize("version", ["1.2.1", "1.2.1+git123", "1.2.1.post1", "1.4.0", "1.4.9"])
def test_compared_versions_are_silent(install: Any, caplog: pytest.LogCaptureFixture, version: str) -> None:
    install(version)
    KIT.share()
    assert actor().Actor().forward(1) == actor().train() == loop() == "shared" and not caplog.records
    KIT.share()
    assert actor().Actor.forward.dualkv_stock(None, 1) == "stock"  # replaced once


@pytest.mark.parametrize("version", ["1.2.0", "1.2.10", "1.4.0.dev0", "1.4.0rc1", "1.5.0.dev0", "2", None, "main"])
def test_others_are_warned_of_once(install: Any, caplog: pytest.LogCaptureFixture, version: str | None) -> None:
    install(version)
    KIT.share()
    assert not caplog.records  # in processes that do not import it
    KIT.share()
    assert actor().Actor().forward(1) == "shared"
    (message,) = caplog.messages
    assert f"rollout-kit {version or 'of an unknown version'} were not compared" in message
    assert "those of 1.2.1 and 1.4 were" in message


def test_a_modules_own_version_is_the_one_that_runs(install: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A clone in front of an installed release."""
    install("1.2.1")
    importlib.import_module("kit").__version__ = "1.5.0.dev0"  # type: ignore[attr-defined]
    KIT.share()
    actor()
    assert "rollout-kit 1.5.0.dev0" in caplog.text


OTHERS = {
    "an argument more": ("mask=None", "mask=None, packed=False", r"\(self, tokens, mask=None, packed=False\)"),
    "another default": ("mask=None", "mask=0", r"\(self, tokens, mask=0\)"),
    "another order": ("tokens, mask=None", "mask, tokens=None", r"\(self, mask, tokens=None\)"),
    "none": ("def forward", "def run", "none"),
    "another class": ("class Actor", "class Policy", "none"),
    "any keywords": ("mask=None", "mask=None, **images", r"\(self, tokens, mask=None, \*\*images\)"),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("is_imported", [False, True])
def test_other_signatures_are_refused(install: Any, kind: str, is_imported: bool) -> None:
    old, new, got = OTHERS[kind]
    install("2.0.0.dev0", STOCK.replace(old, new))
    expected = (
        r"rollout-kit: expected 1.2.1 or 1.4, .* got 2.0.0.dev0: .*forward: expected .*\(self, tokens, mask=None\)"
    )
    expected += f", got {got}"
    if is_imported:
        actor()
        with pytest.raises(SharedPromptUnsupportedError, match=expected):
            KIT.share()
    else:
        KIT.share()
        for _ in range(2):  # an import that is tried again
            with pytest.raises(SharedPromptUnsupportedError, match=expected):
                actor()
        sys.meta_path[:] = [one for one in sys.meta_path if type(one).__name__ != "_After"]
    assert actor().train() == "stock"  # all of a module or none


REFUSED = {
    "known to differ": ("1.0.9", "actor", "rollout-kit: expected .*got 1.0.9: it sums where others take means"),
    "another module": ("2.0", "policy", "rollout-kit: expected .*got 2.0: it has no kit.actor"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused_before_an_import(install: Any, kind: str) -> None:
    version, module, message = REFUSED[kind]
    install(version, module=module)
    with pytest.raises(SharedPromptUnsupportedError, match=message):
        KIT.share()
    assert "kit" not in sys.modules


def test_a_missing_package() -> None:
    with pytest.raises(ImportError, match="rollout-kit: expected installed, got none"):
        KIT.share()


HOOK = """
def load_and_execute_setup_hook_module(function):
    function()
"""


@pytest.mark.parametrize("kind", ["known to differ", "another module", "another signature", "missing"])
def test_in_rays_hook_a_refusal_is_a_line(install: Any, caplog: pytest.LogCaptureFixture, kind: str) -> None:
    if kind != "missing":
        version, module, _ = REFUSED.get(kind, ("2.0", "actor", ""))
        install(version, STOCK.replace("mask=None", "mask=0"), module)
    hook: dict[str, Any] = {"__name__": "ray._private.runtime_env.setup_hook"}
    exec(HOOK, hook)
    hook["load_and_execute_setup_hook_module"](KIT.share)
    if kind == "another signature":
        assert not caplog.records and actor().Actor().forward(1) == actor().train() == loop() == "stock"
    (message,) = caplog.messages
    assert "prompts are NOT shared, rollout-kit stays as it is: rollout-kit: expected" in message


def test_overridden_methods_are_checked(install: Any, caplog: pytest.LogCaptureFixture) -> None:
    install("1.5")
    stock = actor().Actor

    def ours(**methods: Any) -> type:
        return type("Ours", (stock,), {**methods, "__module__": versions.__name__})

    KIT.check_classes(ours(__init__=lambda self, size: None, own=lambda self, size: None, forward=_forward(stock)))
    assert [one.startswith("flash_attn_dualkv: results of rollout-kit 1.5") for one in caplog.messages] == [True]
    with pytest.raises(
        SharedPromptUnsupportedError, match=r"1.5: kit.actor.Actor.forward: expected .*\(self, tokens\)"
    ):
        KIT.check_classes(ours(forward=lambda self, tokens: None))


@pytest.mark.parametrize(
    ("made", "stock", "is_taken"),
    [
        (lambda a, b=1: 0, lambda a, b=1: 0, True),
        (lambda runner, b=1: 0, lambda self, b=1: 0, True),
        (lambda a, *args, **kwargs: 0, lambda a, b, *, c=1: 0, True),
        (lambda a, **kwargs: 0, lambda a, b=1, c=2: 0, True),
        (lambda *args, **kwargs: 0, lambda a, **options: 0, True),
        (lambda a, *, own=3, **kwargs: 0, lambda a, b=1: 0, True),
        (lambda *args, c=1, **kwargs: 0, lambda a, *, b, c=1: 0, True),
        (lambda a, b: 0, lambda *args, **kwargs: 0, True),
        (lambda a, b=1: 0, lambda a, b: 0, True),
        (lambda a, **options: 0, lambda a, *, b=1, **options: 0, True),
        (lambda a, b: 0, lambda a, b=1: 0, False),
        (lambda a: 0, lambda a, *, b=1: 0, False),
        (lambda a, b: 0, lambda a: 0, False),
        (lambda a: 0, lambda a, b=1: 0, False),
        (lambda a, b: 0, lambda a, c: 0, False),
        (lambda a, b: 0, lambda a, *args: 0, False),
        (lambda *args, c=1, **kwargs: 0, lambda a, *, c=2: 0, False),
        (lambda a, **images: 0, lambda a, b=1, **images: 0, False),
    ],
)
def test_signatures(made: Any, stock: Any, is_taken: bool) -> None:
    if is_taken:
        check_signature("f", stock, made)
        return
    with pytest.raises(SharedPromptUnsupportedError, match=re.escape(f", got {inspect.signature(stock)}")):
        check_signature("f", stock, made)


def test_all_are_replaced_or_none() -> None:
    class Owner:
        def first(self) -> str:
            return "stock"

    with pytest.raises(SharedPromptUnsupportedError, match=r"Owner.second: expected a function \(self\), got none"):
        replace_all([(Owner, name, lambda stock: lambda self: "ours") for name in ("first", "second")])
    assert Owner().first() == "stock"


def test_functions_in_front_of_others_are_checked() -> None:
    class Owner:
        def run(self, size: int, scale: int = 1) -> Any:
            return size * scale

    with pytest.raises(SharedPromptUnsupportedError, match=r"Owner.run: expected the signature \(self, size\), got"):
        replace_all([(Owner, "run", in_front_of(lambda stock, self, size: None))])
    replace_all([(Owner, "run", in_front_of(lambda stock, self, size, scale=1: ("ours", stock(self, size, scale))))])
    assert Owner().run(2, scale=3) == ("ours", 6)


def test_after_a_look_and_an_import_that_fails(install: Any, tmp_path: Path) -> None:
    install("1.4", "raise ValueError(1)")
    found: list[str] = []
    for name in ("first", "second"):
        after_import("kit.actor", lambda module, name=name: found.append(f"{name} {module.value}"))
    finders = len(sys.meta_path)
    assert importlib.util.find_spec("kit.actor") is not None and not found
    with pytest.raises(ValueError, match="1"):
        actor()
    assert not found and len(sys.meta_path) == finders
    (tmp_path / "kit" / "actor.py").write_text("value = 3")
    importlib.invalidate_caches()
    actor()
    assert sorted(found) == ["first 3", "second 3"] and len(sys.meta_path) == finders - 2
    after_import("kit.actor", lambda module: found.append("at once"))
    assert found[-1] == "at once"


@pytest.mark.parametrize("package", PACKAGES, ids=lambda one: one.name)
def test_ci_installs_what_was_compared(package: Package) -> None:
    commands = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    pinned = re.findall(rf'"{re.escape(package.name)}(?:\[[^]]*\])?==([^"]+)"', commands)
    installed = {one.removesuffix(".*") for one in pinned}
    # What is refused is there for others: ms-swift and LLaMA-Factory need old versions of TRL.
    refused = {one for one in installed for versions in package.differ if one in SpecifierSet(versions)}
    assert installed - refused == {*package.compared}


def test_the_page_names_what_was_compared() -> None:
    page = (ROOT / "docs" / "trainers.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith("| compared with stock results |")]
    cells = row.split("|")[2:]
    for package, cell in zip((contrib.OPENRLHF, contrib.MS_SWIFT, contrib.LLAMA_FACTORY), cells):
        assert cell.split()[0] in package.compared, package.name


def test_the_workflow_has_the_jobs_of_ci() -> None:
    """Each of .ci/run's jobs is one of a pull request's or of the night's, and no other."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    groups = [re.search(rf"^{name}=\((.+)\)$", script, re.M) for name in ("usual", "thorough")]
    expected = [found[1].split() for found in groups if found is not None]
    assert [found.split(", ") for found in re.findall(r"^ +job: \[(.+)\]$", workflow, re.M)] == expected
    assert {f"job_{one}" for jobs in expected for one in jobs} == set(re.findall(r"^(job_\w+)\(\)", script, re.M))
