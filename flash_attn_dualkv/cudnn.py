# SPDX-License-Identifier: BSD-3-Clause
"""cuDNN Flex Attention as a backend of packed rows, for GPUs of which this package has no kernels of its own.

NVIDIA's kernels (package nvidia-cudnn-frontend, module cudnn.flex_attention) are native on Hopper and on data-center
Blackwell. They take masks that are a few intervals of keys for each row: of a packed row these are the nodes of its
path. Results are exact; what only this package promises is lost: a row's bits may depend on the batch, and NaN in keys
that a row does not see may reach it.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from . import kernels, ops
from .calls import Options
from .errors import SharedPromptError, say_once
from .host import untraced
from .layout import SharedPromptLayout

MODULE = "cudnn.flex_attention"
FAMILIES = ((9, 0), (10, 0), (10, 3))  # compute capabilities that it has kernels for
FAR = 1 << 30
# What a first use is tried on, and the most that results may differ in norm: more than roundings
# of P, dS and results to bf16 make, less than a wrong mask, scale or sum.
TRIAL_NODES = (200, 130, 1, 300, 64), (-1, 0, 0, 2, -1)
TRIAL_DIFFERENCE = 0.02


# --- the mask ---


def endpoints(
    node_lens: Sequence[int], parents: Sequence[int], device: torch.device | str, window_left: int = -1
) -> Tensor:
    """Rows that each row sees, as intervals: [0, F0), [F1, F2), [F3, F4) and so on.

    A row's intervals are the nodes of its path, neighbours in the packed row as one, up to the row itself. In front of
    a window they begin later: keys of a run that begins at row r and position p have the position `key + p - r`.

    Args:
        node_lens, parents: of a tree in depth-first order, as in SharedPromptLayout.
        window_left: positions before its own that a row sees; -1 for all.

    Returns:
        (1, F, rows) int32, F odd, ascending in F. It grows with the depth of the tree.
    """
    begins = [*accumulate(node_lens, initial=0)]
    ends: list[int] = []  # positions after the last row of each node
    paths: list[list[tuple[int, int, int]]] = []  # of each node the runs of its path: first row, end, first position
    for node, (length, parent) in enumerate(zip(node_lens, parents)):
        position = ends[parent] if parent >= 0 else 0
        runs = [*paths[parent]] if parent >= 0 else []
        run = begins[node], begins[node + 1], position
        if runs and runs[-1][1] == run[0]:
            run = runs[-1][0], run[1], runs[-1][2]
            runs.pop()
        paths.append([*runs, run])
        ends.append(position + length)
    from_zero = window_left < 0 and all(path[0][0] == 0 for path in paths)  # the first interval is a run of the path
    count = max(map(len, paths), default=1) + (not from_zero)
    front = [] if from_zero else [(0, 0, 0)]
    padded = [
        [*front, *runs, (begin, FAR, place), *[(FAR, FAR, 0)] * count][:count] for *runs, (begin, _, place) in paths
    ]
    table = torch.tensor(padded, dtype=torch.int32).reshape(len(paths), count, 3).permute(2, 1, 0)
    own = [(end - length, begin) for end, length, begin in zip(ends, node_lens, begins)]
    positions = torch.tensor(own, dtype=torch.int32).reshape(-1, 2).T
    lens = torch.tensor(node_lens, dtype=torch.int64).to(device)
    expanded = [tensor.to(device).repeat_interleave(lens, -1, output_size=begins[-1]) for tensor in (table, positions)]
    (firsts, lasts, places), (own_position, own_begin) = expanded
    row = torch.arange(begins[-1], dtype=torch.int32, device=device)
    if window_left >= 0:
        oldest = own_position + row - own_begin - window_left
        firsts = torch.maximum(firsts, torch.minimum(oldest - places + firsts, lasts))
    flat = torch.minimum(torch.stack([firsts, lasts], 1).flatten(0, 1), row + 1)
    return flat[1:][None].contiguous()


def _plan(layout: SharedPromptLayout, window_left: int, q: Tensor, k: Tensor, v: Tensor) -> Any:
    """cuDNN's plan of a layout for layers of one kind, which is made once: it waits for the GPU."""
    builds_backward = ops.requires_grad((q, k, v))
    key = window_left, q.shape[2:], k.shape[2:], v.shape[3], q.dtype, builds_backward
    plans: dict[Any, Any] = layout.__dict__.setdefault("_cudnn_plans", {})
    if key not in plans:
        mask = endpoints(layout.node_lens, layout.node_parents, q.device, window_left)
        plans[key] = _module().create_mask_plan(mask, q, k, v, build_backward=builds_backward)
    return plans[key]


# --- attention ---


def attend(
    q: Tensor, k: Tensor, v: Tensor, layout: SharedPromptLayout, options: Options, sinks: Tensor | None
) -> Tensor:
    """O of checked arguments of `shared_prompt_attention`, by cuDNN; differentiable.

    A sink is a key with the value 0: it takes its share of the softmax, 1 - sigmoid(LSE - sink), from the whole row.
    """
    rows = layout.num_tokens - layout.pad
    if ops.requires_grad((q, k, v)):
        q, k, v = ops.GuardedInputs.apply(q, k, v)
    parts = [tensor[:rows].contiguous()[None] for tensor in (q, k, v)]
    out, lse = _module().flex_attn_func(
        *parts, mask_plan=_plan(layout, options.window_left, *parts), softmax_scale=options.softmax_scale,
        deterministic=kernels.is_deterministic(options.deterministic), return_lse=True,
    )  # fmt: skip
    if sinks is not None:
        share = torch.sigmoid(lse[0] - sinks.to(lse.dtype)[:, None])
        out = (out * share.T[None, :, :, None]).to(q.dtype)
    return torch.nn.functional.pad(out[0], (0, 0, 0, 0, 0, layout.pad))


