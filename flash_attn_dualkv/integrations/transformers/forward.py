# SPDX-License-Identifier: BSD-3-Clause
"""Log-probabilities of packed responses: the backbone over every token once, the LM head over the rows that are scored.

The head is whatever the model's own forward does after its backbone (projection, softcapping, scaling of logits): it is
run with the backbone replaced by one that returns ready hidden states, so no model needs to be known here.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from ... import checks
from ...data.batch import PackedBatch
from ...errors import SharedPromptError, SharedPromptTypeError, SharedPromptUnsupportedError
from ...host import to_device, untraced
from ...parallel.sharded import DividedLayout, check_divided, same_on_all_ranks
from ...pieces import KeptKeys, PieceLayout
from ...scores import rows_of_a_chunk, score_in_chunks
from ..common.buffers import unchanged_buffers
from ..recurrences.rows import sum_runs
from .admission import check, table, unwrap
from .packed_forward import LAYOUT, packed_forward, packed_row
from .zero3 import already_gathered, gathered_modules, head_modules, score_gathered

Head = Callable[[Tensor], Tensor]  # (m, D) -> (m, vocabulary)
Score = Callable[[Head, Tensor, int], tuple[Tensor, ...]]  # of a head, (n, D), and the rows of a chunk

# The reason that a broken trace gives.
COMPILE_THE_MODEL = (
    "a packed forward looks at the model and the batch on the host: compile the model (model.compile()), or the step "
    "around it without fullgraph=True"
)

# Attributes of modules whose parameters FSDP 1 and 2 gather.
_FSDP_UNIT = ("_fsdp_wrapped_module", "set_reshard_after_forward")


@overload
def shared_prompt_forward(
    model: nn.Module,
    batch: PackedBatch,
    *,
    layout: DividedLayout | None = None,
    temperature: float = 1.0,
    rounding: torch.dtype | None = None,
    with_entropy: Literal[True],
    self_check: bool = True,
    drop_unread: bool = True,
    share_lora_dropout: bool = False,
) -> tuple[Tensor, Tensor]: ...
@overload
def shared_prompt_forward(
    model: nn.Module,
    batch: PackedBatch,
    *,
    layout: DividedLayout | None = None,
    temperature: float = 1.0,
    rounding: torch.dtype | None = None,
    with_entropy: bool = False,
    self_check: bool = True,
    drop_unread: bool = True,
    share_lora_dropout: bool = False,
) -> tuple[Tensor, Tensor | None]: ...
@functools.partial(untraced, reason=COMPILE_THE_MODEL)
def shared_prompt_forward(
    model: nn.Module,
    batch: PackedBatch,
    *,
    layout: DividedLayout | None = None,
    temperature: float = 1.0,
    rounding: torch.dtype | None = None,
    with_entropy: bool = False,
    self_check: bool = True,
    drop_unread: bool = True,
    share_lora_dropout: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of all response tokens of a micro-batch, or of all trained tokens of trees; each row once.

    Args:
        model: a causal LM of transformers whose attention is registered or wrapped by this package; also inside PEFT,
            DDP, FSDP or DeepSpeed. Gradients flow to its parameters unless grad mode is off.
        batch: from `pack_shared_prompts` or `pack_prefix_tree`, on the model's device. The images of its prompts are
            those that it was packed with.
        layout: of the batch, divided among ranks: `UlyssesLayout.of(batch.layout, group)`, `ContextLayout.of(...)`, or
            one of the other. All ranks must call, with the same batch, which is compared; all get all scores. A loss of
            them is divided by `layout.num_ranks`, and the gradients of parameters summed over the ranks. None: this
            process has the row.
        temperature: divides the logits; finite and > 0.
        rounding: torch.bfloat16: logits, logits / temperature and log-probabilities are rounded to it, one after the
            other, and `torch.log_softmax` computes them: as SGLang's sampler with --rl-on-policy-target. Gradients are
            as if nothing were rounded. None: float32.
        with_entropy: also return the entropy of each distribution (natural log, differentiable).
        self_check: before the first forward in each mode and with each set of active adapters, try a pair of short
            sequences: does the model draw random numbers, and does it compute the same in a packed row as in rows of
            their own? Some forwards of at most 64 tokens, on all ranks alike.
        drop_unread: leave rows that score nothing out of the last layers where these own no keys (Gemma 3n and 4).
            They stay where something else reads them. The results are the same.
        share_lora_dropout: in training mode, let LoRA's dropout draw one mask for the one copy of a prompt, where stock
            training draws one for each of its responses: another regulariser, so that scores and gradients are not
            those of stock training. False: LoRA's dropout is refused like all other noise.

    Returns:
        logps, entropy: each (sum of response lengths,) in float32 (float64 for float64 models), the responses (or the
        trained tokens of sequences) one after the other in the order in which they were given; `unpack_logprobs` makes
        a (responses, tokens) matrix of them.
        entropy is None unless asked for.

    Raises:
        SharedPromptError: an argument is not as described; a token id is not in the vocabulary, or a position not in
            the model's table of them; the model is not exact on shared prompts, draws random
            numbers, runs on another attention, or shards its LM head as an FSDP unit of its own. With a divided layout
            on all ranks: another one has failed, or has another batch or other arguments.
        SharedPromptLayoutError: an attention layer has not got the layout; nothing is returned then.
    """
    with same_on_all_ranks(*(layout.groups if isinstance(layout, DividedLayout) else ())) as common:
        checks.instance("batch", batch, PackedBatch, " (of pack_shared_prompts)")
        temperature = checks.number("temperature", temperature)
        checks.flag("with_entropy", with_entropy)
        if rounding is not None and rounding is not torch.bfloat16:
            raise SharedPromptError("rounding", "torch.bfloat16 or None", rounding)
        if layout is not None:
            check_divided(layout, batch.layout)
            common.note(batch.layout, (temperature, rounding, with_entropy))
            common.update(response_lens=batch.response_lens, token_index=batch.token_index)
            if layout.input_ids is batch.layout.input_ids:  # which `of` has compared
                common["input_ids"] = None
    distinct = batch.distinct
    token_index, targets = distinct.pick(batch.token_index), distinct.pick(batch.targets)
    if layout is not None:
        own, token_index = layout.local_rows(token_index)
        targets = targets.index_select(0, own)

    drops = checks.flag("drop_unread", drop_unread) and layout is None
    first_use = dict(self_check=self_check, share_lora_dropout=share_lora_dropout)
    logps, entropy = scored_tokens(
        model, batch, token_index, targets, temperature=temperature, rounding=rounding, with_entropy=with_entropy,
        first_use=first_use, layout=layout, drop_unread=drops,
    )  # fmt: skip
    if layout is not None:
        whole = logps.new_zeros(len(distinct.pick(batch.targets)))
        logps, entropy = (layout.sum(whole.index_copy(0, own, one)) for one in (logps, entropy))
    return distinct.expand(logps), distinct.expand(entropy) if with_entropy else None


