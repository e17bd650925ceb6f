"""Copies of many small tensors between host and device in one go: each copy by itself costs more than its bytes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

_CODES = {torch.int32: "i", torch.int64: "q"}


def ints(values: Iterable[int], dtype: torch.dtype) -> Tensor:
    """A host tensor of int32 or int64; of thousands of values several times faster than `torch.tensor`."""
    numbers = array(_CODES[dtype], values)
    return torch.frombuffer(numbers, dtype=dtype) if numbers else torch.empty(0, dtype=dtype, device="cpu")


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Integer tensors of one device as flat, contiguous int64 tensors of the host; from a GPU in one copy."""
    flat = [one.reshape(-1) for one in tensors]
    together = flat[0].contiguous() if len(flat) == 1 else torch.cat(flat)
    if together.is_cuda:  # several times faster into pinned memory
        host = torch.empty(together.shape, dtype=torch.int64, device="cpu", pin_memory=True).copy_(together)
    else:
        host = together.to("cpu", torch.int64)
    return list(host.split([one.numel() for one in flat]))


@torch.inference_mode(False)  # tensors made in inference mode could not be saved for a later backward
def to_device(long: Sequence[Tensor], short: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """The `long` (int64) and then the `short` (int32) tensors of one device on another, in one copy.

    They share one buffer, but are no views of each other: to write to one does not spoil what autograd has saved of
    another. A copy from the host to a GPU starts from pinned memory: the host does not wait for it.
    """
    source = (*long, *short)[0].device
    to_gpu = device.type == "cuda"
    sizes = [one.numel() for one in long]
    halves = [one.numel() for one in short]
    words = sum(sizes)
    buffer = torch.empty(
        words + (sum(halves) + 1) // 2,
        dtype=torch.int64,
        device=source,
        pin_memory=to_gpu and source.type == "cpu",
    )
    _fill(buffer[:words], long)
    _fill(buffer[words:].view(torch.int32)[: sum(halves)], short)
    moved = buffer.to(device, non_blocking=to_gpu)
    parts = [*_parts(moved, sizes), *_parts(moved[words:].view(torch.int32), halves)]
    return [part.view(one.shape).data for part, one in zip(parts, (*long, *short))]


class SeparatelyPickled:
    """A dataclass whose tensors share a buffer, of which each takes only its own part along when it is pickled.

    Otherwise the buffer would be pickled with every one of them, and `torch.save` refuses storage of two types.
    """

    def __getstate__(self) -> dict[str, Any]:
        return {name: one.clone() if isinstance(one, Tensor) else one for name, one in self.__dict__.items()}


def same_device(one: torch.device, other: torch.device) -> bool:
    """Whether they are one; "cuda" without an index is the current GPU."""
    if one.type == other.type == "cuda":
        return len({torch.cuda.current_device() if each.index is None else each.index for each in (one, other)}) == 1
    return one == other


def _fill(buffer: Tensor, tensors: Sequence[Tensor]) -> None:
    if tensors:
        torch.cat([one.reshape(-1) for one in tensors], out=buffer)


def _parts(buffer: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    return [buffer[begin:end] for begin, end in pairwise(accumulate(sizes, initial=0))]
