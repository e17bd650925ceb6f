# SPDX-License-Identifier: BSD-3-Clause
"""Builds the kernel library and its Python modules. All metadata is in pyproject.toml.

    pip install .

Settings, all environment variables:

DUALKV_ARCHS        compute capabilities to build for, such as "80;90", whatever GPU or torch is here; default: those
                    of the visible GPUs. PTX for the oldest of them (8.0 where there is none) is included and serves
                    newer GPUs.
DUALKV_HEAD_DIMS    head dims to build, such as "64,128"; default: 64,96,128,192,256,512,576.
                    512 is for Hopper alone, 576 (MLA's latents) for decoding.
DUALKV_PYTHONS      Pythons that the wheel serves, such as "python3.10 python3.11"; default: the running one.
DUALKV_PURE_PYTHON  1: install only the CPU implementation, whatever is found.
MAX_JOBS            compilations at a time; default: what cores and free memory allow.
CUDA_HOME, CXX      the CUDA toolkit and the C++ compiler to use.

What is built where, without DUALKV_ARCHS:

Windows, macOS                                 CPU implementation only, with a notice
torch for the CPU, ROCm or MPS is installed    CPU implementation only, with a notice
no GPU is visible, or only GPUs before 8.0     CPU implementation only, with a notice, even where nvcc is
a GPU and no nvcc, or none for its driver      error
a GPU and nvcc                                 kernels for this GPU

DUALKV_ARCHS given and no way to build         error
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from pathlib import Path

import setuptools

ROOT = Path(__file__).resolve().parent
WITHOUT_KERNELS = "without_kernels.txt"  # read by flash_attn_dualkv/kernels.py
sys.path.insert(0, str(ROOT / "tools"))

from build_plan import CudaBuild, PureBuild, plan_build  # noqa: E402
from extension import MODULE, PACKAGE, build, file_names  # noqa: E402
from pythons import wheel_tags  # noqa: E402
from toolchain import BuildError  # noqa: E402

MIN_SETUPTOOLS = 77
if int(setuptools.__version__.split(".")[0]) < MIN_SETUPTOOLS:
    raise SystemExit(
        f"flash_attn_dualkv: setuptools {setuptools.__version__} is too old to read pyproject.toml: "
        f'pip install "setuptools>={MIN_SETUPTOOLS}"'
    )

from setuptools.command.bdist_wheel import bdist_wheel  # noqa: E402
from setuptools.command.build_ext import build_ext  # noqa: E402
from setuptools.command.build_py import build_py  # noqa: E402


def fail(error: BuildError) -> SystemExit:
    """An exit without a traceback: pip shows the message as it is."""
    return SystemExit(f"\nflash_attn_dualkv cannot be installed: {error}\n")


@functools.cache
def current_plan() -> CudaBuild | PureBuild:
    try:
        return plan_build(os.environ)
    except BuildError as error:
        raise fail(error) from None


def announce(text: str) -> None:
    """Says it on stderr and, because pip hides a build's output, on the terminal."""
    line = "*" * 100
    banner = f"\n{line}\nflash_attn_dualkv: {text}\n{line}\n"
    print(banner, file=sys.stderr, flush=True)
    if not sys.stderr.isatty():
        with contextlib.suppress(OSError), open("/dev/tty", "w") as terminal:
            terminal.write(banner)


class BuildPy(build_py):
    """Every kind of installation copies the Python files: the place to say once what is built.

    An installation without kernels keeps the reason, for the import and the errors on a machine with a GPU. It may get
    there without its build: pip caches the wheels that it makes of an sdist or a commit, and a home directory may serve
    machines with and without GPUs. Nothing of a build is in pip's key, and no name could hold such a wheel back: a tag
    tells platforms apart, not machines, one that no machine has would make the wheel useless wherever it was meant to
    go, and a version of its own (0.3.0+cpu) is refused as not the sdist's. So the wheel says what it is.
    """

    def run(self) -> None:
        plan = current_plan()
        if isinstance(plan, PureBuild):
            announce(f"installing the CPU implementation only, WITHOUT CUDA KERNELS: {plan.notice}")
        elif plan.target.notice:
            announce(plan.target.notice)
        super().run()
        folder = (ROOT if self.editable_mode else Path(self.build_lib)) / PACKAGE
        if isinstance(plan, PureBuild):
            (folder / WITHOUT_KERNELS).write_text(f"{plan.reason}\n")
        else:
            (folder / WITHOUT_KERNELS).unlink(missing_ok=True)


class BuildExt(build_ext):
    """Fills the package's folder: of the sources for an editable installation, else of the wheel in the making."""

    def run(self) -> None:
        plan = current_plan()
        if isinstance(plan, PureBuild):
            return
        folder = self.folder()
        if not self.inplace:
            for stale in folder.glob("*.so"):  # of a build for other Pythons
                stale.unlink()
        try:
            build(ROOT, plan, folder)
        except BuildError as error:
            raise fail(error) from None

    def folder(self) -> Path:
        return (ROOT if self.inplace else Path(self.build_lib)) / PACKAGE

    def get_outputs(self) -> list[str]:
        plan = current_plan()
        return [] if isinstance(plan, PureBuild) else [str(self.folder() / name) for name in file_names(plan)]

    def get_output_mapping(self) -> dict[str, str]:
        return {}


class BdistWheel(bdist_wheel):
    """Plans before the wheel's tag is chosen: a wheel without kernels is pure Python."""

    def finalize_options(self) -> None:
        if isinstance(current_plan(), PureBuild):
            self.distribution.ext_modules = []
        super().finalize_options()

    def get_tag(self) -> tuple[str, str, str]:
        plan = current_plan()
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if isinstance(plan, PureBuild) else (*wheel_tags(plan.pythons), platform)


if __name__ == "__main__":
    setuptools.setup(
        ext_modules=[setuptools.Extension(f"{PACKAGE}.{MODULE}", sources=[])],
        cmdclass={"build_py": BuildPy, "build_ext": BuildExt, "bdist_wheel": BdistWheel},
    )
