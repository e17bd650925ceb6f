"""The check of the compiled kernels: on small listings, and on a real kernel that spills."""

from __future__ import annotations

from pathlib import Path

import check_kernels
import pytest
import toolchain
from sass import parse_sass
from toolchain import KernelSource

LOG = """\
nvcc warning : something of nvcc
x.cu(3): warning #177-D: variable "y" was declared but never referenced
ptxas info    : 24 bytes gmem
ptxas info    : Compiling entry function '_ZN6dualkv4mainIfEEvPT_' for 'sm_80'
ptxas info    : Function properties for _ZN6dualkv4mainIfEEvPT_
    40 bytes stack frame, 36 bytes spill stores, 44 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 40 bytes cumulative stack size, 1024 bytes smem, 376 bytes cmem[0]
ptxas info    : Function properties for _Z6helperf
    8 bytes stack frame, 4 bytes spill stores, 0 bytes spill loads
ptxas info    : Compiling entry function '_Z5otherv' for 'sm_80'
ptxas info    : Function properties for _Z5otherv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers, 376 bytes cmem[0]
"""


def listing(*lines: str, name: str = "_Z6kernelv") -> str:
    """nvdisasm's format: a line ending in a colon is a label, every other one an instruction."""
    text = [f'\t.section\t.text.{name},"ax",@progbits', f".text.{name}:"]
    address = 0
    for line in lines:
        label = line.endswith(":")
        text.append(line if label else f"        /*{address:04x}*/                   {line} ;")
        address += 0 if label else 16
    return "\n".join(text)


def loop_accesses(*lines: str) -> list[str]:
    (kernel,) = parse_sass(listing(*lines))
    return [access.opcode for access in kernel.local_accesses(set().union(*kernel.main_loops()))]


def test_ptxas_figures():
    main, other = check_kernels.parse_usage(LOG)
    assert main == check_kernels.Usage("_ZN6dualkv4mainIfEEvPT_", "sm_80", 255, 48, 40, 44, 1024)
    assert main.spilled == 48
    assert other == check_kernels.Usage("_Z5otherv", "sm_80", 32)
    assert check_kernels.short_name(main.name) == "main"
    assert check_kernels.short_name("kernel") == "kernel"


def test_ptxas_warnings():
    assert check_kernels.ptxas_warnings(LOG) == []
    allowed = "ptxas info    : (C7519) Potential Performance Loss: allowed"
    coded = "ptxas info    : (C7510) Potential Performance Loss: wgmma serialized"
    plain = "ptxas warning : Registers are spilled to local memory"
    assert check_kernels.ptxas_warnings("\n".join([LOG, allowed, coded, plain])) == [coded, plain]


def test_accesses_outside_a_main_loop_do_not_count():
    loop = (".L_x_0:", "HMMA.16816.F32 R4, R4, R2, R4", "@P0 BRA `(.L_x_0)")
    scalar_loop = (".L_x_1:", "LDL R0, [R1]", "@P1 BRA `(.L_x_1)")
    assert loop_accesses("STL [R1], R0", *loop, "LDL R0, [R1]", *scalar_loop, "EXIT") == []


def test_accesses_in_a_main_loop_count():
    loop = (".L_x_0:", "LDL.64 R2, [R1+0x8]", "HGMMA.64x64x16.F32 R24, gdesc[UR4]", "STL [R1], R0", "@P0 BRA `(.L_x_0)")
    assert loop_accesses(*loop, "EXIT") == ["LDL.64", "STL"]


def test_a_cold_block_behind_the_loop_belongs_to_it_and_the_epilogue_does_not():
    hot = (".L_x_0:", "@P1 BRA `(.L_x_2)", ".L_x_1:", "HMMA.16816.F32 R4, R4, R2, R4", "@P0 BRA `(.L_x_0)")
    epilogue = ("LDL R0, [R1]", "EXIT")
    cold = (".L_x_2:", "STL.64 [R1], R0", "BRA `(.L_x_1)")
    assert loop_accesses(*hot, *epilogue, *cold) == ["STL.64"]


