# SPDX-License-Identifier: BSD-3-Clause
"""The kernel library compiled for the host: every kernel of csrc, run by host_cuda instead of a GPU, on CPU tensors.

    DUALKV_TEST_DEVICE=host pytest tests/kernels/test_tree.py

What is checked is the code of the kernels: which bytes they read and write, what they compute, how exactly (sums are
truncated, as by tensor cores), whether it depends on who is early and who is late, and the fences between the ways to
shared memory. What is not: what nvcc makes of it, and blocks that run at the same time, for here one follows the other.
The headers of csrc/ptx, a few instructions each, have twins in host_cuda/ptx.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib.util
import os
import re
import shlex
import subprocess
import sysconfig
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pybind11
import torch
from extension import python_include
from toolchain import CompileStep, host_compiler, kernel_sources, parallel_jobs, parse_head_dims, run_parallel

from flash_attn_dualkv import kernels, ops
from flash_attn_dualkv._version import __version__
from flash_attn_dualkv.calls import BackwardCall, ForwardCall
from flash_attn_dualkv.decode import library as decode_library
from flash_attn_dualkv.decode import operators, plan
from flash_attn_dualkv.decode.calls import DecodeCall, Limits, Step

ROOT = Path(__file__).resolve().parents[2]
HOST_CUDA = Path(__file__).resolve().parent / "host_cuda"
FOLDER = ROOT / "build/host_kernels"

# What only nvcc understands.
LAUNCH = re.compile(r"([\w:]+(?:<[\w, ]+>)?)<<<(.+?)>>>\(")
DYNAMIC_SHARED = re.compile(r"extern __shared__ (?:__align__\(128\) )?uint8_t (\w+)\[\];")


def copy_sources() -> Path:
    """csrc as a C++ compiler takes it, without the headers that have a twin, and without files that are gone."""
    copies = set()
    for path in sorted((ROOT / "csrc").rglob("*")):
        if path.suffix not in (".h", ".cu", ".cpp") or path.parent.name == "ptx":
            continue
        text = LAUNCH.sub(r"::host_cuda::launch(\1, \2)(", path.read_text())
        text = DYNAMIC_SHARED.sub(r"uint8_t* const \1 = ::host_cuda::dynamic_shared();", text)
        copy = FOLDER / path.relative_to(ROOT)
        copies.add(copy)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if not copy.exists() or copy.read_text() != text:
            copy.write_text(text)
    for path in (FOLDER / "csrc").rglob("*.*"):
        if path not in copies:
            path.unlink()
    return FOLDER / "csrc"


def compile_step(source: Path, options: tuple[str, ...]) -> CompileStep:
    command = [
        *shlex.split(host_compiler()),
        "-c",
        "-std=c++20",
        "-fPIC",
        "-fvisibility=hidden",
        "-Wno-unknown-pragmas",
        "-ffp-contract=off",
    ]
    command += ["-march=native", f"-I{HOST_CUDA}", f"-I{FOLDER / 'csrc'}", *options, str(source)]
    return CompileStep(tuple(command), FOLDER / "objects" / f"{source.name}.o", ROOT, "host")


def build() -> Path:
    """The folder of library and module, compiled anew where something has changed.

    One process at a time: others wait and find it made.
    """
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _build()
    return FOLDER


def _build() -> None:
    csrc = copy_sources()
    device = ("-O3", "-D__CUDACC__", "-D__CUDA_ARCH__=900", "-include", "cuda_runtime.h", "-xc++")
    head_dims = parse_head_dims(os.environ.get("DUALKV_HEAD_DIMS", ""))
    steps = [compile_step(source.path, device) for source in kernel_sources(csrc.parent, head_dims)]
    host = ("-O1", '-DDUALKV_BUILD_ARCHS="80;90"', '-DDUALKV_BUILD_PTX="80"', f'-DDUALKV_VERSION="{__version__}"')
    steps += [compile_step(source, host) for source in csrc.rglob("*.cpp") if source.name != "module.cpp"]
    includes = (python_include(), pybind11.get_include())
    module = compile_step(csrc / "module.cpp", ("-O1", *(part for one in includes for part in ("-isystem", str(one)))))
    run_parallel([*steps, module], parallel_jobs(os.environ))
    link([step.output for step in steps], FOLDER / kernels.LIBRARY.name)
    link([module.output], FOLDER / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}")


def link(objects: list[Path], output: Path) -> None:
    linked = output.with_suffix(".linked")  # of which objects: fewer head dims are fewer
    is_new = output.exists() and output.stat().st_mtime > max(one.stat().st_mtime for one in objects)
    if is_new and linked.exists() and linked.read_text() == str(objects):
        return  # another process may have loaded it
    subprocess.run([*shlex.split(host_compiler()), "-shared", "-o", str(output), *map(str, objects)], check=True)
    linked.write_text(str(objects))


@cache
def load() -> tuple[ModuleType, None]:
    folder = build()
    spec = importlib.util.spec_from_file_location("_C", folder / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.open_library(str(folder / kernels.LIBRARY.name)) == __version__
    return module, None


def poisoned(make: Callable[..., Any]) -> Callable[..., Any]:
    """New memory that is full of NaN."""

    def made(*arguments: Any) -> Any:
        memory = make(*arguments)
        ctypes.memset(memory.data_ptr(), 0xFF, memory.nbytes() if callable(memory.nbytes) else memory.nbytes)
        return memory

    return made


def install() -> None:
    """Makes them what flash_attn_dualkv calls in this process for CPU tensors of 16 bits; others have no kernels."""
    kernels.load = load
    kernels.current_device = lambda: -1  # the host's
    kernels.current_stream = lambda device: 0
    kernels.prepare = lambda device: None
    for name in ("uninitialised", "gradient_of", "scratch"):
        setattr(kernels, name, poisoned(getattr(kernels, name)))
    library = torch.library.Library("flash_attn_dualkv", "IMPL")
    _libraries.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that these take the place of others
        for name, table, kind in (("forward", ops._FORWARD, ForwardCall), ("backward", ops._BACKWARD, BackwardCall)):
            table["cpu"] = partial(_run, table["cuda"], table["cpu"])
            library.impl(name, ops.unpacking(kind, table["cpu"]), "CPU", allow_override=True)
        operators._DECODE["cpu"] = partial(_decode, operators._DECODE["cpu"])
        operators._PLAN["cpu"] = partial(_plan, operators._PLAN["cpu"])
        plan.make_memory = _plan_memory
        library.impl("sequence_nodes", ops._sequence_nodes_cuda, "CPU", allow_override=True)
        library.impl("tree_nodes", ops._tree_nodes_cuda, "CPU", allow_override=True)


def _decode(reference: Callable[..., Any], call: DecodeCall) -> Any:
    return reference(call) if call.step.memory is None else decode_library.decode(call)


def _plan(reference: Callable[..., Any], step: Step) -> Any:
    return reference(step) if step.memory is None else decode_library.decode_plan(step)


def _plan_memory(limits: Limits, device: torch.device) -> torch.Tensor:
    return torch.zeros(decode_library.decode_plan_bytes(limits, device), dtype=torch.uint8)


def _run(kernels: Callable[..., Any], reference: Callable[..., Any], call: ForwardCall | BackwardCall) -> Any:
    if call.q.dtype not in (torch.float16, torch.bfloat16):
        return reference(call)
    # Packed attention asks for the reference where there is no GPU.
    return kernels(call._replace(options=call.options._replace(reference=False)))


_libraries: list[torch.library.Library] = []  # one that is deleted takes its implementations with it
