"""Packing of prompts with many responses into one row that holds each prompt once, and the way back.

    batch = pack_shared_prompts(prompts, responses)     # or pack_padded, pack_jagged
    logits = model(batch.input_ids, batch.position_ids, ...)      # attention: shared_prompt_attention(.., batch.layout)
    logprobs = unpack_logprobs(values_of_the_response_tokens, batch)

Samples are grouped by the equality of their prompts' tokens, in whatever order they come, and everything that comes
back is in their original order. To group them, a kernel compares the tokens of lists on a GPU; all others are copied to
the host once. A few numbers for each sample go back, and what they mean for each token is worked out on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .. import checks
from ..checks import MAX_ROWS, explain
from ..errors import SharedPromptError
from ..host import same_device, untraced
from ..ops import packing_module
from .batch import Samples, SharedPromptBatch, batch_of, on_device, packed_by_operators
from .samples import (
    GroupIds,
    Ones,
    Tokens,
    all_tokens,
    as_fetched,
    check_count,
    check_token_ids,
    extremes,
    fetch,
    group,
    groups_of,
    joined,
    prompt_lengths,
    selected,
    sequences_of,
)

Boundary = Literal["replicate", "gather"]
BOUNDARIES = ("replicate", "gather")


@untraced
def pack_shared_prompts(
    prompts: Sequence[Tokens],
    responses: Sequence[Tokens],
    *,
    group_ids: GroupIds | None = None,
    boundary: Boundary = "replicate",
    drop_last: bool = False,
    max_responses_per_group: int | None = None,
    pad_to_multiple_of: int | None = None,
    device: torch.device | str | None = None,
) -> SharedPromptBatch:
    """Pack one prompt and one response per sample, each prompt once for all samples that have it.

    Args:
        prompts: B sequences of token ids, 1-D integer tensors of one device or Python sequences; none empty.
        responses: B of them; a response may be empty.
        group_ids: (B,) hashable values or an integer tensor: samples share a prompt where their ids are equal, and
            their prompts are then checked to be equal. Needed where equal tokens do not mean equal prompts (images).
            None: by the tokens. A prompt that is only the beginning of another is another prompt.
        boundary: "replicate" puts the last prompt token before each response instead of at the context's end, so that a
            response's rows score all of its tokens (context = prompt[:-1], decoded = prompt[-1:] + response). "gather"
            keeps the prompt whole (context = prompt, decoded = response); its last row scores every first token.
        drop_last: leave out the last token of each response, whose logits nobody reads. It still has its label, but a
            model that shifts input_ids itself would not see it.
        max_responses_per_group: groups with more are split into several; None for no limit.
        pad_to_multiple_of: pad the row to a multiple of this; None for no padding.
        device: of the batch; None for that of the tokens.

    Raises:
        SharedPromptError: an empty prompt, unequal numbers of prompts and responses, tokens that are no integers >= 0
            in one dimension, samples of one group id with different prompts, or an option that is not as described.
    """
    prompts = sequences_of("prompts", prompts)
    responses = sequences_of("responses", responses)
    if group_ids is None:
        rest = drop_last, max_responses_per_group, pad_to_multiple_of
        batch = _packed_by_kernels(prompts, responses, boundary, rest, device)
        if batch is not None:
            return batch
    options = _Options.checked(boundary, drop_last, max_responses_per_group, pad_to_multiple_of, device)
    if len(prompts) != len(responses):
        raise SharedPromptError(explain("responses", f"{len(prompts)} of them (as prompts)", len(responses)))
    given = all_tokens([*chain.from_iterable(zip(prompts, responses))], ("prompts", "responses"))
    tokens = joined(given)
    # Where the tokens are: on the host they have just come from the GPU, and are in no cache.
    (fetched, bounds), ids = fetch([tokens, extremes(tokens)], group_ids)
    smallest, largest = bounds.tolist()
    check_token_ids("prompts and responses", smallest)
    lengths = [*map(Tensor.numel, given)]
    prompt_lens, response_lens = lengths[::2], lengths[1::2]
    groups = group(fetched, [*accumulate(lengths, initial=0)][:-1:2], prompt_lens, ids, tokens.device)
    return _pack(Samples(tokens, groups, prompt_lens, response_lens, largest), options)


@untraced
def pack_padded(
    input_ids: Tensor,
    attention_mask: Tensor,
    prompt_length: int | Sequence[int] | Tensor,
    *,
    group_ids: GroupIds | None = None,
    boundary: Boundary = "replicate",
    drop_last: bool = False,
    max_responses_per_group: int | None = None,
    pad_to_multiple_of: int | None = None,
    device: torch.device | str | None = None,
) -> SharedPromptBatch:
    """Pack a padded (B, S) batch as Hugging Face and TRL make it. Padding is what the mask says, whatever the token.

    Args:
        input_ids: (B, S) integers.
        attention_mask: (B, S) of 0 and 1 (or bool), 0 for padding.
        prompt_length: the number of leading columns that hold the prompts, in each of which, and in the columns behind
            them, the real tokens stand together on either side; or (B,) numbers of prompt tokens, for rows whose real
            tokens stand together and begin with the prompt.
        group_ids, boundary, drop_last, max_responses_per_group, pad_to_multiple_of, device: as for
            `pack_shared_prompts`.

    Raises:
        SharedPromptError: as there; a mask with holes.
    """
    options = _Options.checked(boundary, drop_last, max_responses_per_group, pad_to_multiple_of, device)
    input_ids = checks.integers("input_ids", input_ids, 2)
    attention_mask = checks.integers("attention_mask", attention_mask, 2, (torch.bool,))
    if attention_mask.shape != input_ids.shape:
        expected = f"shape {tuple(input_ids.shape)} (as input_ids)"
        raise SharedPromptError(explain("attention_mask", expected, tuple(attention_mask.shape)))
    given = as_fetched("prompt_length", prompt_length)
    parts = {"attention_mask": attention_mask}
    if not given and (hasattr(prompt_length, "__index__") or not hasattr(prompt_length, "__len__")):
        columns = checks.integer("prompt_length", prompt_length, 0, input_ids.shape[1])
        prompts, responses = attention_mask[:, :columns], attention_mask[:, columns:]
        parts = {"attention_mask (prompts)": prompts, "attention_mask (responses)": responses}
    # The host needs some numbers of each row, not the mask.
    counts = torch.stack([one for mask in parts.values() for one in Ones.numbers(mask)])
    bounds = extremes(torch.where(attention_mask == 1, input_ids, 0))
    (ids, counted, found, *fetched), labels = fetch([input_ids, counts, bounds, *given], group_ids)
    smallest, largest = found.tolist()
    check_token_ids("input_ids", smallest)
    ones = [Ones(*numbers) for numbers in counted.view(len(parts), len(Ones._fields), len(input_ids)).tolist()]
    for name, one in zip(parts, ones):
        one.check(name)
    totals = ones[0].lengths
    if len(ones) == 2:
        prompt_lens, response_lens = totals, ones[1].lengths
    else:
        prompt_lens = prompt_lengths("prompt_length", prompt_length, fetched, totals)
        response_lens = [total - length for total, length in zip(totals, prompt_lens)]
    rows = range(0, ids.numel(), max(1, input_ids.shape[1]))
    groups = group(ids, [*map(int.__add__, rows, ones[0].begins)], prompt_lens, labels, input_ids.device)
    tokens = selected(input_ids, attention_mask, sum(prompt_lens) + sum(response_lens))
    return _pack(Samples(tokens, groups, prompt_lens, response_lens, largest), options)


@untraced
def pack_jagged(
    input_ids: Tensor,
    prompt_lens: Sequence[int] | Tensor,
    *,
    group_ids: GroupIds | None = None,
    boundary: Boundary = "replicate",
    drop_last: bool = False,
    max_responses_per_group: int | None = None,
    pad_to_multiple_of: int | None = None,
    device: torch.device | str | None = None,
) -> SharedPromptBatch:
    """Pack a nested tensor of sequences that begin with their prompts, as verl keeps them.

    Args:
        input_ids: nested (B, P_i + R_i) integers in the jagged layout, contiguous.
        prompt_lens: (B,) P_i.
        group_ids, boundary, drop_last, max_responses_per_group, pad_to_multiple_of, device: as for
            `pack_shared_prompts`.

    Raises:
        SharedPromptError: as there; no jagged tensor; a prompt longer than its sequence.
    """
    options = _Options.checked(boundary, drop_last, max_responses_per_group, pad_to_multiple_of, device)
    if not isinstance(input_ids, Tensor) or not input_ids.is_nested or input_ids.layout != torch.jagged:
        expected, got = "a nested tensor with torch.jagged layout", checks.describe(input_ids)
        raise SharedPromptError(explain("input_ids", expected, "another one" if isinstance(input_ids, Tensor) else got))
    nested: Any = input_ids  # a type checker knows nothing of its methods
    if nested.dim() != 2 or nested.lengths() is not None:
        got = f"{nested.dim()} dimensions, {'no ' if nested.lengths() is None else ''}gaps"
        raise SharedPromptError(explain("input_ids", "2 dimensions and no gaps between the sequences", got))
    values = checks.integers("input_ids", nested.values(), 1)
    given = as_fetched("prompt_lens", prompt_lens)
    (tokens, offsets, *fetched), labels = fetch([values, nested.offsets(), *given], group_ids)
    totals = offsets.diff().tolist()
    lengths = prompt_lengths("prompt_lens", prompt_lens, fetched, totals)
    begin, end = (int(offsets[at]) for at in (0, -1))
    smallest, largest = extremes(tokens[begin:end]).tolist()
    check_token_ids("input_ids", smallest)
    response_lens = [total - length for total, length in zip(totals, lengths)]
    groups = group(tokens, offsets.tolist(), lengths, labels, values.device)
    return _pack(Samples(values[begin:end], groups, lengths, response_lens, largest), options)


@untraced
def group_by_prompt(
    prompts: Sequence[Tokens], *, group_ids: GroupIds | None = None, verify: bool = True
) -> list[list[int]]:
    """Which samples have the same prompt: lists of their indices, in the order of their first samples.

    Args:
        prompts, group_ids: as for `pack_shared_prompts`.
        verify: whether to check that the prompts of a group id are equal; without it their tokens are not looked at.

    Raises:
        SharedPromptError: an empty prompt; samples of one group id with different prompts; an argument that is not as
            described.
    """
    checks.flag("verify", verify)
    given = all_tokens([*sequences_of("prompts", prompts)], ("prompts",))
    tokens = [] if group_ids is not None and not verify else [joined(given)]
    fetched, ids = fetch(tokens, group_ids)
    if ids is not None:
        check_count(ids, len(given))
    if not given:
        return []
    if ids is not None and not verify:
        return groups_of(ids)
    lengths = [*map(Tensor.numel, given)]
    return group(fetched[0], [*accumulate(lengths, initial=0)], lengths, ids, given[0].device)


class _Options(NamedTuple):
    boundary: str
    drop_last: bool
    max_responses_per_group: int | None
    pad_to_multiple_of: int
    device: torch.device | None

    @staticmethod
    def checked(boundary: Any, drop_last: Any, most_responses: Any, multiple: Any, device: Any) -> _Options:
        """The options of all forms of packing."""
        return _Options(
            checks.choice("boundary", boundary, BOUNDARIES),
            checks.flag("drop_last", drop_last),
            None if most_responses is None else checks.integer("max_responses_per_group", most_responses, 1),
            1 if multiple is None else checks.integer("pad_to_multiple_of", multiple, 1, MAX_ROWS),
            None if device is None else checks.device(device),
        )


def _packed_by_kernels(
    prompts: Sequence[Any], responses: Sequence[Any], boundary: Any, rest: tuple[Any, ...], device: Any
) -> SharedPromptBatch | None:
    """All of it, checks included, in one call of the compiled module: where a GPU is waited for, Python takes longer.

    None where that is not for these tokens, or an argument is not as described.
    """
    if not prompts or not isinstance(prompts[0], Tensor) or type(boundary) is not str or boundary not in BOUNDARIES:
        return None
    target = prompts[0].device
    compiled = packing_module((), target)
    if compiled is None or not (device is None or same_device(checks.device(device), target)):
        return None
    lists = (one if type(one) is list else [*one] for one in (prompts, responses))
    found = compiled.pack_lists(*lists, _shift(boundary), *rest)
    return None if found is None else batch_of(*found)


def _shift(boundary: str) -> int:
    """Prompt tokens in front of each response."""
    return 1 if boundary == "replicate" else 0


def _pack(samples: Samples, options: _Options) -> SharedPromptBatch:
    groups = samples.groups
    if options.max_responses_per_group is not None:
        step = options.max_responses_per_group
        groups = [members[at : at + step] for members in groups for at in range(0, len(members), step)]
    device = samples.tokens.device if options.device is None else options.device
    rest = _shift(options.boundary), options.drop_last, options.pad_to_multiple_of
    compiled = packing_module([samples.tokens], device)
    if compiled is None:
        return packed_by_operators(samples, groups, *rest, device)
    lens = samples.prompt_lens, samples.response_lens
    found = compiled.pack(on_device(samples.tokens, device), groups, *lens, *rest)
    return batch_of(*(*found, *map(tuple, lens), samples.max_token))
