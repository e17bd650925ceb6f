"""Table, plot and README section of the layer benchmark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figures import (
    LABELS,
    Figures,
    Runs,
    bars,
    describe,
    introduction,
    is_in_pieces,
    links,
    markdown,
    milliseconds,
    number,
    percent,
    remarks,
    two_panels,
)
from schema import Result, is_ours

from flash_attn_dualkv.predict import DIRECTIONS

BASELINES = ("fa2_replicated", "flex_packed")
TOKENS = ("executed_tokens", "replicated_tokens")
# Facts host_*_us, of which a result may lack some.
HOST = {"": "host", "stack_": "host, a layer of a stack", "empty_": "host, a node that computes nothing"}


class LayerFigures(Figures):
    """What is derived from the rows of a layer: throughput, and ratios to other implementations."""

    def fact(self, shape: str, impl: str, what: str) -> float | None:
        """A figure that both directions have in common."""
        return self.get(shape, impl, "forward", what)

    def tokens_per_ms(self, shape: str, impl: str, what: str) -> float | None:
        """Thousands of tokens per second; ``what``: executed_tokens, or replicated_tokens for the effective rate."""
        ms, tokens = self.both_ms(shape, impl), self.fact(shape, impl, what)
        return tokens / ms if ms and tokens else None

    def executed_tflops(self, shape: str, impl: str) -> float | None:
        ms = self.both_ms(shape, impl)
        flops = [self.get(shape, impl, direction, "executed_flops") for direction in DIRECTIONS]
        return sum(one for one in flops if one is not None) / ms / 1e9 if ms and None not in flops else None

    def of_matmul(self, shape: str, impl: str) -> float | None:
        rate, matmul = self.executed_tflops(shape, impl), self.fact(shape, impl, "matmul_tflops")
        return rate / matmul if rate and matmul else None

    def speedup(self, shape: str, impl: str, baseline: str) -> float | None:
        own, other = self.both_ms(shape, impl), self.both_ms(shape, baseline)
        return other / own if own and other else None

    def memory_ratio(self, shape: str, impl: str, baseline: str) -> float | None:
        own, other = self.peak(shape, impl), self.peak(shape, baseline)
        return own / other if own and other else None

    def data_share(self, shape: str, impl: str) -> float | None:
        """Packing and unpacking as a share of the forward and backward of all of the model's layers."""
        parts = [self.fact(shape, impl, what) for what in ("pack_ms", "unpack_ms", "layers")]
        ms = self.both_ms(shape, impl)
        if ms is None or None in parts:
            return None
        pack, unpack, layers = (one for one in parts if one is not None)
        return (pack + unpack) / (layers * ms)

    def note(self, shape: str, impl: str) -> str:
        """Why there is no figure, or what it was measured with."""
        rows = [row for row in self.rows if (row["shape"], row["impl"]) == (shape, impl) and row["ms"]]
        in_pieces = any(is_in_pieces(row, row["executed_tokens"]) for row in rows)
        return self.reason(shape, impl) or ("in several calls, their outputs joined" if in_pieces else "")


def rate(value: float | None) -> str:
    """Thousands of tokens per second."""
    return number(value, 0 if value is None or value >= 100 else 1)


def times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def table(result: Result) -> str:
    """Everything in one result file, as Markdown."""
    figures = LayerFigures(result["rows"])
    header = result["header"]
    parts = [
        "# Layer benchmark",
        f"{describe(header)}.",
        "Executed: tokens and operations that the implementation computes. Effective: the tokens of the replicated "
        "batch, for all the same. Rates are those of forward and backward together.",
        measured(figures, BASELINES),
        *data_side(figures),
    ]
    return "\n\n".join(parts) + "\n" + remarks(header)


def measured(figures: LayerFigures, baselines: Sequence[str]) -> str:
    """A table of times, throughput and memory; ratios of memory are those to the first of the baselines."""
    head = ["shape (N x P x R)", "implementation", "forward ms", "backward ms", "both ms"]
    head += ["executed ktok/s", "effective ktok/s", "executed TFLOP/s", "of matmul", "peak GiB"]
    head += [f"speed against {LABELS[baseline]}" for baseline in baselines]
    head += [f"memory against {LABELS[baselines[0]]}", "note"]
    body = []
    for shape in figures.shapes:
        for impl in figures.impls:
            if any(figures.all(shape, impl, direction) for direction in DIRECTIONS):
                cells = [shape, LABELS.get(impl, impl)]
                cells += [milliseconds(figures.get(shape, impl, direction, "ms")) for direction in DIRECTIONS]
                cells.append(milliseconds(figures.both_ms(shape, impl)))
                cells += [rate(figures.tokens_per_ms(shape, impl, what)) for what in TOKENS]
                cells += [number(figures.executed_tflops(shape, impl), 0), percent(figures.of_matmul(shape, impl))]
                cells.append(number(figures.peak(shape, impl), 2))
                body.append([*cells, *ratios(figures, shape, impl, baselines), figures.note(shape, impl)])
    return markdown(head, body, left=2)


