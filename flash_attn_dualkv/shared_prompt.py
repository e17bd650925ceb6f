"""Attention of a packed micro-batch: where its prompts and responses lie, and one differentiable call for them all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from . import checks, packed_ops
from .interface import autocast
from .layout import GROUP_COLUMNS, SEGMENT_COLUMNS, Group, Segment
from .transfer import SeparatelyPickled, ints, same_device, to_device

_NAMES = ("q", "k", "v")
_TENSORS = ("cu_seqlens_context", "cu_seqlens_decoded", "segments", "groups")  # of a layout
BACKENDS = ("auto", "cuda", "reference")


class SharedPromptError(ValueError):
    """An argument of the shared-prompt functions is not as described; the message says what was expected and got."""


class SharedPromptLayoutError(SharedPromptError):
    """A layout does not fit the tensors or the model that it was passed to."""


class SharedPromptUnsupportedError(SharedPromptError, NotImplementedError):
    """The chosen backend does not have an option; the message names both."""


@dataclass(frozen=True, eq=False)
class SharedPromptLayout(SeparatelyPickled):
    """Where the prompts and responses of a micro-batch lie in its packed row, for every attention layer to use.

    The row is [context_1 .. context_G][decoded_11 .. decoded_GN][padding]: the contexts first, then all responses,
    group by group. It holds integer tensors and host integers only and is built once per micro-batch; what the
    attention operators read on the device is in `segments` and `groups`.

    Attributes:
        cu_seqlens_context: (G+1,) int32, group g has the rows [g] .. [g+1] - 1.
        cu_seqlens_decoded: (S+1,) int32, response s has the rows [s] .. [s+1] - 1 behind the contexts.
        segments: (S+G, 8) int32, the prompt of each group followed by its responses, see `layout.Segment`.
        groups: (G, 4) int32, see `layout.Group`.
        group_offsets: (G+1,), responses [g] .. [g+1] - 1 belong to prompt g.
        context_lens: (G,), rows of each context. decoded_lens: (S,), rows of each response.
        max_context, max_decoded: the most rows of a context and of a response.
        max_sequence: the most rows of a response together with its context.
        num_context_tokens: rows of all contexts.
        num_tokens: rows T of the packed tensors, padding included.
        pad: how many of them, at the end, are padding.
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

    @property
    def num_groups(self) -> int:
        return len(self.context_lens)

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

    def with_tensors(self, tensors: Sequence[Tensor]) -> SharedPromptLayout:
        """The layout with other copies of its `tensors`, in their order."""
        changes: dict[str, Any] = dict(zip(_TENSORS, tensors, strict=True))
        return replace(self, **changes)

    def pad_to(self, multiple: int) -> SharedPromptLayout:
        """The layout of the row with as little padding behind it as makes its length a multiple of `multiple`."""
        if multiple < 1:
            raise SharedPromptError(checks.explain("multiple", "an int >= 1", multiple))
        tokens = self.num_tokens - self.pad
        pad = -tokens % multiple
        return replace(self, num_tokens=tokens + pad, pad=pad)

    def to(self, device: torch.device | str) -> SharedPromptLayout:
        """The layout on another device, in one copy."""
        device = torch.device(device)
        if same_device(device, self.device):
            return self
        return self.with_tensors(to_device((), self.tensors, device))

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


