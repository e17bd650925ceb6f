"""Breaks the sources on purpose, one line at a time, and demands that the named tests notice.

    python tests/mutants.py              all mutants; those of the kernels need a GPU and a compiler
    python tests/mutants.py --cpu        the mutants of geometry and Python that tests must catch on any machine
    python tests/mutants.py --list

The tree is copied to a temporary folder first. For the kernels it is built there with head dim 64 alone, and again
after each change; the unchanged build must pass the same tests.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("csrc", "flash_attn_dualkv", "tests", "tools")
FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE")
IGNORED = shutil.ignore_patterns("*.so", "__pycache__")
GEOMETRY = "tests/test_geometry.py"
PROPERTIES = "tests/test_kernels_properties.py"
MEMORY = "tests/test_kernels_memory.py"
KERNELS = "tests/test_kernels.py"
PACKING = "tests/test_packing.py"
PACKED_ATTENTION = "tests/test_shared_prompt_attention.py"
ANY_MACHINE = (GEOMETRY, PACKING, PACKED_ATTENTION)
TEST_SECONDS = 600  # a mutant that hangs is caught, too


@dataclass(frozen=True)
class Mutant:
    """`old`, which stands once in `file`, becomes `new`; then the tests selected in `tests` must fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str  # a file
    select: str = ""  # pytest's -k

    @property
    def needs_gpu(self) -> bool:
        return self.tests not in ANY_MACHINE

    def broken(self, root: Path) -> str:
        """The file's text with the change. ValueError unless the old text stands there exactly once."""
        text = (root / self.file).read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.name}: {text.count(self.old)} places in {self.file} have the text, expected 1")
        return text.replace(self.old, self.new)


REGIONS, SCHEDULE = "csrc/core/kv_regions.h", "csrc/core/schedule.h"
FORWARD, BACKWARD, DQ = "csrc/sm80/forward.h", "csrc/sm80/backward.h", "csrc/sm80/backward_dq.h"
LAYOUT, REFERENCE = "flash_attn_dualkv/shared_prompt.py", "flash_attn_dualkv/reference.py"
SOFTMAX, BLOCK, API = "csrc/core/online_softmax.h", "csrc/core/query_block.h", "csrc/api.cpp"

GEOMETRY_MUTANTS = [
    Mutant(
        "forward: no causal mask within a tile",
        REGIONS,
        "return causal ? min_int(tile.valid, q_pos - tile.kv_pos + 1) : tile.valid;",
        "return tile.valid;",
        GEOMETRY,
    ),
    Mutant(
        "forward: the diagonal tile is taken for a full one",
        REGIONS,
        "(causal && tile.kv_pos + block_n - 1 > q.q_pos)",
        "(causal && tile.kv_pos > q.q_pos)",
        GEOMETRY,
    ),
    Mutant(
        "forward: the tail tile is taken for a full one",
        REGIONS,
        "return tile.valid < block_n || (causal",
        "return (causal",
        GEOMETRY,
    ),
    Mutant(
        "forward: the last key is not visited",
        REGIONS,
        "clamp_int(q.q_pos + q.rows, 0, keys)",
        "clamp_int(q.q_pos + q.rows - 1, 0, keys)",
        GEOMETRY,
    ),
    Mutant(
        "decoded keys stand at positions from 0",
        REGIONS,
        "s.decoded_begin, s.decoded_len, s.context_len, n_block, block_n)",
        "s.decoded_begin, s.decoded_len, 0, n_block, block_n)",
        GEOMETRY,
    ),
    Mutant("backward: the diagonal tile is taken for a full one", REGIONS, "row < range.full_row || ", "", GEOMETRY),
    Mutant(
        "backward: a foreign row behind a sequence is taken for its own",
        REGIONS,
        " || row + block_m > range.row_end",
        "",
        GEOMETRY,
    ),
    Mutant(
        "backward: one key too many before the diagonal",
        REGIONS,
        "row + range.pos_offset - tile.kv_pos + 1;",
        "row + range.pos_offset - tile.kv_pos + 2;",
        GEOMETRY,
    ),
    Mutant(
        "ranges that see a part of the tile are merged",
        REGIONS,
        "next.row_begin != range.row_end || next.full_row != next.row_begin",
        "next.row_begin != range.row_end",
        GEOMETRY,
    ),
    Mutant(
        "ranges with a gap between them are merged",
        REGIONS,
        "next.row_begin != range.row_end || next.full_row != next.row_begin",
        "next.full_row != next.row_begin",
        GEOMETRY,
    ),
    Mutant(
        "a part starts with the first head",
        REGIONS,
        "head = first_step % heads;",
        "head = 0;",
        GEOMETRY,
    ),
    Mutant(
        "query offsets are not clamped",
        REGIONS,
        "    clamp_run(s.q_begin, s.q_len, extents.q_rows);\n",
        "",
        GEOMETRY,
        "clamped",
    ),
    Mutant(
        "an owner skips the first sequence of its group",
        SCHEDULE,
        "group.segment_begin, group.segment_end};",
        "group.segment_begin + 1, group.segment_end};",
        GEOMETRY,
    ),
    Mutant(
        "parts overlap by a step",
        SCHEDULE,
        "return static_cast<int>(static_cast<int64_t>(steps) * part / parts);",
        "return static_cast<int>(static_cast<int64_t>(steps) * part / parts) - (part > 0 && part < parts);",
        GEOMETRY,
    ),
    Mutant(
        "fewer slots than parts",
        SCHEDULE,
        "by_balance = 2.0 * kPartsPerSm * num_sms",
        "by_balance = 0.2 * kPartsPerSm * num_sms",
        GEOMETRY,
        "capacities",
    ),
]

