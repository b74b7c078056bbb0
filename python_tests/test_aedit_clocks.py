"""AEDiT's clocks and ends: clocks that jump or stop, replicas that end earlier than others."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import shards
import torch
import torch.distributed as dist
from nets import make_net, plain_timed, same, sgd, train_step, values
from paced import until
from ranks import Ranks
from test_aedit import RULES, adam, close, decided, truth_of

import edit_ext

CLOCKS: dict[str, Callable[[int, int], float]] = {
    "rates": lambda replica, t: t * (1.0 + 2.7 * replica),
    "forward": lambda replica, t: t + 1e7 * (replica == 0) * (t >= 6),
    "back": lambda replica, t: t - 1e7 * (replica == 0) * (t >= 6),
    "stopped": lambda replica, t: 0.0 if replica else float(t),
    "all stopped": lambda replica, t: 0.0,
    "torn": lambda replica, t: (-1.0) ** t * 1e6 * (replica + 1) * t,
}


def odd_clocks(kind: str, ends: list[int]) -> dict[str, Any]:
    """Replica 1 is slow; each replica's time is a function of its own steps."""
    replica = dist.get_rank()
    model = make_net()
    optimizer = adam(model.parameters())
    config = edit_ext.AEDiT(timeout=30.0, **{**RULES, "sync_seconds": 4.0})
    with edit_ext.attach(model, optimizer, config) as sync:
        engine = sync._engine
        assert engine.alarm is not None and engine.mesh.heartbeat is not None
        engine.alarm.now = lambda: CLOCKS[kind](replica, engine.clock.step)
        for t in range(ends[replica]):
            if replica == 1:
                time.sleep(0.01)
            begins = bool(engine.clock.armed)
            called = engine.mesh.heartbeat.asks_for(sync.sync_index + 1 + begins)
            train_step(model, optimizer, replica, t)
            assert engine.clock.armed or not called  # one step and no more
        sync.flush()
        return {"metrics": sync.metrics(), "params": values(model), "syncs": sync.sync_index}


@pytest.mark.parametrize("kind", list(CLOCKS))
def test_odd_clocks(ranks: Ranks, kind: str) -> None:
    """Clocks that jump, differ or stop change where windows end, and nothing else."""
    ends = [21, 14]
    results = ranks.run(2, odd_clocks, kind, ends, seconds=60.0)
    metrics = results[0]["metrics"]
    windows = [m["steps"] for m in metrics if m["layer"] == "head"]
    assert len(windows) == results[0]["syncs"] == results[1]["syncs"]
    assert [sum(column) for column in zip(*windows, strict=True)] == ends
    assert decided(metrics) == decided(results[1]["metrics"])
    assert same(results[0]["params"], results[1]["params"])
    truth = truth_of(2, False, {**RULES, "sync_seconds": 4.0}, windows)
    close(results[0]["params"], truth.params(0), kind)
    if kind == "stopped":
        assert max(row[0] for row in windows) <= 4  # replica 1 came as soon as it was called
    if kind != "all stopped":
        assert len(windows) >= 4


def unequal_ends(real: bool) -> list[int]:
    """Replica 0 ends after 3 steps; the clock of replica 1 never gets anywhere."""
    replica = dist.get_rank()
    model = make_net()
    optimizer = sgd(model)
    sync = edit_ext.attach(model, optimizer, plain_timed(sync_seconds=0.3 if real else 1000.0))
    alarm = sync._engine.alarm
    assert alarm is not None
    if replica == 1 or not real:
        alarm.now = lambda: 0.0
    t = 0

    def more(condition: Callable[[], bool]) -> None:
        nonlocal t
        deadline = time.monotonic() + 20.0
        while not condition():
            assert time.monotonic() < deadline
            train_step(model, optimizer, replica, t)
            time.sleep(0.005)
            t += 1

    if replica == 0:
        more(lambda: t == 3)
    else:
        more(lambda: sync.sync_index == 1)  # as soon as replica 0 has ended
        if real:
            more(lambda: sync.sync_index == 4)  # and whenever its clock says so
        else:
            first = t
            more(lambda: t == first + 40)  # but not at every step
            assert sync.sync_index == 1 and not sync._engine.clock.armed
    sync.flush()
    steps = [m["steps"] for m in sync.metrics() if m["layer"] == "head"]
    assert steps[0][0] == 3 and all(row[0] == 0 and row[1] > 0 for row in steps[1:])
    assert sum(row[replica] for row in steps) == t
    sync.flush()  # nobody has made a step
    assert sync.mean_step == sum(map(sum, steps)) / 2
    sync.detach()
    return [len(steps), *(int(x) for x in values(model)["head.bias"].view(torch.int32))]


@pytest.mark.parametrize("real", [True, False])
def test_flush_with_unequal_ends(ranks: Ranks, real: bool) -> None:
    """One that has ended asks for a sync at once, and from then on when its time has come."""
    results = ranks.run(2, unequal_ends, real)
    assert results[0] == results[1]
    assert results[0][0] >= 5 if real else results[0][0] == 2


def void_at_the_end() -> None:
    """Far fewer steps than `min_steps`; replica 0 ends first."""
    replica = dist.get_rank()
    model = make_net()
    optimizer = sgd(model)
    with edit_ext.attach(model, optimizer, plain_timed(min_steps=1000)) as sync:
        sync._engine.alarm.now = lambda: 0.0  # type: ignore[union-attr]
        for t in range(2 + 3 * replica):
            train_step(model, optimizer, replica, t)
            if replica == 1 and t == 2:
                until(lambda: sync._engine.mesh.heartbeat.asks_for(1), "the end")  # type: ignore[union-attr]
        sync.flush()
        heads = [m for m in sync.metrics() if m["layer"] == "head"]
    assert [m["void"] for m in heads] == [True, False]
    assert heads[0]["steps"][0] == 2 and heads[1]["steps"] == [2, 5]
    everybody = shards.gather_ranks(values(model))
    assert same(everybody[0], everybody[1])


def test_end_with_too_few_steps(ranks: Ranks) -> None:
    """The sync in which all have ended counts, whatever `min_steps` says: no step is lost."""
    ranks.run(2, void_at_the_end)
