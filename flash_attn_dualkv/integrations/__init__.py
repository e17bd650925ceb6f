# SPDX-License-Identifier: BSD-3-Clause
"""Shared-prompt attention in other libraries; a module needs the library of its name."""
