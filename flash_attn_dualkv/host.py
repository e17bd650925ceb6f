# SPDX-License-Identifier: BSD-3-Clause
"""Work on the host: tensors from lists, copies of many in one go, functions that are not compiled."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

Given = ParamSpec("Given")
Returned = TypeVar("Returned")

# The reason that a broken trace gives.
REASON = (
    "packing reads token ids and lengths on the host: pack before the compiled function and hand it the batch, or "
    "compile without fullgraph=True"
)

_CODES = {torch.int32: "i", torch.int64: "q"}
_WRITE = 0x200  # CPython's PyBUF_WRITE
_memory = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)


def untraced(function: Callable[Given, Returned], reason: str = REASON) -> Callable[Given, Returned]:
    """Let torch.compile call a function as it is, from whatever code it traces; elsewhere nothing changes.

    `torch.compiler.disable` would import the compiler together with this package, which takes seconds: it is called
    once there is a trace.
    """
    disabled: list[Callable[..., Any]] = []

    def outside(*args: Any, **kwargs: Any) -> Any:
        if not disabled:
            disabled.append(torch.compiler.disable(function, reason=reason))
        return disabled[0](*args, **kwargs)

    # What torch.compiler.disable notes on a function: a trace ends here, with this reason.
    outside._torchdynamo_disable = True  # type: ignore[attr-defined]
    outside._torchdynamo_disable_msg = reason  # type: ignore[attr-defined]

    @functools.wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
        if torch.compiler.is_compiling():
            return outside(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def kept(function: Callable[[Any], Returned]) -> functools.cached_property[Returned]:
    """A cached property of tensors that a later backward may save, even if inference mode has asked for them first."""
    return functools.cached_property(torch.inference_mode(False)(function))


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor of the host, which must outlive them."""
    return _memory(tensor.data_ptr(), tensor.nbytes, _WRITE)


def ints(values: Iterable[int], dtype: torch.dtype) -> Tensor:
    """A host tensor of int32 or int64; of thousands of values ten times faster than `torch.tensor`."""
    numbers = [*values]
    if not numbers:
        return torch.empty(0, dtype=dtype, device="cpu")
    memory = bytearray(len(numbers) * dtype.itemsize)
    try:
        struct.pack_into(f"{len(numbers)}{_CODES[dtype]}", memory, 0, *numbers)
    except struct.error:
        raise OverflowError("int too big to convert") from None
    return torch.frombuffer(memory, dtype=dtype)


def int64s(values: Iterable[int]) -> Tensor:
    return ints(values, torch.int64)


def take(values: Tensor, index: Tensor) -> Tensor:
    """values[index]; indexing takes four times as long on the CPU."""
    return values.index_select(0, index)


def expand(lengths: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The run of each of `count` places, in runs of these lengths one after the other, and the places themselves."""
    return torch.repeat_interleave(lengths, output_size=count), torch.arange(count, device=lengths.device)


def offsets_of(lengths: Tensor) -> Tensor:
    """(n+1,): where n runs one after the other begin, and where the last of them ends."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0))


def runs(begins: Iterable[int], lengths: Iterable[int]) -> Tensor:
    """(sum of lengths,) int64 on the host: begins[0], begins[0] + 1 and so on, one run after the other."""
    counts = int64s(lengths)
    shifts = int64s(begins) - (counts.cumsum(0) - counts)
    run, place = expand(counts, int(counts.sum()))
    return take(shifts, run).add_(place)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Integer tensors of one device as flat, contiguous int64 tensors of the host; from a GPU in one copy."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    if not flat[0].is_cuda:
        return [tensor.to("cpu", torch.int64).contiguous() for tensor in flat]
    together = flat[0] if len(flat) == 1 else torch.cat(flat)
    # Several times faster into pinned memory.
    host = torch.empty(together.shape, dtype=torch.int64, device="cpu", pin_memory=True).copy_(together)
    return [*host.split_with_sizes([tensor.numel() for tensor in flat])]


@untraced
@torch.inference_mode(False)  # tensors made in inference mode could not be saved for a later backward
def to_device(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Tensors of int64, or of int32 with an even number of elements, of one device on another, in one copy.

    They share one buffer, but are no views of each other: to write to one does not spoil what autograd has saved of
    another. A copy from the host to a GPU starts from pinned memory: the host does not wait for it.
    """
    source, to_gpu = tensors[0].device, device.type == "cuda"
    words = [tensor.reshape(-1).view(torch.int64) for tensor in tensors]
    sizes = [*map(Tensor.numel, words)]
    is_pinned = to_gpu and source.type == "cpu"
    buffer = torch.empty(sum(sizes), dtype=torch.int64, device=source, pin_memory=is_pinned)
    parts = torch.cat(words, out=buffer).to(device, non_blocking=to_gpu).unsafe_split_with_sizes(sizes)
    is_flat = [tensor.dim() == 1 and tensor.dtype == torch.int64 for tensor in tensors]
    return [
        part if stays else part.view(tensor.dtype).view(tensor.shape).data
        for part, tensor, stays in zip(parts, tensors, is_flat)
    ]


def device_of_group(group: Any) -> torch.device:
    """The device on which all ranks of a process group reduce a few numbers: the host, if the group can."""
    kinds = [pair.split(":")[0] for pair in torch.distributed.get_backend_config(group).split(",")]
    return torch.empty(0, device="cpu" if "cpu" in kinds else kinds[0]).device


class SeparatelyPickled:
    """A dataclass whose tensors share a buffer, of which each takes only its own part along when it is pickled.

    Otherwise the buffer would be pickled with every one of them, and `torch.save` refuses storage of two types.
    """

    def __getstate__(self) -> dict[str, Any]:
        return {name: value.clone() if isinstance(value, Tensor) else value for name, value in self.__dict__.items()}


def same_device(device: torch.device, other: torch.device) -> bool:
    """True if both are one device; "cuda" without an index is the current GPU."""
    if device.type == other.type == "cuda":
        return len({torch.cuda.current_device() if each.index is None else each.index for each in (device, other)}) == 1
    return device == other
