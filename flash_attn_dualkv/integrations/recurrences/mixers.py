# SPDX-License-Identifier: BSD-3-Clause
"""Replacements, for calls with a layout, of the functions that mix tokens in hybrid models.

Each takes the function of the model file that it stands for and calls it: on the packed row with context inserted, or
level by level with states handed on. Only arguments that say what is mixed are known here; all others are passed on.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...errors import SharedPromptError
from ...layout import SharedPromptLayout
from ...pieces import PieceLayout
from ..common.patching import closure_of
from .known_bugs import check_gated_backward
from .levels import Level, levels_of, tails_of
from .rows import hand_on, insert_tails, put_rows, take_rows

Mixer = Callable[..., Any]
# Scan of a level: its rows of all inputs, (rows, ...) each, and its first states -> its rows of the
# output and its last states.
Scan = Callable[[Level, Sequence[Tensor], Tensor | None], tuple[Tensor, Tensor | None]]
# Scan of n sequences of one length: all inputs, (n, length, ...) each, their first states, and
# whether the last states are needed.
PaddedScan = Callable[[Sequence[Tensor], Tensor | None, bool], tuple[Tensor, Tensor | None]]


def convolution(stock: Mixer, layout: SharedPromptLayout, *args: Any, **kwargs: Any) -> Tensor:
    """A causal convolution of few inputs: (1, C, T), weight (C, K) -> (1, C, T)."""
    (x, weight, *others), kwargs = _positional(args, kwargs, ("hidden_states", "x"), ("weight",))
    _check_unused("convolution", kwargs, "seq_idx", "cu_seqlens", "initial_states", "final_states_out")

    def convolve(rows: Tensor) -> Tensor:
        out: Tensor = stock(rows.transpose(1, 2), weight, *others, **kwargs)
        return out.transpose(1, 2)

    return _behind_tails(convolve, layout, x.transpose(1, 2), weight).transpose(1, 2)


def row_convolution(stock: Mixer, layout: SharedPromptLayout, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """The causal convolution of flash-linear-attention: (1, T, C), weight (C, K) -> (1, T, C)."""
    (x, weight, *others), kwargs = _positional(args, kwargs, ("x",), ("weight",))
    _check_unused("convolution", kwargs, "cu_seqlens", "initial_state", "output_final_state")
    return _behind_tails(lambda rows: stock(rows, weight, *others, **kwargs)[0], layout, x, weight), None


def _behind_tails(
    convolve: Callable[[Tensor], Tensor], layout: SharedPromptLayout, x: Tensor, weight: Tensor
) -> Tensor:
    """Convolve (1, T, C), each segment behind the last inputs of its path."""
    _check_rows(x, layout)
    width = weight.shape[-1] - 1
    tails = tails_of(layout, width, x.device)
    rows, above = layout.states_above(x[0], x) if isinstance(layout, PieceLayout) else (x[0], None)
    rows = insert_tails(rows if above is None else torch.cat([rows, above.flatten(0, 1)]), tails)
    if isinstance(layout, PieceLayout) and len(tails.wanted):
        rows = layout.keep_states(rows, take_rows(rows, tails.wanted).unflatten(0, (-1, width)))
    return take_rows(convolve(rows[None])[0], tails.own)[None]


def gated_delta_rule(stock: Mixer, layout: SharedPromptLayout, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """Linear attention whose state forgets and is corrected: q, k, v, g and beta (1, T, H, ...) -> (1, T, H, d_v)."""
    names = ("query", "q"), ("key", "k"), ("value", "v"), ("g",), ("beta",)
    (*inputs, g, beta), kwargs = _positional(args, kwargs, *names)
    _check_unused("linear attention", kwargs, "cu_seqlens", "initial_state", "seq_idx", "output_final_state")
    implementation = implementation_of(stock)
    options = inspect.signature(implementation).parameters if _package(implementation) == "fla" else {}
    is_fla = "cu_seqlens" in options
    if is_fla and torch.is_grad_enabled() and g.dim() == 3:  # decay per head; per channel it has other kernels
        check_gated_backward(g.device)

    def packed(level: Level, rows: Sequence[Tensor], states: Tensor | None) -> tuple[Tensor, Tensor | None]:
        q, k, v, g, beta = (one[None] for one in rows)
        # Offsets are passed on the host too, which saves a wait for the GPU.
        host = dict(cu_seqlens_cpu=level.cu_seqlens_host) if "cu_seqlens_cpu" in options else {}
        out, last = stock(
            q, k, v, g=g, beta=beta, initial_state=states, output_final_state=level.has_children,
            cu_seqlens=level.cu_seqlens, **host, **kwargs,
        )  # fmt: skip
        return out[0], last

    def padded(rows: Sequence[Tensor], states: Tensor | None, needs_last: bool) -> tuple[Tensor, Tensor | None]:
        # Zero rows leave the state as it is: they forget nothing (log of 1) and write nothing.
        q, k, v, g, beta = rows
        out, last = stock(q, k, v, g=g, beta=beta, initial_state=states, output_final_state=needs_last, **kwargs)
        return out, last

    return _by_levels(layout, [*inputs, g, beta], packed if is_fla else _in_buckets(padded)), None


def mamba2_scan(stock: Mixer, layout: SharedPromptLayout, *args: Any, **kwargs: Any) -> Tensor:
    """Mamba-2's state space: x and gates z (1, T, H, p), dt (1, T, H), A (H,), B and C (1, T, G, n) -> (1, T, H, p)."""
    names = ("hidden_states", "x"), ("dt",), ("A",), ("B",), ("C",)
    (x, dt, A, B, C), kwargs = _positional(args, kwargs, *names)
    unused = "initial_states", "return_final_states", "seq_idx", "cu_seqlens", "return_varlen_states"
    _check_unused("mamba", kwargs, *unused)
    dt = _step_sizes(stock, dt, kwargs)
    z = kwargs.pop("z", None)
    gates = [] if z is None else [z]

    def padded(rows: Sequence[Tensor], states: Tensor | None, needs_last: bool) -> tuple[Tensor, Tensor | None]:
        # A step of size 0 leaves the state as it is.
        x, dt, B, C, *gates = rows
        gated = dict(zip(("z",), gates))
        found = stock(x, dt, A, B, C, **gated, initial_states=states, return_final_states=needs_last, **kwargs)
        out, last = found if needs_last else (found, None)
        return out, last

    return _by_levels(layout, [x, dt, B, C, *gates], _in_buckets(padded))


