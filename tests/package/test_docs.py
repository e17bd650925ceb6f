# SPDX-License-Identifier: BSD-3-Clause
"""README and docs: examples run as they stand, links lead somewhere, commands and lists say what is so."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import limits_page
import models_page
import pytest
import torch
from tiny_models import VERSION, Samples, check_equal, dualkv, replicated_logps

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
KERNELS = ROOT / "csrc/sm90/README.md"
PAGES = [README, KERNELS, *sorted((ROOT / "docs").glob("**/*.md"))]
PAGES += sorted((ROOT / "benchmarks/results").glob("**/README.md"))
MOST_LINES = 220


def blocks(page: Path, language: str) -> list[str]:
    """Fenced blocks, but for marked ones, which have tests of their own."""
    text = re.sub(r"^<!-- \w+: \w+ -->\n```\w+\n.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.S | re.M)


def run_examples(page: Path) -> dict[str, Any]:
    """All python blocks of a page, one after the other in one namespace."""
    names: dict[str, Any] = {"__name__": page.stem}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)
    return names


def test_the_readme_stays_short() -> None:
    assert len(README.read_text(encoding="utf-8").splitlines()) <= MOST_LINES


def test_the_training_example(device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Under 40 lines of code; parameters move; what it scores equals replicated prompts."""
    marked = r"^<!-- example: training -->\n```python\n(.*?)^```$"
    (source,) = re.findall(marked, README.read_text(encoding="utf-8"), re.M | re.S)
    code = [line for line in source.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert len(code) < 40
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    losses: list[float] = []
    names: dict[str, Any] = {}
    step = torch.optim.AdamW.step

    def watched_step(optimizer: torch.optim.AdamW, *args: Any) -> Any:
        losses.append(names["loss"].item())
        assert all(one.grad is not None for one in names["model"].parameters())
        return step(optimizer, *args)

    monkeypatch.setattr(torch.optim.AdamW, "step", watched_step)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        exec(compile(source, str(README), "exec"), names)
    assert names["device"] == device
    assert len(losses) == 2
    if device == "cpu":  # 16-bit parameters may swallow a step as small as these
        assert losses[1] < losses[0]
    assert "times fewer tokens" in capsys.readouterr().out

    samples = Samples([one.tolist() for one in names["prompts"]], [one.tolist() for one in names["responses"]])
    model, batch = names["model"], names["batch"]
    assert batch.layout.num_groups == 2
    with torch.no_grad():
        got, _ = dualkv.shared_prompt_forward(model, batch)
        model.set_attn_implementation("sdpa")
        expected, _ = replicated_logps(model, samples)
    check_equal(got, expected, 5e-6 if device == "cpu" else 0.05)


def test_examples_of_the_attention_function() -> None:
    names = run_examples(ROOT / "docs/attention.md")
    out, lse = names["out"], names["lse"]
    assert out.shape == (sum(names["lengths"]), names["heads"], names["head_dim"])
    assert lse.shape == (names["heads"], len(out))
    assert torch.isfinite(out).all()
    assert all(names[name].grad.abs().sum(dim=(1, 2)).all() for name in "kv")


def test_examples_of_the_training_guide(restored_registry: None) -> None:
    names = run_examples(ROOT / "docs/training.md")
    labels, logits = names["batch"].targets, names["logits"][0]
    loss = torch.nn.functional.cross_entropy(logits.float(), labels)
    assert names["loss"].item() == pytest.approx(loss.item(), rel=1e-4)


def test_examples_of_hybrid_models(restored_registry: None) -> None:
    if VERSION < (5, 17):
        pytest.skip("this transformers has no LFM2 that hands its convolutions on")
    names = run_examples(ROOT / "docs/hybrids.md")
    assert names["logps"].shape == (3,)
    assert all(one.grad is not None for one in names["model"].parameters())


def test_examples_of_images(restored_registry: None) -> None:
    if VERSION < (5, 0):
        pytest.skip("this transformers writes rope_parameters otherwise")
    page = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"^<!-- example: images -->\n```python\n(.*?)^```$", page, re.M | re.S)
    names: dict[str, Any] = {}
    exec(compile(source, str(page), "exec"), names)
    assert names["logps"].shape == (6,) and len(names["batch"].images["pixel_values"]) == 16
    assert all(one.grad is not None for one in names["model"].parameters())


