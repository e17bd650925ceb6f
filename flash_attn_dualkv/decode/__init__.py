# SPDX-License-Identifier: BSD-3-Clause
"""Decoding over paged caches whose requests share prefixes."""
