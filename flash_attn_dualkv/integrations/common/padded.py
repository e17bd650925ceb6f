# SPDX-License-Identifier: BSD-3-Clause
"""Padded batches of trainers, scored on a packed row where that is exact and saves enough."""

from __future__ import annotations

import logging
import weakref
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from ... import checks
from ...data.batch import PackedBatch
from ...data.pack import pack_prefix_tree
from ...errors import SharedPromptError, SharedPromptLayoutError
from ..transformers import check_supported, register, shared_prompt_forward, wrap
from ..transformers.admission import support
from ..transformers.admission.first_use import FirstUseError, check_first_use
from ..transformers.admission.support import check_attention, text_config
from ..transformers.admission.unwrap import backbone_name, causal_lm_of
from ..transformers.forward import check_forward, check_vocabulary
from ..transformers.zero3 import gathered_modules
from .fallback import Options, Refusal, Tally, kernels_refusal

logger = logging.getLogger(__name__)

EAGER = "dualkv_eager"  # what takes a layout and, without one, is the model's own eager attention


class Refused(Exception):  # noqa: N818 (stock attention is no error)
    """Raised anew, never kept: an exception holds the tensors of the frames it has passed."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.refusal = Refusal(reason, message)


def check_model(
    causal_lm: Any,
    device: torch.device,
    *,
    model: Any = None,
    self_check: bool = True,
    share_lora_dropout: bool = False,
    about_dropout: str = "",
    dtype: torch.dtype | None = None,
) -> None:
    """Raise Refused for what a model does not allow in its present mode.

    Args:
        causal_lm: the transformers model.
        device: that of the inputs.
        model, self_check, share_lora_dropout: of `check_first_use`.
        about_dropout: what the trainer's user can do about it.
        dtype: of the arithmetic, if the model's forward has autocast inside; None: that of autocast here, or of the
            parameters.
    """
    config = causal_lm.config
    try:
        check_supported(config)
        check_attention(config)
        if device.type == "cuda":
            if dtype is None and torch.is_autocast_enabled("cuda"):
                dtype = torch.get_autocast_dtype("cuda")
            elif dtype is None:
                dtype = causal_lm.get_input_embeddings().weight.dtype
            if (refusal := kernels_refusal(config, dtype)) is not None:
                raise Refused(*refusal)
        first_use = dict(self_check=self_check, share_lora_dropout=share_lora_dropout)
        check_first_use(causal_lm, device, model=model, **first_use)
    except FirstUseError as error:
        raise Refused(error.reason, str(error) + about_dropout * (error.reason == "dropout")) from None
    except SharedPromptLayoutError:  # one that gets lost on its way: a mistake, and no kind of model
        raise
    except SharedPromptError as error:
        raise Refused("unsupported", str(error)) from None


def take_layouts(causal_lm: Any) -> None:
    """Let the model's attention take a layout; where it cannot, `check_attention` says so."""
    name = text_config(causal_lm.config)._attn_implementation
    known = AttentionInterface._global_mapping
    if name in known and not hasattr(known[name], support.TAKES_LAYOUT):
        wrap((name,))
    elif name == "eager" and _has_interface(causal_lm):
        # Every model file has an eager attention of its own: there is nothing to wrap. Files of
        # models that cannot share may compute otherwise where the name is none of transformers'.
        with suppress(SharedPromptError):
            check_supported(causal_lm.config)
            register(EAGER, fallback="eager")
            causal_lm.set_attn_implementation(EAGER)


def _has_interface(causal_lm: Any) -> bool:
    """Whether the text of a model attends through transformers' interface."""
    text = text_config(causal_lm.config)
    models = [one for one in causal_lm.modules() if isinstance(one, PreTrainedModel) and one.config is text]
    return all(one._can_set_attn_implementation() for one in models)


