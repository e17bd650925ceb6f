# SPDX-License-Identifier: BSD-3-Clause
"""Plans of decoding steps: which requests share which pages, found once a step for all layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import checks, ops
from . import contents, library
from .calls import MOST_KEYS, Limits, Step, check_limits, check_step, check_table
from .operators import make_plan

# The default of `exact` decides what bits are equal to, on the CPU as well, where there is no
# library to ask: with so few KV heads a walk of 8K keys takes longer than memory does.
SPLIT_KV_HEADS = 2
SPLIT_KEYS = -1  # as many as the library chooses (csrc/core/plan_decode.h)


def make_memory(limits: Limits, device: torch.device) -> Tensor | None:
    """The memory of a plan, zeros; None where the reference decodes, which needs none."""
    if device.type == "cpu" or ops.forces_reference():
        return None
    size = library.decode_plan_bytes(limits, device)
    try:
        return torch.zeros(size, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        rows, serial = limits.max_queries, limits._replace(split_keys=0)
        less = f", and with exact='trainer' {library.decode_plan_bytes(serial, device) >> 20} MiB"
        raise torch.OutOfMemoryError(
            f"a SharedPrefixPlan for max_queries={rows} takes {size >> 20} MiB: fewer take less"
            f"{less if limits.split_keys and not limits.are_latents else ''}. {error}"
        ) from error


class SharedPrefixPlan:
    """What decoding knows of a step's requests: which of their pages are the same, and whose.

    Make one for each block table (layers whose caches share a table share the plan) and keep it;
    call `update` once a step and `shared_prefix_decode` with it in every layer. Its buffers are
    made here, once: `update` and decoding launch kernels on the current stream and neither wait for
    the device nor allocate plans, so that a CUDA graph may hold both and be replayed with other
    contents of the same tensors. The memory passes the states of a layer's rows from kernel to
    kernel, so that a plan serves one stream at a time.

    Args:
        max_requests: the most requests of a step, at most 4096.
        max_pages_per_request: the most columns of a block table, of at most 2^25 rows.
        num_pages: of the caches.
        max_queries: the most rows of q; `max_requests` if None.
        page_size: rows of a page, a multiple of 16.
        num_heads, num_kv_heads: of q and of the caches; the first is a multiple of the second.
        head_dim: of q and the keys; 64, 128 or 256 on a GPU, and on the CPU a multiple of 8, at most
            512.
        head_dim_v: of the values and the result; `head_dim` if None. A smaller one is for latents
            (absorbed MLA): one KV head whose first `head_dim_v` columns are the values; 576 and 512
            on a GPU.
        device: of all tensors: the CPU, or an NVIDIA GPU of compute capability 8.0 or newer.
        exact: what the bits of a row are equal to. "trainer": without a window, those of the
            training forward with the same keys and values, cut at `boundaries`, on the same GPU
            architecture by the same version of this package. "split": those of the same request in
            any other batch of a plan with as many pages for each request; walks of more than 1K
            keys (a 32nd of a request's most) are divided at fixed places, so that few prompts, or
            few KV heads, keep the whole GPU busy. Windows are not divided. None: "split" with up
            to 2 KV heads, else "trainer". Latents have "split" only: training expands them to heads
            of other dims (192 and 128, say).

    Attributes:
        limits: the sizes above.
        device: where its tensors are.
        exact: "trainer" or "split".
        nbytes: of its memory on a GPU.

    Raises:
        TypeError, ValueError: an argument is not as described; the message names it.
        NotImplementedError: a head dim that the kernels lack; latents with exact="trainer".
        RuntimeError: a GPU in an installation without kernels.
        torch.OutOfMemoryError: says how large the plan is, and what makes it smaller.
    """

    def __init__(
        self, max_requests: int, max_pages_per_request: int, *, num_pages: int, max_queries: int | None = None,
        page_size: int, num_heads: int, num_kv_heads: int, head_dim: int, head_dim_v: int | None = None,
        device: torch.device | str, exact: str | None = None,
    ) -> None:  # fmt: skip
        max_queries = max_requests if max_queries is None else max_queries
        page_size = checks.integer("page_size", page_size, 1, MOST_KEYS)
        most = MOST_KEYS // page_size
        self.max_pages_per_request = checks.integer("max_pages_per_request", max_pages_per_request, 1, most)
        num_kv_heads = checks.integer("num_kv_heads", num_kv_heads, 1, checks.MAX_ROWS)
        if exact is None:
            exact = "split" if num_kv_heads <= SPLIT_KV_HEADS else "trainer"
        self.exact = checks.choice("exact", exact, ("trainer", "split"))
        max_keys = self.max_pages_per_request * page_size
        split_keys = SPLIT_KEYS if exact == "split" else 0
        self.limits = Limits(
            max_requests, max_keys, max_queries, num_pages, page_size, num_heads, num_kv_heads, head_dim,
            head_dim if head_dim_v is None else head_dim_v, split_keys,
        )  # fmt: skip
        check_limits(self.limits)
        self.device = checks.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(checks.explain("device", "an NVIDIA GPU or the CPU", self.device))
        empty = torch.empty(0, device=self.device)
        checks.check_device("device", empty)
        self.device = empty.device
        self._memory = make_memory(self.limits, self.device)
        self.nbytes = 0 if self._memory is None else self._memory.nbytes
        self._step: Step | None = None
        self.seen: contents.Seen | None = None  # the step's contents, where they are checked

    def reset(self) -> None:
        """Begin anew, after the memory has lost its contents: in an engine that has slept, say."""
        self._step = self.seen = None
        if self._memory is not None:
            self._memory.zero_()

    def update(
        self, block_table: Tensor, seqlens: Tensor, *, cu_seqlens_q: Tensor | None = None,
        boundaries: Tensor | None = None, num_queries: int | None = None, parents: Tensor | None = None,
        shared_pages: Tensor | None = None, max_seqlen: int | None = None,
    ) -> SharedPrefixPlan:  # fmt: skip
        """Plan a step. Requests are found to share what lies in the same pages at the same columns.

        The plan keeps the tensors, and decoding reads them again: their contents must stay as they
        are until the step's last layer has run. All are int32, contiguous (of the table its
        columns) and on the plan's device.

        Args:
            block_table: (B, columns), the pages of each request in order. Entries behind a
                request's keys are not read as pages and may be anything.
            seqlens: (B,), keys of each request, with those of its queries, which are in the cache
                when a layer decodes. A request with 0 keys is padding; its rows are 0.
            cu_seqlens_q: (B+1,), request r has the rows [r] .. [r+1] - 1 of q; the kernels are
                tuned for 1 to 16 each. None: one query for each request.
            boundaries: (B,), where the keys of each request are cut as training cuts them into a
                prompt and a response: its prompt's length. It decides about the bits of the
                request's rows, not about what is read. One behind the request's keys, or None: cut
                nowhere, as a sequence that is trained by itself.
            num_queries: rows of q; those that no request owns are padding. B without
                `cu_seqlens_q`, else `max_queries` if None.
            parents, shared_pages: (B,), both or neither, from an engine that knows its tree, which
                saves the search: an earlier request (or -1), and how many of its first pages are
                the request's, too. The most is shared if it is the earlier request with most pages
                in common, of those that have a query; pages that are not said to be shared are read
                for each request.
            max_seqlen: at least the keys of the step's longest request, where the host knows: the
                search looks at no more columns of a wide table. It changes no result.

        Returns:
            The plan itself.

        Raises:
            TypeError, ValueError: an argument is not as described. On a GPU contents are checked only
                with DUALKV_DEBUG=1 in the environment, which waits for the device: otherwise wrong
                ones give wrong numbers, but never an access outside of the cache.
        """
        self._step = self.seen = None
        check_table(block_table, self.device, self.max_pages_per_request)
        if num_queries is None:
            num_queries = block_table.shape[0] if cu_seqlens_q is None else self.limits.max_queries
        given = (block_table, seqlens, cu_seqlens_q, boundaries, parents, shared_pages)
        step = Step(*given, self._memory, num_queries, self.limits)
        check_step(step, self.device)
        searched = step
        if max_seqlen is not None:  # layers, which CUDA graphs may hold, have the whole table
            pages = -(-checks.integer("max_seqlen", max_seqlen, 0, MOST_KEYS) // self.limits.page_size)
            searched = Step(block_table[:, : max(pages, 1)], *step[1:])
        make_plan(searched)
        if contents.are_checked(block_table):
            self.seen = contents.Seen(step)
        self._step = step
        return self

    @property
    def step(self) -> Step:
        """The step of the last update; RuntimeError before the first, or after one that failed."""
        if self._step is None:
            raise RuntimeError("plan: expected one that has planned a step, got one that update() has not yet planned")
        return self._step


def check_plan(plan: Any) -> Step:
    """The step of what a caller gives as a plan."""
    if not isinstance(plan, SharedPrefixPlan):
        raise TypeError(checks.explain("plan", "a SharedPrefixPlan", checks.describe(plan)))
    return plan.step