def mamba2_by_parts(convolve: Mixer, scan: Mixer) -> Mixer:
    """Replacement of mamba-ssm's kernel of convolution, scan and gate in one, whose convolution begins with zeros.

    Args:
        convolve: causal-conv1d's function.
        scan: mamba-ssm's `mamba_chunk_scan_combined`.
    """

    def compute(
        stock: Mixer,
        layout: SharedPromptLayout,
        zxbcdt: Tensor,
        conv1d_weight: Tensor,
        conv1d_bias: Tensor,
        dt_bias: Tensor,
        A: Tensor,
        *,
        D: Tensor,
        activation: str = "silu",
        headdim: int | None = None,
        ngroups: int = 1,
        norm_before_gate: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Gates, inputs, B, C and step sizes side by side (1, T, ...) -> (1, T, H p).

        There is no norm, so that `norm_before_gate` means nothing.
        """
        _check_unused("mamba", kwargs, "rmsnorm_weight", "outproj_weight", "outproj_bias")
        heads, channels = len(A), len(conv1d_weight)
        width = heads * (D.shape[1] if headdim is None else headdim)
        z, inputs, dt = zxbcdt.split([width, channels, heads], -1)
        mixed = convolution(
            convolve, layout, inputs.transpose(1, 2), conv1d_weight, conv1d_bias, activation=activation
        ).transpose(1, 2)
        x, B, C = mixed.split([width, *[(channels - width) // 2] * 2], -1)
        B, C = (one.unflatten(-1, (ngroups, -1)) for one in (B, C))
        x, z = (one.unflatten(-1, (heads, -1)) for one in (x, z))
        kwargs |= dict(z=z, D=D, dt_bias=dt_bias, dt_softplus=True)
        return mamba2_scan(scan, layout, x, dt, A, B, C, **kwargs).flatten(2)

    return compute


def no_fused_scan(stock: Mixer, layout: SharedPromptLayout, *args: Any, **kwargs: Any) -> None:
    """Mamba-2's convolution, scan, norm and projection in one kernel: not with a layout, then the parts are called."""
    return


def _step_sizes(stock: Mixer, dt: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """The sizes of Mamba-2's steps as the scan would compute them; takes what they are made of from its arguments.

    Before rows are padded: there must be a step of exactly 0.
    """
    bias, has_softplus = kwargs.pop("dt_bias", None), kwargs.pop("dt_softplus", False)
    low, high = kwargs.pop("dt_limit", (0.0, float("inf")))
    if _package(implementation_of(stock)) == "mamba_ssm":  # mamba_ssm's kernels compute them in float32
        dt = dt.float()
    if bias is not None:
        dt = dt + bias.to(dt.dtype)
    if has_softplus:
        dt = functional.softplus(dt)
    return dt.clamp(low, high)


# --- levels ---------------------------------------------------------------------------------------


def _by_levels(layout: SharedPromptLayout, inputs: Sequence[Tensor], scan: Scan) -> Tensor:
    """Compute (1, T, ...) inputs level by level; rows that are padding come out as zeros."""
    for one in inputs:
        _check_rows(one, layout)
    plan = levels_of(layout, inputs[0].device)
    rows = [one[0] if plan.order is None else take_rows(one[0], plan.order) for one in inputs]
    behind: list[Tensor] = []  # states that are given, and of each level
    if isinstance(layout, PieceLayout):
        rows[0], above = layout.states_above(rows[0])
        behind += [] if above is None else [above]
    outs: list[Tensor] = []
    for level in plan.levels:
        states = None
        if level.parents is not None and level.children is not None:
            states = hand_on(_joined(behind if level.reads_all else behind[-1:]), level.parents, level.children)
        out, last = scan(level, [one[level.begin : level.end] for one in rows], states)
        outs.append(out)
        if last is not None:
            behind.append(last)
    if not outs:
        raise SharedPromptError("shared_prompt_layout", "a row with tokens", "one of padding only")
    if isinstance(layout, PieceLayout) and len(plan.wanted):
        outs[0] = layout.keep_states(outs[0], take_rows(_joined(behind), plan.wanted))
    if plan.order is not None:
        return put_rows(torch.cat(outs), plan.order, plan.total)[None]
    padding = plan.total - plan.levels[-1].end
    if padding:
        outs.append(outs[0].new_zeros(padding, *outs[0].shape[1:]))
    return torch.cat(outs)[None]


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat([*tensors])


def _in_buckets(scan: PaddedScan) -> Scan:
    """A scan of levels, from one of sequences of equal length with zeros behind those that are shorter."""

    def of_level(level: Level, rows: Sequence[Tensor], states: Tensor | None) -> tuple[Tensor, Tensor | None]:
        sizes = [count * longest for count, longest in level.buckets]
        if level.places is not None:
            rows = [put_rows(one, level.places, sum(sizes)) for one in rows]
        firsts: Sequence[Tensor | None] = [None] * len(sizes)
        if states is not None:
            ordered = states if level.order is None else take_rows(states, level.order)
            firsts = ordered.split([count for count, _ in level.buckets])
        outs: list[Tensor] = []
        lasts: list[Tensor] = []
        for shape, first, *own in zip(level.buckets, firsts, *(one.split(sizes) for one in rows)):
            out, last = scan([one.unflatten(0, shape) for one in own], first, level.has_children)
            outs.append(out.flatten(0, 1))
            lasts += [] if last is None else [last]
        out = torch.cat(outs) if level.places is None else take_rows(torch.cat(outs), level.places)
        if lasts and level.order is not None:
            return out, put_rows(torch.cat(lasts), level.order, len(level.order))
        return out, torch.cat(lasts) if lasts else None

    return of_level


# --- calls ----------------------------------------------------------------------------------------


def implementation_of(stock: Mixer) -> Mixer:
    """The implementation behind a function of a model file: itself, or a package's."""
    if isinstance(stock, nn.Module) and "forward" not in vars(stock):  # made by the package kernels, not replaced
        stock = closure_of(type(stock).forward).get("func", stock)
    return closure_of(stock).get("implementation", stock)


def _package(function: Mixer) -> str:
    return str(getattr(function, "__module__", "")).split(".")[0]


def _positional(args: Sequence[Any], kwargs: dict[str, Any], *names: Sequence[str]) -> tuple[list[Any], dict[str, Any]]:
    """The first arguments of a call, given by position or by one of their names; and the other named ones."""
    kwargs, values = dict(kwargs), list(args)
    for known in names[len(values) :]:
        given = [name for name in known if name in kwargs]
        if not given:
            raise SharedPromptError(known[0], "an argument of every call", "none")
        values.append(kwargs.pop(given[0]))
    return values, kwargs


def _check_unused(kind: str, kwargs: dict[str, Any], *names: str) -> None:
    """Take arguments out that a layout replaces; SharedPromptError for those that are given."""
    for name in names:
        value = kwargs.pop(name, None)
        if value is not None and value is not False:
            expected = f"none for {kind} with a shared prompt (call the model with use_cache=False)"
            raise SharedPromptError(name, expected, type(value).__name__)


def _check_rows(one: Tensor, layout: SharedPromptLayout) -> None:
    """SharedPromptError unless the batch (B, T, ...) is the layout's packed row."""
    if one.shape[0] != 1 or one.shape[1] != layout.num_tokens:
        expected = f"1 row of {layout.num_tokens} tokens (as the layout)"
        raise SharedPromptError("input_ids", expected, f"{one.shape[0]} of {one.shape[1]}")
