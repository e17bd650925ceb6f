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

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..errors import SharedPromptError, say_once
from ..host import int64s, offsets_of, take, untraced
from .batch import PackedBatch, pack
from .given import GroupIds, TokenIds, fetch, groups_of, sequences_of, token_lists
from .images import ImageValues
from .plan import MIN_SHARED, checked_tree, plan
from .prefix_tree import SHIFTS, Boundary, PrefixTree, checked_boundary
from .samples import Beside, GroupValues, RowValues, Samples, read_jagged, read_padded, read_prompts, read_sequences

_BY_BUDGET = "None: split_by_token_budget divides groups by the tokens of a micro-batch"


@untraced
def pack_shared_prompts(
    prompts: Sequence[TokenIds],
    responses: Sequence[TokenIds],
    *,
    group_ids: GroupIds | None = None,
    boundary: Boundary = "replicate",
    max_responses_per_group: None = None,
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
    checks.check_absent(_BY_BUDGET, max_responses_per_group=max_responses_per_group)
    beside = Beside(group_ids, row_values, group_values, images)
    samples = read_prompts(prompts, responses, beside, pad_token_id=pad_token_id)
    return pack(samples, plan(samples, boundary=boundary), pad_to_multiple_of, device)


@untraced
def pack_padded(
    input_ids: Tensor,
    attention_mask: Tensor,
    prompt_length: int | Sequence[int] | Tensor,
    *,
    group_ids: GroupIds | None = None,
    boundary: Boundary = "replicate",
    max_responses_per_group: None = None,
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
        group_ids, boundary, pad_to_multiple_of, device, group_values, images: of
            `pack_shared_prompts`.
        row_values: by name, what belongs to tokens, tensors of (..., B, S), padded like input_ids.

    Raises:
        SharedPromptError: an empty prompt, a mask with holes, negative tokens, samples of one group id with different
            prompts, or an argument that is not as described.
    """
    checks.check_absent(_BY_BUDGET, max_responses_per_group=max_responses_per_group)
    beside = Beside(group_ids, row_values, group_values, images)
    samples = read_padded(input_ids, attention_mask, prompt_length, beside)
    return pack(samples, plan(samples, boundary=boundary), pad_to_multiple_of, device)


@untraced
def pack_jagged(
    input_ids: Tensor,
    prompt_lens: Sequence[int] | Tensor,
    *,
    group_ids: GroupIds | None = None,
    boundary: Boundary = "replicate",
    max_responses_per_group: None = None,
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
        group_ids, boundary, pad_token_id, pad_to_multiple_of, device, group_values, images: of
            `pack_shared_prompts`.
        row_values: by name, what belongs to tokens, nested (B, P_i + R_i) or (B, n, P_i + R_i) tensors.

    Raises:
        SharedPromptError: a tensor that is not nested, a prompt that is empty or longer than its sequence, negative
            tokens, samples of one group id with different prompts, or an argument that is not as described.
    """
    checks.check_absent(_BY_BUDGET, max_responses_per_group=max_responses_per_group)
    beside = Beside(group_ids, row_values, group_values, images)
    samples = read_jagged(input_ids, prompt_lens, beside, pad_token_id=pad_token_id)
    return pack(samples, plan(samples, boundary=boundary), pad_to_multiple_of, device)


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
            different tokens. None: that of `tree`, or "replicate".
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
    total = len(sequences_of("sequences", sequences))
    if chosen is not None:
        given = checks.items("chosen", chosen, "indices of sequences")
        chosen = [checks.integer(f"chosen[{at}]", index, 0, total - 1) for at, index in enumerate(given)]
    beside = Beside(group_ids, row_values, group_values)
    samples = read_sequences(sequences, beside, loss_mask=loss_mask, pad_token_id=pad_token_id, chosen=chosen)
    if tree is None:
        if borders is not None and chosen is not None:
            borders = checks.items("borders", borders, "lists of positions")
            checks.check_count("borders", borders, total, "sequences")
            borders = [borders[index] for index in chosen]
        nodes = plan(
            samples, boundary="replicate" if boundary is None else boundary, min_shared=min_shared, borders=borders
        )
        if borders is None:
            _say_what_is_shared(nodes, samples, min_shared)
        return pack(samples, nodes, pad_to_multiple_of, device)
    expected = "None beside a tree, which says where nodes begin"
    checks.check_absent(expected, borders=borders, min_shared=min_shared)
    checks.instance("tree", tree, PrefixTree)
    if total != len(tree.sequence_lens):
        raise SharedPromptError("tree", f"that of these {total} sequences", f"one of {len(tree.sequence_lens)}")
    if boundary is not None and checked_boundary(boundary) != tree.boundary:
        raise SharedPromptError("boundary", f"None or {tree.boundary!r}, that of the tree", checks.describe(boundary))
    part = tree.take(range(total) if chosen is None else chosen)
    return pack(samples, checked_tree(part, samples), pad_to_multiple_of, device)


def _say_what_is_shared(nodes: PrefixTree, samples: Samples, min_shared: Any) -> None:
    """Say once what may be a mistake: that common beginnings are not shared, or that prompts are scored."""
    ids, groups = samples.host_ids, samples.group_ids
    if sum(nodes.node_lens) < len(ids):
        if samples.mask is None:
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
    firsts, seconds = (take(ids, int64s(begins[index] + at for index in long)).tolist() for at in (0, shift))
    alike = groups_of(zip(firsts, seconds, [groups[index] if groups else None for index in long]))
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
    tokens, lengths = token_lists(sequences_of("prompts", prompts), "prompts")
    (host,), ids = fetch([tokens], group_ids, len(lengths))
    begins = [*accumulate(lengths, initial=0)][:-1]
    samples = Samples(tokens, lengths, [0] * len(lengths), 0, host, begins, lengths, group_ids=ids)
    return samples.beside({}, Beside(images=images)).groups() if lengths else []


@untraced
def group_by_prefix(
    sequences: Sequence[TokenIds],
    *,
    boundary: Boundary = "replicate",
    min_shared: int | None = None,
    group_ids: GroupIds | None = None,
) -> PrefixTree:
    """Common prefixes of sequences, without packing them: the nodes that `pack_prefix_tree` would make.

    Args:
        sequences, boundary, min_shared, group_ids: of `pack_prefix_tree`. Parts of the tree are then packed with
            `pack_prefix_tree(sequences, tree=tree, chosen=indices)`.

    Raises:
        SharedPromptError: no sequences, tokens that are no integers >= 0 in one dimension, or an option that is not as
            described.
    """
    return plan(read_sequences(sequences, Beside(group_ids)), boundary=boundary, min_shared=min_shared)
