# SPDX-License-Identifier: BSD-3-Clause
"""One attention call as typed structures, from the public function to the launch.

`ForwardCall` and `BackwardCall` are the arguments of the operators `forward` and `backward`, in the
order of their schemas, which are derived from the fields here. torch.library wants arguments flat:
`pack` and `unpack` are the only places that know it. A new option is a field of `Options` and an
argument of `make_options`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar, cast, get_type_hints

import torch
from torch import Tensor

from . import checks


class Options(NamedTuple):
    """Settings of a call, in addition to its tensors.

    softmax_scale: factor of the scores, > 0. causal: a row sees only keys up to its own logical
    position. window_left: positions before its own that a row sees; -1 for all. softcap: bound of
    the scores' magnitude; 0 for none. reference: compute CUDA tensors in PyTorch. mean_keys: how
    many keys a row sees on average, by which the backward chooses its kernels: a wrong number costs
    time. deterministic: gradients bit-identical from run to run. The last two are for the backward
    of the call: autograd has no other way to it.
    """

    softmax_scale: float
    causal: bool
    window_left: int
    softcap: float
    reference: bool
    mean_keys: int
    deterministic: bool

    def check_kernels(self) -> None:
        """NotImplementedError for what only the reference has."""
        if not checks.is_kernel_softcap(self.softcap):
            expected = f"0.0 or {checks.KERNEL_SOFTCAPS[0]} to {checks.KERNEL_SOFTCAPS[1]} for the CUDA kernels"
            raise NotImplementedError(f"softcap: expected {expected}, got {self.softcap}")


def make_options(
    *,
    head_dim: int,
    causal: bool,
    mean_keys: int,
    softmax_scale: Any = None,
    window_left: int = -1,
    softcap: Any = 0.0,
    reference: bool = False,
    deterministic: Any = False,
) -> Options:
    """The options of a call; TypeError or ValueError for what the caller gave wrongly."""
    scale, softcap = checks.resolve_softmax_scale(softmax_scale, head_dim), checks.number("softcap", softcap, zero=True)
    is_deterministic = checks.flag("deterministic", deterministic)
    return Options(scale, causal, window_left, softcap, reference, mean_keys, is_deterministic)


class ForwardCall(NamedTuple):
    """A call of `forward`.

    q: (total_q, H, d). k, v: (rows, H_k, d) and (rows, H_k, d_v). k_decoded, v_decoded: rows that
    follow those of k and v; or None. sinks: (H,), a score of each query head that joins the softmax
    but carries no value; or None. nodes: (n, 8) int32, the table of `nodes.Node`.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    k_decoded: Tensor | None
    v_decoded: Tensor | None
    sinks: Tensor | None
    nodes: Tensor
    options: Options


class BackwardCall(NamedTuple):
    """A call of `backward`: dout (total_q, H, d_v), dlse (H, total_q) or None, and the forward.

    sinks: those of the forward where their gradient is wanted. The others do not depend on them:
    they are in the LSE, by which P = exp(S - LSE) is computed.
    """

    dout: Tensor
    dlse: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor
    k_decoded: Tensor | None
    v_decoded: Tensor | None
    sinks: Tensor | None
    out: Tensor
    lse: Tensor
    nodes: Tensor
    options: Options


def check_call(call: ForwardCall | BackwardCall) -> None:
    """TypeError or ValueError for tensors that no implementation may be handed."""
    inputs = {name: getattr(call, name) for name in ("q", "k", "v", "k_decoded", "v_decoded")}
    if (call.k_decoded is None) != (call.v_decoded is None):
        raise ValueError(checks.explain("v_decoded", "None or a tensor, as k_decoded", "only one of them"))
    given = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    checks.check_alike([*given], [*given.values()], checks.CPU_DTYPES if call.options.reference else None)
    q, k, v = call.q, call.k, call.v
    if q.shape[1] < 1:
        raise ValueError(checks.explain("q", "at least one head", f"shape {tuple(q.shape)}"))
    checks.check_head_dim("q", q.shape[2])
    checks.check_pair_shape(q, "k", k, "v", v)
    if call.k_decoded is not None and call.v_decoded is not None:
        checks.check_pair_shape(q, "k_decoded", call.k_decoded, "v_decoded", call.v_decoded)
        for name, tensor, other in (("k_decoded", call.k_decoded, k), ("v_decoded", call.v_decoded, v)):
            if tensor.shape[1:] != other.shape[1:]:
                raise ValueError(checks.explain(name, f"shape (rows, *{tuple(other.shape[1:])})", tuple(tensor.shape)))
        checks.check_key_rows(call.k_decoded, "k", k)
    checks.number("softmax_scale", call.options.softmax_scale)
    checks.check_table("nodes", call.nodes, q.device)
    out_shape, lse_shape = (*q.shape[:2], v.shape[2]), (q.shape[1], q.shape[0])
    checks.check_sinks(call.sinks, q)
    if isinstance(call, ForwardCall):
        return
    for name, tensor in (("dout", call.dout), ("out", call.out)):
        checks.check_shape(name, tensor, out_shape, q.device, q.dtype)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    for name, statistics in (("lse", call.lse), ("dlse", call.dlse)):
        if statistics is not None:
            checks.check_shape(name, statistics, lse_shape, q.device, lse_dtype)


AnyCall = TypeVar("AnyCall", bound=ForwardCall | BackwardCall)

_SCHEMA_TYPES = {Tensor: "Tensor", Tensor | None: "Tensor?", float: "float", bool: "bool", int: "SymInt"}


def schema(kind: type[NamedTuple]) -> str:
    """The arguments in torch.library's notation.

    None has a default: the dispatcher would leave it out of what it hands to the implementations.
    """
    hints = get_type_hints(kind).items()
    return ", ".join(schema(hint) if hint is Options else f"{_SCHEMA_TYPES[hint]} {name}" for name, hint in hints)


def pack(call: ForwardCall | BackwardCall) -> tuple[Any, ...]:
    """The call as the operators take it."""
    return *call[:-1], *call.options


def unpack(kind: type[AnyCall], arguments: Sequence[Any]) -> AnyCall:
    """The call whose fields an operator was called with."""
    tensors = len(kind._fields) - 1
    return cast(AnyCall, kind._make((*arguments[:tensors], Options(*arguments[tensors:]))))


def inputs_of(call: ForwardCall | BackwardCall) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The tensors of rows that `backward` has gradients of, where there are these tensors."""
    return call.q, call.k, call.v, call.k_decoded, call.v_decoded
