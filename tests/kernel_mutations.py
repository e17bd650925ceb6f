"""The mutants of the kernels, which need a GPU and a compiler; those for Hopper are in hopper_mutations.py."""

from __future__ import annotations

from mutations import Mutant

PROPERTIES = "tests/test_kernels_properties.py"
MEMORY = "tests/test_kernels_memory.py"
KERNELS = "tests/test_kernels.py"
PACKED, PACKED_CUDA = "tests/test_shared_prompt_kernels.py", "tests/test_shared_prompt_cuda.py"

SOFTMAX, BLOCK = "csrc/core/online_softmax.h", "csrc/core/query_block.h"
API, PROBLEM = "csrc/api.cpp", "csrc/problem.h"
FORWARD, BACKWARD, DQ = "csrc/sm80/forward.h", "csrc/sm80/backward.h", "csrc/sm80/backward_dq.h"

SMALL = "64-heads0"  # the only configuration of the tests that a build for head dim 64 serves
WIDE = "256-heads6"  # and one for head dim 256


def select(test: str, family: str, configuration: str) -> str:
    return " and ".join(word for word in (test, family, configuration) if word)


def mixed(family: str = "", configuration: str = SMALL) -> str:
    """Results of all kinds of sequences, by one family of kernels or each."""
    return select("test_mixed_groups", family, configuration)


def padding(family: str = "", configuration: str = SMALL) -> str:
    """NaN in all rows of no sequence."""
    return select("test_nan_in_bytes", family, configuration)


def leak(family: str = "", configuration: str = SMALL) -> str:
    """NaN in one sequence."""
    return select("test_nan_in_a_sequence", family, configuration)


