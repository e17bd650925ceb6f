# SPDX-License-Identifier: BSD-3-Clause
"""Copies of models that take layouts, pickled and deep ones: each is guarded itself, wherever it lands."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hybrid_models import KINDS, hybrid_model
from processes import run_ranks
from tiny_models import MIXED, check_equal, dualkv, lose_a_layout, replicated_logps, row_of, stock_twin, tiny_model

from flash_attn_dualkv import SharedPromptError, SharedPromptLayoutError, guard

BATCH = MIXED.pack()


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "deepcopy": copy.deepcopy,
}


def logits(model: Any, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(**row_of(BATCH, **options)).logits
    return result


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", ["llama", *KINDS])
def test_a_copy_is_guarded_itself(name: str, how: str) -> None:
    model = tiny_model(name) if name == "llama" else hybrid_model(name)
    handle = dualkv.install_layout_hook(model)
    expected = logits(model)
    twin = COPIES[how](model)
    assert torch.equal(logits(twin), expected)
    assert guard.current() is None
    handle.remove()  # the original's, and not the copy's
    with pytest.raises(SharedPromptLayoutError, match="the model would count rows"):
        twin(BATCH.input_ids[None], use_cache=False, shared_prompt_layout=BATCH.layout)
    if name == "llama":
        lose_a_layout(twin)
        with pytest.raises(SharedPromptLayoutError, match="consumed by 2 layers that mix tokens, got 1"):
            logits(twin)


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", ["gemma2", *KINDS])
def test_a_copy_of_a_model_that_was_scored(name: str, how: str) -> None:
    model = tiny_model(name) if name == "gemma2" else hybrid_model(name)
    expected, _ = dualkv.shared_prompt_forward(model, BATCH)
    twin = COPIES[how](model)
    assert torch.equal(dualkv.shared_prompt_forward(twin, BATCH)[0], expected)
    with torch.no_grad():
        for one in twin.parameters():  # its functions are those of its own parameters
            one.mul_(1.1)
    stock, _ = replicated_logps(stock_twin(twin, "eager"), MIXED)
    check_equal(dualkv.shared_prompt_forward(twin, BATCH)[0].detach(), stock.detach(), 2e-5)


def _reads(rank: int, path: Path, results: Any) -> None:
    model, batch, expected = torch.load(path, weights_only=False)
    with torch.no_grad():
        results["is_equal"] = torch.equal(model(**row_of(batch)).logits, expected)


def test_another_process_reads_a_hybrid_model(tmp_path: Path) -> None:
    """Its classes are changed there when the first layout comes."""
    model = hybrid_model(KINDS[0])
    dualkv.install_layout_hook(model)
    torch.save((model, BATCH, logits(model)), tmp_path / "model.pt")
    assert run_ranks(_reads, 1, tmp_path / "model.pt", backend=None) == {"is_equal": True}


# --- adapters that look into the model --------------------------------------------------------------------------------


def test_calls_that_want_more_than_scores() -> None:
    """X-LoRA's first forward, and its like: the scorer has no hidden states to give."""
    model = tiny_model("llama")
    for name in ("output_hidden_states", "output_attentions"):
        with pytest.raises(SharedPromptError, match=f"call it once, for its .*{name}=True"):
            dualkv.shared_prompt_forward(Looks(model, name), BATCH)


class Looks(torch.nn.Module):
    """Calls its model once for what it wants to know of it, and once more with what it has learned."""

    def __init__(self, model: Any, wanted: str) -> None:
        super().__init__()
        self.module, self.wanted = model, wanted

    def forward(self, **inputs: Any) -> Any:
        found = self.module(**{**inputs, self.wanted: True, "return_dict": True})
        return self.module(**inputs, scalings=found.hidden_states)
