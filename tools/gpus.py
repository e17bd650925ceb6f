# SPDX-License-Identifier: BSD-3-Clause
"""Asks NVIDIA's driver which GPUs there are. Needs no torch, and no driver either: then there are none."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MAJOR_ATTRIBUTE, MINOR_ATTRIBUTE = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


@dataclass(frozen=True)
class Gpus:
    """The compute capabilities of the visible GPUs, each once, and the newest CUDA version that their driver runs.

    `problem` says why a driver that is there shows none.
    """

    capabilities: tuple[tuple[int, int], ...] = ()
    driver: tuple[int, int] | None = None
    problem: str = ""


class DriverError(Exception):
    """A call of the driver that failed."""


def find_gpus(load: Callable[[str], Any] = ctypes.CDLL) -> Gpus:
    """What the driver says. CUDA_VISIBLE_DEVICES hides GPUs here, too."""
    try:
        cuda = load("libcuda.so.1")
    except OSError:
        return Gpus()
    try:
        status = cuda.cuInit(0)
        if status == NO_DEVICE:
            return Gpus()
        _check("cuInit", status)
        version = _number(cuda, "cuDriverGetVersion")
        count = _number(cuda, "cuDeviceGetCount")
        capabilities = {_capability(cuda, index) for index in range(count)}
    except (DriverError, AttributeError) as error:
        return Gpus(problem=f"NVIDIA's driver (libcuda.so.1) is here, but {error}")
    return Gpus(tuple(sorted(capabilities)), (version // 1000, version % 1000 // 10))


def _capability(cuda: Any, index: int) -> tuple[int, int]:
    device = _number(cuda, "cuDeviceGet", index)
    major, minor = (
        _number(cuda, "cuDeviceGetAttribute", attribute, device) for attribute in (MAJOR_ATTRIBUTE, MINOR_ATTRIBUTE)
    )
    return major, minor


def _number(cuda: Any, function: str, *arguments: int) -> int:
    """The number that a function of the driver writes to its first argument."""
    value = ctypes.c_int()
    _check(function, getattr(cuda, function)(ctypes.byref(value), *arguments))
    return value.value


def _check(function: str, status: int) -> None:
    if status:
        raise DriverError(f"{function} fails with code {status}")
