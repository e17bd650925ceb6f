"""Checks of what callers of the shared-prompt functions give: each returns the value in the form that is used.

A violated precondition is a `SharedPromptError` that names the argument, what was expected and what was got. The checks
of the attention functions' tensors are in `checks.py`.
"""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Hashable, Iterable, Sequence, Sized
from typing import Any, TypeVar

import torch
from torch import Tensor

from .checks import explain
from .errors import SharedPromptError, SharedPromptTypeError

T = TypeVar("T")

_WITHOUT_OPERATORS = (torch.uint16, torch.uint32, torch.uint64)

# Iterable, but not a list of samples: their elements have no order, or are no samples.
_NOT_LISTS = (str, bytes, bytearray, dict, set, frozenset)


def describe(value: object) -> str:
    """A value in an error message: never longer than a line."""
    if isinstance(value, Tensor):
        kind = "nested" if value.is_nested else f"of shape {tuple(value.shape)}"
        return f"a tensor {kind} and {value.dtype} on {value.device}"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, list, tuple)):
        return reprlib.repr(value)
    return f"a {type(value).__name__}" if not isinstance(value, type) else f"the class {value.__name__}"


def integer(name: str, value: Any, least: int | None = None, most: int | None = None) -> int:
    """An int (no bool, no tensor) within the bounds."""
    bounds = [f">= {least}"] if least is not None else []
    bounds += [f"<= {most}"] if most is not None else []
    expected = " ".join(("an int", " and ".join(bounds))).rstrip()
    if isinstance(value, (bool, Tensor)) or not hasattr(value, "__index__"):
        raise SharedPromptTypeError(explain(name, expected, describe(value)))
    try:
        number = operator.index(value)
    except TypeError:  # an array of several
        raise SharedPromptTypeError(explain(name, expected, describe(value))) from None
    if (least is not None and number < least) or (most is not None and number > most):
        raise SharedPromptError(explain(name, expected, number))
    return number


def flag(name: str, value: Any) -> bool:
    """A bool; "no" and 0 are none."""
    if not isinstance(value, bool):
        raise SharedPromptTypeError(explain(name, "a bool", describe(value)))
    return value


def positive(name: str, value: Any) -> float:
    """A finite number > 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SharedPromptTypeError(explain(name, "a float > 0", describe(value)))
    if not 0.0 < value < math.inf:
        raise SharedPromptError(explain(name, "a finite number > 0", value))
    return float(value)


def choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """One of the choices."""
    if not isinstance(value, str) or value not in choices:
        raise SharedPromptError(explain(name, " or ".join(map(repr, choices)), describe(value)))
    return value


def instance(name: str, value: Any, kind: type[T], hint: str = "") -> T:
    """A value of that class."""
    if not isinstance(value, kind):
        raise SharedPromptTypeError(explain(name, f"a {kind.__name__}{hint}", describe(value)))
    return value


def items(name: str, values: Any, of: str) -> Sequence[Any]:
    """A list, a tuple or something like them, with a length and an order."""
    if type(values) is list:  # to ask whether it is a Sequence takes longer
        return values
    if not isinstance(values, Sequence) or isinstance(values, _NOT_LISTS):
        is_array = isinstance(values, Sized) and hasattr(values, "__getitem__") and not isinstance(values, _NOT_LISTS)
        if not is_array or getattr(values, "ndim", 1) == 0:
            raise SharedPromptTypeError(explain(name, f"a list of {of}", describe(values)))
        return list(values)
    return values


def integers(name: str, tensor: Any, dimensions: int, also: Sequence[torch.dtype] = ()) -> Tensor:
    """A dense integer tensor with numbers in it, of that many dimensions; int64 for types that lack operators."""
    if not isinstance(tensor, Tensor):
        raise SharedPromptTypeError(explain(name, "an integer tensor", describe(tensor)))
    if tensor.layout != torch.strided or tensor.is_nested:
        raise SharedPromptTypeError(explain(name, "a dense integer tensor", f"one of layout {tensor.layout}"))
    if tensor.is_meta:
        raise SharedPromptError(explain(name, "a tensor that has values", "one on meta"))
    is_integer = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    if not is_integer and tensor.dtype not in also:
        raise SharedPromptTypeError(explain(name, "integers", tensor.dtype))
    if tensor.dim() != dimensions:
        raise SharedPromptError(explain(name, f"{dimensions} dimension(s)", f"shape {tuple(tensor.shape)}"))
    return tensor.to(torch.int64) if tensor.dtype in _WITHOUT_OPERATORS else tensor


def lengths(name: str, values: Any, count: int | None = None, like: str = "", least: int = 0) -> list[int]:
    """Numbers of tokens, a list or a 1-D integer tensor, `count` of them (as `like`)."""
    given = integers(name, values, 1).tolist() if isinstance(values, Tensor) else items(name, values, "ints")
    if count is not None and len(given) != count:
        raise SharedPromptError(explain(name, f"{count} of them (as {like})", len(given)))
    if set(map(type, given)) <= {int} and min(given, default=least) >= least:
        return list(given)
    return [integer(f"{name}[{index}]", one, least) for index, one in enumerate(given)]


def group_ids(values: Any) -> list[Hashable] | Tensor:
    """Ids of groups: hashable values, or one integer tensor, which is left where it is."""
    expected = "hashable values or one integer tensor"
    if isinstance(values, Tensor):
        return integers("group_ids", values, 1)
    if not isinstance(values, Iterable) or isinstance(values, _NOT_LISTS):
        raise SharedPromptTypeError(explain("group_ids", expected, describe(values)))
    try:
        ids = list(values)
    except TypeError:  # an array of no dimensions
        raise SharedPromptTypeError(explain("group_ids", expected, describe(values))) from None
    for index, one in enumerate(ids):
        # Equal tensors have different hashes.
        if isinstance(one, Tensor) or not _is_hashable(one):
            raise SharedPromptTypeError(
                explain(f"group_ids[{index}]", "a hashable value that is no tensor", describe(one))
            )
    return ids


def _is_hashable(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def device(value: Any) -> torch.device:
    """A device that is there."""
    try:
        chosen = torch.device(value)
    except (RuntimeError, TypeError, ValueError):
        expected = 'a device such as "cpu", "cuda" or "cuda:0"'
        raise SharedPromptError(explain("device", expected, describe(value))) from None
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise SharedPromptError(explain("device", f"one of {torch.cuda.device_count()} visible GPUs", chosen))
    return chosen
