"""Methods that exchange weights alone: means, and outer steps from the last agreed weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .config import MEAN, LocalUpdate, Method, Nesterov, OuterMomentum, Pipelined
from .recipe import PARAMETERS, Recipe, Track

PATTERNS = ("strided", "sequential")
STALENESS = ("constant", "gap")


@dataclass(frozen=True, kw_only=True)
class Synchronous(Method):
    """Plain data parallel training: gradients are averaged over the replicas at every step, and
    nothing is ever synced. Buffers stay with their replica. The baseline of all others."""

    def recipe(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> Recipe:
        return Recipe(tracks=(), averaged_steps=math.inf)


@dataclass(frozen=True, kw_only=True)
class PostLocalSGD(Pipelined):
    """Post Local SGD (arXiv 1808.07217): averaged gradients first, then a mean of the weights every
    `sync_every` steps."""

    sync_every: int = 16
    """Local optimizer steps between two syncs."""

    def __post_init__(self) -> None:
        self._integer("sync_every", 1)
        super().__post_init__()

    def recipe(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> Recipe:
        tracks = (Track(name=PARAMETERS, every=self.sync_every),)
        return Recipe(tracks=tracks, policy=MEAN, momentum=None, **self.common())


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Nesterov, Pipelined):
    """DiLoCo (arXiv 2311.08105): the mean pseudo-gradient, stepped by Nesterov momentum."""

    sync_every: int = 500
    """Local optimizer steps between two syncs."""
    outer_momentum: float = 0.9
    """Momentum of the outer step, in [0, 1)."""

    def __post_init__(self) -> None:
        self._integer("sync_every", 1)
        super().__post_init__()

    def recipe(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> Recipe:
        return Recipe(
            tracks=(Track(name=PARAMETERS, every=self.sync_every),),
            policy=self.outer_policy(nesterov=self.nesterov),
            momentum=self.momentum,
            **self.common(),
        )


@dataclass(frozen=True, kw_only=True)
class StreamingDiLoCo(Nesterov, Pipelined):
    """Streaming DiLoCo (arXiv 2501.18512): DiLoCo in fragments of the layers, one after the other,
    whose results may arrive steps later and be mixed with what was learnt meanwhile."""

    sync_every: int = 100
    """Local optimizer steps between two syncs of a fragment; a multiple of `fragments`."""
    fragments: int = 4
    """Parts of the model; one of them begins a sync every `sync_every / fragments` steps."""
    pattern: str = "strided"
    """How layers, in order of registration, become fragments: "strided" or "sequential"."""
    delay: int = 5
    """Steps from the begin of a sync to its write-back, fewer than from one begin to the next."""
    alpha: float = 0.5
    """Share of the local weights in alpha * local + (1 - alpha) * agreed at the write-back."""
    outer_lr: float = 0.4
    """Learning rate of the outer step; `Handle.outer_lr` can follow a schedule."""
    outer_momentum: float = 0.9
    """Momentum of the outer step, in [0, 1)."""

    def __post_init__(self) -> None:
        self._integer("sync_every", 1)
        self._integer("fragments", 1)
        self._integer("delay", 0)
        self._number("alpha", 0.0, 1.0, low_included=True)
        self._choice("pattern", PATTERNS)
        super().__post_init__()
        if self.sync_every % self.fragments:
            raise ValueError(
                f"fragments={self.fragments} does not divide sync_every={self.sync_every}."
            )
        interval = self.sync_every // self.fragments
        if self.delay >= interval:
            raise ValueError(
                f"delay={self.delay} must be smaller than the {interval} steps from one fragment's "
                "sync to the next (sync_every / fragments)."
            )
        if self.fragments == 1:
            self._no_effect(["pattern"], "fragments=1")
        if self.delay:
            self._no_effect(["prefetch", "offload"], f"delay={self.delay}: fragments fly whole")

    def recipe(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> Recipe:
        interval = self.sync_every // self.fragments
        tracks = tuple(
            Track(
                name=f"fragment {number}",
                every=self.sync_every,
                offset=(number + 1) * interval,
                fragment=number,
                delay=self.delay,
                keep=float(self.alpha),
            )
            for number in range(self.fragments)
        )
        return Recipe(
            tracks=tracks,
            policy=self.outer_policy(nesterov=self.nesterov),
            momentum=self.momentum,
            fragments=self.fragments,
            strided=self.pattern == "strided",
            **self.common(),
        )


@dataclass(frozen=True, kw_only=True)
class CO2(OuterMomentum, LocalUpdate):
    """CO2 (arXiv 2401.16265): each window hides the exchange of the one before. At the end of
    window t replicas send x_t - local and step by what they have sent a window earlier:

        m <- clamp(outer_momentum m + (x_{t-1} - mean of local) / penalty, +-clip_value)
        x_{t+1} = x_t - outer_lr m

    The first window's result comes at the end of the second; until then x stays. In flight every
    layer holds its buffers, which is CO2's price in memory.
    """

    sync_every: int = 48
    """Local optimizer steps between two syncs."""
    outer_lr: float = 1.0
    """Learning rate of the outer step; `Handle.outer_lr` can follow a schedule."""
    outer_momentum: float = 0.5
    """Momentum of the outer step, in [0, 1)."""
    clip_value: float | None = 1.0
    """Largest magnitude of an element of the outer momentum; None switches clipping off."""
    staleness: str = "constant"
    """What divides a late pseudo-gradient: "constant": `penalty`; "gap": 1 + |x_t - x_{t-1}| /
    `penalty`, a layer's L2 norm."""
    penalty: float = 1.0
    """See `staleness`; the constant is at least 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._integer("sync_every", 1)
        self._number("clip_value", 0.0, math.inf, optional=True)
        self._choice("staleness", STALENESS)
        constant = self.staleness == "constant"
        self._number("penalty", 1.0 if constant else 0.0, math.inf, low_included=constant)

    def recipe(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> Recipe:
        gap = self.staleness == "gap"
        policy = {
            **self.outer_policy(nesterov=False),
            "clip_value": None if self.clip_value is None else float(self.clip_value),
            "staleness": 1.0 if gap else float(self.penalty),
            "gap_scale": float(self.penalty) if gap else None,
        }
        return Recipe(
            tracks=(Track(name=PARAMETERS, every=self.sync_every, delay=self.sync_every),),
            policy=policy,
            momentum=self.momentum,
            overtakes=True,
            **self.common(),
        )


@dataclass(frozen=True, kw_only=True)
class CO2Star(OuterMomentum, Pipelined):
    """CO2* (arXiv 2401.16265), the mode that saves memory: the same outer step without the window
    of lateness, so nothing is stale, and only a few layers are in flight."""

    sync_every: int = 48
    """Local optimizer steps between two syncs."""
    outer_lr: float = 1.0
    """Learning rate of the outer step; `Handle.outer_lr` can follow a schedule."""
    outer_momentum: float = 0.5
    """Momentum of the outer step, in [0, 1)."""
    clip_value: float | None = 1.0
    """Largest magnitude of an element of the outer momentum; None switches clipping off."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._integer("sync_every", 1)
        self._number("clip_value", 0.0, math.inf, optional=True)

    def recipe(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> Recipe:
        clip = None if self.clip_value is None else float(self.clip_value)
        return Recipe(
            tracks=(Track(name=PARAMETERS, every=self.sync_every),),
            policy={**self.outer_policy(nesterov=False), "clip_value": clip},
            momentum=self.momentum,
            **self.common(),
        )
