# SPDX-License-Identifier: BSD-3-Clause
"""The families of kernels, as a fixture. Not for all tests: importing it may compile the kernels for the host."""

from launches import kernels  # noqa: F401
