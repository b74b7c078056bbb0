"""Points of a stream, and the spans of time between them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

Span = tuple[float, float]  # seconds from the start of a run


class Clock:
    """Points of the caller's stream, or of the host's time on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: Any, then: Any) -> float:
        return first.elapsed_time(then) / 1e3 if self.cuda else then - first

    def passed(self, mark: Any) -> bool:
        return mark.query() if self.cuda else True

    def settle(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    @contextmanager
    def no_host_sync(self) -> Iterator[None]:
        """Any operation of torch that waits for the GPU is an error inside."""
        if self.cuda:
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            if self.cuda:
                torch.cuda.set_sync_debug_mode("default")


def side_spans(ready: Sequence[float], took: Sequence[float]) -> list[Span]:
    """When a stream worked that takes tasks in order, each once it is ready.

    >>> side_spans([0.0, 1.0, 5.0], [2.0, 1.0, 0.5])
    [(0.0, 2.0), (2.0, 3.0), (5.0, 5.5)]
    """
    spans: list[Span] = []
    for at, seconds in zip(ready, took, strict=True):
        start = max(at, spans[-1][1] if spans else at)
        spans.append((start, start + seconds))
    return spans


def shared_seconds(left: Sequence[Span], right: Sequence[Span]) -> float:
    """Seconds that lie in a span of each list; spans of one list do not overlap.

    >>> shared_seconds([(0.0, 2.0), (3.0, 4.0)], [(1.0, 3.5)])
    1.5
    """
    return sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in left for b in right)
