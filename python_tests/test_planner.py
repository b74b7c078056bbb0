"""The planner against the paper's ratios, numbers by hand, brute force, and what a sync holds."""

from __future__ import annotations

import doctest
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import Ranks
from torch import nn

import edit_ext
from edit_ext import explain, planner_time, planner_units, reference
from edit_ext.planner import DEFAULTS, Job, Schedule, rows, scheduled, smallest_period
from edit_ext.planner_memory import state_bytes, state_parts
from edit_ext.planner_time import (
    exchange_seconds,
    exposed_with_overlap,
    exposed_without_overlap,
    layer_wise,
    meetings,
)

# All weights take (2 * 4e9 * 3/4) / 1e9 = 6 s; with a message a layer 6 + 10 * 0.1 = 7 s.
JOB = Job(params=1e9, replicas=4, bandwidth=1e9, latency=0.1, step_time=3.0, layers=10)
WEIGHTS = Schedule(method="edit", every=2)


def test_doctests() -> None:
    """The examples in the modules' docstrings are true."""
    for module in (planner_units, planner_time):
        found = doctest.testmod(module)
        assert found.attempted >= 3 and not found.failed


def test_ratios_of_the_paper() -> None:
    """170x, 85x and 256x less than data parallel training (arXiv 2505.22549), whatever the rest."""
    for job in (JOB, replace(JOB, replicas=7, shards=8, params=1.7e9)):
        schedules = [
            Schedule(method="des-loc", every=256, states=(768, 1536)),
            DEFAULTS["local-adam"],
            DEFAULTS["fedavg-persistent"],
            DEFAULTS["synchronous"],
        ]
        found = [row.reduction_vs_ddp for row in rows(job, schedules, overlap=True)]
        assert [math.floor(ratio + 1e-9) for ratio in found] == [170, 85, 256, 1]
        assert [f"{ratio:.1f}" for ratio in found[:2]] == ["170.7", "85.3"]


def test_bytes_are_those_of_the_ledger() -> None:
    """Payload a step is the ledger's without records, where nothing is padded."""
    replicas, each = 4, 128 * 4 * 3
    job = replace(JOB, params=2 * 10 * each, shards=2)
    for wire, width in (("fp32", 4), ("bf16", 2)):
        sent = reference.wire_bytes([each], replicas, 0, wire=width) - 32 * 3 - 16 * 3
        (row,) = rows(replace(job, wire=wire), [WEIGHTS], overlap=False)
        assert row.bytes_per_step * WEIGHTS.every == 10 * sent


def test_nothing_hidden() -> None:
    """c (1/K_x + 1/K_u + 1/K_v) with c = 2P/B (1 - 1/R) + l; a latency for each fragment."""
    c = 6.1
    cases = {
        "synchronous": c, "edit": c / 128, "local-adam": 3 * c / 256,
        "des-loc": c * (1 / 32 + 1 / 96 + 1 / 192), "streaming-diloco": 6.4 / 100, "co2": c / 48,
    }  # fmt: skip
    for method, expected in cases.items():
        assert exposed_without_overlap(JOB, DEFAULTS[method]) == pytest.approx(expected)
    halved = replace(JOB, shards=2, wire="bf16")
    assert exposed_without_overlap(halved, WEIGHTS) == pytest.approx(1.6 / 2)
    # Gradients travel in fp32 whatever the wire of syncs.
    assert exposed_without_overlap(halved, DEFAULTS["synchronous"]) == pytest.approx(3.1)