def scored_tokens(
    model: nn.Module, batch: PackedBatch, rows: Tensor, targets: Tensor, *, temperature: float, with_entropy: bool,
    first_use: dict[str, bool], rounding: torch.dtype | None = None, layout: DividedLayout | None = None,
    drop_unread: bool = False, ancestors: KeptKeys | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(n,) log-probabilities and entropies of targets (n,) by the rows of the batch that score them.

    `ancestors`: of `packed_row`; the others: of `_scored`.
    """

    def score(head: Head, hidden: Tensor, rows: int) -> tuple[Tensor, ...]:
        wanted = targets.to(hidden.device)
        frozen = unwrap.causal_lm_of(model).get_output_embeddings().parameters()
        options: dict[str, Any] = dict(temperature=temperature, with_entropy=with_entropy, frozen=frozen)
        options |= dict(rounding=rounding, max_target=batch.max_token)
        return score_in_chunks(head, hidden, wanted, rows=rows, **options)

    return _scored(model, batch, rows, score, first_use, layout, drop_unread, ancestors=ancestors)


@functools.partial(untraced, reason=COMPILE_THE_MODEL)
@torch.no_grad()
def shared_prompt_logits(
    model: nn.Module,
    batch: PackedBatch,
    rows: Tensor,
    reduce: Callable[[Tensor, slice], tuple[Tensor, ...]],
    *,
    self_check: bool = True,
    drop_unread: bool = True,
    share_lora_dropout: bool = False,
) -> tuple[Tensor, ...]:
    """Values that a function makes of the logits of some rows, a chunk of them at a time; without gradients.

    For scores that `shared_prompt_forward` does not give: whether a token is the most likely one, a teacher's top k.

    Args:
        model, batch, self_check, drop_unread, share_lora_dropout: of `shared_prompt_forward`; the rows that are read
            are these.
        rows: (n,) int64 on the batch's device, or on the host, so that the GPU is not waited for. In any order and any
            of them several times: `batch.token_index` (of the scored tokens), `batch.last_rows`,
            `batch.rows_of(tokens)`.
        reduce: of the logits (m, vocabulary) of rows[at], and of the slice `at`, makes tensors whose first dimension is
            m. It may change the logits.

    Returns:
        These tensors for all n rows, on the batch's device.

    Raises:
        SharedPromptError: what `shared_prompt_forward` refuses; rows that are no int64 of one dimension, or elsewhere;
            what `reduce` returns is not as described.
        SharedPromptLayoutError: an attention layer has not got the layout.
    """
    checks.instance("batch", batch, PackedBatch, " (of pack_shared_prompts)")
    read = checked_rows(rows, batch)
    rows = to_device([read], batch.input_ids.device)[0]
    if not callable(reduce):
        raise SharedPromptTypeError("reduce", "a function of logits and a slice", checks.describe(reduce))

    def score(head: Head, hidden: Tensor, rows: int) -> tuple[Tensor, ...]:
        begins = range(0, max(1, len(hidden)), rows)
        parts = [_reduced(reduce, head(hidden[at : at + rows]), slice(at, at + rows)) for at in begins]
        return tuple(map(torch.cat, zip(*parts)))

    drops = checks.flag("drop_unread", drop_unread)
    first_use = dict(self_check=self_check, share_lora_dropout=share_lora_dropout)
    return _scored(model, batch, rows, score, first_use, drop_unread=drops, read=read)


def _reduced(reduce: Callable[[Tensor, slice], tuple[Tensor, ...]], logits: Tensor, at: slice) -> tuple[Tensor, ...]:
    """What the function makes of a chunk: tensors that can be joined with those of others."""
    count = len(logits)
    made: Any = reduce(logits, at)
    if isinstance(made, Tensor) or not all(isinstance(one, Tensor) for one in checks.items("reduce", made, "tensors")):
        raise SharedPromptTypeError("reduce", "a function that returns a tuple of tensors", checks.describe(made))
    for one in made:
        if one.dim() == 0 or len(one) != count:
            got = f"one of shape {tuple(one.shape)}"
            raise SharedPromptError("reduce", f"tensors with a value for each of {count} rows", got)
    return tuple(made)


def checked_rows(rows: Any, batch: PackedBatch) -> Tensor:
    """(n,) int64 on the batch's device or the host; values are looked at there alone, as a GPU would be waited for."""
    checks.indices("rows", rows, batch.input_ids.device)
    most = batch.layout.num_tokens
    if rows.device.type == "cpu" and ((rows < 0) | (rows >= most)).any():
        raise SharedPromptError("rows", f"rows of the batch, 0 to {most - 1}", rows.tolist())
    return rows


def _scored(
    model: nn.Module,
    batch: PackedBatch,
    rows: Tensor,
    score: Score,
    first_use: dict[str, bool],
    layout: DividedLayout | None = None,
    drop_unread: bool = False,
    read: Tensor | None = None,
    ancestors: KeptKeys | None = None,
) -> tuple[Tensor, ...]:
    """score(head, hidden states of these rows, rows of a chunk), from a forward of the model.

    With a divided layout the rows are those of this rank. `first_use`: options of `check_first_use`. `read`: the rows
    that are read, for `drop_unread`; None if they are those that score tokens.
    """
    causal_lm = unwrap.causal_lm_of(model)
    with unwrap.lock_of(causal_lm):
        backbone = check_forward(causal_lm)
        head = head_modules(causal_lm, backbone)
        check.check_first_use(causal_lm, batch.input_ids.device, model=model, stateless=head, **first_use)
        check_vocabulary(causal_lm, batch)
        table.check_length(causal_lm, batch.layout.max_sequence)
        row = packed_row(causal_lm, batch, layout, drop_unread=drop_unread, rows=read, ancestors=ancestors)
        scorer = _Scorer(causal_lm, backbone, rows, score)
        with packed_forward(row), unwrap.replaced_forward(causal_lm, scorer) as call:
            # Through the outermost module, so that wrappers see one forward with the scores as its
            # output.
            scores: tuple[Tensor, ...] = call(model, row.inputs)
    # Wrappers may round their output (FSDP 2's output_dtype): meant for logits, not for scores.
    return tuple(own if own.dtype != one.dtype else one for own, one in zip(scorer.kept, scores))


def check_forward(causal_lm: Any) -> str:
    """Check everything that can be known before the forward; returns the name of the backbone."""
    table.check_supported(causal_lm.config)
    table.check_attention(causal_lm.config)
    name = unwrap.backbone_name(causal_lm)
    if name is None or causal_lm.get_output_embeddings() is None:
        raise SharedPromptError("model", "a causal LM (a backbone with a head)", type(causal_lm).__name__)
    if "logits_to_keep" not in inspect.signature(type(causal_lm).forward).parameters:
        raise SharedPromptError("model", "a forward that takes logits_to_keep", f"that of {type(causal_lm).__name__}")
    # A unit that communicates in every call would hang: ranks have different numbers of chunks.
    for module in head_modules(causal_lm, name):
        if any(hasattr(module, mark) for mark in _FSDP_UNIT):
            expected = "an LM head in the root's FSDP unit"
            raise SharedPromptError("model", expected, "an LM head that is an FSDP unit of its own")
    return name


def check_router_losses(causal_lm: Any) -> None:
    """Refuse models whose routers' losses are not those of `load_balancing_loss_func`, or would have no gradients."""
    files = [sys.modules.get(kind.__module__) for kind in type(causal_lm).__mro__]  # FSDP 2 derives a class
    if not any(hasattr(file, "load_balancing_loss_func") for file in files):
        expected = "a load_balancing_loss_func for output_router_logits"
        raise SharedPromptUnsupportedError("model", expected, type(causal_lm).__name__)
    if torch.is_grad_enabled() and any(map(table.is_reentrant, causal_lm.modules())):
        raise SharedPromptError("use_reentrant", "False, or the gradients of routers' losses would be lost", True)


def check_vocabulary(causal_lm: Any, batch: PackedBatch) -> None:
    """SharedPromptError for token ids that have no row: on a GPU the embedding would only say "device-side assert"."""
    # Inside of PEFT's adapters of embeddings.
    found = (one for one in causal_lm.get_input_embeddings().modules() if isinstance(one, nn.Embedding))
    size = next((one.num_embeddings for one in found), None)
    if size is not None and batch.max_token >= size:
        raise SharedPromptError("batch", f"token ids below {size}, the vocabulary", batch.max_token)


@dataclass(frozen=True)
class _Scorer:
    """Takes the place of a causal LM's forward while one packed batch is scored."""

    causal_lm: Any
    backbone: str
    rows: Tensor  # (n,) whose hidden states are scored
    score: Score
    kept: list[Tensor] = field(default_factory=list)  # what it has returned

    def __call__(self, stock: Callable[..., Any], *args: Any, **inputs: Any) -> Any:
        """The model's inputs -> what is scored, (n, ...) each."""
        head = head_modules(self.causal_lm, self.backbone)
        with unchanged_buffers(head, "an LM head runs for some rows at a time, and again in the backward"):
            return self._scores(stock, inputs)

    def _scores(self, stock: Callable[..., Any], inputs: dict[str, Any]) -> tuple[Tensor, ...]:
        output = self._run_backbone(stock, inputs)
        # One gather for all rows: one per chunk would have a backward as large as the whole pack.
        states = output.last_hidden_state[0]
        # Layers may lie on several devices; the last of them says where the scores are computed.
        here = states.device
        hidden = states.index_select(0, self.rows.to(here))
        rows = rows_of_a_chunk(unwrap.text_config(self.causal_lm.config).vocab_size)
        gathered = gathered_modules(self.causal_lm, self.backbone)

        def logits(hidden: Tensor) -> Tensor:
            """(rows, D) -> (rows, vocabulary)."""
            ready = type(output)(last_hidden_state=hidden[None])
            ready_backbone = _ready_backbone(self.causal_lm, self.backbone, ready)
            with unwrap.lock_of(self.causal_lm), ready_backbone, already_gathered(gathered):
                # Some heads read the input's length, none more: the backbone's output is ready.
                inputs = {"inputs_embeds": hidden.detach()[None], "use_cache": False, "return_dict": True}
                result: Tensor = stock(**inputs).logits[0].to(here)
            return result

        scores = score_gathered(gathered, lambda hidden: self.score(logits, hidden, rows), hidden)
        layout, routed = inputs.get(LAYOUT), getattr(output, "router_logits", None)
        if isinstance(layout, PieceLayout) and routed:
            scores = (*scores, self._expert_sums(routed, layout.own_lens))
        self.kept[:] = [one.to(self.rows.device) for one in scores]
        return tuple(self.kept)

    def _expert_sums(self, logits: Sequence[Tensor], lens: Sequence[int]) -> Tensor:
        """(n, 2, E) of n nodes the sums, over rows and layers, of routers' probabilities and of chosen experts."""
        check_router_losses(self.causal_lm)
        sums: list[Tensor] = []
        for layer in logits:
            probabilities = layer.softmax(-1, dtype=torch.promote_types(layer.dtype, torch.float32))
            chosen = probabilities.detach().topk(self.causal_lm.num_experts_per_tok).indices
            both = torch.cat([probabilities, torch.zeros_like(probabilities).scatter_(1, chosen, 1)], 1)
            sums.append(sum_runs(both, torch.tensor(lens, device=layer.device)).unflatten(1, (2, -1)))
        return torch.stack([own.to(sums[0].device) for own in sums]).sum(0)

    def _run_backbone(self, stock: Callable[..., Any], inputs: dict[str, Any]) -> Any:
        """The backbone's output, from a stock forward whose head sees a single row."""
        with unwrap.kept_outputs(getattr(self.causal_lm, self.backbone)) as outputs:
            # Wrappers add arguments of their own, return_dict among them.
            # A slice is on no device. Given a number, models whose last layers share keys
            # compute these for the last rows alone.
            stock(**{**inputs, "logits_to_keep": slice(0, 1), "return_dict": True})
        if len(outputs) != 1 or not hasattr(outputs[0], "last_hidden_state"):
            expected = "a forward that calls its backbone once and takes last_hidden_state from it"
            raise SharedPromptError("model", expected, f"{len(outputs)} calls")
        return outputs[0]


@contextmanager
def _ready_backbone(causal_lm: Any, name: str, output: Any) -> Iterator[None]:
    """Replace the causal LM's backbone by one that has its output already, without running its hooks."""
    backbone = causal_lm._modules[name]
    causal_lm._modules[name] = _ReadyBackbone(backbone, output)
    try:
        yield
    finally:
        causal_lm._modules[name] = backbone


class _ReadyBackbone(nn.Module):
    """Returns what it was given; looks like the backbone otherwise."""

    def __init__(self, backbone: nn.Module, output: Any) -> None:
        super().__init__()
        # No submodule: this object lives for one call and must not claim the parameters.
        self.__dict__.update(backbone=backbone, output=output, thread=threading.get_ident())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["backbone"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if unwrap.is_elsewhere(self.__dict__["thread"]):
            return self.__dict__["backbone"](*args, **kwargs)
        return self.__dict__["output"]