# In what both families use.
SHARED_MUTANTS = [
    Mutant(
        "the heads of a split tile share slots",
        "csrc/core/kv_block.h",
        "slot = item.slot < 0 ? -1 : item.slot + kv_head;",
        "slot = item.slot < 0 ? -1 : item.slot;",
        KERNELS,
        "shared_context_gradient and 64-64",
    ),
    Mutant(
        "a row that sees no key is divided by its sum",
        SOFTMAX,
        "return empty ? 0.f : share / sum;",
        "return share / sum;",
        PROPERTIES,
        mixed(),
    ),
    Mutant(
        "a sink is not in the LSE",
        SOFTMAX,
        "joined_top + logf(sum);",
        "joined_top + logf(sum - expf(sink - joined_top));",
        PACKED,
        "test_sinks and 64-heads0",
    ),
    Mutant(
        "autograd's node forgets that gradients are to be deterministic",
        "csrc/packed_node.h",
        "deterministic || wants_determinism());",
        "wants_determinism());",
        PACKED_CUDA,
        "what_makes_a_backward_deterministic and argument",
    ),
    Mutant(
        "autograd's node hands V's gradient to K",
        "csrc/packed_node.h",
        "std::tie(result[0], result[1], result[2]) =",
        "std::tie(result[0], result[2], result[1]) =",
        PACKED,
        "is_the_operator and 64-heads0",
    ),
    Mutant(
        "the wrong head of the keys",
        BLOCK,
        "kv_head = head / shape.heads_per_group();",
        "kv_head = head % shape.num_kv_heads;",
        PROPERTIES,
        mixed(),
    ),
    Mutant(
        "delta ignores the gradient of the LSE",
        "csrc/kernels/row_statistics.h",
        "if (p.dlse) delta -= p.dlse[at];",
        "",
        PROPERTIES,
        "gradient_of_the_lse and 64-heads0",
    ),
    Mutant(
        "the first part of a split tile is lost",
        "csrc/kernels/convert_dkv.h",
        "for (int part = 0; part < split.parts; ++part, source += stride) {",
        "source += stride;\n    for (int part = 1; part < split.parts; ++part, source += stride) {",
        PROPERTIES,
        "split_owners and 64-heads0",
    ),
    Mutant(
        "parts of a split tile are summed in any order",
        "csrc/kernels/convert_dkv.h",
        "for (int part = 0; part < split.parts; ++part, source += stride) {",
        "const bool backwards = clock64() & 1;\n"
        "    if (backwards) source += (split.parts - 1) * stride;\n"
        "    for (int part = 0; part < split.parts; ++part, source += backwards ? -stride : stride) {",
        PROPERTIES,
        "repeat_bit_for_bit and 64-heads0",
    ),
    Mutant(
        "deterministic mode takes the default path",
        API,
        "const bool separate_dq = deterministic || !selected.kernel.sums_dq;",
        "const bool separate_dq = !selected.kernel.sums_dq;",
        PROPERTIES,
        "every_switch",
    ),
    Mutant(
        "keys that no query sees keep what was in memory",
        "csrc/kernels/prepare_backward.cu",
        "clear_row(cleared, row, threadIdx.x % 32, 32);",
        "if (row < 0) clear_row(cleared, row, threadIdx.x % 32, 32);",
        MEMORY,
        padding(),
    ),
    Mutant(
        "rows of no sequence keep what was in memory",
        "csrc/kernels/clear_rows.h",
        "if (!owned[i]) clear(first + i);",
        "if (!owned[i] && layout.num_segments == 0) clear(first + i);",
        MEMORY,
        padding(),
    ),
    Mutant(
        "misaligned tensors are not copied",
        PROBLEM,
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

# In the portable kernels.
PORTABLE_MUTANTS = [
    Mutant(
        "forward: no mask",
        FORWARD,
        "if (needs_mask(tile, work.q_tile, Config::kBlockN, p.shape.causal)) {",
        "if (false) {",
        PROPERTIES,
        mixed("sm80"),
    ),
    Mutant(
        "forward: earlier sums are not rescaled",
        FORWARD,
        "      scale_rows(o, rescale);\n",
        "",
        PROPERTIES,
        "moves_with_every_tile and sm80 and 64-heads0",
    ),
    Mutant(
        "forward: K and V rows behind a region are read",
        "csrc/sm80/query_block.h",
        "view.row_stride, 0, tile.valid, head_dim);",
        "view.row_stride, 0, Config::kBlockN, head_dim);",
        MEMORY,
        padding("sm80"),
    ),
    Mutant(
        "forward: the maximum starts from a number that depends on the block",
        FORWARD,
        "  OnlineSoftmax<kM16> softmax;\n",
        "  OnlineSoftmax<kM16> softmax;\n  if (blockIdx.x % 2) softmax.row_max[0][0] = 30.f;\n",
        PROPERTIES,
        "bit_identical and sm80 and 64-heads0",
    ),
    Mutant(
        "backward: no mask",
        BACKWARD,
        "if (needs_mask(tile, step.range, step.m_block, kBlockM, kBlockN)) {",
        "if (false) {",
        PROPERTIES,
        mixed("sm80"),
    ),
    Mutant(
        "backward: K and V rows behind a region are read",
        BACKWARD,
        "load_rows<TileKv, kBlockN, kThreads>(shared, kv.k.at(tile.row, kv_head), kv.k.row_stride, 0, tile.valid,",
        "load_rows<TileKv, kBlockN, kThreads>(shared, kv.k.at(tile.row, kv_head), kv.k.row_stride, 0, kBlockN,",
        MEMORY,
        padding("sm80"),
    ),
    Mutant(
        "backward: foreign rows of Q are read",
        BACKWARD,
        "p.q.at(row, step.head), p.q.row_stride, low, high,",
        "p.q.at(row, step.head), p.q.row_stride, 0, p.shape.q_rows - row,",
        MEMORY,
        padding("sm80"),
    ),
    Mutant(
        "backward: foreign rows of dO are read",
        BACKWARD,
        "p.dout.at(row, step.head), p.dout.row_stride, low, high,",
        "p.dout.at(row, step.head), p.dout.row_stride, 0, p.shape.q_rows - row,",
        MEMORY,
        padding("sm80"),
    ),
    Mutant(
        "backward: dQ of foreign rows is added",
        BACKWARD,
        "if (step.has_foreign_rows(kBlockM)) {",
        "if (false) {",
        MEMORY,
        leak("sm80"),
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
        mixed("sm80"),
    ),
    Mutant(
        "deterministic dQ: no mask",
        DQ,
        "if (needs_mask(tile, work.q_tile, Config::kBlockN, p.shape.causal)) {",
        "if (false) {",
        PROPERTIES,
        mixed("sm80"),
    ),
]
