"""Log-probabilities of packed responses: the backbone over every token once, the LM head over the rows that are scored.

The head is whatever the model's own forward does after its backbone (projection, softcapping, scaling of logits): it is
run with the backbone replaced by one that returns ready hidden states, so no model needs to be known here.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias, overload

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ... import arguments
from ...checks import explain
from ...data.batch import SharedPromptBatch
from ...data.tree import PrefixTreeBatch
from ...errors import SharedPromptError
from ..lm_head import rows_of_a_chunk, score_in_chunks
from .guard import expect_shared_prompt
from .hybrid import prepare
from .support import (
    check_attention,
    check_modules,
    check_noise,
    check_positions,
    check_supported,
    num_mixing_layers,
    text_config,
)

PackedBatch: TypeAlias = SharedPromptBatch | PrefixTreeBatch

# Where wrappers (DDP, FSDP1, torch.compile, accelerate, DeepSpeed) keep what they wrap.
_WRAPPED_AS = ("_orig_mod", "_fsdp_wrapped_module", "module")


@overload
def shared_prompt_forward(
    model: nn.Module, batch: PackedBatch, *, temperature: float = 1.0, with_entropy: Literal[False] = False
) -> tuple[Tensor, None]: ...
@overload
def shared_prompt_forward(
    model: nn.Module, batch: PackedBatch, *, temperature: float = 1.0, with_entropy: Literal[True]
) -> tuple[Tensor, Tensor]: ...
@overload
def shared_prompt_forward(
    model: nn.Module, batch: PackedBatch, *, temperature: float = 1.0, with_entropy: bool
) -> tuple[Tensor, Tensor | None]: ...
def shared_prompt_forward(
    model: nn.Module, batch: PackedBatch, *, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of all response tokens of a micro-batch, or of all trained tokens of trees; each row once.

    Args:
        model: a causal LM of transformers whose attention is registered or wrapped by this package; also inside PEFT,
            DDP or FSDP. Gradients flow to its parameters unless grad mode is off.
        batch: from `pack_shared_prompts` or `pack_prefix_tree`, on the model's device.
        temperature: divides the logits; finite and > 0.
        with_entropy: also return the entropy of each distribution (natural log, differentiable).

    Returns:
        logps, entropy: each (sum of response lengths,) in float32 (float64 for float64 models), the responses (or the
        trained tokens of sequences) one after the other in the order in which they were given; `unpack_logprobs` makes
        a (responses, tokens) matrix of them.
        entropy is None unless asked for.

    Raises:
        SharedPromptError: an argument is not as described; a token id is not in the vocabulary; the model is not exact
            on shared prompts (see `check_supported`), draws dropout in training mode, runs on another attention, or
            shards its LM head as an FSDP unit of its own.
        SharedPromptLayoutError: an attention layer has not got the layout; nothing is returned then.
    """
    if not isinstance(batch, PrefixTreeBatch):
        arguments.instance("batch", batch, SharedPromptBatch, " (of pack_shared_prompts)")
    temperature = arguments.positive("temperature", temperature)
    arguments.flag("with_entropy", with_entropy)
    causal_lm = causal_lm_of(model)
    inputs = {
        "input_ids": batch.input_ids[None],
        "position_ids": batch.position_ids[None],
        "attention_mask": None,
        "use_cache": False,
        "shared_prompt_layout": batch.layout,
    }
    with _lock_of(causal_lm):
        backbone = _check_model(causal_lm)
        _check_vocabulary(causal_lm, batch)
        scorer = _Scorer(causal_lm, backbone, batch, temperature, with_entropy)
        expected = expect_shared_prompt(batch.layout, num_mixing_layers(causal_lm))
        with expected, _replaced_forward(scorer):
            # Through the outermost module, so that wrappers see one forward with the log-probabilities as its output.
            logps, entropy = model(**inputs)
    return logps, entropy if with_entropy else None


def causal_lm_of(model: nn.Module) -> Any:
    """The transformers model inside wrappers and adapters.

    Raises:
        SharedPromptError: there is none.
    """
    inner: Any = model
    while not isinstance(inner, PreTrainedModel):
        get_base_model = getattr(inner, "get_base_model", None)
        wrapped = [getattr(inner, name) for name in _WRAPPED_AS if isinstance(getattr(inner, name, None), nn.Module)]
        if callable(get_base_model):
            inner = get_base_model()
        elif wrapped:
            inner = wrapped[0]
        else:
            raise SharedPromptError(explain("model", "a transformers model, wrapped or not", type(model).__name__))
    return inner


def backbone_name(causal_lm: Any) -> str | None:
    """The attribute of a causal LM that holds its backbone, the child with the input embeddings; None for a backbone.

    Not `base_model_prefix`, which names an attribute that some classes do not have.
    """
    embeddings = causal_lm.get_input_embeddings()
    for name, child in causal_lm.named_children():
        if child is not embeddings and _holds(child, embeddings):
            return str(name)
    return None


def _holds(module: nn.Module, other: nn.Module) -> bool:
    return any(one is other for one in module.modules())


