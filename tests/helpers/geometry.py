# SPDX-License-Identifier: BSD-3-Clause
"""The geometry header, compiled for the host."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

HERE = Path(__file__).resolve().parent
INCLUDE = HERE.parents[1] / "csrc"
COMPILER = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


class Record(ctypes.Structure):
    """Mirror of the shim's Record."""

    NAMES = (
        "steps", "masked_steps", "empty_steps", "needless_masks", "wrong_unmasked", "out_of_range",
        "blind_tiles", "wrong_order", "endless", "border_tiles", "wrong_borders",
        "ranges", "bad_parts", "short_parts", "wrong_own_rows", "wrong_key_rows",
    )  # fmt: skip
    _fields_ = [("seen", ctypes.c_void_p), *((name, ctypes.c_int64) for name in NAMES)]


def build_shim(folder: Path, *flags: str) -> Path:
    """Compiles the shim; skips where there is no compiler."""
    if COMPILER is None:
        pytest.skip("no C++ compiler")
    library = folder / f"geometry{len(flags)}.so"
    command = [COMPILER, "-std=c++17", "-O1", "-shared", "-fPIC", *flags]
    command += [f"-I{INCLUDE}", str(HERE / "geometry_shim.cpp"), "-o", str(library)]
    subprocess.run(command, check=True)
    return library


def load(library: Path) -> ctypes.CDLL:
    shim = ctypes.CDLL(str(library))
    shim.count_steps.restype = ctypes.c_int64
    shim.do_tiles_stay_whole.restype = ctypes.c_bool
    return shim


@cache
def load_geometry() -> ctypes.CDLL:
    """Compiled once a process."""
    with TemporaryDirectory() as folder:
        return load(build_shim(Path(folder)))
