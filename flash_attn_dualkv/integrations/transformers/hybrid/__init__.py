# SPDX-License-Identifier: BSD-3-Clause
"""Hybrid models on shared prompts: short convolutions, gated delta rule, Mamba-2.

Such a layer carries something along the sequence: a convolution its last inputs, a recurrence its state. What it
carries behind a prompt is the same for all responses, so it is computed once and handed on to each of them, gradients
included. In a tree every node hands it on to its children.

`families` says which layers of which models are known, `layout_context` brings the layout to the layers and sees that
it was used; `integrations.recurrences` computes.
"""

from .layout_context import prepare

__all__ = ["prepare"]
