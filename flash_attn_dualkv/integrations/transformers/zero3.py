# SPDX-License-Identifier: BSD-3-Clause
"""LM heads under DeepSpeed ZeRO-3, whose parameters are there once for all chunks.

ZeRO-3 leaves a module's parameters empty and gathers them, from all processes, in hooks around the module's forward and
backward. Around each chunk that would fail: processes with other numbers of chunks would wait for each other, and a
gradient summed over chunks would meet an empty parameter. So the hooks run around all chunks at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")

Score = Callable[[Tensor], tuple[Tensor, ...]]


def gathered_modules(causal_lm: nn.Module, backbone: str) -> list[nn.Module]:
    """The modules of the head whose parameters hooks gather."""
    modules = head_modules(causal_lm, backbone)
    return [one for one in modules if any(_gathers(hook) for name in _HOOKS for hook in getattr(one, name).values())]


def head_modules(causal_lm: nn.Module, backbone: str) -> list[nn.Module]:
    """All modules outside of the backbone."""
    outside = [child for name, child in causal_lm.named_children() if name != backbone]
    return [*dict.fromkeys(module for child in outside for module in child.modules())]


def score_gathered(modules: Sequence[nn.Module], score: Score, hidden: Tensor) -> tuple[Tensor, ...]:
    """score(hidden), with the parameters of the modules gathered in forward and backward."""
    for module in modules:
        score = _Around(module, score)
    return score(hidden)


class _Around(nn.Module):
    """A function in place of a module's forward, inside the hooks of the module that gather."""

    def __init__(self, module: nn.Module, function: Score) -> None:
        super().__init__()
        self.__dict__["function"] = function  # which may be a module: not as a submodule
        self._is_full_backward_hook = module._is_full_backward_hook
        for name in _HOOKS:
            for key, hook in getattr(module, name).items():
                if _gathers(hook):  # as it runs for its own module
                    getattr(self, name)[key] = lambda _, *arguments, hook=hook: hook(module, *arguments)

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        return self.__dict__["function"](hidden)


@contextmanager
def already_gathered(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Leave out the hooks that gather; all others run."""
    before = [(module, name, getattr(module, name)) for module in modules for name in _HOOKS]
    for module, name, hooks in before:
        setattr(module, name, type(hooks)((key, hook) for key, hook in hooks.items() if not _gathers(hook)))
    try:
        yield
    finally:
        for module, name, hooks in before:
            setattr(module, name, hooks)


def _gathers(hook: Any) -> bool:
    """True if it is DeepSpeed's: closures, which nothing but where they are from tells from other hooks."""
    return str(getattr(hook, "__module__", "")).startswith("deepspeed.")
