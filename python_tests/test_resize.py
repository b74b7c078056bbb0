"""Handle.resize(): replicas leave, die and join in running processes, and nothing else changes."""

from __future__ import annotations

import os
import signal
import time
import warnings
from typing import Any

import nets
import pytest
import shards
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from test_checkpoint import attached, end, save, train
from torch import nn

import edit_ext
from edit_ext import _C

STEPS = 10  # inside a window of 4
Run = tuple[Any, nn.Module, Any, Any]


def on_group(ranks: list[int], start: str, **changes: Any) -> Run:
    """A plain model attached on some ranks; wrong weights where it joins."""
    model = shards.make_net()
    if start == "join":
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(7.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    config = edit_ext.EDiT(
        **{"sync_every": 4, "clip_norm": 0.2, "ema_warmup": 2, "timeout": 20.0, **changes}
    )
    handle = edit_ext.attach(model, optimizer, config, group=ranks, start=start)
    return None, model, optimizer, handle


def step(run: Run, data: int, t: int) -> None:
    nets.train_step(run[1], run[2], data, t)


def twin_of(run: Run, members: Any, path: str, mesh: Any = None) -> Run:
    """Another model, attached on the new group and gone on from the checkpoint."""
    model = shards.make_net() if mesh is None else shards.shard(shards.make_net(), mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    own = members if mesh is None else [dist.get_rank()]
    config = edit_ext.EDiT(**run[3]._engine.config.as_dict())
    sync = edit_ext.attach(model, optimizer, config, group=own)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of DCP, about itself
        tree = {"run": sync.checkpoint(model, optimizer, path)}
        dcp.load(tree, checkpoint_id=path, process_group=members)
    return mesh, model, optimizer, sync


def write(run: Run, path: str, members: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = {"run": run[3].checkpoint(run[1], run[2])}
        dcp.save(tree, checkpoint_id=path, process_group=members)


def compare(run: Run, twin: Run, data: int) -> list[bool]:
    """Whether both hold the same bits now, and after each of two more windows."""
    equal = []
    for t in range(STEPS, STEPS + 9):
        if (t - STEPS) % 4 == 0:
            equal.append(nets.same(end(run), end(twin)))
        for each in (run, twin):
            if each[0] is None:
                step(each, data, t)
            else:
                shards.train_step(*each[1:3], each[0], t)
    return equal


def leaves(path: str, momentum: str) -> list[bool] | None:
    """Four replicas become two."""
    rank, pair = dist.get_rank(), dist.new_group([0, 1])
    run = on_group([0, 1, 2, 3], "check", momentum=momentum)
    for t in range(STEPS):
        step(run, rank, t)
    write(run, path, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run[3].resize([0, 1])
    if rank > 1:
        step(run, rank, STEPS)  # detached: nothing waits
        return None
    assert (run[3].step, run[3].data_world) == (STEPS, 2)
    return compare(run, twin_of(run, pair, path), rank)


@pytest.mark.parametrize("momentum", ["sharded", "replicated"])
def test_planned_leave(ranks: Ranks, tmp_path: Any, momentum: str) -> None:
    """What stays goes on as a checkpoint would in a new run of two replicas, bit for bit."""
    found = ranks.run(4, leaves, str(tmp_path / "saved"), momentum)
    assert found == [[True] * 3] * 2 + [None] * 2


def joins(path: str) -> list[bool]:
    """Two replicas become three."""
    rank, pair = dist.get_rank(), dist.new_group([0, 1])
    if rank < 2:
        run = on_group([0, 1], "check")
        for t in range(STEPS):
            step(run, rank, t)
        write(run, path, pair)
        totals = run[3].totals()
        run[3].resize([0, 1, 2])
        assert run[3].totals()["syncs"] == totals["syncs"] == 2
        assert run[3].totals()["bytes_sent"] > totals["bytes_sent"]
    else:
        run = on_group([0, 1, 2], "join")
    assert (run[3].step, run[3].sync_index, run[3].data_world) == (STEPS, 2, 3)
    return compare(run, twin_of(run, None, path), rank)


def test_join(ranks: Ranks, tmp_path: Any) -> None:
    """A replica with other weights and no optimizer state takes replica 0's of everything."""
    assert ranks.run(3, joins, str(tmp_path / "saved")) == [[True] * 3] * 3


def sharded(path: str) -> tuple[list[bool] | None, dict[str, torch.Tensor]]:
    """2 x 2 becomes 1 x 2, and 2 x 2 again with new weights on the ranks that had left."""
    rank, pair = dist.get_rank(), dist.new_group([0, 1])
    run = attached(2, 2)
    train(run, 0, STEPS)
    save(run, path)
    mesh, model, optimizer, sync = run
    sync.resize([rank] if rank < 2 else dist.GroupMember.NON_GROUP_MEMBER)
    equal = None
    if rank < 2:
        equal = compare(run, twin_of(run, pair, path, mesh), rank)
    else:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0).add_(7.0)
        optimizer.state.clear()
    dist.barrier()
    column = [rank % 2, rank % 2 + 2]
    if rank < 2:
        sync.resize(column)
    else:
        sync = edit_ext.attach(model, optimizer, sync._engine.config, group=column, start="join")
    joined = shards.full(model)
    assert all(nets.same(joined, other) for other in shards.gather_ranks(joined))
    train((mesh, model, optimizer, sync), STEPS + 9, STEPS + 13)
    with sync:
        pass
    return equal, shards.full(model)


def test_sharded_replicas(ranks: Ranks, tmp_path: Any) -> None:
    """Whole replicas of FSDP2 leave and join, each shard in the replica group of its own."""
    found = ranks.run(4, sharded, str(tmp_path / "saved"), seconds=90)
    assert [equal for equal, _ in found] == [[True] * 3] * 2 + [None] * 2
    assert all(nets.same(weights, found[0][1]) for _, weights in found)


def dies(during: bool, momentum: str) -> dict[str, Any]:
    """Rank 2 of three is killed between two syncs, or while one is under way."""
    rank = dist.get_rank()
    wrap = (lambda inner: _C.DelayedComm(inner, 0.2)) if during else None
    model = shards.make_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    config = edit_ext.EDiT(sync_every=2, momentum=momentum, timeout=6.0)
    sync = edit_ext.attach(model, optimizer, config, comm_wrapper=wrap)
    run: Run = (None, model, optimizer, sync)
    for t in range(5):
        step(run, rank, t)
    before = end(run)
    dist.barrier()
    if rank == 2 and not during:
        os.kill(os.getpid(), signal.SIGKILL)
    steps_before = sync.step
    with pytest.raises(RuntimeError, match="rank 2") as caught:
        for t in range(5, 40):
            step(run, rank, t)
            if rank == 2 and sync.sync_index == 2:
                time.sleep(0.5)  # the others begin the next sync
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.1)
    assert "sync" in str(caught.value)
    optimizer.zero_grad()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        began = time.monotonic()
        sync.resize([0, 1])
        seconds = time.monotonic() - began
    after = end(run)
    with sync:
        for t in range(40, 46):
            step(run, rank, t)
    return {
        "before": before,
        "after": after,
        "steps": (steps_before, sync.step),
        "said": [str(w.message) for w in said if "edit_ext" in str(w.message)],
        "seconds": seconds,
        "last": nets.values(model),
    }


@pytest.mark.parametrize("momentum", ["sharded", "replicated"])
@pytest.mark.parametrize("during", [False, True])
def test_dead_replica(ranks: Ranks, during: bool, momentum: str) -> None:
    """The survivors go on, with equal anchors and momentum; what the dead one alone has held
    restarts at zero, and they say how much that is."""
    *found, dead = ranks.outcomes(3, dies, during, momentum, seconds=60)
    assert dead.exitcode == -signal.SIGKILL
    left, right = (outcome.value for outcome in found)
    assert left is not None and right is not None, [o.error for o in found]
    assert nets.same(left["last"], right["last"])
    kept = [name for name in left["after"] if name.split()[0] in ("anchors", "momentum")]
    for name in kept:
        assert torch.equal(left["after"][name], right["after"][name]), name
        if not during:
            was, now = left["before"][name], left["after"][name]
            gone = (now == 0) & (was != 0) & (momentum == "sharded")
            assert torch.equal(now[~gone], was[~gone]), name
    for result in (left, right):
        assert result["seconds"] < 15
        assert bool(result["said"]) == (momentum == "sharded")
        for text in result["said"]:
            assert "1 of 3 replicas did not hand over" in text and "restart at zero" in text
