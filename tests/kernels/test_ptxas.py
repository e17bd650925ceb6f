# SPDX-License-Identifier: BSD-3-Clause
"""The check of the compiled kernels: on messages of ptxas, and on a real kernel that spills."""

from __future__ import annotations

import re
from pathlib import Path

import check_kernels
import pytest
import toolchain
from check_kernels import Usage
from toolchain import BuildError, KernelSource

LOG = """\
nvcc warning : something of nvcc
x.cu(3): warning #177-D: variable "y" was declared but never referenced
ptxas info    : 24 bytes gmem
ptxas info    : Compiling entry function '_ZN6dualkv19dualkv_sm80_forwardIfEEvPT_' for 'sm_80'
ptxas info    : Function properties for _ZN6dualkv19dualkv_sm80_forwardIfEEvPT_
    40 bytes stack frame, 36 bytes spill stores, 44 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 40 bytes cumulative stack size, 1024 bytes smem, 376 bytes cmem[0]
ptxas info    : Function properties for _Z6helperf
    8 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function '_Z5otherv' for 'sm_90'
ptxas info    : Function properties for _Z5otherv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers, 376 bytes cmem[0]
"""


def test_what_ptxas_reports():
    assert check_kernels.parse_usage(LOG) == [
        Usage("dualkv_sm80_forward", "sm_80", 255, 48, 40, 44),
        Usage("_Z5otherv", "sm_90", 32),
    ]


def test_ptxas_warnings():
    assert check_kernels.ptxas_warnings(LOG) == []
    allowed = "ptxas info    : (C7519) Potential Performance Loss: allowed"
    coded = "ptxas info    : (C7510) Potential Performance Loss: wgmma serialized"
    plain = "ptxas warning : Registers are spilled to local memory"
    assert check_kernels.ptxas_warnings("\n".join([LOG, allowed, coded, plain])) == [coded, plain]


@pytest.mark.parametrize(
    ("stem", "kernel", "problem"),
    [
        ("sm80_forward_d96", Usage("dualkv_sm80_forward", "sm_80", 255), None),
        ("sm80_forward_d96", Usage("dualkv_sm80_forward", "sm_80", stack=8), "8 bytes of stack.*at most 0"),
        ("sm80_forward_d96", Usage("dualkv_sm80_forward", "sm_80", spill_loads=4), "4 of spill loads"),
        ("sm80_backward_d96", Usage("dualkv_convert_sm80", "sm_80", 48, 8, 4, 4), None),
        ("sm80_backward_d96", Usage("dualkv_convert_sm80", "sm_80", 48, 16, 12, 12), "12 of spill.*at most 8"),
        ("sm80_forward_d96", Usage("dualkv_sm80_forward", "sm_75"), "no kernel for sm_80"),
    ],
)
def test_the_verdict_on_a_kernel(stem, kernel, problem):
    other_arch = Usage(kernel.name, "sm_90")
    source = KernelSource(Path(f"{stem}.cu"), "sm80", 96)
    (found,) = check_kernels.problems_of(source, [kernel, other_arch]) or [None]
    assert (found is None) == (problem is None)
    assert problem is None or re.search(problem, found)


def test_no_nvcc_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(check_kernels, "find_nvcc", lambda cuda: None)
    with pytest.raises(BuildError, match="no nvcc"):
        check_kernels.check(tmp_path)


KERNEL = """
__global__ void __launch_bounds__(512, 2) kernel(float* out, const float* in, int steps) {
  float sum[COUNT] = {};
  for (int step = 0; step < steps; ++step) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) sum[i] += in[step * 512 + i] * in[threadIdx.x];
  }
#pragma unroll
  for (int i = 0; i < COUNT; ++i) out[i * 512 + threadIdx.x] = sum[i];
}
"""


@pytest.mark.slow
@pytest.mark.parametrize(("count", "problems"), [(16, 0), (96, 2)])
def test_a_real_kernel_that_spills_fails_the_check(count, problems, tmp_path, capsys):
    """For each of both architectures."""
    if toolchain.find_nvcc(None) is None:
        pytest.skip("needs nvcc")
    source = tmp_path / "csrc/instances/sm80_forward_d64.cu"
    source.parent.mkdir(parents=True)
    source.write_text(KERNEL.replace("COUNT", str(count)))
    assert check_kernels.check(tmp_path) == problems
    assert ("FAILED: sm80_forward_d64: _Z6kernel" in capsys.readouterr().out) == bool(problems)
