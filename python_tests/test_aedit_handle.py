"""AEDiT seen from the handle: one speed, resuming at any step, what explain() says, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import shards
import torch
import torch.distributed as dist
from nets import make_net, plain, plain_timed, same, sgd, train_step, values
from ranks import Ranks
from test_aedit import adam
from torch import nn

import edit_ext


def timed_by_steps(**changes: Any) -> tuple[nn.Module, torch.optim.Optimizer, edit_ext.Handle]:
    """One replica whose step takes a second."""
    model = make_net()
    optimizer = sgd(model)
    sync = edit_ext.attach(model, optimizer, plain_timed(**changes))
    base = torch.rand(()).item() * 1e6 // 1
    sync._engine.alarm.now = lambda: base + sync._engine.clock.step  # type: ignore[union-attr]
    return model, optimizer, sync


def test_equals_edit_at_one_speed() -> None:
    """Where every step takes as long, seconds are steps: EDiT's weights, bit for bit."""
    model, optimizer, timed = timed_by_steps(sync_seconds=4.0, outer_lr=0.7, outer_momentum=0.8)
    other = make_net()
    inner = sgd(other)
    stepped = edit_ext.attach(
        other, inner, plain(sync_every=4, outer_lr=0.7, outer_momentum=0.8, weighting="steps")
    )
    for t in range(14):
        train_step(model, optimizer, 0, t)
        train_step(other, inner, 0, t)
        assert same(values(model), values(other)) and timed.sync_index == stepped.sync_index
        assert timed.mean_step == stepped.mean_step == 4 * (t // 4)
    assert timed.sync_index == 3


@pytest.mark.parametrize("stop", range(1, 8))
def test_resume_at_any_step(stop: int) -> None:
    """The seconds of an open window are part of the state: a resumed run syncs when it would."""
    model, optimizer, sync = timed_by_steps(sync_seconds=3.0, outer_lr=0.7)
    for t in range(stop):
        train_step(model, optimizer, 0, t)
    weights, state = values(model), sync.state_dict()
    assert state["elapsed"] == float(stop % 3) and bool(state["armed"]) == (stop % 3 == 0)
    other, inner, again = timed_by_steps(sync_seconds=3.0, outer_lr=0.7)
    other.load_state_dict(weights)
    again.load_state_dict(state)
    for t in range(stop, 11):
        train_step(model, optimizer, 0, t)
        train_step(other, inner, 0, t)
        assert same(values(model), values(other)) and sync.sync_index == again.sync_index


def test_explain() -> None:
    """What can be said beforehand: the seconds that are left, and no list of steps."""
    model, optimizer, sync = timed_by_steps(sync_seconds=30.0, min_steps=7)
    text = sync.explain(steps=100)
    assert text.startswith("AEDiT over 1 replica") and "forward that follows step" not in text
    assert "a window of 30 s and at least 7 steps of all replicas together, the first" in text
    for t in range(4):
        train_step(model, optimizer, 0, t)
    assert "the next in 26.0 s, sooner if another replica asks" in sync.explain()
    sync._engine.alarm.ask()  # type: ignore[union-attr]
    assert "the next is due now" in sync.explain()


def explained() -> list[str]:
    mesh = shards.mesh_of(2, 2)
    model = shards.shard(shards.make_net(), mesh)
    optimizer = adam(model.parameters())
    sync = edit_ext.attach(model, optimizer, plain_timed(sync_seconds=500.0), mesh=mesh)
    sent = sync.totals()["bytes_sent"]
    shards.train_step(model, optimizer, mesh, 0)
    first = sync.totals()["bytes_sent"] - sent
    shards.train_step(model, optimizer, mesh, 1)
    more = sync.totals()["bytes_sent"] - sent - first
    text = sync.explain()
    sync.detach()
    return [text, str(more)]


def test_explain_on_shards(ranks: Ranks) -> None:
    """Shard 0's clock decides, the other shards name it; telling them costs 8 bytes a step."""
    results = ranks.run(4, explained)
    assert [bytes_sent for _, bytes_sent in results] == ["8", "0", "8", "0"]
    for place, name in ((1, "replica 0, shard 0 (rank 0)"), (3, "replica 1, shard 0 (rank 2)")):
        assert f"by the clock of {name}" in results[place][0]
    for text in (results[0][0], results[2][0]):
        assert "the next in 4" in text and "of payload per sync\n" in text


def other_methods() -> str:
    model = make_net()
    config = plain() if dist.get_rank() == 0 else plain_timed()
    with pytest.raises(ValueError) as caught:
        edit_ext.attach(model, sgd(model), config)
    return str(caught.value)


def test_methods_differ(ranks: Ranks) -> None:
    """Replicas with different methods are told so by name."""
    for said in ranks.run(2, other_methods):
        assert "'method': replica 0 (rank 0) has EDiT, replica 1 (rank 1) has AEDiT" in said


def test_replicas_and_shards_are_one_rank(ranks: Ranks) -> None:
    """Two shards of one replica follow one clock; nobody else can ask."""
    for syncs in ranks.run(2, one_replica):
        assert syncs == 3


def one_replica() -> int:
    mesh = shards.mesh_of(1, 2)
    model = shards.shard(shards.make_net(), mesh)
    optimizer = adam(model.parameters())
    sync = edit_ext.attach(model, optimizer, plain_timed(sync_seconds=3.0), mesh=mesh)
    rank = dist.get_rank()
    sync._engine.alarm.now = lambda: 0.0 if rank else float(sync.step)  # type: ignore[union-attr]
    seen = []
    for t in range(11):
        shards.train_step(model, optimizer, mesh, t)
        seen.append(sync.sync_index)
    # Asked after steps 3, 6 and 9, armed after 4, 7 and 10, in the forwards of 5, 8 and 11.
    assert seen == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    sync.detach()
    return sync.sync_index
