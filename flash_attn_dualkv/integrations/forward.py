"""Log-probabilities of packed responses: the backbone over every token once, the LM head over the rows that are scored.

The head is whatever the model's own forward does after its backbone (projection, softcapping, scaling of logits): it is
run with the backbone replaced by one that returns ready hidden states, so no model needs to be known here. It runs over
chunks of rows whose logits are recomputed in the backward, so memory does not grow with rows x vocabulary.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from ..checks import explain
from ..packing import SharedPromptBatch, SharedPromptError
from .guard import expect_shared_prompt
from .support import (
    check_attention,
    check_modules,
    check_noise,
    check_supported,
    num_attention_layers,
    text_config,
)

# Logits that exist at once: 256 MiB in float32, and a few times that while they are turned into log-probabilities.
LOGIT_ELEMENTS = 2**26
# Where wrappers (DDP, FSDP1, torch.compile, accelerate, DeepSpeed) keep what they wrap.
_WRAPPED_AS = ("_orig_mod", "_fsdp_wrapped_module", "module")


def shared_prompt_forward(
    model: nn.Module, batch: SharedPromptBatch, *, temperature: float = 1.0, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities of all response tokens of a micro-batch, every prompt computed once.

    Args:
        model: a causal LM of transformers whose attention is registered or wrapped by this package; also inside PEFT,
            DDP or FSDP. Gradients flow to its parameters unless grad mode is off.
        batch: from `pack_shared_prompts`, on the model's device.
        temperature: divides the logits; finite and > 0.
        with_entropy: also return the entropy of each distribution (natural log, differentiable).

    Returns:
        logps, entropy: each (sum of response lengths,) in float32 (float64 for float64 models), the responses one after
        the other in the order in which they were given; `unpack_logprobs` makes a (responses, tokens) matrix of them.
        entropy is None unless asked for.

    Raises:
        SharedPromptError: the model is not exact on shared prompts (see `check_supported`), draws dropout in training
            mode, runs on another attention, or shards its LM head as an FSDP unit of its own.
        SharedPromptLayoutError: an attention layer has not got the layout; nothing is returned then.
    """
    if isinstance(temperature, bool) or not isinstance(temperature, (int, float)):
        raise TypeError(explain("temperature", "a float", type(temperature).__name__))
    if not 0.0 < temperature < math.inf:
        raise SharedPromptError(explain("temperature", "a finite number > 0", temperature))
    causal_lm = causal_lm_of(model)
    backbone = _check_model(causal_lm)
    inputs = {
        "input_ids": batch.input_ids[None],
        "position_ids": batch.position_ids[None],
        "attention_mask": None,
        "use_cache": False,
        "shared_prompt_layout": batch.layout,
    }
    scorer = _Scorer(causal_lm, backbone, batch, temperature, with_entropy)
    with expect_shared_prompt(batch.layout, num_attention_layers(causal_lm.config)), _replaced_forward(scorer):
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
    check_noise(causal_lm)
    return name


class _Scorer:
    """Takes the place of a causal LM's forward during one `shared_prompt_forward`."""

    def __init__(
        self, causal_lm: Any, backbone: str, batch: SharedPromptBatch, temperature: float, with_entropy: bool
    ) -> None:
        self.causal_lm = causal_lm
        self.backbone = backbone
        self.batch = batch
        self.temperature = temperature
        self.with_entropy = with_entropy
        # Bound, with whatever a library has put around it (autocast, for example).
        self.stock_forward = causal_lm.forward

    def __call__(self, **inputs: Any) -> tuple[Tensor, Tensor]:
        """The model's inputs -> log-probabilities and entropies, (sum R,) each."""
        output = self._run_backbone(inputs)
        # One gather for all rows: a gather per chunk would have a backward as large as the whole pack.
        hidden = output.last_hidden_state[0].index_select(0, self.batch.token_index)
        rows = max(1, LOGIT_ELEMENTS // text_config(self.causal_lm.config).vocab_size)
        scores = [
            checkpoint(self._score, *chunk, type(output), use_reentrant=False, preserve_rng_state=False)
            for chunk in zip(hidden.split(rows), self.batch.targets.split(rows))
        ]
        logps, entropy = (torch.cat(one) for one in zip(*scores))
        return logps, entropy

    def _run_backbone(self, inputs: dict[str, Any]) -> Any:
        """The backbone's output, from a stock forward whose head sees a single row."""
        outputs: list[Any] = []
        backbone = getattr(self.causal_lm, self.backbone)
        handle = backbone.register_forward_hook(lambda module, args, output: outputs.append(output))
        try:
            # Wrappers add arguments of their own, return_dict among them.
            self.stock_forward(**{**inputs, "logits_to_keep": 1, "return_dict": True})
        finally:
            handle.remove()
        if len(outputs) != 1 or not hasattr(outputs[0], "last_hidden_state"):
            expected = "a forward that calls its backbone once and takes last_hidden_state from it"
            raise SharedPromptError(explain("model", expected, f"{len(outputs)} calls"))
        return outputs[0]

    def _score(self, hidden: Tensor, targets: Tensor, output_type: type) -> tuple[Tensor, Tensor]:
        """hidden (rows, D), targets (rows,) -> log-probability of each target, entropy of each row."""
        with _ready_backbone(self.causal_lm, self.backbone, output_type(last_hidden_state=hidden[None])):
            logits = self.stock_forward(use_cache=False, return_dict=True).logits[0]
        logits = logits.to(torch.float64 if logits.dtype == torch.float64 else torch.float32) / self.temperature
        log_normalizer = logits.logsumexp(-1)
        logps = logits.gather(-1, targets[:, None])[:, 0] - log_normalizer
        if not self.with_entropy:
            return logps, logps.detach()
        # H = log Z - sum p x: the products p x of masked logits (-inf) are 0.
        weights = logits.softmax(-1)
        entropy = log_normalizer - (weights * logits.masked_fill(logits == -math.inf, 0.0)).sum(-1)
        return logps, entropy


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

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["backbone"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.__dict__["output"]
