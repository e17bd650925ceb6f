"""What is measured of verl: presets of a model, a batch and settings of verl, and the cases that they make."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

from verl_cases import Case
from verl_inputs import Batch, Model

QWEN3 = {
    "Qwen3-0.6B": Model("qwen3", 28, 1024, 3072, 16, 8, 128, 151936, True),
    "Qwen3-1.7B": Model("qwen3", 28, 2048, 6144, 16, 8, 128, 151936, True),
    "Qwen3-8B": Model("qwen3", 36, 4096, 12288, 32, 8, 128, 151936, False),
    "Qwen3-30B-A3B, 12 layers": Model("qwen3_moe", 12, 2048, 768, 32, 4, 128, 151936, False, 128, 8),
    "tiny": Model(),
}
PAPER = Batch(prompts=1, responses=32, prompt_tokens=8192, response_tokens=2048, shortest=0.5)


class Setting(NamedTuple):
    """Of verl: the plug-in or not, micro-batches of so many sequences or tokens, ranks of Ulysses, precision, head."""

    shares: bool
    micro: int | None = None
    tokens: int | None = None
    sp: int = 1
    fp32: bool = False  # padded, on PyTorch's attention: what bf16 is compared with
    head: str | None = None  # fused: torch or triton

    @property
    def title(self) -> str:
        how = f"micro {self.micro}" if self.micro else f"tokens {self.tokens}"
        how += " in fp32" if self.fp32 else ""
        how += f", {self.head} head" if self.head else ""
        return f"{WHO[self.shares]}/{how}/SP {self.sp}"

    @property
    def overrides(self) -> tuple[str, ...]:
        model = "actor_rollout_ref.model"
        head = (f"{model}.use_fused_kernels=True", f"{model}.fused_kernel_options.impl_backend={self.head}")
        return (*DAPO, *(FP32 if self.fp32 else ()), *(head if self.head else ()))


WHO = ("verl", "plug-in")
OWN, PLUGIN = partial(Setting, False), partial(Setting, True)
TOKENS = 40960
# Prompts are those of one GPU.
PRESETS: dict[str, tuple[str, Batch, list[Setting]]] = {
    "paper": (
        "Qwen3-1.7B",
        PAPER,
        [OWN(4), OWN(8), OWN(None, TOKENS), PLUGIN(4), PLUGIN(8), PLUGIN(None, TOKENS)],
    ),
    "paper-8b": ("Qwen3-8B", PAPER, [OWN(4), OWN(None, TOKENS), PLUGIN(4), PLUGIN(8), PLUGIN(None, TOKENS)]),
    "math-1k": (
        "Qwen3-1.7B",
        Batch(prompts=2, responses=16, prompt_tokens=1024, response_tokens=4096, shortest=0.25),
        [OWN(None, 32768), PLUGIN(None, 32768)],
    ),
    "math-300": (
        "Qwen3-1.7B",
        Batch(prompts=2, responses=16, prompt_tokens=300, response_tokens=4096, shortest=0.25),
        [OWN(None, 32768), PLUGIN(None, 32768)],
    ),
    "moe": (
        "Qwen3-30B-A3B, 12 layers",
        PAPER,
        [OWN(None, TOKENS), OWN(None, TOKENS, 2), PLUGIN(None, TOKENS), PLUGIN(None, TOKENS, 2)],
    ),
    "ulysses": ("Qwen3-1.7B", PAPER, [OWN(None, 20480, 2), PLUGIN(None, 20480, 2)]),
    "memory": ("Qwen3-1.7B", PAPER, [OWN(32), PLUGIN(32)]),
    "fused": (
        "Qwen3-0.6B",
        Batch(prompts=1, responses=16, prompt_tokens=2048, response_tokens=512, shortest=0.5),
        [OWN(4), OWN(4, head="triton"), PLUGIN(4, head="triton"), PLUGIN(16, head="triton")],
    ),
    "steps": (
        "Qwen3-0.6B",
        Batch(prompts=1, responses=16, prompt_tokens=2048, response_tokens=512, shortest=0.5),
        [OWN(4), OWN(8), PLUGIN(8)],
    ),
    "accuracy": (
        "Qwen3-0.6B",
        Batch(prompts=1, responses=16, prompt_tokens=2048, response_tokens=512, shortest=0.5),
        [OWN(2, fp32=True), OWN(4), OWN(8), PLUGIN(4), PLUGIN(8)],
    ),
    "tiny": ("tiny", Batch(), [OWN(4, fp32=True), OWN(None, 200), OWN(4), PLUGIN(None, 200), PLUGIN(4)]),
}
STEPS = {"steps": 20}
# Models whose calls take long: a few samples of each rank warm up, calls run once, and one worker, whose weights stay
# as they are, runs all micro-batches.
LARGE = ("paper-8b", "moe")
ACTOR = "actor_rollout_ref.actor"
FP32 = (
    *(f"+{ACTOR}.fsdp_config.mixed_precision.{name}_dtype=fp32" for name in ("param", "reduce", "buffer")),
    "actor_rollout_ref.model.use_remove_padding=False",
)
NOT_COMPILED = (f"{ACTOR}.fsdp_config.use_torch_compile=False",)
DAPO = (f"{ACTOR}.clip_ratio_high=0.28", f"{ACTOR}.loss_agg_mode=token-mean")


def cases_of(preset: str, gpus: int, is_cpu: bool, updates: int) -> list[Case]:
    """verl's own first: a process that has loaded the plug-in never runs them again."""
    model, batch, configurations = PRESETS[preset]
    found = []
    for setting in sorted(configurations, key=lambda one: one.shares):
        if gpus % setting.sp:
            continue
        found.append(
            Case(
                f"{preset}/{setting.title}",
                shares=setting.shares,
                model=QWEN3[model],
                batch=replace(batch, prompts=batch.prompts * gpus),
                micro=setting.micro,
                tokens=setting.tokens,
                sp=setting.sp,
                attention="sdpa" if setting.fp32 else "flash_attention_2",
                balance="groups" if setting.shares else "lengths",
                overrides=(*setting.overrides, *(NOT_COMPILED if is_cpu else ())),
                updates=1 if preset in LARGE else STEPS.get(preset, updates),
                inferences=1 if preset in LARGE else 2,
                infers_at_the_end=False,
                learning_rate=0.0 if preset in LARGE else 1e-6,
                warm=(setting.micro or 4) if preset in LARGE else 0,
                keeps_worker=preset in LARGE,
            )
        )
    return found
