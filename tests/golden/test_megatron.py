# SPDX-License-Identifier: BSD-3-Clause
"""Scores and gradients of Megatron's models on packed rows."""

from __future__ import annotations

from collections.abc import Iterator

import golden
import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: see docs/megatron.md")
import tiny_megatron as tiny
from megatron_cpu import megatron_on_the_cpu
from tiny_megatron import gradients, megatron, tiny_chunk, tiny_config, weights_of

SETUPS = {
    "prompts": ("gqa, q/k norm", tiny.prompts_and_responses),
    "tree, latent, experts": ("latent, yarn, experts", tiny.tree),
    "tree, windows": ("windows and full", tiny.tree),
}


@pytest.fixture(autouse=True, scope="module")
def _cpu() -> Iterator[None]:
    with megatron_on_the_cpu():
        yield


@pytest.mark.parametrize("name", SETUPS)
def test_numbers_stay(name: str) -> None:
    kind, make = SETUPS[name]
    model, (_, batch) = tiny_chunk(kind, tiny_config(kind)), make()
    megatron.install(model)
    logps, entropy = megatron.shared_prompt_forward(model, batch, temperature=0.7, with_entropy=True)
    (logps @ weights_of(len(logps)).to(logps) + 0.3 * entropy.sum()).backward()
    golden.check("megatron", name, dict(logps=logps, entropy=entropy, gradients=gradients(model)))
