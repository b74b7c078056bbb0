"""Methods that also average the inner optimizer's states on their own clocks, or reset them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch

from .config import MEAN, OuterMomentum, Pipelined
from .half_lives import half_life_periods
from .methods_outer import PostLocalSGD
from .recipe import PARAMETERS, Recipe, Track

ORDERS = ("after_step", "before_step")
OUTERS = ("replace", "nesterov")
SCHEDULES = ("periodic", "bernoulli")
LONGEST = 16  # times its first period that an adaptive one may become
HALF_LIFE = "half-life"


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
    state_every: float | str | Mapping[str, float] = field(default_factory=dict, hash=False)
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
        if given == HALF_LIFE and isinstance(self, DESLOC):
            pass  # known with the optimizer
        elif isinstance(given, Mapping):
            periods = {key: _period(f"state_every[{key!r}]", n) for key, n in given.items()}
            if not all(isinstance(key, str) for key in periods):
                raise TypeError(f"state_every must name states by strings, but is {given!r}.")
            object.__setattr__(self, "state_every", periods)
        else:
            object.__setattr__(self, "state_every", _period("state_every", given))
        if self.schedule == "periodic":
            self._no_effect(["seed"], "schedule='periodic'")

    def clocks(
        self, given: Any, *, at_step: bool, target: float | None = None
    ) -> tuple[Track, ...]:
        """The tracks. given: `state_every`; at_step: weights too are written back before the step;
        target: the drift that periods of states follow."""
        seed = self.seed if self.schedule == "bernoulli" else None
        weights = Track(name=PARAMETERS, every=self.param_every, seed=seed, at_step=at_step)
        periods = given if isinstance(given, Mapping) else {"states": given}
        return weights, *(
            Track(
                name=name,
                every=every,
                seed=seed,
                states=(name,) if isinstance(given, Mapping) else (),
                at_step=True,
                target=None if math.isinf(every) else target,
                shortest=self.param_every,
                longest=1 if math.isinf(every) else max(self.param_every, int(LONGEST * every)),
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
class DESLOC(OuterMomentum, Clocked):
    """DES-LOC (arXiv 2505.22549): weights and optimizer states are averaged, each on its own
    clock; slow states need it seldom."""

    state_every: float | str | Mapping[str, float] = field(
        default_factory=lambda: {"exp_avg": 96, "exp_avg_sq": 192}, hash=False
    )
    """Steps between two syncs of the optimizer's states: one number for all of them, or one for
    each by its name (states without one stay local); math.inf: never; "half-life": those of the
    optimizer's betas, where they are longer than `param_every`."""
    order: str = "after_step"
    """"after_step": an average is there before the next gradient is taken; "before_step", as in
    the paper: between that gradient and its step."""
    adaptive: float | None = None
    """How far the replicas' states may come apart over a window, relative to their mean: after each
    average of a state its period is set anew so that it comes at this distance, by a factor of 2 at
    most, from `param_every` to 16 times what `state_every` says; None: periods stay."""
    outer: str = "replace"
    """What becomes of the weights' mean: "replace", or "nesterov" from the last agreed ones."""
    outer_lr: float = 1.0
    """Learning rate of the outer step; `Handle.outer_lr` can follow a schedule."""
    outer_momentum: float = 0.9
    """Momentum of the outer step, in [0, 1)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._choice("order", ORDERS)
        self._choice("outer", OUTERS)
        if self.outer == "replace":
            self._no_effect(["outer_lr", "outer_momentum", "momentum"], "outer='replace'")
        self._number("adaptive", 0.0, math.inf, optional=True)
        if self.schedule != "periodic":
            self._no_effect(["adaptive"], f"schedule={self.schedule!r}")
        every = self.state_every
        periods = every.values() if isinstance(every, Mapping) else [every]
        if all(period == math.inf for period in periods):
            self._no_effect(["adaptive"], f"state_every={every!r}: no state is averaged")
        if self.order == "before_step":
            self._no_effect(["granularity"], "order='before_step': no forward waits")

    def recipe(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> Recipe:
        nesterov = self.outer == "nesterov"
        every = self.state_every
        if every == HALF_LIFE:
            every = half_life_periods(optimizers, self.param_every)
        return Recipe(
            tracks=self.clocks(every, at_step=self.order == "before_step", target=self.adaptive),
            policy=self.outer_policy(nesterov=True) if nesterov else MEAN,
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
        tracks = self.clocks(self.state_every, at_step=False)
        return Recipe(tracks=tracks, policy=MEAN, momentum=None, **self.common())
