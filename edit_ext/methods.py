"""The methods' settings. Each says in `recipe` what it comes down to; the engine does the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch

from .config import MEAN, LocalUpdate, Method, Nesterov, OuterMomentum, Pipelined
from .recipe import Recipe, Track

WEIGHTINGS = ("softmax", "uniform", "steps")
PATTERNS = ("strided", "sequential")
STALENESS = ("constant", "gap")
ORDERS = ("after_step", "before_step")
OUTERS = ("replace", "nesterov")
SCHEDULES = ("periodic", "bernoulli")
PARAMETERS = "parameters"  # name of the track of all of them


@dataclass(frozen=True, kw_only=True)
class Synchronous(Method):
    """Plain data parallel training: gradients are averaged over the replicas at every step, and
    nothing is ever synced. Buffers stay with their replica. The baseline of all others."""

    def recipe(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> Recipe:
        return Recipe(tracks=(), averaged_steps=math.inf)


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
            **self.outer(nesterov=self.nesterov),
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
            policy=self.outer(nesterov=self.nesterov),
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
            policy=self.outer(nesterov=self.nesterov),
            momentum=self.momentum,
            fragments=self.fragments,
            strided=self.pattern == "strided",
            **self.common(),
        )


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
class FedAvgPersistent(PostLocalSGD):
    """Federated averaging with optimizer states that stay with their replica: a mean of the weights
    every `sync_every` steps (the baseline FAVG+OPT of arXiv 2505.22549)."""

    sync_every: int = 256
    """Local optimizer steps between two syncs."""


@dataclass(frozen=True, kw_only=True)
class FedAvgReset(FedAvgPersistent):
    """Federated averaging with optimizer states that are zeroed after each mean of the weights (the
    baseline FAVG-OPT of arXiv 2505.22549)."""

    reset_step: bool = False
    """Whether the optimizer's step counter, and with it bias correction, starts anew too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._flags("reset_step")

    def recipe(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> Recipe:
        return Recipe(
            tracks=(Track(name=PARAMETERS, every=self.sync_every),),
            policy=MEAN,
            momentum=None,
            resets="states and step" if self.reset_step else "states",
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
            **self.outer(nesterov=False),
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
            policy={**self.outer(nesterov=False), "clip_value": clip},
            momentum=self.momentum,
            **self.common(),
        )


@dataclass(frozen=True, kw_only=True)
class LocalAdam(Pipelined):
    """Local Adam (Cheng and Glasgow, 2025): the mean of the weights and of every optimizer state,
    every `sync_every` steps."""

    sync_every: int = 256
    """Local optimizer steps between two syncs."""

    def __post_init__(self) -> None:
        self._integer("sync_every", 1)
        super().__post_init__()

    def recipe(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> Recipe:
        tracks = (
            Track(name=PARAMETERS, every=self.sync_every),
            Track(name="states", every=self.sync_every, states=(), at_step=True),
        )
        return Recipe(tracks=tracks, policy=MEAN, momentum=None, **self.common())


@dataclass(frozen=True, kw_only=True)
class Clocked(Pipelined):
    """Weights and optimizer states, each on its own clock."""

    param_every: int = 32
    """Local optimizer steps between two syncs of the weights."""
    state_every: float | Mapping[str, float] = field(default_factory=dict, hash=False)
    """Steps between two syncs of the optimizer's states: one number for all of them, or one for
    each by its name (states without one stay local); math.inf: never."""
    schedule: str = "periodic"
    """"periodic", or "bernoulli": at each step with probability 1 / period, alike on all
    replicas."""
    seed: int = 0
    """Seed of the schedule by chance."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._integer("param_every", 1)
        self._integer("seed", 0)
        self._choice("schedule", SCHEDULES)
        given = self.state_every
        if isinstance(given, Mapping):
            periods = {key: _period(f"state_every[{key!r}]", n) for key, n in given.items()}
            if not all(isinstance(key, str) for key in periods):
                raise TypeError(f"state_every must name states by strings, but is {given!r}.")
            object.__setattr__(self, "state_every", periods)
        else:
            object.__setattr__(self, "state_every", _period("state_every", given))
        if self.schedule == "periodic":
            self._no_effect(["seed"], "schedule='periodic'")

    def clocks(self, *, at_step: bool) -> tuple[Track, ...]:
        """The tracks. at_step: weights too are written back before the step."""
        seed = self.seed if self.schedule == "bernoulli" else None
        weights = Track(name=PARAMETERS, every=self.param_every, seed=seed, at_step=at_step)
        given = self.state_every
        periods = given if isinstance(given, Mapping) else {"states": given}
        return weights, *(
            Track(
                name=name,
                every=every,
                seed=seed,
                states=(name,) if isinstance(given, Mapping) else (),
                at_step=True,
            )
            for name, every in periods.items()
        )


def _period(name: str, given: Any) -> float:
    if isinstance(given, float) and math.isinf(given) and given > 0:
        return given
    if isinstance(given, bool) or not isinstance(given, Integral):
        raise TypeError(f"{name} must be an integer or math.inf, but is {given!r}.")
    if given < 1:
        raise ValueError(f"{name} must be at least 1, but is {given!r}.")
    return int(given)


@dataclass(frozen=True, kw_only=True)
class DESLOC(Clocked):
    """DES-LOC (arXiv 2505.22549): weights and optimizer states are averaged, each on its own
    clock; slow states need it seldom."""

    state_every: float | Mapping[str, float] = field(
        default_factory=lambda: {"exp_avg": 96, "exp_avg_sq": 192}, hash=False
    )
    """Steps between two syncs of the optimizer's states: one number for all of them, or one for
    each by its name (states without one stay local); math.inf: never."""
    order: str = "after_step"
    """"after_step": an average is there before the next gradient is taken; "before_step", as in
    the paper: between that gradient and its step."""
    outer: str = "replace"
    """What becomes of the weights' mean: "replace", or "nesterov" from the last agreed ones."""
    outer_lr: float = 1.0
    """Learning rate of the outer step; `Handle.outer_lr` can follow a schedule."""
    outer_momentum: float = 0.9
    """Momentum of the outer step, in [0, 1)."""
    momentum: str = "sharded"
    """Where the outer momentum is: "sharded": each replica holds its part of it (4/R bytes a
    parameter); "replicated": all of it (4 bytes), so that none is lost with a replica."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._choice("order", ORDERS)
        self._choice("outer", OUTERS)
        self._number("outer_lr", 0.0, 1e3, high_included=True)
        self._number("outer_momentum", 0.0, 1.0, low_included=True)
        self._choice("momentum", ("sharded", "replicated"))
        if self.outer == "replace":
            self._no_effect(["outer_lr", "outer_momentum", "momentum"], "outer='replace'")
        if self.order == "before_step":
            self._no_effect(["granularity"], "order='before_step': no forward waits")

    def recipe(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> Recipe:
        step = {"outer_lr": float(self.outer_lr), "outer_momentum": float(self.outer_momentum)}
        nesterov = self.outer == "nesterov"
        return Recipe(
            tracks=self.clocks(at_step=self.order == "before_step"),
            policy={**MEAN, "outer": "sgd", **step, "nesterov": True} if nesterov else MEAN,
            momentum=self.momentum if nesterov else None,
            **self.common(),
        )


@dataclass(frozen=True, kw_only=True)
class LocalSGDM(Clocked):
    """Local SGD with momentum as DES-LOC's theory has it (arXiv 2505.22549, Alg. 4): after a step
    the weights are averaged with probability 1 / `param_every`, the momentum of torch.optim.SGD
    with 1 / `state_every`, or by period."""

    state_every: float = 32
    """Steps between two syncs of the momentum; math.inf: never."""
    schedule: str = "bernoulli"
    """"bernoulli": at each step with probability 1 / period, alike on all replicas; or
    "periodic"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.state_every, Mapping):
            raise TypeError(f"state_every must be a number, but is {self.state_every!r}.")

    def recipe(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> Recipe:
        tracks = self.clocks(at_step=False)
        return Recipe(tracks=tracks, policy=MEAN, momentum=None, **self.common())


METHODS = (
    EDiT,
    AEDiT,
    Synchronous,
    PostLocalSGD,
    DiLoCo,
    StreamingDiLoCo,
    CO2,
    CO2Star,
    LocalAdam,
    DESLOC,
    FedAvgPersistent,
    FedAvgReset,
    LocalSGDM,
)
"""What `attach` takes."""
