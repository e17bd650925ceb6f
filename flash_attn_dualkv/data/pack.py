# SPDX-License-Identifier: BSD-3-Clause
"""Packing of sequences into one row that holds every shared beginning once.

    batch = pack_shared_prompts(prompts, responses)     # or pack_padded, pack_jagged, pack_prefix_tree
    logits = model(batch.input_ids, batch.position_ids, ...)      # attention: shared_prompt_attention(.., batch.layout)
    logprobs = unpack_logprobs(values_of_the_scored_tokens, batch)

Samples are grouped by the equality of their prompts' tokens, other sequences by all that they begin with in common, in
whatever order they come; everything that comes back is in their original order. To group them, tokens are copied to the
host once. A few numbers for each node and sequence go back; what they mean for each token is worked out there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from operator import lt
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..checks import check_count, explain
from ..errors import SharedPromptError, say_once
from ..host import int64s, offsets_of, take, untraced
from . import samples
from .batch import PackedBatch, Tokens, pack_tokens
from .images import ImageValues, images_of
from .prefix_tree import SHIFTS, Boundary, PrefixTree, Spans, checked_boundary
from .samples import GroupIds, TokenIds, groups_of, named
from .trie import build_tree

# A node's last tile of keys is half empty for every row below it: 40 of 80 keys in the forward and
# 64 of 128 in the backward, some 55 pairs a row where both are weighed by their work. A token costs
# a model of 2 to 8 billion parameters as much as 10,000 to 20,000 pairs. So a border above R rows
# costs about R / 350 to R / 175 tokens: 64 for 11K to 22K.
MIN_SHARED = 64

RowValues = Mapping[str, Any]
GroupValues = Mapping[str, Sequence[Any]]


@untraced
def pack_shared_prompts(
    prompts: Sequence[TokenIds],
    responses: Sequence[TokenIds],
    *,
    group_ids: GroupIds | None = None,
    boundary: Boundary = "replicate",
    max_responses_per_group: int | None = None,
    pad_token_id: int | None = None,
    pad_to_multiple_of: int | None = None,
    device: torch.device | str | None = None,
    row_values: RowValues | None = None,
    group_values: GroupValues | None = None,
    images: ImageValues | None = None,
) -> PackedBatch:
    """Pack one prompt and one response per sample, each prompt once for all samples that have it.

    Args:
        prompts: B sequences of token ids, 1-D integer tensors of one device or Python sequences; none empty.
        responses: B of them; a response may be empty.
        group_ids: (B,) hashable values or an integer tensor: samples share a prompt where their ids are equal, and
            their prompts are then checked to be equal. Needed where equal tokens do not mean equal prompts, and
            `images` does not tell them apart. None: by the tokens and `images`. A prompt that is only the beginning of
            another is another prompt.
        boundary: "replicate" puts the last prompt token before each response instead of at the context's end, so that a
            response's rows score all of its tokens (context = prompt[:-1], decoded = prompt[-1:] + response). "gather"
            keeps the prompt whole (context = prompt, decoded = response); its last row scores every first token.
        max_responses_per_group: groups with more are split into several; None for no limit.
        pad_token_id: refuse sequences that have this token, which would be padding. None where nothing is padded, or
            where the token has a meaning too, such as the end of a response.
        pad_to_multiple_of: pad the row to a multiple of this; None for no padding.
        device: of the batch; None for that of the tokens.
        row_values: by name, what belongs to tokens, such as positions of several dimensions: B tensors of
            (..., P_i + R_i), of the prompt and then the response. Tokens that share a row must have equal ones, which
            waits for a GPU; `batch.row_values` has those of the packed row.
        group_values: by name, what belongs to prompts, such as a uid: B values, equal for the samples of a group;
            `batch.group_values` has one for each group.
        images: by the names of a model's inputs (pixel_values, image_grid_thw), what the prompts' images are: B tensors
            whose first dimension may differ, None for a sample without. Samples share a prompt only where all values
            are equal; they are compared, which waits for a GPU. `batch.images` has those of one sample of each group,
            one after the other in the order of the row, which is what the model is given.

    Raises:
        SharedPromptError: an empty prompt, unequal numbers of prompts and responses, tokens that are no integers >= 0
            in one dimension, samples of one group id with different prompts, or an option that is not as described.
    """
    prompts = samples.sequences_of("prompts", prompts)
    responses = samples.sequences_of("responses", responses)
    check_count("responses", responses, len(prompts), "prompts")
    given = chain.from_iterable(zip(prompts, responses))
    tokens, lengths = samples.token_lists(given, "prompts", "responses")
    # Where the tokens are: on the host they have just come from the GPU, and are in no cache.
    (fetched, bounds), ids = samples.fetch([tokens, samples.extremes(tokens)], group_ids, len(prompts))
    largest = samples.largest_token("prompts and responses", bounds)
    samples.check_padding(pad_token_id, fetched, lengths, "prompts", "responses")
    prompt_lens, response_lens = lengths[::2], lengths[1::2]
    of_samples, firsts = images_of(images, len(prompts))
    begins = [*accumulate(lengths, initial=0)][:-1:2]
    groups = samples.group(fetched, begins, prompt_lens, firsts, ids, max_responses_per_group)
    totals = [*map(int.__add__, prompt_lens, response_lens)]
    values = {name: samples.listed(name, one, totals) for name, one in named("row_values", row_values).items()}
    what = Tokens(tokens, response_lens, largest, None, values, group_values, of_samples)
    tree = PrefixTree.of_prompts(groups, prompt_lens, response_lens, boundary)
    return pack_tokens(what, tree, pad_to_multiple_of, device, boundary == "replicate")


@untraced
def pack_padded(
    input_ids: Tensor,
    attention_mask: Tensor,
    prompt_length: int | Sequence[int] | Tensor,
    *,
    group_ids: GroupIds | None = None,
    boundary: Boundary = "replicate",
    max_responses_per_group: int | None = None,
    pad_to_multiple_of: int | None = None,
    device: torch.device | str | None = None,
    row_values: RowValues | None = None,
    group_values: GroupValues | None = None,
    images: ImageValues | None = None,
) -> PackedBatch:
    """Pack a padded (B, S) batch as Hugging Face and TRL make it. Padding is what the mask says, whatever the token.

    Args:
        input_ids: (B, S) integers.
        attention_mask: (B, S) of 0 and 1 in any type, 0 for padding.
        prompt_length: an int n where the first n columns hold nothing but prompts and the others nothing but responses,
            in each of which a row's tokens stand together, padded on either side. (B,) numbers of prompt tokens where a
            row's tokens all stand together and begin with its prompt, as in padded whole sequences.
        group_ids, boundary, max_responses_per_group, pad_to_multiple_of, device, group_values, images: of
            `pack_shared_prompts`.
        row_values: by name, what belongs to tokens, tensors of (..., B, S), padded like input_ids.

    Raises:
        SharedPromptError: an empty prompt, a mask with holes, negative tokens, samples of one group id with different
            prompts, or an argument that is not as described.
    """
    input_ids = checks.integers("input_ids", input_ids, 2)
    attention_mask = checks.integers("attention_mask", attention_mask, 2, samples.MASKS)
    if attention_mask.shape != input_ids.shape:
        expected = f"shape {tuple(input_ids.shape)} (as input_ids)"
        raise SharedPromptError(explain("attention_mask", expected, tuple(attention_mask.shape)))
    given = [checks.integers("prompt_length", prompt_length, 1)] if isinstance(prompt_length, Tensor) else []
    parts = {"attention_mask": attention_mask}
    # Arrays of NumPy have a length and are indices, whatever their dimensions.
    is_list = hasattr(prompt_length, "__len__") and getattr(prompt_length, "ndim", 1) > 0
    if not given and not is_list:
        columns = checks.integer("prompt_length", prompt_length, 0, input_ids.shape[1])
        prompts, responses = attention_mask[:, :columns], attention_mask[:, columns:]
        parts = {"attention_mask (prompts)": prompts, "attention_mask (responses)": responses}
    # The host needs some numbers of each row, not the mask.
    ones = [one for mask in parts.values() for one in samples.ones_of(mask)]
    counts = torch.stack(ones).unflatten(0, (len(parts), -1))
    bounds = samples.extremes(torch.where(attention_mask == 1, input_ids, 0))
    wanted = [input_ids, counts, bounds, *given]
    (ids, counted, bounds, *fetched), labels = samples.fetch(wanted, group_ids, len(input_ids))
    largest = samples.largest_token("input_ids", bounds)
    (begins, lengths, *_), *others = numbers = counted.view(counts.shape).tolist()
    for name, (_, _, runs, wrong) in zip(parts, numbers):
        if any(wrong):
            raise SharedPromptError(explain("attention_mask", "0 and 1", "other values"))
        if max(runs, default=0) > 1:
            got = f"a hole in row {[one > 1 for one in runs].index(True)}"
            raise SharedPromptError(explain(name, "ones that stand together in each row", got))
    if others:
        prompt_lens, response_lens = lengths, others[0][1]
        _say_where_prompts_end(columns, begins, lengths, response_lens)
    else:
        prompt_lens = samples.prompt_lengths("prompt_length", prompt_length, fetched, lengths)
        response_lens = [total - length for total, length in zip(lengths, prompt_lens)]
    rows = range(0, ids.numel(), max(1, input_ids.shape[1]))
    of_samples, firsts = images_of(images, len(input_ids))
    begins = [*map(int.__add__, rows, begins)]
    groups = samples.group(ids, begins, prompt_lens, firsts, labels, max_responses_per_group)
    count = sum(prompt_lens) + sum(response_lens)

    def flat(name: str, values: Any) -> Tensor:
        if not isinstance(values, Tensor) or values.shape[-2:] != input_ids.shape:
            expected = f"a tensor of shape (..., {len(input_ids)}, {input_ids.shape[1]}), as input_ids"
            raise SharedPromptError(explain(f"row_values[{name!r}]", expected, checks.describe(values)))
        return values.flatten(-2).index_select(-1, kept.to(values.device))

    kept = samples.selected(torch.arange(input_ids.numel(), device=input_ids.device), attention_mask, count)
    values = {name: flat(name, one) for name, one in named("row_values", row_values).items()}
    tokens = input_ids.flatten().index_select(0, kept)
    what = Tokens(tokens, response_lens, largest, None, values, group_values, of_samples)
    tree = PrefixTree.of_prompts(groups, prompt_lens, response_lens, boundary)
    return pack_tokens(what, tree, pad_to_multiple_of, device, boundary == "replicate")


def _say_where_prompts_end(
    columns: int, begins: Sequence[int], lengths: Sequence[int], response_lens: Sequence[int]
) -> None:
    """Say it once if a row looks like a padded whole sequence, whose response is among the columns of prompts."""
    for index, (begin, length, response_len) in enumerate(zip(begins, lengths, response_lens)):
        if response_len == 0 and 0 < begin + length < columns:
            say_once(
                f"prompt_length: with {columns}, row {index} has {length} prompt tokens, padding behind them and no "
                "response. If rows are whole sequences, a prompt and its response together, give the number of prompt "
                "tokens of each row, (B,); if the response is empty, all is well",
                "prompt_length",
            )
            return


@untraced
def pack_jagged(
    input_ids: Tensor,
    prompt_lens: Sequence[int] | Tensor,
    *,
    group_ids: GroupIds | None = None,
    boundary: Boundary = "replicate",
    max_responses_per_group: int | None = None,
    pad_token_id: int | None = None,
    pad_to_multiple_of: int | None = None,
    device: torch.device | str | None = None,
    row_values: RowValues | None = None,
    group_values: GroupValues | None = None,
    images: ImageValues | None = None,
) -> PackedBatch:
    """Pack a nested (jagged) tensor of whole sequences, as verl holds them.

    Args:
        input_ids: nested (B, P_i + R_i) integers in the jagged layout, without gaps.
        prompt_lens: (B,) P_i.
        group_ids, boundary, max_responses_per_group, pad_token_id, pad_to_multiple_of, device, group_values, images: of
            `pack_shared_prompts`.
        row_values: by name, what belongs to tokens, nested (B, P_i + R_i) or (B, n, P_i + R_i) tensors.

    Raises:
        SharedPromptError: a tensor that is not nested, a prompt that is empty or longer than its sequence, negative
            tokens, samples of one group id with different prompts, or an argument that is not as described.
    """
    nested = samples.jagged("input_ids", input_ids)
    if nested.dim() != 2:
        raise SharedPromptError(explain("input_ids", "2 dimensions", nested.dim()))
    tokens = checks.integers("input_ids", nested.values(), 1)
    given = [checks.integers("prompt_lens", prompt_lens, 1)] if isinstance(prompt_lens, Tensor) else []
    by_token = named("row_values", row_values)
    by_token = {name: samples.jagged(f"row_values[{name!r}]", one) for name, one in by_token.items()}
    wanted = [tokens, nested.offsets(), *given, *(one.offsets() for one in by_token.values())]
    (ids, offsets, *fetched), labels = samples.fetch(wanted, group_ids, len(nested))
    totals = offsets.diff().tolist()
    lengths = samples.prompt_lengths("prompt_lens", prompt_lens, fetched[: len(given)], totals)
    begin, end = (int(offsets[at]) for at in (0, -1))
    largest = samples.largest_token("input_ids", samples.extremes(ids[begin:end]))
    samples.check_padding(pad_token_id, ids[begin:end], totals, "input_ids")
    response_lens = [total - length for total, length in zip(totals, lengths)]
    of_samples, firsts = images_of(images, len(totals))
    groups = samples.group(ids, offsets.tolist(), lengths, firsts, labels, max_responses_per_group)
    values = {}
    for (name, one), own in zip(by_token.items(), fetched[len(given) :]):
        rows = samples.position_rows(one)
        if rows.shape[-1] != len(tokens):
            expected = f"{len(tokens)} values (as input_ids)"
            raise SharedPromptError(explain(f"row_values[{name!r}]", expected, rows.shape[-1]))
        if not own.equal(offsets):
            expected = "the offsets of input_ids"
            raise SharedPromptError(explain(f"row_values[{name!r}]", expected, f"others: {checks.describe(own)}"))
        values[name] = (rows[0] if one.dim() == 2 else rows)[..., begin:end]
    what = Tokens(tokens[begin:end], response_lens, largest, None, values, group_values, of_samples)
    tree = PrefixTree.of_prompts(groups, lengths, response_lens, boundary)
    return pack_tokens(what, tree, pad_to_multiple_of, device, boundary == "replicate")


@untraced
def pack_prefix_tree(
    sequences: Sequence[TokenIds],
    *,
    loss_mask: Sequence[TokenIds] | None = None,
    boundary: Boundary | None = None,
    min_shared: int | None = None,
    borders: Sequence[Sequence[int]] | None = None,
    tree: PrefixTree | None = None,
    chosen: Sequence[int] | None = None,
    group_ids: GroupIds | None = None,
    pad_token_id: int | None = None,
    pad_to_multiple_of: int | None = None,
    device: torch.device | str | None = None,
    row_values: RowValues | None = None,
    group_values: GroupValues | None = None,
) -> PackedBatch:
    """Pack sequences of any kind as a prefix tree: what they begin with in common is in the row once.

    Nodes follow each other in the order of their groups, and below a node in that of their tokens, whatever the order
    of the sequences. Sequences that are equal, or the beginning of another, share all of their rows at no cost, and
    without a node of their own.

    Args:
        sequences: B sequences of token ids, 1-D integer tensors of one device or Python sequences; any may be empty.
        loss_mask: B sequences of 0 and 1 in any type, each as long as its tokens and on their device, 1 for the tokens
            to train, which are scored. The first token of a sequence has no row that scores it: 0 there. A token may be
            trained in one sequence and not in another that shares it. None: all tokens but the first ones.
        boundary: "gather" shares all equal tokens; the row before a branch scores the first token of each child.
            "replicate" puts that row at the head of each child instead of at the node's end, so that no row scores two
            different tokens. None: that of `tree`, or "gather".
        min_shared: the fewest tokens that a node must save; where it would save fewer, its children have a copy each.
            The nodes are those with which the rows, and this many for each node with children, are fewest. None: 64.
        borders: where nodes are to begin, instead of min_shared: B sequences of rising positions, from 1 to the length
            of each sequence, as `PrefixTree.borders` gives them. Sequences share the nodes up to whose
            ends they agree in borders and tokens. The last bits of a row depend on where the nodes of its path begin:
            two passes give the same ones if their borders are the same, whatever other sequences each of them has.
        tree: of the sequences, as `group_by_prefix` gives it: what shares rows there does so here, with nodes that
            begin where they begin there.
        chosen: which of the sequences to pack, such as a micro-batch of `split_by_token_budget`; all that is given for
            sequences is given for all of them. None: all.
        group_ids: (B,) hashable values or an integer tensor: only sequences with equal ids share tokens. For tokens
            that stand for different things (images). None: equal tokens are shared.
        pad_token_id: refuse sequences that have this token, which would be padding. None where nothing is padded, or
            where the token has a meaning too, such as the end of a response.
        pad_to_multiple_of: pad the row to a multiple of this; None for no padding.
        device: of the batch; None for that of the tokens.
        row_values: by name, what belongs to tokens: B tensors of (..., L_i). Tokens that share a row must have equal
            ones, which waits for a GPU.
        group_values: by name, what belongs to trees of the forest: B values, equal for the sequences of a tree.

    Raises:
        SharedPromptError: no sequences, tokens that are no integers >= 0 in one dimension, a mask that is not as
            described, a tree of other sequences, or an option that is not as described.
    """
    total = len(samples.sequences_of("sequences", sequences))
    indices: Sequence[int] = range(total)
    if chosen is not None:
        given = checks.items("chosen", chosen, "indices of sequences")
        indices = [checks.integer(f"chosen[{at}]", one, 0, total - 1) for at, one in enumerate(given)]

    def pick(name: str, values: Any) -> Any:
        # What is given for all sequences is checked by who uses it.
        if values is None or chosen is None:
            return values
        given = checks.items(name, values, "values")
        check_count(name, given, total, "sequences")
        return [given[index] for index in indices]

    tokens, lengths = _checked(pick("sequences", sequences))
    if chosen is not None and isinstance(group_ids, Tensor):
        group_ids = checks.integers("group_ids", group_ids, 1).tolist()
    mask = None if loss_mask is None else samples.joined_mask(pick("loss_mask", loss_mask), lengths)
    wanted = [tokens] if mask is None else [tokens, mask]
    (ids, *marks), groups = samples.fetch(wanted, pick("group_ids", group_ids), len(lengths), "sequences")
    largest = samples.largest_token("sequences", samples.extremes(ids))
    samples.check_padding(pad_token_id, ids, lengths, "sequences")
    if tree is None:
        nodes = _built(ids, lengths, groups, boundary, min_shared, pick("borders", borders))
        if borders is None:
            _say_what_is_shared(nodes, ids, groups, min_shared, mask)
    else:
        expected = "None beside a tree, which says where nodes begin"
        checks.check_absent(expected, borders=borders, min_shared=min_shared)
        nodes = _part(tree, boundary, total, indices, lengths, ids, groups)
    scored = samples.scored_lens(marks[0], lengths) if marks else [max(0, length - 1) for length in lengths]
    by_token = {name: pick(f"row_values[{name!r}]", one) for name, one in named("row_values", row_values).items()}
    by_root = {name: pick(f"group_values[{name!r}]", one) for name, one in named("group_values", group_values).items()}
    values = {name: samples.listed(name, one, lengths) for name, one in by_token.items()}
    what = Tokens(tokens, scored, largest, mask, values, by_root)
    return pack_tokens(what, nodes, pad_to_multiple_of, device)


def _say_what_is_shared(
    nodes: PrefixTree, ids: Tensor, groups: list[Any] | None, min_shared: Any, mask: Tensor | None
) -> None:
    """Say once what may be a mistake: that common beginnings are not shared, or that prompts are scored."""
    if sum(nodes.node_lens) < len(ids):
        if mask is None:
            say_once(
                "loss_mask: without one all tokens but the first of a sequence are scored, those of shared beginnings "
                "(prompts) too. To train or score responses alone, give it 1 for their tokens (shared_prompt_values "
                "reads rows of its own and needs none)",
                "loss_mask",
            )
        return
    # Tokens that must be equal for the first one to be shared.
    shift, begins = SHIFTS[nodes.boundary], offsets_of(int64s(nodes.sequence_lens)).tolist()
    long = [index for index, length in enumerate(nodes.sequence_lens) if length > shift]
    firsts, seconds = (take(ids, int64s(begins[one] + at for one in long)).tolist() for at in (0, shift))
    alike = groups_of(zip(firsts, seconds, [groups[one] if groups else None for one in long]))
    if len(alike) < len(long):
        say_once(
            f"min_shared: {len(long)} sequences begin alike, but no beginning saves {min_shared or MIN_SHARED} tokens, "
            "so that nothing is shared; a smaller min_shared shares shorter ones",
            "min_shared",
        )


@untraced
def group_by_prompt(
    prompts: Sequence[TokenIds], *, group_ids: GroupIds | None = None, images: ImageValues | None = None
) -> list[list[int]]:
    """Which samples have the same prompt: lists of their indices, in the order of their first samples.

    Args:
        prompts, group_ids, images: of `pack_shared_prompts`.

    Raises:
        SharedPromptError: an empty prompt; samples of one group id with different prompts; an argument that is not as
            described.
    """
    tokens, lengths = samples.token_lists(samples.sequences_of("prompts", prompts), "prompts")
    (tokens,), ids = samples.fetch([tokens], group_ids, len(lengths))
    _, firsts = images_of(images, len(lengths))
    return samples.group(tokens, [*accumulate(lengths, initial=0)], lengths, firsts, ids) if lengths else []


@untraced
def group_by_prefix(
    sequences: Sequence[TokenIds],
    *,
    boundary: Boundary = "gather",
    min_shared: int | None = None,
    group_ids: GroupIds | None = None,
) -> PrefixTree:
    """What sequences share, without packing them: the nodes that `pack_prefix_tree` would make.

    Args:
        sequences, boundary, min_shared, group_ids: of `pack_prefix_tree`. Parts of the tree are then packed with
            `pack_prefix_tree(sequences, tree=tree, chosen=indices)`.

    Raises:
        SharedPromptError: no sequences, tokens that are no integers >= 0 in one dimension, or an option that is not as
            described.
    """
    tokens, lengths = _checked(samples.sequences_of("sequences", sequences))
    (ids,), groups = samples.fetch([tokens], group_ids, len(lengths), "sequences")
    samples.largest_token("sequences", samples.extremes(ids))
    return _built(ids, lengths, groups, boundary, min_shared, None)


def _built(
    ids: Tensor, lengths: list[int], groups: list[Any] | None, boundary: Any, min_shared: Any, borders: Any
) -> PrefixTree:
    """The tree of the tokens of all sequences (on the host)."""
    boundary = checked_boundary("gather" if boundary is None else boundary)
    least = checks.integer("min_shared", MIN_SHARED if min_shared is None else min_shared, 1)
    if borders is not None:
        checks.check_absent("None with borders, which say where nodes begin", min_shared=min_shared)
        borders = _checked_borders(borders, lengths)
    return build_tree(ids, lengths, groups, boundary=boundary, min_shared=least, borders=borders)


def _part(
    tree: Any, boundary: Any, total: int, chosen: Sequence[int], lengths: list[int], ids: Tensor, groups: Any
) -> PrefixTree:
    """The tree of the chosen ones of `total` sequences, which must be what it says.

    Their tokens (on the host) and groups must be equal where they share rows.
    """
    checks.instance("tree", tree, PrefixTree)
    if total != len(tree.sequence_lens):
        expected = f"that of these {total} sequences"
        raise SharedPromptError(explain("tree", expected, f"one of {len(tree.sequence_lens)}"))
    for at, length in zip(chosen, lengths):
        if length != tree.sequence_lens[at]:
            got = f"one whose sequence {at} has {tree.sequence_lens[at]}"
            raise SharedPromptError(explain("tree", f"that of these sequences, {length} tokens in sequence {at}", got))
    if boundary not in (None, tree.boundary):
        expected = f"None or {tree.boundary!r}, that of the tree"
        raise SharedPromptError(explain("boundary", expected, checks.describe(boundary)))
    nodes = tree.part(chosen)
    rows = Spans.of(nodes).rows(torch.arange(len(ids), device=ids.device))
    of_rows = ids.new_empty(sum(nodes.node_lens)).index_copy_(0, rows, ids)
    if not take(of_rows, rows).equal(ids):
        raise SharedPromptError(explain("tree", "that of these sequences", "one in which other tokens share rows"))
    group_of: dict[int, Any] = {}
    for leaf, group in zip(nodes.leaves, groups or ()):
        if leaf >= 0 and group_of.setdefault(nodes.roots[leaf], group) != group:
            expected = "equal ones for sequences that share rows in the tree"
            raise SharedPromptError(explain("group_ids", expected, f"{group_of[nodes.roots[leaf]]!r} and {group!r}"))
    return nodes


def _checked(sequences: Sequence[Any]) -> tuple[Tensor, list[int]]:
    """The tokens of all sequences, and how many each has."""
    if not len(sequences):
        raise SharedPromptError(explain("sequences", "at least one", 0))
    return samples.token_lists(sequences, "sequences")


def _checked_borders(borders: Any, lengths: Sequence[int]) -> list[Sequence[int]]:
    """Those of each sequence, rising from 1 to its length."""
    borders = checks.items("borders", borders, "lists of positions")
    check_count("borders", borders, len(lengths), "sequences")
    checked: list[Sequence[int]] = []
    for index, (given, length) in enumerate(zip(borders, lengths)):
        is_plain = type(given) in (tuple, list) and {*map(type, given)} <= {int}
        own = given if is_plain else checks.lengths(f"borders[{index}]", given)
        if own and not (own[0] > 0 and own[-1] <= length and all(map(lt, own, own[1:]))):
            expected = f"rising positions from 1 to {length}"
            raise SharedPromptError(explain(f"borders[{index}]", expected, checks.describe(own)))
        checked.append(own)
    return checked