# --- whether it serves ---


@functools.cache
def _imported() -> Any:
    """cuDNN's module, or the reason why there is none."""
    try:
        return importlib.import_module(MODULE)
    except ImportError as error:
        return f"{MODULE} does not import ({error}): pip install nvidia-cudnn-frontend"


def _module() -> Any:
    return _imported()


@functools.cache
def capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def is_default(device: int) -> bool:
    """True if "auto" is cuDNN on a GPU: data-center Blackwell runs this package's kernels only from PTX."""
    return capability(device)[0] == 10


def unavailable(device: int) -> str | None:
    """Why cuDNN Flex Attention does not run at all; None if it does."""
    if capability(device) not in FAMILIES:
        return "a GPU of compute capability {}.{}".format(*capability(device))
    found = _imported()
    return found if isinstance(found, str) else None


def lacks(q: Tensor, v: Tensor, layout: SharedPromptLayout, options: Options) -> str | None:
    """Reason why cuDNN cannot run a call: what it lacks; None if it can."""
    if options.softcap:
        return "a softcap"
    if layout.query_rows is not None:
        return "queries of some rows alone"
    dims = q.shape[2], v.shape[2]
    if max(dims) > 128 and dims not in ((192, 128), (256, 256)):
        return "head dims of {} and {}".format(*dims)
    return None if layout.num_tokens > layout.pad else "calls without rows"


def _attend_if_chosen(
    backend: str, q: Tensor, k: Tensor, v: Tensor, layout: SharedPromptLayout, options: Options, sinks: Tensor | None
) -> Tensor | None:
    """O by cuDNN where it is asked for, or the default; None for what it lacks, which is said once.

    Raises:
        SharedPromptError: it is asked for and does not run here.
    """
    device = q.get_device()
    problem = unavailable(device)
    if problem is not None:
        if backend == "cudnn":
            expected = "'auto' or 'cuda' where cuDNN Flex Attention does not run"
            raise SharedPromptError("backend", expected, f"'cudnn', and {problem}")
        return None
    missing = lacks(q, v, layout, options)
    if missing is None:
        heads, dims = (q.shape[1], k.shape[1]), (q.shape[2], v.shape[2])
        missing = _trial(q.device, q.dtype, heads, dims, sinks is not None)
    if missing is None:
        with torch.cuda.device(device):
            return attend(q, k, v, layout, options, sinks)
    say_once(f"attention runs on the kernels of this package: cuDNN Flex Attention lacks {missing}")
    return None


attend_if_chosen = untraced(_attend_if_chosen, "cuDNN's plan of a layout is made by the host, which waits for the GPU")


@functools.cache
def _trial(*kind: Any) -> str | None:
    """Compares cuDNN with this package's kernels on a tree, output and gradients; None if they agree.

    For limits that cuDNN does not say, and GPUs that this package was never run on. In a thread of its own: what the
    caller's has switched on (checkpointing's hooks, inference mode, autocast) would take part.
    """
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_tried, *kind).result()


def _tried(
    device: torch.device, dtype: torch.dtype, heads: tuple[int, int], dims: tuple[int, int], has_sinks: bool
) -> str | None:
    layout = SharedPromptLayout.from_tree(*TRIAL_NODES, device=device)
    source = torch.Generator(device).manual_seed(0)
    sizes = [(heads[0], dims[0]), (heads[1], dims[0]), (heads[1], dims[1])]
    leaves = [
        torch.randn(layout.num_tokens, *size, generator=source, device=device).to(dtype).requires_grad_()
        for size in sizes
    ]
    if has_sinks:
        leaves.append(torch.randn(heads[0], generator=source, device=device).requires_grad_())
    (q, k, v), sinks = leaves[:3], leaves[3] if has_sinks else None
    options = Options(dims[0] ** -0.5, True, -1, 0.0, False, layout.mean_keys, False)
    with torch.cuda.device(q.get_device()):
        expected = ops.attend(q, k, v, layout.nodes, options, sinks=sinks)[0]
        dout = torch.randn(expected.shape, generator=source, device=device).to(dtype)
        wanted = [expected, *torch.autograd.grad(expected, leaves, dout)]
        try:
            out = attend(q, k, v, layout, options, sinks)
            got = [out, *torch.autograd.grad(out, leaves, dout)]
        except Exception as error:  # of a compiler, a driver, or a limit
            return f"what it needs on this GPU ({type(error).__name__}: {error})"
    for name, tensor, other in zip(("O", "dQ", "dK", "dV", "the sinks' gradient"), got, wanted):
        apart = ((tensor.float() - other.float()).norm() / other.float().norm()).item()
        if not apart <= TRIAL_DIFFERENCE:
            return f"exactness on this GPU ({name} differs from this package's by {apart:.3f} in norm)"
    return None
