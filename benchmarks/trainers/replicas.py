# SPDX-License-Identifier: BSD-3-Clause
"""Requests that each of an engine's replicas gets in a step of verl, under verl's own balancer and this package's.

verl submits all samples of a step at once, so that where they go depends on no request's end. Its balancer sees neither
prompts nor lengths: where it puts the k-th of 2048 new requests is in vllm_engines.json ("placements", by replicas), as
its class has said behind random.seed(0) (tests/verl/test_router.py runs it), for machines without verl.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Sequence

from vllm_rig import PLACEMENTS

from flash_attn_dualkv.integrations.verl_router import SiblingRouter
from flash_attn_dualkv.model_shape import ModelShape

ROUTERS = ("verl", "siblings")
WORKERS = 8  # verl's agent loops, which submit side by side
SPREAD, CORRELATION = 0.7, 0.5  # of the logarithm of lengths; between samples of a prompt
COPY_RATE, MATRIX_RATE = 4.0e12, 5.0e14  # of an H200: bytes and operations a second
Request = tuple[int, int]  # number of its prompt, new tokens


def draw_lengths(prompts: int, samples: int, mean: int, correlation: float, seed: int) -> dict[tuple[int, int], int]:
    """New tokens of each prompt's samples, log-normal and clipped at twice the mean."""
    draw = random.Random(seed).gauss
    found = {}
    for prompt in range(prompts):
        common = draw(0, 1)
        for sample in range(samples):
            z = math.sqrt(correlation) * common + math.sqrt(1 - correlation) * draw(0, 1)
            found[prompt, sample] = max(1, min(2 * mean, round(mean * math.exp(SPREAD * z - SPREAD**2 / 2))))
    return found


def submitted(prompts: int, samples: int, seed: int) -> list[tuple[int, int]]:
    """Prompt and sample of a step's requests: each worker has a part of the batch, and they take turns at random."""
    batch = [(prompt, sample) for prompt in range(prompts) for sample in range(samples)]
    share = -(-len(batch) // WORKERS)
    parts = [iter(batch[start : start + share]) for start in range(0, len(batch), share)]
    turns = [place // share for place in range(len(batch))]
    random.Random(seed).shuffle(turns)
    return [next(parts[worker]) for worker in turns]


def lists_of(
    router: str, prompts: int, samples: int, tokens: int, mean: int, replicas: int, seed: int = 0
) -> list[list[Request]]:  # fmt: skip
    """Requests of each replica, in the order in which they come. `tokens`: of a prompt."""
    lengths, order = draw_lengths(prompts, samples, mean, CORRELATION, seed), submitted(prompts, samples, seed)
    if router == "verl":
        known = PLACEMENTS[str(replicas)]
        if len(order) > len(known):
            raise ValueError(f"placements: expected at most {len(known)} requests, got {len(order)}")
        places = [int(place) for place in known[: len(order)]]
    else:
        made = SiblingRouter({str(replica): replica for replica in range(replicas)})
        places = [made.acquire_server(f"{request}", [request[0]] * tokens)[1] for request in order]
    found: list[list[Request]] = [[] for _ in range(replicas)]
    for request, place in zip(order, places):
        found[place].append((request[0], lengths[request]))
    return found


def model_seconds(requests: Sequence[Request], tokens: int, shape: ModelShape, layers: int, is_shared: bool) -> float:
    """Seconds of a replica that has all of its requests running at once: bytes of decoding, operations of prompts."""
    longest: dict[int, int] = defaultdict(int)
    for prompt, new in requests:
        longest[prompt] = max(longest[prompt], new)
    steps_of_prompts = sum(longest.values()) if is_shared else sum(new for _, new in requests)
    keys = steps_of_prompts * tokens + sum(new * (new + 1) // 2 for _, new in requests)
    weights = layers * shape.layer_weights + shape.vocab * shape.hidden
    elements = max(longest.values()) * weights + keys * 2 * shape.kv_heads * shape.head_dim * layers
    return 2 * elements / COPY_RATE + layers * shape.token_flops(len(longest) * tokens, "forward") / MATRIX_RATE
