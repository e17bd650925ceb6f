"""Compiles every kernel source for sm_80 and sm_90 and checks what the compiler made of it. Needs no GPU.

    python tools/check_kernels.py

Prints registers, spills and static shared memory of every kernel. Fails on

- a compile error, or a ptxas warning other than C7519;
- in the kernels for Hopper, and in the portable ones for head dims 64 and 128: a local-memory access in a main loop,
  or more than 32 bytes of spills or stack elsewhere;
- a kernel with matrix instructions, or a source of csrc/instances, in which no main loop is found: the check would be
  blind.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from sass import parse_sass
from toolchain import (
    BuildError,
    KernelSource,
    Nvcc,
    find_nvcc,
    kernel_sources,
    nvcc_step,
    parallel_jobs,
    run_text,
    site_packages,
)

ARCHS = ("80", "90")
SPILL_FREE_HEAD_DIMS = (64, 128)  # of the portable kernels
SPILL_BYTES_OUTSIDE_LOOPS = 32
ALLOWED_PTXAS_CODES = ("C7519",)


@dataclass
class Usage:
    """What ptxas -v reports of one kernel, in bytes except `registers`. Functions called by it are added in."""

    name: str
    arch: str
    registers: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    shared: int = 0

    @property
    def spilled(self) -> int:
        return max(self.stack, self.spill_stores, self.spill_loads)


@dataclass
class Report:
    """One source compiled for one architecture."""

    source: KernelSource
    arch: str
    rows: list[tuple[Usage, int]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def parse_usage(log: str) -> list[Usage]:
    """The kernels in the messages of nvcc -Xptxas -v."""
    kernels: list[Usage] = []
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '(\S+)' for '(\w+)'", line):
            kernels.append(Usage(entry.group(1), entry.group(2)))
        elif not kernels:
            continue
        elif frame := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", line):
            kernels[-1].stack += int(frame.group(1))
            kernels[-1].spill_stores += int(frame.group(2))
            kernels[-1].spill_loads += int(frame.group(3))
        elif used := re.search(r"Used (\d+) registers", line):
            shared = re.search(r"(\d+) bytes smem", line)
            kernels[-1].registers = int(used.group(1))
            kernels[-1].shared = int(shared.group(1)) if shared else 0
    return kernels


def ptxas_warnings(log: str) -> list[str]:
    """The lines in which ptxas warns of anything but the allowed codes; some codes come labelled as information."""
    lines = [line for line in log.splitlines() if line.startswith("ptxas")]
    suspicious = [line for line in lines if re.search(r"\bwarning\b|\(C\d{4}\)", line, re.I)]
    return [line for line in suspicious if not any(f"({code})" in line for code in ALLOWED_PTXAS_CODES)]


def judge(source: KernelSource, log: str, sass: str) -> tuple[list[tuple[Usage, int]], list[str]]:
    """(usage, local accesses in main loops) per kernel, and the problems."""
    usages = parse_usage(log)
    kernels = {kernel.name: kernel for kernel in parse_sass(sass)}
    problems = ptxas_warnings(log)
    rows = []
    loops_seen = 0
    for usage in usages:
        kernel = kernels.get(usage.name)
        if kernel is None or not kernel.code:
            problems.append(f"{usage.name}: not found in the disassembly")
            continue
        loops = kernel.main_loops()
        loops_seen += len(loops)
        accesses = kernel.local_accesses(set().union(*loops))
        rows.append((usage, len(accesses)))
        if kernel.has_matrix_instructions() and not loops:
            problems.append(f"{short_name(usage.name)}: matrix instructions, but no main loop found")
        if source.family != "sm90" and source.head_dim not in SPILL_FREE_HEAD_DIMS:
            continue
        if accesses:
            listed = ", ".join(map(str, accesses[:4])) + (", ..." if len(accesses) > 4 else "")
            problems.append(f"{short_name(usage.name)}: {len(accesses)} local-memory accesses in a main loop: {listed}")
        if usage.spilled > SPILL_BYTES_OUTSIDE_LOOPS:
            problems.append(
                f"{short_name(usage.name)}: {usage.stack} bytes of stack, {usage.spill_stores} of spill stores, "
                f"{usage.spill_loads} of spill loads; at most {SPILL_BYTES_OUTSIDE_LOOPS} are allowed"
            )
    if not usages:
        problems.append("no kernel found in ptxas' messages")
    if source.head_dim is not None and not loops_seen:
        problems.append("no main loop (a loop with matrix instructions) found")
    return rows, problems


def short_name(mangled: str) -> str:
    """The function's own name in a mangled one."""
    names, rest = [], mangled.removeprefix("_Z").removeprefix("N")
    while length := re.match(r"\d+", rest):
        end = length.end() + int(length.group())
        names.append(rest[length.end() : end])
        rest = rest[end:]
    return names[-1] if names else mangled


