# SPDX-License-Identifier: BSD-3-Clause
"""What gets built, tested without a GPU: the plan, the search for GPUs and compilers, and incremental compiles."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import build_plan
import pytest
import pythons
import toolchain
from build_plan import CudaBuild, Machine, PureBuild, TorchBuild, plan_build
from gpus import Gpus, find_gpus
from pythons import Python
from toolchain import BuildError, CompileStep, KernelSource, Nvcc

ROOT = Path(__file__).resolve().parents[2]
NVCC13 = Nvcc(Path("/cuda-13.0/bin/nvcc"), (13, 0))
NVCC13.__dict__["archs"] = frozenset({"75", "80", "86", "89", "90", "100", "103", "120"})
CUDA_TORCH = TorchBuild("2.11.0+cu130", "13.0", None)
CPU_TORCH = TorchBuild("2.13.0+cpu", None, None)
ROCM_TORCH = TorchBuild("2.11.0+rocm6.4", None, "6.4")
ARCHS = {"DUALKV_ARCHS": "80;90"}


def plan(
    env: dict[str, str] | None = None,
    torch: TorchBuild | None = CUDA_TORCH,
    gpus: tuple[tuple[int, int], ...] = (),
    driver: tuple[int, int] = (13, 0),
    nvcc: Nvcc | None = NVCC13,
    platform: str = "linux",
) -> CudaBuild | PureBuild:
    machine = Machine(lambda: torch, lambda: Gpus(gpus, driver if gpus else None), lambda driver: nvcc, platform)
    return plan_build(env or {}, machine)


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "machine", "archs"),
    [
        ({}, dict(gpus=((9, 0),)), ("90",)),
        ({}, dict(gpus=((9, 0),), torch=None), ("90",)),
        ({}, dict(gpus=((8, 0), (8, 6), (9, 0))), ("80", "86", "90")),
        ({}, dict(gpus=((7, 5), (8, 9))), ("89",)),
        ({}, dict(gpus=((13, 0),)), ()),
        ({"DUALKV_ARCHS": "90"}, dict(), ("90",)),
        ({"DUALKV_ARCHS": "90"}, dict(torch=None), ("90",)),
        ({"DUALKV_ARCHS": "8.0, 9.0"}, dict(gpus=((12, 0),)), ("80", "90")),
        ({"DUALKV_ARCHS": "80"}, dict(gpus=((7, 5),)), ("80",)),
        (ARCHS, dict(torch=CPU_TORCH), ("80", "90")),
        (ARCHS, dict(torch=ROCM_TORCH), ("80", "90")),
    ],
)
def test_archs_are_those_of_the_gpus_or_the_requested_ones(env, machine, archs):
    result = plan(env, **machine)
    assert isinstance(result, CudaBuild)
    assert result.target.archs == archs
    assert result.head_dims == toolchain.HEAD_DIMS
    assert [python.suffix for python in result.pythons] == [sysconfig.get_config_var("EXT_SUFFIX")]
    assert bool(result.target.notice) == (machine.get("gpus") == ((13, 0),))


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (dict(torch=CPU_TORCH), "^torch 2.13.0.cpu, built without CUDA, was .*install a CUDA build of torch"),
        (dict(torch=CPU_TORCH, gpus=((9, 0),)), "^torch 2.13.0.cpu, built without CUDA, was there"),
        (dict(torch=ROCM_TORCH), "built for ROCm, .*install a CUDA build of torch"),
        (dict(), f"^no GPU was visible. For .*: DUALKV_ARCHS=90 {build_plan.REINSTALL}$"),
        (dict(torch=None, nvcc=None), f"^no GPU was visible. For .*: DUALKV_ARCHS=90 {build_plan.REINSTALL}$"),
        (dict(gpus=((7, 5),)), "^only a GPU of compute capability 7.5 was visible. The kernels need 8.0 .*=90 pip"),
        (dict(platform="win32"), "Linux only, and the platform was win32. For the kernels use .*WSL 2"),
        (dict(platform="darwin"), "Linux only, and the platform was darwin. For the kernels use a Linux machine"),
        (dict(env={"DUALKV_PURE_PYTHON": "1"}, gpus=((9, 0),)), "^DUALKV_PURE_PYTHON was set. Unset it"),
    ],
)
def test_a_pure_python_installation_says_why_and_how_to_change_it(machine, reason):
    result = plan(**machine)
    assert isinstance(result, PureBuild)
    assert re.search(reason, result.notice)


@pytest.mark.parametrize(
    ("env", "machine", "message"),
    [
        ({}, dict(gpus=((9, 0),), nvcc=None), "GPU of compute capability 9.0 is visible, but no nvcc.*pip install"),
        ({}, dict(gpus=((9, 0),), nvcc=None, driver=(12, 4)), "Install a CUDA 12 toolkit, 12.5 or newer.*pip has none"),
        ({}, dict(gpus=((8, 0),), nvcc=None, driver=(11, 8)), "Update NVIDIA's driver to one for CUDA 12 or newer"),
        ({"DUALKV_ARCHS": "90"}, dict(nvcc=None), "DUALKV_ARCHS=90 asks for CUDA kernels, but no nvcc"),
        ({"DUALKV_ARCHS": "90"}, dict(platform="win32"), "DUALKV_ARCHS=90 asks for CUDA kernels, but .* Linux only"),
        ({"DUALKV_ARCHS": "88"}, dict(), "cannot build for 88; it knows 80, 86, 89, 90, 100, 103, 120"),
        ({"DUALKV_ARCHS": "90a"}, dict(), "expected compute capabilities .* got '90a'"),
        ({"DUALKV_ARCHS": "80;75"}, dict(), "need 80 .* got 75"),
        ({"DUALKV_HEAD_DIMS": "64,80"}, dict(), "some of 64, 96, 128, 192, 256, 512, 576, got '64,80'"),
        ({"DUALKV_ARCHS": "90", "DUALKV_PURE_PYTHON": "1"}, dict(), "unset one of them"),
        (ARCHS | {"DUALKV_PYTHONS": "python9.9"}, dict(), "DUALKV_PYTHONS: expected .* there is no 'python9.9'"),
    ],
)
def test_what_cannot_be_built_is_an_error_that_names_the_fix(env, machine, message):
    with pytest.raises(BuildError, match=message):
        plan(env, **machine)


def test_without_a_gpu_no_compiler_is_asked():
    """It would take minutes to build for GPUs that nobody has named."""

    def only_old(driver: tuple[int, int] | None) -> Nvcc | None:
        raise BuildError("the kernels need nvcc of CUDA 12.5 or newer")

    machine = Machine(lambda: CUDA_TORCH, lambda: Gpus(problem="cuInit fails"), only_old, "linux")
    result = plan_build({}, machine)
    assert isinstance(result, PureBuild)
    assert result.reason == "no GPU was visible (cuInit fails)"
    with pytest.raises(BuildError, match="12.5 or newer"):
        plan_build(ARCHS, machine)


def test_requested_kernels_do_not_depend_on_this_machine():
    """A wheel is built where no GPU is, and where no torch is."""

    def never() -> None:
        raise AssertionError

    assert isinstance(plan_build(ARCHS, Machine(never, never, lambda driver: NVCC13, "linux")), CudaBuild)


def test_numbers_in_settings():
    for text in ("9", "sm_90", "90+PTX", "80;;x", "native", "-80", "8.0.0"):
        with pytest.raises(BuildError, match="DUALKV_ARCHS: expected"):
            toolchain.parse_archs(text)
    assert toolchain.parse_head_dims("") == [64, 96, 128, 192, 256, 512, 576]
    assert toolchain.parse_head_dims("128;64, 64") == [64, 128]
    assert toolchain.parallel_jobs({"MAX_JOBS": "7"}) == 7
    assert toolchain.parallel_jobs({}) >= 1
    with pytest.raises(BuildError, match="MAX_JOBS"):
        toolchain.parallel_jobs({"MAX_JOBS": "0"})


# --- torch, GPUs, Pythons and nvcc ------------------------------------------------------------------------------------


def test_torch_is_found_without_importing_it(tmp_path, monkeypatch):
    import torch

    expected = TorchBuild(torch.__version__, torch.version.cuda, torch.version.hip)
    assert build_plan.find_torch() == expected
    if (Path(sysconfig.get_paths()["purelib"]) / "torch").is_dir():
        monkeypatch.setattr(sys, "path", ["/of/a/build/with/isolation"])
        assert build_plan.find_torch() == expected
    (tmp_path / "torch").mkdir()
    text = "from typing import Optional\n__version__ = '2.11.0+cu130'\ncuda: Optional[str] = '13.0'\nhip = None\n"
    (tmp_path / "torch/version.py").write_text(text)
    assert build_plan.find_torch([tmp_path / "nothing", tmp_path]) == CUDA_TORCH
    assert build_plan.find_torch([tmp_path / "nothing"]) is None


class FakeDriver:
    """libcuda.so.1 with these GPUs; a function named in `failing` returns an error's code."""

    def __init__(self, *gpus: tuple[int, int], **failing: int) -> None:
        self.gpus, self.failing = gpus, failing

    def __getattr__(self, name: str):
        values = {
            "cuInit": lambda flags: None,
            "cuDriverGetVersion": lambda: 12080,
            "cuDeviceGetCount": lambda: len(self.gpus),
            "cuDeviceGet": lambda index: 100 + index,
            "cuDeviceGetAttribute": lambda attribute, device: self.gpus[device - 100][{75: 0, 76: 1}[attribute]],
        }
        if name not in values:
            raise AttributeError(f"undefined symbol: {name}")

        def function(*arguments):
            pointers = [argument for argument in arguments if not isinstance(argument, int)]
            for pointer in pointers:
                pointer._obj.value = values[name](*arguments[1:])
            return self.failing.get(name, 0)

        return function


