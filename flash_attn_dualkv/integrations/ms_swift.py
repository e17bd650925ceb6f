# SPDX-License-Identifier: BSD-3-Clause
"""The old place of `contrib.ms_swift`."""

from ..moved import names_of

__getattr__ = names_of("flash_attn_dualkv.contrib.ms_swift", "flash_attn_dualkv.integrations.ms_swift")
