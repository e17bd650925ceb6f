"""Where prompts and responses lie in a packed row: built once for a micro-batch, read by every attention layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from . import arguments, checks
from .data.transfer import SeparatelyPickled, ints, same_device, to_device
from .errors import SharedPromptLayoutError
from .segments import GROUP_COLUMNS, SEGMENT_COLUMNS, Group, Segment

_TENSORS = ("cu_seqlens_context", "cu_seqlens_decoded", "segments", "groups")  # of a layout


@dataclass(frozen=True, eq=False)
class SharedPromptLayout(SeparatelyPickled):
    """Where the prompts and responses of a micro-batch lie in its packed row, for every attention layer to use.

    The row is [context_1 .. context_G][decoded_11 .. decoded_GN][padding]: the contexts first, then all responses,
    group by group. It holds integer tensors and host integers only and is built once per micro-batch; what the
    attention operators read on the device is in `segments` and `groups`.

    Attributes:
        cu_seqlens_context: (G+1,) int32, group g has the rows [g] .. [g+1] - 1.
        cu_seqlens_decoded: (S+1,) int32, response s has the rows [s] .. [s+1] - 1 behind the contexts.
        segments: (S+G, 8) int32, the prompt of each group followed by its responses, see `segments.Segment`.
        groups: (G, 4) int32, see `segments.Group`.
        group_offsets: (G+1,), responses [g] .. [g+1] - 1 belong to prompt g.
        context_lens: (G,), rows of each context. decoded_lens: (S,), rows of each response.
        max_context, max_decoded: the most rows of a context and of a response.
        max_sequence: the most rows of a response together with its context.
        num_context_tokens: rows of all contexts.
        num_tokens: rows T of the packed tensors, padding included.
        pad: how many of them, at the end, are padding.
        position_ids: (T,) int64, those of the batch that the layout belongs to. A model's attention refuses the layout
            with others, which it knows by where they lie in memory: to compare values would wait for the GPU. None for
            a layout that was copied without its batch: then nothing is known of them.
    """

    cu_seqlens_context: Tensor
    cu_seqlens_decoded: Tensor
    segments: Tensor
    groups: Tensor
    group_offsets: tuple[int, ...]
    context_lens: tuple[int, ...]
    decoded_lens: tuple[int, ...]
    max_context: int
    max_decoded: int
    max_sequence: int
    num_context_tokens: int
    num_tokens: int
    pad: int = 0
    position_ids: Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "position_ids": None}

    @property
    def num_groups(self) -> int:
        return len(self.context_lens)

    @property
    def num_local_tokens(self) -> int:
        """Rows of this process: all of them, unless a group of processes divides the row."""
        return self.num_tokens

    @property
    def num_responses(self) -> int:
        return self.group_offsets[-1]

    @property
    def device(self) -> torch.device:
        return self.segments.device

    @property
    def tensors(self) -> list[Tensor]:
        return [getattr(self, name) for name in _TENSORS]

    def is_like(self, other: SharedPromptLayout) -> bool:
        """Whether both describe the same row; their tensors may be different copies."""
        return (
            self.context_lens == other.context_lens
            and self.decoded_lens == other.decoded_lens
            and self.group_offsets == other.group_offsets
            and self.num_tokens == other.num_tokens
        )

    def with_tensors(self, tensors: Sequence[Tensor], position_ids: Tensor | None = None) -> SharedPromptLayout:
        """The layout with other copies of its `tensors`, in their order, and the positions that lie beside them."""
        changes: dict[str, Any] = dict(zip(_TENSORS, tensors, strict=True))
        return replace(self, position_ids=position_ids, **changes)

    def pad_to(self, multiple: int) -> SharedPromptLayout:
        """The layout of the row with as little padding behind it as makes its length a multiple of `multiple`.

        Raises:
            SharedPromptError: `multiple` is no int >= 1.
        """
        multiple = arguments.integer("multiple", multiple, 1, checks.MAX_ROWS)
        tokens = self.num_tokens - self.pad
        pad = -tokens % multiple
        position_ids = self.position_ids if pad == self.pad else None
        return replace(self, num_tokens=tokens + pad, pad=pad, position_ids=position_ids)

    def to(self, device: torch.device | str) -> SharedPromptLayout:
        """The layout on another device, in one copy.

        Raises:
            SharedPromptError: there is no such device.
        """
        device = arguments.device(device)
        if same_device(device, self.device):
            return self
        return self.with_tensors(to_device((), self.tensors, device))

    def check_positions(self, position_ids: Tensor | None) -> None:
        """SharedPromptLayoutError if a model runs on other positions than those of the layout's batch.

        Nothing can be said of positions of another length (a rank's slice of them), of those of images (three or more
        dimensions), of what a compiler traces, and in a recomputation, which had its forward before.
        """
        own = self.position_ids
        if own is None or position_ids is None or position_ids.dim() > 2 or position_ids.numel() != len(own):
            return
        places = checks.address(own), checks.address(position_ids)
        if None in places or _is_in_backward():
            return
        is_own = places[0] == places[1] and position_ids.dtype == own.dtype
        if not is_own or (len(own) > 1 and position_ids.stride(-1) != own.stride(-1)):
            expected = "those of the layout's batch, batch.position_ids[None], and no copy of them"
            got = "others (a model that is given none makes its own, which are wrong for a packed row)"
            raise SharedPromptLayoutError(checks.explain("position_ids", expected, got))

    def validate(self) -> None:
        """SharedPromptLayoutError unless the tensors and the host's numbers agree. It reads the tensors back."""
        lengths = [end - begin for begin, end in pairwise(self.cu_seqlens_decoded.tolist())]
        if tuple(lengths) != self.decoded_lens:
            raise SharedPromptLayoutError(checks.explain("decoded_lens", tuple(lengths), self.decoded_lens))
        bounds = (0, *self.group_offsets[1:-1], len(lengths))
        if len(self.group_offsets) != len(self.context_lens) + 1 or sorted(bounds) != list(self.group_offsets):
            expected = f"{len(self.context_lens) + 1} offsets that rise from 0 to {len(lengths)}"
            raise SharedPromptLayoutError(checks.explain("group_offsets", expected, self.group_offsets))
        shortest = min((*self.context_lens, *lengths, self.pad))
        if shortest < 0:
            raise SharedPromptLayoutError(checks.explain("layout", "lengths >= 0 and a pad >= 0", shortest))
        rebuilt = HostLayout.build(self.context_lens, lengths, self.group_offsets)
        for name in _TENSORS:
            rows, found = getattr(rebuilt, name).tolist(), getattr(self, name).tolist()
            if len(found) != len(rows):
                raise SharedPromptLayoutError(checks.explain(name, f"{len(rows)} rows", len(found)))
            for index, (right, got) in enumerate(zip(rows, found)):
                if right != got:
                    raise SharedPromptLayoutError(checks.explain(f"{name}[{index}]", right, got))
        contexts, decoded = sum(self.context_lens), sum(lengths)
        numbers = {
            "max_context": max(self.context_lens, default=0),
            "max_decoded": max(lengths, default=0),
            "max_sequence": rebuilt.max_sequence,
            "num_context_tokens": contexts,
            "num_tokens": contexts + decoded + self.pad,
        }
        for name, number in numbers.items():
            if getattr(self, name) != number:
                raise SharedPromptLayoutError(checks.explain(name, number, getattr(self, name)))


