#!/usr/bin/env python
"""Measure verl's policy update and old log-probabilities, its own engines beside the plug-in, on the same batch.

    python benchmarks/bench_verl.py --preset paper                  # Qwen3-1.7B, N = 32, P up to 8192, R up to 2048
    python benchmarks/bench_verl.py --preset math --gpus 4
    python benchmarks/bench_verl.py --render                        # the page, of the result files

Random weights, tokens and advantages; verl's worker, engine, loss and optimizer in a process for each GPU, see
verl_rig.py. Times are those of the slowest rank in the last of the calls, in seconds; log-probabilities include
entropies, as verl's trainer asks for them. bf16 with fp32 sums, FSDP 2, activation checkpointing, verl's defaults else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from dataclasses import asdict, replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import bench_trl
import pandas as pd
import torch
from command import RESULTS, gpu_folder, tree_state
from verl_cases import Case, Found
from verl_inputs import Batch, Model
from verl_rig import run

FOLDER = RESULTS / "trainers" / "verl"
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


def row_of(case: Case, found: Found, gpus: int) -> dict[str, Any]:
    preset, who, how, sp = case.name.split("/")
    samples = case.batch.samples(case.model.vocabulary)
    prompts = {one.uid: len(one.prompt) for one in samples}
    responses = sum(len(one.response) for one in samples)
    scores = torch.cat(found.values[0]["log_probs"]) if found.values else torch.zeros(0)
    return {
        "preset": preset,
        "model": PRESETS[preset][0],
        "who": who,
        "how": how,
        "sp": int(sp.removeprefix("SP ")),
        "gpus": gpus,
        "batch": asdict(case.batch),
        "tokens": found.tokens,
        # Of prompts that lie once in the batch: what sharing can save at most.
        "token_ratio": found.tokens / (sum(prompts.values()) + responses) if found.tokens else None,
        "update_s": found.update_s[-1] if found.update_s else None,
        "infer_s": found.infer_s[-1] if found.infer_s else None,
        "update_gib": found.update_gib or None,
        "infer_gib": found.infer_gib or None,
        "left_gib": found.left_gib,
        "losses": [one["loss"] for one in found.metrics],
        "grad_norms": [one["grad_norm"] for one in found.metrics],
        "ppo_kl": [one["actor/ppo_kl"] for one in found.metrics],
        "mean_log_prob": scores.mean().item() if len(scores) else None,
        "metrics": found.metrics[-1] if found.metrics else {},
        "error": found.error,
    }


def differences(rows: list[dict[str, Any]], cases: list[Case], found: dict[str, Found]) -> None:
    """Log-probabilities against those of verl's first of each preset: how far verl is from itself, and the plug-in."""
    first: dict[str, torch.Tensor] = {}
    for row, case in zip(rows, cases):
        if not found[case.name].values:
            continue
        scores = torch.cat(found[case.name].values[0]["log_probs"])
        if not case.shares:
            first.setdefault(row["preset"], scores)
        if (base := first.get(row["preset"])) is None:
            continue
        row["log_prob_max_difference"] = (scores - base).abs().max().item()
        row["log_prob_mean_difference"] = (scores - base).abs().mean().item()


def measure(options: argparse.Namespace) -> Path:
    cases = [case for preset in options.preset for case in cases_of(preset, options.gpus, options.cpu, options.updates)]
    cases = [case for case in cases if not options.only or any(word in case.name for word in options.only)]
    cases.sort(key=lambda one: one.shares)
    commit, is_dirty = tree_state(options.commit, options.clean)
    is_cuda = torch.cuda.is_available() and not options.cpu
    header = {
        "gpu": torch.cuda.get_device_name() if is_cuda else "cpu",
        "gpus": options.gpus,
        "torch": torch.__version__,
        "commit": commit,
        "dirty": is_dirty,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "attention_of_verl": options.attention,
    }
    folder = options.out or FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{options.name or '-'.join([gpu_folder(header['gpu']), *options.preset])}.json"
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {"PYTHONPATH": os.pathsep.join(one for one in paths if one)}

    def keep(found: dict[str, Found]) -> None:
        measured = [case for case in cases if case.name in found]
        rows = [row_of(case, found[case.name], options.gpus) for case in measured]
        differences(rows, measured, found)
        path.write_text(json.dumps({"header": header, "rows": rows}, indent=1) + "\n")

    run(cases, options.gpus, environment, options.limit_s, keep=keep)
    return path


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


def render() -> list[Path]:
    """The page, of all result files of clean trees; of what was measured twice, the newest."""
    frames, files = [], []
    for path in sorted(FOLDER.glob("*.json")):
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
    steps = curves(rows, FOLDER.parent / "steps.png")
    page = FOLDER.parent / "README.md"
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
            trl=bench_trl.section(FOLDER.parent / "trl"),
            files="\n".join(files),
        )
    )
    short = FOLDER.parent / "headline.md"
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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--preset", action="append", choices=PRESETS, help="what is measured; repeatable (default: paper)")
    add("--gpus", type=int, default=max(1, torch.cuda.device_count()), help="processes, one a GPU (default: all)")
    add("--only", nargs="+", metavar="WORD", help="only rows whose names (preset/plug-in/micro 4/SP 1) contain a word")
    add("--cpu", action="store_true", help="a trial run in the environment of tests/verl, never a result")
    add("--updates", type=int, default=2, help="of each configuration; the last one is reported (default: 2)")
    add("--limit-s", type=float, default=3600.0, help="end then, with what there is")
    add(
        "--out",
        type=Path,
        metavar="FOLDER",
        help=f"where the result is written (default: {FOLDER.relative_to(RESULTS)})",
    )
    add("--name", help="of the result file")
    add("--commit", default=os.environ.get("DUALKV_COMMIT"), help="what is measured, for a copy that git does not know")
    add("--clean", action="store_true", help="the tree is that commit's, without changes")
    add("--attention", default="verl's attention: the flash-attn package.", help="a sentence on the attention of verl")
    add("--render", action="store_true", help="make the page of the result files and leave")
    options = parser.parse_args(arguments)
    if options.render:
        print(*render(), sep="\n")
        return 0
    if not options.cpu and not torch.cuda.is_available():
        print("There is no CUDA GPU here.", file=sys.stderr)
        return 2
    options.preset = options.preset or ["tiny" if options.cpu else "paper"]
    print(measure(options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
