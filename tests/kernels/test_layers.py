# SPDX-License-Identifier: BSD-3-Clause
"""Which folder of csrc may include which: geometry and policy know no kernel, and nothing knows torch."""

from __future__ import annotations

import re
from pathlib import Path

CSRC = Path(__file__).resolve().parents[2] / "csrc"
# Headers of csrc that each folder may include, as folders or as files.
LAYERS = {
    "ptx": {"ptx"},
    "core": {"core"},
    "tile": {"tile", "core", "ptx"},
    "kernels": {"kernels", "core", "tile", "ptx", "params.h"},
    "sm80": {"sm80", "kernels", "core", "tile", "ptx", "params.h"},
    "sm90": {"sm90", "kernels", "core", "tile", "ptx", "params.h"},
    "decode": {"decode", "sm80", "sm90", "kernels", "core", "tile", "ptx", "params.h"},
    "instances": {"sm80", "sm90", "decode"},
    "params.h": {"core"},
    "dispatch.h": {"core", "params.h"},
}
# Files of the host: those with launches, which check and register them, and a plan's memory.
HOST = re.compile(
    r"kernels/launch\.h|sm90/tensor_map\.cpp|\w+/\w+\.cu|decode/(early_launch\.h|memory\.h|decode\.cpp)|dispatch\.cpp"
)
# Plain C++ outside of core.
PLAIN = ("decode/geometry.h", "decode/kernel_params.h")


def layer(path: str) -> str:
    """The folder of a file, or the file where it lies in csrc itself."""
    return path.partition("/")[0]


def sources() -> dict[str, str]:
    return {str(path.relative_to(CSRC)): path.read_text() for path in CSRC.rglob("*.*")}


def test_folders_include_what_lies_below_them() -> None:
    wrong = []
    for path, text in sources().items():
        allowed = LAYERS.get(layer(path))
        for included in re.findall(r'^\s*#\s*include "(.+?)"', text, re.M):
            may = allowed is None or layer(included) in allowed
            may |= bool(HOST.fullmatch(path)) and included in ("dispatch.h", "guarded.h", "problem.h", "work_lists.h")
            if not may:
                wrong.append(f"{path} includes {included}")
    assert not wrong
    assert set(LAYERS) <= {layer(path) for path in sources()} and set(PLAIN) <= set(sources())


def test_core_is_plain_cpp() -> None:
    """No CUDA header, and no function that the device alone has."""
    for path, text in sources().items():
        if layer(path) == "core" or path in PLAIN:
            assert not re.search(
                r"#\s*include <(cuda|math_constants)|^ *__device__|__syncthreads|\basm\b", text, re.M
            ), path


def test_nobody_sees_torch_and_one_file_python() -> None:
    """The library is for any PyTorch; the module sees Python and the C interface alone, and is for any CUDA."""
    seen = re.compile(r'#\s*include [<"]((?:torch|ATen|c10|pybind11|Python)\b.*?)[>"]')
    found = {path: seen.findall(text) for path, text in sources().items()}
    assert {path for path, names in found.items() if names} == {"module.cpp"}
    assert all(name.startswith("pybind11/") for name in found["module.cpp"])
    assert re.findall(r'#\s*include "(.+)"', sources()["module.cpp"]) == ["api.h"]
    assert re.findall(r"#\s*include .(.+).", sources()["api.h"]) == ["stdint.h"]
