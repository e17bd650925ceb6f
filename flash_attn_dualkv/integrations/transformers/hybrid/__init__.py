# SPDX-License-Identifier: BSD-3-Clause
"""Hybrid models on shared prompts: short convolutions, gated delta rule, Mamba-2.

Such a layer carries something along the sequence: a convolution its last inputs, a recurrence its state. What it
carries behind a prompt is the same for all responses, so it is computed once and handed on to each of them, gradients
included. In a tree every node hands it on to its children.

`families` says which layers of which models are known, `levels` what lies where, `rows` moves rows and states,
`mixers` computes, `delivery` brings the layout to the layers and sees that it was used.
"""

from __future__ import annotations

from typing import Any

from .delivery import install
from .families import family_of

__all__ = ["prepare"]


def prepare(model: Any) -> None:
    """Let the layers of a supported model take layouts where these do not reach them by attention alone.

    Args:
        model: a transformers model. It is changed if it is a hybrid one: for calls with a layout only, once.
    """
    family = family_of(model.config.get_text_config(decoder=True))
    if family is not None:
        install(model, family)
