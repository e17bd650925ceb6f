# SPDX-License-Identifier: BSD-3-Clause
"""Common to the plug-ins of engines that roll out: settings, statistics, messages and checks of names."""
