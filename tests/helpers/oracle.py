# SPDX-License-Identifier: BSD-3-Clause
"""What the kernels are measured against.

`reference` is the package's specification in fp64; `plain` is the same mathematics as ordinary PyTorch operations in
the input type, path by path, differentiated by autograd; `compare` is the accuracy rule: at most twice the
error of the plain computation, and a bound on the relative Frobenius error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from unittest.mock import patch

import torch
from groups import Batch, Results, SequenceRows
from torch import Tensor

from flash_attn_dualkv import reference as specification
from flash_attn_dualkv.calls import BackwardCall, ForwardCall, make_options
from flash_attn_dualkv.nodes import Node

FROBENIUS_BOUND = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-5, torch.float64: 1e-12}
LSE_BOUND = 1e-4  # fp32 scores and sums, whatever the input type
SCORES_AT_ONCE = 1 << 27  # elements of a matrix of scores of the reference: 1 GiB in fp64
KEYS_AT_ONCE = 1 << 13
ELEMENTS_AT_ONCE = 1 << 28  # elements of a tensor, scores of a sequence included: 2 GiB in fp64


def _nodes(batch: Batch) -> Tensor:
    """The batch's sequences, each below the context that it sees."""
    owners: dict[tuple[int, int], list[SequenceRows]] = {}
    for row in batch.table:
        owners.setdefault((row.context_begin, row.context_len), []).append(row)
    nodes: list[tuple[int, ...]] = []
    for (begin, length), own in owners.items():
        root, first = len(nodes), len(batch.k_context)
        nodes.append((0, 0, 0, begin, length, 0, -1, root + 1 + len(own)))
        for row in own:
            keys = first + row.decoded_begin, row.decoded_len
            nodes.append((row.q_begin, row.q_len, row.q_pos0, *keys, length, root, len(nodes) + 1))
    return torch.tensor(nodes, dtype=torch.int32, device=batch.q.device).reshape(-1, 8)


@torch.no_grad()
def reference(batch: Batch, dlse: Tensor | None = None) -> Results:
    """Attention and gradients in fp64: the package's own reference, with blocks as large as the device can hold."""
    inputs, nodes = [x.double() for x in batch.inputs], _nodes(batch)
    sizes = {"SCORE_ELEMENTS": SCORES_AT_ONCE, "KEY_BLOCK": KEYS_AT_ONCE, "ACCUMULATOR_ELEMENTS": 1 << 40}
    with patch.multiple(specification, **sizes):
        options = make_options(head_dim=1, softmax_scale=batch.scale, causal=batch.causal, mean_keys=1)
        out, lse = specification.forward(ForwardCall(*inputs, None, nodes, options))
        upstream = batch.dout.double(), None if dlse is None else dlse.double()
        gradients = specification.backward(BackwardCall(*upstream, *inputs, None, out, lse, nodes, options))
    return Results(out, lse, *gradients)


def plain(batch: Batch, dlse: Tensor | None = None) -> Results:
    """The same in the input type by ordinary PyTorch operations."""
    keys = [torch.cat(one) for one in ((batch.k_context, batch.k_decoded), (batch.v_context, batch.v_decoded))]
    found = plain_of_nodes(batch.q, keys, batch.dout, _nodes(batch), scale=batch.scale, causal=batch.causal, dlse=dlse)
    lse, (out, dq, *dkv) = found[1], (one.to(batch.q.dtype) for one in (found[0], *found[2:]))
    dk, dv = (one.split([len(batch.k_context), len(batch.k_decoded)]) for one in dkv)
    return Results(out, lse, dq, dk[0], dv[0], dk[1], dv[1])


