"""What each method costs on a link: seconds, bytes, utilisation and memory, by arithmetic alone.

Two models of time. One hides nothing: the wall-clock model of DES-LOC (arXiv 2505.22549, App. G),
in which every exchange stops the training. The other hides what edit_ext hides: a sync behind the
forward, states behind a whole step, late results behind the steps until they are due. Neither
counts the arithmetic of a sync itself, stragglers, or shards and replicas that share a cable.

N parameters, S shards a replica, R replicas, L layers, w bytes an element on the wire, a link of B
bytes/s for each rank, s seconds of computing a step, and l seconds of latency: what an exchange
costs whatever its size. A layer's sync is four messages in turn (norms, pieces, the merged norm,
pieces), so over a distance l is four times the way there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from . import methods
from .planner_memory import state_bytes
from .planner_time import (
    bytes_per_step,
    exchange_seconds,
    exposed_with_overlap,
    exposed_without_overlap,
    payload_bytes,
)
from .planner_units import WIRES, PlanError, at_least

SYNC_SECONDS = methods.AEDiT().sync_seconds
ROUNDING = 1e-12  # a period that is whole but for it is whole
STATE_RATIOS = (3, 6)  # periods of exp_avg and exp_avg_sq by that of the weights, if not given


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained on what. Raises PlanError, naming the field, for what cannot be."""

    params: float
    """N, of the whole model."""
    replicas: int
    """R, at least 2."""
    bandwidth: float
    """B, bytes/s."""
    latency: float
    """l, seconds."""
    step_time: float
    """s, seconds."""
    shards: int = 1
    """S: ranks that hold one replica together."""
    layers: int = 32
    """L, of equal size; also the buckets of gradients that are averaged at every step."""
    wire: str = "fp32"
    """"fp32" or "bf16", of syncs; gradients are averaged in fp32."""
    target: float = 0.95
    """Utilisation that the smallest periods must reach, above 0 and below 1."""
    prefetch: int = 2
    """Layers in flight at once."""

    def __post_init__(self) -> None:
        for name, least in (("params", 1), ("replicas", 2), ("shards", 1), ("layers", 1)):
            at_least(name, getattr(self, name), least)
        for name in ("bandwidth", "step_time"):
            if not 0 < getattr(self, name) < math.inf:
                raise PlanError(f"{name} must be above 0 and finite, but is {getattr(self, name)}")
        if not 0 <= self.latency < math.inf:
            raise PlanError(f"latency must be at least 0 and finite, but is {self.latency}")
        if not 0 < self.target < 1:
            raise PlanError(f"target must be above 0 and below 1, but is {self.target}")
        if self.wire not in WIRES:
            raise PlanError(f"wire must be one of {', '.join(WIRES)}, but is {self.wire!r}")
        at_least("prefetch", self.prefetch, 1)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """When a method exchanges what. Raises PlanError, naming the field, for what cannot be."""

    method: str
    every: float
    """Steps between two syncs of the weights, or of one fragment of them."""
    hidden_by: str = "forward"
    """"forward": each layer is due at its own forward; "delay": a fragment, steps later; "window":
    all of it, a window later; "backward": gradients, at every step."""
    states: tuple[float, ...] = ()
    """Steps between two syncs of each optimizer state; math.inf: never."""
    fragments: int = 1
    delay: int = 0

    def __post_init__(self) -> None:
        for name, value in (("every", self.every), ("fragments", self.fragments)):
            at_least(name, value, 1)
        for period in self.states:
            at_least("states", period, 1, endless=True)
        for period in (self.every, *self.states) if self.states else ():
            if math.isfinite(period) and period != int(period):
                raise PlanError(f"every and states must be whole steps, but one is {period:g}")
        at_least("delay", self.delay, 0)
        if self.fragments > 1 and self.every % self.fragments:
            raise PlanError(
                f"every must be a multiple of fragments={self.fragments}, but is {self.every:g}"
            )
        if self.delay and self.delay >= self.every / self.fragments:
            raise PlanError(
                f"delay must be below every / fragments = {self.every / self.fragments:g} steps, "
                f"but is {self.delay}"
            )

    @property
    def adjustable(self) -> bool:
        """Whether there is a period that could be longer."""
        return self.hidden_by != "backward"


