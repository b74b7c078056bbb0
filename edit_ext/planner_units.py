"""Quantities as people write them: 10gbit, 1GB/s, 30ms, 7e9; what is odd is refused."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
WIRES = {"fp32": 4, "bf16": 2}  # bytes an element
PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
# One letter tells by its case, as everywhere: b is a bit, B a byte. A number alone counts bits.
RATE = re.compile(rf"({NUMBER})\s*([kKmMgGtT]?)(b|B|(?i:bits?)|(?i:bytes?)|)((?i:/s|ps)?)")
TIMES = {"": 1.0, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


class PlanError(ValueError):
    """What was asked cannot be planned. One sentence, made to be shown to the user as it is."""


def bandwidth(text: str, name: str = "link") -> float:
    """Bytes a second of "10gbit", "800mbit/s", "1e9" (bits), "25Gbps" or "1GB/s" (bytes).

    Decimal prefixes. Raises PlanError unless it is a finite rate above 0.

    >>> bandwidth("10gbit"), bandwidth("1e9"), bandwidth("1GB/s"), bandwidth("800 Mb/s")
    (1250000000.0, 125000000.0, 1000000000.0, 100000000.0)
    """
    found = RATE.fullmatch(text.strip())
    expected = "a rate above 0 in bit/s, such as 10gbit, 800mbit or 1e9, or in bytes, such as 1GB/s"
    if not found:
        raise PlanError(f"{name} must be {expected}, but is {text!r}")
    number, prefix, unit, _ = found.groups()
    bits = 8.0 if unit == "B" or unit.lower().startswith("byte") else 1.0
    return _checked(float(number) * PREFIXES[prefix.lower()] * bits / 8, text, name, expected)


def seconds(text: str, name: str, *, zero: bool = False) -> float:
    """Seconds of "30ms", "2.5", "2.5s", "100us", "10min". Raises PlanError unless finite and above
    0, or at least 0 with `zero`.

    >>> seconds("30ms", "latency"), seconds("2.5", "step-time")
    (0.03, 2.5)
    """
    least = "of at least 0" if zero else "above 0"
    expected = f"a time {least}, such as 2.5, 2.5s, 30ms or 100us"
    return _checked(_scaled(text, name, TIMES, expected), text, name, expected, zero)


def count(text: str, name: str, *, zero: bool = False) -> int:
    """A whole number of at least 1, or 0 with `zero`: "7e9", "7b", "350m". Raises PlanError for any
    other.

    >>> count("7e9", "params"), count("1.5b", "params")
    (7000000000, 1500000000)
    """
    expected = f"a whole number of at least {int(not zero)}, such as 16, 7e9, 7b or 350m"
    value = _checked(_scaled(text.lower(), name, COUNTS, expected), text, name, expected, zero)
    # 1.7b is 1.7 times 1e9, which floats may miss by a ulp.
    if abs(value - round(value)) > 1e-9 * value:
        raise PlanError(f"{name} must be {expected}, but is {text!r}")
    return round(value)


def at_least(name: str, value: float, least: int, *, endless: bool = False) -> None:
    """Raises PlanError below `least`, and for infinity unless it may be `endless`."""
    if not value >= least or (math.isinf(value) and not endless):
        finite = "" if endless else " and finite"
        raise PlanError(f"{name} must be at least {least}{finite}, but is {value:g}")


def _scaled(text: str, name: str, units: Mapping[str, float], expected: str) -> float:
    found = re.fullmatch(rf"({NUMBER})\s*([a-zµ]*)", text.strip())
    if not found or found.group(2) not in units:
        raise PlanError(f"{name} must be {expected}, but is {text!r}")
    return float(found.group(1)) * units[found.group(2)]


def _checked(value: float, text: str, name: str, expected: str, zero: bool = False) -> float:
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise PlanError(f"{name} must be {expected}, but is {text!r}")
    return value