MIXED = "test_mixed_groups and 64-heads0"
PADDING = "test_nan_in_bytes and 64-heads0"

KERNEL_MUTANTS = [
    Mutant(
        "forward: no mask",
        FORWARD,
        "if (needs_mask(tile, work.q_tile, Config::kBlockN, p.shape.causal)) {",
        "if (false) {",
        PROPERTIES,
        MIXED,
    ),
    Mutant(
        "forward: earlier sums are not rescaled",
        FORWARD,
        "      scale_rows(o, rescale);\n",
        "",
        PROPERTIES,
        "rising and 64-heads0",
    ),
    Mutant(
        "forward: K and V rows behind a region are read",
        "csrc/sm80/query_block.h",
        "view.row_stride, 0, tile.valid, head_dim);",
        "view.row_stride, 0, Config::kBlockN, head_dim);",
        MEMORY,
        PADDING,
    ),
    Mutant(
        "forward: the maximum starts from a number that depends on the block",
        FORWARD,
        "  OnlineSoftmax<kM16> softmax;\n",
        "  OnlineSoftmax<kM16> softmax;\n  if (blockIdx.x % 2) softmax.row_max[0][0] = 30.f;\n",
        PROPERTIES,
        "bit_identical and 64-heads0",
    ),
    Mutant(
        "a row that sees no key is divided by its sum",
        SOFTMAX,
        "return empty ? 0.f : 1.f / sum;",
        "return 1.f / sum;",
        PROPERTIES,
        MIXED,
    ),
    Mutant(
        "the wrong head of the keys",
        BLOCK,
        "kv_head = head / shape.heads_per_group();",
        "kv_head = head % shape.num_kv_heads;",
        PROPERTIES,
        MIXED,
    ),
    Mutant(
        "backward: no mask",
        BACKWARD,
        "if (needs_mask(tile, step.range, step.m_block, kBlockM, kBlockN)) {",
        "if (false) {",
        PROPERTIES,
        MIXED,
    ),
    Mutant(
        "backward: K and V rows behind a region are read",
        BACKWARD,
        "load_rows<TileKv, kBlockN, kThreads>(shared, kv.k.at(tile.row, kv_head), kv.k.row_stride, 0, tile.valid,",
        "load_rows<TileKv, kBlockN, kThreads>(shared, kv.k.at(tile.row, kv_head), kv.k.row_stride, 0, kBlockN,",
        MEMORY,
        PADDING,
    ),
    Mutant(
        "backward: foreign rows of Q are read",
        BACKWARD,
        "p.q.at(row, step.head), p.q.row_stride, low, high,",
        "p.q.at(row, step.head), p.q.row_stride, 0, p.shape.q_rows - row,",
        MEMORY,
        PADDING,
    ),
    Mutant(
        "backward: foreign rows of dO are read",
        BACKWARD,
        "p.dout.at(row, step.head), p.dout.row_stride, low, high,",
        "p.dout.at(row, step.head), p.dout.row_stride, 0, p.shape.q_rows - row,",
        MEMORY,
        PADDING,
    ),
    Mutant(
        "backward: dQ of foreign rows is added",
        BACKWARD,
        "if (first_row < step.range.row_begin || first_row + kBlockM > step.range.row_end) {",
        "if (false) {",
        MEMORY,
        "nan_in_a_sequence and 64-heads0",
    ),
    Mutant(
        "backward: dK is summed in 16 bits",
        BACKWARD,
        "    block.accumulate_kv(dk, block.shared + Config::kOffsetDs, block.s_q(stage));\n",
        "    block.accumulate_kv(dk, block.shared + Config::kOffsetDs, block.s_q(stage));\n"
        "    for (auto& row : dk) for (auto& x : row) for (auto& e : x) e = static_cast<float>(static_cast<T>(e));\n",
        KERNELS,
        "shared_context_gradient and 64-64",
    ),
    Mutant(
        "backward: dV is summed in 16 bits",
        BACKWARD,
        "    block.accumulate_kv(dv, block.shared + Config::kOffsetP, block.s_dout(stage));\n",
        "    block.accumulate_kv(dv, block.shared + Config::kOffsetP, block.s_dout(stage));\n"
        "    for (auto& row : dv) for (auto& x : row) for (auto& e : x) e = static_cast<float>(static_cast<T>(e));\n",
        KERNELS,
        "shared_context_gradient and 64-64",
    ),
    Mutant(
        "backward: dK is not scaled",
        BACKWARD,
        "block.store_gradient(dk, p.shape.softmax_scale,",
        "block.store_gradient(dk, 1.f,",
        PROPERTIES,
        MIXED,
    ),
    Mutant(
        "deterministic dQ: no mask",
        DQ,
        "if (needs_mask(tile, work.q_tile, Config::kBlockN, p.shape.causal)) {",
        "if (false) {",
        PROPERTIES,
        MIXED,
    ),
    Mutant(
        "delta ignores the gradient of the LSE",
        "csrc/kernels/delta.cu",
        "p.delta[at] = p.dlse ? sum - p.dlse[at] : sum;",
        "p.delta[at] = sum;",
        PROPERTIES,
        "gradient_of_the_lse and 64-heads0",
    ),
    Mutant(
        "the first part of a split tile is lost",
        "csrc/kernels/convert.cu",
        "for (int part = 0; part < split.parts; ++part) {",
        "for (int part = 1; part < split.parts; ++part) {",
        PROPERTIES,
        "split_owners and 64-heads0",
    ),
    Mutant(
        "parts of a split tile are summed in any order",
        "csrc/kernels/convert.cu",
        "for (int part = 0; part < split.parts; ++part) {",
        "const bool backwards = clock64() & 1;\n"
        "    for (int turn = 0; turn < split.parts; ++turn) {\n"
        "      const int part = backwards ? split.parts - 1 - turn : turn;",
        PROPERTIES,
        "repeat_bit_for_bit and 64-heads0",
    ),
    Mutant(
        "deterministic mode takes the default path",
        API,
        "call.keys(gradients, deterministic ? Tensor() : dq);\n    if (deterministic) call.queries(dq);",
        "call.keys(gradients, dq);",
        PROPERTIES,
        "every_switch",
    ),
    Mutant(
        "rows of no sequence keep what was in memory",
        API,
        "const Tensor out = at::zeros(q.sizes(), q.options());",
        "const Tensor out = at::empty(q.sizes(), q.options());",
        MEMORY,
        PADDING,
    ),
    Mutant(
        "misaligned tensors are not copied",
        API,
        "return strides_ok && base_ok ? t",
        "return strides_ok ? t",
        MEMORY,
        "test_strides and 64-heads0 and off_by_one",
    ),
    Mutant(
        "row offsets in 32 bits",
        "csrc/params.h",
        "return data + row * row_stride + head * head_stride;",
        "return data + static_cast<int>(row * row_stride) + head * head_stride;",
        MEMORY,
        "past_2_31",
    ),
]

