# SPDX-License-Identifier: BSD-3-Clause
"""What gets built and installed, tested without a GPU: plan, search for nvcc, archives and wheels."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import extension
import host_kernels
import pytest
import toolchain
from build_plan import CudaBuild, PureBuild, TorchBuild, plan_build
from toolchain import BuildError, CompileStep, KernelSource, Nvcc

ROOT = Path(__file__).resolve().parents[2]
NVCC13 = Nvcc(Path("/cuda-13.0/bin/nvcc"), (13, 0))
NVCC13.__dict__["archs"] = frozenset({"75", "80", "86", "89", "90", "100", "103", "120"})


def torch_build(
    cuda: str | None = "13.0", gpus: tuple[tuple[int, int], ...] = (), hip: str | None = None
) -> TorchBuild:
    return TorchBuild("2.11.0", cuda, hip, True, Path("/torch"), gpus)


def plan(
    env: dict[str, str], torch: TorchBuild | None, nvcc: Nvcc | None = NVCC13, platform: str = "linux"
) -> CudaBuild | PureBuild:
    return plan_build(env, lambda: torch, lambda cuda: nvcc, platform)


# --- the plan ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("env", "gpus", "archs"),
    [
        ({}, ((9, 0),), ("90",)),
        ({}, ((8, 0), (8, 6), (9, 0)), ("80", "86", "90")),
        ({}, ((7, 5), (8, 9)), ("89",)),
        ({}, ((13, 0),), ()),
        ({}, (), ("80", "90")),
        ({"DUALKV_ARCHS": "8.0, 9.0"}, ((12, 0),), ("80", "90")),
        ({"DUALKV_ARCHS": "80"}, ((7, 5),), ("80",)),
    ],
)
def test_archs_are_those_of_the_gpus_or_the_requested_ones(env, gpus, archs):
    result = plan(env, torch_build(gpus=gpus))
    assert isinstance(result, CudaBuild)
    assert result.archs == archs
    assert result.head_dims == toolchain.HEAD_DIMS


@pytest.mark.parametrize(
    ("env", "torch", "nvcc", "platform", "reason"),
    [
        ({}, torch_build(cuda=None), NVCC13, "linux", "built without CUDA.*install a CUDA build of torch"),
        ({}, torch_build(), None, "linux", r'no nvcc found.*no GPU.*"cuda-toolkit\[nvcc,nvvm,crt,cccl\]==13\.0\.\*"'),
        ({}, torch_build(cuda="12.8"), None, "linux", "CUDA 12.8 toolkit.*pip has no nvcc for CUDA 12.8"),
        ({}, torch_build(gpus=((7, 5),)), NVCC13, "linux", "compute capability 7.5; the kernels need 8.0"),
        ({}, torch_build(), NVCC13, "win32", "Linux only"),
        ({"DUALKV_PURE_PYTHON": "1"}, torch_build(gpus=((9, 0),)), NVCC13, "linux", "Unset it"),
    ],
)
def test_a_pure_python_installation_says_why_and_how_to_change_it(env, torch, nvcc, platform, reason):
    result = plan(env, torch, nvcc, platform)
    assert isinstance(result, PureBuild)
    assert re.search(reason, result.notice)


@pytest.mark.parametrize(
    ("env", "torch", "nvcc", "message"),
    [
        ({}, None, NVCC13, "torch cannot be imported.*pip install --no-build-isolation"),
        ({}, torch_build(cuda=None, hip="6.4"), NVCC13, "ROCm.*DUALKV_PURE_PYTHON=1"),
        ({}, torch_build(gpus=((9, 0),)), None, "GPU of compute capability 9.0 is visible, but no nvcc.*cuda-toolkit"),
        ({"DUALKV_ARCHS": "90"}, torch_build(), None, "DUALKV_ARCHS=90 asks for CUDA kernels, but no nvcc"),
        ({"DUALKV_ARCHS": "88"}, torch_build(), NVCC13, "cannot build for 88; it knows 80, 86, 89, 90, 100, 103, 120"),
        ({"DUALKV_ARCHS": "90a"}, torch_build(), NVCC13, "expected compute capabilities .* got '90a'"),
        ({"DUALKV_ARCHS": "80;75"}, torch_build(), NVCC13, "need 80 .* got 75"),
        ({"DUALKV_HEAD_DIMS": "64,80"}, torch_build(), NVCC13, "some of 64, 96, 128, 192, 256, 512, got '64,80'"),
        ({"DUALKV_ARCHS": "90", "DUALKV_PURE_PYTHON": "1"}, torch_build(), NVCC13, "unset one of them"),
    ],
)
def test_what_cannot_be_built_is_an_error_that_names_the_fix(env, torch, nvcc, message):
    with pytest.raises(BuildError, match=message):
        plan(env, torch, nvcc)


def test_numbers_in_settings():
    for text in ("9", "sm_90", "90+PTX", "80;;x", "native", "-80", "8.0.0"):
        with pytest.raises(BuildError, match="DUALKV_ARCHS: expected"):
            toolchain.parse_archs(text)
    assert toolchain.parse_head_dims("") == [64, 96, 128, 192, 256, 512]
    assert toolchain.parse_head_dims("128;64, 64") == [64, 128]
    assert toolchain.parallel_jobs({"MAX_JOBS": "7"}) == 7
    assert toolchain.parallel_jobs({}) >= 1
    with pytest.raises(BuildError, match="MAX_JOBS"):
        toolchain.parallel_jobs({"MAX_JOBS": "0"})


# --- the search for nvcc ----------------------------------------------------------------------------------------------


def fake_nvcc(path: Path, release: str) -> Path:
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    path.chmod(0o755)
    return path


def test_the_search_for_nvcc(tmp_path):
    """In the documented order, with the major version of torch's CUDA; without a match an error lists what there is."""
    places = {"home/bin": "12.4", "path": "12.6", "local/cuda-12.8/bin": "12.8", "site/nvidia/cu13/bin": "13.0"}
    paths = [fake_nvcc(tmp_path / place / "nvcc", release) for place, release in places.items()]
    env = {"CUDA_HOME": str(tmp_path / "home"), "PATH": f"/nowhere{os.pathsep}{tmp_path / 'path'}"}
    candidates = toolchain.nvcc_candidates(env, tmp_path / "local", [tmp_path / "site"])
    assert candidates == paths
    assert toolchain.find_nvcc("12.9", candidates) == Nvcc(paths[0], (12, 4))
    assert toolchain.find_nvcc("13.0", candidates) == Nvcc(paths[-1], (13, 0))
    assert toolchain.find_nvcc(None, candidates) == Nvcc(paths[0], (12, 4))
    with pytest.raises(BuildError, match=r"torch is built for CUDA 11\.8.*nvcc \(CUDA 12\.4\).*CUDA 13\.0.*CUDA_HOME"):
        toolchain.find_nvcc("11.8", candidates)
    paths[0].write_text("#!/bin/sh\nexit 1\n")
    assert toolchain.find_nvcc("13.0", []) is toolchain.find_nvcc("13.0", paths[:1]) is None


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


