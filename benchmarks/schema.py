"""What a result file must be before it may be published."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from shapes import step_flops

from flash_attn_dualkv.predict import DIRECTIONS, ModelShape, attention_flops

Result = dict[str, Any]
Row = dict[str, Any]

BENCHMARKS = ("kernel", "model", "layer", "memory")
HEADER_TYPES: dict[str, type | tuple[type, ...]] = {
    "gpu": str,
    "torch": str,
    "cuda": str,
    "commit": str,
    "date": str,
    "matmul_tflops": (int, float),
    "dirty": bool,
}
NUMBER_OR_NONE = (int, float, type(None))
Types = dict[str, type | tuple[type, ...]]

SHAPE_TYPES: Types = {
    "shape": str,
    "n": int,
    "p": int,
    "r": int,
    "impl": str,
    "dtype": str,
    "h": int,
    "h_k": int,
    "d": int,
    "peak_gib": NUMBER_OR_NONE,
}
TIME_TYPES: Types = {"direction": str, "ms": NUMBER_OR_NONE, "tflops": NUMBER_OR_NONE, "matmul_tflops": NUMBER_OR_NONE}
LAYER_TYPES: Types = {"layers": int, "hidden": int, "intermediate": int}
EXECUTED_TYPES: Types = {"executed_tokens": int, "executed_pairs": int, "executed_flops": (int, float)}
ROW_TYPES: dict[str, Types] = {
    "kernel": {**SHAPE_TYPES, **TIME_TYPES, "visible_pairs": int},
    "layer": {
        **SHAPE_TYPES,
        **TIME_TYPES,
        **LAYER_TYPES,
        **EXECUTED_TYPES,
        "packed_tokens": int,
        "replicated_tokens": int,
    },
    "memory": {**SHAPE_TYPES, **LAYER_TYPES, "prompt_tokens": int, "response_tokens": int},
}
ROW_TYPES["model"] = {**ROW_TYPES["layer"], "vocab": int, "response_tokens": int}
OURS = re.compile(r"dualkv_sm(80|90)(_deterministic)?")
PEERS = re.compile(r"(fa2|flash_attn|fa3)_(replicated|gathered)|cudnn_replicated|flex_packed|prefix_grouper")


def benchmark_of(header: Row) -> str:
    """Which benchmark a result is of; older kernel results do not say."""
    return str(header.get("benchmark", "kernel"))


def gpu_folder(gpu: str) -> str:
    """A GPU's name as a folder name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", gpu).strip("-")


def check_types(record: Any, types: dict[str, Any], where: str) -> list[str]:
    if not isinstance(record, dict):
        return [f"{where}: expected an object, got {type(record).__name__}"]
    problems = [f"{where}: {key} is missing" for key in types if key not in record]
    for key, kind in types.items():
        value = record.get(key)
        is_bool_for_number = isinstance(value, bool) and kind is not bool
        if key in record and (is_bool_for_number or not isinstance(value, kind)):
            problems.append(f"{where}: {key} has the wrong type, got {value!r}")
    return problems


def problems_of_header(header: Any) -> list[str]:
    problems = check_types(header, HEADER_TYPES, "header")
    if problems:
        return problems
    if benchmark_of(header) not in BENCHMARKS:
        problems.append(f"header: benchmark must be one of {BENCHMARKS}, got {header['benchmark']!r}")
    # What was put right by hand in a header, and why: everybody must be able to read it.
    if not isinstance(header.get("remark", ""), str):
        problems.append(f"header: remark must be text, got {header['remark']!r}")
    if header["dirty"]:
        problems.append("header: measured on a dirty tree")
    if not re.fullmatch(r"[0-9a-f]{7,40}", header["commit"]):
        problems.append(f"header: commit is no commit hash, got {header['commit']!r}")
    if not header["matmul_tflops"] > 0:
        problems.append(f"header: matmul_tflops must be positive, got {header['matmul_tflops']!r}")
    if not re.match(r"\d{4}-\d{2}-\d{2}", header["date"]):
        problems.append(f"header: date is not ISO 8601, got {header['date']!r}")
    return problems


