# SPDX-License-Identifier: BSD-3-Clause
"""Log-probabilities and entropies of tokens from an LM head that runs over some rows at a time.

The logits of a chunk are computed again in the backward, so memory does not grow with rows x
vocabulary. The gradients of the head's parameters are summed over the chunks in float32: of 149
chunks (64K tokens of a vocabulary of 152K) a sum in bf16 has three times the error of one product
over all rows. During the backward that takes a float32 copy of them. Gradient hooks of the
parameters see no chunk's part: they run once, for the sum and what other uses of a parameter add.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from . import kernels
from .checks import explain
from .errors import SharedPromptLayoutError
from .ops import DifferentiableOnce, forces_reference

# Logits that exist at once: 512 MiB in float32, with what is computed from them two to three times.
LOGIT_ELEMENTS = 2**27
ROW_TILE = 128  # of matrix products: a chunk that is no multiple of it wastes a part of its last tile


def rows_of_a_chunk(vocabulary: int) -> int:
    """How many rows of logits exist at once."""
    rows = max(1, LOGIT_ELEMENTS // vocabulary)
    return rows if rows < ROW_TILE else rows - rows % ROW_TILE


def score_in_chunks(
    head: Callable[[Tensor], Tensor],
    hidden: Tensor,
    targets: Tensor,
    *,
    rows: int,
    temperature: float = 1.0,
    rounding: torch.dtype | None = None,
    with_entropy: bool = False,
    group: Any = None,
    frozen: Iterable[Tensor] = (),
    max_target: int = 0,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of tokens and entropies, `rows` rows of logits at a time.

    Args:
        head: hidden states (n, D) to logits (n, vocabulary), for every n; in the backward too.
        hidden: (T, D). targets: (T,) int64.
        rounding: what logits, logits / temperature and log-probabilities are rounded to, one after the other, as some
            engines round them; only of a whole vocabulary.
        group: of processes that divide the vocabulary, equally and in the order of their ranks: head gives a rank's
            part of it, and the whole gradient of hidden. None: the vocabulary is whole.
        frozen: parameters that `head` reads without a gradient, which its graph does not show; others may be among
            them.
        max_target: no target is larger, as is known on the host; where the vocabulary ends before, targets are read.

    Returns:
        logps, entropy: (T,) each, float32, or float64 if the logits are; differentiable once, in
        `hidden` and in every parameter that `head` depends on. entropy is zeros unless asked for.

    Raises:
        SharedPromptLayoutError: a target lies after the vocabulary.
        ValueError: rounding, and a group.
        RuntimeError: in the backward, when a parameter of `head` is another one than in the forward, was frozen since
            or was changed in place, by an optimizer's step, say.
    """
    if rounding is not None and group is not None:
        raise ValueError(explain("rounding", "None where the vocabulary is divided", rounding))
    # Whatever the head is, its parameters are the leaves of what it computes of one row.
    parameters = _leaves_of(head(hidden.new_zeros(1, hidden.shape[1]))) if torch.is_grad_enabled() else []
    versions = _versions_of([*parameters, *frozen]) if parameters or hidden.requires_grad else []
    autocast = current_autocast(hidden.device.type)
    settings = _Settings(head, rows, temperature, with_entropy, autocast, group, versions, max_target, rounding)
    logps, entropy = _ChunkedScores.apply(settings, targets, hidden, *parameters)
    return logps, entropy


