# SPDX-License-Identifier: BSD-3-Clause
"""The old place of `contrib.openrlhf`."""

from ..moved import names_of

__getattr__ = names_of("flash_attn_dualkv.contrib.openrlhf", "flash_attn_dualkv.integrations.openrlhf")