PYTHON_MUTANTS = [
    Mutant(
        "prompts do not attend to themselves",
        LAYOUT,
        "segments.append(Segment(begin, length, 0, begin, length, 0, 0, g))",
        "segments.append(Segment(begin, 0, 0, begin, length, 0, 0, g))",
        PACKED_ATTENTION,
        "test_against_dense",
    ),
    Mutant(
        "responses stand one position too late",
        LAYOUT,
        "segments.append(Segment(contexts[-1] + row, size, length, begin, length, row, size, g))",
        "segments.append(Segment(contexts[-1] + row, size, length + 1, begin, length, row, size, g))",
        PACKED_ATTENTION,
        "test_against_dense",
    ),
    Mutant(
        "prompts that begin alike are merged",
        "flash_attn_dualkv/packing.py",
        "ctypes.string_at(start + begin * _WORD, length * _WORD)",
        "ctypes.string_at(start + begin * _WORD, min(samples.prompt_lens) * _WORD)",
        PACKING,
        "strict_prefixes",
    ),
    Mutant(
        "the first token of a response is scored by another response's row",
        "flash_attn_dualkv/batch.py",
        "        if self.shift == 0:\n",
        "        if False:\n",
        PACKING,
        "test_the_example",
    ),
    Mutant(
        "a response's last label is the next sample's first token",
        "flash_attn_dualkv/batch.py",
        "last = following == ends",
        "last = following == len(samples.tokens)",
        PACKING,
        "test_the_example",
    ),
    Mutant(
        "a window is one position too wide",
        REFERENCE,
        "hidden | (distance >= self.window)",
        "hidden | (distance > self.window)",
        PACKED_ATTENTION,
        "test_sliding_window",
    ),
    Mutant(
        "blocks of keys that a window hides in part go unmasked",
        REFERENCE,
        "near = self.window is None or q_last - kv_begin < self.window",
        "near = True",
        PACKED_ATTENTION,
        "test_long_sequences",
    ),
    Mutant(
        "the slope of the softcap is left out",
        REFERENCE,
        "        if slope is not None:\n",
        "        if False:\n",
        PACKED_ATTENTION,
        "test_softcap",
    ),
    Mutant(
        "sinks join the rows of padding",
        "flash_attn_dualkv/packed_ops.py",
        "    empty = lse == -math.inf\n",
        "    empty = torch.zeros_like(lse, dtype=torch.bool)\n",
        PACKED_ATTENTION,
        "test_what_the_compiled_module_gets",
    ),
]

