# SPDX-License-Identifier: BSD-3-Clause
"""A type checker sees what a user's script calls: mypy --strict against an editable installation.

Of another one it takes a file py.typed: test_wheel.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
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
# transformers is not typed as a whole, and would take mypy half a minute; the compilers of torch as long as all else.
CONFIG = """\
[mypy]
strict = True
[mypy-transformers.*,torch._inductor.*,torch._dynamo.*,torch.distributed.*,torch.fx.*,torch.onnx.*,torch.ao.*,sympy.*]
follow_imports = skip
ignore_missing_imports = True
"""


def installed(folder: Path) -> Path:
    """The Python of an environment that has a copy of this checkout installed, editable."""
    checkout, environment = folder / "checkout", folder / "environment"
    checkout.mkdir()
    for name in ("flash_attn_dualkv", "csrc", "tools", "setup.py", "pyproject.toml", "README.md", "LICENSE"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, checkout / name)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = environment / "bin/python"
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "torch.pth").write_text(sysconfig.get_path("purelib"))  # not what lies in there editable
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-build-isolation", "--no-deps", "-q"]
    subprocess.run([*pip, "-e", str(checkout)], check=True, env={**os.environ, "DUALKV_PURE_PYTHON": "1"})
    return python


def test_a_users_script(tmp_path: Path) -> None:
    """The mistakes are found, and nothing else."""
    pytest.importorskip("mypy")
    script, config = tmp_path / "script.py", tmp_path / "mypy.ini"
    script.write_text(SCRIPT + "\n".join(MISTAKES))
    config.write_text(CONFIG)
    command = [sys.executable, "-m", "mypy", "--python-executable", str(installed(tmp_path)), script.name]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout.splitlines()
    errors = [line for line in found if "error:" in line]
    assert len(errors) == len(MISTAKES), found
    for line, code in zip(errors, MISTAKES.values()):
        assert f"[{code}]" in line, found
