"""Handle.resize() where it cannot be: a sentence on every rank, no hang, and a way out."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import nets
import pytest
import torch
import torch.distributed as dist
from nets import make_net, plain, plain_timed, sgd, train_step, values
from ranks import Ranks

import edit_ext


def attached(ranks: list[int] | None = None, **options: Any) -> tuple[Any, Any, edit_ext.Handle]:
    model = make_net()
    optimizer = sgd(model)
    return (
        model,
        optimizer,
        edit_ext.attach(
            model, optimizer, plain(timeout=options.pop("timeout", 20.0)), group=ranks, **options
        ),
    )


def one_open_sync() -> str:
    """Both ranks are in a sync; both are refused and go on."""
    rank = dist.get_rank()
    model, optimizer, sync = attached()
    for t in range(2):
        train_step(model, optimizer, rank, t)
    value = nets.loss(model, nets.batch(rank, 2))
    with pytest.raises(RuntimeError) as caught:
        sync.resize([0])
    value.backward()
    optimizer.step()
    optimizer.zero_grad()
    with sync:
        for t in range(3, 6):
            train_step(model, optimizer, rank, t)
    return str(caught.value)


def test_open_sync(ranks: Ranks) -> None:
    """Refused on all ranks before anything is left; the run goes on as before."""
    for text in ranks.run(2, one_open_sync):
        assert "refused on replica 0 (rank 0): while a sync is in progress" in text


def wrong_groups() -> list[str]:
    """What rank 1 passes cannot be; rank 0's is right."""
    said = []
    rank = dist.get_rank()
    model, optimizer, sync = attached()
    train_step(model, optimizer, rank, 0)
    for wrong in ([], [0, 0], [0, 2], [-1], "all", 3, [0.0]):
        with pytest.raises(RuntimeError) as caught:
            sync.resize(wrong if rank == 1 else [0, 1])
        said.append(str(caught.value))
    with sync.anchor_weights(), pytest.raises(RuntimeError) as caught:
        sync.resize([0, 1])
    said.append(str(caught.value))
    sync.resize([1, 0])  # and in another order it can be
    sync.pause()
    sync.resize([0, 1])
    assert sync._engine.paused
    sync.detach()
    with pytest.raises(RuntimeError) as caught:
        sync.resize([0, 1])
    return [*said, str(caught.value)]


def test_wrong_groups(ranks: Ranks) -> None:
    """Refused on all ranks before anything is left."""
    for said in ranks.run(2, wrong_groups):
        for text in said[:7]:
            assert "resize() was refused on replica 1 (rank 1): group must " in text
        assert "list one rank or more, each once, of 0 to 1; it is [0, 2]" in said[2]
        assert "inside anchor_weights()" in said[7] and "is closed" in said[8]


def alone() -> tuple[str, float]:
    """Rank 1 never calls resize."""
    _, _, sync = attached(timeout=1.0)
    began, said = time.monotonic(), ""
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError) as caught:
            sync.resize([0])
        said = str(caught.value)
    seconds = time.monotonic() - began
    dist.barrier()
    sync.detach()
    return said, seconds


def test_a_rank_that_does_not_come(ranks: Ranks) -> None:
    """Named after `timeout` seconds."""
    (said, seconds), _ = ranks.run(2, alone)
    assert "waited 1 s in vain for replica 1 (rank 1): every rank of the run must call it" in said
    assert 0.9 < seconds < 5


def nobody_to_join() -> str:
    with pytest.raises(ValueError) as caught:
        attached(start="join")
    return str(caught.value)


def test_nobody_to_join(ranks: Ranks) -> None:
    """Ranks that all join, and a process alone."""
    for text in [*ranks.run(2, nobody_to_join), nobody_to_join()]:
        assert "no rank of the group brings a run" in text