def test_the_host_forgets_sources_that_are_gone(tmp_path, monkeypatch):
    monkeypatch.setattr(host_kernels, "FOLDER", tmp_path)
    copies = host_kernels.copy_sources()
    names = {path.name for path in copies.rglob("*.*")}
    source_tree(tmp_path, ["instances/sm90_forward_d63.cu", "core/old.h"])
    host_kernels.copy_sources()
    assert {path.name for path in copies.rglob("*.*")} == names > {"api.cpp", "nodes.h", "sm90_forward_d64.cu"}


def test_an_instance_with_an_unknown_name_is_not_skipped(tmp_path):
    with pytest.raises(BuildError, match="expected a name such as"):
        toolchain.kernel_sources(source_tree(tmp_path, ["instances/sm70_forward_d64.cu"]))


def test_each_family_of_sources_gets_its_own_targets():
    portable, hopper = (KernelSource(Path("x.cu"), family, 64) for family in ("sm80", "sm90"))
    arch80, arch90 = (["-gencode", f"arch=compute_{arch},code=sm_{arch}"] for arch in (80, 90))
    ptx80, ptx90 = (["-gencode", f"arch=compute_{arch},code=compute_{arch}"] for arch in (80, 90))
    assert portable.gencode(["90"]) == [*arch90, *ptx90]
    assert portable.gencode(["80", "90"]) == [*arch80, *arch90, *ptx90]
    assert portable.gencode([]) == ptx80
    assert hopper.gencode(["80", "90"]) == ["-gencode", "arch=compute_90a,code=sm_90a"]
    assert hopper.gencode(["80"]) == []


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_a_source_is_compiled_again_only_when_something_changed(tmp_path):
    (tmp_path / "a.h").write_text("int f();\n")
    (tmp_path / "a.cpp").write_text('#include "a.h"\nint f() { return 1; }\n')

    def compile_with(*options: str, version: str = "1") -> bool:
        command = ("g++", "-c", *options, str(tmp_path / "a.cpp"))
        return CompileStep(command, tmp_path / "out/a.o", tmp_path, version).run()

    assert compile_with()
    assert not compile_with()
    assert compile_with("-O1")
    (tmp_path / "a.h").write_text("int f();\nint g();\n")
    assert compile_with("-O1")
    assert compile_with("-O1", version="2")
    assert not compile_with("-O1", version="2")
    (tmp_path / "a.h").write_text("int f()\n")
    for _ in range(2):
        with pytest.raises(BuildError, match="error"):
            compile_with("-O1", version="2")