def plain_of_nodes(
    q: Tensor,
    keys: Sequence[Tensor],
    dout: Tensor,
    nodes: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int = -1,
    softcap: float = 0.0,
    dlse: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """out, lse, dQ, dK, dV of a table, path by path in the input type; `keys`: K and V, one region behind the other.

    Autograd's gradient of an expanded tensor is one fp32 sum of the copies' rounded gradients, rounded once: what is
    returned are such sums.
    """
    wide, ratio, device = torch.promote_types(q.dtype, torch.float32), q.shape[1] // keys[0].shape[1], q.device
    sums = [torch.zeros(one.shape, dtype=wide, device=device) for one in (dout, q, *keys)]
    lse = torch.full((q.shape[1], len(q)), float("-inf"), dtype=torch.float64, device=device)
    paths: list[Tensor] = []
    for node in map(Node._make, nodes.tolist()):
        own = torch.arange(node.kv_begin, node.kv_begin + node.kv_len, device=device)
        path = torch.cat([paths[node.parent], own]) if node.parent >= 0 else own
        paths.append(path)
        positions = torch.arange(node.q_pos0, node.q_pos0 + node.q_len, device=device)
        behind = positions[:, None] - torch.arange(len(path), device=device)
        sees = (behind >= 0) | (not causal)
        if window >= 0:
            sees &= behind <= window
        used = sees.any(1).nonzero()[:, 0]
        if len(used) == 0:
            continue
        rows = used + node.q_begin
        copies = (one[path].repeat_interleave(ratio, 1) for one in keys)
        leaves = [one.detach().transpose(0, 1).contiguous().requires_grad_() for one in (q[rows], *copies)]
        scores = leaves[0] @ leaves[1].transpose(1, 2) * scale
        if softcap:
            scores = softcap * (scores / softcap).tanh()
        scores = scores.masked_fill(~sees[used], float("-inf"))
        outputs, upstream = [scores.softmax(-1) @ leaves[2]], [dout[rows].transpose(0, 1).contiguous()]
        if dlse is not None:
            outputs.append(scores.to(dlse.dtype).logsumexp(-1))
            upstream.append(dlse[:, rows])
        dq, *dkv = torch.autograd.grad(outputs, leaves, upstream)
        dkv = [one.to(wide).unflatten(0, (-1, ratio)).sum(1) for one in dkv]
        for total, index, one in zip(sums, (rows, rows, path, path), (outputs[0].detach(), dq, *dkv)):
            total.index_add_(0, index, one.to(wide).transpose(0, 1))
        lse[:, rows] = scores.detach().double().logsumexp(-1)
    return sums[0], lse, *sums[1:]


def rounding_floor(expected: Tensor, dtype: torch.dtype) -> float:
    """Errors below this say nothing: twice what a trip through `+ 0.3 - 0.3` costs in the type, plus 1e-5."""
    x = expected.to(dtype)
    return 2 * (x + 0.3 - 0.3 - x).abs().max().item() + 1e-5


def max_error(actual: Tensor, expected: Tensor) -> float:
    return (actual.double() - expected).abs().max().item()


def violations(name: str, actual: Tensor, plain_value: Tensor, expected: Tensor, dtype: torch.dtype) -> list[str]:
    """How `actual` breaks the accuracy rule; `expected` is fp64, `dtype` the input type."""
    if actual.shape != expected.shape:
        return [f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"]
    if expected.numel() == 0:
        return []
    if not bool(actual.isfinite().all()):
        return [f"{name}: {int((~actual.isfinite()).sum())} of {actual.numel()} values are not finite"]
    problems = []
    error, limit = max_error(actual, expected), 2 * max_error(plain_value, expected) + rounding_floor(expected, dtype)
    if not error <= limit:
        problems.append(f"{name}: max error {error:.3g} > {limit:.3g}")
    size = expected.norm().item()
    relative = (actual.double() - expected).norm().item() / max(size, 1e-300)
    if size > 1e-3 * expected.numel() ** 0.5 and not relative <= FROBENIUS_BOUND[dtype]:
        problems.append(f"{name}: relative Frobenius error {relative:.3g} > {FROBENIUS_BOUND[dtype]:.3g}")
    return problems


def lse_violations(actual: Tensor, expected: Tensor) -> list[str]:
    """-inf exactly where the reference has it, and within LSE_BOUND elsewhere."""
    if actual.shape != expected.shape:
        return [f"lse: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"]
    empty = expected.isneginf()
    if not torch.equal(actual.isneginf(), empty):
        return [f"lse: -inf in {int(actual.isneginf().sum())} rows, expected in {int(empty.sum())}"]
    error = (actual.double() - expected)[~empty].abs()
    bound = LSE_BOUND + 1e-6 * expected[~empty].abs()
    return [] if bool((error <= bound).all()) else [f"lse: max error {error.max().item():.3g} > {LSE_BOUND}"]


def compare(actual: Results, plain_values: Results, expected: Results, dtype: torch.dtype) -> list[str]:
    """Every violation of the accuracy rule in a result."""
    problems = lse_violations(actual.lse, expected.lse)
    for name in Results._fields:
        if name != "lse":
            value, plain_value, right = (getattr(results, name) for results in (actual, plain_values, expected))
            problems += violations(name, value, plain_value, right, dtype)
    return problems


def _head_slices(batch: Batch) -> Iterator[tuple[slice, slice]]:
    """(query heads, KV heads) in portions whose fp64 copies are a few GiB: heads do not know of each other."""
    kv_heads, ratio = batch.k_context.shape[1], batch.q.shape[1] // batch.k_context.shape[1]
    rows = max(batch.q.shape[0] * ratio, batch.k_context.shape[0], batch.k_decoded.shape[0])
    scores = max((row.q_len * (row.context_len + row.decoded_len) for row in batch.table), default=0)
    step = max(1, ELEMENTS_AT_ONCE // max(1, rows * batch.q.shape[2], scores * ratio))
    for first in range(0, kv_heads, step):
        last = min(first + step, kv_heads)
        yield slice(first * ratio, last * ratio), slice(first, last)


def _of_heads(batch: Batch, heads: slice, kv: slice) -> Batch:
    q, k_context, v_context, k_decoded, v_decoded = batch.inputs
    return batch.replace(
        q=q[:, heads], dout=batch.dout[:, heads], k_context=k_context[:, kv], v_context=v_context[:, kv],
        k_decoded=k_decoded[:, kv], v_decoded=v_decoded[:, kv],
    )  # fmt: skip


def _results_of_heads(results: Results, heads: slice, kv: slice) -> Results:
    of_keys = (x[:, kv] for x in results[3:])
    return Results(results.out[:, heads], results.lse[heads], results.dq[:, heads], *of_keys)


def check(batch: Batch, *candidates: Results, dlse: Tensor | None = None) -> None:
    """Raises AssertionError with every violation of the accuracy rule by results of this batch."""
    for results in candidates:
        for name, expected in zip(("out", *Results._fields[2:]), (batch.q, *batch.inputs)):
            actual = getattr(results, name)
            same = actual.dtype == expected.dtype and actual.shape == expected.shape and actual.is_contiguous()
            assert same, f"{name}: {actual.dtype} {tuple(actual.shape)} with strides {actual.stride()}"
    problems = []
    for heads, kv in _head_slices(batch):
        part = _of_heads(batch, heads, kv)
        part_dlse = None if dlse is None else dlse[heads]
        expected_values, plain_values = reference(part, part_dlse), plain(part, part_dlse)
        for results in candidates:
            own = _results_of_heads(results, heads, kv)
            problems += compare(own, plain_values, expected_values, batch.q.dtype)
    assert not problems, "; ".join(problems)


def assert_bits_equal(name: str, actual: Tensor, expected: Tensor) -> None:
    """Same shape, type and bit patterns (so that -0 differs from 0 and a NaN equals itself)."""
    assert actual.shape == expected.shape and actual.dtype == expected.dtype, f"{name}: {actual.shape} {actual.dtype}"
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[actual.element_size()]
    same = actual.contiguous().view(integers) == expected.contiguous().view(integers)
    assert bool(same.all()), f"{name}: {int((~same).sum())} of {same.numel()} elements differ"


def assert_same_results(actual: Results, expected: Results, but: str = "") -> None:
    """Bit by bit, but for the named one."""
    for name, value in actual._asdict().items():
        if name != but:
            assert_bits_equal(name, value, getattr(expected, name))
