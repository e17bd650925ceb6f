# SPDX-License-Identifier: BSD-3-Clause
"""The page of trainers and the README's table of verl, made of the result files; TRL's section is of bench_trl.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bench_trl
import pandas as pd
from report import BLUE, PURPLE, VERMILION, filled
from verl_cases import LARGE, PRESETS, WHO

# Setups of the README's table, and the micro-batches of both; without Ulysses.
HEADLINE = (
    ("paper-8b", "micro 4", "micro-batches of 4"),
    ("paper-8b", "tokens 40960", "micro-batches of 40K tokens"),
    ("paper", "tokens 40960", "micro-batches of 40K tokens"),
    ("memory", "micro 32", "all in one micro-batch, 1 GPU"),
    ("moe", "tokens 40960", "micro-batches of 40K tokens"),
    ("math-300", "tokens 32768", "short prompts"),
)


def render(folder: Path) -> list[Path]:
    """The page and the README's table, of all result files of clean trees; of what was measured twice, the newest.

    Args:
        folder: holds those of verl in verl/ and those of TRL in trl/, and gets what is made.

    Raises:
        SystemExit: a file is of a tree with changes.
    """
    frames, files = [], []
    for path in sorted((folder / "verl").glob("*.json")):
        header, rows = json.loads(path.read_text()).values()
        if header["dirty"]:
            raise SystemExit(f"{path}: expected a result of a clean tree")
        facts = {"date": header["date"], "attention": header["attention_of_verl"]}
        frames.append(pd.DataFrame(rows).assign(**facts))
        files.append(f"- [{path.stem}](verl/{path.name}): {header['gpu']} x {header['gpus']}, ")
        files[-1] += f"commit `{header['commit'][:12]}`, torch {header['torch']}"
    rows = pd.concat(frames, ignore_index=True).sort_values("date", kind="stable")
    rows = rows.drop_duplicates(["preset", "who", "how", "sp", "gpus"], keep="last").sort_index()
    # In the order of the presets, verl's own first.
    ordered = {preset: sorted(settings, key=lambda one: one.shares) for preset, (*_, settings) in PRESETS.items()}
    known = [(preset, *one.title.split("/")) for preset, settings in ordered.items() for one in settings]
    rank = [known.index((row.preset, row.who, row.how, f"SP {row.sp}")) for row in rows.itertuples()]
    rows = rows.assign(rank=rank).sort_values("rank", kind="stable")
    exact, page, short = rows[rows["preset"] == "accuracy"], folder / "README.md", folder / "headline.md"
    parts = {
        "attention": " ".join(rows["attention"].unique()),
        "large": " and ".join(PRESETS[one][0].partition(",")[0] for one in LARGE),
        "tables": timings(rows[~rows["preset"].isin(("steps", "accuracy"))]),
        "accuracy": setup_name(exact.iloc[0]) if len(exact) else "",
        "differences": markdown(difference_table(rows)),
        "steps": curves(rows[rows["preset"] == "steps"], folder / "steps.png"),
        "files": "\n".join(files),
    }
    page.write_text(filled("trainers", {"trl": bench_trl.section(folder / "trl")}, **parts))
    short.write_text(headline(rows) + "\n")
    return [page, short]


def headline(rows: pd.DataFrame) -> str:
    """Seconds and peaks of a few setups, verl's own and the plug-in's."""
    table = []
    for preset, how, what in HEADLINE:
        of_setup = rows[(rows["preset"] == preset) & (rows["how"] == how) & (rows["sp"] == 1)]
        pair = [of_setup[of_setup["who"] == who] for who in WHO]
        if not all(map(len, pair)):
            continue
        verl, ours = (one.iloc[0] for one in pair)
        line = {"": f"{verl.model}, {shape_of(verl.batch)}, {what}"}
        line["update, s"] = change(verl.update_s, ours.update_s, verl.error, 1, True)
        line["log-probs, s"] = change(verl.infer_s, ours.infer_s, verl.error, 2, True)
        has_peak = not pd.isna(ours.update_gib)
        line["peak, GiB"] = change(verl.update_gib, ours.update_gib, "", 1, False) if has_peak else ""
        table.append(line)
    return markdown(pd.DataFrame(table))


def change(verl: float, ours: float, error: str | None, digits: int, with_ratio: bool) -> str:
    times = f" ({ratio(verl, ours)}x)" if with_ratio and not pd.isna(verl) else ""
    return f"{figure(verl, error, digits) or '-'} → {ours:.{digits}f}{times}"


def markdown(table: pd.DataFrame) -> str:
    return str(table.to_markdown(index=False, disable_numparse=True))


def shape_of(batch: dict[str, Any]) -> str:
    return f"{batch['responses']} x {batch['prompt_tokens']} x {batch['response_tokens']}"


def setup_name(row: Any) -> str:
    found = f"{row.model}, {shape_of(row.batch)}, from {row.batch['shortest']:.2f}"
    return f"{found}, {counted(row.batch['prompts'], 'prompt')}, {counted(row.gpus, 'GPU')}"


def counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def configuration(row: Any) -> str:
    return f"{row.who}, {row.how}" + (f", Ulysses {row.sp}" if row.sp > 1 else "")


def timings(rows: pd.DataFrame) -> str:
    parts = []
    for _, setup in rows.groupby(["preset", "gpus"], sort=False):
        first = setup.iloc[0]
        table = pd.DataFrame(
            {
                "": configuration(row),
                "update s": figure(row.update_s, row.error),
                "x": ratio(first.update_s, row.update_s),
                "log-probs s": figure(row.infer_s, row.error),
                "x ": ratio(first.infer_s, row.infer_s),
                "loss": f"{row.losses[0]:.6f}" if row.losses else "",
                "gradient norm": f"{row.grad_norms[0]:.4f}" if row.grad_norms else "",
                "peak GiB, update": figure(row.update_gib, "", 1),
                "log-probs": figure(row.infer_gib, "", 1),
                "ktok/s a GPU": figure(row.tokens / row.update_s / row.gpus / 1e3 if row.update_s else None, ""),
                "MFU, of the batch": figure((row.metrics or {}).get("mfu"), ""),
                "of executed tokens": figure((row.metrics or {}).get("shared_prompt/mfu_executed"), ""),
            }
            for row in setup.itertuples()
        )
        heading = f"### {setup_name(first)}\n\nToken ratio {first.token_ratio:.2f}.{gains(setup)}"
        parts.append(f"{heading}\n\n{markdown(table)}")
    return "\n\n".join(parts)


def gains(setup: pd.DataFrame) -> str:
    """What of the token ratio was run, and what it brought, where both had the same budget of tokens."""
    found = []
    for (micro, sp), pair in setup.groupby(["how", "sp"], sort=False):
        has_times = pair[["update_s", "infer_s"]].notna().all(axis=None)
        if not micro.startswith("tokens") or len(pair) != len(WHO) or not has_times:
            continue
        verl, ours = (pair[pair["who"] == who].iloc[0] for who in WHO)
        times = [verl[name] / ours[name] for name in ("update_s", "infer_s")]
        update, scores = (f"{one:.2f}x ({one / verl.token_ratio:.2f} of it)" for one in times)
        how, run_ratio = f" with Ulysses {sp}" if sp > 1 else "", ours.metrics["shared_prompt/dedup_ratio"]
        found.append(
            f" At equal budgets{how}, {run_ratio:.2f} was run: updates gain {update}, log-probabilities {scores}."
        )
    return "".join(found)


def figure(value: float | None, otherwise: str | None, digits: int = 2) -> str:
    if value is None or pd.isna(value):
        return "out of memory" if otherwise and "memory" in otherwise else otherwise or ""
    return f"{value:.{digits}f}"


def ratio(first: float | None, value: float | None) -> str:
    return "" if not first or not value or pd.isna(first) or pd.isna(value) else f"{first / value:.2f}"


def difference_table(rows: pd.DataFrame) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "setup": f"{row.preset}, {counted(row.gpus, 'GPU')}",
            "": configuration(row),
            "log-probs, max": f"{row.log_prob_max_difference:.1e}",
            "mean": f"{row.log_prob_mean_difference:.1e}",
        }
        for row in rows[rows["log_prob_max_difference"] > 0].itertuples()
    )


def curves(rows: pd.DataFrame, path: Path) -> str:
    """Loss and gradient norm of many steps on one batch."""
    if not len(rows):
        return ""
    from matplotlib import pyplot as plt

    plot, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for row, colour, style in zip(rows.itertuples(), (VERMILION, PURPLE, BLUE), ("-", ":", "--")):
        for axis, values in zip(axes, (row.losses, row.grad_norms)):
            axis.plot(range(1, len(values) + 1), values, style, color=colour, label=configuration(row))
    for axis, name in zip(axes, ("loss", "norm of the gradient")):
        axis.set_xlabel("step on the same batch")
        axis.set_title(name, fontsize=10)
    axes[0].legend(fontsize=8)
    plot.savefig(path, dpi=120, metadata={"Software": None})
    plt.close(plot)
    base = rows.iloc[0].losses
    spread = {configuration(row): max(abs(a - b) for a, b in zip(row.losses, base)) for row in rows.itertuples()}
    mean = sum(map(abs, base)) / len(base)
    return (
        f"### {len(base)} steps on one batch\n\n![Loss and norm of the gradient]({path.name})\n\n"
        f"{setup_name(rows.iloc[0])}. Largest difference of the loss to the first (its mean size is {mean:.1e}): "
        f"{', '.join(f'{name} {value:.1e}' for name, value in spread.items())}."
    )
