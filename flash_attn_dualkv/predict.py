# SPDX-License-Identifier: BSD-3-Clause
"""Runs the estimate: `python -m flash_attn_dualkv.predict`."""

import sys

from .cli.predict import main

if __name__ == "__main__":
    sys.exit(main())
