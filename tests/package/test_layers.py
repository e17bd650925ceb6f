# SPDX-License-Identifier: BSD-3-Clause
"""The package is built in layers: a module imports from layers below its own, and nothing is imported late."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "flash_attn_dualkv"
FOLDER = Path(__file__).resolve().parents[2] / PACKAGE

OLD_PLACES = ("integrations.llama_factory", "integrations.ms_swift", "integrations.openrlhf")

# From the bottom up; a name stands for a module, or for all modules of a folder. Those of one line
# may import each other, without a circle.
LAYERS = (
    ("_version", "errors", "moved"),
    ("checks", "cli.command"),
    ("model_shape",),
    ("calls", "host"),
    ("nodes",),
    ("reference", "kernels"),
    ("ops",),
    ("layout",),
    ("cudnn",),
    ("packed_attention", "attention", "plan", "decode"),
    ("parallel.agreement",),
    ("data",),
    ("guard", "pieces", "scores"),
    ("parallel",),
    ("integrations.common.buffers", "integrations.common.patching", "integrations.trees", "integrations.verl_router"),
    ("integrations.recurrences",),
    ("integrations.common.versions",),
    ("integrations.megatron", "integrations.transformers"),
    ("integrations.common",),
    ("integrations.engines",),
    ("integrations.lm_eval", "integrations.sglang", "integrations.trl", "integrations.verl", "integrations.vllm"),
    ("integrations.verl_client",),
    ("integrations.ulysses", "integrations.context_parallel", *OLD_PLACES),
    ("", "cli", "demo", "predict"),
    ("contrib",),  # imports from everywhere, and nothing imports it: old places name it in a string
)


def modules() -> dict[str, Path]:
    """Every module of the package by its name behind the package's; that of the package is "" and of a folder its."""
    found: dict[str, Path] = {}
    for path in sorted(FOLDER.rglob("*.py")):
        parts = path.relative_to(FOLDER).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(name: str, tree: ast.AST) -> Iterator[str]:
    """Modules of the package that a module's code imports."""
    package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] == PACKAGE:
                    yield alias.name.partition(".")[2]
        elif isinstance(node, ast.ImportFrom):
            if node.level == 0 and (node.module or "").split(".")[0] != PACKAGE:
                continue
            above = package.split(".") if package else []
            above = above[: len(above) - node.level + 1] if node.level else []
            module = node.module or "" if node.level else (node.module or "").partition(".")[2]
            base = ".".join([*above, *([module] if module else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}".lstrip(".")
                yield full if full in MODULES else base


def parsed(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"))


def layer_of(name: str) -> int:
    """The layer of the longest entry that is the module, or a folder around it."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        for layer, names in enumerate(LAYERS):
            if ".".join(parts[:length]) in names:
                return layer
    raise AssertionError(f"{name or PACKAGE} has no layer: say in LAYERS where it belongs")


@pytest.mark.parametrize("name", [name for name in MODULES if name != "integrations"])
def test_imports_come_from_below(name: str) -> None:
    for imported in imports(name, parsed(name)):
        assert layer_of(imported) <= layer_of(name), f"{name} imports {imported}, which stands above it"


def test_only_old_places_name_contrib() -> None:
    named = {
        name
        for name in MODULES
        if any(
            isinstance(node, ast.Constant) and str(node.value).startswith(f"{PACKAGE}.contrib")
            for node in ast.walk(parsed(name))
        )
    }
    assert named == {*OLD_PLACES, "integrations.trees"}


def test_no_circle() -> None:
    arrows = {name: set(imports(name, parsed(name))) - {name} for name in MODULES}
    # A package's own file runs before its modules, and takes from them what it shows: that is no
    # circle of theirs.
    arrows = {name: {one for one in found if not name.startswith(f"{one}.")} for name, found in arrows.items()}
    left = dict(arrows)
    while ready := [name for name, found in left.items() if not found & set(left)]:
        for name in ready:
            del left[name]
    assert not left, f"these modules import each other in a circle: {sorted(left)}"


def test_no_late_imports() -> None:
    late = set()
    for name in MODULES:
        for function in ast.walk(parsed(name)):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) and [*imports(name, function)]:
                late.add(f"{name}.{function.name}")
    assert not late, f"imports inside of functions hide circles: {sorted(late)}"


# Where rows become forwards: the only modules that call these functions, or make another layout of one.
HOMES = {
    "row_inputs": {"integrations.transformers.images", "integrations.transformers.packed_forward"},
    "late_layout": {"integrations.transformers.packed_forward"},
    "towers_without_layout": {"integrations.transformers.packed_forward"},
    "expect_shared_prompt": {"integrations.transformers.packed_forward", "integrations.transformers.admission.probe"},
    "replace(layout)": {"data.batch", "integrations.transformers.packed_forward"},
}


def _calls(name: str) -> Iterator[str]:
    for node in ast.walk(parsed(name)):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first = ast.unparse(node.args[0]) if node.args else ""
            is_layout = called == "replace" and (first.endswith("layout") or "LAYOUT" in first)
            yield "replace(layout)" if is_layout else called


def test_forwards_over_rows_are_made_in_one_place() -> None:
    """Trainers enter `packed_forward`: who made inputs or layouts by himself would forget a part of them."""
    found: dict[str, set[str]] = {call: set() for call in HOMES}
    for name in MODULES:
        for call in {*_calls(name)} & {*HOMES}:
            found[call].add(name)
    assert found == HOMES
    # Engines hand the layout to models of transformers and to nobody else's.
    outside = (name for name in MODULES if name.startswith(("integrations.trl", "integrations.common", "contrib")))
    assert not [name for name in outside if "shared_prompt_layout" in MODULES[name].read_text(encoding="utf-8")]
