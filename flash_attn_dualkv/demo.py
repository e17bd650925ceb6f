"""One GRPO group, attended twice: with the prompt stored once, and the usual way with a copy for every response.

    python -m flash_attn_dualkv.demo

Both must give the same output and the same gradients. In the replicated layout every response has its own copy of the
prompt; the demo gives each copy a share of the prompt's output gradient and sums the gradients of the copies, which is
what autograd does where the copies come from one tensor.
"""

from __future__ import annotations

import argparse
import inspect
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from . import build_info, flash_attn_dualkv_varlen_func

# Largest difference allowed, relative to the largest value of the tensor: a few units in the last place of a 16-bit
# type, the order of summation in float32.
BOUNDS = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}

MIB = 1 << 20


class UnusableDeviceError(RuntimeError):
    """The device that was asked for cannot run the demo."""


@dataclass(frozen=True)
class Sizes:
    """A group and the heads that attend over it."""

    prompt: int
    responses: int
    shortest: int
    longest: int
    heads: int
    kv_heads: int
    head_dim: int


GPU_SIZES = Sizes(prompt=8192, responses=16, shortest=131, longest=2048, heads=32, kv_heads=8, head_dim=128)
CPU_SIZES = Sizes(prompt=512, responses=8, shortest=16, longest=128, heads=8, kv_heads=2, head_dim=64)


@dataclass
class Group:
    """q, dout: (T, H, d); k, v: (T, H_k, d); rows packed [P][R_1]...[R_N], each token once."""

    prompt: int
    responses: list[int]
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @property
    def packed_tokens(self) -> int:
        return self.prompt + sum(self.responses)

    @property
    def replicated_tokens(self) -> int:
        return len(self.responses) * self.prompt + sum(self.responses)

    def copies(self) -> Tensor:
        """Packed row of every token of [P R_1][P R_2]...[P R_N]."""
        ends = accumulate(self.responses, initial=self.prompt)
        prompt = torch.arange(self.prompt)
        return torch.cat([torch.cat([prompt, torch.arange(begin, end)]) for begin, end in pairwise(ends)])


@dataclass
class Outcome:
    """Output and gradients in the packed layout, float32; the time of forward and backward; the memory they need."""

    tensors: dict[str, Tensor]
    ms: float
    mib: float


@dataclass
class Problem:
    """Inputs of one layout, ready to be attended. ``collect`` brings output and gradients into the packed layout."""

    inputs: Sequence[Tensor]
    dout: Tensor
    attend: Callable[[], Tensor]
    collect: Callable[[Tensor, Sequence[Tensor]], dict[str, Tensor]]


def offsets(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=device)


def make_group(sizes: Sizes, dtype: torch.dtype, device: torch.device, seed: int) -> Group:
    """Random tensors for a prompt and responses of random lengths."""
    draw = random.Random(seed)
    responses = [draw.randint(sizes.shortest, sizes.longest) for _ in range(sizes.responses)]
    generator = torch.Generator(device).manual_seed(seed)
    total = sizes.prompt + sum(responses)

    def normal(heads: int) -> Tensor:
        return torch.randn(total, heads, sizes.head_dim, dtype=dtype, device=device, generator=generator)

    q, dout = normal(sizes.heads), normal(sizes.heads)
    return Group(sizes.prompt, responses, q, normal(sizes.kv_heads), normal(sizes.kv_heads), dout)