def test_gpus_are_found_without_torch():
    def missing(name: str):
        raise OSError(f"{name}: cannot open shared object file")

    assert find_gpus(missing) == Gpus()
    assert find_gpus(lambda name: FakeDriver((9, 0), (8, 6), (9, 0))) == Gpus(((8, 6), (9, 0)), (12, 8))
    assert find_gpus(lambda name: FakeDriver()) == Gpus((), (12, 8))
    assert find_gpus(lambda name: FakeDriver(cuInit=100)) == Gpus()
    failed = find_gpus(lambda name: FakeDriver((9, 0), cuInit=803))
    assert failed == Gpus(problem="NVIDIA's driver (libcuda.so.1) is here, but cuInit fails with code 803")
    failed = find_gpus(lambda name: FakeDriver((9, 0), cuDeviceGetAttribute=1))
    assert "cuDeviceGetAttribute fails with code 1" in failed.problem
    assert "cuInit" in find_gpus(lambda name: object()).problem
    assert isinstance(find_gpus(), Gpus)


def fake_python(path: Path, answer: str) -> str:
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\n")
    path.chmod(0o755)
    return str(path)


def test_pythons_that_a_wheel_serves(tmp_path):
    (running,) = pythons.find_pythons("")
    assert (running.include / "Python.h").is_file()
    assert running.suffix == sysconfig.get_config_var("EXT_SUFFIX")
    assert pythons.find_pythons(f"{sys.executable}  {sys.executable}") == (running,)

    include = str(running.include)
    other = Python("cp314", "cp314t", Path(include), ".cpython-314t.so")
    newer = fake_python(tmp_path / "newer", f'["cpython", [3, 14], "t", "{include}", "{other.suffix}"]')
    found = pythons.find_pythons(f"{sys.executable} {newer}")
    assert found == (running, other)
    assert pythons.wheel_tags(found) == ("py3", "none")
    assert pythons.wheel_tags((other,)) == ("cp314", "cp314t")

    answers = {
        f'["cpython", [3, 9], "", "{include}", ".so"]': "expected CPython 3.10 or newer; .* is cpython 3.9",
        f'["pypy", [3, 11], "", "{include}", ".so"]': "expected CPython .* is pypy 3.11",
        '["cpython", [3, 12], "", "/nowhere", ".so"]': "no Python.h in /nowhere.*python3-dev",
        "Python 2.7": "does not say what it is",
    }
    for number, (answer, message) in enumerate(answers.items()):
        with pytest.raises(BuildError, match=message):
            pythons.find_pythons(fake_python(tmp_path / str(number), answer))


