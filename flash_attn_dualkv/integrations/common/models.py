# SPDX-License-Identifier: BSD-3-Clause
"""Models of trainers: what keeps one from shared prompts, and attention that takes a layout."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel

from ...errors import SharedPromptError, SharedPromptLayoutError
from ..transformers import check_supported, register, wrap
from ..transformers.admission import support
from ..transformers.admission.first_use import FirstUseError, check_first_use
from ..transformers.admission.support import check_attention, text_config
from .fallback import Refusal, kernels_refusal

EAGER = "dualkv_eager"  # what takes a layout and, without one, is the model's own eager attention


class Refused(Exception):  # noqa: N818 (stock attention is no error)
    """Raised anew, never kept: an exception holds the tensors of the frames it has passed."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.refusal = Refusal(reason, message)


def check_model(
    causal_lm: Any,
    device: torch.device,
    *,
    model: Any = None,
    self_check: bool = True,
    share_lora_dropout: bool = False,
    about_dropout: str = "",
    dtype: torch.dtype | None = None,
) -> None:
    """Raise Refused for what a model does not allow in its present mode.

    Args:
        causal_lm: the transformers model.
        device: that of the inputs.
        model, self_check, share_lora_dropout: of `check_first_use`.
        about_dropout: what the trainer's user can do about it.
        dtype: of the arithmetic, if the model's forward has autocast inside; None: that of autocast here, or of the
            parameters.
    """
    config = causal_lm.config
    try:
        check_supported(config)
        check_attention(config)
        if device.type == "cuda":
            if dtype is None and torch.is_autocast_enabled("cuda"):
                dtype = torch.get_autocast_dtype("cuda")
            elif dtype is None:
                dtype = causal_lm.get_input_embeddings().weight.dtype
            if (refusal := kernels_refusal(config, dtype)) is not None:
                raise Refused(*refusal)
        first_use = dict(self_check=self_check, share_lora_dropout=share_lora_dropout)
        check_first_use(causal_lm, device, model=model, **first_use)
    except FirstUseError as error:
        raise Refused(error.reason, str(error) + about_dropout * (error.reason == "dropout")) from None
    except SharedPromptLayoutError:  # one that gets lost on its way: a mistake, and no kind of model
        raise
    except SharedPromptError as error:
        raise Refused("unsupported", str(error)) from None


def take_layouts(causal_lm: Any) -> None:
    """Let the model's attention take a layout; where it cannot, `check_attention` says so."""
    name = text_config(causal_lm.config)._attn_implementation
    known = AttentionInterface._global_mapping
    if name in known and not hasattr(known[name], support.TAKES_LAYOUT):
        wrap((name,))
    elif name == "eager" and _has_interface(causal_lm):
        # Every model file has an eager attention of its own: there is nothing to wrap. Files of
        # models that cannot share may compute otherwise where the name is none of transformers'.
        with suppress(SharedPromptError):
            check_supported(causal_lm.config)
            register(EAGER, fallback="eager")
            causal_lm.set_attn_implementation(EAGER)


def _has_interface(causal_lm: Any) -> bool:
    """Whether the text of a model attends through transformers' interface."""
    text = text_config(causal_lm.config)
    models = [one for one in causal_lm.modules() if isinstance(one, PreTrainedModel) and one.config is text]
    return all(one._can_set_attn_implementation() for one in models)