def _check_model(causal_lm: Any) -> str:
    """Check everything that can be known before the forward; returns the name of the backbone."""
    check_supported(causal_lm.config)
    check_attention(causal_lm.config)
    name = backbone_name(causal_lm)
    if name is None or causal_lm.get_output_embeddings() is None:
        raise SharedPromptError(explain("model", "a causal LM (a backbone with a head)", type(causal_lm).__name__))
    if "logits_to_keep" not in inspect.signature(type(causal_lm).forward).parameters:
        expected = "a forward that takes logits_to_keep"
        raise SharedPromptError(explain("model", expected, f"that of {type(causal_lm).__name__}"))
    # Ranks have different numbers of rows, hence of chunks: a unit that communicates in every call would wait for ever.
    if hasattr(causal_lm.get_output_embeddings(), "set_reshard_after_forward"):
        expected = "an LM head in the root's FSDP unit"
        raise SharedPromptError(explain("model", expected, "an LM head that is an FSDP unit of its own"))
    check_modules(causal_lm)
    check_positions(getattr(causal_lm, name))
    check_noise(causal_lm)
    prepare(causal_lm)
    return name


def _check_vocabulary(causal_lm: Any, batch: PackedBatch) -> None:
    """SharedPromptError for token ids that have no row: on a GPU the embedding would only say "device-side assert"."""
    ends = (causal_lm.get_input_embeddings(), "num_embeddings"), (causal_lm.get_output_embeddings(), "out_features")
    sizes = [size for module, name in ends if isinstance(size := getattr(module, name, None), int)]
    if sizes and batch.max_token >= min(sizes):
        raise SharedPromptError(explain("batch", f"token ids below {min(sizes)}, the vocabulary", batch.max_token))


class _Scorer:
    """Takes the place of a causal LM's forward during one `shared_prompt_forward`."""

    def __init__(
        self, causal_lm: Any, backbone: str, batch: PackedBatch, temperature: float, with_entropy: bool
    ) -> None:
        self.causal_lm = causal_lm
        self.backbone = backbone
        self.batch = batch
        self.temperature = temperature
        self.with_entropy = with_entropy
        # Bound, with whatever a library has put around it (autocast, for example).
        self.stock_forward = causal_lm.forward
        self.thread = threading.get_ident()

    def __call__(self, *args: Any, **inputs: Any) -> Any:
        """The model's inputs -> log-probabilities and entropies, (sum R,) each."""
        if _is_elsewhere(self.thread):  # a plain forward of the same model
            return self.stock_forward(*args, **inputs)
        output = self._run_backbone(inputs)
        # One gather for all rows: a gather per chunk would have a backward as large as the whole pack.
        hidden = output.last_hidden_state[0].index_select(0, self.batch.token_index)
        rows = rows_of_a_chunk(text_config(self.causal_lm.config).vocab_size)

        def logits(hidden: Tensor) -> Tensor:
            """(rows, D) -> (rows, vocabulary)."""
            ready = type(output)(last_hidden_state=hidden[None])
            with _lock_of(self.causal_lm), _ready_backbone(self.causal_lm, self.backbone, ready):
                # Some heads look at the length of the input; nobody looks into it, since the backbone is ready.
                inputs = {"inputs_embeds": hidden.detach()[None], "use_cache": False, "return_dict": True}
                result: Tensor = self.stock_forward(**inputs).logits[0]
            return result

        logps, entropy = score_in_chunks(
            logits, hidden, self.batch.targets, rows=rows, temperature=self.temperature, with_entropy=self.with_entropy
        )
        return logps, entropy

    def _run_backbone(self, inputs: dict[str, Any]) -> Any:
        """The backbone's output, from a stock forward whose head sees a single row."""
        outputs: list[Any] = []

        def keep(module: nn.Module, args: Any, output: Any) -> None:
            if not _is_elsewhere(self.thread):
                outputs.append(output)

        handle = getattr(self.causal_lm, self.backbone).register_forward_hook(keep)
        try:
            # Wrappers add arguments of their own, return_dict among them.
            # A tensor: given a number, models whose last layers share keys compute these for the last rows alone.
            one_row = self.batch.token_index.new_zeros(1)
            self.stock_forward(**{**inputs, "logits_to_keep": one_row, "return_dict": True})
        finally:
            handle.remove()
        if len(outputs) != 1 or not hasattr(outputs[0], "last_hidden_state"):
            expected = "a forward that calls its backbone once and takes last_hidden_state from it"
            raise SharedPromptError(explain("model", expected, f"{len(outputs)} calls"))
        return outputs[0]


_locks: weakref.WeakKeyDictionary[nn.Module, threading.RLock] = weakref.WeakKeyDictionary()
_locks_lock = threading.Lock()


def _lock_of(causal_lm: nn.Module) -> threading.RLock:
    """What a thread must hold while it replaces parts of the model, which another one would put back too early.

    Plain forwards of other threads need no lock: to them the replacements are what they replace.
    """
    with _locks_lock:
        return _locks.setdefault(causal_lm, threading.RLock())


def _is_elsewhere(thread: int) -> bool:
    """Whether this runs in another thread. Compilers cannot trace the question, and trace in one thread."""
    return not torch.compiler.is_compiling() and threading.get_ident() != thread


@contextmanager
def _replaced_forward(scorer: _Scorer) -> Iterator[None]:
    """Let the causal LM answer a call with scores: below its hooks and wrappers, above everything that it computes."""
    attributes = scorer.causal_lm.__dict__
    had_one, before = "forward" in attributes, attributes.get("forward")
    scorer.causal_lm.forward = scorer
    try:
        yield
    finally:
        if had_one:
            scorer.causal_lm.forward = before
        else:
            del scorer.causal_lm.forward


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
        # Not as a submodule: this object lives for one call and must not claim the parameters.
        self.__dict__["backbone"] = backbone
        self.__dict__["output"] = output
        self.__dict__["thread"] = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["backbone"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if _is_elsewhere(self.__dict__["thread"]):
            return self.__dict__["backbone"](*args, **kwargs)
        return self.__dict__["output"]
