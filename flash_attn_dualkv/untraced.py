"""Functions that compilers leave alone: what they do depends on the values of tensors, and is done on the host."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Returned = TypeVar("Returned")

REASON = (
    "packing reads token ids and lengths on the host: pack before the compiled function and hand it the batch, or "
    "compile without fullgraph=True"
)


def untraced(function: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """Let torch.compile call a function as it is, from whatever code it traces; elsewhere nothing changes.

    `torch.compiler.disable` would import the compiler together with this package, which takes seconds: it is called
    once there is a trace.
    """
    disabled: list[Callable[..., Any]] = []

    def outside(*args: Any, **kwargs: Any) -> Any:
        if not disabled:
            disabled.append(torch.compiler.disable(function, reason=REASON))
        return disabled[0](*args, **kwargs)

    # What torch.compiler.disable notes on a function: a trace ends here, with this reason.
    outside._torchdynamo_disable = True  # type: ignore[attr-defined]
    outside._torchdynamo_disable_msg = REASON  # type: ignore[attr-defined]

    @functools.wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
        if torch.compiler.is_compiling():
            result: Returned = outside(*args, **kwargs)
            return result
        return function(*args, **kwargs)

    return call
