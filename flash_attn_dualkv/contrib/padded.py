# SPDX-License-Identifier: BSD-3-Clause
"""Padded batches of trainers, scored on a packed row where that is exact and saves enough.

Ran: under OpenRLHF's, ms-swift's and LLaMA-Factory's trainer classes and DeepSpeed 0.19, on a CPU, 2026-11-28.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from .. import checks
from ..data.batch import PackedBatch, pack
from ..data.plan import MIN_SHARED
from ..integrations.common.options import REASONS, Options, Refusal, Refused, refusing
from ..integrations.common.pipeline import Sharing, check_model, planned, samples_of, scattered, take_layouts
from ..integrations.transformers import shared_prompt_forward
from ..integrations.transformers.admission.unwrap import backbone_name, causal_lm_of
from ..integrations.transformers.forward import check_forward, check_vocabulary
from ..integrations.transformers.zero3 import gathered_modules
from ..parallel.agreement import all_ranks, largest_of_ranks

logger = logging.getLogger(__name__)


class PaddedScores(Sharing):
    """Log-probabilities of padded batches, each shared token computed once; or none, where stock attention is to run.

    Attributes:
        options: what of `Options` the trainer's plug-in offers: min_dedup_ratio, min_shared, self_check,
            share_lora_dropout.
    """

    def __init__(self, options: Options) -> None:
        super().__init__(options, logger.warning)
        # Causal LMs that only a forward could tell cannot share.
        self._refusals: weakref.WeakKeyDictionary[nn.Module, Refusal] = weakref.WeakKeyDictionary()

    @staticmethod
    def of(*, min_shared: int = MIN_SHARED, **options: Any) -> PaddedScores:
        """The scores of a plug-in with these options.

        Args:
            min_shared: the fewest tokens that a shared beginning must save.
            options: min_dedup_ratio, self_check and share_lora_dropout, as `Options` says of them.

        Raises:
            SharedPromptError: a wrong value.
            TypeError: an option that plug-ins do not offer.
        """
        if others := sorted(options.keys() - {"min_dedup_ratio", "self_check", "share_lora_dropout"}):
            raise TypeError(f"share_prompts() got an unexpected keyword argument {others[0]!r}")
        read = Options.checked({name: (name, value) for name, value in options.items()})
        return PaddedScores(read._replace(min_shared=checks.integer("min_shared", min_shared, 1)))

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
            self.fall_back(refused.refusal, input_ids, attention_mask)
            return None
        self.say("", f"Prompts are shared: the first micro-batch has {batch.dedup_ratio:.2f} times fewer tokens")
        self.count(batch)
        logps, entropy = (None if values is None else scattered(values, is_scored[:, 1:]) for values in scores)
        assert logps is not None
        return logps, entropy

    def _scores(
        self, model: Any, batch: PackedBatch, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities and entropies of the scored tokens. Raises Refused where only a forward can tell."""
        causal_lm = causal_lm_of(model)
        check_vocabulary(causal_lm, batch)  # a mistake in the data, which no other forward mends
        try:
            with refusing("unsupported"):
                return shared_prompt_forward(
                    model, batch, temperature=temperature, with_entropy=with_entropy, **self.options.first_use
                )
        except Refused as refused:
            self._refusals[causal_lm] = refused.refusal
            raise

    def _packed(
        self, model: Any, ids: Tensor, attention_mask: Tensor, is_scored: Tensor, dtype: torch.dtype | None
    ) -> PackedBatch:
        """The micro-batch as a tree. Raises Refused, on all ranks alike where that is needed."""
        causal_lm = causal_lm_of(model)
        if (refusal := self._refusals.get(causal_lm)) is not None:
            raise Refused(*refusal)
        take_layouts(causal_lm)
        with refusing("unsupported"):
            check_forward(causal_lm)
        check_model(causal_lm, ids.device, model=model, dtype=dtype, **self.options.first_use)
        try:
            packed: PackedBatch | Refusal = self._tree(ids, attention_mask.bool(), is_scored)
        except Refused as refused:
            packed = refused.refusal
        is_shared = isinstance(packed, PackedBatch)
        # The head's parameters are gathered once more than in a stock forward.
        if gathered_modules(causal_lm, str(backbone_name(causal_lm))):
            (is_refused,) = largest_of_ranks([not is_shared], all_ranks())
            if is_shared and is_refused:
                packed = Refusal("ranks", REASONS["ranks"])
        if isinstance(packed, Refusal):
            raise Refused(*packed)
        return packed

    def _tree(self, ids: Tensor, mask: Tensor, is_scored: Tensor) -> PackedBatch:
        # A token is scored by the row before it, which must be there.
        if is_scored[:, 0].any() or (is_scored[:, 1:] & ~(mask[:, 1:] & mask[:, :-1])).any():
            raise Refused("samples", "tokens that are scored stand beside padding")
        if not mask.any():
            raise Refused("samples", "there is nothing but padding")
        samples = samples_of(ids, mask, is_scored)
        return pack(samples, planned(samples, self.options))
