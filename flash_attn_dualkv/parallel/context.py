# SPDX-License-Identifier: BSD-3-Clause
"""Context parallelism: each rank holds some runs of rows, and gathers the keys and values of all for its queries.

Nodes are cut at the borders of chunks of rows, which are dealt out so that ranks have equally many rows and visible
keys (`data.divide`). The queries of a rank see whole nodes of keys, so that the kernels need nothing new. Keys and
values are gathered again in the backward, where the gradients that all ranks have for a row go to the rank that has the
row (gathered keys as in Llama 3's training: Dubey et al., The Llama 3 Herd of Models, 2024, section 3.3.2). Unlike with
Ulysses, ranks may be more than heads; and Ulysses may divide what a rank has.

    layout = ContextLayout.of(batch.layout, group)
    model(layout.shard(batch.input_ids)[None], position_ids=layout.shard(batch.position_ids)[None],
          shared_prompt_layout=layout, ...)

Works with any process group; needs no other library.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, overload

import torch
import torch.distributed as dist
from torch import Tensor

from .. import checks, ops
from ..calls import BackwardCall, Options, pack
from ..errors import SharedPromptError, SharedPromptLayoutError
from ..host import runs as runs_of_rows
from ..host import to_device, untraced
from ..layout import SharedPromptLayout
from ..nodes import part_table
from ..packed_attention import checked_tensors, packed_options
from .divide import CHUNKS, ROW_TILE, divide_rows
from .sharded import DividedLayout, all_gather, check_group, same_on_all_ranks


@dataclass(frozen=True, eq=False)
class ContextLayout(DividedLayout):
    """A layout whose rows are divided among a group's ranks, run by run, balanced by visible keys.

    Models of transformers take it as they take a `SharedPromptLayout`. `nodes` is the table of this rank's queries and
    of the keys of the whole row, in the order of that row.

    Attributes:
        gather_index: (rows,) int64, of each row of the nodes its place among the rows of all ranks, rank by rank.
        head_groups: keys and values are gathered in so many parts, KV heads by KV heads.
        ranks: how many share the row.
    """

    gather_index: Tensor | None = None
    head_groups: int = 1
    ranks: int = 1

    @staticmethod
    @untraced
    def of(
        layout: SharedPromptLayout,
        group: dist.ProcessGroup,
        *,
        pad_to_multiple_of: int = 1,
        head_groups: int = 1,
        chunks: int = CHUNKS,
        tile: int = ROW_TILE,
    ) -> ContextLayout:
        """The layout of a whole packed row, divided among the ranks of a group, which all call.

        Args:
            layout: of any number of rows; its padding goes.
            group: of torch.distributed.
            pad_to_multiple_of: each rank's rows are padded to a multiple of this: the ranks of Ulysses that divide
                them, or of tensor parallelism with sequence parallelism.
            head_groups: keys and values are gathered in so many parts, KV heads by KV heads, each during the attention
                of the part before; it divides the KV heads of every layer. Less memory, and less waiting where ranks
                are on several hosts.
            chunks: of each rank, balanced by visible keys.
            tile: nodes are cut at multiples of so many rows.

        Raises:
            SharedPromptError: an argument is not as described; on all ranks, another one has failed, or rows, ids or
                arguments are not the same on all.
        """
        check_group(group)
        ranks, rank = dist.get_world_size(group), dist.get_rank(group)
        options = dict(pad_to_multiple_of=pad_to_multiple_of, head_groups=head_groups, chunks=chunks, tile=tile)
        with same_on_all_ranks(group) as common:
            divided = ContextLayout.at(layout, ranks, rank, **options)
            common.note(layout, options)
        return replace(divided, group=group)

    @staticmethod
    @torch.inference_mode(False)  # autograd saves the tables
    def at(
        layout: SharedPromptLayout,
        ranks: int,
        rank: int,
        *,
        pad_to_multiple_of: int = 1,
        head_groups: int = 1,
        chunks: int = CHUNKS,
        tile: int = ROW_TILE,
    ) -> ContextLayout:
        """The layout that one of so many ranks gets, without a group: for data loaders and for a look at it."""
        checks.instance("layout", layout, SharedPromptLayout, " (batch.layout)")
        if isinstance(layout, DividedLayout):
            raise SharedPromptLayoutError("layout", "a whole row (batch.layout)", type(layout).__name__)
        checks.integer("ranks", ranks, 1)
        checks.integer("rank", rank, 0, ranks - 1)
        multiple = checks.integer("pad_to_multiple_of", pad_to_multiple_of, 1)
        parts = checks.integer("head_groups", head_groups, 1)
        runs = divide_rows(layout.node_lens, layout.node_parents, ranks, chunks=chunks, tile=tile)
        lengths = [sum(end - begin for begin, end in own) for own in runs]
        local = -(-max(lengths) // multiple) * multiple
        # The rows of all ranks, rank by rank, where they lie, and back.
        rows = runs_of_rows([run[0] for own in runs for run in own], [run[1] - run[0] for own in runs for run in own])
        places = runs_of_rows([local * index for index in range(ranks)], lengths)
        gather_index = torch.empty_like(places).index_copy_(0, rows, places)
        row_index = rows.new_full((local,), layout.num_tokens)
        begin = sum(lengths[:rank])
        row_index[: lengths[rank]] = rows[begin : begin + lengths[rank]]
        nodes = part_table(layout.node_lens, layout.node_parents, runs[rank])
        moved = [nodes, row_index, gather_index]
        if layout.device != nodes.device:
            moved = to_device(moved, layout.device)
        given = {field.name: getattr(layout, field.name) for field in fields(SharedPromptLayout)}
        # A rank's positions are no view of the batch's; all of its rows stay.
        given.update(nodes=moved[0], position_ids=None, late=None)
        return ContextLayout(**given, row_index=moved[1], gather_index=moved[2], head_groups=parts, ranks=ranks)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return context_parallel_attention(q, k, v, self, **options)


@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: ContextLayout, *, group: Any = None,
    softmax_scale: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, backend: str = "auto", deterministic: bool = False,
    return_lse: Literal[False] = False,
) -> Tensor: ...  # fmt: skip
@overload
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: ContextLayout, *, group: Any = None,
    softmax_scale: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, backend: str = "auto", deterministic: bool = False,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def context_parallel_attention(
    q: Tensor, k: Tensor, v: Tensor, layout: ContextLayout, *, group: Any = None,
    softmax_scale: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, backend: str = "auto", deterministic: bool = False,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """`shared_prompt_attention` of a packed row whose runs lie on the group's ranks.

    Every rank must call. Each computes its part of the gradients of all keys and values, rounded once as in one
    process; parts of a row are added in float32, in the order of the ranks, and rounded once more.

    Args:
        q: (L, H, d), this rank's rows. k, v: (L, H_k, d) and (L, H_k, d_v).
        layout: of the whole row, divided.
        group: whose ranks have the row; None for the layout's. As many as the layout was made for.
        sinks: (H,); a rank's gradient is that of its own rows, to be summed over ranks like that of any parameter.
        return_lse: also return the LSE (H, L), differentiable.
        others: of `shared_prompt_attention`.

    Returns:
        out (L, H, d_v), this rank's rows, 0 in padding; or with `return_lse` the pair (out, lse).

    Raises:
        SharedPromptError: heads that cannot be divided, rows that are not the layout's, or what
            `shared_prompt_attention` raises.
    """
    checks.instance("layout", layout, ContextLayout)
    checks.flag("return_lse", return_lse)
    group = layout.group if group is None else group
    check_group(group)
    if dist.get_world_size(group) != layout.ranks:
        raise SharedPromptError("group", f"the {layout.ranks} ranks of the layout", dist.get_world_size(group))
    q, k, v = checked_tensors(q, k, v, sinks, backend)
    if backend == "cudnn":
        raise SharedPromptError("backend", "'auto' where ranks have parts of a row", repr(backend))
    rows = layout.num_local_tokens
    if q.shape[0] != rows or k.shape[0] != rows:
        got = f"{q.shape[0]} in q, {k.shape[0]} in k"
        raise SharedPromptLayoutError("layout", f"{rows} rows a rank in q and k", got)
    if layout.device != q.device:
        raise SharedPromptLayoutError("layout", f"tensors on {q.device} as q, see layout.to()", layout.device)
    if k.shape[1] % layout.head_groups:
        raise SharedPromptError("head_groups", f"a divisor of the {k.shape[1]} KV heads", layout.head_groups)
    options = packed_options(
        q, layout, softmax_scale=softmax_scale, sliding_window=sliding_window, softcap=softcap, backend=backend,
        deterministic=deterministic,
    )  # fmt: skip
    ops.refuse_tangents((q, k, v, sinks))
    out, lse = _Attention.apply(q, k, v, sinks, _Call(layout, group, options))
    return (out, lse) if return_lse else out


@dataclass(frozen=True)
class _Call:
    layout: ContextLayout
    group: Any
    options: Options

    @property
    def parts(self) -> int:
        return self.layout.head_groups

    @property
    def places(self) -> Tensor:
        index = self.layout.gather_index
        assert index is not None
        return index

    def gathered(self, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The keys and values of all rows, some heads after the other; the next ones are on their way meanwhile."""
        width = k.shape[2]
        pending: list[tuple[Tensor, Any]] = []
        for own in torch.cat([k, v], 2).chunk(self.parts, 1):
            # The sent heads lie in a copy of their own, which the work keeps.
            pending.append(all_gather(own, self.group, async_op=True))
            if len(pending) > 1:
                yield self._ordered(*pending.pop(0), width)
        yield self._ordered(*pending.pop(0), width)

    def _ordered(self, whole: Tensor, work: Any, width: int) -> tuple[Tensor, Tensor]:
        work.wait()
        whole = whole.index_select(0, self.places)
        return whole[..., :width], whole[..., width:]

    def differentiate(
        self, keys: tuple[Tensor, Tensor], dout: Tensor, q: Tensor, out: Tensor, lse: Tensor, dlse: Tensor | None,
        sinks: Tensor | None,
    ) -> list[Tensor]:  # fmt: skip
        """dq, this rank's parts of dk and dv of all rows, and dsinks; keys and values are given back on return."""
        tensors = dout.contiguous(), dlse, q, *keys, None, None, sinks, out.contiguous(), lse
        return ops.backward(*pack(BackwardCall(*tensors, self.layout.nodes, self.options)))

    def send(self, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, Any]:
        """The gradients on their way to the ranks that have the rows: what comes, what goes, what to wait for."""
        ranks, width = dist.get_world_size(self.group), dk.shape[2]
        rows = ranks * self.layout.num_local_tokens
        sent = dk.new_zeros((rows, dk.shape[1], width + dv.shape[2]))
        sent[..., :width].index_copy_(0, self.places, dk)
        sent[..., width:].index_copy_(0, self.places, dv)
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=self.group, async_op=True)
        return received.unflatten(0, (ranks, -1)), sent, work

    def received(self, parts: Tensor, _: Tensor, work: Any) -> Tensor:
        """The sum of all ranks' parts of this rank's rows; what was sent lives until here."""
        work.wait()
        total = torch.float64 if parts.dtype == torch.float64 else torch.float32
        return parts.sum(0, dtype=total).to(parts.dtype)

    def gradients(
        self, dout: Tensor | None, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None,
        out: Tensor, lse: Tensor,
    ) -> list[Tensor | None]:  # fmt: skip
        """Those of this rank's q, k, v and sinks."""
        parts = self.parts
        dout = torch.zeros_like(out) if dout is None else dout
        dlses, of_sinks = ([None] * parts if tensor is None else [*tensor.chunk(parts)] for tensor in (dlse, sinks))
        by_row = (tensor.chunk(parts, 1) for tensor in (dout, q, out))
        by_head: Iterator[Any] = zip(*by_row, lse.chunk(parts), dlses, of_sinks)
        gathered = self.gathered(k, v)
        queries, sent, dsinks = [], [], list[Tensor]()
        for own in by_head:
            dq, *of_keys = self.differentiate(next(gathered), *own)
            queries.append(dq)
            dsinks += of_keys[2:]
            sent.append(self.send(*of_keys[:2]))
            del of_keys
        kept = [self.received(*sent.pop(0)) for _ in range(parts)]
        dk, dv = torch.cat(kept, 1).split([k.shape[2], v.shape[2]], 2)
        return [torch.cat(queries, 1), dk, dv, torch.cat(dsinks) if dsinks else None]


class _Attention(torch.autograd.Function):
    """One node for the gathered keys, attention and the way back of the gradients."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: _Call) -> tuple[Tensor, Tensor]:
        parts = call.parts
        queries = q.chunk(parts, 1)
        own_sinks = [None] * parts if sinks is None else [*sinks.chunk(parts)]
        found = [
            ops.attend(own, *keys, call.layout.nodes, call.options, sinks=sink)
            for own, keys, sink in zip(queries, call.gathered(k, v), own_sinks)
        ]
        outs, lses = zip(*found)
        out, lse = found[0] if parts == 1 else (torch.cat(outs, 1), torch.cat(lses, 0))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        ctx.call = call
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        wanted = sinks if ctx.needs_input_grad[3] else None
        with torch.no_grad():
            gradients = ctx.call.gradients(dout, dlse, q, k, v, wanted, out, lse)
        return *ops.differentiable_once((dout, dlse, q, k, v, sinks), gradients), None
