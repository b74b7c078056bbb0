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


def at_least(least: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, got {text}")
        return value

    number.__name__ = "whole number"  # argparse says: invalid whole number value
    return number


def step_range(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    if not (first.isdigit() and last.isdigit() and int(first) < int(last)):
        raise argparse.ArgumentTypeError(f"wants A:B with A < B, got {text!r}")
    return int(first), int(last)
