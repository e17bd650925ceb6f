# SPDX-License-Identifier: BSD-3-Clause
"""Compiles every kernel of a wheel for sm_80 and sm_90 and reads what ptxas says of it. Needs no GPU.

    python tools/check_kernels.py

The compilations are those of the build: what one has compiled the other does not compile again. Prints registers, stack
and spills of every kernel. Fails on

- a compile error, or a ptxas warning other than C7519;
- more bytes of stack or spills than ALLOWED_BYTES: registers and arrays that end up in memory slow a main loop down;
- a source without a kernel for each architecture that it is written for: the check would be blind.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from build_plan import RELEASED_ARCHS
from extension import kernel_steps
from toolchain import BuildError, KernelSource, find_nvcc, parallel_jobs, run_parallel

# What stands in "source: kernel for arch". These bytes are outside of main loops; only the portable
# forward at d = 128 reads six words once an iteration, before a barrier. Decoding at d = 256 keeps
# five words of an item there.
ALLOWED_BYTES = {
    "dualkv_convert_sm": 8,
    "d192: dualkv_convert_sm80": 16,
    "sm80_forward_d128": 32,
    "sm90_decode_d256": 20,
}
ALLOWED_PTXAS_CODES = ("C7519",)


@dataclass
class Usage:
    """What ptxas reports of one kernel, in bytes except `registers`. Functions called by it are added in."""

    name: str
    arch: str
    registers: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0

    def __str__(self) -> str:
        spills = f"{self.stack} bytes of stack, {self.spill_stores} of spill stores, {self.spill_loads} of spill loads"
        return f"{self.name} for {self.arch}: {self.registers} registers, {spills}"


def parse_usage(log: str) -> list[Usage]:
    """The kernels in the messages of ptxas -v."""
    kernels: list[Usage] = []
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '(\S+)' for '(\w+)'", line):
            plain_names = re.findall(r"dualkv_[a-z0-9_]+", entry[1]) or [entry[1]]
            kernels.append(Usage(plain_names[-1], entry[2]))
        elif kernels and (frame := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes", line)):
            kernels[-1].stack += int(frame[1])
            kernels[-1].spill_stores += int(frame[2])
            kernels[-1].spill_loads += int(frame[3])
        elif kernels and (used := re.search(r"Used (\d+) registers", line)):
            kernels[-1].registers = int(used[1])
    return kernels


def ptxas_warnings(log: str) -> list[str]:
    """The lines in which ptxas warns of anything but the allowed codes; some codes come labelled as information."""
    suspicious = re.findall(r"^ptxas.*(?:\bwarning\b|\(C\d{4}\)).*", log, re.M | re.I)
    return [line for line in suspicious if not any(f"({code})" in line for code in ALLOWED_PTXAS_CODES)]


def problems_of(source: KernelSource, kernels: list[Usage]) -> list[str]:
    """What is wrong with the kernels of a source."""
    missing = {real for _, real in source.targets(RELEASED_ARCHS)} - {kernel.arch for kernel in kernels}
    problems = [f"no kernel for {arch} found in ptxas' messages" for arch in sorted(missing)]
    for kernel in kernels:
        name = f"{source.path.stem}: {kernel.name} for {kernel.arch}"
        allowed = max((most for part, most in ALLOWED_BYTES.items() if part in name), default=0)
        if max(kernel.stack, kernel.spill_stores, kernel.spill_loads) > allowed:
            problems.append(f"{kernel}; at most {allowed} bytes are allowed")
    return problems


def check(root: Path) -> int:
    """Compiles and judges. Returns the number of problems. Raises BuildError where a source does not compile."""
    nvcc = find_nvcc(None)
    if nvcc is None:
        raise BuildError("no nvcc in CUDA_HOME, PATH, /usr/local/cuda* or pip's nvidia-cuda-nvcc")
    steps = kernel_steps(root, nvcc, RELEASED_ARCHS)
    run_parallel([step for _, step in steps], parallel_jobs(os.environ))
    count, problems = 0, []
    for source, step in steps:
        log = step.log.read_text()
        kernels = parse_usage(log)
        count += len(kernels)
        print("\n".join(f"{source.path.stem}: {kernel}" for kernel in kernels))
        problems += [f"{source.path.stem}: {line}" for line in (*ptxas_warnings(log), *problems_of(source, kernels))]
    print("\n".join([f"FAILED: {line}" for line in problems] + [f"{count} kernels, {len(problems)} problems"]))
    return len(problems)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    try:
        sys.exit(int(check(Path(__file__).resolve().parent.parent) > 0))
    except BuildError as error:
        sys.exit(f"check_kernels: {error}")