def two_runs() -> str:
    rank = dist.get_rank()
    _, _, sync = attached([rank // 2 * 2, rank // 2 * 2 + 1])
    with pytest.raises(ValueError) as caught:
        sync.resize([0, 1, 2, 3])
    return str(caught.value)


def test_two_runs(ranks: Ranks) -> None:
    """Replicas of different runs are not mixed."""
    for text in ranks.run(4, two_runs):
        assert "come from different runs" in text


def wrong_start() -> str:
    """Rank 1 attaches as if the run began."""
    rank = dist.get_rank()
    if rank == 0:
        model, optimizer, sync = attached([0])
        for t in range(5):
            train_step(model, optimizer, rank, t)
        with pytest.raises(ValueError) as caught:
            sync.resize([0, 1])
        with pytest.raises(RuntimeError, match=r"resize\(\) has not succeeded: call it again"):
            train_step(model, optimizer, rank, 5)
        optimizer.zero_grad()
    else:
        with pytest.raises(ValueError) as caught:
            attached([0, 1])
    said = str(caught.value)
    if rank == 0:
        sync.resize([0, 1])
    else:
        with torch.no_grad():
            model = make_net()
            model.scale.fill_(3.0)
        optimizer = sgd(model)
        sync = edit_ext.attach(model, optimizer, plain(timeout=20.0), group=[0, 1], start="join")
        assert sync.step == 5
    with sync:
        for t in range(5, 9):
            train_step(model, optimizer, rank, t)
    result = values(model)
    others: list[Any] = [None, None]
    dist.all_gather_object(others, result)
    assert nets.same(others[0], others[1])
    return said


def test_again_after_an_error(ranks: Ranks) -> None:
    """Until resize has succeeded training raises; a second try goes on with all that was there."""
    for text in ranks.run(2, wrong_start):
        assert "differ in their settings: 'start'" in text, text


def timed(state: str) -> tuple[int, int, bool]:
    """AEDiT, and a run in its warm-up, from two replicas to one and back."""
    rank = dist.get_rank()
    model = make_net()
    optimizer = sgd(model)
    rules = {"sync_seconds": 0.3, "timeout": 20.0}
    config = plain_timed(**rules) if state == "timed" else plain(warmup_steps=20, timeout=20.0)
    sync = edit_ext.attach(model, optimizer, config)
    for t in range(6):
        train_step(model, optimizer, rank, t)
        time.sleep(0.1 if state == "timed" else 0.0)
    sync.resize([0])
    for t in range(6, 12):
        train_step(model, optimizer, rank, t)
        time.sleep(0.1 if state == "timed" else 0.0)
    if rank == 0:
        sync.resize([0, 1])
    else:
        sync = edit_ext.attach(model, optimizer, config, group=[0, 1], start="join")
    start = sync.step
    with sync:
        for t in range(12, 26):
            train_step(model, optimizer, rank, t)
            time.sleep(0.05 if state == "timed" else 0.0)
    others: list[Any] = [None, None]
    dist.all_gather_object(others, values(model))
    assert threading.active_count() < 20
    return start, sync.sync_index, nets.same(others[0], others[1])


@pytest.mark.parametrize("state", ["timed", "warm-up"])
def test_by_the_clock_and_in_the_warm_up(ranks: Ranks, state: str) -> None:
    """The methods' own clocks go on; both replicas end with the same weights."""
    left, right = ranks.run(2, timed, state)
    assert left == right and left[0] == 12 and left[2]
    assert left[1] >= 3


def joiner_dies() -> dict[str, torch.Tensor]:
    """Rank 2 is killed when it has been told the counts and before it gets its weights."""
    rank = dist.get_rank()
    if rank == 2:

        def die(*_: Any) -> None:
            os.kill(os.getpid(), signal.SIGKILL)

        edit_ext.resize._take_layers = die
        attached([0, 1, 2], start="join", timeout=5.0)
    model, optimizer, sync = attached([0, 1], timeout=5.0)
    for t in range(5):
        train_step(model, optimizer, rank, t)
    state = sync.state_dict()
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1, 2\]|rank 2"):
        sync.resize([0, 1, 2])
    sync.resize([0, 1])
    again = sync.state_dict()
    assert nets.same(state["anchors"], again["anchors"])
    assert again["window_steps"] == state["window_steps"] == [1]
    with sync:
        for t in range(5, 9):
            train_step(model, optimizer, rank, t)
    return values(model)


def test_joiner_dies_half_way(ranks: Ranks) -> None:
    """Those that carry the run hear of it and go on by a second resize, with nothing lost."""
    left, right, dead = ranks.outcomes(3, joiner_dies, seconds=40)
    assert dead.exitcode == -signal.SIGKILL
    assert left.good and right.good, (left.error, right.error)
    assert nets.same(left.value, right.value)


def lists_that_differ() -> tuple[str, list[float]]:
    """Rank 1 comes with another list; then all come with one."""
    rank = dist.get_rank()
    model, optimizer, sync = attached(timeout=3.0)
    train_step(model, optimizer, rank, 0)
    with pytest.raises(RuntimeError, match="with the same ranks") as caught:
        sync.resize([2, 1, 0] if rank == 1 else [0, 1, 2])
    dist.barrier()
    sync.resize([0, 1, 2])
    with sync:
        for t in range(1, 5):
            train_step(model, optimizer, rank, t)
    return str(caught.value), [p.sum().item() for p in model.parameters()]


def test_lists_that_differ(ranks: Ranks) -> None:
    """Nobody hangs, and with equal lists it succeeds afterwards."""
    results = ranks.run(3, lists_that_differ, seconds=60)
    assert all(weights == results[0][1] for _, weights in results)


def refused_early() -> None:
    """Rank 0's arguments are wrong before it can look for its peers."""
    rank = dist.get_rank()
    model = make_net()
    optimizer = sgd(model)
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("replica",))
    for _ in range(2):
        wrong = {"group": [0, 1]} if rank == 0 else {}
        with pytest.raises((RuntimeError, ValueError), match="mesh= and group= both"):
            edit_ext.attach(model, optimizer, plain(timeout=5.0), mesh=mesh, **wrong)
        dist.barrier()
    with edit_ext.attach(model, optimizer, plain(timeout=5.0), mesh=mesh):
        for t in range(4):
            train_step(model, optimizer, rank, t)


def test_attach_after_one_that_was_refused_early(ranks: Ranks) -> None:
    """The next attach on the same ranks finds them in step."""
    ranks.run(2, refused_early, seconds=60)
