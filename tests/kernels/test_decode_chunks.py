# SPDX-License-Identifier: BSD-3-Clause
"""Prompts on the kernels of decoding, chunk by chunk: the bits of the training forward, however they are cut."""

from __future__ import annotations

from itertools import pairwise

import oracle
import pytest
import torch
from forests import ints
from launches import DEVICE, GPU_MARKS

from flash_attn_dualkv import (
    SharedPrefixPlan,
    flash_attn_dualkv_varlen_func,
    flash_attn_varlen_func,
    shared_prefix_decode,
)

pytestmark = GPU_MARKS
PAGE, PROMPT, RESPONSE = 16, 200, 60
CHUNKS = [[0, 200, 260], [0, 70, 150, 260], [0, 1, 33, 130, 199, 200, 201, 260]]


@pytest.mark.parametrize(("head_dim", "heads"), [(64, (4, 1)), (128, (2, 1)), (256, (2, 2))])
def test_bits_of_training(head_dim: int, heads: tuple[int, int], kernels: str) -> None:
    torch.manual_seed(0)
    tokens, cut = PROMPT + RESPONSE, PROMPT - 1
    q = torch.randn(tokens, heads[0], head_dim).to(DEVICE, torch.bfloat16)
    k, v = (torch.randn(tokens, heads[1], head_dim).to(DEVICE, torch.bfloat16) for _ in range(2))
    borders, ends = ints(0, cut).to(DEVICE), ints(0, tokens - cut).to(DEVICE)
    prompt = flash_attn_varlen_func(q[:cut], k[:cut], v[:cut], borders, borders, cut, cut, causal=True)
    response = flash_attn_dualkv_varlen_func(
        q[cut:], k[:cut], v[:cut], k[cut:], v[cut:], ends, ends, tokens - cut, cut, tokens - cut
    )
    expected = torch.cat((prompt, response))

    pages = -(-tokens // PAGE)
    cache = torch.full((pages * PAGE, heads[1], 2 * head_dim), torch.nan, device=DEVICE, dtype=torch.bfloat16)
    cache[:tokens] = torch.cat((k, v), -1)
    k_cache, v_cache = cache.view(pages, PAGE, heads[1], -1).split(head_dim, -1)
    plan = SharedPrefixPlan(
        1, pages, num_pages=pages, max_queries=tokens, page_size=PAGE, num_heads=heads[0], num_kv_heads=heads[1],
        head_dim=head_dim, device=DEVICE, exact="trainer",
    )  # fmt: skip
    table, cuts = ints(*range(pages))[None].to(DEVICE), ints(cut).to(DEVICE)
    for chunks in CHUNKS:
        for begin, end in pairwise(chunks):
            offsets = ints(0, end - begin).to(DEVICE)
            plan.update(table, ints(end).to(DEVICE), cu_seqlens_q=offsets, boundaries=cuts, num_queries=end - begin)
            out = shared_prefix_decode(q[begin:end], k_cache, v_cache, plan)
            oracle.assert_bits_equal(f"rows {begin} to {end}", out, expected[begin:end])
