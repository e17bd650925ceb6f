# SPDX-License-Identifier: BSD-3-Clause
"""The single source of the package's version."""

__version__ = "0.3.0"