def ratios(figures: LayerFigures, shape: str, impl: str, baselines: Sequence[str]) -> list[str]:
    """Speed against each of the baselines, then memory against the first."""
    speed = [times(figures.speedup(shape, impl, baseline)) for baseline in baselines]
    return [*speed, times(figures.memory_ratio(shape, impl, baselines[0]))]


def data_side(figures: LayerFigures) -> list[str]:
    """A second table: packing and unpacking against the layers of the model, host time of the attention call."""
    pairs = [(shape, impl) for shape in figures.shapes for impl in figures.impls]
    host = {
        f"host_{what}{direction}_us": f"{title}, {direction} us"
        for what, title in HOST.items()
        for direction in DIRECTIONS
        if any(figures.fact(*one, f"host_{what}{direction}_us") for one in pairs)
    }
    head = ["shape (N x P x R)", "implementation", "packing ms", "unpacking ms", "share of all layers", *host.values()]
    body = []
    for shape, impl in pairs:
        if figures.fact(shape, impl, "pack_ms") is not None:
            share = figures.data_share(shape, impl)
            cells = [milliseconds(figures.fact(shape, impl, what)) for what in ("pack_ms", "unpack_ms")]
            cells.append("" if share is None else f"{100 * share:.2f}%")
            cells += [number(figures.fact(shape, impl, what), 0) for what in host]
            body.append([shape, LABELS.get(impl, impl), *cells])
    if not body:
        return []
    text = (
        "Once per micro-batch: packing token ids (with the layout), and unpacking log-probabilities forward and "
        "backward. Host: what one call of the attention takes on the CPU, with a few groups of a few tokens."
    )
    return [text, markdown(head, body, left=2)]


def plot(result: Result, path: Path) -> None:
    """Bars of effective throughput and of peak memory per shape, as a PNG."""
    with_times = LayerFigures(row for row in result["rows"] if row["ms"])
    figures = LayerFigures(result["rows"])

    def draw(axes: Any, _: Figures, impls: list[str]) -> None:
        def throughput(shape: str, impl: str) -> float | None:
            return figures.tokens_per_ms(shape, impl, "replicated_tokens")

        bars(axes[0], figures, impls, throughput, "effective thousand tokens/s")
        bars(axes[1], figures, impls, figures.peak, "peak memory, GiB")

    two_panels(result, path, draw, with_times.impls)


def section(gpu: str, runs: Runs, folder: Path) -> str:
    """The README's part on one GPU: the layer's times and memory, and their ratios to the baselines."""
    parts = [
        "One Qwen3-8B decoder layer, forward and backward, plain PyTorch around the attention.",
        introduction(gpu, runs),
        "Milliseconds (thousand tokens/s executed / effective; peak GiB). Effective throughput counts the tokens of "
        "the replicated batch for every implementation.",
        *comparison(runs, BASELINES),
        links(runs, folder),
    ]
    return "\n\n".join(parts)


def comparison(runs: Runs, baselines: Sequence[str]) -> list[str]:
    """Two tables over all runs, smaller models and longer prompts further down.

    The first has a cell per implementation, the second this library's ratios.
    """
    rows = [row for _, result in runs for row in result["rows"]]
    figures = LayerFigures(sorted(rows, key=lambda row: (-row["hidden"], row["p"], row["n"])))
    ours = [impl for impl in figures.impls if is_ours({"impl": impl})]
    head = ["N x P x R", *(LABELS.get(impl, impl) for impl in figures.impls)]
    cells = [[shape, *(cell(figures, shape, impl) for impl in figures.impls)] for shape in figures.shapes]
    ratio_head = ["N x P x R", "implementation", *(f"speed against {LABELS[baseline]}" for baseline in baselines)]
    body = [
        [shape, LABELS.get(impl, impl), *ratios(figures, shape, impl, baselines)]
        for shape in figures.shapes
        for impl in ours
        if any(ratios(figures, shape, impl, baselines))
    ]
    in_pieces = any(row["ms"] and is_in_pieces(row, row["executed_tokens"]) for row in rows)
    joined = (
        "FlashAttention-2 takes 2^31 and more elements of Q in several calls: their joined outputs are in its peak."
    )
    return [
        *([joined] if in_pieces else []),
        markdown(head, cells),
        markdown([*ratio_head, f"memory against {LABELS[baselines[0]]}"], body, left=2),
    ]


def cell(figures: LayerFigures, shape: str, impl: str) -> str:
    ms = figures.both_ms(shape, impl)
    if ms is None:
        return figures.reason(shape, impl)
    executed, effective = (rate(figures.tokens_per_ms(shape, impl, what)) for what in TOKENS)
    return f"{milliseconds(ms)} ({executed} / {effective}; {number(figures.peak(shape, impl), 1)})"
