# SPDX-License-Identifier: BSD-3-Clause
"""All adapter kinds of the installed PEFT on tiny models, with weights as after training."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import models_page
import pytest
import torch
from sweep import Verdict, switched, verdict_of
from tiny_models import Samples, tiny_model

peft = pytest.importorskip("peft", reason="needs peft")
mapping = pytest.importorskip("peft.mapping")

SAMPLES = Samples.random([(9, [5, 7]), (4, [6])]).take([0, 2, 1])
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Options = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Kind:
    """An adapter: its type in PEFT, its options, and the model that it is put on."""

    peft_type: str
    options: Options = dataclasses.field(default_factory=dict)
    base: str = "qwen3"
    base_options: Options = dataclasses.field(default_factory=dict)
    # How adapters are made that are not a configuration alone: from the base model and a folder.
    make: Callable[[Any, Path], Any] | None = None


def _two_adapters(base: Any, folder: Path) -> list[str]:
    """The folders of two saved LoRA adapters."""
    paths = [str(folder / name) for name in "ab"]
    for path in paths:
        config = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=TARGETS, init_lora_weights=False)
        peft.get_peft_model(tiny_model(base.config.model_type, dtype=torch.float32), config).save_pretrained(path)
    return paths


def _arrow(base: Any, folder: Path) -> Any:
    paths = _two_adapters(base, folder)
    model = peft.create_arrow_model(base, paths, peft.ArrowConfig(top_k=1))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model


def _xlora(base: Any, folder: Path) -> Any:
    adapters = dict(zip("01", _two_adapters(base, folder)))
    options = dict(hidden_size=32, xlora_depth=1, adapters=adapters)
    return peft.get_peft_model(base, peft.XLoraConfig(task_type="CAUSAL_LM", **options))


# Those that need no options of their own, by the names that users know.
PLAIN_KINDS = (
    "Cartridge", "DeLoRA", "GLoRA", "HiRA", "Lily", "LoHa", "LoKr", "MiSS", "PEANuT", "Prefix tuning",
    "Prompt tuning", "PSOFT", "PVeRA", "RandLoRA", "SHiRA", "SuperTuning", "TinyLoRA", "UniLoRA", "VeRA",
)  # fmt: skip
# By those names, too. Kinds of PEFT that are not here are tried with the options that most of them
# have.
KINDS: dict[str, Kind] = {
    **{name: Kind(name.upper().replace(" ", "_")) for name in PLAIN_KINDS},
    "LoRA": Kind("LORA"),
    "LoRA of embedding and head": Kind("LORA", dict(target_modules=["embed_tokens", "q_proj", "lm_head"])),
    "LoRA with biases": Kind("LORA", dict(lora_bias=True)),
    "LoRA with modules_to_save": Kind("LORA", dict(modules_to_save=["embed_tokens", "lm_head"])),
    "LoRA with trainable tokens": Kind("LORA", dict(trainable_token_indices=[5, 6, 7, 8, 9, 10, 11])),
    "LoRA of experts": Kind(
        "LORA",
        dict(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
        "qwen3_moe",
    ),
    "LoRA with layer_replication": Kind("LORA", dict(layer_replication=[[0, 2], [1, 2]]), "llama"),
    "LoRA with lora_dropout": Kind("LORA", dict(lora_dropout=0.5)),
    "DoRA": Kind("LORA", dict(use_dora=True)),
    "QALoRA": Kind("LORA", dict(use_qalora=True, qalora_group_size=8)),
    "BD-LoRA": Kind(
        "LORA",
        dict(use_bdlora=dict(target_modules_bd_a=TARGETS[:3], target_modules_bd_b=["o_proj"], nblocks=2),
             target_modules=TARGETS[:4]),
    ),
    "KaSA": Kind("LORA", dict(kasa_config={})),
    "MiCA": Kind("LORA", dict(init_lora_weights="mica")),
    "Arrow": Kind("LORA", make=_arrow),
    "aLoRA": Kind("LORA", dict(alora_invocation_tokens=[SAMPLES.prompts[0][3]])),
    "MonteCLoRA": Kind("LORA", dict(monteclora_config=dict(num_samples=4))),
    "VeLoRA": Kind("LORA", dict(velora_config=dict(init_type="random", num_groups=4))),
    "VeLoRA with batch_average": Kind("LORA", dict(velora_config=dict(init_type="batch_average", num_groups=4))),
    "VeLoRA with batch_average_once": Kind(
        "LORA", dict(velora_config=dict(init_type="batch_average_once", num_groups=4))
    ),
    "X-LoRA": Kind("XLORA", base="llama", base_options=dict(use_cache=False), make=_xlora),
    "AdaLoRA": Kind("ADALORA", dict(init_r=4, target_r=2, total_step=100, tinit=5, tfinal=5)),
    "AdaMSS": Kind("ADAMSS", dict(num_subspaces=2, subspace_rank=2)),
    "Adaption prompt": Kind(
        "ADAPTION_PROMPT", dict(adapter_len=3, adapter_layers=2, target_modules=None), "llama"
    ),
    "BOFT": Kind("BOFT", dict(boft_block_size=4)),
    "BOFT with boft_dropout": Kind("BOFT", dict(boft_block_size=4, boft_dropout=0.5)),
    "C3A": Kind("C3A", dict(block_size=8)),
    "CPT": Kind("CPT", dict(cpt_token_ids=[3, 4, 5], cpt_mask=[1] * 3, cpt_tokens_type_mask=[1] * 3)),
    "DeLoRA with module_dropout": Kind("DELORA", dict(module_dropout=0.5)),
    "FourierFT": Kind("FOURIERFT", dict(n_frequency=20)),
    "FRoD": Kind("FROD", dict(progressbar=False)),
    "GraLoRA": Kind("GRALORA", dict(gralora_k=2, hybrid_r=2)),
    "IA3": Kind("IA3", dict(feedforward_modules=["down_proj"])),
    "LN tuning": Kind("LN_TUNING", dict(target_modules=["input_layernorm", "norm"])),
    "LoHa with rank_dropout": Kind("LOHA", dict(rank_dropout=0.5)),
    "LoKr with module_dropout": Kind("LOKR", dict(module_dropout=0.5)),
    "MiSS (bat)": Kind("MISS", dict(init_weights="bat")),
    "Multitask prompt tuning": Kind("MULTITASK_PROMPT_TUNING", dict(num_tasks=2)),
    "OFT": Kind("OFT", dict(r=0, oft_block_size=4)),
    "OFT with module_dropout": Kind("OFT", dict(r=0, oft_block_size=4, module_dropout=0.5)),
    "OSF": Kind("OSF", dict(effective_rank=4)),
    "P-tuning": Kind("P_TUNING", dict(encoder_hidden_size=16)),
    "Poly": Kind("POLY", dict(n_tasks=2)),
    "RoAd": Kind("ROAD", dict(group_size=8)),
    "Shadow": Kind("SHADOW", dict(target_modules=None, shadow_dropout=0.0)),
    "Trainable tokens": Kind(
        "TRAINABLE_TOKENS", dict(target_modules=["embed_tokens"], token_indices=[5, 6, 7, 8, 9, 10, 11])
    ),
    "VB-LoRA": Kind("VBLORA", dict(num_vectors=8, vector_length=8, topk=2)),
    "WaveFT": Kind("WAVEFT", dict(n_frequency=20)),
}  # fmt: skip
_KNOWN = {kind.peft_type for kind in KINDS.values()}
KINDS.update({str(one.value): Kind(str(one.value)) for one in mapping.PEFT_TYPE_TO_CONFIG_MAPPING if one not in _KNOWN})
EXACT = models_page.exact(models_page.ADAPTERS)


def configuration(kind: Kind) -> Any:
    """A configuration with the options of a kind, and those that are common to most where it has such fields."""
    made = mapping.PEFT_TYPE_TO_CONFIG_MAPPING[kind.peft_type]
    fields = {field.name for field in dataclasses.fields(made)}
    common = dict(task_type="CAUSAL_LM", r=4, target_modules=TARGETS, num_virtual_tokens=3)
    if "cpt_token_ids" in kind.options:
        del common["num_virtual_tokens"]
    options = {name: value for name, value in common.items() if name in fields} | kind.options
    return made(**{name: value for name, value in options.items() if value is not None})


def base_of(kind: Kind) -> Any:
    """The model that a kind is put on, in float32."""
    model = tiny_model(kind.base, dtype=torch.float32, **kind.base_options)
    with contextlib.suppress(Exception):  # an older version, or a model that has no such choice
        model.set_experts_implementation("eager")
    return model


def adapter_verdict(name: str) -> Verdict:
    """In training mode."""
    return verdict_of(adapted(KINDS[name]).train(), SAMPLES, switched)


def adapted(kind: Kind, *, seed: int = 3) -> Any:
    """A model with an adapter whose trainable weights are not those that do nothing; or a skip, where it is not made.

    Some kinds must be made in float32; the model stays in that.
    """
    base = base_of(kind)
    try:
        with torch.random.fork_rng(), tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(seed)
            model = kind.make(base, Path(folder)) if kind.make else peft.get_peft_model(base, configuration(kind))
            shift(model)
    except Exception as error:
        pytest.skip(f"cannot be made: {type(error).__name__}: {error}")
    return model


def shift(model: Any) -> None:
    """Add something to all trainable weights, for adapters begin with zeros that do nothing."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn_like(parameter))