def test_hidden_by_hand() -> None:
    """C = 7 s in 10 layers behind a forward of 1 s, a backward of 2 s, or steps of 3 s."""
    assert exposed_with_overlap(JOB, WEIGHTS) == pytest.approx((7 - 0.9) / 2)
    assert exposed_with_overlap(JOB, DEFAULTS["synchronous"]) == pytest.approx(7 - 1.8)
    late = Schedule(method="co2", every=2, hidden_by="window")
    assert exposed_with_overlap(JOB, late) == pytest.approx((7 - 6) / 2)
    assert exposed_with_overlap(JOB, replace(late, every=3)) == 0
    # A fragment is 3.5 s in five messages; two of them in four steps.
    parts = Schedule(method="streaming-diloco", every=4, hidden_by="delay", fragments=2)
    assert exposed_with_overlap(JOB, replace(parts, delay=1)) == pytest.approx(2 * 0.5 / 4)
    assert exposed_with_overlap(JOB, parts) == pytest.approx(2 * (3.5 - 0.8) / 4)
    # Weights alone 6.1, with one state 14 - 3; a state alone 7 - 3: steps 4 of 6, and 3 of 6.
    apart = Schedule(method="des-loc", every=2, states=(3,))
    assert exposed_with_overlap(JOB, apart) == pytest.approx((2 * 6.1 + 4 + 11) / 6)


@pytest.mark.parametrize("prefetch", [2, 3, 8])
@pytest.mark.parametrize(("total", "forward"), [(8.0, 1.0), (8.0, 7.9), (8.0, 16.0), (1.0, 99.0)])
def test_layer_wise_is_what_a_queue_does(prefetch: int, total: float, forward: float) -> None:
    """A link that takes one layer after the other, with `prefetch` of them in flight at most."""
    layers, now, link = 8, 0.0, 0.0
    done: list[float] = []
    for layer in range(layers):
        # Begins until enough are in flight: a slot is free when an earlier layer is waited for.
        while len(done) < min(layer + prefetch, layers):
            link = max(link, now) + total / layers
            done.append(link)
        now = max(now, done[layer])
        # The slot is free from here on, while this layer's own forward runs.
        if len(done) < layers:
            link = max(link, now) + total / layers
            done.append(link)
        now += forward / layers
    assert now - forward == pytest.approx(layer_wise(total, forward, layers))


@pytest.mark.parametrize("periods", [(256, 768, 1536), (4, 6, 9), (2, 3), (5, 5, 5), (7, math.inf)])
def test_meetings_by_counting(periods: tuple[float, ...]) -> None:
    """Clocks that are due together, counted over a whole cycle."""
    every, *states = periods
    cycle = math.lcm(*(int(p) for p in periods if math.isfinite(p)))
    counted: dict[tuple[bool, int], float] = {}
    for step in range(1, cycle + 1):
        key = (step % every == 0, sum(step % p == 0 for p in states if math.isfinite(p)))
        counted[key] = counted.get(key, 0) + 1 / cycle
    told: dict[tuple[bool, int], float] = {}
    for rate, weights, number in meetings(Schedule(method="x", every=every, states=tuple(states))):
        assert rate >= 0
        told[weights, number] = told.get((weights, number), 0) + rate
    for key in told | counted:
        if key != (False, 0):
            assert told[key] == pytest.approx(counted.get(key, 0))


def moved(schedule: Schedule, every: int) -> Schedule:
    """The same with another period; states keep their ratios."""
    states = tuple(period * every / schedule.every for period in schedule.states)
    return replace(schedule, every=every, states=states)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("target", [0.5, 0.95, 0.999])
def test_smallest_period_is_the_smallest(target: float, overlap: bool) -> None:
    """It reaches the target, and the next smaller one that could be does not."""
    for step_time in (3.0, 0.3, 40.0):
        job = replace(JOB, target=target, step_time=step_time)
        for method in DEFAULTS:
            schedule = scheduled(method, job)
            least = smallest_period(job, schedule, overlap=overlap)
            if method == "synchronous":
                assert least is None
                continue
            assert least is not None and least % schedule.fragments == 0
            (row,) = rows(job, [moved(schedule, least)], overlap=overlap)
            assert row.utilisation >= target - 1e-9
            fewer = least - schedule.fragments
            if fewer >= schedule.fragments * (schedule.delay + 1):
                (row,) = rows(job, [moved(schedule, fewer)], overlap=overlap)
                assert row.utilisation < target


