# SPDX-License-Identifier: BSD-3-Clause
"""The repository stays as light as it has become."""

from __future__ import annotations

import re

import weight

EXAMPLE = '''"""What a module says,
in two lines."""
# A comment.
import os

class Kind:
    """Kind of thing."""
    text = """not a
    docstring"""

    def run(self, one):
        """

        Whether it runs.
        """
        return [one for one in  # why
                self.text]
'''


def test_counts() -> None:
    """Strings that are no docstrings are code, and a statement has all lines it spans."""
    source = weight.Source(EXAMPLE)
    assert source.code_lines == 7
    assert len(source.docstring_lines) == 2 + 1 + 4
    assert source.names("one") == 3 and source.clauses == 2


def test_nothing_grows() -> None:
    """Numbers above their bars may only go down, and a recorded number goes once its bar is met."""
    grown = [found for found in weight.weights() if found.count > found.most]
    assert not grown, "above the numbers in tests/helpers/weight.py"
    assert all(found.recorded is None or found.recorded > found.bar for found in weight.weights())


def test_docstrings_stay() -> None:
    assert weight.docstring_share() >= weight.LEAST_DOCSTRINGS


def test_ci_prints_the_table() -> None:
    script = (weight.ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (lint,) = re.findall(r"^job_lint\(\) \{\n(.*?)^\}$", script, re.S | re.M)
    assert "python tests/helpers/weight.py\n" in lint
    assert len(weight.table().splitlines()) == len(weight.weights()) + 2
