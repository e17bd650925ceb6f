"""A fixture for tests that change which attention implementations transformers knows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def restored_registry() -> Iterator[None]:
    """Takes back what the test registers or wraps."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    mappings = [one._global_mapping for one in (AttentionInterface, AttentionMaskInterface)]
    before = [dict(one) for one in mappings]
    yield
    for mapping, items in zip(mappings, before):
        mapping.clear()
        mapping.update(items)
