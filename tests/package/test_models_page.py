"""docs/models.md: read as it is written, and not behind what the tests hold."""

from __future__ import annotations

import re

import models_page
import pytest
from models_page import ADAPTERS, CAUSAL_LMS, MULTIMODAL, Result, parse, render

MIXES = "layer_types: expected layers that are exact (full ones, or others), got"
TABLES: dict[str, dict[str, Result]] = {
    CAUSAL_LMS: {
        "llama": Result("exact"),
        "bert-generation": Result("exact"),
        "mamba": Result("refused", f"{MIXES} linear_attention (mamba)"),
        "jamba": Result("refused", f"{MIXES} linear_attention, mamba (jamba)"),
        "opt": Result("refused", "model: expected a backbone that is called once, got 0 calls"),
        "gpt2": Result("stock", "RuntimeError: sizes"),
        "blt": Result("untried"),
    },
    MULTIMODAL: {"gemma3": Result("exact")},
    ADAPTERS: {
        **{f"LoRA with option {number}": Result("exact") for number in range(40)},  # more than a line
        "MiSS (bat)": Result("exact"),
        "Lily": Result("refused", "PEFT adapter 'default': expected one, got peft_type=LILY (its router | mean). Do x"),
    },
}


@pytest.mark.parametrize("title", TABLES)
def test_what_is_written_is_read(title: str) -> None:
    text = render(TABLES, {"transformers": "5.24.0"})
    assert parse(text, title) == {name: result.kind for name, result in TABLES[title].items()}
    assert parse(render({}, {}), title) == {}
    counts = sum(int(number) for number in re.findall(r"^[A-Z].* \((\d+)\):", text, re.M))
    assert counts == sum(map(len, TABLES.values()))


def test_the_version_is_compared_without_its_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    found = re.search(r"transformers (\d+)\.(\d+)", models_page.PAGE.read_text(encoding="utf-8"))
    assert found is not None
    major, minor = found.groups()
    for version, expected in (
        (f"{major}.{minor}.7", True),
        (f"{major}.{minor}9.0", False),
        (f"9{major}.{minor}.0", False),
    ):
        monkeypatch.setattr(models_page, "version", lambda package, version=version: version)
        assert models_page.is_of_installed("transformers") == expected