def problems_of_row(row: Any, where: str, benchmark: str = "kernel") -> list[str]:
    problems = check_types(row, ROW_TYPES[benchmark], where)
    if problems:
        return problems
    measured = "peak_gib" if benchmark == "memory" else "ms"
    if not (OURS.fullmatch(row["impl"]) or PEERS.fullmatch(row["impl"])):
        problems.append(f"{where}: unknown impl {row['impl']!r}; ours must name sm80 or sm90")
    if measured == "ms" and row["direction"] not in DIRECTIONS:
        problems.append(f"{where}: direction must be one of {DIRECTIONS}, got {row['direction']!r}")
    if row["dtype"] not in ("bf16", "fp16"):
        problems.append(f"{where}: dtype must be bf16 or fp16, got {row['dtype']!r}")
    if problems:
        return problems
    if row.get("error") and is_ours(row):
        problems.append(f"{where}: {row['impl']} failed: {row['error']}")
    if row[measured] is not None:
        return problems + (problems_of_figures if measured == "ms" else problems_of_peak)(row, where, benchmark)
    if not (row.get("oom") or row.get("skipped") or row.get("error")):
        problems.append(f"{where}: no {measured}, and neither oom, skipped nor error says why")
    return problems


def problems_of_peak(row: Row, where: str, benchmark: str) -> list[str]:
    problems = [] if row["peak_gib"] > 0 else [f"{where}: peak_gib must be positive"]
    sequences = row["n"] if row["impl"].endswith("_replicated") else 1
    if row["prompt_tokens"] != sequences * row["p"]:
        problems.append(f"{where}: prompt_tokens {row['prompt_tokens']} do not follow from n and p")
    return problems


def counted_flops(row: Row, benchmark: str) -> float:
    """The work that the row's TFLOP/s must count."""
    if benchmark == "kernel":
        return attention_flops(row["h"], row["d"], row["visible_pairs"], row["direction"])
    model = ModelShape(row["layers"], row["hidden"], row["intermediate"], row["h"], row["h_k"], row["d"])
    tokens, pairs = row["executed_tokens"], row["executed_pairs"]
    if benchmark == "layer":
        return model.layer_flops(tokens, pairs, row["direction"])
    model = dataclasses.replace(model, vocab=row["vocab"])
    return step_flops(model, tokens, pairs, row["response_tokens"], row["direction"])


def problems_of_figures(row: Row, where: str, benchmark: str) -> list[str]:
    missing = [key for key in ("tflops", "peak_gib", "matmul_tflops") if row[key] is None]
    if missing:
        return [f"{where}: {', '.join(missing)} is null beside a time"]
    problems = []
    if not (row["ms"] > 0 and row["peak_gib"] > 0 and row["matmul_tflops"] > 0):
        problems.append(f"{where}: ms, peak_gib and matmul_tflops must be positive")
    flops = counted_flops(row, benchmark)
    if benchmark != "kernel" and not math.isclose(row["executed_flops"], flops, rel_tol=1e-4):
        problems.append(f"{where}: executed_flops {row['executed_flops']} do not follow from tokens and pairs")
    if row["ms"] > 0 and not math.isclose(row["tflops"], flops / row["ms"] / 1e9, rel_tol=0.01, abs_tol=0.02):
        problems.append(f"{where}: tflops {row['tflops']} does not follow from ms and the visible pairs or the tokens")
    return problems


def validate(result: Any, folder: str | None = None) -> None:
    """Refuse a result that must not be published.

    Args:
        result: what a result file contains.
        folder: name of the folder it lies in, which must be the GPU's.

    Raises:
        ValueError: lists everything that is wrong.
    """
    if not isinstance(result, dict) or set(result) != {"header", "rows"}:
        raise ValueError("expected an object with the keys header and rows")
    problems = problems_of_header(result["header"])
    rows = result["rows"]
    if not isinstance(rows, list) or not rows:
        problems.append("rows: expected a list that is not empty")
        rows = []
    benchmark = benchmark_of(result["header"]) if isinstance(result["header"], dict) else ""
    for index, row in enumerate(rows if benchmark in BENCHMARKS else ()):
        problems += problems_of_row(row, f"rows[{index}]", benchmark)
    if not problems and not any(is_ours(row) for row in rows):
        problems.append("rows: none of this library")
    if not problems and folder is not None and folder != gpu_folder(result["header"]["gpu"]):
        problems.append(f"folder: expected {gpu_folder(result['header']['gpu'])}, got {folder}")
    if problems:
        raise ValueError("; ".join(problems))


def is_ours(row: Row) -> bool:
    return str(row.get("impl", "")).startswith("dualkv")
