# SPDX-License-Identifier: BSD-3-Clause
"""A trainer's script whose command line has SGLang's arguments, and which then knows the attention backend dualkv.

    python -m flash_attn_dualkv.integrations.sglang train.py --sglang-attention-backend dualkv --sglang-page-size 64 ...

slime and miles make SGLang's parser in a process that loads none of its plug-ins. Their servers load them.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from . import register


def main() -> None:
    """Run the script that the first argument names, with the rest, as Python does."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m flash_attn_dualkv.integrations.sglang SCRIPT [ARGUMENT ...]")
    register()
    script = sys.argv[1]
    sys.argv[:2] = [script]
    sys.path[0] = str(Path(script).resolve().parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