def test_rows_hang_together() -> None:
    """Seconds, exposed seconds and utilisation of a row say the same; overlap never costs."""
    job = replace(JOB, latency=0.0)
    schedules = [scheduled(method, job) for method in DEFAULTS]
    hidden, plain = (rows(job, schedules, overlap=overlap) for overlap in (True, False))
    for ours, theirs in zip(hidden, plain, strict=True):
        for row in (ours, theirs):
            assert row.seconds_per_step == job.step_time + row.exposed_seconds_per_step
            assert row.utilisation == job.step_time / row.seconds_per_step
        assert ours.exposed_seconds_per_step <= theirs.exposed_seconds_per_step * (1 + 1e-12)
        assert ours.state_bytes_per_rank == theirs.state_bytes_per_rank
        assert ours.bytes_per_step == theirs.bytes_per_step
    assert scheduled("a-edit", job).every == 200 and scheduled("a-edit", job, 1.0).every == 1


def test_memory_by_hand() -> None:
    """Bytes a parameter with four replicas: the table of planner_memory."""
    flying = (4 + 3 + 1) * 2 / 10
    expected = {
        "synchronous": 0, "edit": 5 + flying, "a-edit": 5 + flying, "diloco": 5 + flying,
        "post-local-sgd": 4 + flying, "local-adam": 5.2 + flying, "des-loc": 5.2 + flying,
        "fedavg-persistent": 4 + flying, "fedavg-reset": 4 + flying, "co2": 5 + 8 * 11 / 10,
        "co2-star": 5 + flying, "streaming-diloco": 5 + 8 / 4,
    }  # fmt: skip
    assert expected.keys() == DEFAULTS.keys()
    for method, each in expected.items():
        assert state_bytes(JOB, DEFAULTS[method]) == pytest.approx(each * 1e9)
    assert state_parts(replace(JOB, wire="bf16"), WEIGHTS)["in_flight"] == (2 + 1.5 + 1) / 5
    assert state_bytes(replace(JOB, shards=4), WEIGHTS) == state_bytes(JOB, WEIGHTS) / 4


WIDTH, LAYERS = 256, 6


HELD: dict[str, tuple[Any, Schedule]] = {
    "edit": (edit_ext.EDiT(sync_every=1), WEIGHTS),
    "edit-bf16": (edit_ext.EDiT(sync_every=1, wire="bf16"), WEIGHTS),
    "co2": (edit_ext.CO2(sync_every=1), Schedule(method="co2", every=1, hidden_by="window")),
    "streaming": (
        edit_ext.StreamingDiLoCo(sync_every=6, fragments=3, delay=1),
        Schedule(method="streaming-diloco", every=6, hidden_by="delay", fragments=3, delay=1),
    ),
    "post-local-sgd": (
        edit_ext.PostLocalSGD(sync_every=1), Schedule(method="post-local-sgd", every=1)
    ),
    "local-adam": (
        edit_ext.LocalAdam(sync_every=1), Schedule(method="local-adam", every=1, states=(1, 1))
    ),
}  # fmt: skip


def held(name: str) -> dict[str, int]:
    """What explain() counts after some syncs of equal layers."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    with edit_ext.attach(model, optimizer, HELD[name][0], start="broadcast") as sync:
        for _ in range(8):
            model(torch.ones(1, WIDTH)).square().mean().backward()
            optimizer.step()
        return explain.memory(sync._engine)


@pytest.mark.parametrize(("replicas", "name"), [(4, "edit-bf16"), *((2, name) for name in HELD)])
def test_memory_is_what_a_sync_holds(ranks: Ranks, replicas: int, name: str) -> None:
    """Anchors and momentum exactly, buffers within 2 % (partial sums are not counted)."""
    wire = "bf16" if name == "edit-bf16" else "fp32"
    job = replace(JOB, params=LAYERS * WIDTH**2, layers=LAYERS, replicas=replicas, wire=wire)
    parts = {kind: each * job.params for kind, each in state_parts(job, HELD[name][1]).items()}
    for kinds in ranks.run(replicas, held, name):
        assert kinds["anchors"] == parts["anchor"]
        assert kinds["outer momentum"] == parts["momentum"]
        assert kinds["buffers of layers in flight"] == pytest.approx(parts["in_flight"], rel=0.02)


def test_exchange_of_a_share() -> None:
    """Half of the weights in three messages."""
    assert exchange_seconds(JOB, WEIGHTS, 0.5, 3) == pytest.approx(3.3)
