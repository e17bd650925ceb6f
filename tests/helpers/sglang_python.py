# SPDX-License-Identifier: BSD-3-Clause
"""Some modules of the installed SGLang's Python, loaded without its other modules and without what they import.

Importing SGLang takes its kernels, Triton and certain versions of a hundred packages. Modules that tests run are its
own; others are stand-ins, whose every name is a false value that can be called, decorated with and derived from.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

# Also all modules in arg_groups and plugins.
OWN = {
    "sglang.kernels.ops.attention.metadata",
    "sglang.srt.environ",
    "sglang.srt.layers.activation",
    "sglang.srt.layers.attention.attention_registry",
    "sglang.srt.layers.attention.base_attn_backend",
    "sglang.srt.layers.attention.flashattention_backend",
    "sglang.srt.layers.attention.triton_ops.metadata",
    "sglang.srt.layers.quantization.fp4_kv_cache_quant_method",
    "sglang.srt.layers.layernorm",
    "sglang.srt.layers.logprob_processor",
    "sglang.srt.layers.radix_attention",
    "sglang.srt.layers.rotary_embedding.utils",
    "sglang.srt.layers.sampler",
    "sglang.srt.mem_cache.layout.paged_view",
    "sglang.srt.mem_cache.memory_pool",
    "sglang.srt.model_executor.forward_batch_info",
    "sglang.srt.server_args",
}
OWN_FOLDERS = ("sglang.srt.arg_groups", "sglang.srt.plugins")
LAYERS = ("BaseFusedOp", "MultiPlatformOp")  # of which layers derive, to choose a method by the device
OTHERS = {"orjson", "sgl_kernel", "triton", "zmq"}


def is_own(name: str) -> bool:
    return name in OWN or name.startswith(OWN_FOLDERS)


class Kind(type):
    """Of stand-ins, which are classes, so that a module may derive from one or ask for instances of it."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return stand_in(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if not cls.__dict__.get("is_stand_in"):
            return super().__call__(*args, **kwargs)
        return args[0] if len(args) == 1 and callable(args[0]) and not isinstance(args[0], Kind) else stand_in("made")

    def __bool__(cls) -> bool:
        return False

    def __iter__(cls) -> Any:
        return iter(())

    def __enter__(cls) -> Any:
        return cls

    def __exit__(cls, *_: Any) -> None:
        return None

    def _same(cls, *_: Any) -> Any:
        return cls

    def _never(cls, _: Any) -> bool:
        return False

    __getitem__ = __or__ = __ror__ = __add__ = __radd__ = __rtruediv__ = _same
    __lt__ = __le__ = __gt__ = __ge__ = _never


def stand_in(name: str) -> Any:
    return Kind(name, (), {"is_stand_in": True})


class StandInModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        made = importlib.import_module(full) if is_own(full) else nn.Module if name in LAYERS else stand_in(name)
        setattr(self, name, made)
        return made


class _Finder(MetaPathFinder, Loader):
    """Finds SGLang's own modules where tests run them, else stand-ins, with the folders of what they stand for."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        root = name.split(".")[0]
        if root != "sglang":
            return ModuleSpec(name, self, is_package=True) if root in OTHERS else None
        if is_own(name):
            return PathFinder.find_spec(name, path)
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandInModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        assert FOLDER is not None
        parts = module.__name__.split(".")
        module.__path__ = [str(FOLDER.joinpath(*parts[1:]))]
        if module.__name__ == "sglang":
            module.__version__ = version("sglang")  # type: ignore[attr-defined]


_spec = importlib.util.find_spec("sglang")
FOLDER = Path(str(_spec.submodule_search_locations[0])) if _spec and _spec.submodule_search_locations else None


def install() -> bool:
    """Load SGLang's modules like that in this process, from now on; False where it is not installed."""
    if FOLDER is not None and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    return FOLDER is not None
