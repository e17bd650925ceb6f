# SPDX-License-Identifier: BSD-3-Clause
"""What the build and the check of the kernels share: which nvcc, flags and sources, and an incremental compile."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

OLDEST_ARCH = "80"
OLDEST_CUDA = (12, 5)  # cudaGetDriverEntryPointByVersion
STATIC_RUNTIME = "libcudart_static.a"
HEAD_DIMS = (64, 96, 128, 192, 256, 512, 576)
# -v: ptxas reports what tools/check_kernels.py reads.
NVCC_FLAGS = ("-O3", "-std=c++20", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC,-fvisibility=hidden", "-Xptxas=-v")
GIB_PER_COMPILE = 3.0


class BuildError(Exception):
    """A problem whose message tells the person installing what to do."""


# --- nvcc ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Nvcc:
    """One nvcc executable and its CUDA version."""

    path: Path
    version: tuple[int, int]

    @property
    def release(self) -> str:
        return _dotted(self.version)

    @cached_property
    def home(self) -> Path:
        """The toolkit's root as nvcc itself sees it: the executable may be a wrapper or a link that lives elsewhere."""
        top = re.search(r"^#\$ TOP=(.+)$", run_text([self.path, "--dryrun", "-c", "probe.cu"]), re.M)
        return Path(top.group(1).strip()).resolve() if top else self.path.resolve().parent.parent

    @cached_property
    def archs(self) -> frozenset[str]:
        """The real architectures that this nvcc can target, such as "80" and "90"."""
        return frozenset(re.findall(r"\bsm_(\d+)\b", run_text([self.path, "--list-gpu-code"])))

    @property
    def compression(self) -> tuple[str, ...]:
        """The options for the smallest device code; older drivers of CUDA 12 know only what is the default there."""
        return ("--compress-mode=size",) if self.version >= (13, 0) else ()

    def include_dir(self) -> Path:
        """Where cuda_runtime_api.h lives, for sources that the host compiler sees."""
        for directory in (self.home / "include", *sorted(self.home.glob("targets/*/include"))):
            if (directory / "cuda_runtime_api.h").is_file():
                return directory
        raise BuildError(
            f"{self.path} has no CUDA headers beside it (no cuda_runtime_api.h under {self.home}). Install the "
            f"complete toolkit. {install_nvcc(self.version)}"
        )

    def static_runtime(self) -> Path:
        """The CUDA runtime that becomes a part of the kernel library, so that it meets no other copy of it."""
        folders = [self.home / "lib64", self.home / "lib", *sorted(self.home.glob("targets/*/lib"))]
        folders += [site / "nvidia/cuda_runtime/lib" for site in environment_folders()]
        found = next((folder for folder in folders if (folder / STATIC_RUNTIME).exists()), None)
        if found is None:
            raise BuildError(f"no {STATIC_RUNTIME} under {self.home}. {install_nvcc(self.version)}")
        return found / STATIC_RUNTIME


def install_nvcc(cuda: tuple[int, int] | None) -> str:
    """How to get nvcc, its parts, headers and libraries in one matching version, that a driver for `cuda` runs."""
    if cuda is not None and cuda < (12, 0):
        how = "Update NVIDIA's driver to one for CUDA 12 or newer."
    elif cuda is not None and cuda[0] < 13:
        how = (
            f"Install a CUDA {cuda[0]} toolkit, {_dotted(OLDEST_CUDA)} or newer, and set CUDA_HOME to it: with "
            "NVIDIA's installer, the system's packages or conda; pip has none."
        )
    else:
        how = (
            "Install a CUDA toolkit and set CUDA_HOME to it, or with pip: "
            'pip install "cuda-toolkit[nvcc,nvvm,crt,cccl]==13.0.*".'
        )
    return f"{how} Then install this package again."


def run_text(command: Sequence[str | Path]) -> str:
    """stdout and stderr of a short command; empty if it cannot be run."""
    try:
        result = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout + result.stderr


def environment_folders() -> list[Path]:
    """Where the packages of the environment lie; a build with isolation has only its own requirements on sys.path."""
    entries = [*sys.path, *(sysconfig.get_paths()[name] for name in ("purelib", "platlib"))]
    return list(dict.fromkeys(Path(entry) for entry in entries if entry))


def nvcc_candidates(
    env: Mapping[str, str], local_root: Path = Path("/usr/local"), sites: Sequence[Path] | None = None
) -> list[Path]:
    """Every nvcc found, best first: CUDA_HOME, PATH, /usr/local/cuda*, then pip's nvidia-cuda-nvcc."""
    found = [Path(env["CUDA_HOME"]) / "bin/nvcc"] if env.get("CUDA_HOME") else []
    found += [Path(folder) / "nvcc" for folder in env.get("PATH", "").split(os.pathsep) if folder]
    found += [local_root / "cuda/bin/nvcc", *sorted(local_root.glob("cuda-*/bin/nvcc"), reverse=True)]
    for site in environment_folders() if sites is None else sites:
        found += [*sorted(site.glob("nvidia/cu*/bin/nvcc"), reverse=True), site / "nvidia/cuda_nvcc/bin/nvcc"]
    usable = [path for path in found if path.is_file() and os.access(path, os.X_OK)]
    return list(dict.fromkeys(usable))