def test_a_loop_through_a_jump_table_a_barrier_or_a_conditional_branch_is_found():
    table = 'BRX R2 -0x10 (*"BRANCH_TARGETS .L_x_0,.L_x_1"*)'
    assert loop_accesses(".L_x_0:", "HMMA.1 R4", "LDL R0, [R1]", table, ".L_x_1:", "EXIT") == ["LDL"]
    barrier = ("BSSY B0, `(.L_x_0)", ".L_x_0:", "HMMA.1 R4", "LDL R0, [R1]", "@P0 EXIT", "BSYNC B0")
    assert loop_accesses(*barrier, "EXIT") == ["LDL"]
    operand = (".L_x_0:", "HMMA.1 R4", "LDL R0, [R1]", "BRA.U !UP0, `(.L_x_1)", "BRA `(.L_x_0)", ".L_x_1:", "EXIT")
    assert loop_accesses(*operand) == ["LDL"]


def test_a_barrier_register_used_again_behind_the_loop_does_not_lengthen_it():
    loop = (".L_x_0:", "BSSY B0, `(.L_x_1)", "HMMA.1 R4", "BSYNC B0", ".L_x_1:", "@P0 BRA `(.L_x_0)")
    assert loop_accesses(*loop, "BSSY B0, `(.L_x_2)", "LDL R0, [R1]", "BSYNC B0", ".L_x_2:", "EXIT") == []


def test_a_function_called_in_the_loop_counts_and_one_called_before_it_does_not():
    loop = (".L_x_0:", "HMMA.1 R4", "CALL.REL.NOINC `($k$inside)", "@P0 BRA `(.L_x_0)", "EXIT")
    functions = (
        "$k$inside:",
        "LDL R0, [R1]",
        "RET.REL.NODEC R2 `(k)",
        "$k$before:",
        "STL [R1], R0",
        "RET.REL.NODEC R2",
    )
    assert loop_accesses("CALL.REL.NOINC `($k$before)", *loop, *functions) == ["LDL"]


def persistent(inner: str = "FADD R0, R0, R0", outer: str = "FADD R1, R1, R1", store: str = "STG.E [R2], R24") -> str:
    """The loop of a block over its items, in which a loop with matrix instructions waits for a barrier at its end."""
    items = (".L_x_0:", outer, "HGMMA.64x64x16.F32 R24, gdesc[UR4]")
    tiles = (".L_x_1:", "HGMMA.64x64x16.F32 R24, gdesc[UR4]", inner)
    wait = (".L_x_2:", "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR6], R3", "@!P1 BRA `(.L_x_2)")
    return listing(*items, *tiles, *wait, "@P0 BRA `(.L_x_1)", store, "@P2 BRA `(.L_x_0)", "EXIT")


def accesses_of(text: str) -> list[str]:
    (kernel,) = parse_sass(text)
    (loop,) = kernel.main_loops()
    return [access.opcode for access in kernel.local_accesses(loop)]


def test_a_persistent_block_has_its_main_loop_inside_the_loop_over_its_items():
    assert accesses_of(persistent(inner="LDL R0, [R1]")) == ["LDL"]
    assert accesses_of(persistent(outer="LDL R0, [R1]")) == []
    assert accesses_of(persistent(inner="STL [R1], R0", outer="LDL R0, [R1]")) == ["STL"]


def test_a_loop_that_stores_nothing_is_a_main_loop_with_all_that_it_contains():
    assert accesses_of(persistent(outer="LDL R0, [R1]", store="FADD R2, R2, R2")) == ["LDL"]


def test_a_loop_that_stores_but_contains_no_other_is_a_main_loop():
    assert loop_accesses(".L_x_0:", "HMMA.1 R4", "LDL R0, [R1]", "STG.E [R2], R4", "@P0 BRA `(.L_x_0)") == ["LDL"]


def test_both_roles_of_a_kernel_have_a_main_loop():
    first = (".L_x_0:", "HGMMA.1 R24", "LDL R0, [R1]", "@P0 BRA `(.L_x_0)", "EXIT")
    second = (".L_x_1:", "HGMMA.1 R24", "STL [R1], R0", "@P0 BRA `(.L_x_1)", "EXIT")
    (kernel,) = parse_sass(listing("@P3 BRA `(.L_x_1)", *first, *second))
    assert len(kernel.main_loops()) == 2
    assert loop_accesses("@P3 BRA `(.L_x_1)", *first, *second) == ["LDL", "STL"]


@pytest.mark.parametrize(("family", "head_dim"), [("sm80", 96), ("sm90", 96), ("sm90", 192), ("sm90", 256)])
def test_every_kernel_for_hopper_must_be_free_of_spills(family, head_dim):
    _, problems = judge_listing(listing(".L_x_0:", "HGMMA.1 R4", "LDL R0, [R1]", "@P0 BRA `(.L_x_0)"), family, head_dim)
    assert len(problems) == (family == "sm90")