def fake_nvcc(path: Path, release: str) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    path.chmod(0o755)
    return path


def test_the_search_for_nvcc(tmp_path):
    """In the documented order, of those that the driver can serve; without one an error lists what there is."""
    places = {"home/bin": "12.4", "path": "12.6", "local/cuda-13.1/bin": "13.1", "site/nvidia/cu13/bin": "13.0"}
    paths = [fake_nvcc(tmp_path / place / "nvcc", release) for place, release in places.items()]
    env = {"CUDA_HOME": str(tmp_path / "home"), "PATH": f"/nowhere{os.pathsep}{tmp_path / 'path'}"}
    candidates = toolchain.nvcc_candidates(env, tmp_path / "local", [tmp_path / "site"])
    assert candidates == paths
    for driver in (None, (12, 2), (13, 0)):
        assert toolchain.find_nvcc(driver, candidates) == Nvcc(paths[1], (12, 6))
    assert toolchain.find_nvcc((13, 0), candidates[2:]) == Nvcc(paths[2], (13, 1))
    with pytest.raises(BuildError, match=r"and one .* driver here runs: it is for CUDA 12\.8; found .*13\.1.*13\.0"):
        toolchain.find_nvcc((12, 8), candidates[2:])
    with pytest.raises(BuildError, match=r"need nvcc of CUDA 12\.5 or newer; found .*nvcc \(CUDA 12\.4\).*pip install"):
        toolchain.find_nvcc(None, candidates[:1])
    paths[0].write_text("#!/bin/sh\nexit 1\n")
    assert toolchain.find_nvcc(None, []) is toolchain.find_nvcc(None, paths[:1]) is None


