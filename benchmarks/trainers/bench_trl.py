#!/usr/bin/env python
# SPDX-License-Identifier: BSD-3-Clause
"""Train with TRL's GRPOTrainer and with the one that shares prompts, from the same seed, by examples/trl_grpo.py.

    python benchmarks/trainers/bench_trl.py                           # with the example's defaults; minutes on a GPU
    python benchmarks/trainers/bench_trl.py -- --steps 20 --layers 8  # options of the example
    python benchmarks/report.py                                       # the page, of the result files

Each run is a process of its own, TRL's first. A row is a run: what the example writes about it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

from command import RESULTS, ROOT, Result, gpu_folder, parser_of

FOLDER = RESULTS / "trainers" / "trl"
EXAMPLE = ROOT / "examples" / "trl_grpo.py"
LABELS = {"stock": "TRL", "shared": "shared prompts"}  # of both runs


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("example", nargs="*", metavar="OPTION", help="of the example, behind --")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        for switch in (["--stock"], []):
            subprocess.run([sys.executable, EXAMPLE, "--out", folder, *switch, *options.example], check=True)
        rows = [{"who": name, **json.loads((Path(folder) / f"{name}.json").read_text())} for name in LABELS]
    gpu = rows[0]["device"]
    print(Result(options, FOLDER, gpu_folder(gpu), gpu).write(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
