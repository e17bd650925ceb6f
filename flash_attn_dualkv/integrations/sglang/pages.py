# SPDX-License-Identifier: BSD-3-Clause
"""Page size of SGLang's cache: 64 where the backend is asked for and no other size is.

SGLang's default is 1, pages that the kernels do not read. Larger ones cost siblings less than a page each.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from .versions import installed

NAME = "dualkv"
SIZE = 64


def install() -> None:
    """Set the default where SGLang does, by a hook that it applies once all plug-ins are loaded."""
    hooks: Any = importlib.import_module("sglang.srt.plugins.hook_registry")
    version = installed()
    hooks.HookRegistry.register(version.page_seam, _decide if version.decides else _write, hooks.HookType.AROUND)


def _lacks_size(arguments: Any) -> bool:
    asked = arguments.attention_backend, arguments.decode_attention_backend, arguments.prefill_attention_backend
    return arguments.page_size is None and NAME in asked


def _write(stock: Callable[[Any], None], arguments: Any) -> None:
    """In the place of a method that writes to the arguments."""
    if _lacks_size(arguments):
        arguments.page_size = SIZE
    stock(arguments)


def _decide(stock: Callable[[Any], dict[str, Any]], view: Any) -> dict[str, Any]:
    """In the place of a function that returns what it decides."""
    return {"page_size": SIZE} if _lacks_size(view) else stock(view)
