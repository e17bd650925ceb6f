# SPDX-License-Identifier: BSD-3-Clause
"""Checks of contents: of a step's tensors, of the step that a plan is used for, and of tokens that are appended.

They wait for the device: on a GPU they are made with DUALKV_DEBUG=1 alone, on the CPU always.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import torch
from torch import Tensor

from .. import ops
from ..checks import environment_flag, explain
from .calls import DecodeCall, Step, have_values


def are_checked(like: Tensor) -> bool:
    """True if contents are looked at where this tensor is."""
    return have_values((like,)) and (not like.is_cuda or ops.checks_values())


def check_values(step: Step) -> None:
    """ValueError for contents that contradict each other; requests without keys pass."""
    table, page_size, pages = step.block_table.cpu(), step.limits.page_size, step.limits.num_pages
    requests, columns = table.shape
    keys, most = step.seqlens.tolist(), columns * page_size
    starts = [*range(requests + 1)] if step.cu_seqlens_q is None else step.cu_seqlens_q.tolist()
    for index, (before, start) in enumerate(pairwise([0, *starts])):
        if not before <= start <= step.queries:
            expected = f"offsets that do not decrease, from 0 to at most {step.queries} (num_queries)"
            raise ValueError(explain(f"cu_seqlens_q[{index}]", expected, f"{start} after {before}"))
    cuts = keys if step.boundaries is None else step.boundaries.tolist()
    for index, (count, cut, queries) in enumerate(zip(keys, cuts, (end - start for start, end in pairwise(starts)))):
        if not 0 <= count <= most:
            raise ValueError(explain(f"seqlens[{index}]", f"0 to {most} keys ({columns} pages of {page_size})", count))
        if count and queries > count:
            expected = f"at least {queries} keys (those of the request's queries)"
            raise ValueError(explain(f"seqlens[{index}]", expected, count))
        if count and cut < 0:
            raise ValueError(explain(f"boundaries[{index}]", "0 or more keys", cut))
    used = torch.arange(columns) * page_size < torch.tensor(keys).view(-1, 1)
    wrong = (used & ((table < 0) | (table >= pages))).nonzero().tolist()
    if wrong:
        row, column = wrong[0]
        expected = f"a page from 0 to {pages - 1}"
        raise ValueError(explain(f"block_table[{row}, {column}]", expected, int(table[row, column])))
    if step.parents is not None and step.shared_pages is not None:
        check_parents(table, used.sum(1).tolist(), step.parents.tolist(), step.shared_pages.tolist())


def check_parents(table: Tensor, used: list[int], parents: list[int], shared: list[int]) -> None:
    """ValueError for a request that has not its parent's pages; `used`: how many pages hold keys of each."""
    columns = table.shape[1]
    for index, (parent, pages) in enumerate(zip(parents, shared)):
        if not -1 <= parent < index:
            raise ValueError(explain(f"parents[{index}]", "an earlier request, or -1", parent))
        if not 0 <= pages <= columns:
            raise ValueError(explain(f"shared_pages[{index}]", f"0 to {columns} (columns)", pages))
        if parent < 0:
            continue
        most = min(pages, used[index], used[parent])
        differ = (table[index, :most] != table[parent, :most]).nonzero()
        if len(differ):
            expected = f"at most {int(differ[0])} pages that are those of request {parent}"
            raise ValueError(explain(f"shared_pages[{index}]", expected, pages))


def check_planned(step: Step, block_table: Tensor, seqlens: Tensor) -> None:
    """ValueError for requests that are not those of a plan's step, which may have padding in their place."""
    planned, keys = step.seqlens.tolist(), seqlens.tolist()
    columns = min(block_table.shape[1], step.block_table.shape[1])
    table, own = block_table[:, :columns].cpu(), step.block_table[:, :columns].cpu()
    for index, (expected, count) in enumerate(zip(planned, keys)):
        if expected and count != expected:
            raise ValueError(explain("plan", f"{count} keys of request {index}, with those of k", expected))
        used = -(-expected // step.limits.page_size)
        if not torch.equal(table[index, :used], own[index, :used]):
            raise ValueError(explain("plan", f"the pages of request {index} in block_table", "others"))


def check_appended(
    block_table: Tensor, before: Tensor, counts: Tensor | int, page_size: int, num_pages: int
) -> None:  # fmt: skip
    """ValueError for a page that a request appends to and another one reads; `before`, `counts`: keys, and new ones."""
    table, before = block_table.cpu(), before.cpu().long()
    after = before + (counts.cpu() if isinstance(counts, Tensor) else counts)
    begins = torch.arange(table.shape[1]) * page_size
    used = (begins < after[:, None]) & (table >= 0) & (table < num_pages)
    written = used & (begins + page_size > before[:, None]) & (after > before)[:, None]
    readers = defaultdict(list)
    for index, column in (used & torch.isin(table, table[written])).nonzero().tolist():
        readers[int(table[index, column])].append((index, int(after[index] - begins[column])))
    for index, column in written.nonzero().tolist():
        page, first = int(table[index, column]), max(int(before[index] - begins[column]), 0)
        other = next((one for one, rows in readers[page] if one != index and rows > first), None)
        if other is not None:
            expected = f"a page of its own for the tokens that request {index} appends (-1 for padding)"
            raise ValueError(explain(f"block_table[{index}, {column}]", expected, f"{page}, as request {other} has"))


class Seen:
    """A step as its plan has seen it, by which a plan is known that another step uses.

    That one has other contents of the step's tensors. With DUALKV_DEBUG=1, which keeps the caches
    until the next update, or it has written keys behind those that the plan counts.
    """

    def __init__(self, step: Step) -> None:
        self._copies = {name: one.clone() for name, one in zip(Step._fields, step[:6]) if one is not None}
        self._caches: list[tuple[Tensor, Tensor]] = []

    def check(self, call: DecodeCall) -> None:
        """RuntimeError for a layer of another step."""
        for name, copy in self._copies.items():
            if not torch.equal(copy, getattr(call.step, name)):
                raise _is_older(f"{name} has other contents")
        if not environment_flag("DUALKV_DEBUG"):
            return
        behind = _rows_behind(call.step, call.k_cache)
        before = next((rows for cache, rows in self._caches if _is_same(cache, call.k_cache)), None)
        if before is None:
            self._caches.append((call.k_cache, behind))
        elif len(changed := (before != behind).any(1).nonzero()):
            raise _is_older(f"k_cache has new keys of request {int(changed[0])}")


def _is_older(why: str) -> RuntimeError:
    expected = "one that update() has planned for this step, before its first layer"
    return RuntimeError(explain("plan", expected, f"an earlier step's: since its update {why}"))


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() and one.stride() == other.stride()


def _rows_behind(step: Step, cache: Tensor) -> Tensor:
    """Bits of the row behind each request's keys, (requests, bytes); zeros where it may be another request's."""
    table, keys, (pages, page_size) = step.block_table.long(), step.seqlens.long(), cache.shape[:2]
    column = (keys // page_size).clamp(max=table.shape[1] - 1)
    page = table.gather(1, column[:, None])[:, 0]
    used = torch.arange(table.shape[1], device=table.device) * page_size < keys[:, None]
    is_own = (keys % page_size > 0) | ~torch.isin(page, table[used])
    is_own &= (keys > 0) & (keys < table.shape[1] * page_size) & (page >= 0) & (page < pages)
    rows = cache[page.clamp(0, pages - 1), keys % page_size].flatten(1).contiguous().view(torch.uint8)
    return torch.where(is_own[:, None], rows, 0)
