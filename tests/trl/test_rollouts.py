# SPDX-License-Identifier: BSD-3-Clause
"""TRL's rollouts by continuous batching, decoded over shared prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny_models
import transformers
from tiny_trl import StockInGroups, check_runs, model_on_disk, shared, train, trainer

from flash_attn_dualkv import SharedPrefixPlan
from flash_attn_dualkv.integrations.transformers import rollout

pytestmark = [
    pytest.mark.skipif(tiny_models.VERSION < (5, 17), reason="needs transformers 5.17 or newer"),
    pytest.mark.usefixtures("restored_registry"),
]

BATCHING = dict(num_blocks=64, max_batch_tokens=128)


@pytest.fixture
def registered() -> Iterator[None]:
    yield
    tiny_models.dualkv.unregister_decode()


def test_completions(tmp_path, monkeypatch, registered):
    """The completions, and all that training makes of them, are those of the stock trainer, with and without a plan."""
    rollouts: list[list[list[int]]] = []
    tables: list[Any] = []
    stock, update = transformers.GenerationMixin.generate_batch, SharedPrefixPlan.update

    def generate_batch(*args: Any, **kwargs: Any) -> Any:
        found = stock(*args, **kwargs)
        rollouts.append([one.generated_tokens for one in found.values()])
        return found

    def recorded(plan: Any, table: Any, *args: Any, **kwargs: Any) -> Any:
        tables.append(table.tolist())
        return update(plan, table, *args, **kwargs)

    # Queued as stock rollouts are, so that both draw the same random numbers.
    monkeypatch.setattr(rollout._Queued, "__lt__", list.__lt__)
    monkeypatch.setattr(transformers.GenerationMixin, "generate_batch", generate_batch)
    monkeypatch.setattr(SharedPrefixPlan, "update", recorded)
    size = "page_size" if hasattr(transformers.ContinuousBatchingConfig, "page_size") else "block_size"
    options = dict(
        use_transformers_continuous_batching=True, transformers_continuous_batching_config={**BATCHING, size: 16},
        max_steps=2,
    )  # fmt: skip
    model = model_on_disk(tmp_path)
    expected = train(trainer(StockInGroups, model, tmp_path / "out", **options))
    for shares_keys in (False, True):
        assert not tables
        if shares_keys:
            tiny_models.dualkv.register_decode()
        got = train(trainer(shared.SharedPromptGRPOTrainer, model, tmp_path / "out", **options))
        check_runs(got, expected)
        assert sum(got.metric("fallbacks")) == 0
    assert rollouts == rollouts[:2] * 3 and [*map(len, rollouts)] == [8] * 6
    assert len(tables) >= 2 * 7
    # Prompts of 19 words: their first page is one for the 4 completions.
    assert any(len({row[0] for row in table}) < len(table) == 8 for table in tables)
