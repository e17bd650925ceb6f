# SPDX-License-Identifier: BSD-3-Clause
"""The page on Megatron: its code runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: see docs/megatron.md")

import tiny_megatron as tiny
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron_cpu import megatron_on_the_cpu
from tiny_megatron import alone, check_close, gradients, tiny_chunk, tiny_config

PAGE = Path(__file__).resolve().parents[2] / "docs/megatron.md"


def test_its_code() -> None:
    sequences, batch = tiny.prompts_and_responses()
    lens = [len(mask) - sum(mask) for mask in sequences.masks]
    with megatron_on_the_cpu():
        model = tiny_chunk("gqa, q/k norm", tiny_config("gqa, q/k norm"))
        expected = alone(model, sequences).detach()
        names: dict[str, Any] = dict(
            model_chunks=[model],
            prompts=[one[:length] for one, length in zip(sequences.tokens, lens)],
            responses=[one[length:] for one, length in zip(sequences.tokens, lens)],
            advantages=torch.linspace(-1.0, 1.0, len(lens)),
        )
        for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.S | re.M):
            exec(compile(block, str(PAGE), "exec"), names)
        (found,) = get_forward_backward_func()(
            forward_step_func=names["forward_step"], data_iterator=iter(names["micro_batches"]), model=model,
            num_microbatches=1, seq_length=64, micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        assert found == {} and gradients(model)

        ids = torch.tensor([token for one in sequences.tokens for token in one])
        offsets = torch.tensor([0, *(len(one) for one in sequences.tokens)]).cumsum(0).int()
        row = names["logps_of_thd_row"](model, ids, offsets, lens)
    assert row.shape == ids.shape
    check_close(row.detach()[batch.jagged_index], expected, 5e-6)
    assert row.detach().count_nonzero() == len(expected)