class PaddedScores:
    """Log-probabilities of padded batches, each shared token computed once; or none, where stock attention is to run.

    Attributes:
        options: what of `Options` the trainer's plug-in offers: min_dedup_ratio, min_shared, self_check,
            share_lora_dropout.
        tally: what has been run.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.tally = Tally()
        self._announced: set[str] = set()
        # Causal LMs that only a forward could tell cannot share.
        self._refusals: weakref.WeakKeyDictionary[nn.Module, Refusal] = weakref.WeakKeyDictionary()

    @staticmethod
    def options_of(
        min_dedup_ratio: float, self_check: bool, min_shared: int, share_lora_dropout: bool = False
    ) -> Options:
        """SharedPromptError for a wrong value."""
        given: dict[str, Any] = dict(min_dedup_ratio=min_dedup_ratio, self_check=self_check)
        given |= dict(share_lora_dropout=share_lora_dropout)
        read = Options.checked({name: (name, value) for name, value in given.items()})
        return read._replace(min_shared=checks.integer("min_shared", min_shared, 1))

    def take(self) -> Tally:
        """What has been run since this was last asked."""
        tally, self.tally = self.tally, Tally()
        return tally

    def score(
        self,
        model: Any,
        input_ids: Tensor,
        attention_mask: Tensor,
        is_scored: Tensor,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        refusal: Refusal | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor | None] | None:
        """The scores of a micro-batch, or None if the trainer's own forward is to run.

        Where forwards gather the parameters of modules (ZeRO-3), all ranks must call this together.

        Args:
            model: the outermost module around a causal LM of transformers.
            input_ids, attention_mask: (B, S), padded anywhere.
            is_scored: (B, S) bool: the tokens whose log-probabilities are wanted.
            temperature, with_entropy: of `shared_prompt_forward`.
            refusal: why the trainer's call cannot share, the same on all ranks.
            dtype: of `check_model`.

        Returns:
            logps, entropy: (B, S - 1) in float32, 0 where the next token is not scored; entropy None unless asked for.
        """
        try:
            if refusal is not None:
                raise Refused(*refusal)
            batch = self._packed(model, input_ids, attention_mask, is_scored, dtype)
            scores = self._scores(model, batch, temperature, with_entropy)
        except Refused as refused:
            tokens = attention_mask.sum()
            self.tally.add(tokens, tokens, refused.refusal.reason)
            if (reason := refused.refusal.reason) not in self._announced:
                message = refused.refusal.told(input_ids, attention_mask)
                self._say(reason, "Prompts are not shared where this holds (%s): %s", reason, message)
            return None
        self._say("", "Prompts are shared: the first micro-batch has %.2f times fewer tokens", batch.dedup_ratio)
        self.tally.add(batch.num_replicated_tokens, batch.layout.num_tokens)
        places = is_scored[:, 1:]
        logps, entropy = (
            None if one is None else one.new_zeros(places.shape).masked_scatter(places, one) for one in scores
        )
        assert logps is not None
        return logps, entropy

    def _scores(
        self, model: Any, batch: PackedBatch, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities and entropies of the scored tokens. Raises Refused where only a forward can tell."""
        causal_lm = causal_lm_of(model)
        check_vocabulary(causal_lm, batch)  # a mistake in the data, which no other forward mends
        try:
            return shared_prompt_forward(
                model, batch, temperature=temperature, with_entropy=with_entropy, **self.options.first_use
            )
        except SharedPromptLayoutError:
            raise
        except SharedPromptError as error:
            self._refusals[causal_lm] = refusal = Refusal("unsupported", str(error))
            raise Refused(*refusal) from None

    def _packed(
        self, model: Any, ids: Tensor, attention_mask: Tensor, is_scored: Tensor, dtype: torch.dtype | None
    ) -> PackedBatch:
        """The micro-batch as a tree. Raises Refused, on all ranks alike where that is needed."""
        causal_lm = causal_lm_of(model)
        if (refusal := self._refusals.get(causal_lm)) is not None:
            raise Refused(*refusal)
        take_layouts(causal_lm)
        try:
            check_forward(causal_lm)
        except SharedPromptError as error:
            raise Refused("unsupported", str(error)) from None
        check_model(causal_lm, ids.device, model=model, dtype=dtype, **self.options.first_use)
        try:
            packed: PackedBatch | Refusal = self._tree(ids, attention_mask.bool(), is_scored)
        except Refused as refused:
            packed = refused.refusal
        is_shared = isinstance(packed, PackedBatch)
        # The head's parameters are gathered once more than in a stock forward.
        if dist.is_initialized() and gathered_modules(causal_lm, str(backbone_name(causal_lm))):
            votes = torch.tensor(int(is_shared), device=ids.device)
            dist.all_reduce(votes, dist.ReduceOp.MIN)
            if is_shared and not votes.item():
                packed = Refusal("ranks", "another rank's micro-batch is not shared, and with ZeRO-3 all must be alike")
        if isinstance(packed, Refusal):
            raise Refused(*packed)
        return packed

    def _tree(self, ids: Tensor, mask: Tensor, is_scored: Tensor) -> PackedBatch:
        # A token is scored by the row before it, which must be there.
        if is_scored[:, 0].any() or (is_scored[:, 1:] & ~(mask[:, 1:] & mask[:, :-1])).any():
            raise Refused("samples", "tokens that are scored stand beside padding")
        if not mask.any():
            raise Refused("samples", "there is nothing but padding")
        lengths = mask.sum(1).tolist()
        sequences, masks = ids[mask].split(lengths), is_scored[mask].split(lengths)
        try:
            batch = pack_prefix_tree(sequences, loss_mask=masks, min_shared=self.options.min_shared)
        except SharedPromptError as error:
            raise Refused("samples", str(error)) from None
        least = self.options.min_dedup_ratio
        if batch.dedup_ratio < least:
            message = f"{batch.dedup_ratio:.3f} is below min_dedup_ratio={least} (larger micro-batches share more)"
            raise Refused("dedup_ratio", message)
        return batch

    def _say(self, key: str, message: str, *arguments: Any) -> None:
        """Once for each key."""
        if key not in self._announced:
            self._announced.add(key)
            logger.warning(message, *arguments)