_STREAMING = methods.StreamingDiLoCo()
_CLOCKS = methods.DESLOC()
_TOGETHER = methods.LocalAdam().sync_every
_STATES = tuple(float(track.every) for _, track in _CLOCKS.recipe().state_tracks())

# By the settings' own defaults.
DEFAULTS: Mapping[str, Schedule] = {
    each.method: each
    for each in (
        Schedule(method="synchronous", every=1, hidden_by="backward"),
        Schedule(method="post-local-sgd", every=methods.PostLocalSGD().sync_every),
        Schedule(method="diloco", every=methods.DiLoCo().sync_every),
        Schedule(
            method="streaming-diloco",
            every=_STREAMING.sync_every,
            hidden_by="delay",
            fragments=_STREAMING.fragments,
            delay=_STREAMING.delay,
        ),
        Schedule(method="co2", every=methods.CO2().sync_every, hidden_by="window"),
        Schedule(method="co2-star", every=methods.CO2Star().sync_every),
        Schedule(method="edit", every=methods.EDiT().sync_every),
        Schedule(method="a-edit", every=SYNC_SECONDS),  # at one step a second: see `scheduled`
        Schedule(method="local-adam", every=_TOGETHER, states=(_TOGETHER, _TOGETHER)),
        Schedule(method="des-loc", every=_CLOCKS.param_every, states=_STATES),
        Schedule(method="fedavg-persistent", every=methods.FedAvgPersistent().sync_every),
        Schedule(method="fedavg-reset", every=methods.FedAvgReset().sync_every),
    )
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one method costs by one model."""

    method: str
    bytes_per_step: float
    """Payload that one rank sends, without padding and records."""
    reduction_vs_ddp: float
    """How many times less that is than gradients averaged in fp32 at every step."""
    seconds_per_step: float
    exposed_seconds_per_step: float
    """Of them, those in which nothing computes."""
    utilisation: float
    """Share of the time that computes: s / seconds_per_step."""
    state_bytes_per_rank: float
    """What the method holds besides the model and its optimizer; see planner_memory."""


def scheduled(method: str, job: Job, sync_seconds: float = SYNC_SECONDS) -> Schedule:
    """The defaults of a method; a-edit's seconds become max(1, seconds / s) steps.

    Raises PlanError for an unknown name.
    """
    if method not in DEFAULTS:
        raise PlanError(f"method must be one of {', '.join(DEFAULTS)}, but is {method!r}")
    found = DEFAULTS[method]
    if method == "a-edit":
        found = replace(found, every=max(1.0, sync_seconds / job.step_time))
    return found


def rows(job: Job, schedules: Sequence[Schedule], *, overlap: bool) -> list[Row]:
    """A row for each method, by the model with overlap or by the one without."""
    return [_row(job, schedule, overlap) for schedule in schedules]


def _row(job: Job, schedule: Schedule, overlap: bool) -> Row:
    exposed = (exposed_with_overlap if overlap else exposed_without_overlap)(job, schedule)
    sent = bytes_per_step(job, schedule)
    return Row(
        method=schedule.method,
        bytes_per_step=sent,
        reduction_vs_ddp=payload_bytes(job, 4) / sent,
        seconds_per_step=job.step_time + exposed,
        exposed_seconds_per_step=exposed,
        utilisation=job.step_time / (job.step_time + exposed),
        state_bytes_per_rank=state_bytes(job, schedule),
    )


def smallest_period(job: Job, schedule: Schedule, *, overlap: bool) -> int | None:
    """The fewest steps between two syncs with which utilisation reaches the target u.

    A window exposes E seconds whatever its length K, so K = E u / (s (1 - u)); results that are a
    window late have K s seconds, so K = C u / s. States keep the ratios of their periods, and a
    fragment gets delay + 1 steps at least. None where gradients are averaged at every step.
    """
    if not schedule.adjustable:
        return None
    step, u = job.step_time, job.target
    if overlap and schedule.hidden_by == "window":
        steps = exchange_seconds(job, schedule, messages=job.layers) * u / step
    else:
        exposed = exposed_with_overlap if overlap else exposed_without_overlap
        steps = exposed(job, schedule) * schedule.every * u / (step * (1 - u))
    each = max(math.ceil(steps / schedule.fragments * (1 - ROUNDING)), 1 + schedule.delay)
    return each * schedule.fragments
