# SPDX-License-Identifier: BSD-3-Clause
"""lm-evaluation-harness on shared prefixes: the model `dualkv` is `hf` whose requests are scored as prefix trees.

    python -m flash_attn_dualkv.integrations.lm_eval run --model dualkv --model_args pretrained=... --tasks arc_easy

The harness has no plug-ins: its command learns of the model by this module, which then runs it. In Python importing
this module is enough: `lm_eval.simple_evaluate(model="dualkv", ...)`. Needs lm_eval 0.4.13 or newer.

A few-shot header, a question and the choices of an answer are the levels of a tree, found by tokens over all requests
that the harness hands over. Each is computed once a micro-batch. Tokens, truncation and results are those of `hf`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, TypeVar

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM, eval_logger
from torch import Tensor
from tqdm import tqdm

from .. import checks
from ..data.batch import PackedBatch
from ..errors import SharedPromptError
from ..host import int64s, runs, to_device
from .common.scoring import MAX_TOKENS, MIN_SHARED, scoring_batches
from .common.versions import LM_EVAL
from .transformers import register, shared_prompt_logits
from .transformers.admission.table import check_attention, check_supported
from .transformers.admission.unwrap import causal_lm_of
from .transformers.rope import rope_class

ATTENTION = "dualkv"

Request = tuple[Any, list[int], list[int]]  # what it is cached as, context, continuation
Answer = tuple[float, bool]  # log-likelihood of the continuation, whether each of its tokens is the most likely one
Fetch = Callable[[], list[Tensor]]
_T = TypeVar("_T")


@register_model("dualkv")
class DualKVLM(HFLM):
    """`hf` of lm-evaluation-harness; log-likelihoods on shared prefixes, all else unchanged.

    Args:
        pretrained: a name, or a model that runs on a registered or wrapped attention.
        max_tokens: most tokens of a micro-batch of log-likelihoods, each shared one counted once. batch_size and
            max_batch_size are those of generate_until.
        min_shared: the fewest tokens that must be saved for a beginning to be shared.
        self_check: try a pair of short sequences before the first forward in each mode and with each set of adapters.
        **options: of `hf`.

    Raises:
        SharedPromptError: an option that scoring has no place for (backend seq2seq, tp_plan, logits_cache=False,
            another attn_implementation); a model that is not exact on shared prefixes; an argument is not as described.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        max_tokens: int = MAX_TOKENS,
        min_shared: int = MIN_SHARED,
        self_check: bool = True,
        **options: Any,
    ) -> None:
        self.max_tokens = checks.integer("max_tokens", max_tokens, 1)
        self.min_shared = checks.integer("min_shared", min_shared, 1)
        self.self_check = checks.flag("self_check", self_check)
        if options.get("tp_plan") is not None:
            raise SharedPromptError("tp_plan", "None (--model hf has it)", options["tp_plan"])
        if not options.get("logits_cache", True):
            expected = "True: what requests share is computed once in any case (--model hf can do without)"
            raise SharedPromptError("logits_cache", expected, False)
        attention = options.get("attn_implementation", ATTENTION)
        if attention != ATTENTION:
            raise SharedPromptError("attn_implementation", f"{ATTENTION!r}, or nothing", repr(attention))
        if isinstance(pretrained, str):
            register(ATTENTION)
            options["attn_implementation"] = ATTENTION
        super().__init__(pretrained, **options)
        check_attention(causal_lm_of(self.model).config)

    def _get_backend(self, config: Any, *args: Any, **options: Any) -> None:
        super()._get_backend(config, *args, **options)
        if self.backend != "causal":
            raise SharedPromptError("backend", "a causal model (--model hf has others)", self.backend)
        check_supported(config)

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Log-likelihoods of whole texts, with the windows of all of them at once."""
        given = self.batch_size
        self.batch_size_per_gpu: int | str = sys.maxsize  # of windows that are handed over together
        try:
            totals: list[float] = super().loglikelihood_rolling(requests, disable_tqdm)
        finally:
            self.batch_size_per_gpu = given
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Answer]:
        """The answers of tokenised requests, in their order. `override_bs` is of padded batches."""
        scored: dict[tuple[int, ...], list[int]] = {}  # the requests of each input
        for number, (_, context, continuation) in enumerate(requests):
            scored.setdefault(self._input(context, continuation), []).append(number)
        inputs = [*scored]
        answers: list[Answer | None] = [None] * len(requests)
        desc, hidden = "Running loglikelihood requests", disable_tqdm or self.rank != 0
        with tqdm(total=len(requests), disable=hidden, desc=desc) as progress:
            for numbers, fetch in _one_behind(
                self._launch(requests, [scored[inputs[index]] for index in chosen], batch)
                for chosen, batch in self._micro_batches(inputs)
            ):
                lens = [len(requests[number][2]) for number in numbers]
                for number, answer in zip(numbers, _answers(lens, *fetch())):
                    answers[number] = answer
                    # Windows of rolling requests have no name: their sums are cached.
                    if requests[number][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[number][0], answer)
                progress.update(len(numbers))
        return answers  # type: ignore[return-value]

    def _input(self, context: list[int], continuation: list[int]) -> tuple[int, ...]:
        """Tokens that the model reads of a request: no more than its length, from the end, and not the last token."""
        if not context or not 0 < len(continuation) <= self.max_length:
            expected = f"a context, and a continuation of 1 to {self.max_length} tokens (max_length)"
            raise SharedPromptError("requests", expected, f"{len(context)} and {len(continuation)} tokens")
        cut = len(context) + len(continuation) - self.max_length - 1
        if cut > 0:
            eval_logger.warning(
                f"A context of {len(context)} tokens with a continuation of {len(continuation)} is longer than "
                f"max_length ({self.max_length}): the first {cut} tokens are left out."
            )
        return (*context, *continuation)[max(0, cut) : -1]

    def _micro_batches(self, inputs: Sequence[tuple[int, ...]]) -> Iterator[tuple[list[int], PackedBatch]]:
        """Which inputs a micro-batch has, and it; those whose angles of RoPE differ are in different ones."""
        config = causal_lm_of(self.model).config
        angles_of = {length: rope_class(config, length) for length in {*map(len, inputs)}}
        classes: dict[tuple[int, ...], list[int]] = {}
        for index, ids in enumerate(inputs):
            classes.setdefault(angles_of[len(ids)], []).append(index)
        shared = {"max_tokens": self.max_tokens, "min_shared": self.min_shared, "device": self.device}
        before: tuple[int, ...] = ()
        for angles in sorted(classes):
            if any(angles) and not any(before):
                # Dynamic angles stay those of the longest sequence so far until a short one comes:
                # one of a token, and then the longer, the later.
                self._model_call(torch.zeros((1, 1), dtype=torch.int64, device=self.device))
            before = angles
            members = classes[angles]
            for chosen, batch in scoring_batches([inputs[index] for index in members], **shared):
                yield [members[at] for at in chosen], batch

    def _launch(
        self, requests: Sequence[Request], groups: Sequence[Sequence[int]], batch: PackedBatch
    ) -> tuple[list[int], Fetch]:
        """The requests of a micro-batch, and of all their scored tokens scores, and whether each is the most likely.

        Args:
            groups: the requests of each sequence of the batch.
        """
        numbers = [number for group in groups for number in group]
        ends = [end for group, end in zip(groups, accumulate(batch.sequence_lens)) for _ in group]
        lens = [len(requests[number][2]) for number in numbers]
        tokens = int64s(token for number in numbers for token in requests[number][2])
        targets = to_device([tokens], batch.input_ids.device)[0]
        # On the host, where the GPU that runs the last micro-batch is not waited for.
        rows = batch.rows_of(runs(map(int.__sub__, ends, lens), lens))

        def score(logits: Tensor, at: slice) -> tuple[Tensor, Tensor]:
            with torch.autocast(self.device.type, enabled=False):  # which covers only the model
                scores = torch.log_softmax(logits, -1, dtype=self.softmax_dtype)
            own = targets[at].to(scores.device)  # layers may lie on several
            return scores.gather(-1, own[:, None])[:, 0], scores.argmax(-1) == own

        precision = self.mixed_precision_dtype
        with torch.autocast(self.device.type, dtype=precision, enabled=precision is not None):
            found = shared_prompt_logits(self.model, batch, rows, score, self_check=self.self_check)
        return numbers, _fetched(found)


def _fetched(found: tuple[Tensor, ...]) -> Fetch:
    """Begins to copy tensors to the host. What is returned waits for them, not for what a GPU is given meanwhile."""
    copies = [tensor.to("cpu", non_blocking=True) for tensor in found]
    copied = torch.cuda.current_stream(found[0].device).record_event() if found[0].is_cuda else None

    def fetch() -> list[Tensor]:
        if copied is not None:
            copied.synchronize()
        return copies

    return fetch


def _answers(lens: list[int], logps: Tensor, are_first: Tensor) -> Iterator[Answer]:
    """Log-likelihoods of requests with so many scored tokens, and whether each token is the most likely."""
    for own, first in zip(logps.split(lens), are_first.split(lens)):
        yield float(own.sum()), bool(first.all())


def _one_behind(launched: Iterator[_T]) -> Iterator[_T]:
    """Each once the next is launched: the host packs while a GPU computes."""
    before = next(launched, None)
    while before is not None:
        after = next(launched, None)
        yield before
        before = after


LM_EVAL.check_classes(DualKVLM)

if __name__ == "__main__":
    cli_evaluate()
