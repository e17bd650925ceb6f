#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Train with TRL's GRPOTrainer and with the one that shares prompts, from the same seed, by examples/trl_grpo.py.

    python benchmarks/trainers/bench_trl.py                           # with the example's defaults; minutes on a GPU
    python benchmarks/trainers/bench_trl.py --runs stock stock-batching shared-decode --limit 120
    python benchmarks/trainers/bench_trl.py -- --steps 20 --layers 8  # options of the example
    python benchmarks/report.py                                       # the page, of the result files

Each run is a process of its own, in the order asked for. A row is a run: what the example writes about it, up to its
last step within the limit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from command import RESULTS, ROOT, Result, gpu_folder, parser_of
from measure import Row
from pages import WORDS

FOLDER = RESULTS / "trainers" / "trl"
EXAMPLE = ROOT / "examples" / "trl_grpo.py"


def one_run(name: str, folder: Path, options: argparse.Namespace) -> Row:
    """What the example writes about a run, of as many steps as end within the limit."""
    trainer, _, rollouts = name.partition("-")
    command = [sys.executable, str(EXAMPLE), "--out", str(folder), "--rollouts", rollouts or "generate"]
    command += [*(["--stock"] if trainer == "stock" else []), *options.example]
    row: Row = {"who": name}
    try:
        subprocess.run(command, check=True, timeout=options.limit)
    except subprocess.TimeoutExpired:
        row["error"] = f"did not end within {options.limit:.0f} s"
    except subprocess.CalledProcessError as error:
        row["error"] = f"failed with {error.returncode}"
    written = folder / f"{name}.json"
    return row | (json.loads(written.read_text()) if written.exists() else {})


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--runs", nargs="+", choices=WORDS["trl"], default=["stock", "shared"])
    parser.add_argument("--limit", type=float, metavar="S", help="seconds of a run, after which it is ended")
    parser.add_argument("example", nargs="*", metavar="OPTION", help="of the example, behind --")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        rows = [one_run(name, Path(folder), options) for name in options.runs]
    gpu = next(row["device"] for row in rows if "device" in row)
    Result(options, FOLDER, gpu_folder(gpu), gpu).add(*rows, line=lambda row: row["who"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
