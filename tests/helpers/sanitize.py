# SPDX-License-Identifier: BSD-3-Clause
"""A small matrix of calls, and compute-sanitizer over them.

    pytest -m slow tests/kernels/test_races.py                                        every tool
    python tests/helpers/sanitize.py hostile                                          a part, in this process
    python tests/helpers/sanitize.py trees packs --head-dim 128 --tool memcheck       the same under a tool
    python tests/helpers/sanitize.py --head-dim 128 --only-build FOLDER               racecheck's build, then on a GPU:
    python tests/helpers/sanitize.py trees packs --head-dim 128 --tool racecheck --built FOLDER

Memory is allocated tensor by tensor (no caching allocator), so that an access past a tensor is an access past an
allocation. racecheck looks at a build of its own on Hopper, see FOLLOWED.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from groups import Batch, Group, build_groups, pack, run
from launches import CHOICE, DEVICE, kernel_families, only_kernels_of, use_kernels
from mutants import Tree, has_hopper, read_mutants

HEAD_DIMS = (64, 80, 96, 128, 192, 256, 512)
HOSTILE_HEAD_DIMS = (64, 128, 256, 512)  # one of each shape of kernel: what happens to offsets does not depend on it
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PARTS = ("ragged", "split", "trees", "packs", "hostile")
PACKED_HEAD_DIMS = (64, 128)
SUMMARY = re.compile(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)")
TOOL_SECONDS = 1800

synchronize: Callable[[], None] = torch.cuda.synchronize if DEVICE == "cuda" else lambda: None

# racecheck knows neither that __syncwarp orders the accesses of a warp before the arrival of its
# first lane, nor what bar.arrive orders: it reports hazards between accesses that these separate.
# For it every lane arrives, all warps wait.
FOLLOWED = read_mutants("""
# csrc/sm90/tile.h: a stage is empty when all lanes say so
- ptx::mbarrier_init(empty(), consumer_warps);
+ ptx::mbarrier_init(empty(), consumer_warps * 32);
# csrc/sm90/tile.h: all lanes say so
- if (lane == 0) ptx::mbarrier_arrive(empty());
+ ptx::mbarrier_arrive(empty());
# csrc/sm90/tile.h: what warps write is there when all lanes say so
- if (lane == 0) ptx::mbarrier_arrive(full());
+ ptx::mbarrier_arrive(full());
# csrc/sm90/ds_exchange.h: dS is ready when all lanes say so
- ds_ready(buffer).init(kConsumerWarps, kConsumerWarps);
+ ds_ready(buffer).init(kConsumerWarps, kConsumerWarps * 32);
# csrc/sm90/backward.h: warpgroups wait for the warp that sends dQ
- ptx::named_barrier_arrive(kBarrierStaged + group, kWarpgroup + 32);
+ ptx::named_barrier_sync(kBarrierStaged + group, kWarpgroup + 32);
# csrc/sm90/backward.h: dQ has left shared memory when all lanes say so
- ptx::mbarrier_init(dq_read(group), 1);
+ ptx::mbarrier_init(dq_read(group), 32);
# csrc/sm90/backward.h: all lanes of the warp that sends dQ say so
- ptx::mbarrier_arrive(shared.dq_read(group));
-     }
+ }
+     ptx::mbarrier_arrive(shared.dq_read(group));
# csrc/sm90/backward.h: the issue order is passed when all lanes say so
- ptx::mbarrier_init(issue_order(group), 4);
+ ptx::mbarrier_init(issue_order(group), 128);
# csrc/sm90/backward.h: all lanes say so
- if (lane == 0) ptx::mbarrier_arrive(shared.issue_order(group ^ 1));
+ ptx::mbarrier_arrive(shared.issue_order(group ^ 1));
# csrc/sm90/backward_wide.h: probabilities are ready when all lanes say so
- probabilities_ready(buffer).init(4, 4);
+ probabilities_ready(buffer).init(4, 128);
""")

# --- the matrix -------------------------------------------------------------------------------------------------------

RAGGED = (
    Group(70, ((70, 0), (33, 33), (1, 1), (0, 0), (65, 65))),
    Group(0, ((40, 40), (9, 4))),
    Group(5, ()),
    Group(129, ((140, 11), (0, 30), (64, 64))),
)
# Enough queries of one KV head that the owners of the context are split.
SPLIT = (Group(40, ((40, 0), *(((16, 16),) * 40))),)
INT = torch.iinfo(torch.int32)
HOSTILE_OFFSETS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "negative": lambda cu, rows: cu - rows - 7,
    "huge": lambda cu, rows: torch.full_like(cu, INT.max),
    "most negative": lambda cu, rows: torch.full_like(cu, INT.min),
    "alternating extremes": lambda cu, rows: torch.tensor([INT.min, INT.max] * len(cu), dtype=cu.dtype)[: len(cu)],
    "decreasing": lambda cu, rows: cu.flip(0),
    "past the end": lambda cu, rows: cu + rows // 2,
    "everything each time": lambda cu, rows: torch.arange(len(cu), dtype=cu.dtype) % 2 * rows,
    "random": lambda cu, rows: torch.randint(-2 * rows - 2, 3 * rows + 3, cu.shape, dtype=cu.dtype),
}
OFFSETS = ("cu_seqlens_q", "cu_seqlens_k_decoded", "cu_seqlens_context", "cu_seqs_per_context")


def calls(part: str, head_dim: int) -> Iterator[tuple[str, Batch]]:
    """Names and batches: both types and masks, strided tensors; hostile offsets in one argument and in all at once."""
    torch.manual_seed(0)

    def batch(groups: tuple[Group, ...], index: int, causal: bool, **options: object) -> Batch:
        dtype = (torch.bfloat16, torch.float16)[index % 2]
        return build_groups(groups, head_dim=head_dim, dtype=dtype, causal=causal, device=DEVICE, **options)

    if part == "ragged":
        for index, (causal, packed) in enumerate(product((True, False), (False, True))):
            made = batch(RAGGED, index, causal, heads=(4, 2), slack=(3, 70))
            yield f"ragged, causal={causal}, packed={packed}", pack(made) if packed else made
    elif part == "split":
        for index, causal in enumerate((True, False)):
            yield f"split owners, causal={causal}", batch(SPLIT, index, causal, heads=(8, 1))
    else:
        for index, (kind, names) in enumerate(product(HOSTILE_OFFSETS, (*((name,) for name in OFFSETS), OFFSETS))):
            made = batch(RAGGED, index, index % 3 != 0, heads=(4, 2))
            rows = dict(zip(OFFSETS, (len(made.q), len(made.k_decoded), len(made.k_context), len(made.table))))
            changes = {name: HOSTILE_OFFSETS[kind](getattr(made, name).cpu(), rows[name]) for name in names}
            yield f"hostile, {kind} {' '.join(names)}", made.replace(**{k: v.to(DEVICE) for k, v in changes.items()})


def run_call(name: str, batch: Batch, is_honest: bool) -> None:
    """Default and deterministic."""
    for result_name, value in run(batch)._asdict().items():
        host = value.cpu()  # a check on the device would be one more kernel under the sanitizer
        good = host.isfinite() | host.isneginf() if result_name == "lse" else host.isfinite()
        if is_honest and not bool(good.all()):
            raise AssertionError(f"{name}: {int((~good).sum())} of {good.numel()} values of {result_name} not finite")
    run(batch, deterministic=True)
    synchronize()


def hostile_tables() -> Iterator[torch.Tensor]:
    """Arbitrary numbers of any size, and a right table with single columns of such numbers."""
    right = [[0, 30, 0, 0, 30, 0, -1, 4], [30, 40, 30, 30, 40, 30, 0, 3], [70, 9, 70, 70, 9, 70, 1, 3]]
    right += [[79, 20, 30, 79, 20, 30, 0, 4], [99, 10, 0, 99, 10, 0, -1, 5]]
    for bits in (2, 4, 9, 31):
        size = 2**bits - 1
        yield torch.randint(-size, size, (9, 8), dtype=torch.int32)
        for column in range(8):
            table = torch.tensor(right, dtype=torch.int32)
            table[:, column] = torch.randint(-size, size, (len(right),), dtype=torch.int32)
            yield table


def run_hostile_tables(head_dim: int) -> None:
    """The operators with such tables, as a caller with ready-made ones could pass them; and trees of such numbers."""
    from flash_attn_dualkv import flash_attn_tree_varlen_func, ops

    batch = build_groups(RAGGED, head_dim=head_dim, heads=(4, 2), device=DEVICE)
    q, k, v, k_decoded, v_decoded = batch.inputs
    for table, causal in product(hostile_tables(), (True, False)):
        nodes = table.to(DEVICE)
        for keys in ((k, v, k_decoded, v_decoded), (k_decoded, v_decoded, None, None)):
            options = (0.1, causal, -1, 0.0, False, 1 << 20)
            out, lse = ops.forward(q, *keys, None, nodes, *options, False)
            for deterministic in (True, False):
                ops.backward(batch.dout, None, q, *keys, None, out, lse, nodes, *options, deterministic)
    rows = len(k_decoded)
    leaves = [one[:rows].detach().requires_grad_() for one in (q, k_decoded, v_decoded)]
    numbers = [one(torch.arange(8, dtype=torch.int32) * rows // 7, rows) for one in HOSTILE_OFFSETS.values()]
    for cu_seqlens, parents in product(numbers, numbers):
        out = flash_attn_tree_varlen_func(*leaves, cu_seqlens.to(DEVICE), parents[:7].to(DEVICE))
        torch.autograd.grad(out, leaves, batch.dout[:rows])
    synchronize()


# A path of short nodes, whose last keys share tiles; a node of no keys, leaves at several depths,
# another root.
TREE = [48, 21, 70, 0, 33, 128, 9, 65], [-1, 0, 0, 2, 3, 4, 2, -1]


# Heads of queries and keys: packs of 16 heads, of 4, and of 6 in the forward and 2 in the backward.
PACKS = (16, 1), (8, 2), (6, 1)


def run_trees(head_dim: int) -> None:
    """In both types, default and deterministic; 192 also with MLA's narrower values."""
    for dtype, deterministic in product((torch.bfloat16, torch.float16), (False, True)):
        for head_dim_v in (head_dim, 128) if head_dim == 192 else (head_dim,):
            run_tree(head_dim, (4, 2), dtype, -1, deterministic, head_dim_v)


