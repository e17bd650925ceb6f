# SPDX-License-Identifier: BSD-3-Clause
"""From a trainer's samples to scores in its shape: models that may share, plans, savings, counts, verification."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from ...data.batch import PackedBatch
from ...data.plan import plan
from ...data.prefix_tree import PrefixTree
from ...data.samples import Samples, read_sequences
from ...errors import SharedPromptError
from ...layout import SharedPromptLayout
from ..transformers import check_supported, register, wrap
from ..transformers.admission import check, table, unwrap
from .options import Options, Refusal, Refused, kernels_refusal, refusing

logger = logging.getLogger(__name__)

EAGER = "dualkv_eager"  # what takes a layout and, without one, is the model's own eager attention


def check_model(
    causal_lm: Any,
    device: torch.device,
    *,
    about_dropout: str = "",
    dtype: torch.dtype | None = None,
    **options: Any,
) -> None:
    """Raise Refused for what a model does not allow in its present mode.

    Args:
        causal_lm: the transformers model.
        device: that of the inputs.
        about_dropout: what the trainer's user can do about it.
        dtype: of the arithmetic, if the model's forward has autocast inside; None: that of autocast here, or of the
            parameters.
        options: of `check_first_use`.
    """
    config = causal_lm.config
    with refusing("unsupported"):
        check_supported(config)
        table.check_attention(config)
        if device.type == "cuda":
            if dtype is None and torch.is_autocast_enabled("cuda"):
                dtype = torch.get_autocast_dtype("cuda")
            elif dtype is None:
                dtype = causal_lm.get_input_embeddings().weight.dtype
            if (refusal := kernels_refusal(config, dtype)) is not None:
                raise Refused(*refusal)
        try:
            check.check_first_use(causal_lm, device, **options)
        except table.FirstUseError as error:
            raise Refused(error.reason, str(error) + about_dropout * (error.reason == "dropout")) from None


def take_layouts(causal_lm: Any) -> None:
    """Let the model's attention take a layout; where it cannot, `check_attention` says so."""
    name = unwrap.text_config(causal_lm.config)._attn_implementation
    known = AttentionInterface._global_mapping
    if name in known and not hasattr(known[name], table.TAKES_LAYOUT):
        wrap((name,))
    elif name == "eager" and _has_interface(causal_lm):
        # Every model file has an eager attention of its own: there is nothing to wrap. Files of
        # models that cannot share may compute otherwise where the name is none of transformers'.
        with suppress(SharedPromptError):
            check_supported(causal_lm.config)
            register(EAGER, fallback="eager")
            causal_lm.set_attn_implementation(EAGER)


def _has_interface(causal_lm: Any) -> bool:
    """True if the text of a model attends through transformers' interface."""
    text = unwrap.text_config(causal_lm.config)
    models = (part for part in causal_lm.modules() if isinstance(part, PreTrainedModel) and part.config is text)
    return all(model._can_set_attn_implementation() for model in models)


# Samples


def samples_of(ids: Tensor, mask: Tensor, is_scored: Tensor) -> Samples:
    """The sequences of a padded batch, (B, S) each, any of whose tokens may be scored. Raises Refused."""
    lengths = mask.sum(1).tolist()
    with refusing("samples"):
        return read_sequences(ids[mask].split(lengths), loss_mask=is_scored[mask].split(lengths))


def planned(samples: Samples, options: Options) -> PrefixTree:
    """The nodes of the row of these samples.

    Raises:
        Refused: too little is shared.
    """
    with refusing("samples"):
        tree = plan(samples, min_shared=options.min_shared)
    ratio = sum(tree.sequence_lens) / max(1, sum(tree.node_lens))
    if ratio < options.min_dedup_ratio:
        message = f"{ratio:.3f} is below min_dedup_ratio={options.min_dedup_ratio} (larger micro-batches share more)"
        raise Refused("dedup_ratio", message)
    return tree


