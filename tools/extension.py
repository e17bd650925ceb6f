# SPDX-License-Identifier: BSD-3-Clause
"""Compiles and links flash_attn_dualkv._C.

torch's own build command has no options per file; here the kernels are compiled without torch's headers, and each
family of sources only for its own architectures.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from build_plan import CudaBuild
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

EXTENSION = "flash_attn_dualkv._C"
OBJECTS = Path("build/objects")


def build(root: Path, plan: CudaBuild, output: Path) -> None:
    """Builds the extension of the sources in `root` into `output`. Raises BuildError with the compiler's messages."""
    steps = compile_steps(root, plan)
    jobs = parallel_jobs(os.environ)
    print(f"{plan.nvcc.path} (CUDA {plan.nvcc.release}): {len(steps)} files, {jobs} at a time")
    print(f"architectures {', '.join(plan.archs)} + PTX {ptx_arch(plan.archs)}, head dims {plan.head_dims}", flush=True)
    run_parallel(steps, jobs)
    link(plan, [step.output for step in steps], output)


def compile_steps(root: Path, plan: CudaBuild) -> list[CompileStep]:
    """Every compilation of the extension; the host sources come first, because torch's headers make them long."""
    kernels = [step for _, step in kernel_steps(root, plan.nvcc, plan.archs, plan.head_dims)]
    if not kernels:
        raise BuildError(f"no kernel sources in {root / 'csrc'} for head dims {', '.join(map(str, plan.head_dims))}.")
    return [host_step(root, plan, path) for path in sorted((root / "csrc").rglob("*.cpp"))] + kernels


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
    """The compilation of a .cpp file, which may include torch's headers and learns what the build contains."""
    include_dirs = [
        root / "csrc",
        plan.torch.folder / "include",
        plan.torch.folder / "include/torch/csrc/api/include",
        plan.nvcc.include_dir(),
        python_include(),
    ]
    defines = {
        "TORCH_EXTENSION_NAME": EXTENSION.rpartition(".")[2],
        "TORCH_API_INCLUDE_EXTENSION_H": "1",
        "_GLIBCXX_USE_CXX11_ABI": str(int(plan.torch.cxx11_abi)),
        "DUALKV_BUILD_ARCHS": f'"{";".join(plan.archs)}"',
        "DUALKV_BUILD_PTX": f'"{ptx_arch(plan.archs)}"',
    }
    command = [*shlex.split(host_compiler()), "-c", "-O2", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wall"]
    command += [f"-D{name}={value}" for name, value in defines.items()]
    command += [f"-I{include_dirs[0]}", *(part for path in include_dirs[1:] for part in ("-isystem", str(path)))]
    return CompileStep(
        (*command, str(source)), root / OBJECTS / f"{source.name}.o", root, f"torch {plan.torch.version}"
    )


def python_include() -> Path:
    folder = Path(sysconfig.get_paths()["include"])
    if not (folder / "Python.h").is_file():
        raise BuildError(
            f"no Python.h in {folder}. Install Python's headers (Debian, Ubuntu: apt install python3-dev)."
        )
    return folder


def shared_cxx_library() -> list[str]:
    """The C++ library that torch has loaded, where the compiler knows it.

    A compiler without its development link takes the static one. Two copies in a process share some of their state: the
    first number in an error message of the extension was a segmentation fault.
    """
    found = run_text([*shlex.split(host_compiler()), "-print-file-name=libstdc++.so.6"]).strip()
    return [found] if Path(found).is_absolute() else []


def link(plan: CudaBuild, objects: list[Path], output: Path) -> None:
    """Links torch and the CUDA runtime without an rpath: importing torch has loaded both before the extension."""
    libraries = [f"-l{name}" for name in ("c10", "torch", "torch_cpu", "torch_python", "c10_cuda", "torch_cuda")]
    libraries.append(str(plan.nvcc.runtime_library()))
    command = [*shlex.split(host_compiler()), "-shared", "-o", str(output), *map(str, objects)]
    command += [f"-L{plan.torch.folder / 'lib'}", *libraries, *shared_cxx_library()]
    output.parent.mkdir(parents=True, exist_ok=True)
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise BuildError(f"{shlex.join(command)}\n{result.stdout}{result.stderr}")
