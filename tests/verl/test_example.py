# SPDX-License-Identifier: BSD-3-Clause
"""The example's command and the settings that docs/trainers.md and limits.md name: verl's own config knows them all."""

from __future__ import annotations

import os
import re
import subprocess
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="verl is not installed: see docs/trainers.md")

import verl
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from transformers import Qwen3Config
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils.flops_counter import FlopsCounter
from verl.workers.config import RolloutConfig

from flash_attn_dualkv.integrations.common.options import ENVIRONMENT, PREFIX, REASONS, Options
from flash_attn_dualkv.integrations.verl.statistics import Statistics
from flash_attn_dualkv.integrations.verl.verify import METRICS

ROOT = Path(__file__).resolve().parents[2]
PAGE = "".join((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("trainers.md", "limits.md"))
PYTHON = """#!/usr/bin/env bash
printf '%s\\n' "$@" > "$ARGUMENTS"
echo "of_$2"
"""


def arguments(folder: Path, *more: str, **environment: str) -> list[str]:
    """What the example gives to python."""
    (folder / "python").write_text(PYTHON)
    (folder / "python").chmod(0o755)
    path, out = f"{folder}:{os.environ['PATH']}", folder / "arguments"
    own = dict(PATH=path, ARGUMENTS=str(out), HOME="/home/somebody", **environment)
    subprocess.run([ROOT / "examples/verl_grpo.sh", *more], env=own, check=True)
    return out.read_text().splitlines()


def configuration(overrides: list[str]) -> Any:
    """verl's config; keys that it does not have are errors."""
    folder = Path(verl.__file__).parent / "trainer/config"
    with initialize_config_dir(str(folder), version_base=None):
        config = compose("ppo_trainer", overrides=overrides)
    OmegaConf.resolve(config)
    return config


def test_the_example(tmp_path: Path) -> None:
    found = arguments(tmp_path, "trainer.test_freq=7", GPUS="4", TOKENS="20000", N="32")
    assert found[:2] == ["-m", "verl.trainer.main_ppo"]
    config = configuration(found[2:])
    validate_config(config, need_reference_policy(config), need_critic(config))
    model, actor, rollout = (config.actor_rollout_ref[name] for name in ("model", "actor", "rollout"))
    ours = (model.external_lib, rollout.router_config_path, rollout.engine_kwargs.vllm.attention_backend)
    assert ours == ("flash_attn_dualkv.integrations.verl", "of_flash_attn_dualkv.integrations.verl.router", "CUSTOM")
    assert (config.trainer.n_gpus_per_node, config.trainer.test_freq, rollout.n) == (4, 7, 32)
    assert not need_critic(config) and need_reference_policy(config)
    own = configuration(arguments(tmp_path, ROUTER="", ATTENTION="")[2:]).actor_rollout_ref.rollout
    assert not omega_conf_to_dataclass(own).router_config_path and own.engine_kwargs.vllm == {}
    # One setting for the update, the old log-probabilities and the reference.
    assert actor.use_dynamic_bsz and actor.ppo_max_token_len_per_gpu == 20000
    for one in (rollout, config.actor_rollout_ref.ref):
        assert one.log_prob_use_dynamic_bsz and one.log_prob_max_token_len_per_gpu == 20000


def test_settings_of_the_page() -> None:
    settings = re.findall(r"`(\+?(?:actor_rollout_ref|critic|trainer|data|algorithm)\.[\w.]+(?:=[^`\s]*)?)`", PAGE)
    assert len(settings) > 8
    # A name alone is set to what it is.
    config = configuration([])
    given = [one for one in settings if "=" in one]
    for one in set(settings) - set(given):
        assert OmegaConf.select(config, one.lstrip("+"), default="not there") != "not there", one
    assert configuration(given)


def test_rollouts_on_this_package() -> None:
    """The line of both pages is in what verl hands to vLLM, whose version the page names."""
    line = "+actor_rollout_ref.rollout.engine_kwargs.vllm.attention_backend=CUSTOM"
    rollouts = (ROOT / "docs/rollouts.md").read_text(encoding="utf-8")
    assert f"`{line}`" in PAGE
    (command,) = re.findall(r"python -m verl.trainer.main_ppo ((?:.*\\\n)*.*) \.\.\.\n", rollouts)
    given = command.replace("\\\n", " ").split()
    assert line in given
    rollout = omega_conf_to_dataclass(configuration(given).actor_rollout_ref.rollout)
    assert isinstance(rollout, RolloutConfig) and rollout.name == "vllm"
    assert rollout.engine_kwargs["vllm"] == {"attention_backend": "CUSTOM"}
    router = "actor_rollout_ref.rollout.router_config_path=$(python -m flash_attn_dualkv.integrations.verl.router)"
    assert f"\n{router}\n" in rollouts
    (pinned,) = (one for one in requires("verl") or () if re.match(r"vllm\b", one))
    version = re.match(r"vllm==([\d.]+)", pinned)
    assert version and f"| verl {verl.__version__}, `verl[vllm]` | {version[1]} |" in rollouts, pinned


def test_the_page_has_all_options_reasons_and_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, default in Options._field_defaults.items():
        row = re.search(rf"^\| `{name}` \| (.+?) \|", PAGE, re.M)
        assert row and row[1] == f"`{default}`", name
    assert f"override_config.{PREFIX}_" in PAGE and f"{ENVIRONMENT}_" in PAGE
    for reason in REASONS:
        assert f"\n| `{reason}` |" in PAGE, reason
    monkeypatch.setattr("verl.utils.flops_counter.get_device_flops", lambda *args: 1.0)
    counted = Statistics(FlopsCounter(Qwen3Config()), 1).metrics(1.0, forward_only=False)
    for name in (*counted, *METRICS):
        assert f"`{name.removeprefix('shared_prompt/').partition('/')[0]}" in PAGE, name