# --- sources, options and incremental compiles ------------------------------------------------------------------------


def source_tree(root: Path, names: list[str]) -> Path:
    for name in names:
        path = root / "csrc" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    return root


def test_head_dims_select_the_instances(tmp_path):
    names = ["kernels/node_tables.cu", "instances/sm80_forward_d64.cu", "instances/sm80_backward_d128.cu"]
    source_tree(tmp_path, names)
    slowest_first = [Path(name).name for name in reversed(names)]
    assert [source.path.name for source in toolchain.kernel_sources(tmp_path)] == slowest_first
    assert [source.path.name for source in toolchain.kernel_sources(tmp_path, [64])] == slowest_first[1:]


def test_an_instance_with_an_unknown_name_is_not_skipped(tmp_path):
    with pytest.raises(BuildError, match="expected a name such as"):
        toolchain.kernel_sources(source_tree(tmp_path, ["instances/sm70_forward_d64.cu"]))


def test_each_family_of_sources_gets_its_own_targets():
    portable, hopper = (KernelSource(Path("x.cu"), family, 64) for family in ("sm80", "sm90"))
    arch80, arch90 = (["-gencode", f"arch=compute_{arch},code=sm_{arch}"] for arch in (80, 90))
    ptx80, ptx90 = (["-gencode", f"arch=compute_{arch},code=compute_{arch}"] for arch in (80, 90))
    assert portable.gencode(["90"]) == [*arch90, *ptx90]
    assert portable.gencode(["80", "90"]) == [*arch80, *arch90, *ptx80]
    assert portable.gencode([]) == ptx80
    assert hopper.gencode(["80", "90"]) == ["-gencode", "arch=compute_90a,code=sm_90a"]
    assert hopper.gencode(["80"]) == []


def test_device_code_is_compressed_where_every_driver_knows_how():
    assert Nvcc(Path("nvcc"), (13, 0)).compression == ("--compress-mode=size",)
    assert Nvcc(Path("nvcc"), (12, 8)).compression == ()


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_a_source_is_compiled_again_only_when_something_changed(tmp_path):
    """Nothing has when a checkout is copied elsewhere with its objects."""
    root = tmp_path / "first"
    root.mkdir()
    (root / "a.h").write_text("int f();\n")
    (root / "a.cpp").write_text('#include "a.h"\nint f() { return 1; }\n')

    def compile_with(*options: str, version: str = "1") -> bool:
        return CompileStep(("g++", "-c", *options, "a.cpp"), root / "out/a.o", root, version).run()

    assert compile_with()
    assert not compile_with()
    root = shutil.copytree(root, tmp_path / "second")
    assert not compile_with()
    assert compile_with("-O1")
    (root / "a.h").write_text("int f();\nint g();\n")
    assert compile_with("-O1")
    assert compile_with("-O1", version="2")
    assert not compile_with("-O1", version="2")
    (root / "a.h").write_text("int f()\n")
    for _ in range(2):
        with pytest.raises(BuildError, match="error"):
            compile_with("-O1", version="2")


def test_what_a_script_wrote_is_what_it_would_write_now():
    written = subprocess.check_output([sys.executable, "tools/generate_wgmma.py"], cwd=ROOT, text=True)
    assert (ROOT / "csrc/ptx/wgmma.h").read_text() == written
