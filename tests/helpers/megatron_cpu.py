# SPDX-License-Identifier: BSD-3-Clause
"""Megatron-Core on a machine without a GPU: what it makes on "cuda" is made on the CPU, and streams are none."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class _CudaIsCpu(TorchFunctionMode):
    """Tensors that are asked for on a GPU are made on the CPU, and say that they are on a GPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return function(*args).replace("torch.", "torch.cuda.")
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return function(*args, **kwargs)


def _to_cpu(tensor: Any, as_numpy: bool = False, **_: Any) -> Any:
    """Megatron's own makes arrays of what comes from a GPU alone, and wants them as sizes of what ranks exchange."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _all_gather(parts: list[Any], own: Any, group: Any = None, **options: Any) -> Any:
    """gloo's gathers equal parts only; ranks that divide experts and their matrices have other numbers of rows."""
    if len({part.shape for part in parts}) == 1:
        return _stock_all_gather(parts, own, group=group, **options)
    for rank, part in enumerate(parts):
        if rank == torch.distributed.get_rank(group):
            part.copy_(own)
        torch.distributed.broadcast(part, group=group, group_src=rank)
    return None


def _reduce_scatter(output: Any, parts: list[Any], group: Any = None, **options: Any) -> Any:
    if len({part.shape for part in parts}) == 1:
        return _stock_reduce_scatter(output, parts, group=group, **options)
    for rank, part in enumerate(parts):
        total = part.clone()
        torch.distributed.all_reduce(total, group=group)
        if rank == torch.distributed.get_rank(group):
            output.copy_(total)
    return None


_stock_all_gather, _stock_reduce_scatter = torch.distributed.all_gather, torch.distributed.reduce_scatter
_stock_new_group, _groups = torch.distributed.new_group, dict[Any, Any]()


def _on_cpu(function: Any, *args: Any) -> Any:
    with _CudaIsCpu():
        return function(*args)


class _Stream:
    """Stands for a stream or an event: everything has happened when it is asked for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Stream


def _new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **options: Any) -> Any:
    """One group for the same ranks. A thread of each gloo group wakes up every 10 ms, used or not, and Megatron makes
    twenty: behind as many cases of verl four ranks had 5,000 threads, and two cores did little else.
    """
    key = (torch.distributed.group.WORLD, tuple(ranks or ()), backend)
    if key not in _groups:
        _groups[key] = _stock_new_group(ranks, timeout, backend, *args, **options)
    return _groups[key]


def _causal_conv1d(x: Any, weight: Any, bias: Any, activation: str, cu_seqlens: Any = None, **_: Any) -> Any:
    """x (1, T, C), weight (C, K), of the sequences between cu_seqlens -> (1, T, C)."""
    assert activation == "silu"
    lengths = [x.shape[1]] if cu_seqlens is None else cu_seqlens.diff().tolist()
    longer = [functional.pad(one.transpose(1, 2), (weight.shape[1] - 1, 0)) for one in x.split(lengths, 1)]
    mixed = [functional.conv1d(one, weight[:, None], bias, groups=len(weight)) for one in longer]
    return functional.silu(torch.cat(mixed, 2)).transpose(1, 2), None


def _chunk_gated_delta_rule(
    q: Any, k: Any, v: Any, g: Any, beta: Any, initial_state: Any = None, cu_seqlens: Any = None, **options: Any
) -> Any:
    """Megatron's own, which takes one sequence, for all that lie between cu_seqlens."""
    from megatron.core.ssm.gated_delta_net import torch_chunk_gated_delta_rule

    ends = [0, q.shape[1]] if cu_seqlens is None else cu_seqlens.tolist()
    found = []
    for place, (begin, end) in enumerate(itertools.pairwise(ends)):
        own = [one[:, begin:end] for one in (q, k, v, g, beta)]
        state = None if initial_state is None else initial_state[place : place + 1]
        found.append(torch_chunk_gated_delta_rule(*own, initial_state=state, **options))
    outs, states = zip(*found)
    return torch.cat(outs, 1), None if states[0] is None else torch.cat(states)


_chunk_gated_delta_rule.__module__ = "fla.ops.gated_delta_rule"  # so that it is called as that is