# --- archives and installation ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """A copy of the sources, because building leaves its traces beside them."""
    copy = tmp_path_factory.mktemp("checkout") / "source"
    ignored = shutil.ignore_patterns(
        ".git", "build", "*.egg-info", "__pycache__", ".*cache", ".hypothesis", ".venv*", "*.so"
    )
    shutil.copytree(ROOT, copy, ignore=ignored)
    return copy


def run_python(folder: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """In a session of its own: no terminal, so nothing is written past the captured output."""
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        start_new_session=True,
    )


def test_the_sdist_contains_everything(checkout, tmp_path):
    backend = f"import setuptools.build_meta as backend; backend.build_sdist({str(tmp_path)!r})"
    result = run_python(checkout, "-c", backend, DUALKV_ARCHS="", DUALKV_HEAD_DIMS="")
    assert result.returncode == 0, result.stderr
    (archive,) = tmp_path.glob("flash_attn_dualkv-*.tar.gz")
    with tarfile.open(archive) as tar:
        packed = {name.partition("/")[2] for name in tar.getnames()}
    folders = ("csrc", "tests", "benchmarks", "tools", "docs", "flash_attn_dualkv")
    files = [path for folder in folders for path in (checkout / folder).rglob("*") if path.is_file()]
    expected = {str(path.relative_to(checkout)) for path in files if path.suffix != ".pyc"}
    expected |= {"LICENSE", "README.md", "setup.py", "pyproject.toml", "MANIFEST.in", ".ci/run"}
    assert expected <= packed, sorted(expected - packed)


@pytest.fixture(scope="module")
def installed(checkout, tmp_path_factory):
    """The folder that `pip install` fills; without kernels even where they could be built: they take minutes."""
    import torch

    target = tmp_path_factory.mktemp("installed")
    options = ["install", "--no-build-isolation", "--no-deps", "--no-index", "-v", "--target", str(target)]
    knobs = {"DUALKV_ARCHS": "", "DUALKV_PURE_PYTHON": "1" if torch.version.cuda or torch.version.hip else ""}
    result = run_python(checkout, "-m", "pip", *options, ".", **knobs)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "WITHOUT CUDA KERNELS" in result.stdout + result.stderr
    return target


