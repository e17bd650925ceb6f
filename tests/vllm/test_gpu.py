# SPDX-License-Identifier: BSD-3-Clause
"""vLLM on this package, on a GPU: what is sampled, and its bits. Minutes, as each engine starts anew."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import check_vllm

pytestmark = pytest.mark.gpu
LIMIT_S = 300.0


def test_greedy_tokens() -> None:
    assert check_vllm.check_greedy(LIMIT_S)


def test_features() -> None:
    assert check_vllm.check_features(LIMIT_S)


def test_bits_in_any_batch() -> None:
    assert check_vllm.check_invariant(LIMIT_S)