def run_packs(head_dim: int) -> None:
    """Tiles that hold rows of several heads, also with a window that ends in them; default and deterministic."""
    for index, (heads, window, deterministic) in enumerate(product(PACKS, (-1, 60), (False, True))):
        run_tree(head_dim, heads, (torch.bfloat16, torch.float16)[index // 2 % 2], window, deterministic)


def run_tree(
    head_dim: int,
    heads: tuple[int, int],
    dtype: torch.dtype,
    window: int,
    deterministic: bool,
    head_dim_v: int | None = None,
) -> None:
    """Every result is a number. ``head_dim_v``: of V; default: ``head_dim``."""
    from tree_cases import offsets_and_parents

    from flash_attn_dualkv import flash_attn_tree_varlen_func

    torch.manual_seed(0)
    rows = sum(TREE[0]) + 3
    sizes = (heads[0], head_dim), (heads[1], head_dim), (heads[1], head_dim_v or head_dim)
    leaves = [torch.randn(rows, *one, dtype=dtype, device=DEVICE).requires_grad_() for one in sizes]
    options = {"window_size": (window, 0 if window >= 0 else -1), "deterministic": deterministic}
    out = flash_attn_tree_varlen_func(*leaves, *offsets_and_parents(TREE, DEVICE), **options)
    results = out, *torch.autograd.grad(out, leaves, torch.ones_like(out))
    if not all(bool(one.cpu().isfinite().all()) for one in results):
        raise AssertionError(f"a tree, d={head_dim}, H={heads}, {dtype}, {options}: not finite")


def run_part(part: str, head_dims: tuple[int, ...]) -> None:
    """Every call of a part in this process, by the family of kernels that the environment asks for, or by each.

    Raises AssertionError if the kernels of another family took over some of the work.
    """
    chosen = os.environ.get(CHOICE)
    some = {"hostile": HOSTILE_HEAD_DIMS, "packs": PACKED_HEAD_DIMS}.get(part, head_dims)
    head_dims = tuple(dim for dim in head_dims if dim in some) or head_dims
    for family, head_dim in ((one, dim) for dim in head_dims for one in kernel_families(dim) if one == (chosen or one)):
        with use_kernels(family), only_kernels_of(family):
            if part in ("trees", "packs"):
                print(f"{family} d={head_dim} {part}", flush=True)
                (run_trees if part == "trees" else run_packs)(head_dim)
                continue
            for name, batch in calls(part, head_dim):
                print(f"{family} d={head_dim} {name}", flush=True)
                run_call(name, batch, part != "hostile")
            if part == "hostile":
                run_hostile_tables(head_dim)


# --- the tools --------------------------------------------------------------------------------------------------------


def judge(text: str, returncode: int) -> str:
    """What a tool's output says."""
    counts = [int(first or second) for first, second in SUMMARY.findall(text)]
    if sum(counts):
        return f"{sum(counts)} errors"
    return "clean" if counts and returncode == 0 else "failed"


def find_sanitizer() -> str | None:
    folders = [f"{one}/bin" for one in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if one]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ["PATH"], *folders]))


