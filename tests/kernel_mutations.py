"""The mutants of the kernels, which need a GPU and a compiler."""

from __future__ import annotations

from mutations import Mutant

PROPERTIES = "tests/test_kernels_properties.py"
MEMORY = "tests/test_kernels_memory.py"
KERNELS = "tests/test_kernels.py"

SOFTMAX, BLOCK, API = "csrc/core/online_softmax.h", "csrc/core/query_block.h", "csrc/api.cpp"
FORWARD, BACKWARD, DQ = "csrc/sm80/forward.h", "csrc/sm80/backward.h", "csrc/sm80/backward_dq.h"
SM90_FORWARD, SM90_DQ = "csrc/sm90/forward.h", "csrc/sm90/backward_dq.h"
SM90_WALK, SM90_BACKWARD, SM90_WIDE = "csrc/sm90/kv_walk.h", "csrc/sm90/backward.h", "csrc/sm90/backward_wide.h"

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
        "return empty ? 0.f : 1.f / sum;",
        "return 1.f / sum;",
        PROPERTIES,
        mixed(),
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
        "csrc/kernels/delta.cu",
        "if (p.dlse) sum -= p.dlse[at];",
        "",
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
        "const bool separate_dq = deterministic || !selected.kernel.convert_dq;",
        "const bool separate_dq = !selected.kernel.convert_dq;",
        PROPERTIES,
        "every_switch",
    ),
    Mutant(
        "rows of no sequence keep what was in memory",
        API,
        "const Tensor out = zeros(q, q.sizes(), q.scalar_type());",
        "const Tensor out = uninitialised(q, q.sizes(), q.scalar_type());",
        MEMORY,
        padding(),
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
        "rising and sm80 and 64-heads0",
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

# In the kernels for Hopper.
HOPPER_MUTANTS = [
    Mutant(
        "Hopper forward: no mask",
        SM90_FORWARD,
        "if (!masked.needs_mask(n)) return;",
        "return;",
        PROPERTIES,
        mixed("sm90"),
    ),
    Mutant(
        "Hopper forward: V rows behind a region are operands",
        SM90_FORWARD,
        "    if (!masked.is_tail(n)) return;\n",
        "    return;\n",
        MEMORY,
        padding("sm90"),
    ),
    Mutant(
        "Hopper forward: a pack has but one head",
        SM90_FORWARD,
        "{ return (group * 64 + row) % p.packed_heads; }",
        "{ return 0; }",
        PROPERTIES,
        mixed("sm90"),
    ),
    Mutant(
        "Hopper forward: a query for every row of a pack",
        SM90_FORWARD,
        "{ return (group * 64 + row) / p.packed_heads; }",
        "{ return group * 64 + row; }",
        PROPERTIES,
        mixed("sm90"),
    ),
    Mutant(
        "Hopper forward: earlier sums are not rescaled",
        SM90_FORWARD,
        "      if (moved) scale_rows(o, rescale);\n",
        "",
        PROPERTIES,
        "rising and sm90 and 64-heads0",
    ),
    Mutant(
        "Hopper forward: the values of another tile",
        SM90_FORWARD,
        "load_v(*work, n - 1);",
        "load_v(*work, n);",
        PROPERTIES,
        mixed("sm90"),
    ),
    Mutant(
        "Hopper forward: rows behind a query tile are written",
        SM90_FORWARD,
        "      if (query >= work.q_tile.rows) continue;\n",
        "",
        MEMORY,
        padding("sm90"),
    ),
    Mutant(
        "Hopper: keys of the wrong region",
        "csrc/sm90/maps.h",
        "return region == Region::context ? context : decoded;",
        "return context;",
        PROPERTIES,
        mixed("sm90"),
    ),
    Mutant(
        "Hopper backward: foreign rows of Q are operands",
        SM90_WALK,
        "    zero_rows<TileQ, kBlockM>(shared.q(q_stage), step.first_row(kBlockM), step.end_row(kBlockM));\n",
        "",
        MEMORY,
        padding("sm90"),
    ),
    Mutant(
        "Hopper backward: foreign rows of dO are operands",
        SM90_WALK,
        "    zero_rows<TileQ, kBlockM>(shared.dout(dout_stage), step.first_row(kBlockM), step.end_row(kBlockM));\n",
        "",
        MEMORY,
        padding("sm90"),
    ),
    Mutant(
        "Hopper backward: foreign rows are looked for one step late",
        SM90_WALK,
        "if (has_foreign_rows(next.range, next.m_block, kBlockM)) step.flags",
        "if (has_foreign_rows(step.range, step.m_block, kBlockM)) step.flags",
        MEMORY,
        padding("sm90"),
    ),
    Mutant(
        "Hopper backward: masks are looked for one step late",
        SM90_WALK,
        "if (needs_mask(next.tile, next.range, next.m_block,",
        "if (needs_mask(next.tile, step.range, step.m_block,",
        PROPERTIES,
        mixed("sm90"),
    ),
    Mutant(
        "Hopper backward: dQ of every head goes to the first",
        SM90_WALK,
        "step.dq_tile = step.head * ceil_div(p.shape.q_rows, kBlockM) + step.m_block;",
        "step.dq_tile = step.m_block;",
        PROPERTIES,
        mixed("sm90"),
    ),
    Mutant(
        "Hopper backward: the slots of split tiles overlap",
        SM90_WALK,
        "(int64_t{block.slot} * 2 + index)",
        "(int64_t{block.slot} + index)",
        PROPERTIES,
        "split_owners and sm90 and 64-heads0",
    ),
    Mutant(
        "Hopper backward: dK and dV rows behind a region are written",
        SM90_WALK,
        "if (row >= block.tile.valid || col >= p.shape.head_dim) return;",
        "if (col >= p.shape.head_dim) return;",
        MEMORY,
        leak("sm90"),
    ),
    Mutant(
        "Hopper backward: the first step is not masked",
        SM90_BACKWARD,
        "    mask(s, steps[q.stage]);\n",
        "",
        PROPERTIES,
        mixed("sm90"),
    ),
    Mutant(
        "Hopper backward: no step but the first is masked",
        SM90_BACKWARD,
        "if (flags & FlaggedStep::kNextMasked) mask(s, steps[next_q.stage]);",
        "",
        PROPERTIES,
        mixed("sm90"),
    ),
    Mutant(
        "Hopper backward: dS is not masked",
        SM90_BACKWARD,
        "if (flags & FlaggedStep::kNextMasked) mask(dp, steps[next_q.stage]);",
        "",
        MEMORY,
        padding("sm90"),
    ),
    Mutant(
        "Hopper backward: the LSE of another step",
        SM90_BACKWARD,
        "load_statistic(lse, shared.lse(next_q.stage));",
        "load_statistic(lse, shared.lse(q.stage));",
        PROPERTIES,
        mixed("sm90"),
    ),
    Mutant(
        "Hopper backward: the delta of another step",
        SM90_BACKWARD,
        "load_statistic(delta, shared.delta(next_dout.stage));",
        "load_statistic(delta, shared.delta(dout.stage));",
        PROPERTIES,
        mixed("sm90"),
    ),
    Mutant(
        "Hopper backward: dQ of foreign rows is added",
        SM90_BACKWARD,
        "if (flags & FlaggedStep::kForeign) {",
        "if (false) {",
        MEMORY,
        leak("sm90"),
    ),
    Mutant(
        "Hopper backward: K rows behind a region are operands of dQ",
        SM90_BACKWARD,
        "    this->template zero_rows<TileKv, kBlockN>(shared.k(), 0, block.tile.valid);  // an operand of dQ\n",
        "",
        MEMORY,
        padding("sm90"),
    ),
    Mutant(
        "Hopper backward: dK is not scaled",
        SM90_BACKWARD,
        "Base::store(dk, 0, p.shape.softmax_scale, out.k);",
        "Base::store(dk, 0, 1.f, out.k);",
        PROPERTIES,
        mixed("sm90"),
    ),
    Mutant(
        "Hopper backward: dQ is not scaled",
        "csrc/sm90/convert_dq.h",
        "col, dq, p.shape.softmax_scale, thread % 32);",
        "col, dq, 1.f, thread % 32);",
        PROPERTIES,
        mixed("sm90"),
    ),
    Mutant(
        "Hopper backward: the statistics of other rows",
        "csrc/params.h",
        "(row - within) + within % 8 / 2 * 4 + within / 8 * 2 + within % 2;",
        "(row - within) + within;",
        PROPERTIES,
        mixed("sm90"),
    ),
    Mutant(
        "Hopper deterministic dQ: no mask",
        SM90_DQ,
        "const bool is_masked = masked.needs_mask(n);",
        "const bool is_masked = false;",
        PROPERTIES,
        mixed("sm90"),
    ),
    Mutant(
        "Hopper deterministic dQ: K rows behind a region are operands",
        SM90_DQ,
        "    if (!masked.is_tail(n)) return;\n",
        "    return;\n",
        MEMORY,
        padding("sm90"),
    ),
    Mutant(
        "Hopper deterministic dQ: rows behind a query tile are written",
        SM90_DQ,
        "      if (row >= work.q_tile.rows) continue;\n",
        "",
        MEMORY,
        padding("sm90"),
    ),
    Mutant(
        "Hopper deterministic dQ: dQ is not scaled",
        SM90_DQ,
        "pack2<T>(dq[0][j][2 * half] * p.shape.softmax_scale, dq[0][j][2 * half + 1] * p.shape.softmax_scale);",
        "pack2<T>(dq[0][j][2 * half], dq[0][j][2 * half + 1]);",
        PROPERTIES,
        mixed("sm90"),
    ),
    Mutant(
        "Hopper wide backward: P is not masked",
        SM90_WIDE,
        "    this->exponentiate(x, lse);\n    if (is_masked) mask(x, step);\n",
        "    this->exponentiate(x, lse);\n",
        PROPERTIES,
        mixed("sm90", WIDE),
        head_dim=256,
    ),
    Mutant(
        "Hopper wide backward: dS is not masked",
        SM90_WIDE,
        "    probabilities.advance();\n    if (is_masked) mask(x, step);\n",
        "    probabilities.advance();\n",
        MEMORY,
        padding("sm90", WIDE),
        head_dim=256,
    ),
    Mutant(
        "Hopper wide backward: the LSE of another step",
        SM90_WIDE,
        "load_statistic(lse, shared.lse(next_q.stage));",
        "load_statistic(lse, shared.lse(q.stage));",
        PROPERTIES,
        mixed("sm90", WIDE),
        head_dim=256,
    ),
    Mutant(
        "Hopper wide backward: the delta of another step",
        SM90_WIDE,
        "load_statistic(delta, shared.delta(next_dout.stage));",
        "load_statistic(delta, shared.delta(dout.stage));",
        PROPERTIES,
        mixed("sm90", WIDE),
        head_dim=256,
    ),
    Mutant(
        "Hopper wide backward: dK is not scaled",
        SM90_WIDE,
        "consumer.store(consumer.sum, 0, p.shape.softmax_scale, out.k);",
        "consumer.store(consumer.sum, 0, 1.f, out.k);",
        PROPERTIES,
        mixed("sm90", WIDE),
        head_dim=256,
    ),
]
