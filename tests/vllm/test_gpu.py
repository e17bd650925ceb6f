# SPDX-License-Identifier: BSD-3-Clause
"""vLLM on this package, on a GPU: what is sampled, and its bits. Minutes, as each engine starts anew."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

import check_vllm

pytestmark = pytest.mark.gpu
LIMIT_S = 300.0


@pytest.mark.parametrize("feature", check_vllm.FEATURES)
def test_tokens(feature: str) -> None:
    assert check_vllm.check_features([feature], LIMIT_S)


def test_bits_in_any_batch() -> None:
    assert check_vllm.check_invariant(LIMIT_S)