def racecheck_tree(folder: Path, head_dims: Sequence[int] = ()) -> Tree:
    """Builds what racecheck looks at, see FOLLOWED, in the folder; of some head dims, or all."""
    settings = {"DUALKV_HEAD_DIMS": ",".join(map(str, head_dims))} if head_dims else {}
    tree = Tree(folder, DUALKV_ARCHS="90", **settings)
    for change in FOLLOWED:
        change.apply(tree.root)
    tree.build()
    return tree


def run_tool(
    tool: str,
    sanitizer: str,
    folder: Path,
    parts: Sequence[str] = PARTS,
    head_dims: Sequence[int] = (),
    is_built: bool = False,
) -> str:
    """Runs the matrix under a tool and returns its verdict; prints what the tool says unless that is `clean`.

    Args:
        folder: for racecheck's build; `is_built`: it is there already.
        head_dims: all if empty.
    """
    # initcheck must see every write to memory; the others look at this library's kernels alone.
    which = [] if tool == "initcheck" else ["--kernel-regex", "kns=dualkv"]
    # Hostile offsets are a question of memory, and by far the most calls.
    parts = [part for part in parts if part != "hostile" or tool == "memcheck"]
    script, settings = Path(__file__).resolve(), {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    if tool == "racecheck" and has_hopper():
        tree = Tree(folder, is_there=True) if is_built else racecheck_tree(folder, head_dims)
        script, settings = tree.root / "tests/helpers/sanitize.py", tree.environment
    environment = {**settings, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "DUALKV_DEBUG": "0"}
    chosen = [word for dim in head_dims for word in ("--head-dim", str(dim))]
    command = [sanitizer, "--tool", tool, "--error-exitcode", "99", *which, sys.executable, str(script)]
    result = subprocess.run(
        ["timeout", str(TOOL_SECONDS), *command, *parts, *chosen],
        env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    verdict = judge(result.stdout, result.returncode)
    if verdict != "clean":
        print(result.stdout[-6000:])
    return verdict


def main(arguments: list[str] | None = None) -> int:
    """The command: 1 if a tool found something."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--head-dim", type=int, action="append", choices=HEAD_DIMS, help="may be repeated")
    parser.add_argument("--tool", choices=TOOLS, help="run the parts under it")
    parser.add_argument("--only-build", type=Path, metavar="FOLDER", help="racecheck's build, and nothing else")
    parser.add_argument("--built", type=Path, metavar="FOLDER", help="where that build is")
    options = parser.parse_args(arguments)
    head_dims = tuple(options.head_dim or ())
    if options.only_build:
        racecheck_tree(options.only_build, head_dims)
        return 0
    if not options.parts or not set(options.parts) <= {*PARTS}:
        parser.error(f"parts: expected some of {', '.join(PARTS)}, got {' '.join(options.parts) or 'none'}")
    if options.tool:
        sanitizer = find_sanitizer()
        if sanitizer is None:
            parser.error("compute-sanitizer is neither in PATH nor in CUDA_HOME/bin")
        with TemporaryDirectory() as folder:
            where = options.built or Path(folder)
            verdict = run_tool(options.tool, sanitizer, where, options.parts, head_dims, is_built=bool(options.built))
        print(f"{options.tool}: {verdict}")
        return 0 if verdict == "clean" else 1
    for part in options.parts:
        run_part(part, head_dims or HEAD_DIMS)
    # Autograd's worker thread may still be letting go of the last graph, and dies if the
    # interpreter goes first.
    time.sleep(0.5)
    return 0


if __name__ == "__main__":
    sys.exit(main())