@contextlib.contextmanager
def fla_in_pytorch() -> Iterator[None]:
    """Megatron's gated delta nets without flash-linear-attention, whose kernels need a GPU."""
    files = [file for name, file in sys.modules.items() if name.startswith("megatron.core.ssm.gated_delta_net")]
    functions = dict(
        HAVE_FLA=True, causal_conv1d=_causal_conv1d, chunk_gated_delta_rule=_chunk_gated_delta_rule,
        l2norm=lambda x: x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt(),
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        for file in files:
            own = {name: function for name, function in functions.items() if hasattr(file, name)}
            stack.enter_context(patch.multiple(file, **own))
        yield


def mamba_chunk_scan_combined(
    x: Any, dt: Any, A: Any, B: Any, C: Any, chunk_size: int, D: Any = None, z: Any = None, dt_bias: Any = None,
    initial_states: Any = None, seq_idx: Any = None, cu_seqlens: Any = None, dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")), return_final_states: bool = False,
    return_varlen_states: bool = False, state_dtype: Any = None,
) -> Any:  # fmt: skip
    """mamba-ssm's, over all rows at once: x, z (b, T, H, p), dt (b, T, H), B, C (b, T, G, n) -> (b, T, H, p)."""
    assert seq_idx is None and cu_seqlens is None and not return_varlen_states and chunk_size > 0
    dt = dt.float() if dt_bias is None else dt.float() + dt_bias
    dt = (functional.softplus(dt) if dt_softplus else dt).clamp(*dt_limit)
    B, C = (one.repeat_interleave(x.shape[2] // one.shape[2], 2).to(dt.dtype) for one in (B, C))
    decay = (dt * A).cumsum(1)
    between = decay[:, :, None] - decay[:, None]
    later = torch.ones(2 * x.shape[1:2], dtype=torch.bool).triu(1)[:, :, None]
    weights = torch.einsum("bthn,bshn->btsh", C, B) * between.masked_fill(later, -torch.inf).exp()
    steps = x.to(dt.dtype) * dt[..., None]
    out = torch.einsum("btsh,bshp->bthp", weights, steps)
    last = torch.einsum("bshn,bsh,bshp->bhpn", B, (decay[:, -1:] - decay).exp(), steps)
    if initial_states is not None:
        out = out + torch.einsum("bthn,bth,bhpn->bthp", C, decay.exp(), initial_states.to(dt.dtype))
        last = last + decay[:, -1].exp()[..., None, None] * initial_states
    if D is not None:
        out = out + x * (D if D.dim() == 2 else D[:, None])
    out = (out if z is None else out * functional.silu(z)).to(x.dtype)
    last = last if state_dtype is None else last.to(state_dtype)
    return (out, last) if return_final_states else out


def mamba_split_conv1d_scan_combined(
    zxbcdt: Any, conv1d_weight: Any, conv1d_bias: Any, dt_bias: Any, A: Any, D: Any, chunk_size: int,
    initial_states: Any = None, seq_idx: Any = None, dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False, activation: str = "silu", rmsnorm_weight: Any = None, rmsnorm_eps: float = 1e-6,
    outproj_weight: Any = None, outproj_bias: Any = None, headdim: int | None = None, ngroups: int = 1,
    norm_before_gate: bool = True, state_dtype: Any = None,
) -> Any:  # fmt: skip
    """mamba-ssm's, without its norm and projection: (b, T, z + x + B + C + dt) -> (b, T, H p)."""
    assert initial_states is None and rmsnorm_weight is None and outproj_weight is None and not return_final_states
    heads, headdim = D.shape if D.dim() == 2 else (len(D), headdim)
    if seq_idx is not None and len(lengths := seq_idx[0].unique_consecutive(return_counts=True)[1]) > 1:
        given: Any = dict(D=D, chunk_size=chunk_size, activation=activation, headdim=headdim, ngroups=ngroups)
        parts = zxbcdt.split(lengths.tolist(), 1)
        parameters = conv1d_weight, conv1d_bias, dt_bias, A
        return torch.cat([mamba_split_conv1d_scan_combined(one, *parameters, **given) for one in parts], 1)
    channels = len(conv1d_weight)
    z, xbc, dt = zxbcdt.split([heads * headdim, channels, heads], -1)
    xbc = causal_conv1d_fn(xbc.transpose(1, 2), conv1d_weight, conv1d_bias, activation=activation).transpose(1, 2)
    x, B, C = xbc.split([heads * headdim, *[(channels - heads * headdim) // 2] * 2], -1)
    x, z = (one.unflatten(-1, (heads, headdim)) for one in (x, z))
    B, C = (one.unflatten(-1, (ngroups, -1)) for one in (B, C))
    options: Any = dict(dt_bias=dt_bias, dt_softplus=True, dt_limit=dt_limit, state_dtype=state_dtype)
    return mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size, D, z, **options).flatten(2)


def causal_conv1d_fn(x: Any, weight: Any, bias: Any = None, activation: str | None = None, **_: Any) -> Any:
    """causal-conv1d's: x (b, C, T), weight (C, K) -> (b, C, T)."""
    return _causal_conv1d(x.transpose(1, 2), weight, bias, activation)[0].transpose(1, 2)


for _function in (mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined):
    _function.__module__ = "mamba_ssm.ops.triton.ssd_combined"  # so that they are called as those are


class _GatedRMSNorm(torch.nn.Module):
    """Megatron's over mamba-ssm's, as it is called: of groups of channels, without gates."""

    def __init__(
        self, hidden: int, *, eps: float, group_size: int, norm_before_gate: bool, device: Any, dtype: Any
    ) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden, device=device, dtype=dtype))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: Any) -> Any:
        groups = x.unflatten(-1, (-1, self.group_size))
        return functional.rms_norm(groups, groups.shape[-1:], eps=self.eps).flatten(-2) * self.weight


@contextlib.contextmanager
def mamba_in_pytorch() -> Iterator[None]:
    """Megatron's Mamba mixers without mamba-ssm and causal-conv1d, whose kernels need a GPU."""
    from megatron.core.ssm import mamba_mixer

    functions = (mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined, causal_conv1d_fn)
    own = {function.__name__: function for function in functions}
    own |= dict(HAVE_MAMBA_SSM=True, ExtendedRMSNorm=_GatedRMSNorm, is_mamba_min_version=lambda _: True)
    # Versions of Megatron before 0.19 have no argument for the type of states.
    with (
        patch.multiple(mamba_mixer, **own, is_causal_conv1d_min_version=lambda _: True),
        patch.object(mamba_mixer, "MAMBA_HAS_STATE_DTYPE", True, create=True),
    ):
        yield


@contextlib.contextmanager
def without_a_gpu() -> Iterator[None]:
    """What Megatron asks of PyTorch and its own functions that need a GPU."""
    from megatron.core.fusions import fused_softmax
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    importlib.import_module("megatron.core.ssm.gated_delta_net")
    state = torch.get_rng_state()
    cuda = dict(
        current_device=lambda: "cpu", synchronize=lambda *_: None, is_initialized=lambda: False, Stream=_Stream,
        Event=_Stream, stream=_Stream, current_stream=_Stream, manual_seed=lambda _: None,
        get_rng_state=lambda *_, **__: state, set_rng_state=lambda *_, **__: None,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.multiple(torch.cuda, **cuda))
        stack.enter_context(patch.object(torch.cuda.random, "get_rng_state", lambda *_, **__: state))
        groups = dict(all_gather=_all_gather, reduce_scatter=_reduce_scatter, new_group=_new_group)
        stack.enter_context(patch.multiple(torch.distributed, **groups))
        stack.enter_context(patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _to_cpu))
        stack.enter_context(patch.object(random, "_set_cuda_rng_state", lambda *_, **__: None))
        stack.enter_context(fla_in_pytorch())
        stack.enter_context(mamba_in_pytorch())
        stack.enter_context(_CudaIsCpu())
        # Recomputation in a backward is outside of modes.
        stock = fused_softmax.get_sliding_window_causal_mask
        stack.enter_context(
            patch.object(fused_softmax, "get_sliding_window_causal_mask", lambda *args: _on_cpu(stock, *args))
        )
        # Functions of a line or two are fused, which takes longer than everything else here.
        stack.enter_context(torch._dynamo.config.patch(disable=True))
        yield


@contextlib.contextmanager
def megatron_on_the_cpu(
    tensor: int = 1, pipeline: int = 1, virtual: int | None = None, context: int = 1, **experts: int
) -> Iterator[None]:
    """Megatron's parallel state for this process, in the default group or in one of its own, and its random numbers.

    Args:
        tensor, pipeline, virtual, context: sizes of tensor, pipeline, virtual pipeline and context parallelism.
        experts: what else Megatron's function takes, `expert_model_parallel_size` for one.
    """
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    own = not torch.distributed.is_initialized()
    with without_a_gpu():
        if own:
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.initialize_model_parallel(tensor, pipeline, virtual, context_parallel_size=context, **experts)
        random.model_parallel_cuda_manual_seed(1)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            if own:
                _groups.clear()
                torch.distributed.destroy_process_group()


os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # asked for by Megatron's sequence parallelism
