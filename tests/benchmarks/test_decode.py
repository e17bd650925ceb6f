# SPDX-License-Identifier: BSD-3-Clause
"""The benchmark of decoding: forests of its shapes, and the page of its results."""

from __future__ import annotations

import json
from pathlib import Path

import bench_decode
import bench_plan
import decode_report
import pytest
import torch
from pages import ResultError


@pytest.mark.parametrize(
    "name", ["4x3x1K", "ragged-4x2", "half-2x4x2K", "levels-2x8x1K", "2x2x1K-q4", "2x2x1K-page256"]
)
def test_forests(name: str) -> None:
    """Requests share the pages of what they are below, and nothing else; every row counts once."""
    step = bench_decode.make_step(name)
    rows = {page: min(step.page_size, keys - column * step.page_size) for table, keys in zip(step.tables, step.keys)
            for column, page in enumerate(table)}  # fmt: skip
    assert step.bytes == sum(rows.values()) * step.kv_heads * bench_decode.HEAD_DIM * 4
    owners: dict[int, set[int]] = {}
    for request, table in enumerate(step.tables):
        for page in table:
            owners.setdefault(page, set()).add(request)
    shared = {page: set(members) for pages, members in step.trunks for page in pages}
    assert all(
        found == shared.get(page, found) and (len(found) == 1 or page in shared) for page, found in owners.items()
    )


@pytest.mark.parametrize("name", ["16x16", "ragged-4x4x8K", "16x16x8M", "x", "16x16x8K-q"])
def test_no_shape(name: str) -> None:
    with pytest.raises(ValueError, match="^shape: expected a name such as"):
        bench_decode.make_step(name)


@pytest.mark.parametrize(("arguments", "file"), [([], "decode"), (["--shape", "4x3x1K"], "decode-shapes")])
def test_names_of_results(arguments: list[str], file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some shapes are not written over the file of all, which is published."""
    monkeypatch.setattr(bench_decode.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench_decode.torch.cuda, "get_device_name", lambda: "G")
    monkeypatch.setattr(bench_decode, "measure", lambda name, rounds: [{"shape": name}])
    assert bench_decode.main(["--out", str(tmp_path), "--commit", "0", *arguments]) == 0
    (found,) = tmp_path.iterdir()
    shapes = [row["shape"] for row in json.loads(found.read_text())["rows"]]
    assert found.name == f"{file}.json" and shapes == (arguments[1:] or list(bench_decode.SHAPES))


def test_tables_of_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each prompt's requests the first pages are the same, and all others their own."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda one: one)
    table, keys, pages = bench_plan.make_table(33, 1024)
    shared = bench_plan.PROMPT // bench_plan.PAGE
    used = [row[: -(-count // bench_plan.PAGE)] for row, count in zip(table.tolist(), keys.tolist())]
    assert min(map(len, used)) > shared and len({tuple(row[:shared]) for row in used}) == 3
    assert used[0][:shared] == used[15][:shared] != used[16][:shared]
    own = [page for row in used for page in row[shared:]]
    assert len({*own}) == len(own) and max(own) < pages and {*own}.isdisjoint(used[0][:shared])
    assert bench_plan.keys_of("1M") == 1 << 20
    for wrong in ("8K", "x", "100001"):
        with pytest.raises(ValueError, match=wrong):
            bench_plan.keys_of(wrong)


def test_page(tmp_path: Path) -> None:
    header = {"benchmark": "decode", "gpu": "G", "torch": "1", "cuda": "1", "commit": "0123456", "dirty": False}
    rows = [{"shape": shape, "impl": impl, "us": us, "floor_us": 80.0} for shape in ("a", "b")
            for impl, us in (("dualkv", 100.0), ("fa3", 250.0))]  # fmt: skip
    file = tmp_path / "G/decode.json"
    file.parent.mkdir()
    file.write_text(json.dumps({"header": header | {"date": "2026", "versions": {}}, "rows": rows}))
    (file.parent / "decode-shapes.json").write_text("of some shapes, not read")
    (page,) = decode_report.render(tmp_path)
    (line,) = (one for one in page.read_text().split("\n") if one.startswith("| a "))
    assert [cell.strip() for cell in line.split("|")[1:-1]] == ["a", "80", "100", "250", "80%"]
    assert (file.parent / "decode.png").stat().st_size > 0
    file.write_text(json.dumps({"header": header | {"date": "2026", "versions": {}}, "rows": rows[1:2]}))
    with pytest.raises(ResultError, match="this library among them"):
        decode_report.render(tmp_path)
