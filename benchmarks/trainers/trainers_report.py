# SPDX-License-Identifier: BSD-3-Clause
"""The page of trainers and the README's table of verl, made of the result files of the scripts beside this one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd
from bench_verl import ACCURACY, LARGE, PRESETS, WHO
from pages import COLORS, SECTIONS, WORDS, Header, ResultError, Rows, filled, load, markdown, number, read, save
from verl_inputs import TreeBatch

# Setups of the README's table, and the micro-batches of both; without Ulysses.
HEADLINE = (
    ("paper-8b", "micro 4", "micro-batches of 4"),
    ("paper-8b", "tokens 40960", "micro-batches of 40K tokens"),
    ("paper", "tokens 40960", "micro-batches of 40K tokens"),
    ("memory", "micro 32", "all in one micro-batch, 1 GPU"),
    ("moe-x4", "tokens 40960", "40K tokens, 4 GPUs"),
    ("math-300", "tokens 32768", "short prompts"),
)
FIGURES = ["update_s", "infer_s", "update_gib", "infer_gib"]
TIMES = ["update_s", "infer_s", "update_s_ours", "infer_s_ours"]  # of both, side by side
VERL, OURS, *OTHERS = (COLORS[name] for name in ("cudnn_flex", "flex_fa4", "fa4", "flex_packed", "fa2"))
WINDOW = 10  # steps over which TRL's rewards are averaged

ENGINES, ROWS, LABELS = (WORDS[name] for name in ("vllm", "context", "trl"))
# Commits before divided walks were the default, and then asked for as "split".
BEFORE_DIVIDED = ("0f7635d", "1ff7a3e", "5e56ef0", "a0aa464")
OLD_ENGINES = {"dualkv": "this package, walks undivided", "split": ENGINES["dualkv"]}
SHAPE = ["gpu", "engine", "model", "layers", "groups", "n", "prompt", "new"]
DECODING = ["step_ms", "tokens_per_s"]


def render(folder: Path) -> list[Path]:
    """The page and the README's table, of all result files; of what was measured twice with verl, the newest.

    Args:
        folder: holds those of verl in verl/, of TRL in trl/, of rollouts in mismatch/, vllm/, sglang/ and
            vllm_mismatch/, of long rows in context/, of Megatron in megatron/, of lm_eval in scoring/, and gets what is
            made.

    Raises:
        ResultError: a file is of a tree with changes, or one of TRL lacks a run.
    """
    rows = load(sorted((folder / "verl").glob("*.json")))
    files = [
        f"- [{one.file}](verl/{one.file}.json): {one.gpu} x {one.gpus}, commit `{one.commit[:12]}`, torch {one.torch}"
        for one in rows.drop_duplicates("file").itertuples()
    ]
    keys = ["preset", "gpus", "how", "sp"]
    rows[FIGURES] = rows[FIGURES].astype(float)
    rows = rows.sort_values("date", kind="stable")
    rows = rows.drop_duplicates([*keys, "who"], keep="last").sort_index()
    known = [(preset, *one.names) for preset, (*_, settings) in PRESETS.items() for one in settings]
    rank = [known.index((row.preset, row.who, row.how, row.sp)) for row in rows.itertuples()]
    rows = rows.assign(rank=rank).sort_values("rank", kind="stable")
    verl, ours = (rows[rows["who"] == who] for who in WHO)
    pairs = verl.merge(ours, on=keys, suffixes=("", "_ours"))
    exact, page, short = rows[rows["preset"].isin(ACCURACY)], folder / "README.md", folder / "headline.md"
    parts = {
        "attention": " ".join(rows["attention_of_verl"].unique()),
        "large": listed([what_of(one) for one in LARGE if one in {*rows["preset"]}] or ["none of these"]),
        "tables": timings(rows[~rows["preset"].isin(("steps", *ACCURACY))], pairs),
        "accuracy": "; ".join(map(setup_name, exact.drop_duplicates("preset").itertuples())),
        "differences": differences(rows[rows["log_prob_max_difference"] > 0]),
        "steps": steps(rows[rows["preset"] == "steps"], folder / "steps.png"),
        "files": "\n".join(files),
    }
    others = {"trl": runs_of_trl(folder / "trl")}
    others |= {name: rollouts_of(folder / name, engine) for name, engine in (("vllm", "vLLM"), ("sglang", "SGLang"))}
    others |= {name: section.of(folder, changed) for name, section in SECTIONS.items()}
    page.write_text(filled("trainers", others, **parts))
    short.write_text(headline(pairs) + "\n")
    return [page, short]


def headline(pairs: pd.DataFrame) -> str:
    """Seconds and peaks of a few setups, verl's own and the plug-in's."""
    table = []
    setups = pd.DataFrame(HEADLINE, columns=["preset", "how", "what"]).assign(sp=1).merge(pairs)
    for row in setups.drop_duplicates(["preset", "how"]).itertuples():
        line = {"": f"{row.model}, {shape_of(row.batch)}, {row.what}"}
        updates, scores = (row.update_s, row.update_s_ours, 1), (row.infer_s, row.infer_s_ours, 2)
        for name, (verl, ours, digits) in (("update, s", updates), ("log-probs, s", scores)):
            gain = number(verl / ours, 2)
            line[name] = f"{number(verl, digits) or failure(row.error) or '-'} → {ours:.{digits}f}"
            line[name] += gain and f" ({gain}x)"
        verl, ours = number(row.update_gib, 1), number(row.update_gib_ours, 1)
        table.append(line | {"peak, GiB": ours and f"{verl or '-'} → {ours}"})
    return markdown(pd.DataFrame(table))


def failure(error: str | None) -> str:
    return "out of memory" if error and "memory" in error else error or ""


def shape_of(batch: dict[str, Any]) -> str:
    return f"{batch['responses']} x {batch['prompt_tokens']} x {batch['response_tokens']}"


def setup_name(row: Any) -> str:
    if tree := row.batch.get("tree"):
        return f"{row.model}, {row.batch['responses']} rollouts of the tree {tree}, {counted(row.gpus, 'GPU')}"
    found = f"{row.model}, {shape_of(row.batch)}, from {row.batch['shortest']:.2f}"
    return f"{found}, {counted(row.batch['prompts'], 'prompt')}, {counted(row.gpus, 'GPU')}"


def what_of(preset: str) -> str:
    """The model of a preset, or the tree whose rollouts it has."""
    model, batch, _ = PRESETS[preset]
    return f"the tree {batch.tree}" if isinstance(batch, TreeBatch) else model.partition(",")[0]


def counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "s")


def configuration(row: Any) -> str:
    return f"{row.who}, {row.how}" + (f", Ulysses {row.sp}" if row.sp > 1 else "")


def timings(rows: pd.DataFrame, pairs: pd.DataFrame) -> str:
    parts = []
    for (preset, gpus), setup in rows.groupby(["preset", "gpus"], sort=False):
        first, both = setup.iloc[0], pairs[(pairs["preset"] == preset) & (pairs["gpus"] == gpus)]
        table = pd.DataFrame(
            {
                "": configuration(row),
                "update s": number(row.update_s, 2) or failure(row.error),
                "x": number(first.update_s / row.update_s, 2),
                "log-probs s": number(row.infer_s, 2) or failure(row.error),
                "x ": number(first.infer_s / row.infer_s, 2),
                "loss": f"{row.losses[0]:.6f}" if row.losses else "",
                "gradient norm": f"{row.grad_norms[0]:.4f}" if row.grad_norms else "",
                "peak GiB, update": number(row.update_gib, 1),
                "log-probs": number(row.infer_gib, 1),
                "ktok/s a GPU": number(row.tokens / row.update_s / row.gpus / 1e3, 2),
                "MFU, of the batch": number((row.metrics or {}).get("mfu"), 2),
                "of executed tokens": number((row.metrics or {}).get("shared_prompt/mfu_executed"), 2),
            }
            for row in setup.itertuples()
        )
        heading = f"### {setup_name(first)}\n\nToken ratio {first.token_ratio:.2f}.{gains(both)}"
        parts.append(f"{heading}\n\n{markdown(table)}")
    return "\n\n".join(parts)


def gains(pairs: pd.DataFrame) -> str:
    """What of the token ratio was run, and what it brought, where both had the same budget of tokens."""
    found = []
    for row in pairs[pairs["how"].str.startswith("tokens")].dropna(subset=TIMES).itertuples():
        times = row.update_s / row.update_s_ours, row.infer_s / row.infer_s_ours
        update, scores = (f"{one:.2f}x ({one / row.token_ratio:.2f} of it)" for one in times)
        how, run_ratio = f" with Ulysses {row.sp}" if row.sp > 1 else "", row.metrics_ours["shared_prompt/dedup_ratio"]
        found.append(
            f" At equal budgets{how}, {run_ratio:.2f} was run: updates gain {update}, log-probabilities {scores}."
        )
    return "".join(found)


def differences(rows: pd.DataFrame) -> str:
    table = {
        "setup": [f"{row.preset}, {counted(row.gpus, 'GPU')}" for row in rows.itertuples()],
        "": map(configuration, rows.itertuples()),
        "log-probs, max": rows["log_prob_max_difference"].map("{:.1e}".format),
        "mean": rows["log_prob_mean_difference"].map("{:.1e}".format),
    }
    return markdown(pd.DataFrame(table))


def steps(rows: pd.DataFrame, path: Path) -> str:
    """Loss and gradient norm of many steps on one batch."""
    if not len(rows):
        return ""
    from matplotlib import pyplot as plt

    names = [*map(configuration, rows.itertuples())]
    losses, norms = (pd.DataFrame([*rows[one]], names).T for one in ("losses", "grad_norms"))
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for axis, values, title in zip(axes, (losses, norms), ("loss", "norm of the gradient")):
        values.index += 1
        values.plot(ax=axis, color=[VERL, OTHERS[0], OURS], style=["-", ":", "--"], legend=axis is axes[0])
        axis.set_xlabel("step on the same batch")
        axis.set_title(title, fontsize=10)
    axes[0].legend(fontsize=8)
    save(figure, path)
    base = losses.iloc[:, 0]
    spread = losses.sub(base, axis=0).abs().max()
    return (
        f"### {len(base)} steps on one batch\n\n![Loss and norm of the gradient]({path.name})\n\n"
        f"{setup_name(rows.iloc[0])}. Largest difference of the loss to the first (its mean size is"
        f" {base.abs().mean():.1e}): {', '.join(f'{name} {value:.1e}' for name, value in spread.items())}."
    )


# --- TRL --------------------------------------------------------------------------------------------------------------


def runs_of_trl(folder: Path) -> str:
    """Tables and plots of the result files; a plot is written beside its file. "" if there is none."""
    parts = []
    for path in sorted(folder.glob("*.json")):
        header, rows = read(path)
        rows.sort(key=lambda row: [*LABELS].index(row["who"]))
        ended = [row for row in rows if "phases" in row]
        if len(ended) < 2 or not ended[0]["arguments"]["stock"] or ended[-1]["arguments"]["stock"]:
            raise ResultError(f"{path}: expected steps of TRL's run first, and of one that shares prompts last")
        asked, image = ended[-1]["arguments"], path.with_suffix(".png")
        rewards = pd.DataFrame({LABELS[row["who"]]: pd.Series(row["rewards"]) for row in ended})
        phases = {LABELS[row["who"]]: pd.DataFrame(row["phases"]) for row in ended}
        # The first step has what is done once. It counts where there are many, or a run has no
        # other.
        fewest = min(map(len, phases.values()))
        phases = {name: one[1 if 1 < fewest < WINDOW else 0 :] for name, one in phases.items()}
        seconds = pd.DataFrame({name: one.assign(step=one.sum(axis=1)).median() for name, one in phases.items()})
        plot_of_trl(rewards, seconds, image)
        parts += [
            f"### {asked.get('trainer', 'grpo').upper()}: {asked['steps']} steps of {asked['prompts']} prompts,"
            f" {asked['responses']} x {asked['prompt']} x {asked['completion']}, {asked['layers']} layers of width"
            f" {asked['hidden']}, {header['gpu']}",
            table_of_trl(ended, rewards, seconds),
            f"![Reward and seconds a step]({folder.name}/{image.name})",
            f"{closeness(rows, rewards)} [File]({folder.name}/{path.name}), commit `{header['commit'][:12]}`.",
        ]
    return "\n\n".join(parts)


def table_of_trl(rows: list[dict[str, Any]], rewards: pd.DataFrame, seconds: pd.DataFrame) -> str:
    """Medians, peaks and means of rewards of all runs, and the first's over the last's."""
    lines = [
        (f"{phase}, s", *(number(value, 3) for value in one), number(one.iloc[0] / one.iloc[-1], 2))
        for phase, one in seconds.iterrows()
    ]
    if all(peaks := [row["peak_memory_gib"] for row in rows]):
        lines.append(("peak memory, GiB", *map("{:.1f}".format, peaks), f"{peaks[0] / peaks[-1]:.2f}"))
    if len(rewards) >= WINDOW:
        for what, part in ((f"reward, first {WINDOW} steps", rewards[:WINDOW]), (f"last {WINDOW}", rewards[-WINDOW:])):
            lines.append((what, *part.mean().map("{:.3f}".format), ""))
    return markdown(pd.DataFrame(lines, columns=["", *rewards, "x"]))


def closeness(rows: list[dict[str, Any]], rewards: pd.DataFrame) -> str:
    """Which runs did not end, how far runs are from each other, and a run's steps from their neighbours."""
    ended = [row for row in rows if "phases" in row]
    (first, *_, last), norms = ended, [f"{row['grad_norms'][0]:.4f}" for row in ended]
    found = "".join(
        f"{LABELS[row['who']]} {row['error']}: {counted(len(row.get('rewards', [])), 'step')}. "
        for row in rows
        if "error" in row
    )
    found += (
        f"In the first step, the rewards are {listed(rewards.iloc[0].map('{:.4f}'.format))}, the norms of the gradient"
        f" {listed(norms)}."
    )
    if any(row["arguments"].get("rollouts", "generate") != "generate" for row in ended):
        found += " Continuous batching draws its random numbers in another order than generate."
    if len(rewards) >= WINDOW:
        apart = rewards.rolling(WINDOW).mean().agg(lambda row: row.max() - row.min(), axis=1).max()
        neighbours = rewards[LABELS["stock"]].diff().abs().mean()
        found += (
            f" Rounding then leads to other samples: means of {WINDOW} steps differ by {apart:.3f} at most, while a"
            f" step of TRL's run differs from the next by {neighbours:.3f} in the mean."
        )
    ratio, fallbacks = (pd.Series(last[name]).mean() for name in ("dedup_ratio", "fallbacks"))
    return (
        f"{found} A forward has {ratio:.1f} times fewer tokens with shared prompts; of all forwards, {fallbacks:.0%}"
        f" fell back to stock attention ({first['arguments']['attention']})."
        f" {', '.join(f'{name} {version}' for name, version in first['versions'].items())}."
    )


