# SPDX-License-Identifier: BSD-3-Clause
"""Models that continuous batching decodes over pages, and those that it refuses."""

from __future__ import annotations

from typing import Any

import torch

from ....checks import CUDA_DTYPES, explain
from ....decode.calls import PAGE_ROWS
from ....decode.plan import SharedPrefixPlan
from ....errors import SharedPromptUnsupportedError
from .table import check_supported, is_hybrid, kernels_lack
from .unwrap import text_config

SLIDING = "sliding_attention"  # kind of layers


def check_decodes(model: Any) -> None:
    """Refuse a model that does not run on this, before anything is generated.

    Raises:
        SharedPromptError: names what is not supported.
    """
    check_supported(model.config)
    text, lacking = text_config(model.config), None
    is_latent = getattr(text, "kv_lora_rank", None)
    if is_hybrid(model.config) or is_latent:
        expected = "attention as the only mixer of tokens, and values as wide as keys, for decoding"
        got = f"{'multi-head latent attention' if is_latent else 'a hybrid'} ({text.model_type})"
        lacking = explain("model", expected, got)
    elif model.device.type != "cpu" and model.dtype not in CUDA_DTYPES:
        lacking = explain("dtype of the model", f"{' or '.join(map(str, CUDA_DTYPES))} on a GPU", model.dtype)
    elif model.device.type != "cpu":
        lacking = kernels_lack(model.config) or (None if tables_lack(text) else _decoding_lacks(text, model.device))
    if lacking is not None:
        raise SharedPromptUnsupportedError(lacking)


def _decoding_lacks(text: Any, device: torch.device) -> str | None:
    """Lack of the kernels of decoding for a model's heads; None if they run it."""
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    sizes: dict[str, Any] = dict(num_pages=1, page_size=PAGE_ROWS, num_heads=1, num_kv_heads=1)
    try:
        SharedPrefixPlan(1, 1, **sizes, head_dim=head_dim, device=device)
    except NotImplementedError as error:
        return str(error)
    return None


def tables_lack(config: Any) -> str | None:
    """Requirement of block tables that a model does not meet; None if it has them."""
    if getattr(text_config(config), "num_kv_shared_layers", None):
        return "keys of its own in each layer"
    types = getattr(config, "layer_types", None)
    has_windows = getattr(config, "sliding_window", None) is not None if types is None else SLIDING in types
    return "layers without windows" if has_windows else None
