# SPDX-License-Identifier: BSD-3-Clause
"""SGLang on decoding over shared prefixes: rollouts read each prompt once.

    python -m sglang.launch_server --model-path MODEL --attention-backend dualkv
    sglang.Engine(model_path=MODEL, attention_backend="dualkv")

are all, as SGLang loads this plug-in where the package is installed. docs/rollouts.md: limits.

Made for SGLang 0.5.12 to 0.5.23: versions.py says what differs. On a GPU 0.5.12 has run.
"""

from __future__ import annotations

import importlib
from typing import Any

from ...decode.calls import PAGE_ROWS
from ...errors import SharedPromptError, SharedPromptUnsupportedError
from ..engines.names import check_names, check_overrides
from . import pages
from .log import SGLANG
from .versions import check_runner, installed, names

__all__ = ["create", "register"]

_REGISTRY = "sglang.srt.layers.attention.attention_registry"


def register() -> None:
    """The entry point: gives SGLang the attention backend dualkv. It may run in every process, and again."""
    registry: Any = importlib.import_module(_REGISTRY)
    if pages.NAME not in registry.ATTENTION_BACKENDS:
        registry.register_attention_backend(pages.NAME)(create)
        arguments: Any = importlib.import_module("sglang.srt.server_args")
        for kind in ("", "deterministic_", "radix_supported_deterministic_"):
            getattr(arguments, f"add_{kind}attention_backend_choices")([pages.NAME])
        pages.install()


def create(runner: Any) -> Any:
    """The backend of SGLang's model runner: SGLang's own where this one cannot serve, and the log says why.

    Raises:
        SharedPromptUnsupportedError: a version that is too old; multi-head latent attention.
        SharedPromptError: pages that the kernels cannot read; a setting that is not as described.
    """
    version = installed()
    if runner.use_mla_backend:  # whose operators SGLang chooses by the name of the backend
        raise SharedPromptUnsupportedError("attention_backend", "fa3 for multi-head latent attention", pages.NAME)
    try:
        check_names(names(version))
        check_runner(runner)
        backend: Any = importlib.import_module(f"{__name__}.backend")
        kind = getattr(backend, version.backend)
        check_overrides(backend.SharedPrefixBackend, kind)
    except (ImportError, SharedPromptUnsupportedError) as error:
        reason = f"this SGLang is another: {error}"
    else:
        reason = backend.why_stock(runner)
        if reason is None:
            if runner.page_size % PAGE_ROWS:
                expected = f"a multiple of {PAGE_ROWS} for the attention backend {pages.NAME}: --page-size {pages.SIZE}"
                raise SharedPromptError("page_size", expected, runner.page_size)
            return kind(runner)
    SGLANG.say_once(f"all layers run on SGLang's own attention backend fa3: {reason}", runner)
    return importlib.import_module(_REGISTRY).ATTENTION_BACKENDS["fa3"](runner)