def listed(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def plot_of_trl(rewards: pd.DataFrame, seconds: pd.DataFrame, path: Path) -> None:
    """Seconds, and beside them the rewards of runs that are long enough for a curve."""
    from matplotlib import pyplot as plt

    is_long, colors = len(rewards) >= WINDOW, [VERL, *OTHERS[: rewards.shape[1] - 2], OURS]
    figure, axes = plt.subplots(1, 1 + is_long, figsize=(9, 3.4), layout="constrained", squeeze=False)
    if is_long:
        left = axes[0, 0]
        rewards.plot(ax=left, color=colors, xlabel="step, from 0", ylabel="reward", fontsize=8)
        left.lines[0].set(linewidth=4, alpha=0.5)  # others lie on it
    right = axes[0, -1]
    seconds.plot.barh(ax=right, color=colors, legend=not is_long, fontsize=8)
    for bars in right.containers:
        right.bar_label(bars, fmt=" %.2f", fontsize=7)
    right.invert_yaxis()
    right.set_xlabel("seconds a step, median (shorter is faster)")
    figure.suptitle("TRL" + (": the same curve in less time" if is_long else ""), fontsize=11)
    save(figure, path)


# --- engines of rollouts ----------------------------------------------------------------------------------------------


def rollouts_of(folder: Path, of: str) -> str:
    """A table: medians of the runs of all result files, engines beside stock's on the same shape.

    Args:
        of: whose rollouts, vLLM or SGLang.
    """
    frames, titles, version = [], set[str](), of.lower()
    for path in sorted(folder.glob("*.json")):
        header, rows = read(path)
        labels = ENGINES | {"stock": of, "triton": f"{of}, Triton"}
        labels |= OLD_ENGINES if header["commit"].startswith(BEFORE_DIVIDED) else {}
        titles.add(f"{of} {rows[0][version]}, torch {header['torch']}")
        frame = pd.DataFrame(rows).assign(gpu=header["gpu"].removesuffix(" 80GB HBM3").removeprefix("NVIDIA "))
        file = f"[`{header['commit'][:7]}`]({folder.name}/{path.name})"
        engine = frame[version]
        if "runner" in frame:
            # The first runner's own vLLM is compared with it; Arctic, which forces it, with the
            # default one.
            is_first = frame["runner"].str.endswith("gpu_model_runner") & (frame["who"] != "arctic")
            engine = engine + is_first.map({True: ", first runner", False: ""})
        frames.append(frame.assign(who=frame["who"].map(labels), file=file, engine=engine))
    if not frames:
        return "Not measured yet."
    everything = pd.concat(frames)
    by_engine = everything.groupby([*SHAPE, "who"], sort=False)
    files = by_engine["file"].agg(lambda of_engine: ", ".join(of_engine.unique()))
    found = by_engine[DECODING].median().assign(runs=by_engine.size(), files=files).reset_index()
    all_labels = [*dict.fromkeys([of, f"{of}, Triton", *ENGINES.values(), *OLD_ENGINES.values()])]
    keys = [*SHAPE[:4], "prompt", "groups", "n", "new"]
    found = found.assign(order=found["who"].map(all_labels.index)).sort_values([*keys, "order"], key=shortest_first)
    ratios = found[DECODING] / found.groupby(SHAPE, sort=False)[DECODING].transform("first")
    table = pd.DataFrame(
        {
            "GPU": found["gpu"],
            of: found["engine"],
            "model": [f"{row.model}, {row.layers} layers" for row in found.itertuples()],
            "G x N x P x R": [f"{row.groups} x {row.n} x {row.prompt} x {row.new}" for row in found.itertuples()],
            "attention": found["who"],
            "decoding step, ms": found["step_ms"].map(lambda value: number(value, 2)),
            "x": (1 / ratios["step_ms"]).map(lambda value: number(value, 2)),
            "tokens/s": found["tokens_per_s"].map(number),
            "x, with the prefill": ratios["tokens_per_s"].map(lambda value: number(value, 2)),
            "runs": found["runs"].map(str),
            "files": found["files"],
        }
    )
    return f"### {'; '.join(sorted(titles))}\n\n{markdown(table, 5)}"


def shortest_first(column: pd.Series) -> pd.Series:
    """New tokens, which are text, by how many they are at most."""
    return column.map(lambda text: int(text.rpartition("-")[2])) if column.name == "new" else column


# --- tables of each result file ---------------------------------------------------------------------------------------


def changed(header: Header, rows: Rows) -> Rows:
    """With what formats of templates/sections.json name beside the figures that were measured."""
    parts = header.get("megatron", {}).get("vpp", 1)
    found = []
    for row in sorted(rows, key=lambda row: row["who"]) if "megatron" in header else rows:
        trainers = {"this library": row}
        if "stock_trainer" in row:
            trainers["stock, on sdpa"] = row["stock_trainer"]
        more: dict[str, Any] = {"others": "in fp64, rounded" if row.get("rowwise") else ""}
        more |= {"virtual": f" x {parts}" if parts > 1 else "", "how": ROWS.get(row.get("mode", ""))}
        more["sampler"] = ENGINES.get(row.get("who", ""))
        if "above_bytes" in row:
            more["above_gb"] = row["above_bytes"] / 1e9
        found += [{"rate_of_one": 1, **row, **own, **more, "trainer": trainer} for trainer, own in trainers.items()]
    return found
