# SPDX-License-Identifier: BSD-3-Clause
"""Runs the demo: `python -m flash_attn_dualkv.demo`."""

import sys

from .cli.demo import main

if __name__ == "__main__":
    sys.exit(main())