def _is_in_backward() -> bool:
    """Whether autograd runs a backward in this thread, which may compute a checkpointed layer again."""
    return torch._C._current_graph_task_id() != -1


@dataclass(frozen=True)
class HostLayout:
    """A layout's tensors on the host, and the most rows of a response together with its context."""

    cu_seqlens_context: Tensor
    cu_seqlens_decoded: Tensor
    segments: Tensor
    groups: Tensor
    max_sequence: int

    @staticmethod
    def build(context_lens: Sequence[int], decoded_lens: Sequence[int], group_offsets: Sequence[int]) -> HostLayout:
        """From the rows of every context and of every response, and the offsets of the groups' responses."""
        contexts = [*accumulate(context_lens, initial=0)]
        decoded = [*accumulate(decoded_lens, initial=0)]
        # `Segment` by `Segment`, `Group` by `Group`: an object for each of thousands would take a millisecond.
        segments: list[int] = []
        groups: list[int] = []
        longest = 0
        for g, (begin, length) in enumerate(zip(contexts, context_lens)):
            first, end = group_offsets[g], group_offsets[g + 1]
            sizes = decoded_lens[first:end]
            longest = max(longest, length + max(sizes, default=0))
            groups += Group(begin, length, first + g, end + g + 1)
            segments += Segment(begin, length, 0, begin, length, 0, 0, g)
            for row, size in zip(decoded[first:end], sizes):
                # The same rows of q, counted from the first context, and of k_decoded, counted from the first response.
                segments += (contexts[-1] + row, size, length, begin, length, row, size, g)
        return HostLayout(
            ints(contexts, torch.int32),
            ints(decoded, torch.int32),
            ints(segments, torch.int32).view(-1, SEGMENT_COLUMNS),
            ints(groups, torch.int32).view(-1, GROUP_COLUMNS),
            longest,
        )

    @property
    def tensors(self) -> list[Tensor]:
        """In the order of the layout's fields."""
        return [getattr(self, name) for name in _TENSORS]