MUTANTS = [*GEOMETRY_MUTANTS, *PYTHON_MUTANTS, *KERNEL_MUTANTS]


class Tree:
    """A copy of the repository that is changed, built and tested, with `settings` in its environment."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.root = folder / "tree"
        for name in FOLDERS:
            shutil.copytree(ROOT / name, self.root / name, ignore=IGNORED)
        for name in FILES:
            shutil.copy(ROOT / name, self.root / name)
        self.environment = {**os.environ, "DUALKV_HEAD_DIMS": "64", **settings}
        self.environment["PYTHONPATH"] = os.pathsep.join([str(self.root), str(self.root / "tests")])

    def build(self) -> None:
        """Compiles the extension into the tree. CalledProcessError if that fails."""
        command = [sys.executable, "setup.py", "build_ext", "--inplace"]
        subprocess.run(command, cwd=self.root, env=self.environment, check=True, capture_output=True, text=True)

    def test(self, tests: str, select: str) -> str:
        """What pytest says: "passed", "failed", "hung", or "broken" where it could not run the tests at all."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", tests]
        command += ["-k", select] if select else []
        try:
            result = subprocess.run(
                command, cwd=self.root, env=self.environment, timeout=TEST_SECONDS, capture_output=True, text=True
            )
        except subprocess.TimeoutExpired:
            return "hung"
        summary = result.stdout.strip().rpartition("\n")[2]
        if " error" in summary or result.returncode not in (0, 1):
            return "broken"
        return next((word for word in ("failed", "passed") if f" {word}" in summary), "broken")

    def verdict(self, mutant: Mutant) -> str:
        """Applies the mutant, builds, tests, and takes it back."""
        path = self.root / mutant.file
        original = path.read_text()
        path.write_text(mutant.broken(self.root))
        try:
            if mutant.needs_gpu:
                self.build()
            outcome = self.test(mutant.tests, mutant.select)
        except subprocess.CalledProcessError as error:
            print(f"{error.stdout}{error.stderr}"[-3000:], file=sys.stderr)
            outcome = "does not compile"
        finally:
            path.write_text(original)
        return {"failed": "caught", "hung": "caught", "passed": "SURVIVED"}.get(outcome, outcome.upper())

    def baseline(self, mutants: Iterable[Mutant]) -> list[str]:
        """Selections of tests that the unchanged tree does not pass."""
        selections = sorted({(mutant.tests, mutant.select) for mutant in mutants})
        return [f"{tests} -k '{select}'" for tests, select in selections if self.test(tests, select) != "passed"]


def run_mutants(mutants: list[Mutant]) -> int:
    """Prints a line for each mutant. Returns the exit status: 0 if all were caught."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder))
        if any(mutant.needs_gpu for mutant in mutants):
            print("building the unchanged tree", flush=True)
            tree.build()
        failing = tree.baseline(mutants)
        if failing:
            print("the unchanged tree does not pass: " + "; ".join(failing))
            return 1
        missed = 0
        for mutant in mutants:
            started = time.monotonic()
            verdict = tree.verdict(mutant)
            missed += verdict != "caught"
            print(f"{verdict:<18}{time.monotonic() - started:6.0f} s  {mutant.name}", flush=True)
        print(f"{len(mutants) - missed} of {len(mutants)} mutants caught")
        return int(missed > 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="only what needs no GPU")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--only", metavar="TEXT", help="mutants with this in their name")
    arguments = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if not (arguments.cpu and mutant.needs_gpu)]
    if arguments.only:
        chosen = [mutant for mutant in chosen if arguments.only in mutant.name]
    if arguments.list:
        print("\n".join(f"{'gpu' if mutant.needs_gpu else 'cpu'}  {mutant.name}" for mutant in chosen))
        return 0
    return run_mutants(chosen)


if __name__ == "__main__":
    sys.exit(main())
