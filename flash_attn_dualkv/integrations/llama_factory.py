# SPDX-License-Identifier: BSD-3-Clause
"""The old place of `contrib.llama_factory`."""

from ..moved import names_of

__getattr__ = names_of("flash_attn_dualkv.contrib.llama_factory", "flash_attn_dualkv.integrations.llama_factory")

if __name__ == "__main__":
    __getattr__("main")()
