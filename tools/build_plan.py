# SPDX-License-Identifier: BSD-3-Clause
"""Decides what an installation builds: CUDA kernels (for which GPUs, with which nvcc) or only the Python package."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from toolchain import BuildError, Nvcc, arch_for_gpu, find_nvcc, parse_archs, parse_head_dims, pip_toolkit

DEFAULT_ARCHS = ("80", "90")
PURE_KNOB = "DUALKV_PURE_PYTHON"


@dataclass(frozen=True)
class TorchBuild:
    """The installed torch. `gpus` are the compute capabilities of the visible NVIDIA GPUs."""

    version: str
    cuda: str | None
    hip: str | None
    cxx11_abi: bool
    folder: Path
    gpus: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class CudaBuild:
    """Build the extension: machine code for `archs` (empty: only PTX) and `head_dims`."""

    torch: TorchBuild
    nvcc: Nvcc
    archs: tuple[str, ...]
    head_dims: tuple[int, ...]
    notice: str = ""


@dataclass(frozen=True)
class PureBuild:
    """Install the Python package without CUDA kernels; `notice` says why and what would change it."""

    notice: str


def probe_torch() -> TorchBuild | None:
    """The torch that the build can import, or None. Raises BuildError if there is one but importing it fails."""
    try:
        import torch
    except (ImportError, OSError) as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "torch":
            return None
        raise BuildError(f"importing torch fails ({error}). Repair the installation of torch first.") from error
    gpus = []
    if torch.version.cuda and torch.cuda.is_available():
        gpus = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
    return TorchBuild(
        version=torch.__version__,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        cxx11_abi=torch.compiled_with_cxx11_abi(),
        folder=Path(torch.__file__).parent,
        gpus=tuple(sorted(set(gpus))),
    )


def plan_build(
    env: Mapping[str, str],
    probe: Callable[[], TorchBuild | None] = probe_torch,
    locate: Callable[[str], Nvcc | None] = find_nvcc,
    platform: str = sys.platform,
) -> CudaBuild | PureBuild:
    """What to build on this machine with these settings. Raises BuildError, whose message says what to do."""
    head_dims = tuple(parse_head_dims(env.get("DUALKV_HEAD_DIMS", "")))
    requested = tuple(parse_archs(env["DUALKV_ARCHS"])) if env.get("DUALKV_ARCHS", "").strip() else ()
    if env.get(PURE_KNOB, "") not in ("", "0"):
        if requested:
            raise BuildError(f"DUALKV_ARCHS asks for CUDA kernels and {PURE_KNOB} for none: unset one of them.")
        return PureBuild(f"{PURE_KNOB} is set. Unset it and install again to get the CUDA kernels.")
    torch = probe()
    if torch is None:
        raise BuildError(
            "torch cannot be imported by the build. Install torch first, then install this package without build "
            "isolation, so that the extension is compiled for that torch: pip install --no-build-isolation ."
        )
    if torch.hip:
        raise BuildError(
            f"torch {torch.version} is built for ROCm; the kernels are CUDA kernels and need an NVIDIA GPU. Install a "
            f"CUDA build of torch, or set {PURE_KNOB}=1 to install only the CPU implementation."
        )
    pure = _reason_for_pure(torch, platform)
    if pure and requested:
        raise BuildError(f"DUALKV_ARCHS={';'.join(requested)} asks for CUDA kernels, but {pure}")
    if pure:
        return PureBuild(pure)
    return _plan_cuda(torch, requested, head_dims, locate)


def _reason_for_pure(torch: TorchBuild, platform: str) -> str:
    """Why no CUDA kernels can be built with this torch on this platform; empty if they can."""
    if torch.cuda is None:
        where = " An NVIDIA driver is present on this machine." if Path("/proc/driver/nvidia/version").exists() else ""
        return (
            f"torch {torch.version} is built without CUDA.{where} For the kernels (Linux, NVIDIA GPU of compute "
            "capability 8.0 or newer) install a CUDA build of torch, then install this package again."
        )
    if platform != "linux":
        return f"the CUDA kernels are built on Linux only; this is {platform}."
    return ""


def _plan_cuda(
    torch: TorchBuild, requested: tuple[str, ...], head_dims: tuple[int, ...], locate: Callable[[str], Nvcc | None]
) -> CudaBuild | PureBuild:
    assert torch.cuda is not None
    gpus = tuple(gpu for gpu in torch.gpus if gpu >= (8, 0))
    if torch.gpus and not gpus and not requested:
        return PureBuild(
            f"the GPU here has compute capability {_dotted(torch.gpus)}; the kernels need 8.0 (A100, RTX 30 series) or "
            'newer. To build for another machine set DUALKV_ARCHS, for example DUALKV_ARCHS="80;90".'
        )
    nvcc = locate(torch.cuda)
    if nvcc is None:
        return _without_nvcc(torch.cuda, torch.gpus, requested)
    archs, notice = _choose_archs(requested, gpus, nvcc)
    return CudaBuild(torch, nvcc, archs, head_dims, notice)


def _without_nvcc(cuda: str, gpus: tuple[tuple[int, int], ...], requested: tuple[str, ...]) -> PureBuild:
    fix = (
        f"Install the CUDA {cuda} toolkit and set CUDA_HOME to it, or with pip: {pip_toolkit(cuda)}. "
        "Then install this package again with --no-build-isolation."
    )
    searched = "no nvcc found in CUDA_HOME, PATH, /usr/local/cuda* or pip's nvidia-cuda-nvcc"
    if requested:
        raise BuildError(f"DUALKV_ARCHS={';'.join(requested)} asks for CUDA kernels, but {searched}. {fix}")
    if gpus:
        raise BuildError(
            f"a GPU of compute capability {_dotted(gpus)} is visible, but {searched}. {fix} To install only the "
            f"CPU implementation set {PURE_KNOB}=1."
        )
    return PureBuild(f"{searched}, and no GPU is visible. {fix}")


def _choose_archs(
    requested: tuple[str, ...], gpus: tuple[tuple[int, int], ...], nvcc: Nvcc
) -> tuple[tuple[str, ...], str]:
    """The architectures to build and a remark about the choice."""
    unknown = [arch for arch in requested if arch not in nvcc.archs]
    if unknown:
        known = ", ".join(sorted((arch for arch in nvcc.archs if int(arch) >= 80), key=int))
        raise BuildError(
            f"DUALKV_ARCHS: {nvcc.path} (CUDA {nvcc.release}) cannot build for {', '.join(unknown)}; it knows {known}."
        )
    if requested:
        return requested, ""
    if not gpus:
        default = " and ".join(DEFAULT_ARCHS)
        return DEFAULT_ARCHS, f"no GPU is visible: building for {default}. Set DUALKV_ARCHS to choose."
    chosen = {gpu: arch_for_gpu(gpu, nvcc.archs) for gpu in gpus}
    archs = tuple(sorted({arch for arch in chosen.values() if arch}, key=int))
    by_ptx = tuple(gpu for gpu, arch in chosen.items() if arch is None)
    if not by_ptx:
        return archs, ""
    return archs, f"nvcc {nvcc.release} does not know compute capability {_dotted(by_ptx)}: it will run embedded PTX."


def _dotted(gpus: tuple[tuple[int, int], ...]) -> str:
    return ", ".join(f"{major}.{minor}" for major, minor in gpus)
