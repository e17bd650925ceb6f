# SPDX-License-Identifier: BSD-3-Clause
"""What gets installed: archives, the installation without kernels, and the wheel with all of them."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import time
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import check_release
import extension
import pytest
import pythons
import toolchain
from build_plan import RELEASED_ARCHS
from toolchain import BuildError

ROOT = Path(__file__).resolve().parents[2]
ARCHS = {"DUALKV_ARCHS": ";".join(RELEASED_ARCHS)}
# What a wheel has beside Python files.
DATA = {Path("flash_attn_dualkv") / name for name in ("py.typed", "integrations/verl/router.yaml")}
# What every Linux has.
SYSTEM_LIBRARIES = {"libc", "libdl", "libgcc_s", "libm", "libpthread", "librt", "libstdc++", "ld-linux"}


def copy_checkout(target: Path) -> Path:
    """The sources, because building leaves its traces beside them."""
    ignored = shutil.ignore_patterns(
        ".git", "build", "*.egg-info", "__pycache__", ".*cache", ".hypothesis", ".venv*", "*.so", "without_*.txt"
    )
    shutil.copytree(ROOT, target, ignore=ignored)
    return target


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    return copy_checkout(tmp_path_factory.mktemp("checkout") / "source")


def test_a_release_has_one_version():
    assert check_release.main(f"v{extension.version_of(ROOT)}") == []
    assert check_release.main(None) == []
    version_py, changelog = '__version__ = "0.3.0"\n', "# Changelog\n\n## 0.3.0\n\n## 0.2.0\n"
    assert check_release.problems(version_py, changelog, "v0.3.0") == []
    for wrong in (
        (version_py, changelog, "v0.2.0"),
        (version_py, changelog, "0.3.0"),
        (version_py, changelog.replace("## 0.3.0", ""), "v0.3.0"),
        (version_py.replace("3", "4"), changelog, None),
    ):
        assert "expected one version" in "".join(check_release.problems(*wrong))
    assert check_release.problems("", changelog, None) == ["flash_attn_dualkv/_version.py: no version found"]


def test_released_wheels_serve_what_the_metadata_names():
    workflow = (ROOT / ".github/workflows/release.yml").read_text()
    served = re.findall(r"/opt/python/cp3(\d+)-cp3\1/bin/python", workflow)
    classifiers = re.findall(r'"Programming Language :: Python :: 3\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    assert served == classifiers
    assert int(classifiers[0]) == pythons.OLDEST[1]
    assert re.findall(r'DUALKV_ARCHS="(.+)"', workflow) == [";".join(RELEASED_ARCHS)]


def run_python(
    folder: Path, *arguments: str, executable: str = sys.executable, **env: str
) -> subprocess.CompletedProcess[str]:
    """In a session of its own: no terminal, so nothing is written past the captured output."""
    return subprocess.run(
        [executable, *arguments],
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
    expected |= {"LICENSE", "README.md", "CONTRIBUTING.md", "CHANGELOG.md", "setup.py", "pyproject.toml", "MANIFEST.in"}
    expected |= {".ci/run", ".github/workflows/ci.yml", ".github/workflows/release.yml"}
    assert expected <= packed, sorted(expected - packed)


@pytest.fixture(scope="module")
def installed(checkout, tmp_path_factory):
    """The folder that `pip install` fills where no GPU is visible."""
    target = tmp_path_factory.mktemp("installed")
    options = ["install", "--no-build-isolation", "--no-deps", "--no-index", "-v", "--target", str(target)]
    knobs = {"DUALKV_ARCHS": "", "DUALKV_PURE_PYTHON": "", "CUDA_VISIBLE_DEVICES": ""}
    result = run_python(checkout, "-m", "pip", *options, ".", **knobs)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "WITHOUT CUDA KERNELS" in result.stdout + result.stderr
    return target


def test_an_installation_contains_the_package_and_nothing_else(checkout, installed):
    package = checkout / "flash_attn_dualkv"
    sources = {path.relative_to(checkout) for path in package.rglob("*.py")} | DATA
    sources.add(Path("flash_attn_dualkv/without_kernels.txt"))
    files = {path.relative_to(installed) for path in installed.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    metadata = {path for path in files if ".dist-info" in path.parts[0]}
    assert files - metadata == sources
    assert any(path.name == "LICENSE" for path in metadata)
    (wheel,) = (installed / path for path in metadata if path.name == "WHEEL")
    assert "Tag: py3-none-any" in wheel.read_text()


def test_an_installation_without_kernels_knows_why(checkout, installed, tmp_path):
    """So does an editable one; build_info and the demo say it. One with kernels forgets it."""
    record = "flash_attn_dualkv/without_kernels.txt"
    reason = (installed / record).read_text()
    assert re.fullmatch("no GPU was visible.*\n|torch .*, built (without CUDA|for ROCm.*), was there\n", reason)
    result = run_python(installed, "-m", "flash_attn_dualkv.demo", CUDA_VISIBLE_DEVICES="")
    assert result.returncode == 0 and "works on the CPU" in result.stdout
    code = "import flash_attn_dualkv; print(flash_attn_dualkv.build_info()['not_built'])"
    assert run_python(installed, "-c", code).stdout == f"{reason.strip()} at install\n"

    editable = "import setuptools.build_meta as backend, sys; backend.build_editable(sys.argv[1])"
    result = run_python(checkout, "-c", editable, str(tmp_path), DUALKV_ARCHS="", DUALKV_PURE_PYTHON="1")
    assert result.returncode == 0, result.stderr
    assert run_python(checkout, "-c", code).stdout == "DUALKV_PURE_PYTHON was set at install\n"
    (checkout / record).unlink()
    assert "none were built in " in run_python(checkout, "-c", code).stdout


def test_verl_loads_the_installed_router(installed):
    """By the path that the command prints, with verl's own loader; Ray makes no actor of it. Its client is wrapped.

    Nothing else of verl's process changes: the plug-in of the trainers is not imported.
    """
    pytest.importorskip("verl", reason="verl is not installed: see docs/trainers.md")
    printed = run_python(installed, "-m", "flash_attn_dualkv.integrations.verl.router").stdout.strip()
    assert Path(printed).is_relative_to(installed)
    code = (
        "import ray, sys, types; from verl.workers.rollout.router import get_router_handle\n"
        "ray.remote = lambda kind: types.SimpleNamespace(remote=kind)\n"
        "router = get_router_handle({'s0': 1}, router_config_path=sys.argv[1])\n"
        "print(sys.modules[type(router).__module__].__file__, *router.acquire_server('a', prompt_ids=[1]))\n"
        "from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient\n"
        "print(hasattr(FullyAsyncLLMServerClient.generate, 'dualkv_stock'))\n"
        "print('flash_attn_dualkv.integrations.verl' in sys.modules)"
    )
    result = run_python(installed, "-c", code, printed)
    expected = [str(Path(printed).parents[1] / "verl_router.py"), "s0", "1", "True", "False"]
    assert result.stdout.split() == expected, result.stderr


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


def test_an_error_is_a_sentence_and_no_traceback(checkout):
    result = run_python(checkout, "setup.py", "build_ext", DUALKV_ARCHS="ninety")
    assert result.returncode != 0
    assert "flash_attn_dualkv cannot be installed: DUALKV_ARCHS: expected" in result.stderr
    assert "Traceback" not in result.stderr


# --- types ----------------------------------------------------------------------------------------------------------

SCRIPT = """\
import torch
from torch import Tensor
from typing_extensions import assert_type

