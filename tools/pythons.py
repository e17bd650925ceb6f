# SPDX-License-Identifier: BSD-3-Clause
"""The Pythons that a build serves. The kernels know none; a small module for each lies beside them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from toolchain import BuildError

PYTHONS_KNOB = "DUALKV_PYTHONS"
OLDEST = (3, 10)
QUESTION = """
import json, sys, sysconfig
print(json.dumps([
    sys.implementation.name, sys.version_info[:2], sys.abiflags,
    sysconfig.get_paths()["include"], sysconfig.get_config_var("EXT_SUFFIX"),
]))
"""


@dataclass(frozen=True)
class Python:
    """How modules for a Python are compiled and named, and its tags in a wheel's name: cp313 and its ABI's, cp313."""

    tag: str
    abi: str
    include: Path
    suffix: str


def find_pythons(text: str) -> tuple[Python, ...]:
    """Those of DUALKV_PYTHONS, names or paths such as "python3.10 python3.11"; of the running one where it is empty."""
    found = [ask_python(name) for name in text.split() or [sys.executable]]
    return tuple({python.suffix: python for python in found}.values())


def ask_python(name: str) -> Python:
    """What an executable says of itself. Raises BuildError where it cannot be served."""
    executable = shutil.which(name)
    if executable is None:
        raise BuildError(
            f"{PYTHONS_KNOB}: expected names or paths of Pythons, divided by spaces; there is no {name!r}."
        )
    try:
        result = subprocess.run([executable, "-I", "-c", QUESTION], capture_output=True, text=True, check=True)
        implementation, version, abi_flags, include, suffix = json.loads(result.stdout)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        detail = getattr(error, "stderr", "").strip()
        raise BuildError(f"{PYTHONS_KNOB}: {executable} does not say what it is: {error}. {detail}".strip()) from error
    if implementation != "cpython" or tuple(version) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        is_version = ".".join(map(str, version))
        raise BuildError(
            f"{PYTHONS_KNOB}: expected CPython {oldest} or newer; {executable} is {implementation} {is_version}."
        )
    if not (Path(include) / "Python.h").is_file():
        raise BuildError(
            f"no Python.h in {include}, for {executable}. Install Python's headers (Debian, Ubuntu: apt install "
            "python3-dev)."
        )
    tag = "cp" + "".join(map(str, version))
    return Python(tag, tag + abi_flags, Path(include), suffix)


def wheel_tags(pythons: tuple[Python, ...]) -> tuple[str, str]:
    """The Python tag and the ABI tag of a wheel with modules for `pythons`.

    One with several is for any Python 3: under a Python that came later the CPU implementation runs, and importing the
    package says that a module is missing.
    """
    return (pythons[0].tag, pythons[0].abi) if len(pythons) == 1 else ("py3", "none")
