# SPDX-License-Identifier: BSD-3-Clause
"""Places of the nodes of a micro-batch in its packed row: built once, read by every attention layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor

from . import checks
from .errors import SharedPromptLayoutError
from .host import SeparatelyPickled, runs, same_device, to_device, untraced
from .nodes import part_table, path_begins, tree_table, visible_pairs

# The fewest rows that leave between two that stay: each run of queries begins a tile of attention
# of its own, half of which is empty on average, 64 rows.
MIN_LEAVING = 64


@dataclass(frozen=True, eq=False)
class SharedPromptLayout(SeparatelyPickled):
    """Places of the nodes of a micro-batch in its packed row: prompts with their responses, or trees of any depth.

    The row is [node_1 .. node_n][padding], depth first: a node, then its subtree. So each prompt (its context) is
    followed by its responses. The layout holds one integer tensor and host integers, once per micro-batch.

    Attributes:
        nodes: (n, 8) int32, what the attention operators read: the table of `nodes.Node`.
        node_lens: (n,) rows of each node.
        node_parents: (n,) the node that each continues; -1 for prompts and other roots.
        max_sequence: the most rows of a path: of a response together with its context.
        mean_keys: how many rows of its path a row sees on average, rounded up. By it the backward chooses its kernels.
        num_tokens: rows T of the packed tensors, padding included.
        pad: how many of them, at the end, are padding.
        position_ids: (T,) int64, or (n, T) where images have several, those of the batch that the layout belongs to. A
            model's attention refuses the layout with others, which it knows by where they lie in memory: to compare
            values would wait for the GPU. None for a layout that was copied without its batch: then nothing is known of
            them.
        input_ids: (T,) int64, those of that batch, or None. Another batch's are refused; copies are not known.
        query_rows: (m,) int64, rising: the rows that are queries, of a layout that is another one's `late`. Its nodes
            have these, and the keys of all rows. None: all rows.
        late: the layout of a model's last layers, before which unread rows leave. None: all rows stay.
    """

    nodes: Tensor
    node_lens: tuple[int, ...]
    node_parents: tuple[int, ...]
    max_sequence: int
    mean_keys: int
    num_tokens: int
    pad: int = 0
    position_ids: Tensor | None = None
    input_ids: Tensor | None = None
    query_rows: Tensor | None = None
    late: SharedPromptLayout | None = None

    @staticmethod
    @untraced
    def from_tree(
        node_lens: Sequence[int] | Tensor,
        parents: Sequence[int] | Tensor,
        *,
        pad: int = 0,
        device: torch.device | str | None = None,
    ) -> SharedPromptLayout:
        """The layout of nodes that are packed in depth-first order.

        Args:
            node_lens: (n,) rows of each node, >= 0.
            parents: (n,) the node that each continues, before it; -1 for roots.
            pad: rows after the last node.
            device: of the layout; None for the CPU.

        Raises:
            SharedPromptError: an argument is not as described, or the order is not depth-first.
        """
        lens = checks.lengths("node_lens", node_lens)
        above = checks.lengths("parents", parents, len(lens), "node_lens", least=-1)
        checks.integer("pad", pad, 0)
        rows = sum(lens) + pad
        if rows >= checks.MAX_ROWS:
            raise SharedPromptLayoutError("node_lens", f"fewer than {checks.MAX_ROWS} rows", rows)
        nodes, longest, mean = tree_table(lens, above)
        layout = SharedPromptLayout(nodes, tuple(lens), tuple(above), longest, mean, rows, pad)
        return layout if device is None else layout.to(device)

    def __post_init__(self) -> None:
        for own in (self.position_ids, self.input_ids):
            if own is not None:
                _mark(own, self.node_parents)

    def __getstate__(self) -> dict[str, Any]:
        state = {**super().__getstate__(), "position_ids": None, "input_ids": None}
        for name in ("_copies", "_cudnn_plans"):
            state.pop(name, None)
        return state

    @property
    def num_nodes(self) -> int:
        return len(self.node_lens)

    @property
    def depth(self) -> int:
        """The most nodes on a path."""
        return 1 + max(path_begins([1] * self.num_nodes, self.node_parents), default=-1)

    @property
    def num_local_tokens(self) -> int:
        """Rows of this process: all of them, unless a group of processes divides the row."""
        return self.num_tokens

    @property
    def num_queries(self) -> int:
        """Rows of this process that are queries."""
        return self.num_local_tokens if self.query_rows is None else len(self.query_rows)

    @property
    def num_unread(self) -> int:
        """Rows that leave before a model's last layers."""
        return 0 if self.late is None else self.num_tokens - self.late.num_queries

    @property
    def device(self) -> torch.device:
        return self.nodes.device

    # Prompts and responses: the roots, and all other nodes

    @property
    def num_groups(self) -> int:
        """Prompts, or other roots."""
        return self.node_parents.count(-1)

    def context_index(self) -> Tensor:
        """(rows,) int64, the rows of all contexts, one context after the other."""
        return self._rows_of([index for index, parent in enumerate(self.node_parents) if parent < 0])

    def decoded_index(self) -> Tensor:
        """(rows,) int64, the rows of all responses, one response after the other."""
        return self._rows_of([index for index, parent in enumerate(self.node_parents) if parent >= 0])

    def _rows_of(self, chosen: Sequence[int]) -> Tensor:
        begins = [*accumulate(self.node_lens, initial=0)]
        index = runs([begins[node] for node in chosen], [self.node_lens[node] for node in chosen])
        return to_device([index], self.device)[0]

    @untraced
    @torch.inference_mode(False)  # autograd saves its tables
    def reading(self, rows: Tensor) -> SharedPromptLayout | None:
        """Layout of layers that compute only `rows` as queries and attend to the keys of all rows.

        Other rows between two of these stay where they are fewer than `MIN_LEAVING`. Waits for a GPU that has `rows`.

        Args:
            rows: (n,) int64 on the layout's device or on the host, in any order and any of them several times.

        Returns:
            This layout with `query_rows`; None if all rows stay, or none is read.
        """
        is_read = torch.zeros(self.num_tokens + 2, dtype=torch.int8, device=rows.device)
        is_read[rows + 1] = 1
        edges = [0, *is_read.diff().nonzero().view(-1).tolist(), self.num_tokens]
        leaving = [run for run in zip(edges[::2], edges[1::2]) if run[1] - run[0] >= MIN_LEAVING]
        borders = [0, *chain.from_iterable(leaving), self.num_tokens]
        read = [(begin, end) for begin, end in zip(borders[::2], borders[1::2]) if begin < end]
        if not leaving or not read:
            return None
        # Padding is in no node.
        own = [(begin, min(end, self.num_tokens - self.pad)) for begin, end in read]
        nodes = part_table(self.node_lens, self.node_parents, own)
        pairs = sum(visible_pairs(position, length) for length, position in nodes[:, 1:3].tolist())
        index = runs([begin for begin, _ in read], [end - begin for begin, end in read])
        mean = -(-pairs // len(index))
        nodes, index = to_device([nodes, index], self.device)
        return replace(self, nodes=nodes, query_rows=index, mean_keys=mean, position_ids=None, late=None)

    def is_like(self, other: SharedPromptLayout) -> bool:
        """True if both describe the same row; their tensors may be different copies."""
        return (
            self.node_lens == other.node_lens
            and self.node_parents == other.node_parents
            and self.num_tokens == other.num_tokens
        )

    @untraced
    def to(self, device: torch.device | str | None) -> SharedPromptLayout:
        """The layout on another device, in one copy, which is made once: the layers of a model may lie on several.

        With None it stays where it is, as tensors do, for hooks of accelerate that name no device.

        Raises:
            SharedPromptError: there is no such device.
        """
        target = self.device if device is None else checks.device(device)
        if same_device(target, self.device):
            return self
        index = torch.cuda.current_device() if target.type == "cuda" and target.index is None else target.index
        copies: dict[tuple[str, int | None], SharedPromptLayout] = self.__dict__.setdefault("_copies", {})
        place = target.type, index
        if place not in copies:
            of_batch = ("position_ids", "input_ids")
            own = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in of_batch}
            tensors = {name: value for name, value in own.items() if isinstance(value, Tensor)}
            moved: dict[str, Any] = dict(zip(tensors, to_device([*tensors.values()], target)))
            moved |= {name: value.to(target) for name, value in own.items() if isinstance(value, SharedPromptLayout)}
            copies[place] = replace(self, position_ids=None, input_ids=None, **moved)
        return copies[place]

    def check_positions(self, position_ids: Tensor | None) -> None:
        """SharedPromptLayoutError if a model runs on other positions than those of the layout's batch.

        Nothing can be said of positions of another length (a rank's slice of them), of those of text beside a layout of
        images' (rows of these), and of those of three or more dimensions beside one of text, of what a compiler traces,
        and in a recomputation, which had its forward before.
        """
        own = self.position_ids
        if own is None or position_ids is None or position_ids.numel() != own.numel():
            return
        if (position_ids.dim() > 2) != (own.dim() > 1):
            return
        places = checks.address(own), checks.address(position_ids)
        if None in places or is_in_backward():
            return
        is_own = places[0] == places[1] and position_ids.dtype == own.dtype
        if not is_own or (own.numel() > 1 and position_ids.stride(-1) != own.stride(-1)):
            expected = "those of the layout's batch, batch.position_ids[None], and no copy of them"
            got = "others (a model that is given none makes its own, which are wrong for a packed row)"
            raise SharedPromptLayoutError("position_ids", expected, got)

    def check_ids(self, input_ids: Any) -> None:
        """SharedPromptLayoutError for ids of another batch, or views of them; of copies nothing is known."""
        own = self.input_ids
        if own is None or _needs_layout(input_ids) is None or own.device != input_ids.device:
            return
        begin, place = checks.address(own), checks.address(input_ids)
        if begin is not None and place is not None and not begin <= place < begin + own.nbytes:
            expected = "those of the layout's batch, batch.input_ids[None]"
            raise SharedPromptLayoutError("input_ids", expected, "those of another batch")