class _Settings(NamedTuple):
    head: Callable[[Tensor], Tensor]
    rows: int
    temperature: float
    with_entropy: bool
    autocast: Callable[[], Any]  # the state of the forward, which the backward takes again
    group: Any
    versions: Sequence[tuple[Tensor, int]]  # of the head's parameters in the forward
    max_target: int
    rounding: torch.dtype | None

    def reduced(self, values: Tensor, operation: Any = dist.ReduceOp.SUM) -> Tensor:
        """Over the parts of the vocabulary, in place."""
        if self.group is not None:
            dist.all_reduce(values, operation, group=self.group)
        return values

    def own_targets(self, targets: Tensor, width: int) -> Tensor:
        """The targets as columns of this process's part of the vocabulary, in which not all of them lie."""
        return targets if self.group is None else targets - dist.get_rank(self.group) * width

    def places(self, targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """(rows, 1) columns of own_targets to gather from, and which of them are the targets'."""
        places = targets[:, None]
        if self.group is None:
            return places, torch.ones_like(places, dtype=torch.bool)
        return places.clamp(0, width - 1), (places >= 0) & (places < width)


def current_autocast(device_type: str, **options: Any) -> Callable[[], torch.autocast]:
    """Gives context managers that set autocast as it is now."""
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    return lambda: torch.autocast(device_type, dtype=dtype, enabled=enabled, **options)


def _leaves_of(output: Tensor) -> list[Tensor]:
    """The leaves of a tensor's graph, in a fixed order."""
    found: dict[int, Tensor] = {}
    pending, seen = [output.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.setdefault(id(leaf), leaf)
        pending += [following for following, _ in node.next_functions]
    return list(found.values())


class _ChunkedScores(torch.autograd.Function):
    """One node for all chunks: the sums over chunks are made here, not by autograd in 16 bits."""

    @staticmethod
    def forward(
        ctx: Any, settings: _Settings, targets: Tensor, hidden: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        chunks = zip(hidden.split(settings.rows), targets.split(settings.rows))
        scores = [_score(settings, settings.head(part), wanted) for part, wanted in chunks]
        logps, entropy, normalizer = (torch.cat(parts) for parts in zip(*scores))
        ctx.settings = settings
        # Not saved: what hooks for saved tensors give back is not what the head computes with.
        ctx.parameters = parameters
        ctx.save_for_backward(targets, hidden, entropy, normalizer)
        ctx.set_materialize_grads(False)
        if not settings.with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logps, entropy

    @staticmethod
    def backward(ctx: Any, d_logps: Tensor | None, d_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        with torch.no_grad(), _hooks_wait(ctx.parameters):
            gradients = _ChunkedScores._gradients(ctx, d_logps, d_entropy)
        if torch.is_grad_enabled():  # create_graph=True
            anchor = next(tensor for tensor in (ctx.saved_tensors[1], *ctx.parameters) if tensor.requires_grad)
            gradients = DifferentiableOnce.apply(anchor, *gradients)
        return None, None, *gradients

    @staticmethod
    def _gradients(ctx: Any, d_logps: Tensor | None, d_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of hidden and of every parameter."""
        settings: _Settings = ctx.settings
        _check_versions(settings.versions)
        targets, hidden, entropy, normalizer = ctx.saved_tensors
        d_logps = torch.zeros_like(entropy) if d_logps is None else d_logps
        _, _, needs_hidden, *needs_parameter = ctx.needs_input_grad
        wanted = [parameter for parameter, needed in zip(ctx.parameters, needs_parameter) if needed]
        d_hidden = torch.empty_like(hidden) if needs_hidden else None
        sums = [_Sum() for _ in wanted]
        # Without rows once too: processes that train together wait for every gradient.
        for begin in range(0, len(hidden) or 1, settings.rows):
            chunk = slice(begin, begin + settings.rows)
            with torch.enable_grad(), settings.autocast():
                part = hidden[chunk].detach().requires_grad_(needs_hidden)
                logits = settings.head(part)
            _check_leaves(logits, part, ctx.parameters)
            of_rows = targets, entropy, normalizer, d_logps, d_entropy
            own: Any = (None if values is None else values[chunk] for values in of_rows)
            d_logits = _score_gradient(settings, logits.detach(), *own)
            inputs = [*wanted, part] if needs_hidden else wanted
            found = _gradients_of_a_chunk(logits, inputs, d_logits)
            del logits, d_logits
            for total, gradient in zip(sums, found):
                total.add(gradient)
            if d_hidden is not None:
                d_hidden[chunk] = found[-1]
        results = iter(sums)
        return d_hidden, *(next(results).rounded() if needed else None for needed in needs_parameter)


class _Waiting:
    """A gradient hook of a parameter that passes over the gradients of chunks.

    These are known by their pass of autograd, in whichever thread: others may run meanwhile.
    """

    chunks: ClassVar[set[int]] = set()  # the passes that run now

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        self.hook = hook

    def __call__(self, gradient: Tensor) -> Tensor | None:
        return None if torch._C._current_graph_task_id() in self.chunks else self.hook(gradient)


@contextmanager
def _hooks_wait(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Lets the parameters' gradient hooks pass over chunks."""
    waiting: list[tuple[dict[int, Any], int, _Waiting]] = []
    for parameter in parameters:
        hooks: dict[int, Any] = parameter._backward_hooks or {}
        waiting += [(hooks, key, _Waiting(hook)) for key, hook in hooks.items()]
    for hooks, key, hook in waiting:
        hooks[key] = hook
    try:
        yield
    finally:
        for hooks, key, hook in waiting:
            # Not one that was removed, or that another thread has wrapped, which does no harm.
            if hooks.get(key) is hook:
                hooks[key] = hook.hook


def _gradients_of_a_chunk(logits: Tensor, inputs: Sequence[Tensor], d_logits: Tensor) -> tuple[Any, ...]:
    """The gradients of inputs, None of unused ones, which hooks that wait do not see."""
    passes: list[int] = []

    def begin(_: Tensor) -> None:
        passes.append(torch._C._current_graph_task_id())
        _Waiting.chunks.update(passes)

    logits.register_hook(begin)  # before everything else of this pass
    try:
        return torch.autograd.grad(logits, inputs, d_logits, allow_unused=True)
    finally:
        _Waiting.chunks.difference_update(passes)


class _Sum:
    """A sum of gradients, in float32 where they have 16 bits."""

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._dtype: torch.dtype | None = None  # of the gradients, once the total is a tensor of its own

    def add(self, gradient: Tensor | None) -> None:
        if gradient is None:
            return
        if self._total is None:
            self._total = gradient
        elif self._dtype is None:
            self._dtype = gradient.dtype
            self._total = self._total.to(torch.promote_types(gradient.dtype, torch.float32), copy=True).add_(gradient)
        else:
            self._total.add_(gradient)

    def rounded(self) -> Tensor | None:
        """The sum in the type of the gradients; None if there were none."""
        return self._total if self._total is None or self._dtype is None else self._total.to(self._dtype)


def _score(settings: _Settings, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability of each target, entropy, and the logarithm of the normaliser of each row."""
    _check_targets(settings, targets, logits.shape[-1])
    settings, logits = _rounded(settings, logits)
    score_part = _score_part_by_kernel if _has_kernels(settings, logits) else _score_part
    own, chosen, entropy = score_part(settings, logits, settings.own_targets(targets, logits.shape[-1]))
    normalizer = own
    if settings.group is not None:
        largest = settings.reduced(own.clone(), dist.ReduceOp.MAX)
        normalizer = settings.reduced((own - largest).exp_()).log_().add_(largest)
        settings.reduced(chosen)
    logps = chosen - normalizer
    if settings.rounding is not None:
        # PyTorch's operator, which engines replace to make it batch-invariant. Autocast would give
        # float32.
        with torch.autocast(logits.device.type, enabled=False):
            logps = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0].to(logps.dtype)
    if entropy is None:
        return logps, torch.zeros_like(logps), normalizer
    if settings.group is not None:
        # Parts have the entropies of their own softmax; one that is masked entirely has none.
        log_share = own - normalizer
        share = log_share.exp()
        entropy = settings.reduced((share * (entropy - log_share)).masked_fill_(share == 0, 0.0))
    return logps, entropy, normalizer


def _has_kernels(settings: _Settings, logits: Tensor) -> bool:
    """True if the package's kernels score these logits, which they read once; PyTorch scores all others."""
    return (
        type(logits) is Tensor
        and logits.is_cuda
        and logits.dtype in kernels.LOGIT_DTYPES
        and logits.stride(-1) == 1
        and 0 < settings.temperature < math.inf
        and not torch.compiler.is_compiling()
        and not forces_reference()
        and kernels.has_code(logits.get_device())
    )


def _score_part_by_kernel(settings: _Settings, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Scores of a chunk by a kernel; a target that is no token has the logit NaN, where PyTorch ends the process."""
    elsewhere = math.nan if settings.group is None else 0.0
    with_entropy = settings.with_entropy
    return kernels.score_rows(logits, targets, settings.temperature, elsewhere=elsewhere, with_entropy=with_entropy)


def _score_part(settings: _Settings, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Logarithm of the normaliser, logit of the target, and entropy, of only this process's part of the vocabulary.

    A target that lies elsewhere has the logit 0. A part whose logits are all -inf has the logarithm -inf.
    """
    scaled, dtype = _scaled(settings, logits), _dtype_of_scores(logits)
    # One kernel that reads 16 bits, where logsumexp takes five that read or write float32: 2 bytes
    # of memory traffic instead of 4.5, in sizes of the logits in float32.
    shares = scaled.log_softmax(-1, dtype=dtype)
    highest, place = scaled.max(-1, keepdim=True)
    normalizer = (highest - shares.gather(-1, place))[:, 0]
    del shares
    normalizer.masked_fill_(highest[:, 0] == -torch.inf, -torch.inf)
    places, is_own = settings.places(targets, scaled.shape[-1])
    chosen = scaled.gather(-1, places).to(dtype).where(is_own, 0.0)[:, 0]
    if not settings.with_entropy:
        return normalizer, chosen, None
    # -p log p, which is 0 where a masked logit (-inf) makes p 0.
    return normalizer, chosen, torch.special.entr((scaled - normalizer[:, None]).exp_()).sum(-1)


def _score_gradient(
    settings: _Settings,
    logits: Tensor,
    targets: Tensor,
    entropy: Tensor,
    normalizer: Tensor,
    d_logps: Tensor,
    d_entropy: Tensor | None,
) -> Tensor:
    """Gradient of logits: z = logits / temperature, p = softmax(z); entropy: -p (log p + H)."""
    targets = settings.own_targets(targets, logits.shape[-1])
    if settings.rounding is not None:  # as if it were none
        d_logps = d_logps / settings.temperature
        d_entropy = None if d_entropy is None else d_entropy / settings.temperature
        settings, logits = _rounded(settings, logits)
    if _has_kernels(settings, logits):
        of_rows = normalizer, d_logps, entropy, d_entropy
        return kernels.score_rows_gradient(logits, targets, settings.temperature, *of_rows)
    weights = (_scaled(settings, logits) - normalizer[:, None]).exp_()
    places, is_own = settings.places(targets, weights.shape[-1])
    d_logps = d_logps[:, None] / settings.temperature
    if d_entropy is None:
        at_target = weights.gather(-1, places).mul_(-d_logps)
        out = weights if weights.dtype == logits.dtype else torch.empty_like(logits)
        gradient = torch.mul(weights, -d_logps, out=out)
    else:
        d_entropy = d_entropy[:, None] / settings.temperature
        exact = torch.special.entr(weights).mul_(d_entropy)
        exact.addcmul_(weights, d_logps + d_entropy * entropy[:, None], value=-1.0)
        at_target, gradient = exact.gather(-1, places), exact.to(logits.dtype)
    # Rounded once: the two parts of a target's gradient are of one size where its p is near 1.
    at_target.add_(d_logps.where(is_own, 0.0))
    return gradient.scatter_(-1, places, at_target.to(logits.dtype))


def _rounded(settings: _Settings, logits: Tensor) -> tuple[_Settings, Tensor]:
    """Logits that are rounded, divided in float32 and rounded again, and settings that divide them no more."""
    if settings.rounding is None:
        return settings, logits
    # A tensor of two dimensions: PyTorch multiplies by the reciprocal of a number, and divides in
    # 16 bits by a tensor of none.
    temperature = torch.full((1, 1), settings.temperature, dtype=torch.float32, device=logits.device)
    divided = logits.to(settings.rounding).div(temperature).to(settings.rounding)
    return settings._replace(temperature=1.0), divided


def _dtype_of_scores(logits: Tensor) -> torch.dtype:
    return torch.promote_types(logits.dtype, torch.float32)


def _scaled(settings: _Settings, logits: Tensor) -> Tensor:
    """logits / temperature: the logits themselves for 1, else a tensor of at least float32."""
    if settings.temperature == 1.0:
        return logits
    return logits.to(_dtype_of_scores(logits), copy=True).div_(settings.temperature)


def _check_targets(settings: _Settings, targets: Tensor, width: int) -> None:
    """SharedPromptLayoutError for targets after the vocabulary: kernels would give NaN, ranks the logit 0."""
    columns = width if settings.group is None else width * dist.get_world_size(settings.group)
    if settings.max_target >= columns and len(targets) and (most := int(targets.max())) >= columns:
        raise SharedPromptLayoutError("batch", f"scored token ids below {columns}, as many as the LM head has", most)


def _check_leaves(logits: Tensor, part: Tensor, parameters: Sequence[Tensor]) -> None:
    """RuntimeError if the head depends on a parameter that the forward has not seen, or one of these was frozen."""
    known = {id(tensor) for tensor in (part, *parameters)}
    strange = [(leaf, "that the forward has not seen") for leaf in _leaves_of(logits) if id(leaf) not in known]
    frozen = "that was frozen in between (its adapter was disabled, or another one set, say)"
    for leaf, what in (*strange, *((leaf, frozen) for leaf in parameters if not leaf.requires_grad)):
        got = f"one of {tuple(leaf.shape)} {what}"
        raise RuntimeError(explain("parameters of the LM head", "the same in forward and backward", got))


def _versions_of(parameters: Iterable[Tensor]) -> list[tuple[Tensor, int]]:
    """How often each was changed in place, by autograd's count; inference tensors have none."""
    return [(leaf, leaf._version) for leaf in parameters if not leaf.is_inference()]


def _check_versions(versions: Sequence[tuple[Tensor, int]]) -> None:
    """RuntimeError if a parameter was changed in place since the forward, whose logits the backward computes again."""
    for leaf, version in versions:
        if leaf._version != version:
            got = f"one of {tuple(leaf.shape)} that was changed in place (version {leaf._version}, {version} before)"
            raise RuntimeError(explain("parameters of the LM head", "the same in forward and backward", got))
