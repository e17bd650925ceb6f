# SPDX-License-Identifier: BSD-3-Clause
"""Rows that several processes divide."""
