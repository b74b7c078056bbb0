"""Kinds of numbers on the command line, for `add_argument(type=...)`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable


def number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"must be finite, got {text}")
    return value


def number_or_none(text: str) -> float | None:
    return None if text.lower() in ("none", "off") else number(text)


def above_zero(text: str) -> float:
    value = number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"must be above 0, got {text}")
    return value


above_zero.__name__ = "number"  # argparse says: invalid number value


def at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return value

    number.__name__ = "whole number"  # argparse says: invalid whole number value
    return number


def replica_factor(text: str) -> tuple[int, float]:
    replica, _, factor = text.partition(":")
    try:
        found = int(replica), number(factor)
    except ValueError:
        raise argparse.ArgumentTypeError(f"wants R:FACTOR, such as 1:2.5, got {text!r}") from None
    if found[0] < 0 or found[1] < 1:
        raise argparse.ArgumentTypeError(f"wants R >= 0 and FACTOR >= 1, got {text!r}")
    return found


def step_range(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    if not (first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise argparse.ArgumentTypeError(f"wants A:B with A < B, got {text!r}")
    return int(first), int(last)
