# SPDX-License-Identifier: BSD-3-Clause
"""Facts that vLLM's workers do not tell attention backends: prompts' lengths, drafts, and that they have slept.

The metadata of a step that vLLM hands to attention backends has no lengths of prompts; its runners
do, in the order of the step's requests, after preemption and reordering, and where steps are
scheduled ahead. Both runners are listened to when they make a step's metadata. Which builders are a
draft model's is known where the second runner's speculators make them, and that an engine has slept
where its worker wakes up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

from ...checks import explain
from ..common.patching import replace_once
from ..engines.settings import FIRST_PROMPT
from .log import say_once
from .versions import installed

_FIRST = "dualkv_first_prompts"  # of the second runner's states of requests, as its prompt_len


class Noted(NamedTuple):
    """Lengths of the prompts that the newest step's samples began with, a NumPy array; rows after mean nothing."""

    lengths: Any


_newest: Noted | None = None
_wakes = 0


def newest() -> Noted | None:
    """The last step's; None before the first, or where an unknown runner makes the steps."""
    return _newest


def wakes() -> int:
    """How often workers of this process have woken up: whoever sees another number has lost its memory's contents."""
    return _wakes


def note(lengths: Any) -> None:
    """Keep the lengths of the step that begins."""
    global _newest
    _newest = Noted(lengths)


def _first_prompt(params: Any, length: int) -> int:
    """Tokens of the prompt that a request's sample began with: all of its own, or what its extra_args say.

    Without the entry a resumed sample cannot be told from one with a longer prompt: vLLM gets a new request under a new
    id, with nothing of the old one but its tokens, which another prompt may continue, too.
    """
    extra = getattr(params, "extra_args", None) or {}  # pooling has no parameters
    if FIRST_PROMPT not in extra:
        return length
    carried = extra[FIRST_PROMPT]
    if type(carried) is int and 0 < carried <= length:
        return carried
    expected = f"an int from 1 to the {length} tokens of the prompt"
    say_once(f"{explain(f'extra_args[{FIRST_PROMPT!r}]', expected, carried)}; the request is cut at its prompt")
    return length


def _of_first_runner(stock: Callable[..., Any]) -> Callable[..., Any]:
    known: tuple[Any, ...] = ()
    lengths: Any = None

    def _build_attention_metadata(runner: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal known, lengths
        batch = runner.input_batch
        newest = id(runner), batch.num_prompt_tokens.tobytes(), [*batch.req_ids]
        if newest != known:  # to look into 256 requests takes thirty times as long
            known, lengths = newest, batch.num_prompt_tokens.copy()
            for row, name in enumerate(batch.req_ids):
                params = getattr(runner.requests.get(name), "sampling_params", None)
                if getattr(params, "extra_args", None):  # without these the loop takes half as long
                    lengths[row] = _first_prompt(params, int(lengths[row]))
        note(lengths)
        return stock(runner, *args, **kwargs)

    return _build_attention_metadata


def _of_second_runner(stock: Callable[..., Any]) -> Callable[..., Any]:
    def prepare_attn(runner: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        states = runner.req_states
        note(getattr(states, _FIRST, states.prompt_len.np)[input_batch.idx_mapping_np])
        return stock(runner, input_batch, *args, **kwargs)

    return prepare_attn


def _of_additions(stock: Callable[..., Any]) -> Callable[..., Any]:
    """The second runner keeps no sampling parameters: they are read where it takes up requests."""

    def add_requests(runner: Any, scheduler_output: Any) -> Any:
        found = stock(runner, scheduler_output)
        states = runner.req_states
        lengths = vars(states).setdefault(_FIRST, states.prompt_len.np.copy())
        for request in scheduler_output.scheduled_new_reqs:
            row = states.req_id_to_index[request.req_id]
            lengths[row] = _first_prompt(request.sampling_params, int(states.prompt_len.np[row]))
        return found

    return add_requests


def _of_speculators(stock: Callable[..., Any]) -> Callable[..., Any]:
    def set_attn(speculator: Any, *args: Any, **kwargs: Any) -> None:
        stock(speculator, *args, **kwargs)
        # CUDA graphs of a draft are replayed in steps for which nothing is built: a plan would be
        # an older step's.
        for group in chain.from_iterable(speculator.attn_groups):
            for builder in group.metadata_builders:
                if hasattr(builder, "refuse"):
                    builder.refuse("a draft model")

    return set_attn


def _of_workers(stock: Callable[..., Any]) -> Callable[..., Any]:
    def wake_up(worker: Any, *args: Any, **kwargs: Any) -> Any:
        global _wakes
        woken = stock(worker, *args, **kwargs)
        _wakes += 1
        return woken

    return wake_up


# Seams of vLLM: module, class, method, and what makes the replacement.
SEAMS = (
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "_build_attention_metadata", _of_first_runner),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "prepare_attn", _of_second_runner),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", "add_requests", _of_additions),
    ("vllm.v1.worker.gpu.spec_decode.speculator", "DraftModelSpeculator", "set_attn", _of_speculators),
)


def install() -> None:
    """Listen to the runners of this process: to those that it has imported."""
    for module, owner, method, make in (*SEAMS, (*installed().wakes_by, _of_workers)):
        if module in sys.modules:
            replace_once(getattr(sys.modules[module], owner), method, make)
