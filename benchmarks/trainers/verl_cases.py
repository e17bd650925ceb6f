"""What is run in verl, and what comes of it: a case is a configuration of verl with its model and batch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from verl_inputs import Batch, Model


@dataclass(frozen=True)
class Case:
    """One configuration of verl and what it is given.

    Attributes:
        shares: whether the plug-in is on. A process that has loaded it never runs verl's own engines again.
        micro, tokens: samples a micro-batch, or its token budget (dynamic micro-batches).
        role: actor, ref or critic.
        balance: of samples over ranks: "groups" as the plug-in does, "lengths" as verl's v1 trainer does, "none".
        trainer: v1 (jagged) or v0 (padded) form of the batch.
        overrides: of verl's config, as on its command line.
        extra: what a test puts into the batch, see `worker_input`.
        position_rows: of position ids, likewise.
        warm: calls of so many of each rank's samples come before those that are recorded.
        keeps_worker: of the case before, if the two differ in micro-batches only. Weights must stay as they are.
    """

    name: str
    shares: bool = False
    model: Model = field(default_factory=Model)
    batch: Batch = field(default_factory=Batch)
    micro: int | None = None
    tokens: int | None = None
    engine: str = "fsdp2"
    sp: int = 1
    role: str = "actor"
    balance: str = "lengths"
    trainer: str = "v1"
    attention: str = "flash_attention_2"
    overrides: tuple[str, ...] = ()
    extra: str | None = None
    position_rows: int = 1
    updates: int = 3
    minis: int = 1  # optimizer steps an update
    learning_rate: float = 1e-3
    inferences: int = 1
    infers_at_the_end: bool = True
    warm: int = 0
    keeps_worker: bool = False

    def __post_init__(self) -> None:
        if self.keeps_worker and self.learning_rate:
            raise ValueError(f"learning_rate: expected 0.0 where keeps_worker is set, got {self.learning_rate}")

    @property
    def worker(self) -> Case:
        """Without what a worker can change."""
        return replace(self, name="", micro=None, tokens=None, warm=0, keeps_worker=False)


@dataclass
class Found:
    """Of one case: values by sample in the batch's order, metrics and times of the slowest rank."""

    engine: str = ""
    tokens: int = 0
    values: list[dict[str, list[Tensor]]] = field(default_factory=list)  # before the updates and behind them
    infer_s: list[float] = field(default_factory=list)
    infer_gib: float = 0.0
    infer_metrics: list[dict[str, Any]] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)
    update_gib: float = 0.0
    metrics: list[dict[str, Any]] = field(default_factory=list)
    error: str | None = None
    left_gib: float = 0.0  # allocated when the case began: of the cases before