def find_nvdisasm(nvcc: Nvcc) -> Path | None:
    """nvdisasm on PATH, in the toolkit, or in pip's nvidia-cuda-nvdisasm or triton."""
    on_path = shutil.which("nvdisasm")
    candidates = [Path(on_path)] if on_path else []
    candidates.append(nvcc.home / "bin/nvdisasm")
    for site in site_packages():
        candidates += sorted(site.glob("nvidia/cu*/bin/nvdisasm"), reverse=True)
    candidates += [Path(entry) / "triton/backends/nvidia/bin/nvdisasm" for entry in sys.path if entry]
    return next((path for path in candidates if path.is_file()), None)


def check(source: KernelSource, target: tuple[str, str], root: Path, nvcc: Nvcc, nvdisasm: Path) -> Report:
    """Compiles one source for one architecture and judges the result."""
    virtual, real = target
    report = Report(source, real)
    output = root / "build" / "check" / f"{source.path.stem}.{real}.cubin"
    options = ["-cubin", "-gencode", f"arch={virtual},code={real}", "-Xptxas", "-v"]
    step = nvcc_step(nvcc, source.path, output, root, options)
    start = time.monotonic()
    try:
        compiled = step.run()
    except BuildError as error:
        report.problems.append(f"does not compile: {error}")
        return report
    seconds = f"{time.monotonic() - start:.0f} s" if compiled else "unchanged"
    print(f"{source.path.stem} for {real}: {seconds}", flush=True)
    log = step.log.read_text()
    report.warnings = [line for line in log.splitlines() if re.search(r"\): warning", line)]
    report.rows, report.problems = judge(source, log, run_text([nvdisasm, "-c", output]))
    return report


def print_table(reports: Sequence[Report]) -> None:
    header = ("source", "arch", "kernel", "registers", "stack", "spill st", "spill ld", "smem", "in loops")
    rows: list[tuple[str, ...]] = [header]
    for report in reports:
        for usage, in_loops in report.rows:
            figures = (usage.registers, usage.stack, usage.spill_stores, usage.spill_loads, usage.shared, in_loops)
            rows.append((report.source.path.stem, report.arch, short_name(usage.name), *map(str, figures)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    for row in rows:
        names = [cell.ljust(width) for cell, width in zip(row[:3], widths[:3])]
        numbers = [cell.rjust(width) for cell, width in zip(row[3:], widths[3:])]
        print("  ".join(names + numbers))


def run_checks(root: Path, match: str, nvcc: Nvcc, nvdisasm: Path) -> list[Report]:
    work = [
        (source, target)
        for source in kernel_sources(root)
        for target in source.targets(ARCHS)
        if re.search(match, source.path.stem)
    ]
    if not work:
        raise BuildError(f"no kernel sources in {root / 'csrc'} match {match!r}")
    with ThreadPoolExecutor(parallel_jobs(os.environ)) as pool:
        return list(pool.map(lambda item: check(item[0], item[1], root, nvcc, nvdisasm), work))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent, help="the source tree")
    parser.add_argument("--match", default="", help="only sources whose name contains this regular expression")
    parser.add_argument("--allow-missing-nvcc", action="store_true", help="without nvcc succeed, checking nothing")
    options = parser.parse_args(arguments)
    nvcc = find_nvcc(None)
    if nvcc is None:
        print("check_kernels: no nvcc in CUDA_HOME, PATH, /usr/local/cuda* or pip's nvidia-cuda-nvcc; nothing checked")
        return 0 if options.allow_missing_nvcc else 2
    nvdisasm = find_nvdisasm(nvcc)
    if nvdisasm is None:
        print("check_kernels: no nvdisasm found; pip install nvidia-cuda-nvdisasm")
        return 2
    print(f"{nvcc.path} (CUDA {nvcc.release}), {nvdisasm}", flush=True)
    try:
        reports = run_checks(options.root.resolve(), options.match, nvcc, nvdisasm)
    except BuildError as error:
        print(f"check_kernels: {error}")
        return 1
    print_table(reports)
    for report in reports:
        for line in report.warnings:
            print(f"note: {line}")
        for line in report.problems:
            print(f"FAILED: {report.source.path.stem} for {report.arch}: {line}")
    kernels = sum(len(report.rows) for report in reports)
    problems = sum(len(report.problems) for report in reports)
    print(f"check_kernels: {kernels} kernels in {len(reports)} compilations, {problems} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
