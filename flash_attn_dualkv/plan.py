# SPDX-License-Identifier: BSD-3-Clause
"""Which kernels a call runs, and why: what csrc/core/plan.h decides, in words and as fields."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from . import checks, kernels
from .calls import make_options
from .layout import SharedPromptLayout


class Choice(NamedTuple):
    """One line of a plan: what was chosen, and the numbers that decided."""

    name: str
    value: str
    why: str


@dataclass(frozen=True)
class KernelPlan:
    """A kernel and its tiles.

    Attributes:
        launch: its name among the launches that profilers show and the library counts.
        block_m, block_n: rows of a query tile and of a KV tile.
        heads: query heads that share a query tile.
    """

    launch: str
    block_m: int
    block_n: int
    heads: int


@dataclass(frozen=True)
class Plan:
    """The kernels that a call runs. `str()` prints every choice with its reason.

    Attributes:
        gpu: the row of the table of thresholds that was taken, such as "h200".
        family: of the kernels, "sm80" or "sm90".
        forward: O and LSE.
        backward: dK and dV, and dQ unless it has a kernel of its own.
        dq_sums: how dQ is made: "summed in any order" or "summed in a fixed order" beside dK and dV, or "own kernel".
        dq: the kernel that makes only dQ; None where it is summed.
        split_parts: the most parts, over all KV heads, that long KV tiles are split into.
        choices: all of these with their reasons.
    """

    gpu: str
    family: str
    forward: KernelPlan
    backward: KernelPlan
    dq_sums: str
    dq: KernelPlan | None
    split_parts: int
    choices: tuple[Choice, ...]

    @classmethod
    def of(cls, lines: Iterable[tuple[str, str, str]]) -> Plan:
        """The plan of the library's lines."""
        choices = tuple(Choice(*line) for line in lines)
        found = {choice.name: choice.value for choice in choices}

        def kernel(direction: str) -> KernelPlan:
            block_m, block_n = map(int, found[f"{direction} tiles"].split(" x "))
            return KernelPlan(found[f"{direction} kernel"], block_m, block_n, int(found[f"{direction} heads"]))

        return cls(
            gpu=found["gpu"],
            family=found["family"],
            forward=kernel("forward"),
            backward=kernel("backward"),
            dq_sums=found["dq"],
            dq=kernel("dq") if "dq kernel" in found else None,
            split_parts=int(found["split parts"]),
            choices=choices,
        )

    def __str__(self) -> str:
        names, values = (max(len(choice[column]) for choice in self.choices) for column in (0, 1))
        return "\n".join(f"{name:{names}}  {value:{values}}  {why}".rstrip() for name, value, why in self.choices)


def explain_plan(
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    head_dim_v: int | None = None,
    rows: int | None = None,
    nodes: int | None = None,
    mean_keys: int | None = None,
    layout: SharedPromptLayout | None = None,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
    gpu: str | None = None,
) -> Plan:
    """Which kernels a call of these shapes runs, and why. Nothing is launched.

    Args:
        num_heads, num_kv_heads: heads of q, and of k and v.
        head_dim, head_dim_v: head dim of q and k, and of v where that is another.
        rows: of the packed tensors.
        nodes: prompts, responses, turns or sequences of the packed tensors; one unless given.
        mean_keys: how many rows of its path a row sees on average, without its window; unless given the number of rows,
            as for flash_attn_tree_varlen_func.
        layout: gives `rows`, `nodes` and `mean_keys` instead.
        window_size, softcap, deterministic: as for the attention functions.
        gpu: a card of the table of thresholds, "h200", "h100" or "a100"; unless given what the environment variable
            DUALKV_GPU names, or else the current device.

    Raises:
        TypeError, ValueError: an argument is not as described, or no kernel of this build serves the head dims.
        RuntimeError: this installation has no kernels, or there is no GPU and none is named.
    """
    if layout is not None:
        for name, value in (("rows", rows), ("nodes", nodes), ("mean_keys", mean_keys)):
            if value is not None:
                raise ValueError(checks.explain(name, "None beside layout", value))
        rows, nodes, mean_keys = layout.num_tokens, layout.nodes.shape[0], layout.mean_keys
    elif rows is None:
        raise ValueError(checks.explain("rows", "a number of rows, or layout", None))
    nodes = 1 if nodes is None else nodes
    mean_keys = rows if mean_keys is None else mean_keys
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "head_dim_v": head_dim_v}
    for name, value in (sizes | {"rows": rows, "nodes": nodes, "mean_keys": mean_keys}).items():
        checks.integer(name, value, 0 if name == "mean_keys" else 1, checks.MAX_ROWS)
    if num_heads % num_kv_heads:
        raise ValueError(checks.explain("num_kv_heads", f"a number that divides {num_heads}", num_kv_heads))
    for name in ("head_dim", "head_dim_v"):
        if sizes[name] % 8:
            raise ValueError(checks.explain(name, "a multiple of 8", sizes[name]))
    _, window = checks.resolve_window(True, window_size)
    if gpu is not None and not isinstance(gpu, str):
        raise TypeError(checks.explain("gpu", "the name of a card, or None", type(gpu).__name__))
    kernels.compiled_module()
    if gpu is None and not os.environ.get("DUALKV_GPU") and not torch.cuda.is_available():
        raise RuntimeError(checks.explain("gpu", "the name of a card on a machine without a GPU", None))
    options = make_options(
        head_dim=head_dim, causal=True, window_left=window, softcap=softcap, mean_keys=mean_keys,
        deterministic=deterministic,
    )  # fmt: skip
    return Plan.of(kernels.explain_plan((*sizes.values(), rows, nodes), options, gpu))
