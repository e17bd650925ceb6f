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

RELEASED_ARCHS = ("80", "90")  # of the wheels of a release
PURE_KNOB = "DUALKV_PURE_PYTHON"
REINSTALL = "pip install --no-deps --force-reinstall --no-cache-dir ."
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
    """Install the Python package without CUDA kernels.

    `reason` is a clause about the machine that built, in the past, for the installation keeps it: "at install" can
    stand behind it. `fix` is what would change it.
    """

    reason: str
    fix: str

    @property
    def notice(self) -> str:
        return f"{self.reason}. {self.fix}"


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
        return PureBuild(f"{PURE_KNOB} was set", "Unset it and install again to get the CUDA kernels.")
    target = _requested(requested, machine) if requested else _fitting(machine)
    if isinstance(target, PureBuild):
        return target
    return CudaBuild(target, head_dims, find_pythons(env.get(PYTHONS_KNOB, "")))


def _requested(archs: tuple[str, ...], machine: Machine) -> Target:
    """As DUALKV_ARCHS says, for whatever machine: the GPUs and the torch of this one do not matter."""
    asked = f"DUALKV_ARCHS={';'.join(archs)} asks for CUDA kernels, but"
    if machine.platform != "linux":
        raise BuildError(f"{asked} {_not_linux(machine.platform).notice}")
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
        return _not_linux(machine.platform)
    torch = machine.torch()
    if torch is not None and torch.cuda is None:
        return _without_cuda(torch)
    gpus = machine.gpus()
    usable = tuple(gpu for gpu in gpus.capabilities if gpu >= (8, 0))
    return _for_gpus(usable, gpus.driver, machine) if usable else _without_gpu(gpus)


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


def _without_gpu(gpus: Gpus) -> PureBuild:
    """Even where nvcc is: nobody can tell which kernels are wanted, and those of a release take minutes."""
    other = f"For another GPU, such as one of compute capability 9.0: DUALKV_ARCHS=90 {REINSTALL}"
    if gpus.capabilities:
        old = f"only a GPU of compute capability {_dotted(gpus.capabilities)} was visible"
        return PureBuild(old, f"The kernels need 8.0 (A100, RTX 30 series) or newer. {other}")
    return PureBuild(f"no GPU was visible{f' ({gpus.problem})' if gpus.problem else ''}", other)


def _not_linux(platform: str) -> PureBuild:
    use = {
        "win32": "For the kernels use Linux on a machine with an NVIDIA GPU, or WSL 2 here.",
        "darwin": "For the kernels use a Linux machine with an NVIDIA GPU.",
    }
    built = f"the CUDA kernels are built on Linux only, and the platform was {platform}"
    return PureBuild(built, use.get(platform, use["darwin"]))


def _without_cuda(torch: TorchBuild) -> PureBuild:
    lacks = "for ROCm, and the kernels are CUDA kernels" if torch.hip else "without CUDA"
    has_driver = not torch.hip and Path("/proc/driver/nvidia/version").exists()
    here = "An NVIDIA driver is present on this machine. " if has_driver else ""
    return PureBuild(
        f"torch {torch.version}, built {lacks}, was there",
        f"{here}For the kernels (Linux, NVIDIA GPU of compute capability 8.0 or newer) install a CUDA build of torch, "
        "then install this package again.",
    )


def _dotted(gpus: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(f"{major}.{minor}" for major, minor in gpus)
