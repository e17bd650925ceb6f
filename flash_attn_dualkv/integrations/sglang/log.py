# SPDX-License-Identifier: BSD-3-Clause
"""SGLang in words."""

import logging

from ..engines.messages import Engine

SGLANG = Engine("SGLang", logging.getLogger("sglang.flash_attn_dualkv"))
