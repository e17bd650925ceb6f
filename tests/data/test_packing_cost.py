# SPDX-License-Identifier: BSD-3-Clause
"""What packing costs: operators, copies between host and device, time."""

from __future__ import annotations

import re
import time
from collections import Counter
from typing import Any

import pytest
import torch
from calls import Operators
from core_time import least_time
from launches import profiled
from samples import nested
from torch import Tensor

from flash_attn_dualkv import (
    pack_jagged,
    pack_padded,
    pack_prefix_tree,
    pack_shared_prompts,
    unpack_logprobs,
    unpack_to_jagged,
)
from flash_attn_dualkv.data.given import selected


def large_batch(samples: int, device: str = "cpu", length: int = 20) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    own = [torch.randint(0, 1000, (length,), generator=generator) for _ in range(4)]
    responses = [torch.randint(0, 1000, (length // 2 + i % 5,), generator=generator) for i in range(samples)]
    return [own[i % 4].to(device) for i in range(samples)], [one.to(device) for one in responses]


def form_of(name: str, prompts: list[Tensor], responses: list[Tensor]) -> Any:
    """A call that packs the samples in one of the three forms."""
    if name == "lists":
        return lambda: pack_shared_prompts(prompts, responses)
    whole = [torch.cat(pair) for pair in zip(prompts, responses)]
    lengths = torch.tensor([len(one) for one in prompts], device=prompts[0].device)
    if name == "jagged":
        given = nested(whole)
        return lambda: pack_jagged(given, lengths)
    ids = torch.nn.utils.rnn.pad_sequence(whole, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in whole], batch_first=True)
    return lambda: pack_padded(ids, mask, lengths)


FORMS = pytest.mark.parametrize("form", ["lists", "padded", "jagged"])


@pytest.mark.parametrize(("form", "most"), [("lists", 41), ("padded", 66), ("jagged", 46)])
def test_few_operators(form: str, most: int) -> None:
    """As many for 64 samples as for 8, and reads of single values are none, or (of a mask) a handful.

    On a GPU each costs the host 5 to 10 microseconds, whatever its size; views are cheaper.
    """
    counts = []
    for samples in (8, 64):
        call = form_of(form, *large_batch(samples))
        with Operators() as operators:
            batch = call()
        counts.append(Counter(operators.names))
    assert counts[0] == counts[1]
    assert counts[0]["aten::_local_scalar_dense"] <= (0 if form == "lists" else 3)
    assert counts[0]["aten::_to_copy"] <= 2
    work = [name for name in operators.names if not re.search("view|slice|split|unbind|select$|alias|as_strided", name)]
    assert len(work) <= most, work
    values = torch.zeros(sum(batch.response_lens), requires_grad=True)
    with Operators() as operators:
        unpack_logprobs(values, batch).sum().backward()
    assert len(operators.names) <= 9, operators.names


def transcripts(samples: int, length: int) -> list[Tensor]:
    """Sequences that leave another anywhere in it."""
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(0, 1000, (length,), generator=generator)]
    for kept in torch.randint(1, length, (samples - 1,), generator=generator).tolist():
        stem = sequences[kept % len(sequences)]
        sequences.append(torch.cat([stem[:kept], torch.randint(0, 1000, (length - kept,), generator=generator)]))
    return sequences


def test_a_tree_needs_no_operators_for_each_token_or_sequence() -> None:
    """As many for many long sequences as for few short ones: levels of the tree are what counts."""
    counts = []
    for samples, length in ((8, 20), (64, 20), (8, 2000)):
        prompts, responses = large_batch(samples, length=length)
        whole = [torch.cat(pair) for pair in zip(prompts, responses)]
        masks = [torch.arange(len(one)) > len(prompts[0]) for one in whole]
        with Operators() as operators:
            batch = pack_prefix_tree(whole, loss_mask=masks, min_shared=20, boundary="gather")
        assert batch.layout.depth == 2
        counts.append(Counter(operators.names))
    assert counts[0] == counts[1] == counts[2]


@pytest.mark.parametrize(("samples", "length"), [(64, 1024), (512, 128)])
def test_a_tree_of_64k_tokens_is_packed_in_10_ms(samples: int, length: int) -> None:
    """Of one core of the host; a half of that is usual."""
    sequences = transcripts(samples, length)
    masks = [(torch.arange(length) % 3 > 0) for _ in sequences]
    batch = pack_prefix_tree(sequences, loss_mask=masks, boundary="gather")
    assert batch.layout.depth > 2 and batch.dedup_ratio > 1.5
    least = least_time(10e-3, pack_prefix_tree, sequences, loss_mask=masks)
    assert least < 10e-3, f"{1e3 * least:.2f} ms"


def test_selection_of_a_known_number() -> None:
    """What packing does on a GPU, where values[mask] would wait."""
    values = torch.randint(0, 1000, (7, 11), generator=torch.Generator().manual_seed(0))
    for mask in (values % 3 == 0, (values % 2).int(), values < 0, values >= 0):
        assert torch.equal(selected(values, mask, int(mask.sum())), values[mask.bool()])


@pytest.mark.gpu
@FORMS
def test_one_copy(form: str) -> None:
    """The tokens come to the host in one copy, and a few numbers for each node go back in one."""
    call = form_of(form, *large_batch(16, "cuda"))
    call()
    with profiled() as names:
        batch = call()
    assert sum("DtoH" in name for name in names) == sum("HtoD" in name for name in names) == 1, names
    assert batch.input_ids.device.type == batch.layout.nodes.device.type == "cuda"
    expected = form_of(form, *large_batch(16))()
    assert batch.input_ids.cpu().equal(expected.input_ids)
    assert batch.layout.nodes.cpu().equal(expected.layout.nodes)


@pytest.mark.gpu
@pytest.mark.parametrize(("samples", "prompt", "response"), [(32, 8192, 1024), (512, 240, 120)])
@FORMS
def test_packing_64k_tokens_takes_under_5_ms(form: str, samples: int, prompt: int, response: int) -> None:
    """64K packed tokens, with 4 prompts: few long responses, or many short ones."""
    prompts, responses = large_batch(samples, "cuda", length=prompt)
    call = form_of(form, prompts, [one[:response] for one in responses])
    assert 60_000 < call().layout.num_tokens < 70_000
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    assert min(times) < 5e-3, f"{1e3 * min(times):.2f} ms"


@pytest.mark.gpu
def test_unpacking_does_not_wait_for_the_gpu() -> None:
    batch = pack_shared_prompts(*large_batch(16, "cuda"))
    values = torch.rand(sum(batch.response_lens), device="cuda", requires_grad=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        unpack_logprobs(values, batch).sum().backward()
        unpack_to_jagged(values, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