def test_an_installation_contains_the_package_and_nothing_else(checkout, installed):
    package = checkout / "flash_attn_dualkv"
    sources = {path.relative_to(checkout) for path in package.rglob("*.py")} | {Path("flash_attn_dualkv/py.typed")}
    files = {path.relative_to(installed) for path in installed.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    metadata = {path for path in files if ".dist-info" in path.parts[0]}
    assert files - metadata == sources
    assert any(path.name == "LICENSE" for path in metadata)
    (wheel,) = (installed / path for path in metadata if path.name == "WHEEL")
    assert "Tag: py3-none-any" in wheel.read_text()


def test_the_version_is_the_same_everywhere(installed):
    code = (
        "import flash_attn_dualkv, importlib.metadata as metadata\n"
        "print(flash_attn_dualkv.__version__, metadata.version('flash-attn-dualkv'), flash_attn_dualkv.__file__)"
    )
    result = run_python(installed, "-c", code)
    assert result.returncode == 0, result.stderr
    version, recorded, file = result.stdout.split()
    declared = re.search(r'__version__ = "(.+)"', (ROOT / "flash_attn_dualkv/_version.py").read_text())
    assert declared is not None
    assert version == recorded == declared.group(1)
    assert Path(file).is_relative_to(installed)


@pytest.fixture
def cuda_torch(tmp_path):
    """Settings under which the build takes the installed torch for one with CUDA, also where it is not.

    What torch for the CPU lacks are a generated header and two libraries, of which the module needs the names and, to
    be loaded, one variable: functions are looked up when they are called.
    """
    import torch

    nvcc = toolchain.find_nvcc(torch.version.cuda)
    if nvcc is None or not shutil.which("g++"):
        pytest.skip("needs nvcc and g++")
    if torch.version.cuda:
        return {}
    (tmp_path / "include/c10/cuda/impl").mkdir(parents=True)
    (tmp_path / "include/c10/cuda/impl/cuda_cmake_macros.h").touch()
    (tmp_path / "variable.c").write_text("void* _ZN3c104cuda20CUDACachingAllocator9allocatorE;\n")
    (tmp_path / "sitecustomize.py").write_text(f'import torch\n\ntorch.version.cuda = "{nvcc.release}"\n')
    for name in ("c10_cuda", "torch_cuda"):
        command = ["g++", "-shared", "-o", tmp_path / f"lib{name}.so", "-x", "c", tmp_path / "variable.c"]
        subprocess.run(command, check=True)
    return {
        "CPATH": str(tmp_path / "include"),
        "LIBRARY_PATH": str(tmp_path),
        "LD_LIBRARY_PATH": f"{tmp_path}{os.pathsep}{nvcc.runtime_library().parent}",
        "PYTHONPATH": str(tmp_path),
    }


@pytest.mark.slow
def test_one_wheel_serves_a_cluster(checkout, cuda_torch, tmp_path):
    """Built once for two architectures; installed in seconds where there is neither nvcc nor any other compiler."""
    options = ["--no-build-isolation", "--no-deps", "--no-index", "-w", str(tmp_path)]
    archs = {"DUALKV_ARCHS": "80;90", "DUALKV_HEAD_DIMS": "64"}
    result = run_python(checkout, "-m", "pip", "wheel", *options, ".", **archs, **cuda_torch)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert "linux" in wheel.name

    target, started = tmp_path / "installed", time.monotonic()
    options = ["--no-deps", "--no-index", "--target", str(target)]
    result = run_python(tmp_path, "-m", "pip", "install", *options, str(wheel), PATH="/nowhere", CUDA_HOME="")
    assert result.returncode == 0, result.stdout + result.stderr
    assert time.monotonic() - started < 30
    code = (
        "import os, sys; sys.setdlopenflags(os.RTLD_LAZY)\n"
        "import flash_attn_dualkv; info = flash_attn_dualkv.build_info()\n"
        "print(info['compiled_error'], info['archs'], info['head_dims'])"
    )
    result = run_python(target, "-c", code, **(cuda_torch | {"PYTHONPATH": "", "PATH": "/nowhere"}))
    assert result.stdout.split("\n")[0] == "None ['80', '90'] {'sm80': [64], 'sm90': [64]}", result.stderr


def test_an_error_is_a_sentence_and_no_traceback(checkout):
    result = run_python(checkout, "setup.py", "build_ext", DUALKV_ARCHS="ninety")
    assert result.returncode != 0
    assert "flash_attn_dualkv cannot be installed: DUALKV_ARCHS: expected" in result.stderr
    assert "Traceback" not in result.stderr


def test_flags_that_nvcc_takes_from_the_environment_compile_a_kernel_again(tmp_path, monkeypatch):
    """As tests/helpers/jitter.py builds with them."""
    root = source_tree(tmp_path, ["instances/sm90_forward_d64.cu"])
    compiler = fake_nvcc(tmp_path / "cuda/bin/nvcc", "13.0")
    compiler.write_text('#!/bin/sh\nfor last; do :; done\ntouch "$last" "${last%.o}.d"\n')
    monkeypatch.setattr(Nvcc, "home", tmp_path / "cuda")
    for flags in ("", "-DDUALKV_JITTER", ""):
        monkeypatch.setenv("NVCC_APPEND_FLAGS", flags)
        ((_, step),) = extension.kernel_steps(root, Nvcc(compiler, (13, 0)), ("90",))
        assert step.run()
        assert not step.run()


def test_what_a_script_wrote_is_what_it_would_write_now():
    result = run_python(ROOT, "tools/generate_wgmma.py")
    assert (ROOT / "csrc/ptx/wgmma.h").read_text() == result.stdout
