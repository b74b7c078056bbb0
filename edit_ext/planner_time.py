"""Seconds and bytes of exchanges: the two models of planner.py as formulas, in its letters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations
from typing import TYPE_CHECKING

from .planner_units import WIRES

if TYPE_CHECKING:
    from .planner import Job, Schedule

FORWARD, BACKWARD = 1 / 3, 2 / 3  # of a step's computing: a backward is two forwards


def payload_bytes(job: Job, wire: int) -> float:
    """2 (R-1)/R w N/S bytes: what a rank sends to average its N/S elements, as a ring does."""
    return 2 * (job.replicas - 1) / job.replicas * wire * job.params / job.shards


def bytes_per_step(job: Job, schedule: Schedule) -> float:
    """The payload times 1/K_x + 1/K_u + 1/K_v + ..., the syncs a step (arXiv 2505.22549)."""
    wire = WIRES[job.wire] if schedule.adjustable else 4
    syncs = 1 / schedule.every + sum(1 / period for period in schedule.states)
    return payload_bytes(job, wire) * syncs


def exchange_seconds(
    job: Job, schedule: Schedule, share: float = 1.0, messages: float = 1.0
) -> float:
    """C = 2P/B (1 - 1/R) + l of P = w N/S bytes, of a `share` of them, in so many `messages`."""
    wire = WIRES[job.wire] if schedule.adjustable else 4
    return share * payload_bytes(job, wire) / job.bandwidth + messages * job.latency


def layer_wise(total: float, hiding: float, layers: float) -> float:
    """Exposed seconds max(C/L, C - F (L-1)/L) of an exchange of C = `total` seconds in L equal
    layers behind F = `hiding` seconds of computing: the first layer has nothing to hide behind,
    each other one the computing of those before it.

    >>> layer_wise(8.0, 16.0, 8), layer_wise(32.0, 16.0, 8)
    (1.0, 18.0)
    """
    return max(total / layers, total - hiding * (layers - 1) / layers)


def exposed_without_overlap(job: Job, schedule: Schedule) -> float:
    """Exposed seconds a step, c (1/K_x + 1/K_u + 1/K_v) with c = 2P/B (1 - 1/R) + l of all weights;
    K_x = 1 for averaged gradients. Fragments pay a latency each."""
    fragment = exchange_seconds(job, schedule, 1 / schedule.fragments)
    state = exchange_seconds(job, schedule)
    weights = fragment * schedule.fragments / schedule.every
    return weights + sum(state / period for period in schedule.states)


def exposed_with_overlap(job: Job, schedule: Schedule) -> float:
    """Exposed seconds a step when exchanges hide behind computing. C: of all weights, in L messages
    (of a fragment, in L/fragments).

    forward: layer_wise(C, s/3, L) a sync. States begin behind the weights and are due at the
        optimizer's step: n of them at once cost max(0, n C - s), and max(layer_wise, (1+n) C - s)
        together with weights. How often which ones meet follows from their periods.
    delay: max(0, C_fragment - delay s) for each fragment; with delay 0 as forward.
    window: max(0, C - K s).
    backward: layer_wise(C, 2s/3, L) at each step, the last bucket being ready when all is over.
    """
    step, layers = job.step_time, max(1.0, job.layers / schedule.fragments)
    whole = exchange_seconds(job, schedule, 1 / schedule.fragments, layers)
    if schedule.hidden_by == "backward":
        return layer_wise(whole, BACKWARD * step, layers)
    if schedule.hidden_by == "window":
        return max(0.0, whole - schedule.every * step) / schedule.every
    if schedule.hidden_by == "delay" and schedule.delay:
        late = max(0.0, whole - schedule.delay * step)
        return late * schedule.fragments / schedule.every
    alone = layer_wise(whole, FORWARD * step, layers)
    total = 0.0
    for rate, weights, states in meetings(schedule):
        queue = max(0.0, (weights + states) * whole - step) if states else 0.0
        total += rate * max(alone if weights else 0.0, queue)
    return total * schedule.fragments


def meetings(schedule: Schedule) -> Iterator[tuple[float, bool, int]]:
    """(how often a step, whether weights are due, how many states) of each set of clocks that may
    be due at one step with no other: by inclusion and exclusion over least common multiples.

    >>> from edit_ext.planner import Schedule
    >>> [*meetings(Schedule(method="weights every 2, a state every 4", every=2, states=(4,)))]
    [(0.25, True, 0), (0.0, False, 1), (0.25, True, 1)]
    """
    if not schedule.states:
        yield 1 / schedule.every, True, 0
        return
    periods = [int(p) for p in (schedule.every, *schedule.states) if math.isfinite(p)]
    clocks = range(len(periods))
    sets = [frozenset(c) for n in range(1, len(periods) + 1) for c in combinations(clocks, n)]
    for due in sets:
        rate = sum(
            Fraction((-1) ** len(more - due), math.lcm(*(periods[clock] for clock in more)))
            for more in sets
            if due <= more
        )
        yield float(rate), 0 in due, len(due - {0})
