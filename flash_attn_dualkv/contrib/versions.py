# SPDX-License-Identifier: BSD-3-Clause
"""Packages whose functions are replaced when they are imported, and their versions.

Ran: with OpenRLHF 0.11.2, ms-swift 4.6.0 and LLaMA-Factory 0.9.5, and in Ray's hook of workers, on a CPU, 2026-11-28.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..checks import explain
from ..errors import SharedPromptUnsupportedError
from ..integrations.common.patching import Make, after_import, replace_all
from ..integrations.common.versions import Package

logger = logging.getLogger(__name__)

_HOOK = "ray._private.runtime_env.setup_hook"  # calls what is named as worker_process_setup_hook


class PatchedPackage(Package):
    """A package whose functions are replaced."""

    def replace(self, modules: Mapping[str, Mapping[str, Make]]) -> None:
        """Replace functions as soon as their modules are imported, all of a module or none; once.

        Inside Ray's hook a refusal is a line of the log, and the package stays as it is: errors there end the job.

        Args:
            modules: what makes replacements, by modules and by names in them, such as "Actor.forward".

        Raises:
            ModuleNotFoundError: the package is missing.
            SharedPromptUnsupportedError: a version that is known to differ, or one with other modules or signatures.
                The import of a module raises it where that comes later.
        """
        is_hook = _is_in_rays_hook()
        refused: list[Exception] = []

        @contextmanager
        def forgiving() -> Iterator[None]:
            try:
                yield
            except (ModuleNotFoundError, SharedPromptUnsupportedError) as error:
                if not is_hook:
                    raise
                refused.append(error)
                logger.warning("flash_attn_dualkv: prompts are NOT shared, %s stays as it is: %s", self.name, error)

        def change(makers: Mapping[str, Make], module: Any) -> None:
            if refused:
                return
            with forgiving(), self.deciding():
                seams = []
                for path, make in makers.items():
                    owner, _, name = path.rpartition(".")
                    seams.append((getattr(module, owner, None) if owner else module, name, make))
                replace_all(seams)

        with forgiving():
            self.check_version()
            self._check_modules(modules)
            for name, makers in modules.items():
                after_import(name, partial(change, makers))

    def _check_modules(self, modules: Iterable[str]) -> None:
        """Refuse a package without these modules, none of which is imported here."""
        spec = find_spec(self.module)
        if spec is None:
            raise ModuleNotFoundError(explain(self.name, "installed", "none"))
        for module in modules:
            parts = module.split(".")[1:]
            paths = [Path(folder, *parts) for folder in spec.submodule_search_locations or ()]
            if not any(path.is_dir() or path.with_suffix(".py").is_file() for path in paths):
                raise self.refusal(f"it has no {module}")


OPENRLHF = PatchedPackage(
    "openrlhf",
    "openrlhf",
    ("0.11.2",),
    {"<0.11.1": "its entropies are those of logits that are not divided by the temperature"},
)
MS_SWIFT = PatchedPackage("ms-swift", "swift", ("4.6.0",))
LLAMA_FACTORY = PatchedPackage("llamafactory", "llamafactory", ("0.9.5",))


def _is_in_rays_hook() -> bool:
    """True if Ray runs this as a worker's worker_process_setup_hook."""
    frame = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != _HOOK:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None
