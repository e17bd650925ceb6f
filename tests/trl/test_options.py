# SPDX-License-Identifier: BSD-3-Clause
"""What trainers share in integrations/common: options as text, reasons, counts, verification."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import run_ranks

pytest.importorskip("transformers")

from flash_attn_dualkv.errors import SharedPromptError
from flash_attn_dualkv.integrations.common import pipeline
from flash_attn_dualkv.integrations.common.options import REASONS, Options
from flash_attn_dualkv.parallel.agreement import all_ranks, largest_of_ranks

FOLDER = Path(pipeline.__file__).parents[1]


@pytest.mark.parametrize(
    ("settings", "environment", "expected"),
    [
        ({}, {}, Options()),
        ({"shared_prompt": "off", "learning_rate": 1}, {}, Options(enabled=False)),
        ({"shared_prompt_min_dedup_ratio": "1.5"}, {}, Options(min_dedup_ratio=1.5)),
        ({}, {"MIN_SHARED": "4", "SELF_CHECK": "0"}, Options(min_shared=4, self_check=False)),
        ({"shared_prompt_min_shared": "16"}, {"MIN_SHARED": ""}, Options(min_shared=16)),
        ({"shared_prompt_min_shared": ""}, {"MIN_SHARED": "4"}, Options(min_shared=None)),
        ({"shared_prompt_enabled": True}, {"ENABLED": "0"}, Options()),
        ({"shared_prompt_share_lora_dropout": "true"}, {}, Options(share_lora_dropout=True)),
        ({"shared_prompt_prompt_once": "auto"}, {"PROMPT_ONCE": "1"}, Options()),
        ({"shared_prompt_prompt_once": False}, {"PROMPT_ONCE": "1"}, Options(prompt_once=False)),
        ({}, {"PROMPT_ONCE": "1"}, Options(prompt_once=True)),
    ],
)
def test_options_as_text(settings: Any, environment: Any, expected: Options, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(f"DUALKV_VERL_{name}", value)
    assert Options.of(settings) == expected


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("min_dedup_ratio", "much", "a float > 0, got 'much'"),
        ("min_dedup_ratio", "inf", "a finite number > 0, got inf"),
        ("min_shared", "2.5", "an int >= 1, got '2.5'"),
        ("max_responses_per_group", "2", "None: a micro-batch's budget of tokens divides groups, got 2"),
        ("verify_first_steps", -1, "an int >= 0, got -1"),
        ("self_check", 1, "a bool, got 1"),
        ("min_shared", 0, "an int >= 1, got 0"),
        ("prompt_once", 1, "a bool, got 1"),
    ],
)
def test_wrong_options(option: str, value: Any, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=f"override_config.shared_prompt_{option}: expected {message}"):
        Options.of({f"shared_prompt_{option}": value})
    if not isinstance(value, str):
        with pytest.raises(SharedPromptError, match=f"^mine: expected {message}"):
            Options.checked({option: ("mine", value)})
    with pytest.raises(ValueError, match="override_config: expected one of .*, got shared_prompt_mode"):
        Options.of({"shared_prompt_mode": 1})
    with pytest.raises(
        ValueError, match="^override_config.shared_prompt_share_lora_dropout: expected False with verify"
    ):
        Options.of({"shared_prompt_share_lora_dropout": True, "shared_prompt_verify_first_steps": 2})
    monkeypatch.setenv("DUALKV_VERL_VERIFY_FIRST_STEPS", "all")
    with pytest.raises(ValueError, match="the environment's DUALKV_VERL_VERIFY_FIRST_STEPS: expected an int >= 0"):
        Options.of({})


@pytest.mark.parametrize("variable", ["DUALKV_VERL", "DUALKV_VERL_MIN_RATIO"])
def test_unknown_options_of_the_environment(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "0")
    with pytest.raises(ValueError, match=f"the environment: expected one of .*_MIN_SHARED, .*, got {variable}$"):
        Options.of({})


def _given_reasons(path: Path) -> set[str]:
    """First arguments of Refused and Refusal, and words that functions on reasons return or compare with."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("Refused", "Refusal") and node.args:
            found |= {one.value for one in ast.walk(node.args[0]) if isinstance(one, ast.Constant)}
        elif isinstance(node, ast.FunctionDef) and node.name in ("why_not", "_why_not", "_plan_of"):
            returned = [one.value for one in ast.walk(node) if isinstance(one, ast.Return) and one.value is not None]
            parts = [one for value in returned for one in (value, getattr(value, "orelse", None))]
            found |= {one.value for one in parts if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    return found


@pytest.mark.parametrize("folder", ["integrations/trl", "integrations/verl", "integrations/common", "contrib"])
def test_every_reason_that_is_given_is_counted(folder: str) -> None:
    """One that is not in the table would be missing from the trainer's metrics."""
    given = set().union(*map(_given_reasons, (FOLDER.parent / folder).glob("*.py")))
    assert len(given) > 1
    assert given <= set(REASONS)


def test_a_verification_ends_with_its_calls_or_a_difference() -> None:
    due = pipeline.Verification(2, "train", "infer")
    assert [due.is_due("train") for _ in range(3)] == [True, True, False]
    assert due.is_due("infer")
    due.has_failed = True
    assert not due.is_due("infer")


def test_a_call_that_could_not_be_compared_is_made_up_for() -> None:
    """So many times and no more: some runs have no finite gradients at all."""
    due = pipeline.Verification(1, "train", "infer")
    calls = 0
    while due.is_due("train"):
        calls += 1
        due.repeat("train")
    assert calls == 1 + pipeline._MOST_REPEATS
    assert due.is_due("infer") and not due.is_due("infer")


def test_differences() -> None:
    shared, stock = torch.tensor([1.0, 2.0, 5.0]), torch.tensor([1.0, 1.0, 1.0])
    assert pipeline.difference(shared, stock).tolist() == pytest.approx([4.0, 5 / 3])
    assert pipeline.difference(shared, stock, 2).tolist() == [4.0, 2.5]
    assert pipeline.difference(shared[:0], stock[:0]).tolist() == [0.0, 0.0]
    assert largest_of_ranks([math.nan, 0.5], all_ranks()) == [math.inf, 0.5]


def _worst(rank: int, results: Any) -> None:
    results[rank] = largest_of_ranks([float(rank), 2.0 - rank], all_ranks())


def test_ranks_take_the_worst_of_all() -> None:
    """What one of them alone finds switches all of them off."""
    assert run_ranks(_worst, 2) == {0: [1.0, 2.0], 1: [1.0, 2.0]}


def test_counts() -> None:
    tally = pipeline.Tally()
    tally.add(torch.tensor(30), torch.tensor(10))
    tally.add(5, 5, "dtype")
    assert (tally.calls, int(tally.replicated), int(tally.tokens), dict(tally.fallbacks)) == (2, 35, 15, {"dtype": 1})
    assert pipeline.savings(35, 15) == {"dedup_ratio": 35 / 15, "tokens_saved": 20}
    assert pipeline.savings(0, 0)["dedup_ratio"] == 1.0