def shared_prompt_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: SharedPromptLayout,
    *,
    softmax_scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    backend: str = "auto",
    deterministic: bool = False,
) -> Tensor:
    """Causal attention of all prompts and all responses of a packed micro-batch; exact and differentiable.

    A prompt's row sees the rows of its prompt up to itself, a response's row its whole prompt (the context of its
    group) and the rows of its response up to itself: what every sequence would see with a copy of the prompt of its
    own. One launch computes all groups, and autograd records one node. The gradients of a context's keys and values sum
    over the prompt's own rows and all of its responses in float32 and are rounded once.

    Args:
        q: (T, H, d), float16 or bfloat16 (in the reference also float32 or float64); d a multiple of 8, at most 256.
        k, v: (T, H_k, d); H is a multiple of H_k.
        layout: where prompts and responses lie among the T rows, on the device of q.
        softmax_scale: finite and > 0; 1 / sqrt(d) if None.
        sliding_window: a row sees this many positions of its sequence, its own the last of them; None for all.
        softcap: c > 0 replaces every scaled score s by c * tanh(s / c); None or 0 leaves them.
        sinks: (H,) floating point, one score of each head that joins the softmax of every row and carries no value (the
            `s_aux` of transformers); differentiable.
        backend: "cuda" for the kernels, "reference" for the implementation in PyTorch, which is exact and bounded in
            memory, but slow, and reads the layout back from a GPU; "auto" for the kernels on CUDA tensors and for the
            reference on CPU tensors.
        deterministic: gradients bit-identical from run to run, as in `flash_attn_dualkv_varlen_func`.

    q, k and v have a contiguous last dimension, and views of one packed tensor are used without a copy, as in
    `flash_attn_dualkv_varlen_func`; so is autocast.

    Returns:
        out (T, H, d), contiguous, in the dtype of q; 0 in padding rows.

    Raises:
        SharedPromptError (a ValueError), TypeError, ValueError: an argument is not as described.
        SharedPromptUnsupportedError (also a NotImplementedError): a sliding window or a softcap with the CUDA kernels.
            A window that is not smaller than the longest sequence restricts nothing and is accepted.
        NotImplementedError: the head dimension of v is not that of q and k.
        RuntimeError: CUDA tensors in an installation without the compiled module.
    """
    checks.check_are_tensors(_NAMES, (q, k, v))
    checks.check_device("q", q)
    q, k, v = autocast((q, k, v))
    in_reference = _is_reference(backend, q)
    checks.check_alike(_NAMES, (q, k, v), checks.CPU_DTYPES if in_reference else None)
    checks.check_query_shape(q)
    checks.check_pair_shape(q, "k", k, "v", v)
    _check_layout(layout, q, k)
    checks.check_flag("deterministic", deterministic)
    scale = checks.resolve_softmax_scale(softmax_scale, q.shape[2])
    window = _resolve_window(sliding_window, layout)
    cap = _resolve_softcap(softcap)
    if not in_reference:
        _refuse("sliding_window", window)
        _refuse("softcap", cap)
    if sinks is not None:
        _check_sinks(sinks, q)
    out, _ = packed_ops.attend(
        q, k, v, sinks, layout.segments, layout.groups,
        layout.num_context_tokens, scale, window, cap, in_reference, deterministic,
    )  # fmt: skip
    return out


def _is_reference(backend: Any, q: Tensor) -> bool:
    if backend not in BACKENDS:
        raise SharedPromptError(checks.explain("backend", " or ".join(map(repr, BACKENDS)), repr(backend)))
    if backend == "cuda" and not q.is_cuda:
        raise SharedPromptError(checks.explain("backend", f"'auto' or 'reference' for {q.device} tensors", "'cuda'"))
    return backend == "reference" or not q.is_cuda


def _check_layout(layout: Any, q: Tensor, k: Tensor) -> None:
    if not isinstance(layout, SharedPromptLayout):
        raise TypeError(checks.explain("layout", "a SharedPromptLayout", type(layout).__name__))
    tokens = layout.num_tokens
    if q.shape[0] != tokens or k.shape[0] != tokens:
        got = f"{q.shape[0]} in q, {k.shape[0]} in k"
        raise SharedPromptLayoutError(checks.explain("layout", f"{tokens} rows, its num_tokens, in q and k", got))
    if layout.segments.device != q.device:
        expected = f"tensors on {q.device} as q, see layout.to()"
        raise SharedPromptLayoutError(checks.explain("layout", expected, layout.segments.device))


def _resolve_window(sliding_window: Any, layout: SharedPromptLayout) -> int | None:
    """None for a window that hides nothing."""
    if sliding_window is None:
        return None
    checks.check_length("sliding_window", sliding_window)
    if sliding_window < 1:
        raise SharedPromptError(checks.explain("sliding_window", "an int >= 1 or None", sliding_window))
    return None if sliding_window >= layout.max_sequence else int(sliding_window)


def _resolve_softcap(softcap: Any) -> float | None:
    """None for no cap, which FlashAttention writes as 0."""
    if softcap is None or softcap == 0.0:
        return None
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)):
        raise TypeError(checks.explain("softcap", "a float or None", type(softcap).__name__))
    if not 0.0 < softcap < float("inf"):
        raise SharedPromptError(checks.explain("softcap", "a finite number >= 0", softcap))
    return float(softcap)


def _refuse(name: str, value: object) -> None:
    if value is not None:
        expected = 'None for the CUDA kernels, which do not have it (backend="reference" does)'
        raise SharedPromptUnsupportedError(checks.explain(name, expected, value))


def _check_sinks(sinks: Any, q: Tensor) -> None:
    checks.check_are_tensors(("sinks",), (sinks,))
    if not sinks.is_floating_point():
        raise TypeError(checks.explain("sinks", "a floating point tensor", sinks.dtype))
    if sinks.shape != (q.shape[1],):
        raise SharedPromptError(checks.explain("sinks", f"shape ({q.shape[1]},), the heads of q", tuple(sinks.shape)))
    if sinks.device != q.device:
        raise SharedPromptError(checks.explain("sinks", f"device {q.device} (as q)", sinks.device))