def inspect_nvcc(path: Path) -> Nvcc | None:
    """The nvcc at `path`, or None if it does not run."""
    release = re.search(r"release (\d+)\.(\d+)", run_text([path, "--version"]))
    return Nvcc(path, (int(release.group(1)), int(release.group(2)))) if release else None


def find_nvcc(
    driver: tuple[int, int] | None = None,
    candidates: Iterable[Path] | None = None,
    inspect: Callable[[Path], Nvcc | None] = inspect_nvcc,
) -> Nvcc | None:
    """The first nvcc that knows all that the sources use, and whose kernels a driver for CUDA `driver` runs.

    None if there is no nvcc at all. Raises BuildError if there are only others.
    """
    others = []
    for path in nvcc_candidates(os.environ) if candidates is None else candidates:
        nvcc = inspect(path)
        if nvcc is None:
            continue
        if nvcc.version >= OLDEST_CUDA and (driver is None or nvcc.version[0] <= driver[0]):
            return nvcc
        others.append(f"{nvcc.path} (CUDA {nvcc.release})")
    if not others:
        return None
    runs = f", and one that the driver here runs: it is for CUDA {_dotted(driver)}" if driver else ""
    raise BuildError(
        f"the kernels need nvcc of CUDA {_dotted(OLDEST_CUDA)} or newer{runs}; found {', '.join(others)}. "
        f"{install_nvcc(driver)}"
    )


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


# --- architectures and sources ---------------------------------------------------------------------------------------


def parse_archs(text: str) -> list[str]:
    """DUALKV_ARCHS, such as "80;90", as sorted architecture numbers. Raises BuildError on anything else."""
    archs = set()
    for token in re.split(r"[;,\s]+", text.strip()):
        match = re.fullmatch(r"(\d{1,2})\.?(\d)", token)
        if not match:
            raise BuildError(
                f'DUALKV_ARCHS: expected compute capabilities such as "80;90", got {text!r}. '
                "Code for one architecture only (90a) is built with the plain number."
            )
        archs.add(match.group(1) + match.group(2))
    too_old = sorted(arch for arch in archs if int(arch) < int(OLDEST_ARCH))
    if too_old:
        raise BuildError(
            f"DUALKV_ARCHS: the kernels need 80 (compute capability 8.0) or newer, got {', '.join(too_old)}."
        )
    return sorted(archs, key=int)


def parse_head_dims(text: str) -> list[int]:
    """DUALKV_HEAD_DIMS, such as "64,128"; empty means all. Raises BuildError unless it is a subset of HEAD_DIMS."""
    tokens = [token for token in re.split(r"[;,\s]+", text.strip()) if token]
    unknown = [token for token in tokens if token not in map(str, HEAD_DIMS)]
    if unknown:
        raise BuildError(f"DUALKV_HEAD_DIMS: expected some of {', '.join(map(str, HEAD_DIMS))}, got {text!r}.")
    return sorted({int(token) for token in tokens}) or list(HEAD_DIMS)


