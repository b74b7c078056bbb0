"""Interleaved timing: slow drift of a shared machine hits all cases alike.

Every round times each case once, in an order that rotates from round to round; medians and
percentiles are over rounds. Before each timed call the case is reset, untimed: it works on the same
values each time, and the reset writes all its tensors, so that with tensors larger than the
last-level cache (see `machine`) a timed call starts cold. The garbage collector is off meanwhile.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """What is timed, and what puts its tensors back to their first values."""

    run: Callable[[], object]
    reset: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Times:
    """Seconds per call, in the order of the rounds."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return percentile(self.seconds, 50)

    @property
    def p10(self) -> float:
        return percentile(self.seconds, 10)

    @property
    def p90(self) -> float:
        return percentile(self.seconds, 90)

    @property
    def best(self) -> float:
        return min(self.seconds)


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the two nearest ranks; `percent` in 0..100.

    >>> percentile([4.0, 1.0, 2.0, 3.0], 50), percentile([1.0, 2.0], 10), percentile([7.0], 90)
    (2.5, 1.1, 7.0)
    """
    if not values or not 0 <= percent <= 100:
        raise ValueError(f"percent {percent} of {len(values)} values: expected 0..100 of some")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def interleave(
    cases: Mapping[str, Case],
    repeats: int,
    warmup: int = 2,
    settle: Callable[[], object] = lambda: None,
) -> dict[str, Times]:
    """Time every case `repeats` times after `warmup` untimed rounds, by the wall clock.

    settle: returns when all work of the device is done; called before and inside each timed span.
    """
    if repeats < 1:
        raise ValueError(f"repeats {repeats}: expected at least 1")
    names = list(cases)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for turn in range(-warmup, repeats):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                cases[name].reset()
                settle()
                start = time.perf_counter()
                cases[name].run()
                settle()
                elapsed = time.perf_counter() - start
                if turn >= 0:
                    seconds[name].append(elapsed)
    finally:
        if was_enabled:
            gc.enable()
    return {name: Times(tuple(values)) for name, values in seconds.items()}
