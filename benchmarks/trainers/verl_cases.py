# SPDX-License-Identifier: BSD-3-Clause
"""What is run in verl, and what comes of it: a case is a configuration of verl with its model and batch.

Presets are what is measured: a model, a batch and settings of verl, and the cases that they make.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
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
        learning_rate: at 0 weights stay as they are, and the next case has the same worker if it differs in
            micro-batches only.
        warm: calls of so many of each rank's samples come before those that are recorded.
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
    updates: int = 3
    minis: int = 1  # optimizer steps an update
    learning_rate: float = 1e-3
    inferences: int = 1
    infers_at_the_end: bool = True
    warm: int = 0

    @property
    def worker(self) -> Case:
        """Without what a worker can change."""
        return replace(self, name="", micro=None, tokens=None, warm=0)


@dataclass
class Found:
    """What comes of one case: values by sample in the batch's order, metrics and times of the slowest rank."""

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


# --- presets ---------------------------------------------------------------------------------------------------------

QWEN3 = {
    "Qwen3-0.6B": Model("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, True),
    "Qwen3-1.7B": Model("qwen3", 28, 2048, 6144, 16, 8, 128, 151936, True),
    "Qwen3-8B": Model("qwen3", 36, 4096, 12288, 32, 8, 128, 151936, False),
    "Qwen3-30B-A3B, 12 layers": Model("qwen3_moe", 12, 2048, 768, 32, 4, 128, 151936, False, 128, 8),
    "tiny": Model(),
}
PAPER = Batch(prompts=1, responses=32, prompt_tokens=8192, response_tokens=2048, shortest=0.5)


WHO = ("verl", "plug-in")
ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
FP32 = (
    *(f"+{ACTOR}.fsdp_config.mixed_precision.{name}_dtype=fp32" for name in ("param", "reduce", "buffer")),
    f"{MODEL}.use_remove_padding=False",
)
NOT_COMPILED = (f"{ACTOR}.fsdp_config.use_torch_compile=False",)
DAPO = (f"{ACTOR}.clip_ratio_high=0.28", f"{ACTOR}.loss_agg_mode=token-mean")


def setting(
    shares: bool,
    micro: int | None = None,
    tokens: int | None = None,
    sp: int = 1,
    fp32: bool = False,
    head: str | None = None,
) -> Case:
    """The plug-in or not, micro-batches of so many sequences or tokens, ranks of Ulysses, precision, fused head.

    `fp32` is padded, on PyTorch's attention: what bf16 is compared with. `head`: torch or triton.
    """
    how = f"micro {micro}" if micro else f"tokens {tokens}"
    how += (" in fp32" if fp32 else "") + (f", {head} head" if head else "")
    fused = (f"{MODEL}.use_fused_kernels=True", f"{MODEL}.fused_kernel_options.impl_backend={head}")
    return Case(
        f"{WHO[shares]}/{how}/SP {sp}",
        shares=shares,
        micro=micro,
        tokens=tokens,
        sp=sp,
        attention="sdpa" if fp32 else "flash_attention_2",
        balance="groups" if shares else "lengths",
        overrides=(*DAPO, *(FP32 if fp32 else ()), *(fused if head else ())),
        infers_at_the_end=False,
    )


OWN, PLUGIN = partial(setting, False), partial(setting, True)
TOKENS = 40960
SHORT = Batch(prompts=1, responses=16, prompt_tokens=2048, response_tokens=512, shortest=0.5)
MATH = Batch(prompts=2, responses=16, prompt_tokens=1024, response_tokens=4096, shortest=0.25)
BUDGET = [OWN(None, TOKENS), PLUGIN(None, TOKENS)]
MATH_BUDGET = [OWN(None, 32768), PLUGIN(None, 32768)]
# Prompts are those of one GPU.
PRESETS: dict[str, tuple[str, Batch, list[Case]]] = {
    "paper": ("Qwen3-1.7B", PAPER, [OWN(4), OWN(8), PLUGIN(4), PLUGIN(8), *BUDGET]),
    "paper-8b": ("Qwen3-8B", PAPER, [OWN(4), PLUGIN(4), PLUGIN(8), *BUDGET]),
    "math-1k": ("Qwen3-1.7B", MATH, MATH_BUDGET),
    "math-300": ("Qwen3-1.7B", replace(MATH, prompt_tokens=300), MATH_BUDGET),
    "moe": ("Qwen3-30B-A3B, 12 layers", PAPER, [*BUDGET, OWN(None, TOKENS, 2), PLUGIN(None, TOKENS, 2)]),
    "ulysses": ("Qwen3-1.7B", PAPER, [OWN(None, 20480, 2), PLUGIN(None, 20480, 2)]),
    "memory": ("Qwen3-1.7B", PAPER, [OWN(32), PLUGIN(32)]),
    "fused": (
        "Qwen3-0.6B",
        SHORT,
        [OWN(4), *(one(4, head="triton") for one in (OWN, PLUGIN)), PLUGIN(16, head="triton")],
    ),
    "steps": ("Qwen3-0.6B", SHORT, [OWN(4), OWN(8), PLUGIN(8)]),
    "accuracy": ("Qwen3-0.6B", SHORT, [OWN(2, fp32=True), OWN(4), OWN(8), PLUGIN(4), PLUGIN(8)]),
    "tiny": ("tiny", Batch(), [OWN(4, fp32=True), OWN(None, 200), OWN(4), PLUGIN(None, 200), PLUGIN(4)]),
}
STEPS = {"steps": 20}
# Models whose calls take long: a few samples of each rank warm up, calls run once, and one worker, whose weights stay
# as they are, runs all micro-batches.
LARGE = ("paper-8b", "moe")


def cases_of(preset: str, gpus: int, is_cpu: bool) -> list[Case]:
    """verl's own first: a process that has loaded the plug-in never runs them again."""
    model, batch, settings = PRESETS[preset]
    how: dict[str, Any] = dict(updates=STEPS.get(preset, 2), inferences=2, learning_rate=1e-6)
    if preset in LARGE:
        how = dict(updates=1, inferences=1, learning_rate=0.0)
    return [
        replace(
            one,
            name=f"{preset}/{one.name}",
            model=QWEN3[model],
            batch=replace(batch, prompts=batch.prompts * gpus),
            overrides=(*one.overrides, *(NOT_COMPILED if is_cpu else ())),
            warm=(one.micro or 4) if preset in LARGE else 0,
            **how,
        )
        for one in sorted(settings, key=lambda one: one.shares)
        if gpus % one.sp == 0
    ]
