# SPDX-License-Identifier: BSD-3-Clause
"""Megatron's models on packed rows: log-probabilities and every parameter's gradient of each sequence alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny_megatron as tiny
from megatron_cpu import megatron_on_the_cpu
from tiny_megatron import alone, check_close, check_gradients, gradients, megatron, tiny_chunk, tiny_config, weights_of

BATCHES = {"prompts": tiny.prompts_and_responses, "tree": tiny.tree}
VALUE, GRADIENT = 5e-6, 2e-5


@pytest.fixture(autouse=True, scope="module")
def _cpu() -> Iterator[None]:
    with megatron_on_the_cpu():
        yield


def compare(model: Any, make: Any, **options: Any) -> None:
    """A packed row against each sequence alone, with a loss of all log-probabilities."""
    sequences, batch = make()
    expected = alone(model, sequences)
    (expected * weights_of(len(expected))).sum().backward()
    expected_gradients = gradients(model)
    megatron.install(model)
    logps, entropy = megatron.shared_prompt_forward(model, batch, **options)
    assert entropy is None
    check_close(logps.detach(), expected.detach(), VALUE)
    (logps * weights_of(len(logps))).sum().backward()
    check_gradients(gradients(model), expected_gradients, GRADIENT)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("kind", tiny.KINDS)
def test_equals_each_sequence_alone(kind: str, batch: str) -> None:
    compare(tiny_chunk(kind, tiny_config(kind)), BATCHES[batch])