def shared_problem(group: Group) -> Problem:
    """Each token once. The prompt is a sequence without keys of its own: it attends to the context, which is itself."""
    prompt, responses, device = group.prompt, group.responses, group.q.device
    q, *kv = (
        part.detach().requires_grad_()
        for part in (group.q, group.k[:prompt], group.v[:prompt], group.k[prompt:], group.v[prompt:])
    )
    cu_seqlens_q = offsets([prompt, *responses], device)
    cu_seqlens_k_decoded = offsets([0, *responses], device)

    def attend() -> Tensor:
        k_context, v_context, k_decoded, v_decoded = kv
        out = flash_attn_dualkv_varlen_func(
            q,
            k_context,
            v_context,
            k_decoded,
            v_decoded,
            cu_seqlens_q,
            cu_seqlens_k_decoded,
            max_seqlen_q=max(prompt, *responses),
            context_seqlen=prompt,
            max_seqlen_k_decoded=max(responses),
        )
        assert isinstance(out, Tensor)
        return out

    def collect(out: Tensor, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        dq, dk_context, dv_context, dk_decoded, dv_decoded = (gradient.float() for gradient in gradients)
        dk, dv = torch.cat([dk_context, dk_decoded]), torch.cat([dv_context, dv_decoded])
        return {"out": out.float(), "dQ": dq, "dK": dk, "dV": dv}

    return Problem((q, *kv), group.dout, attend, collect)


def replicated_problem(group: Group) -> Problem:
    """The usual packing: the prompt in front of every response."""
    rows = group.copies().to(group.q.device)
    lengths = [group.prompt + response for response in group.responses]
    q, k, v = (tensor[rows].requires_grad_() for tensor in (group.q, group.k, group.v))
    dout = group.dout[rows]
    for copy, share in zip(dout.split(lengths), shares(len(lengths)), strict=True):
        copy[: group.prompt] *= share
    attention = replicated_attention(group.q.device)

    def fold(gradient: Tensor) -> Tensor:
        total = gradient.new_zeros((group.packed_tokens, *gradient.shape[1:]), dtype=torch.float32)
        return total.index_add_(0, rows, gradient.float())

    def collect(out: Tensor, gradients: Sequence[Tensor]) -> dict[str, Tensor]:
        packed = torch.empty_like(group.q, dtype=torch.float32)
        packed[rows] = out.float()  # all copies of a prompt have the same output
        dq, dk, dv = map(fold, gradients)
        return {"out": packed, "dQ": dq, "dK": dk, "dV": dv}

    return Problem((q, k, v), dout, lambda: attention(q, k, v, lengths), collect)


def shares(copies: int) -> list[float]:
    """Powers of two that add up to 1, one for each copy: scaling by them is exact in every floating-point type."""
    whole = 1 << (copies.bit_length() - 1)
    halved = copies - whole
    return [0.5 / whole] * (2 * halved) + [1 / whole] * (whole - halved)


def replicated_attention(device: torch.device) -> Callable[[Tensor, Tensor, Tensor, list[int]], Tensor]:
    """Causal attention within each of the packed sequences: PyTorch's FlashAttention-2 on a GPU, SDPA elsewhere."""
    if device.type != "cuda":
        return sdpa_by_sequence
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # PyTorch before 2.10
        return sdpa_by_sequence
    # Newer versions want to be told about grouped heads, older ones do not know the argument.
    has_flag = "enable_gqa" in inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"enable_gqa": True} if has_flag else {}

    def attend(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
        cu_seqlens, longest = offsets(lengths, device), max(lengths)
        out = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, longest, longest, window_size=(-1, 0), **options)
        assert isinstance(out, Tensor)
        return out

    return attend


