"""Result files: which may be published, and their rows as one table."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pandas as pd
from command import RESULTS, gpu_folder
from shapes import LayerShape, Shape, StepShape, fits_one_call, parse

from flash_attn_dualkv.predict import DIRECTIONS

KINDS: dict[str, type[Shape]] = {"kernel": Shape, "tree": Shape, "layer": LayerShape, "model": StepShape}
HEADER = {"benchmark": str, "gpu": str, "torch": str, "cuda": str, "commit": str, "date": str, "dirty": bool}
ROW = {"shape", "impl", "direction", "dtype", "n", "p", "r", "groups", "h", "h_k", "d", "ms", "tflops", "fraction"}
ROW |= {"matmul_tflops", "packed_tokens", "visible_pairs"}
EXECUTED = {"executed_tokens", "executed_pairs", "replicated_tokens", "peak_gib"}
OURS = "dualkv_sm90"  # on the kernels that a Hopper GPU takes by itself
LABELS = {
    "dualkv_sm90": "this library",
    "dualkv_sm90_deterministic": "this library, deterministic",
    "dualkv_sm90_copied": "this library, short nodes copied",
    "dualkv_sm80": "this library, portable kernels (sm_80)",
    "dualkv_sm80_deterministic": "this library, portable kernels (sm_80), deterministic",
    "dualkv_sm80_copied": "this library, portable kernels (sm_80), short nodes copied",
    "flex_fa4": "FlexAttention on FlashAttention-4",
    "flex_fa4_static": "FlexAttention on FlashAttention-4, compiled for each length",
    "flex_packed": "FlexAttention",
    "flex_packed_static": "FlexAttention, compiled for each length",
    "fa4_replicated": "FlashAttention-4, prompt replicated",
    "fa3_replicated": "FlashAttention-3, prompt replicated",
    "flash_attn_replicated": "FlashAttention-2 (its package), prompt replicated",
    "fa2_replicated": "FlashAttention-2, prompt replicated",
    "cudnn_replicated": "cuDNN, prompt replicated",
    "efficient_replicated": "SDPA, memory-efficient, keys and values repeated, prompt replicated",
    "math_replicated": "SDPA, math, prompt replicated",
    "prefix_grouper": "prefix_grouper, FlashAttention-2",
    "fa4_gathered": "FlashAttention-4, keys gathered along paths",
    "fa2_gathered": "FlashAttention-2, keys gathered along paths",
    "varlen_sm90_flattened": "this library's varlen kernels, flattened",
    "varlen_sm80_flattened": "this library's varlen kernels (sm_80), flattened",
    "fa4_flattened": "FlashAttention-4, flattened",
    "fa2_flattened": "FlashAttention-2, flattened",
    "stock_flash_attention_4_replicated": "stock model on FlashAttention-4, prompt replicated",
    "stock_flex_attention_replicated": "stock model on FlexAttention, prompt replicated",
    "stock_sdpa_replicated": "stock model on SDPA, prompt replicated",
}


class ResultError(ValueError):
    """A result file that cannot be read, or must not be published."""


def read(path: Path) -> dict[str, Any]:
    """What a result file holds.

    Raises:
        ResultError: it cannot be read, or lacks a header or rows.
    """
    try:
        result = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise ResultError(f"{path}: expected a result of a benchmark, got {error}") from error
    is_result = isinstance(result, dict) and set(result) == {"header", "rows"}
    if not is_result or not result["rows"] or not all(isinstance(row, dict) for row in result["rows"]):
        raise ResultError(f"{path}: expected an object with header and rows")
    return result


def check(path: Path) -> None:
    """Refuse a result that must not be published.

    Raises:
        ResultError: lists everything that is wrong.
    """
    result = read(path)
    header = result["header"]
    problems = [f"header: {key}" for key, kind in HEADER.items() if not isinstance(header.get(key), kind)]
    if not problems:
        if header["benchmark"] not in (*KINDS, "stream"):
            problems.append(f"header: benchmark {header['benchmark']}")
        if header["dirty"] or not re.fullmatch(r"[0-9a-f]{7,40}", header["commit"]):
            problems.append("header: measured on a dirty tree, or one without a commit")
        if gpu_folder(header["gpu"]) != path.parent.name:
            problems.append(f"header: of {header['gpu']}, which is another folder")
    if not problems:
        for index, row in enumerate(result["rows"]):
            problems += [f"rows[{index}]: {problem}" for problem in problems_of(row, header["benchmark"])]
        if not any(str(row.get("impl")).startswith("dualkv") for row in result["rows"]):
            problems.append("rows: none of this library")
    if problems:
        raise ResultError(f"{path}: " + "; ".join(problems))


def problems_of(row: dict[str, Any], benchmark: str) -> list[str]:
    """What is wrong with a row: fields, names, and figures that do not follow from its time."""
    needed = ROW if benchmark == "stream" else ROW | EXECUTED
    if missing := sorted(needed - row.keys()):
        return [f"{', '.join(missing)} missing"]
    problems = [] if row["impl"] in LABELS else [f"unknown impl {row['impl']}"]
    if row["direction"] not in (*DIRECTIONS, "both") or row["dtype"] not in ("bf16", "fp16"):
        problems.append(f"direction {row['direction']} or dtype {row['dtype']}")
    if row.get("error") and row["impl"].startswith("dualkv"):
        problems.append(f"{row['impl']} failed: {row['error']}")
    if row["ms"] is None and not (row.get("oom") or row.get("skipped") or row.get("error")):
        problems.append("no time, and neither oom, skipped nor error says why")
    if problems or benchmark == "stream":
        return problems
    shape = parse(row["shape"], KINDS[benchmark])
    if (row["packed_tokens"], row["visible_pairs"]) != (shape.packed_tokens, shape.visible_pairs):
        problems.append(f"tokens or pairs are not those of {row['shape']}")
    if row["ms"] is None:
        return problems
    if not all((row[key] or 0) > 0 for key in ("ms", "tflops", "fraction", "matmul_tflops", "peak_gib")):
        return [*problems, "ms, tflops, fraction, matmul_tflops and peak_gib must be positive"]
    is_layer = issubclass(KINDS[benchmark], LayerShape)
    names = ("executed_tokens", "executed_pairs") if is_layer else ("packed_tokens", "visible_pairs")
    tflops = shape.flops(row["direction"], *(row[name] for name in names)) / row["ms"] / 1e9
    for name, value in (("tflops", tflops), ("fraction", tflops / row["matmul_tflops"])):
        if not math.isclose(row[name], value, rel_tol=0.01):
            problems.append(f"{name} {row[name]} does not follow from ms and the work")
    return problems


def load_rows(result: dict[str, Any], file: str = "") -> pd.DataFrame:
    """The rows of a result, each with what the header says."""
    header = {key: result["header"].get(key) for key in ("benchmark", "gpu", "torch", "cuda", "commit", "date")}
    optional = dict.fromkeys(("oom", "error", "skipped", "peak_gib", "executed_tokens"))
    versions = ", ".join(f"{name} {version}" for name, version in result["header"].get("versions", {}).items())
    return pd.DataFrame([{**optional, **row} for row in result["rows"]]).assign(**header, versions=versions, file=file)


def load(paths: list[Path]) -> pd.DataFrame:
    """The rows of result files."""
    return pd.concat([load_rows(read(path), path.stem) for path in paths], ignore_index=True)


def why(row: Any) -> str:
    """Why a row has no time, as tables say it; '' if it has one."""
    if row.ms == row.ms and row.ms is not None:
        return ""
    if row.oom is True:
        return "out of memory"
    if isinstance(row.error, str):
        return "failed"
    if isinstance(row.skipped, str) and row.skipped.endswith("is not installed"):
        return "not installed"
    return "not timed"


FACTS = (
    "n", "p", "r", "groups", "h", "h_k", "d",
    "packed_tokens", "visible_pairs", "executed_tokens", "replicated_tokens",
)  # fmt: skip


def of_newest_code(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows without those of this library that a newer commit has measured again."""
    is_ours = frame["impl"].str.startswith("dualkv")
    newest = frame[is_ours].sort_values("date").groupby(["shape", "impl"])["commit"].last().rename("newest")
    known = frame.join(newest, on=["shape", "impl"])["newest"]
    return frame[~is_ours | (frame["commit"] == known)]


