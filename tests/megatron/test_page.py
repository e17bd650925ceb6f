# SPDX-License-Identifier: BSD-3-Clause
"""The page on Megatron: its code runs as it stands."""

from __future__ import annotations

import re
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: see docs/megatron.md")

import tiny_megatron as tiny
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron_cpu import megatron_on_the_cpu
from tiny_megatron import alone, check_close, gradients, tiny_chunk, tiny_config

PAGE = Path(__file__).resolve().parents[2] / "docs/megatron.md"


class Trainer:
    """What the recipe for ms-swift reads of its trainer."""

    ref_models: Any = None
    micro_batch_size, temperature = 2, 1.0

    def __init__(self, model: Any) -> None:
        self.model = model

    def prepare_model(self) -> None:
        self.unwrapped_models = [self.model]

    def _prepare_batch(self, data: Any) -> Any:
        return data

    def loss_func(self, output: torch.Tensor, data: Any) -> torch.Tensor:
        assert data["per_token_entropy"] is None and data["grpo_batch"].completion_mask.shape == output.shape
        return output.sum()


def padded_left(logps_rmpad: torch.Tensor, logits_to_keep: int, batch_size: int, seq_lengths: torch.Tensor) -> Any:
    """As ms-swift's `pad_logps_back_to_batch`: (1, tokens) to (batch, columns), the ends of sequences on the right."""
    parts = logps_rmpad[0, : int(seq_lengths.sum())].split(seq_lengths.tolist())
    wide = [torch.nn.functional.pad(one, (logits_to_keep - len(one), 0), value=-1e10) for one in parts]
    out = torch.stack(wide)
    assert len(out) == batch_size
    return out, None


@pytest.fixture
def ms_swift(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Stand-ins for the modules of ms-swift that the page imports."""
    names = ("swift", "swift.megatron", "swift.megatron.trainers", "swift.megatron.trainers.grpo_trainer")
    modules: list[Any] = [*map(ModuleType, names)]
    _, inner, trainers, own = modules
    own.MegatronGRPOTrainer, own.pad_logps_back_to_batch = Trainer, padded_left
    inner.trainers = trainers
    for one in modules:
        monkeypatch.setitem(sys.modules, one.__name__, one)
    return trainers


def test_its_code(ms_swift: Any) -> None:
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
    with megatron_on_the_cpu():
        check_ms_swift(ms_swift.MegatronGRPOTrainer, sequences, lens, row.detach())


def check_ms_swift(kind: Any, sequences: Any, lens: list[int], expected: torch.Tensor) -> None:
    """The recipe's trainer, on a row with padding behind it, as its class reads ms-swift's."""
    trainer = kind(tiny_chunk("gqa, q/k norm", tiny_config("gqa, q/k norm")))
    trainer.prepare_model()
    ids = [token for one in sequences.tokens for token in one]
    offsets = torch.tensor([0, *(len(one) for one in sequences.tokens), 3]).cumsum(0).int()
    labels = torch.full((1, len(ids) + 3), -100)
    for begin, one, length in zip(offsets.tolist(), sequences.tokens, lens):
        labels[0, begin + length - 1 : begin + len(one) - 1] = torch.tensor(one[length:])
    data = dict(
        input_ids=torch.tensor([*ids, 0, 0, 0])[None],
        labels=labels,
        packed_seq_params=SimpleNamespace(cu_seqlens_q=offsets),
    )
    logps, routes = trainer.compute_per_token_logps(trainer.model, iter([data]))
    assert routes is None and not logps.requires_grad and logps.shape == labels.shape
    check_close(logps[0, : len(ids)], expected, 5e-6)
    assert not logps[0, len(ids) :].any()
    lengths = offsets.diff()[:-1]
    trainer.micro_batch_size, width = len(lengths), int(lengths.max())
    grpo = SimpleNamespace(completion_mask=torch.ones(len(lengths), width), seq_lengths=lengths)
    output, loss = trainer.forward_step(iter([data | dict(grpo_batch=grpo)]), trainer.model)
    assert isinstance(loss, partial) and output.requires_grad
    assert torch.equal(output.detach(), padded_left(logps, width, len(lengths), lengths)[0])
    loss(output).backward()
    assert gradients(trainer.model)