from flash_attn_dualkv import (
    PackedBatch,
    build_info,
    flash_attn_dualkv_varlen_func,
    flash_attn_tree_varlen_func,
    flash_attn_varlen_func,
    group_by_prompt,
    pack_shared_prompts,
    unpack_logprobs,
)
from flash_attn_dualkv.integrations.transformers import register, shared_prompt_forward


def step(model: torch.nn.Module, prompts: list[Tensor], responses: list[list[int]], flag: bool) -> Tensor:
    register(fallback="eager")
    batch = pack_shared_prompts(prompts, responses, group_ids=[1, "two"], boundary="gather")
    assert_type(batch, PackedBatch)
    assert_type(shared_prompt_forward(model, batch), tuple[Tensor, Tensor | None])
    assert_type(shared_prompt_forward(model, batch, with_entropy=flag), tuple[Tensor, Tensor | None])
    logps, entropy = shared_prompt_forward(model, batch, with_entropy=True)
    assert_type(group_by_prompt(prompts), list[list[int]])
    return unpack_logprobs(logps - entropy, batch, width=128)


q = torch.zeros(4, 2, 8)
assert_type(flash_attn_varlen_func(q, q, q, q, q, 4, 4), Tensor)
assert_type(flash_attn_varlen_func(q, q, q, q, q, 4, 4, return_attn_probs=True), tuple[Tensor, Tensor, None])
assert_type(flash_attn_dualkv_varlen_func(q, q, q, q, q, q, q, 4, 4, 4), Tensor)
assert_type(flash_attn_dualkv_varlen_func(q, q, q, q, q, q, q, 4, 4, 4, return_lse=True), tuple[Tensor, Tensor])
assert_type(flash_attn_tree_varlen_func(q, q, q, q, q), Tensor)
assert_type(flash_attn_tree_varlen_func(q, q, q, q, q, return_lse=True, mean_keys=4), tuple[Tensor, Tensor])
assert_type(build_info()["compiled"], bool)
"""
MISTAKES = {
    "pack_shared_prompts([[1]], [[2]], pad_to=8)": "call-arg",
    'pack_shared_prompts([[1]], [[2]], boundary="both")': "arg-type",
    'shared_prompt_forward(torch.nn.Linear(1, 1), step, with_entropy="no")': "call-overload",
    'build_info()["version_of_it"]': "typeddict-item",
}
# transformers is not typed as a whole, and would take mypy half a minute; parts of torch that no
# signature names, as long as all else.
SKIPPED = "transformers numpy sympy " + " ".join(
    f"torch.{name}"
    for name in (
        "_decomp", "_dynamo", "_export", "_functorch", "_higher_order_ops", "_inductor", "_native", "_prims", "_refs",
        "_subclasses", "ao", "distributed", "distributions", "export", "fx", "jit", "masked", "nested", "onnx",
        "package", "quantization", "testing", "utils.data",
    )
)  # fmt: skip
CONFIG = f"""\
[mypy]
strict = True
[mypy-{",".join(f"{name}.*" for name in SKIPPED.split())}]
follow_imports = skip
ignore_missing_imports = True
"""


def test_a_type_checker_sees_what_a_users_script_calls(checkout, tmp_path):
    """mypy --strict against an editable installation; another one has the same files, and py.typed."""
    pytest.importorskip("mypy")
    python = tmp_path / "environment/bin/python"
    assert run_python(tmp_path, "-m", "venv", "--without-pip", "environment").returncode == 0
    (packages,) = tmp_path.glob("environment/lib/python*/site-packages")
    (packages / "torch.pth").write_text(sysconfig.get_path("purelib"))  # not what lies in there editable
    options = ["install", "--no-build-isolation", "--no-deps", "-q", "-e"]
    result = run_python(checkout, "-m", "pip", "--python", str(python), *options, ".", DUALKV_PURE_PYTHON="1")
    assert result.returncode == 0, result.stdout + result.stderr
    (tmp_path / "script.py").write_text(SCRIPT + "\n".join(MISTAKES))
    (tmp_path / "mypy.ini").write_text(CONFIG)
    found = run_python(tmp_path, "-m", "mypy", "--python-executable", str(python), "script.py").stdout.splitlines()
    errors = [line for line in found if "error:" in line]
    assert len(errors) == len(MISTAKES), found
    for line, code in zip(errors, MISTAKES.values()):
        assert f"[{code}]" in line, found


# --- the product ------------------------------------------------------------------------------------------------------


def pythons_here() -> dict[str, str]:
    """Executables by the suffix of their modules."""
    names = [f"python3.{minor}" for minor in range(10, 20)]
    paths = [*filter(None, map(shutil.which, names)), *map(str, Path.home().glob(".pyenv/versions/3.*/bin/python"))]
    found = {}
    for path in [sys.executable, *paths]:
        with contextlib.suppress(BuildError):
            found.setdefault(pythons.ask_python(path).suffix, path)
    return found


@dataclass(frozen=True)
class Product:
    """A checkout in which a wheel was built, with the Python that did it, which has nothing but pip."""

    checkout: Path
    wheel: Path
    bare_python: str
    pythons: dict[str, str]


def build_in_isolation(product: Product, *arguments: str, **env: str) -> None:
    """pip brings what pyproject.toml asks for, and no torch."""
    nvcc = toolchain.find_nvcc()
    assert nvcc
    env = {"PYTHONPATH": "", "CUDA_HOME": str(nvcc.path.parent.parent)} | ARCHS | env
    arguments = ("-m", "pip", *arguments, "--no-deps", "--disable-pip-version-check")
    result = run_python(product.checkout, *arguments, executable=product.bare_python, **env)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def product(tmp_path_factory):
    """All head dims: minutes, unless tools/check_kernels.py has compiled the kernels of this checkout."""
    if toolchain.find_nvcc() is None or not shutil.which("g++"):
        pytest.skip("needs nvcc and g++")
    folder = tmp_path_factory.mktemp("product")
    checkout = copy_checkout(folder / "source")
    if (ROOT / extension.OBJECTS).is_dir():
        shutil.copytree(ROOT / extension.OBJECTS, checkout / extension.OBJECTS)
    stale = checkout / f"build/lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / extension.PACKAGE
    stale.mkdir(parents=True)
    (stale / "_C.of-an-earlier-build.so").touch()
    venv.create(folder / "bare", with_pip=True)
    name = f"flash_attn_dualkv-{extension.version_of(ROOT)}-py3-none-{sysconfig.get_platform().replace('-', '_')}.whl"
    product = Product(checkout, folder / name, str(folder / "bare/bin/python"), pythons_here())
    knobs = {"DUALKV_PYTHONS": " ".join(product.pythons.values()), "DUALKV_HEAD_DIMS": ""}
    build_in_isolation(product, "wheel", "-w", str(folder), ".", **knobs)
    return product


@pytest.fixture(scope="module")
def unpacked(product, tmp_path_factory):
    """Installed in seconds where there is neither nvcc nor any other compiler."""
    target, started = tmp_path_factory.mktemp("unpacked"), time.monotonic()
    options = ["-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), str(product.wheel)]
    result = run_python(target, *options, executable=product.bare_python, PATH="/nowhere", CUDA_HOME="")
    assert result.returncode == 0, result.stdout + result.stderr
    assert time.monotonic() - started < 30
    return target


@pytest.mark.slow
def test_one_small_wheel_for_every_python(product, unpacked):
    assert product.wheel.stat().st_size <= 25e6
    sources = {path.relative_to(ROOT) for path in (ROOT / "flash_attn_dualkv").rglob("*.py")}
    binaries = {"libdualkv.so", *(f"_C{suffix}" for suffix in product.pythons)}
    expected = sources | DATA | {Path("flash_attn_dualkv") / name for name in binaries}
    files = {path.relative_to(unpacked) for path in unpacked.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    metadata = {path for path in files if ".dist-info" in path.parts[0]}
    assert files - metadata == expected
    assert expected | metadata <= {Path(name) for name in zipfile.ZipFile(product.wheel).namelist()} | metadata
    (wheel,) = (unpacked / path for path in metadata if path.name == "WHEEL")
    assert "Root-Is-Purelib: false" in wheel.read_text()


@pytest.mark.slow
def test_binaries_need_and_show_nothing_of_cuda_torch_or_python(product, unpacked):
    for path in sorted((unpacked / "flash_attn_dualkv").glob("*.so")):
        needed = re.findall(r"\(NEEDED\).*\[(.+)\]", toolchain.run_text(["readelf", "-d", path]))
        assert needed
        assert {re.split(r"\.|-(?:x86|aarch)", name)[0] for name in needed} <= SYSTEM_LIBRARIES
    library = unpacked / "flash_attn_dualkv/libdualkv.so"
    shown = toolchain.run_text(["nm", "-D", "--defined-only", library]).split()[2::3]
    assert "dualkv_forward" in shown
    assert [name for name in shown if not name.startswith("dualkv_")] == []


@pytest.mark.slow
def test_every_python_opens_the_same_library(product, unpacked):
    code = (
        "import sys, _C; version = _C.open_library('libdualkv.so')\n"
        "print(sys.version_info[1], version, *_C.build_info().split())"
    )
    folder = unpacked / "flash_attn_dualkv"
    answers = [
        run_python(folder, "-S", "-c", code.replace("libdualkv.so", str(folder / "libdualkv.so")), executable=python)
        for python in product.pythons.values()
    ]
    assert [answer.stderr for answer in answers] == [""] * len(answers)
    words = [answer.stdout.split() for answer in answers]
    assert len({minor for minor, *_ in words}) == len(product.pythons)
    assert all(rest == words[0][1:] for _, *rest in words)
    assert words[0][1] == extension.version_of(ROOT)
    assert "80;90" in words[0]


@pytest.mark.slow
def test_the_installed_wheel_says_what_it_has(unpacked):
    """The import opens no library: only who asks for kernels does."""
    code = (
        "import flash_attn_dualkv; is_open = 'libdualkv' in open('/proc/self/maps').read()\n"
        "info = flash_attn_dualkv.build_info()\n"
        "print(is_open, info['installation'], info['compiled_error'], info['archs'], info['ptx'], info['head_dims'])"
    )
    result = run_python(unpacked, "-c", code, PYTHONPATH="", PATH="/nowhere")
    built = "{'sm80': [64, 96, 128, 192, 256], 'sm90': [64, 128, 192, 256, 512]}"
    assert result.stdout.split("\n")[0] == f"False package None ['80', '90'] 80 {built}", result.stdout + result.stderr


@pytest.mark.slow
def test_an_editable_installation_fills_the_package_of_the_sources(product):
    (product.checkout / "flash_attn_dualkv/without_kernels.txt").write_text("no GPU was visible\n")  # once
    build_in_isolation(product, "install", "-e", ".", DUALKV_PYTHONS="", DUALKV_HEAD_DIMS="64")
    package = product.checkout / "flash_attn_dualkv"
    binaries = {path.name for path in package.glob("*.so")}
    assert binaries == {"libdualkv.so", "_C" + sysconfig.get_config_var("EXT_SUFFIX")}
    assert not (package / "without_kernels.txt").exists()
