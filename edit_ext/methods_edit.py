"""EDiT and A-EDiT: settings of the pseudo-gradient penalty."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .config import Nesterov, Pipelined
from .recipe import PARAMETERS, Recipe, Track

WEIGHTINGS = ("softmax", "uniform", "steps")


@dataclass(frozen=True, kw_only=True)
class Penalized(Nesterov, Pipelined):
    """EDiT's pseudo-gradient penalty (arXiv 2412.07210, section 3.3) and its outer step."""

    clip_norm: float | None = 10.0
    """Largest L2 norm of a layer's merged pseudo-gradient (Eq. 4); None switches clipping off."""
    weighting: str = "softmax"
    """How accepted replicas are weighted: "softmax" of -norm (Eq. 2), "uniform" or "steps"."""
    temperature: float = 1.0
    """Temperature of the softmax weighting."""
    z_threshold: float | None = 3.0
    """Standard deviations above which a replica is flagged (Eq. 1); None: only if its norm is not
    finite. Sums of squares beyond the range of fp32, norms above 1.8e19, count as not finite."""
    ema_alpha: float = 0.02
    """Weight of the newest norm in the detector's running mean and variance."""
    ema_warmup: int = 10
    """Norms a detector must have seen before it flags (syncs)."""
    max_flags_in_a_row: int = 10
    """A replica flagged more often in a row is accepted if finite, an error if not."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._integer("ema_warmup", 2)
        self._integer("max_flags_in_a_row", 1)
        self._number("clip_norm", 0.0, math.inf, optional=True)
        self._number("temperature", 0.0, math.inf)
        self._number("z_threshold", 0.0, math.inf, optional=True)
        self._number("ema_alpha", 0.0, 1.0)
        self._choice("weighting", WEIGHTINGS)
        if self.weighting != "softmax":
            self._no_effect(["temperature"], f"weighting={self.weighting!r}")
        if self.z_threshold is None:
            self._no_effect(["ema_alpha", "ema_warmup"], "z_threshold=None: there is no detector")

    def penalized(self, every: float, min_steps: int = 0) -> Recipe:
        """The recipe with a sync of all layers every so many steps."""
        z = self.z_threshold
        policy = {
            **self.outer_policy(nesterov=self.nesterov),
            "clip_norm": None if self.clip_norm is None else float(self.clip_norm),
            "weighting": self.weighting,
            "temperature": float(self.temperature),
            "z_threshold": None if z is None else float(z),
            "ema_alpha": float(self.ema_alpha),
            "ema_warmup": self.ema_warmup,
            "max_flags_in_a_row": self.max_flags_in_a_row,
            "min_steps": min_steps,
        }
        tracks = (Track(name=PARAMETERS, every=every),)
        return Recipe(tracks=tracks, policy=policy, momentum=self.momentum, **self.common())


@dataclass(frozen=True, kw_only=True)
class EDiT(Penalized):
    """How EDiT (arXiv 2412.07210) trains: local steps, then a sync layer by layer."""

    sync_every: int = 128
    """Local optimizer steps between two syncs."""

    def __post_init__(self) -> None:
        self._integer("sync_every", 1)
        super().__post_init__()

    def recipe(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> Recipe:
        return self.penalized(self.sync_every)


@dataclass(frozen=True, kw_only=True)
class AEDiT(Penalized):
    """How A-EDiT (arXiv 2412.07210) trains: as EDiT, but a sync is due by the clock on the wall.

    Replicas of unequal speed make unequal numbers of steps in a window and do not wait for the
    slowest. What one clock says holds for all: a replica that is due asks the others, and they take
    part after their next step.
    """

    sync_seconds: float = 600.0
    """Seconds between two syncs, from the step after which a replica asked for one."""
    min_steps: int = 0
    """Steps that all replicas together must have made in a window. With fewer its sync is void: it
    changes nothing and the window goes on; but not when every replica has ended its training."""

    def __post_init__(self) -> None:
        self._number("sync_seconds", 0.0, math.inf)
        self._integer("min_steps", 0, 1_000_000_000_000)
        super().__post_init__()

    def recipe(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> Recipe:
        return self.penalized(math.inf, self.min_steps)