def scattered(values: Tensor, places: Tensor) -> Tensor:
    """Values of scored tokens where these stand in a padded batch, 0 elsewhere; differentiable.

    Args:
        values: (sum R,), sequence by sequence.
        places: (B, S) bool.
    """
    return values.new_zeros(places.shape).masked_scatter(places, values)


# Counts


@dataclass
class Tally:
    """Counts of what has been run."""

    calls: int = 0
    # Ints, or tensors that stay on their GPU.
    replicated: Any = 0  # tokens that stock attention runs, without padding
    tokens: Any = 0  # tokens that were run
    unread: int = 0  # of these, not in the last layers
    fallbacks: Counter[str] = field(default_factory=Counter)

    @torch.compiler.disable
    def add(self, replicated: Any, tokens: Any, reason: str | None = None, unread: int = 0) -> None:
        self.calls += 1
        self.replicated = self.replicated + replicated
        self.tokens = self.tokens + tokens
        self.unread += unread
        if reason is not None:
            self.fallbacks[reason] += 1


def savings(replicated: float, tokens: float) -> dict[str, float]:
    """The metrics that every trainer has, without their prefix."""
    return {"dedup_ratio": replicated / tokens if tokens else 1.0, "tokens_saved": replicated - tokens}


class Sharing:
    """Counts of what a trainer has shared, and of the reasons why not.

    Attributes:
        options: of the trainer.
        tally: since `take` was last called.
    """

    def __init__(self, options: Options, warn: Callable[[str], Any] = logger.warning) -> None:
        self.options = options
        self.tally = Tally()
        self.announced: set[str] = set()
        self._warn = warn

    def take(self) -> Tally:
        """Counts since this was last asked."""
        tally, self.tally = self.tally, Tally()
        return tally

    def count(self, batch: PackedBatch, layout: SharedPromptLayout | None = None) -> None:
        """Count a packed forward, by the layout that its layers had."""
        unread = 0 if layout is None else layout.num_unread
        self.tally.add(batch.num_replicated_tokens, batch.layout.num_tokens, unread=unread)

    @torch.compiler.disable
    def fall_back(self, refusal: Refusal, input_ids: Any, attention_mask: Any) -> None:
        """Count a stock forward, and say why when a reason comes up for the first time."""
        tokens = 0 if input_ids is None else input_ids.numel()
        tokens = attention_mask.sum() if isinstance(attention_mask, Tensor) else tokens
        self.tally.add(tokens, tokens, refusal.reason)
        if refusal.reason not in self.announced:
            told = refusal.told(input_ids, attention_mask)
            self.say(refusal.reason, f"Prompts are not shared where this holds ({refusal.reason}): {told}")

    def say(self, key: str, message: str) -> None:
        """Warn once a key."""
        if key not in self.announced:
            self.announced.add(key)
            self._warn(message)


# Verification


# fp16's loss scale begins at 2^16 and is halved by each overflow.
_MOST_REPEATS = 16


class Verification:
    """Calls of each kind still to be computed by stock attention too; whether one differed."""

    def __init__(self, calls: int, *kinds: str) -> None:
        self._left = dict.fromkeys(kinds, calls)
        self._repeats = dict.fromkeys(kinds, _MOST_REPEATS)
        self.has_failed = False

    def is_due(self, kind: str) -> bool:
        """True if this call is to be verified; it counts."""
        is_due = self._left[kind] > 0 and not self.has_failed
        self._left[kind] -= is_due
        return is_due

    def repeat(self, kind: str) -> None:
        """This call could not be compared: another one is to be, unless that has happened too often."""
        is_allowed = self._repeats[kind] > 0
        self._repeats[kind] -= is_allowed
        self._left[kind] += is_allowed


def difference(shared: Tensor, stock: Tensor, scored: Any = None) -> Tensor:
    """(2,): the largest difference and the mean, over `scored` values; over all of them if None."""
    if not stock.numel():
        return stock.new_zeros(2, dtype=torch.float32)
    found = (shared - stock).detach().abs().float()
    return torch.stack([found.max(), found.sum() / (found.numel() if scored is None else scored)])
