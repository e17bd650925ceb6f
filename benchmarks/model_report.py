"""Table, plot and README section of the model benchmark."""

from __future__ import annotations

from pathlib import Path

from figures import Runs, describe, introduction, links, remarks
from layer_report import LayerFigures, comparison, measured, plot
from schema import Result

__all__ = ["plot", "section", "table"]

BASELINES = ("fa2_replicated",)


def table(result: Result) -> str:
    """Everything in one result file, as Markdown."""
    header = result["header"]
    parts = [
        "# Model benchmark",
        f"{describe(header)}.",
        "Log-probabilities of all response tokens from a whole model with activation checkpointing, and the gradients "
        "of all parameters. Executed: tokens and operations that the implementation computes, repeated ones included. "
        "Effective: the tokens of the replicated batch, for all the same. Rates are those of forward and backward "
        "together.",
        measured(LayerFigures(result["rows"]), BASELINES),
    ]
    return "\n\n".join(parts) + "\n" + remarks(header)


def section(gpu: str, runs: Runs, folder: Path) -> str:
    """The README's part on one GPU: the step's times and memory, and their ratios to replicated prompts."""
    parts = [
        "Qwen3 in stock transformers, 8B where the row names no other size, all layers with activation "
        "checkpointing: log-probabilities of all responses (`shared_prompt_forward`) and the gradients of all "
        "parameters, without an optimizer.",
        introduction(gpu, runs),
        "Milliseconds (thousand tokens/s executed / effective; peak GiB, weights and gradients included).",
        *comparison(runs, BASELINES),
        links(runs, folder),
    ]
    return "\n\n".join(parts)
