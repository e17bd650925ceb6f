# SPDX-License-Identifier: BSD-3-Clause
"""Parts of csrc, compiled for the host with the functions that tests call: the shims beside this file."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
INCLUDE = HERE.parents[1] / "csrc"
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


class Record(ctypes.Structure):
    """Mirror of the shim's Record."""

    NAMES = (
        "steps", "empty_steps", "needless_masks", "wrong_unmasked", "out_of_range",
        "blind_tiles", "wrong_order", "endless", "border_tiles", "wrong_borders",
        "ranges", "bad_parts", "short_parts", "wrong_own_rows", "wrong_key_rows",
    )  # fmt: skip
    _fields_ = [("seen", ctypes.c_void_p), *((name, ctypes.c_int64) for name in NAMES)]


def build_shim(name: str, folder: Path, *flags: str) -> Path:
    """The library of `name`_shim.cpp in a folder; skips where there is no compiler."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    library = folder / f"{name}.so"
    # Streams of a C++ library that Python has already loaded may be of another version.
    own_library = ["-static-libstdc++", "-Wl,-Bsymbolic", "-Wl,--exclude-libs,ALL"]
    command = [COMPILER, "-std=c++20", "-O1", "-shared", "-fPIC", *flags, f"-I{HERE / 'host_cuda'}", f"-I{INCLUDE}"]
    subprocess.run([*command, str(HERE / f"{name}_shim.cpp"), *own_library, "-o", str(library)], check=True)
    return library


@cache
def load_shim(name: str) -> ctypes.CDLL:
    """Compiled once a process."""
    with TemporaryDirectory() as folder:
        return ctypes.CDLL(str(build_shim(name, Path(folder))))


def shim_fixture(name: str) -> Any:
    """The library as a fixture of a module of tests."""
    return pytest.fixture(scope="module", name="shim")(lambda: load_shim(name))