def arch_for_gpu(capability: tuple[int, int], supported: Iterable[str]) -> str | None:
    """The newest architecture of the GPU's own generation that nvcc can target; None leaves the GPU to the PTX."""
    own = int("{}{}".format(*capability))
    fitting = [arch for arch in supported if int(arch) // 10 == capability[0] and int(OLDEST_ARCH) <= int(arch) <= own]
    return max(fitting, key=int, default=None)


def ptx_arch(archs: Iterable[str]) -> str:
    """The architecture whose PTX a build for `archs` embeds: the oldest, so that every newer GPU can compile it."""
    return min(archs, key=int, default=OLDEST_ARCH)


@dataclass(frozen=True)
class KernelSource:
    """A .cu file, its head dim (None: independent of it) and its family: the architecture it is written for."""

    path: Path
    family: str
    head_dim: int | None

    def targets(self, archs: Iterable[str]) -> list[tuple[str, str]]:
        """(virtual, real) architecture pairs of machine code to build for the requested `archs`."""
        if self.family == "sm90":
            return [("compute_90a", "sm_90a")] if "90" in archs else []
        return [(f"compute_{arch}", f"sm_{arch}") for arch in archs]

    def gencode(self, archs: Iterable[str]) -> list[str]:
        """The nvcc options for `archs`; the portable family also embeds PTX, which newer GPUs compile on loading."""
        archs = tuple(archs)
        pairs = self.targets(archs)
        if self.family == "sm80":
            pairs.append((f"compute_{ptx_arch(archs)}", f"compute_{ptx_arch(archs)}"))
        return [part for virtual, real in pairs for part in ("-gencode", f"arch={virtual},code={real}")]


def kernel_sources(root: Path, head_dims: Iterable[int] = HEAD_DIMS) -> list[KernelSource]:
    """All .cu files, those of csrc/instances limited to `head_dims`; the slowest to compile come first."""
    wanted = set(head_dims)
    sources = []
    for path in sorted(root.glob("csrc/*/*.cu")):
        if path.parent.name != "instances":
            sources.append(KernelSource(path, "sm80", None))
            continue
        match = re.fullmatch(r"(sm80|sm90)_\w+_d(\d+)(?:v\d+)?", path.stem)
        if not match:
            raise BuildError(f"{path}: expected a name such as sm80_forward_d128.cu")
        if int(match.group(2)) in wanted:
            sources.append(KernelSource(path, match.group(1), int(match.group(2))))
    return sorted(sources, key=lambda source: ("backward" in source.path.stem, source.head_dim or 0), reverse=True)


# --- compiling -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CompileStep:
    """One compiler call in the folder `root`. `command` lacks the output and dependency options, which are added here.

    The dependency list, the compiler's messages and a stamp of everything that went in lie beside `output`, so that a
    step whose inputs have not changed is not run again.
    """

    command: tuple[str, ...]
    output: Path
    root: Path
    toolchain: str

    @property
    def log(self) -> Path:
        return self.output.with_suffix(".log")

    def run(self) -> bool:
        """Compiles if anything changed; True if it did. Raises BuildError with the compiler's messages."""
        stamp = self.output.with_suffix(".stamp")
        if self.output.exists() and stamp.exists() and stamp.read_text() == self._digest():
            return False
        self.output.parent.mkdir(parents=True, exist_ok=True)
        stamp.unlink(missing_ok=True)
        command = [*self.command, "-MD", "-MF", str(self._dependency_file), "-o", str(self.output)]
        result = subprocess.run(command, cwd=self.root, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        messages = result.stdout + result.stderr
        if result.returncode:
            raise BuildError(f"{' '.join(command)}\n{messages}")
        self.log.write_text(messages)
        stamp.write_text(self._digest())
        return True

    @property
    def _dependency_file(self) -> Path:
        return self.output.with_suffix(".d")

    def _digest(self) -> str:
        """Of the command, the toolchain (which stands for every header outside the project) and the project's files."""
        digest = hashlib.sha256("\0".join([self.toolchain, *self.command]).encode())
        for path in self._dependencies():
            digest.update(str(path.relative_to(self.root)).encode())
            digest.update(path.read_bytes() if path.is_file() else b"missing")
        return digest.hexdigest()

    def _dependencies(self) -> list[Path]:
        if not self._dependency_file.exists():
            return []
        listed = self._dependency_file.read_text().partition(":")[2].replace("\\\n", " ")
        names = (name.replace("\\ ", " ") for name in re.split(r"(?<!\\)\s+", listed) if name)
        paths = {Path(os.path.abspath(self.root / name)) for name in names}
        return sorted(path for path in paths if path.is_relative_to(self.root))


def nvcc_step(nvcc: Nvcc, source: Path, output: Path, root: Path, options: Sequence[str]) -> CompileStep:
    """The nvcc call for one source file."""
    host = ("-ccbin", os.environ["CXX"]) if os.environ.get("CXX") else ()
    flags = (*NVCC_FLAGS, *nvcc.compression, *host, "-Icsrc", *options)
    command = (str(nvcc.path), "-c", *flags, str(source.relative_to(root)))
    more_flags = [os.environ.get(f"NVCC_{place}_FLAGS", "") for place in ("PREPEND", "APPEND")]  # nvcc reads them
    return CompileStep(command, output, root, f"nvcc {nvcc.release} {nvcc.home} {more_flags}")


def host_compiler() -> str:
    """CXX or g++. Raises BuildError if it is not there."""
    compiler = os.environ.get("CXX") or "g++"
    if not shutil.which(compiler.split()[0]):
        raise BuildError(f"no C++ compiler: {compiler} is not on PATH. Install g++ (apt install g++) or set CXX.")
    return compiler


def parallel_jobs(env: Mapping[str, str]) -> int:
    """MAX_JOBS, or what the usable cores and the free memory allow."""
    if env.get("MAX_JOBS"):
        if not env["MAX_JOBS"].isdigit() or int(env["MAX_JOBS"]) < 1:
            raise BuildError(f"MAX_JOBS: expected a positive whole number, got {env['MAX_JOBS']!r}.")
        return int(env["MAX_JOBS"])
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(cores, int(_available_gib() / GIB_PER_COMPILE)))


def _available_gib() -> float:
    try:
        available = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    except OSError:
        available = None
    return int(available.group(1)) / 2**20 if available else 4 * GIB_PER_COMPILE


def run_parallel(steps: Sequence[CompileStep], jobs: int) -> None:
    """Runs every step, `jobs` at a time, with a line per compiled file. Raises the first failure and starts no more."""

    def run(step: CompileStep) -> None:
        start = time.monotonic()
        if step.run():
            print(f"compiled {step.output.name} in {time.monotonic() - start:.0f} s", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        try:
            list(pool.map(run, steps))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
