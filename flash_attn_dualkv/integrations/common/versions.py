# SPDX-License-Identifier: BSD-3-Clause
"""Packages whose methods are overridden, and their versions: one table, and what follows from it.

Versions whose results were compared with stock ones say nothing, and CI installs them. Those that are known to differ
are refused. About others the signatures decide: with those that replacements were written for they run with a warning,
else they are refused. A clone is what it calls itself: 0.9.6.dev0 was not compared. vLLM has a table of its own.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from types import FunctionType
from typing import Any, NamedTuple

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from ...checks import explain
from ...errors import SharedPromptUnsupportedError
from .patching import check_signature

logger = logging.getLogger(__name__)

_PACKAGE = __name__.split(".")[0]
_warned: set[str] = set()


class Package(NamedTuple):
    """A package, and what is known of its versions.

    Attributes:
        name, module: as pip and as Python know it.
        compared: versions, and beginnings of versions, whose results were compared with stock ones.
        differ: what is otherwise in versions that are refused, such as "<0.11.1".
    """

    name: str
    module: str
    compared: tuple[str, ...]
    differ: Mapping[str, str] = {}

    def check_classes(self, *classes: type) -> None:
        """Refuse a version, or warn of it, by the methods of the package that classes of this one override.

        Raises:
            SharedPromptUnsupportedError: a version that is known to differ, or one with other signatures.
        """
        self.check_version()
        with self.deciding():
            for kind in classes:
                for made, stock in _overrides(kind):
                    check_signature(f"{stock.__module__}.{stock.__qualname__}", stock, made)

    def version(self) -> str:
        """That of the module if it is imported and has one, else of the installation."""
        found = getattr(sys.modules.get(self.module), "__version__", None)
        try:
            return str(found or metadata.version(self.name))
        except metadata.PackageNotFoundError:  # a clone on the path
            return "of an unknown version"

    def check_version(self) -> None:
        """SharedPromptUnsupportedError for a version that is known to differ."""
        version = _parsed(self.version())
        for versions, what in self.differ.items():
            if version is not None and SpecifierSet(versions).contains(version, prereleases=True):
                raise self.refusal(what)

    @contextmanager
    def deciding(self) -> Iterator[None]:
        """Around checks of signatures, which decide about versions that were not compared."""
        try:
            yield
        except SharedPromptUnsupportedError as error:
            raise self.refusal(str(error)) from None
        version = _parsed(self.version())
        if not any(_is_of(version, release) for release in self.compared) and self.name not in _warned:
            _warned.add(self.name)
            logger.warning(
                "flash_attn_dualkv: results of %s %s were not compared with stock ones, those of %s were. What is "
                "replaced there has the same signatures, and prompts are shared: compare a step with and without.",
                self.name, self.version(), " and ".join(self.compared),
            )  # fmt: skip

    def refusal(self, reason: str) -> SharedPromptUnsupportedError:
        expected = f"{' or '.join(self.compared)}, which this is written for"
        return SharedPromptUnsupportedError(f"{explain(self.name, expected, self.version())}: {reason}")


TRL = Package("trl", "trl", ("1.16",), {"<1": "its models have no forward that returns scores, fused_lm_head"})
VERL = Package("verl", "verl", ("0.9.1",))
MEGATRON_CORE = Package(
    "megatron-core", "megatron.core", ("0.18.2", "0.19.2"), {"<0.18": "its GPTModel takes no output_processor"}
)
LM_EVAL = Package("lm_eval", "lm_eval", ("0.4.13",))


def _parsed(version: str) -> Version | None:
    """None for what is no version."""
    try:
        return Version(version)
    except InvalidVersion:
        return None


def _is_of(version: Version | None, compared: str) -> bool:
    """True if a version is a release of what was compared: that, or one that begins with it."""
    release = Version(compared).release
    return version is not None and not version.is_prerelease and version.release[: len(release)] == release


def _overrides(kind: type) -> Iterator[tuple[FunctionType, Any]]:
    """The methods that a class has from this package in the place of others', and those others."""
    ours = [base for base in kind.__mro__ if base.__module__.split(".")[0] == _PACKAGE]
    for name, made in [item for base in ours for item in vars(base).items()]:
        stock = next((vars(base)[name] for base in kind.__mro__ if base not in ours and name in vars(base)), None)
        if isinstance(made, FunctionType) and callable(stock) and not name.startswith("__"):
            yield made, stock
