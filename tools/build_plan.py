# SPDX-License-Identifier: BSD-3-Clause
"""Decides what an installation builds: CUDA kernels (for which GPUs, with which nvcc) or only the Python package."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from gpus import Gpus, find_gpus
from pythons import PYTHONS_KNOB, Python, find_pythons
from toolchain import (
    BuildError,
    Nvcc,
    arch_for_gpu,
    environment_folders,
    find_nvcc,
    install_nvcc,
    parse_archs,
    parse_head_dims,
)

DEFAULT_ARCHS = ("80", "90")
PURE_KNOB = "DUALKV_PURE_PYTHON"
NO_NVCC = "no nvcc found in CUDA_HOME, PATH, /usr/local/cuda* or pip's nvidia-cuda-nvcc"


@dataclass(frozen=True)
class TorchBuild:
    """The torch that the package will run beside, which the kernels do not see."""

    version: str
    cuda: str | None
    hip: str | None


class Target(NamedTuple):
    """Build kernels with machine code for `archs` (empty: only PTX)."""

    nvcc: Nvcc
    archs: tuple[str, ...]
    notice: str = ""


@dataclass(frozen=True)
class CudaBuild:
    """Build the kernels of `head_dims`, and modules for `pythons`."""

    target: Target
    head_dims: tuple[int, ...]
    pythons: tuple[Python, ...]


@dataclass(frozen=True)
class PureBuild:
    """Install the Python package without CUDA kernels; `notice` says why and what would change it."""

    notice: str


@dataclass(frozen=True)
class Machine:
    """What a build finds out about where it runs, unless its settings already say what to build."""

    torch: Callable[[], TorchBuild | None]
    gpus: Callable[[], Gpus]
    nvcc: Callable[[tuple[int, int] | None], Nvcc | None]
    platform: str


def find_torch(folders: Iterable[Path] | None = None) -> TorchBuild | None:
    """The installed torch by its version.py: a build with isolation cannot import it."""
    for folder in environment_folders() if folders is None else folders:
        path = folder / "torch/version.py"
        if not path.is_file():
            continue
        lines = re.findall(r"^(__version__|cuda|hip)\b[^=\n]*= *('[^']*'|\"[^\"]*\"|None)", path.read_text(), re.M)
        values = {name: ast.literal_eval(value) for name, value in lines}
        return TorchBuild(values.get("__version__", "?"), values.get("cuda"), values.get("hip"))
    return None


THIS_MACHINE = Machine(find_torch, find_gpus, find_nvcc, sys.platform)


def plan_build(env: Mapping[str, str], machine: Machine = THIS_MACHINE) -> CudaBuild | PureBuild:
    """What to build on this machine with these settings. Raises BuildError, whose message says what to do."""
    head_dims = tuple(parse_head_dims(env.get("DUALKV_HEAD_DIMS", "")))
    requested = tuple(parse_archs(env["DUALKV_ARCHS"])) if env.get("DUALKV_ARCHS", "").strip() else ()
    if env.get(PURE_KNOB, "") not in ("", "0"):
        if requested:
            raise BuildError(f"DUALKV_ARCHS asks for CUDA kernels and {PURE_KNOB} for none: unset one of them.")
        return PureBuild(f"{PURE_KNOB} is set. Unset it and install again to get the CUDA kernels.")
    target = _requested(requested, machine) if requested else _fitting(machine)
    if isinstance(target, PureBuild):
        return target
    return CudaBuild(target, head_dims, find_pythons(env.get(PYTHONS_KNOB, "")))


def _requested(archs: tuple[str, ...], machine: Machine) -> Target:
    """As DUALKV_ARCHS says, for whatever machine: the GPUs and the torch of this one do not matter."""
    asked = f"DUALKV_ARCHS={';'.join(archs)} asks for CUDA kernels, but"
    if machine.platform != "linux":
        raise BuildError(f"{asked} {_not_linux(machine.platform)}")
    nvcc = machine.nvcc(None)
    if nvcc is None:
        raise BuildError(f"{asked} {NO_NVCC}. {install_nvcc(None)}")
    unknown = [arch for arch in archs if arch not in nvcc.archs]
    if unknown:
        known = ", ".join(sorted((arch for arch in nvcc.archs if int(arch) >= 80), key=int))
        raise BuildError(
            f"DUALKV_ARCHS: {nvcc.path} (CUDA {nvcc.release}) cannot build for {', '.join(unknown)}; it knows {known}."
        )
    return Target(nvcc, archs)


def _fitting(machine: Machine) -> PureBuild | Target:
    """What the torch and the GPUs of this machine can use."""
    if machine.platform != "linux":
        return PureBuild(_not_linux(machine.platform))
    torch = machine.torch()
    if torch is not None and torch.cuda is None:
        return PureBuild(_without_cuda(torch))
    gpus = machine.gpus()
    usable = tuple(gpu for gpu in gpus.capabilities if gpu >= (8, 0))
    if gpus.capabilities and not usable:
        return PureBuild(
            f"the GPU here has compute capability {_dotted(gpus.capabilities)}; the kernels need 8.0 (A100, RTX 30 "
            'series) or newer. To build for another machine set DUALKV_ARCHS, for example DUALKV_ARCHS="80;90".'
        )
    return _for_gpus(usable, gpus.driver, machine) if usable else _without_gpus(gpus, machine)


def _for_gpus(usable: tuple[tuple[int, int], ...], driver: tuple[int, int] | None, machine: Machine) -> Target:
    """Each GPU gets machine code of its own generation, or runs the PTX."""
    nvcc = machine.nvcc(driver)
    if nvcc is None:
        raise BuildError(
            f"a GPU of compute capability {_dotted(usable)} is visible, but {NO_NVCC}. {install_nvcc(driver)} "
            f"To install only the CPU implementation set {PURE_KNOB}=1."
        )
    chosen = {gpu: arch_for_gpu(gpu, nvcc.archs) for gpu in usable}
    archs = tuple(sorted({arch for arch in chosen.values() if arch}, key=int))
    by_ptx = tuple(gpu for gpu, arch in chosen.items() if arch is None)
    unknown = f"nvcc {nvcc.release} does not know compute capability {_dotted(by_ptx)}: it will run embedded PTX."
    return Target(nvcc, archs, unknown if by_ptx else "")


def _without_gpus(gpus: Gpus, machine: Machine) -> PureBuild | Target:
    """Where kernels can be built they are: container images are made on machines without a GPU."""
    no_gpu = f"no GPU is visible{f' ({gpus.problem})' if gpus.problem else ''}"
    try:
        nvcc = machine.nvcc(None)
    except BuildError as error:
        return PureBuild(f"{no_gpu}, and {error}")
    if nvcc is None:
        return PureBuild(f"{NO_NVCC}, and {no_gpu}. {install_nvcc(None)}")
    default = " and ".join(DEFAULT_ARCHS)
    return Target(nvcc, DEFAULT_ARCHS, f"{no_gpu}: building for {default}. Set DUALKV_ARCHS to choose.")


def _not_linux(platform: str) -> str:
    use = {
        "win32": "For the kernels use Linux on a machine with an NVIDIA GPU, or WSL 2 here.",
        "darwin": "For the kernels use a Linux machine with an NVIDIA GPU.",
    }
    return f"the CUDA kernels are built on Linux only; this is {platform}. {use.get(platform, use['darwin'])}"


def _without_cuda(torch: TorchBuild) -> str:
    if torch.hip:
        built = f"torch {torch.version} is built for ROCm, and the kernels are CUDA kernels."
    else:
        here = " An NVIDIA driver is present on this machine." if Path("/proc/driver/nvidia/version").exists() else ""
        built = f"torch {torch.version} is built without CUDA.{here}"
    return (
        f"{built} For the kernels (Linux, NVIDIA GPU of compute capability 8.0 or newer) install a CUDA build of "
        "torch, then install this package again."
    )


def _dotted(gpus: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(f"{major}.{minor}" for major, minor in gpus)