def test_examples_of_trees() -> None:
    names = run_examples(ROOT / "docs/trees.md")
    assert len(names["micro_batches"]) > 1 and len(names["tree"].node_lens) > 4
    model, weights = names["model"], [one.weight for one in (names["embed"], names["qkv"], names["head"])]
    gradients = [one.grad.clone() for one in weights]
    for one in weights:
        one.grad = None
    for sequence, mask, advantage in zip(names["sequences"], names["masks"], names["advantages"]):
        alone = names["pack_prefix_tree"]([sequence], loss_mask=[mask])
        logps = model(alone).log_softmax(-1)[alone.token_index, alone.targets]
        (-logps.sum() * advantage).backward()
    for one, expected in zip(gradients, weights):
        torch.testing.assert_close(one, expected.grad, rtol=1e-4, atol=1e-5)


def test_examples_of_scoring(restored_registry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("trl") is None:  # one block has a line to change
        stand_in = types.ModuleType("trl")
        monkeypatch.setitem(sys.modules, "flash_attn_dualkv.integrations.trl", stand_in)
        stand_in.SharedPromptRewardTrainer = object  # type: ignore[attr-defined]
    names = run_examples(ROOT / "docs/scoring.md")
    sequences = [torch.cat([names["prompt"], one])[None] for one in names["answers"]]
    rewards = torch.cat([names["model"](one).logits for one in sequences])
    torch.testing.assert_close(names["rewards"], rewards, rtol=0, atol=1e-5)
    assert names["values"].shape == (sum(one.shape[1] - 1 for one in sequences), 1)
    logps = [names["teacher"](one).logits[0, 99:-1].log_softmax(-1) for one in sequences]
    torch.testing.assert_close(names["top"], torch.cat(logps).topk(5)[0], rtol=0, atol=1e-5)
    assert names["tokens"].shape == (63, 5)


def test_examples_of_rollouts() -> None:
    """The last request's last row against PyTorch's attention."""
    names = run_examples(ROOT / "docs/rollouts.md")
    assert names["cached"].tolist() == [43, 47, 50, 32]
    k, v = (torch.cat([cache[7], cache[8]]).transpose(0, 1) for cache in (names["k_cache"], names["v_cache"]))
    q = names["q"][3][:, None]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)[:, 0]
    tolerance = 1e-5 if q.dtype == torch.float32 else 1e-2
    torch.testing.assert_close(names["out"][3], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text(encoding="utf-8"))

    for link in links:
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.M)
            assert anchor in [re.sub(r"[^\w -]", "", one).lower().replace(" ", "-") for one in headings], link


@pytest.mark.parametrize("file", [*(ROOT / "flash_attn_dualkv").rglob("*.py")], ids=lambda one: one.stem)
def test_docstrings_stand_alone(file: Path) -> None:
    """Whoever asks for help about a function sees this one alone."""
    elsewhere = re.compile(r"\b[Aa]s there\b|\b[Ss]ee there\b|\b[Ll]ikewise\b|\bas (of|for|in) `|\b[Ss]ee (`|above\b)")
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    nodes = [one for one in ast.walk(ast.parse(file.read_text(encoding="utf-8"))) if isinstance(one, kinds)]
    assert not [text for one in nodes if (text := ast.get_docstring(one)) and elsewhere.search(text)]


def test_limits_are_those_of_the_error_texts() -> None:
    page = limits_page.PAGE.read_text(encoding="utf-8")
    assert limits_page.render(page) == page, "run python tools/limits_page.py"


def test_pages_have_100_columns() -> None:
    """Text has; tables, code and headings have what they need."""
    for page in (ROOT / "docs").glob("*.md"):
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
        wide = [line for line in text.splitlines() if len(line) > 100 and " " in line[:100].strip()]
        assert not [line for line in wide if line[0] not in "|#!"], page.name


def test_the_pictures_are_what_their_script_draws(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "docs" / "picture.py", tmp_path], check=True)
    for name in ("shared_prompt.svg", "tree.svg", "tiles.svg"):
        assert (tmp_path / name).read_text() == (ROOT / "docs" / name).read_text(), "run docs/picture.py again"


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