def medians(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per shape and implementation: the medians of all runs, both directions side by side.

    Of this library the newest commit that measured a shape counts. ``ratio`` is the time of both directions as a
    multiple of this library's: of runs that have both, else of medians.
    """
    keys = ["shape", "impl"]
    frame = of_newest_code(frame)
    frame = frame.assign(why=[why(row) for row in frame.itertuples()])
    # '' comes first: one run that timed it is enough
    facts = frame.groupby(keys, sort=False).agg({**dict.fromkeys(FACTS, "first"), "peak_gib": "max", "why": "min"})
    for name in ("ms", "tflops", "fraction"):
        found = frame.pivot_table(index=keys, columns="direction", values=name, aggfunc="median")
        for direction in DIRECTIONS:
            facts[f"{direction}_{name}"] = found[direction] if direction in found else float("nan")
    facts["ms"] = facts["forward_ms"] + facts["backward_ms"]
    facts["is_tree"] = facts.index.get_level_values("shape").str.contains("tree-")
    runs = frame.pivot_table(index=["file", *keys], columns="direction", values="ms", aggfunc="median")
    runs = runs.reindex(columns=DIRECTIONS).sum(axis=1, skipna=False).unstack()
    for times in (runs, facts["ms"].unstack()):
        if OURS in times:
            ratio = times.div(times[OURS], axis=0).stack().groupby(keys).median()
            facts["ratio"] = facts["ratio"].fillna(ratio) if "ratio" in facts else ratio
    facts["size"] = facts["visible_pairs"] * facts["h"] * facts["d"]
    facts["order"] = [list(LABELS).index(impl) if impl in LABELS else len(LABELS) for _, impl in facts.index]
    return facts.reset_index().sort_values(["size", "shape", "order"], ignore_index=True)


def in_pieces(row: Any) -> bool:
    """Whether a peer computed the row's tokens of a layer in several calls, whose joined outputs need memory."""
    shape = Shape("", (), row.h, row.h_k, row.d)
    return row.impl.endswith("_replicated") and not fits_one_call(shape, row.executed_tokens)


def result_files(folder: Path = RESULTS) -> list[Path]:
    return sorted(folder.glob("*/*.json"))
