# SPDX-License-Identifier: BSD-3-Clause
"""Compiles and links what is not Python: the kernel library, and for each Python the module that opens it.

The library has a C interface (csrc/api.h) and a CUDA runtime of its own. Neither it nor a module sees torch, and only
the module sees Python: one wheel serves every torch.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from build_plan import CudaBuild
from pythons import Python, ask_python
from toolchain import (
    HEAD_DIMS,
    BuildError,
    CompileStep,
    KernelSource,
    Nvcc,
    host_compiler,
    kernel_sources,
    nvcc_step,
    parallel_jobs,
    ptx_arch,
    run_parallel,
    run_text,
)

PACKAGE = "flash_attn_dualkv"
LIBRARY = "libdualkv.so"
MODULE = "_C"
MODULE_SOURCE = Path("csrc/module.cpp")
OBJECTS = Path("build/objects")
CXX_FLAGS = ("-O2", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wall")


def build(root: Path, plan: CudaBuild, folder: Path) -> None:
    """Builds the sources in `root` into `folder`. Raises BuildError with the compiler's messages."""
    objects, modules = library_steps(root, plan), [module_step(root, python) for python in plan.pythons]
    nvcc, archs, _ = plan.target
    jobs = parallel_jobs(os.environ)
    print(f"{nvcc.path} (CUDA {nvcc.release}): {len(objects) + len(modules)} files, {jobs} at a time")
    print(f"architectures {', '.join(archs)} + PTX {ptx_arch(archs)}, head dims {plan.head_dims}", flush=True)
    run_parallel([*modules, *objects], jobs)
    folder.mkdir(parents=True, exist_ok=True)
    link(root, nvcc, [step.output for step in objects], folder / LIBRARY)
    for step in modules:
        shutil.copy2(step.output, folder / step.output.name)


def file_names(plan: CudaBuild) -> list[str]:
    """What a build leaves in the package's folder."""
    return [LIBRARY, *(MODULE + python.suffix for python in plan.pythons)]


def library_steps(root: Path, plan: CudaBuild) -> list[CompileStep]:
    """Every compilation of the library."""
    nvcc, archs, _ = plan.target
    kernels = [step for _, step in kernel_steps(root, nvcc, archs, plan.head_dims)]
    if not kernels:
        raise BuildError(f"no kernel sources in {root / 'csrc'} for head dims {', '.join(map(str, plan.head_dims))}.")
    sources = sorted(path.relative_to(root) for path in (root / "csrc").rglob("*.cpp"))
    return [host_step(root, plan, source) for source in sources if source != MODULE_SOURCE] + kernels


def kernel_steps(
    root: Path, nvcc: Nvcc, archs: Iterable[str], head_dims: Iterable[int] = HEAD_DIMS
) -> list[tuple[KernelSource, CompileStep]]:
    """The compilation of every source with kernels for the requested architectures."""
    steps = []
    for source in kernel_sources(root, head_dims):
        if gencode := source.gencode(archs):
            output = root / OBJECTS / f"{source.path.name}.o"
            steps.append((source, nvcc_step(nvcc, source.path, output, root, gencode)))
    return steps


def host_step(root: Path, plan: CudaBuild, source: Path) -> CompileStep:
    """The compilation of a .cpp file of the library, which learns what the build contains."""
    nvcc, archs, _ = plan.target
    defines = {
        "DUALKV_BUILD_ARCHS": ";".join(archs),
        "DUALKV_BUILD_PTX": ptx_arch(archs),
        "DUALKV_VERSION": version_of(root),
    }
    command = [*shlex.split(host_compiler()), "-c", *CXX_FLAGS, "-Icsrc", "-isystem", str(nvcc.include_dir())]
    command += [f'-D{name}="{value}"' for name, value in defines.items()]
    return CompileStep((*command, str(source)), root / OBJECTS / f"{source.name}.o", root, f"CUDA {nvcc.release}")


def module_step(root: Path, python: Python) -> CompileStep:
    """Compiles and links the module of a Python; it finds the symbols of Python in the process that imports it."""
    command = [*shlex.split(host_compiler()), "-shared", *CXX_FLAGS, "-Wl,--strip-all", "-Icsrc"]
    command += ["-isystem", str(pybind11_include()), "-isystem", str(python.include), str(MODULE_SOURCE)]
    libraries = [*shared_cxx_library(), "-ldl"]
    return CompileStep((*command, *libraries), root / OBJECTS / f"{MODULE}{python.suffix}", root, python.abi)


def python_include() -> Path:
    """The headers of the running Python."""
    return ask_python(sys.executable).include


def pybind11_include() -> Path:
    try:
        import pybind11
    except ImportError as error:
        fix = 'pip install "pybind11>=3", or leave out --no-build-isolation'
        raise BuildError(f"the build needs pybind11: {fix}.") from error
    return Path(pybind11.get_include())


def version_of(root: Path) -> str:
    text = (root / PACKAGE / "_version.py").read_text()
    found = re.search(r'^__version__ = "(.+)"$', text, re.M)
    assert found, text
    return found.group(1)


def shared_cxx_library() -> list[str]:
    """The C++ library that other extensions have loaded, where the compiler knows it.

    A compiler without its development link takes the static one. Two copies in a process share some of their state: the
    first number in an error message of the extension was a segmentation fault.
    """
    found = run_text([*shlex.split(host_compiler()), "-print-file-name=libstdc++.so.6"]).strip()
    return [found] if Path(found).is_absolute() else []


def link(root: Path, nvcc: Nvcc, objects: list[Path], output: Path) -> None:
    """Links the library. Only its own functions are seen outside: a process may have other CUDA runtimes loaded."""
    libraries = [str(nvcc.static_runtime()), *shared_cxx_library(), "-ldl", "-lpthread", "-lrt"]
    options = ["-Wl,--no-undefined", "-Wl,--strip-all", f"-Wl,--version-script={root / 'tools/exports.map'}"]
    command = [*shlex.split(host_compiler()), "-shared", "-o", str(output), *map(str, objects), *libraries, *options]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise BuildError(f"{shlex.join(command)}\n{result.stdout}{result.stderr}")
