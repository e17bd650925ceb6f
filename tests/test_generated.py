"""Files that a script writes are what it would write now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_wgmma_wrappers() -> None:
    script = ROOT / "tools/generate_wgmma.py"
    written = subprocess.run([sys.executable, script], check=True, capture_output=True, text=True).stdout
    assert (ROOT / "csrc/ptx/wgmma.h").read_text() == written
