"""The page of trainers and the README's table of verl, made of the result files; TRL's section is of bench_trl.py."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import bench_trl
import pandas as pd
from verl_presets import LARGE, PRESETS, WHO

PAGE = """# Trainers

## verl

verl 0.9.1's policy update and old log-probabilities (with entropies), its own engines beside the plug-in on the same
batch: FSDP 2, bf16, activation checkpointing, DAPO's loss, random weights.
{attention}
Token ratio: of the batch's tokens to those with every prompt once, the most that sharing can save. "x": the time of the
setup's first row over that of the row. N x P x R: N responses of at most R tokens to each prompt of at most P; lengths
are uniform from the share of P and R that is named. "micro": sequences a micro-batch and GPU; "tokens": of dynamic
micro-batches and GPU, for the plug-in with every prompt once. Peaks include weights and optimizer. Runs have weights of
their own: norms of gradients compare within one. Times are those of the last call; for {large},
whose learning rate is 0, it is the only one, and calls of a few samples come before it. A group above the budget is
divided, and its prompt computed once for each part.

{tables}

### Differences in bf16

The largest and mean difference of a log-probability to verl's first row of the same setup; "accuracy": to verl in fp32,
{accuracy}.

{differences}

{steps}{trl}## Files

{files}
"""


def render(folder: Path) -> list[Path]:
    """The page and the README's table, of all result files of clean trees; of what was measured twice, the newest.

    Args:
        folder: holds those of verl in verl/ and those of TRL in trl/, and gets what is made.

    Raises:
        SystemExit: a file is of a tree with changes.
    """
    frames, files = [], []
    for path in sorted((folder / "verl").glob("*.json")):
        result = json.loads(path.read_text())
        if result["header"]["dirty"]:
            raise SystemExit(f"{path}: expected a result of a clean tree")
        frame = pd.DataFrame(result["rows"])
        frame = frame.assign(gpu=result["header"]["gpu"], date=result["header"]["date"], file=path.stem)
        frames.append(frame.assign(attention=result["header"]["attention_of_verl"]))
        files.append(f"- [{path.stem}](verl/{path.name}): {result['header']['gpu']} x {result['header']['gpus']}, ")
        files[-1] += f"commit `{result['header']['commit'][:12]}`, torch {result['header']['torch']}"
    rows = pd.concat(frames, ignore_index=True).sort_values("date", kind="stable")
    rows = rows.drop_duplicates(["preset", "who", "how", "sp", "gpus"], keep="last").sort_index()
    # In the order of the presets, verl's own first.
    known = [
        (preset, *setting.title.split("/"))
        for preset, (_, _, settings) in PRESETS.items()
        for setting in sorted(settings, key=lambda one: one.shares)
    ]
    rank = [known.index((row.preset, row.who, row.how, f"SP {row.sp}")) for row in rows.itertuples()]
    rows = rows.assign(rank=rank).sort_values("rank", kind="stable")
    steps = curves(rows, folder / "steps.png")
    page = folder / "README.md"
    page.write_text(
        PAGE.format(
            attention=" ".join(rows["attention"].unique()),
            large=" and ".join(PRESETS[one][0].partition(",")[0] for one in LARGE),
            tables=timings(rows[~rows["preset"].isin(("steps", "accuracy"))]),
            accuracy=setup_name(rows[rows["preset"] == "accuracy"].iloc[0])
            if "accuracy" in set(rows["preset"])
            else "",
            differences=markdown(difference_table(rows)),
            steps=steps,
            trl=bench_trl.section(folder / "trl"),
            files="\n".join(files),
        )
    )
    short = folder / "headline.md"
    short.write_text(headline(rows) + "\n")
    return [page, short]


# Of the README: setups, and the micro-batches of both; without Ulysses.
HEADLINE = (
    ("paper-8b", "micro 4", "micro-batches of 4"),
    ("paper-8b", "tokens 40960", "micro-batches of 40K tokens"),
    ("paper", "tokens 40960", "micro-batches of 40K tokens"),
    ("memory", "micro 32", "all in one micro-batch, 1 GPU"),
    ("moe", "tokens 40960", "micro-batches of 40K tokens"),
    ("math-300", "tokens 32768", "short prompts"),
)


def headline(rows: pd.DataFrame) -> str:
    """Seconds and peaks of a few setups, verl's own and the plug-in's."""
    table = []
    for preset, how, what in HEADLINE:
        of_setup = rows[(rows["preset"] == preset) & (rows["how"] == how) & (rows["sp"] == 1)]
        pair = [of_setup[of_setup["who"] == who] for who in WHO]
        if not all(map(len, pair)):
            continue
        verl, ours = (one.iloc[0] for one in pair)
        batch = verl.batch
        table.append(
            {
                "": f"{verl.model}, {shape_of(batch)}, {what}",
                "update, s": change(verl.update_s, ours.update_s, verl.error, 1, True),
                "log-probs, s": change(verl.infer_s, ours.infer_s, verl.error, 2, True),
                "peak, GiB": "" if pd.isna(ours.update_gib) else change(verl.update_gib, ours.update_gib, "", 1, False),
            }
        )
    return markdown(pd.DataFrame(table))


def change(verl: float, ours: float, error: str | None, digits: int, with_ratio: bool) -> str:
    times = f" ({ratio(verl, ours)}x)" if with_ratio and not pd.isna(verl) else ""
    return f"{figure(verl, error, digits) or '-'} → {ours:.{digits}f}{times}"


def markdown(table: pd.DataFrame) -> str:
    return str(table.to_markdown(index=False, disable_numparse=True))


def shape_of(batch: dict[str, Any]) -> str:
    return f"{batch['responses']} x {batch['prompt_tokens']} x {batch['response_tokens']}"


def setup_name(row: Any) -> str:
    batch = row.batch
    found = f"{row.model}, {shape_of(batch)}, from {batch['shortest']:.2f}"
    return f"{found}, {counted(batch['prompts'], 'prompt')}, {counted(row.gpus, 'GPU')}"


def counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def configuration(row: Any) -> str:
    return f"{row.who}, {row.how}" + (f", Ulysses {row.sp}" if row.sp > 1 else "")


def timings(rows: pd.DataFrame) -> str:
    parts = []
    for _, setup in rows.groupby(["preset", "gpus"], sort=False):
        first = setup.iloc[0]
        table = []
        for row in setup.itertuples():
            plug = row.metrics.get("shared_prompt/executed_tokens_per_s") if row.metrics else None
            table.append(
                {
                    "": configuration(row),
                    "update s": figure(row.update_s, row.error),
                    "x": ratio(first.update_s, row.update_s),
                    "log-probs s": figure(row.infer_s, row.error),
                    "x ": ratio(first.infer_s, row.infer_s),
                    "loss": f"{row.losses[0]:.6f}" if row.losses else "",
                    "gradient norm": f"{row.grad_norms[0]:.4f}" if row.grad_norms else "",
                    **({"run": row.file} if setup["file"].nunique() > 1 else {}),
                    "peak GiB, update": figure(row.update_gib, "", 1),
                    "log-probs": figure(row.infer_gib, "", 1),
                    "ktok/s a GPU, of the batch": figure(
                        row.tokens / row.update_s / row.gpus / 1e3 if row.update_s else None, ""
                    ),
                    "executed": figure(plug / 1e3 if plug else None, ""),
                    "MFU, of the batch": figure(row.metrics.get("mfu") if row.metrics else None, ""),
                    "of executed tokens": figure(
                        row.metrics.get("shared_prompt/mfu_executed") if row.metrics else None, ""
                    ),
                }
            )
        parts.append(
            f"### {setup_name(first)}\n\nToken ratio {first.token_ratio:.2f}.{gains(setup)}\n\n"
            f"{markdown(pd.DataFrame(table))}"
        )
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
        how = f" with Ulysses {sp}" if sp > 1 else ""
        run_ratio = ours.metrics["shared_prompt/dedup_ratio"]
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
    known = rows[rows["log_prob_max_difference"] > 0]
    return pd.DataFrame(
        {
            "setup": f"{row.preset}, {counted(row.gpus, 'GPU')}",
            "": configuration(row),
            "log-probs, max": f"{row.log_prob_max_difference:.1e}",
            "mean": f"{row.log_prob_mean_difference:.1e}",
        }
        for row in known.itertuples()
    )


def curves(rows: pd.DataFrame, path: Path) -> str:
    """Loss and gradient norm of many steps on one batch."""
    chosen = rows[rows["preset"] == "steps"]
    if not len(chosen):
        return ""
    import plots
    from matplotlib import pyplot as plt

    figure_, axes = plt.subplots(1, 2, figsize=(9, 3.4))
    colours = (plots.VERMILION, plots.PURPLE, plots.BLUE)
    for row, colour, style in zip(chosen.itertuples(), colours, ("-", ":", "--")):
        for axis, values in zip(axes, (row.losses, row.grad_norms)):
            axis.plot(range(1, len(values) + 1), values, style, color=colour, label=configuration(row))
    for axis, title in zip(axes, ("loss", "norm of the gradient")):
        axis.set_xlabel("step on the same batch")
        axis.set_title(title, fontsize=10)
    axes[0].legend(fontsize=8)
    figure_.tight_layout()
    figure_.savefig(path, dpi=120)
    plt.close(figure_)
    base = chosen.iloc[0].losses
    spread = [max(abs(a - b) for a, b in zip(row.losses, base)) for row in chosen.itertuples()]
    text = ", ".join(f"{configuration(row)} {value:.1e}" for row, value in zip(chosen.itertuples(), spread))
    mean = statistics.mean(map(abs, base))
    return (
        f"### {len(base)} steps on one batch\n\n![Loss and norm of the gradient]({path.name})\n\n"
        f"{setup_name(chosen.iloc[0])}. Largest difference of the loss to the first (its mean"
        f" size is {mean:.1e}): {text}.\n\n"
    )
