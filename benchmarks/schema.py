"""What a result file must be before it may be published."""

from __future__ import annotations

import math
import re
from typing import Any

from flash_attn_dualkv.predict import DIRECTIONS, attention_flops

Result = dict[str, Any]
Row = dict[str, Any]

HEADER_TYPES: dict[str, type | tuple[type, ...]] = {
    "gpu": str,
    "torch": str,
    "cuda": str,
    "commit": str,
    "date": str,
    "matmul_tflops": (int, float),
    "dirty": bool,
}
ROW_TYPES: dict[str, type | tuple[type, ...]] = {
    "n": int,
    "p": int,
    "r": int,
    "impl": str,
    "dtype": str,
    "direction": str,
    "ms": (int, float, type(None)),
    "tflops": (int, float, type(None)),
    "peak_gib": (int, float, type(None)),
    "matmul_tflops": (int, float, type(None)),
    "shape": str,
    "h": int,
    "h_k": int,
    "d": int,
    "visible_pairs": int,
}
OURS = re.compile(r"dualkv_sm(80|90)(_deterministic)?")
PEERS = re.compile(r"(fa2|flash_attn|fa3)_(replicated|gathered)|cudnn_replicated|flex_packed")


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
    if header["dirty"]:
        problems.append("header: measured on a dirty tree")
    if not re.fullmatch(r"[0-9a-f]{7,40}", header["commit"]):
        problems.append(f"header: commit is no commit hash, got {header['commit']!r}")
    if not header["matmul_tflops"] > 0:
        problems.append(f"header: matmul_tflops must be positive, got {header['matmul_tflops']!r}")
    if not re.match(r"\d{4}-\d{2}-\d{2}", header["date"]):
        problems.append(f"header: date is not ISO 8601, got {header['date']!r}")
    return problems


def problems_of_row(row: Any, where: str) -> list[str]:
    problems = check_types(row, ROW_TYPES, where)
    if problems:
        return problems
    if not (OURS.fullmatch(row["impl"]) or PEERS.fullmatch(row["impl"])):
        problems.append(f"{where}: unknown impl {row['impl']!r}; ours must name sm80 or sm90")
    if row["direction"] not in DIRECTIONS:
        problems.append(f"{where}: direction must be one of {DIRECTIONS}, got {row['direction']!r}")
    if row["dtype"] not in ("bf16", "fp16"):
        problems.append(f"{where}: dtype must be bf16 or fp16, got {row['dtype']!r}")
    if problems:
        return problems
    if row.get("error") and is_ours(row):
        problems.append(f"{where}: {row['impl']} failed: {row['error']}")
    if row["ms"] is not None:
        return problems + problems_of_figures(row, where)
    if not (row.get("oom") or row.get("skipped") or row.get("error")):
        problems.append(f"{where}: no time, and neither oom, skipped nor error says why")
    return problems


def problems_of_figures(row: Row, where: str) -> list[str]:
    missing = [key for key in ("tflops", "peak_gib", "matmul_tflops") if row[key] is None]
    if missing:
        return [f"{where}: {', '.join(missing)} is null beside a time"]
    problems = []
    if not (row["ms"] > 0 and row["peak_gib"] > 0 and row["matmul_tflops"] > 0):
        problems.append(f"{where}: ms, peak_gib and matmul_tflops must be positive")
    flops = attention_flops(row["h"], row["d"], row["visible_pairs"], row["direction"])
    if row["ms"] > 0 and not math.isclose(row["tflops"], flops / row["ms"] / 1e9, rel_tol=0.01, abs_tol=0.02):
        problems.append(f"{where}: tflops {row['tflops']} does not follow from ms and the visible pairs")
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
    for index, row in enumerate(rows):
        problems += problems_of_row(row, f"rows[{index}]")
    if not problems and not any(is_ours(row) for row in rows):
        problems.append("rows: none of this library")
    if not problems and folder is not None and folder != gpu_folder(result["header"]["gpu"]):
        problems.append(f"folder: expected {gpu_folder(result['header']['gpu'])}, got {folder}")
    if problems:
        raise ValueError("; ".join(problems))


def is_ours(row: Row) -> bool:
    return str(row.get("impl", "")).startswith("dualkv")
