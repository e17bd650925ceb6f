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
