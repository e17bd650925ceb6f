# SPDX-License-Identifier: BSD-3-Clause
"""How the commands `predict` and `demo` read arguments: what makes no sense is refused in one line, with status 2."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from fractions import Fraction
from typing import Any, NoReturn

MOST_TOKENS = 1 << 30  # limit of a prompt or a response: what the kernels can address
MOST_RESPONSES = 1 << 16
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20}


class CommandLine(argparse.ArgumentParser):
    """A parser whose errors are one line; argparse prints its usage first."""

    def __init__(self, module: str, text: str | None) -> None:
        description = (text or "").partition("\n")[0]
        super().__init__(prog=f"python -m flash_attn_dualkv.{module}", description=description, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {' '.join(message.split())}\n")


def number(low: float, high: float, whole: bool = True) -> Callable[[str], Any]:
    """Reads a number in [low, high], an int or else a float; 8K is 8192 and 1M is 1024K."""

    def read(text: str) -> float:
        # Leading zeros are refused: 1,024 is not two lengths.
        found = re.fullmatch(r"((?:0|[1-9][0-9]{0,11})(?:\.[0-9]{1,6})?)([KkMm]?)", text)
        exact = Fraction(found[1]) * UNITS[found[2].upper()] if found else Fraction(-1)
        value = int(exact) if whole else float(exact)
        if not low <= value <= high or (whole and value != exact):
            kind = "a whole number" if whole else "a number"
            raise argparse.ArgumentTypeError(f"expected {kind} from {low} to {high:,} (8K is 8192), got {text!r}")
        return value

    return read


def name_or_values(known: Mapping[str, Any], counts: Sequence[int], read: Callable[[str], Any]) -> Callable[[str], Any]:
    """Reads a name in `known`, or the values of the first fields of such an object, separated by commas.

    `counts`: how many of them there may be.
    """
    make = type(next(iter(known.values())))
    names = " or ".join(",".join(field.name for field in fields(make)[:count]) for count in counts)

    def find(text: str) -> Any:
        if text in known:
            return known[text]
        parts = text.split(",")
        if len(parts) not in counts:
            raise argparse.ArgumentTypeError(f"expected {', '.join(known)} or {names}, got {text!r}")
        try:
            return make(*map(read, parts))
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return find


def response_lengths(text: str) -> Sequence[int]:
    """Reads lengths of responses: 900 or 131..2048 of however many (a range), 500,900,1200 of three (a list)."""
    read = number(1, MOST_TOKENS)
    if "," in text:
        return [read(part) for part in text.split(",")]
    bounds = [read(part) for part in text.split("..")]
    if len(bounds) > 2 or bounds[0] > bounds[-1]:
        raise argparse.ArgumentTypeError(f"expected a length, A..B with A <= B, or a list A,B,C, got {text!r}")
    return range(bounds[0], bounds[-1] + 1)


def add_group(parser: argparse.ArgumentParser, **options: Any) -> None:
    """--prompt, --responses and --response; `options` say of --prompt and --response that they are required."""
    tokens, count = number(1, MOST_TOKENS), number(1, MOST_RESPONSES)
    lengths = "tokens of each: 900, or 131..2048 for lengths spread evenly, or a list 500,900,1200"
    parser.add_argument("--prompt", type=tokens, metavar="P", help="tokens of the prompt, such as 8K", **options)
    parser.add_argument("--responses", type=count, metavar="N", help="how many; needless with a list of lengths")
    parser.add_argument("--response", type=response_lengths, metavar="R", help=lengths, **options)


def spread(
    parser: argparse.ArgumentParser, lengths: Sequence[int], count: int | None, default: int | None = None
) -> list[int]:
    """The length of each response. A range is cut into `count` equal parts, and each response has the middle of one.

    So a result hangs on no draw, tokens stay whole, and their mean is that of the range to half a token. Where no count
    was given, a list has its own, and a range the `default`.
    """
    if not isinstance(lengths, range):
        if count not in (None, len(lengths)):
            parser.error(f"argument --responses: expected {len(lengths)}, the lengths of --response, got {count}")
        return list(lengths)
    parts = default if count is None else count
    if parts is None:
        parser.error("argument --responses: expected how many, got nothing")
    return [lengths[(2 * i + 1) * len(lengths) // (2 * parts)] for i in range(parts)]
