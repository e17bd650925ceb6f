# SPDX-License-Identifier: BSD-3-Clause
"""Shared prompts in stock Hugging Face models: any causal LM whose attention runs through transformers' interface.

    register()  # once, before the model is made
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="dualkv")
    batch = pack_shared_prompts(prompts, responses)
    logps, entropy = shared_prompt_forward(model, batch)

`model(...)` itself works too: it passes `shared_prompt_layout=batch.layout` on to every attention layer. Without a
layout (generate, evaluation, padded batches) the same model attends as a stock one. Needs transformers 4.57 or newer.

    register_decode()  # continuous batching reads prompts once for all of their responses: docs/rollouts.md
"""

from ...guard import expect_shared_prompt
from .admission.table import check_supported
from .attention import register, wrap
from .classifiers import shared_prompt_values
from .forward import shared_prompt_forward, shared_prompt_logits
from .hook import install_layout_hook
from .images import row_inputs
from .prompt_once import shared_prompt_backward
from .rollout import register_decode, unregister_decode
from .trunk import PartScores, Pieces, Trunk

__all__ = [
    "PartScores",
    "Pieces",
    "Trunk",
    "check_supported",
    "expect_shared_prompt",
    "install_layout_hook",
    "register",
    "register_decode",
    "row_inputs",
    "shared_prompt_backward",
    "shared_prompt_forward",
    "shared_prompt_logits",
    "shared_prompt_values",
    "unregister_decode",
    "wrap",
]
