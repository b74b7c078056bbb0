"""How far optimizer states drift over a window, and periods that follow it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from .recipe import Track

SAMPLE = 65_536  # elements of a layer's state at most
FASTEST = 2.0  # by which a period changes at one sync, up or down


def apart(norms: Sequence[float], agreed: float) -> float:
    """How far replicas' states have come apart, relative to their mean.

        sqrt(mean_r |s_r|^2 - |s|^2) / |s| = sqrt(mean_r |s_r - s|^2) / |s|,    s = mean_r s_r

    norms: |s_r| of each replica, fp64; agreed: |s|. The norms are sums of fp32 squares, so less
    than 1e-3 is mostly rounding; it is told as it comes. NaN where the mean is zero.

    >>> round(apart([5.0, 5.0], 4.0), 12)
    0.75
    """
    if not agreed > 0.0:
        return math.nan
    return math.sqrt(max(fmean(n * n for n in norms) - agreed * agreed, 0.0)) / agreed


class Samples:
    """What states were after their last average, by layer: a part of each, evenly spread.

    A full copy would take 4 bytes a parameter and state. Each rank samples its own memory, and on a
    GPU nothing waits.
    """

    def __init__(self) -> None:
        self._then: dict[int, Tensor] = {}

    def keep(self, layer: int, state: list[Tensor]) -> None:
        """Right after the average of a layer's state is in place."""
        self._then[layer] = _sample(state)

    @property
    def bytes(self) -> int:
        """What they take, where the states are."""
        return sum(then.nbytes for then in self._then.values())

    def moved(self, layer: int, state: list[Tensor]) -> Tensor | None:
        """|now - then| / |then|, a number in fp64 on its way to the host, where it is once the
        current stream has come so far; inf or NaN where `then` was zero; None before the first
        average."""
        then = self._then.get(layer)
        if then is None:
            return None
        now = _sample(state)
        if then.shape != now.shape:
            return None
        then = then.double()
        # Into pinned memory: reading a number of the device would wait for all that it has to do.
        return ((now.double() - then).norm() / then.norm()).to("cpu", non_blocking=True)


class Apart:
    """Sums over the layers of one sync, of each track: how far it has drifted apart."""

    def __init__(self) -> None:
        self._squares: dict[int, tuple[float, float]] = {}
        self._steps: dict[int, float] = {}
        self._unequal: set[int] = set()

    def add(self, track: int, stats: dict[str, Any]) -> None:
        """A layer of states, as `_C.Layer.stats()` tells it."""
        if any(stats["flags"]) or any(stats["idle"]) or any(stats["done"]) or stats["void"]:
            self._unequal.add(track)  # its windows are no measure of the period
        each, agreed = self._squares.get(track, (0.0, 0.0))
        each += fmean(norm * norm for norm in stats["norms"])
        self._squares[track] = (each, agreed + stats["merged_norm"] ** 2)
        self._steps[track] = fmean(stats["steps"])

    def take(self) -> dict[int, tuple[float, float]]:
        """Of each track whose replicas all made their steps: how many, in the mean, and see
        `apart`; then begin anew."""
        found = {
            track: (self._steps[track], apart([math.sqrt(each)], math.sqrt(agreed)))
            for track, (each, agreed) in self._squares.items()
            if track not in self._unequal
        }
        self._squares, self._steps, self._unequal = {}, {}, set()
        return found


def next_period(track: Track, every: int, steps: float, drift: float) -> int:
    """The period that follows `every`, after a window of `steps` steps in which the state has
    drifted so far apart.

        steps * target / drift,    from every / 2 to 2 every, and within the track's bounds

    A drift of zero, or one that is not finite, tells nothing: the period stays.

    >>> track = Track(name="exp_avg", every=32, target=0.5, shortest=16, longest=512)
    >>> [next_period(track, 32, 32, drift) for drift in (0.5, 0.4, 2.0, 0.01, 0.0)]
    [32, 40, 16, 64, 32]
    """
    if track.target is None or not (0.0 < drift < math.inf):
        return every
    wanted = min(max(steps * track.target / drift, every / FASTEST), every * FASTEST)
    return min(max(round(wanted), track.shortest), track.longest)


@torch.no_grad()
def _sample(state: list[Tensor]) -> Tensor:
    stride = max(1, -(-sum(t.numel() for t in state) // SAMPLE))
    # Storage is dense, in whatever order of dimensions.
    flat = [t.as_strided((t.numel(),), (1,)) for t in state if t.numel()]
    return torch.cat([t[::stride].float() for t in flat]) if flat else torch.zeros(0)
