# SPDX-License-Identifier: BSD-3-Clause
"""Integrations that have not run on their real trainer or card; each file says what ran, where and when."""