def test_a_kernel_whose_main_loop_is_not_seen_is_a_problem():
    straight, loop = ("HGMMA.1 R4", "EXIT"), (".L_x_0:", "HGMMA.1 R4", "@P0 BRA `(.L_x_0)", "EXIT")
    both = "\n".join([listing(*straight), listing(*loop, name="_Z5otherv")])
    _, problems = judge_listing(both, "sm90", 64)
    assert problems == ["kernel: matrix instructions, but no main loop found"]


def judge_listing(sass: str, family: str, head_dim: int):
    log = "".join(
        f"ptxas info    : Compiling entry function '{name}' for 'sm_90a'\n"
        for name in ("_Z6kernelv", "_Z5otherv")
        if f".text.{name}:" in sass
    )
    return check_kernels.judge(KernelSource(Path("x.cu"), family, head_dim), log, sass)


@pytest.mark.parametrize(
    ("body", "frame", "head_dim", "problem"),
    [
        (("HMMA.1 R4",), (0, 0, 0), 64, None),
        (("HMMA.1 R4",), (32, 32, 32), 128, None),
        (("HMMA.1 R4",), (40, 36, 36), 128, "40 bytes of stack, 36 of spill stores"),
        (("HMMA.1 R4", "LDL R0, [R1]"), (8, 4, 4), 64, "1 local-memory accesses in a main loop: 0x0010 LDL"),
        (("HMMA.1 R4", "LDL R0, [R1]"), (400, 400, 400), 96, None),
        (("FFMA R4, R4, R4, R4",), (0, 0, 0), 256, "no main loop"),
    ],
)
def test_the_verdict_on_a_kernel(body, frame, head_dim, problem):
    log = (
        "ptxas info    : Compiling entry function '_Z6kernelv' for 'sm_80'\n"
        "    {} bytes stack frame, {} bytes spill stores, {} bytes spill loads\n"
        "ptxas info    : Used 255 registers\n"
    ).format(*frame)
    sass = listing(".L_x_0:", *body, "@P0 BRA `(.L_x_0)", "EXIT")
    _, problems = check_kernels.judge(KernelSource(Path("x.cu"), "sm80", head_dim), log, sass)
    assert len(problems) == (problem is not None)
    assert problem is None or problem in problems[0]


def test_what_cannot_be_seen_is_a_problem():
    source = KernelSource(Path("x.cu"), "sm80", None)
    assert check_kernels.judge(source, "", "")[1] == ["no kernel found in ptxas' messages"]
    assert "_Z5otherv: not found in the disassembly" in check_kernels.judge(source, LOG, "")[1]


def test_no_nvcc_fails_unless_allowed(monkeypatch, capsys):
    monkeypatch.setattr(check_kernels, "find_nvcc", lambda cuda: None)
    assert check_kernels.main([]) == 2
    assert check_kernels.main(["--allow-missing-nvcc"]) == 0
    assert capsys.readouterr().out.count("no nvcc") == 2


KERNEL = """
__global__ void __launch_bounds__(512, 2) kernel(float* out, const unsigned* in, int steps) {
  float sum[TILES][4] = {};
  for (int step = 0; step < steps; ++step) {
    const unsigned* x = in + step * 64 + threadIdx.x;
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile)
      asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
                   "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                   : "+f"(sum[tile][0]), "+f"(sum[tile][1]), "+f"(sum[tile][2]), "+f"(sum[tile][3])
                   : "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]), "r"(x[tile]), "r"(x[tile + 1]));
  }
  for (int tile = 0; tile < TILES; ++tile)
    for (int i = 0; i < 4; ++i) out[(tile * 4 + i) * 512 + threadIdx.x] = sum[tile][i];
}
"""


@pytest.mark.parametrize(("tiles", "status"), [(4, 0), (24, 1)])
def test_a_real_kernel_that_spills_fails_the_check(tiles, status, tmp_path, monkeypatch, capsys):
    nvcc = toolchain.find_nvcc(None)
    if nvcc is None or check_kernels.find_nvdisasm(nvcc) is None:
        pytest.skip("needs nvcc and nvdisasm")
    monkeypatch.setattr(check_kernels, "ARCHS", ("80",))
    source = tmp_path / "csrc/instances/sm80_forward_d64_fp16.cu"
    source.parent.mkdir(parents=True)
    source.write_text(KERNEL.replace("TILES", str(tiles)))
    assert check_kernels.main(["--root", str(tmp_path)]) == status
    assert ("local-memory accesses in a main loop" in capsys.readouterr().out) == bool(status)