def check_unpacked(position_ids: Any, attention_mask: Any = None, input_ids: Any = None) -> None:
    """SharedPromptLayoutError for positions or ids of a packed row, or views of them, that come without their layout.

    A mask of all pairs of rows may stand for the layout, and a single sequence needs none. Nothing is
    known of copies and of what a compiler traces.
    """
    if isinstance(attention_mask, Mapping) or (isinstance(attention_mask, Tensor) and attention_mask.dim() >= 3):
        return
    for name, given in (("positions", position_ids), ("ids", input_ids)):
        if _needs_layout(given):
            expected = f"batch.layout beside the {name} of its packed row"
            got = (
                "none: every row would see all that lie before it, other responses and prompts too (if it was given, "
                "something on the way drops unknown arguments: see install_layout_hook)"
            )
            raise SharedPromptLayoutError("shared_prompt_layout", expected, got)


def _mark(tensor: Tensor, node_parents: Sequence[int]) -> None:
    """Note on the memory of a batch's ids or positions that they are such, and whether the row needs its layout.

    The storage itself has the note: every view finds it, and it goes with the memory, whose address may be another
    tensor's then. The tensors of a batch may share one storage.
    """
    if checks.address(tensor) is not None:
        notes = tensor.untyped_storage().__dict__.setdefault("dualkv_packed", {})
        begin = tensor.storage_offset() * tensor.itemsize
        is_one_sequence = all(parent == node - 1 for node, parent in enumerate(node_parents))
        notes[begin] = begin + tensor.nbytes, not is_one_sequence


def _needs_layout(tensor: Any) -> bool | None:
    """True if a tensor has ids or positions of a packed row of more than one sequence; None if of no known row."""
    if checks.address(tensor) is None:
        return None
    notes = tensor.untyped_storage().__dict__.get("dualkv_packed", {})
    place = tensor.storage_offset() * tensor.itemsize
    return next((needed for begin, (end, needed) in notes.items() if begin <= place < end), None)


def is_in_backward() -> bool:
    """True if autograd runs a backward in this thread, which may compute a checkpointed layer again."""
    return torch._C._current_graph_task_id() != -1
