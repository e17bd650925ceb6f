# SPDX-License-Identifier: BSD-3-Clause
"""RoPE whose angles follow the longest sequence of a row: for which lengths they are the same."""

from __future__ import annotations

from typing import Any

from ...checks import explain
from .admission.unwrap import text_config


def rope_of_ranks(config: Any, longest: int, among: str = "on several ranks") -> str | None:
    """Why a row cannot be divided among ranks, or passes: RoPE whose angles follow the longest sequence.

    Each would see that of its own part.
    """
    for kind, most in _varying_ropes(config):
        if longest > most:
            expected = f"sequences of at most {most} tokens {among}, as angles of RoPE follow the longest one"
            return explain("shared_prompt_layout", expected, f"{longest} ({kind})")
    return None


def rope_class(config: Any, length: int) -> tuple[int, ...]:
    """Equal for lengths at which a sequence has the same angles of RoPE alone; the longer, the larger.

    Returns:
        For each RoPE whose angles follow the longest sequence: 0 within the original length; beyond it 1 where there is
        one other set of angles, or the length itself where each has its own.
    """
    ropes = _varying_ropes(config)
    return tuple(0 if length <= most else 1 if kind == "longrope" else length for kind, most in ropes)


def _varying_ropes(config: Any) -> list[tuple[str, int]]:
    """The kinds of RoPE whose angles follow the longest sequence, and up to which length they do not."""
    text = text_config(config)
    original = "original_max_position_embeddings"
    given = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    found = []
    for rope in (given, *given.values()):  # of the model, or of each kind of layer
        kind = str(rope.get("rope_type", rope.get("type"))) if isinstance(rope, dict) else ""
        if "dynamic" not in kind and kind != "longrope":
            continue
        most = rope.get(original) or getattr(text, original, None) or text.max_position_embeddings
        # Dynamic angles are reset below the original length alone.
        found.append((kind, most if kind == "longrope" else most - 1))
    return found
