# SPDX-License-Identifier: BSD-3-Clause
"""Scores and gradients of Hugging Face models, by each way in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import golden
import pytest
import torch
from hybrid_models import hybrid_model
from tiny_models import MIXED, dualkv, gradients, tiny_config, tiny_model, transcripts, transformers

from flash_attn_dualkv import SharedPromptError, pack_prefix_tree


def _scores(made: Any, batch: Any = None) -> Any:
    """Of a model, or of one of a family."""
    if isinstance(made, str) and made not in transformers.CONFIG_MAPPING:
        pytest.skip("not in this version")
    model, batch = tiny_model(made) if isinstance(made, str) else made, MIXED.pack() if batch is None else batch
    logps, entropy = dualkv.shared_prompt_forward(model, batch, temperature=0.7, with_entropy=True)
    (logps.sum() + 0.3 * entropy.square().sum()).backward()
    return dict(logps=logps, entropy=entropy, gradients=gradients(model), rows=batch.layout.num_tokens)


def _turns() -> Any:
    sequences, masks = transcripts(3)
    return _scores("qwen3", pack_prefix_tree(sequences, loss_mask=masks, min_shared=2))


def _lora() -> Any:
    peft = pytest.importorskip("peft")
    model = tiny_model("qwen3")
    torch.manual_seed(5)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    logps, _ = dualkv.shared_prompt_forward(wrapped, MIXED.pack())
    logps.sum().backward()
    return dict(logps=logps, gradients=gradients(wrapped))


def _values() -> Any:
    torch.manual_seed(1)
    auto = transformers.AutoModelForSequenceClassification
    model = auto.from_config(tiny_config("qwen3", num_labels=1), attn_implementation="dualkv").double()
    sequences = [prompt + response for prompt, response in zip(MIXED.prompts, MIXED.responses)]
    values = dualkv.shared_prompt_values(model, pack_prefix_tree(sequences, min_shared=1))
    values.sum().backward()
    return dict(values=values, gradients=gradients(model))


def _logits() -> Any:
    batch = MIXED.pack()
    found = dualkv.shared_prompt_logits(
        tiny_model("llama"), batch, batch.last_rows, lambda logits, _: (logits.argmax(-1), logits.amax(-1))
    )
    return [one.double() for one in found]


def _refusals() -> Any:
    found = {}
    kinds: dict[str, dict[str, Any]] = dict(llama=dict(attention_dropout=0.1), mistral=dict(sliding_window=0), phi3={})
    for name, options in kinds.items():
        try:
            dualkv.shared_prompt_forward(tiny_model(name, **options).train(), MIXED.pack())
            found[name] = "shared"
        except (SharedPromptError, ValueError) as error:
            found[name] = type(error).__name__
    return found


SETUPS: dict[str, Callable[[], Any]] = {
    "dense": lambda: _scores("llama"),
    "MoE": lambda: _scores("qwen3_moe"),
    "windows": lambda: _scores("gemma2"),
    "hybrid": lambda: _scores(hybrid_model("qwen3_5_text")),
    "last layers without keys": lambda: _scores("gemma4_text"),
    "turns": _turns,
    "LoRA": _lora,
    "values": _values,
    "logits": _logits,
    "refusals": _refusals,
}


@pytest.mark.parametrize("name", SETUPS)
def test_numbers_stay(name: str) -> None:
    golden.check("transformers", name, SETUPS[name]())