def sdpa_by_sequence(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
    parts = [[piece.transpose(0, 1)[None] for piece in tensor.split(lengths)] for tensor in (q, k, v)]
    outs = [
        scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        for query, key, value in zip(*parts, strict=True)
    ]
    return torch.cat(outs)


def measure(build: Callable[[Group], Problem], group: Group, repeats: int) -> Outcome:
    """Forward and backward, ``repeats`` times after one that warms up; the results of the last."""
    device = group.q.device
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    problem = build(group)
    # Only the last pass keeps its results: they would count as another's memory.
    earlier = [timed_pass(problem, device)[2] for _ in range(repeats)]
    out, gradients, last = timed_pass(problem, device)
    if device.type == "cuda":
        # The shared layout works on the group's own tensors, which were there before.
        storages = {tensor.data_ptr() for tensor in (group.q, group.k, group.v, group.dout)}
        inputs = (*problem.inputs, problem.dout)
        reused = [tensor for tensor in inputs if tensor.untyped_storage().data_ptr() in storages]
        held = torch.cuda.max_memory_allocated(device) - before + sum(tensor.nbytes for tensor in reused)
    else:
        held = sum(tensor.nbytes for tensor in (*problem.inputs, problem.dout, out, *gradients))
    return Outcome(problem.collect(out, gradients), statistics.median([*earlier[1:], last]), held / MIB)


def timed_pass(problem: Problem, device: torch.device) -> tuple[Tensor, tuple[Tensor, ...], float]:
    """(out, gradients of the inputs, milliseconds)."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    begin = time.perf_counter()
    out = problem.attend()
    gradients = torch.autograd.grad(out, problem.inputs, problem.dout)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return out.detach(), gradients, 1e3 * (time.perf_counter() - begin)


def choose_device(requested: str) -> tuple[torch.device, str]:
    """(device, why the CPU was taken or '').

    Raises:
        UnusableDeviceError: a GPU was asked for and cannot be used; the message says why.
    """
    build = build_info()
    if requested == "cpu":
        return torch.device("cpu"), "asked for with --device cpu"
    if torch.version.cuda is None:
        reason = f"this PyTorch ({torch.__version__}) is built without CUDA"
    elif not torch.cuda.is_available():
        reason = "PyTorch sees no CUDA GPU"
    elif not build["compiled"]:
        cause = build.get("compiled_error") or "it was not built when the package was installed"
        reason = f"the compiled module is not there ({cause}); install again where nvcc is"
    else:
        return torch.device("cuda"), ""
    if requested == "cuda":
        raise UnusableDeviceError(f"--device cuda: {reason}")
    return torch.device("cpu"), reason


def largest_differences(shared: Outcome, replicated: Outcome, prompt: int) -> list[tuple[str, float, float]]:
    """(what, largest difference, the same relative to the largest value of that tensor)."""
    lines = []
    for name, expected in replicated.tensors.items():
        got = shared.tensors[name]
        scale = expected.abs().max().item()
        for part, rows in (("prompt", slice(None, prompt)), ("responses", slice(prompt, None))):
            difference = (got[rows] - expected[rows]).abs().max().item()
            lines.append((f"{name:<4} {part}", difference, difference / scale))
    return lines


def heading(group: Group, sizes: Sizes, device: torch.device, reason: str) -> str:
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU: {reason}"
    rho = group.replicated_tokens / group.packed_tokens
    lengths = f"{min(group.responses)} to {max(group.responses)}"
    dtype = str(group.q.dtype).removeprefix("torch.")
    heads = f"{sizes.heads} query heads, {sizes.kv_heads} KV heads, head dim {sizes.head_dim}, {dtype}"
    return "\n".join(
        (
            f"device      {where}",
            f"group       one prompt of {group.prompt:,} tokens, {len(group.responses)} responses of {lengths}",
            f"attention   {heads}",
            f"tokens      replicated {group.replicated_tokens:,}, shared {group.packed_tokens:,}: "
            f"rho = {rho:.2f} times fewer for every layer of a model",
        )
    )


def comparison(shared: Outcome, replicated: Outcome, is_cuda: bool) -> str:
    memory = "peak memory, MiB" if is_cuda else "inputs, output, gradients, MiB"
    lines = [f"{'attention, forward + backward':<32}{'replicated':>12}{'shared':>12}{'ratio':>8}"]
    for name, old, new in (("time, ms", replicated.ms, shared.ms), (memory, replicated.mib, shared.mib)):
        lines.append(f"  {name:<30}{old:>12,.1f}{new:>12,.1f}{old / new:>7.1f}x")
    if not is_cuda:
        lines.append(
            "  (on the CPU this library runs its exact PyTorch reference: the time says nothing of the kernels)"
        )
    return "\n".join(lines)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m flash_attn_dualkv.demo", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="default: bfloat16, on the CPU float32"
    )
    parser.add_argument("--prompt", type=int, help="tokens of the prompt")
    parser.add_argument("--responses", type=int, help="how many")
    parser.add_argument("--shortest", type=int, help="tokens of the shortest response")
    parser.add_argument("--longest", type=int, help="tokens of the longest response")
    parser.add_argument("--heads", type=int, help="query heads")
    parser.add_argument("--kv-heads", type=int, help="key and value heads")
    parser.add_argument("--head-dim", type=int)
    parser.add_argument("--repeats", type=int, help="timed repetitions (default: 5, on the CPU 1)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for name in ("prompt", "responses", "shortest", "longest", "heads", "kv_heads", "head_dim", "repeats"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"argument --{name.replace('_', '-')}: expected at least 1, got {value}")
    return options


def chosen_sizes(options: argparse.Namespace, is_cuda: bool) -> Sizes:
    """The defaults for the device with what was asked for. A bound on the lengths moves the other one along."""
    defaults = vars(GPU_SIZES if is_cuda else CPU_SIZES)
    given = {name: getattr(options, name) for name in defaults if getattr(options, name) is not None}
    sizes = Sizes(**{**defaults, **given})
    if sizes.heads % sizes.kv_heads:
        raise ValueError(f"--heads: expected a multiple of --kv-heads ({sizes.kv_heads}), got {sizes.heads}")
    if sizes.shortest <= sizes.longest:
        return sizes
    if "shortest" in given and "longest" in given:
        raise ValueError(f"--shortest: expected at most --longest ({sizes.longest}), got {sizes.shortest}")
    both = given.get("shortest", given.get("longest"))
    return Sizes(**{**vars(sizes), "shortest": both, "longest": both})


def run(options: argparse.Namespace) -> int:
    device, reason = choose_device(options.device)
    is_cuda = device.type == "cuda"
    sizes = chosen_sizes(options, is_cuda)
    dtype = getattr(torch, options.dtype or ("bfloat16" if is_cuda else "float32"))
    group = make_group(sizes, dtype, device, options.seed)
    print(heading(group, sizes, device, reason), flush=True)

    repeats = options.repeats or (5 if is_cuda else 1)
    shared, replicated = (measure(build, group, repeats) for build in (shared_problem, replicated_problem))
    print(f"\n{comparison(shared, replicated, is_cuda)}\n")

    bound = BOUNDS[dtype]
    differences = largest_differences(shared, replicated, group.prompt)
    print(f"{'largest difference':<32}{'absolute':>12}{'relative':>12}")
    for name, absolute, relative in differences:
        print(f"  {name:<30}{absolute:>12.2e}{relative:>12.2e}{'' if relative <= bound else '  above the bound'}")
    is_same = all(relative <= bound for _, _, relative in differences)  # false for NaN too
    print(f"\n{'the same' if is_same else 'NOT THE SAME'}: bound {bound:.0e} of the largest value, {dtype}")
    return 0 if is_same else 1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison. Returns 0; 1 if a difference exceeds its bound; 2 if it could not be run as asked."""
    options = parse(arguments)
    try:
        return run(options)
    except torch.OutOfMemoryError:
        print("out of memory: try a smaller --prompt, --responses or --longest", file=sys.stderr)
    except (UnusableDeviceError, TypeError, ValueError) as error:
        print(error, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
