"""Every method stopped anywhere, also with results in flight, goes on bit for bit."""

from __future__ import annotations

import copy
import os
import signal
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import shards
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from method_cases import CASES, INNER, STEPS
from nets import batch, loss, make_net, same, values
from ranks import Ranks
from torch import Tensor, nn

import edit_ext

STOPS = (2, 3, 5, 7, 8)  # before and after syncs of every case, and inside windows


def attached(name: str) -> tuple[nn.Module, torch.optim.Optimizer, edit_ext.Handle]:
    config, inner, _ = CASES[name]
    model = make_net()
    optimizer = INNER[inner][0](model.parameters())
    return model, optimizer, edit_ext.attach(model, optimizer, config)


def train(run: tuple[Any, Any, Any], first: int, last: int) -> None:
    model, optimizer, _ = run
    for t in range(first, last):
        loss(model, batch(dist.get_rank(), t)).backward()
        optimizer.step()
        optimizer.zero_grad()


def end(run: tuple[Any, Any, Any]) -> dict[str, Tensor]:
    model, optimizer, sync = run
    sync.flush()
    out = values(model)
    for number, state in optimizer.state_dict()["state"].items():
        out |= {f"{number} {key}": value for key, value in state.items()}
    sync.detach()
    return out


def stopped(name: str) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
    """The unbroken run's end, and those of runs that went on from a state on disk."""
    whole = attached(name)
    train(whole, 0, STEPS)
    ends = []
    for stop in STOPS:
        first = attached(name)
        train(first, 0, stop)
        saved = copy.deepcopy([first[0].state_dict(), first[1].state_dict(), first[2].state_dict()])
        train(first, stop, stop + 1)  # saving has changed nothing, and may be done early
        first[2].detach()
        second = attached(name)
        for part, state in zip(second, saved, strict=True):
            part.load_state_dict(state)
        train(second, stop, STEPS)
        ends.append(end(second))
    return end(whole), ends


@pytest.mark.parametrize("name", CASES)
def test_resume(ranks: Ranks, name: str) -> None:
    """state_dict() at any step: weights and optimizer end with the bits of the unbroken run."""
    for whole, ends in ranks.run(2, stopped, name):
        for stop, found in zip(STOPS, ends, strict=True):
            assert same(found, whole), (name, stop)


def sharded(name: str, replicas: int, count: int) -> tuple[Any, nn.Module, Any, edit_ext.Handle]:
    config, inner, _ = CASES[name]
    mesh = shards.mesh_of(replicas, count)
    model = shards.shard(shards.make_net(), mesh)
    optimizer = INNER[inner][0](model.parameters())
    return mesh, model, optimizer, edit_ext.attach(model, optimizer, config, mesh=mesh)


def on_disk(name: str, folder: str, stop: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """2 replicas of 2 shards: the unbroken run, and one through a checkpoint of DCP."""
    ends = []
    mesh, model, optimizer, sync = sharded(name, 2, 2)
    for t in range(STEPS):
        if t == stop:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of DCP, about itself
                dcp.save({"run": sync.checkpoint(model, optimizer)}, checkpoint_id=folder)
        shards.train_step(model, optimizer, mesh, t)
    sync.flush()
    ends.append(shards.full(model))
    sync.detach()
    mesh, model, optimizer, sync = sharded(name, 2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"run": sync.checkpoint(model, optimizer, folder)}, checkpoint_id=folder)
    for t in range(stop, STEPS):
        shards.train_step(model, optimizer, mesh, t)
    sync.flush()
    ends.append(shards.full(model))
    sync.detach()
    return ends[0], ends[1]


ON_DISK = (
    "StreamingDiLoCo-late",
    "CO2",
    "CO2-replicated",
    "DESLOC",
    "DESLOC-adaptive",
    "PostLocalSGD",
    "LocalSGDM",
)


@pytest.mark.parametrize("name", ON_DISK)
def test_resume_sharded(ranks: Ranks, tmp_path: Path, name: str) -> None:
    """A checkpoint inside a window, with results in flight where a method has them."""
    for whole, found in ranks.run(4, on_disk, name, str(tmp_path), 5):
        assert same(found, whole), name


def in_flight_elsewhere(name: str) -> None:
    """A state with results in flight is not loaded over others."""
    run = attached(name)
    train(run, 0, 6)
    state = run[2].state_dict()
    assert state["flights"]
    with pytest.raises(RuntimeError, match="cannot be loaded over an exchange in flight"):
        run[2].load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"resize\(\) was refused .* call flush\(\)"):
        run[2].resize([0, 1])
    run[2].flush()
    run[2].resize([0, 1])
    train(run, 6, 8)
    run[2].flush()
    run[2].detach()


@pytest.mark.parametrize("name", ["CO2", "StreamingDiLoCo-late"])
def test_flights_in_the_way(ranks: Ranks, name: str) -> None:
    """Loading and resize with results in flight are refused in a sentence; flush() lands them."""
    ranks.run(2, in_flight_elsewhere, name)


def joined(rounds: int) -> tuple[dict[str, Tensor], dict[str, Tensor], list[float]]:
    """Ranks 0 and 1 train by DES-LOC, flush, and take rank 2 in; all go on."""
    rank = dist.get_rank()
    config = edit_ext.DESLOC(param_every=2, state_every={"exp_avg": 3, "exp_avg_sq": 6})
    model = make_net()
    optimizer = INNER["adam"][0](model.parameters())
    if rank < 2:
        sync = edit_ext.attach(model, optimizer, config, group=[0, 1])
        train((model, optimizer, sync), 0, 5)
        sync.flush()
        sync.resize([0, 1, 2])
    else:
        sync = edit_ext.attach(model, optimizer, config, group=[0, 1, 2], start="join")
    before = values(model)
    for number, state in optimizer.state_dict()["state"].items():
        before |= {f"{number} {key}": value.clone() for key, value in state.items()}
    losses = []
    for t in range(5, 5 + rounds):
        value = loss(model, batch(rank % 2, t))
        value.backward()
        losses.append(value.item())
        optimizer.step()
        optimizer.zero_grad()
    sync.flush()
    after = values(model)
    sync.detach()
    return before, after, losses


def test_joiner_starts_from_averaged_states(ranks: Ranks) -> None:
    """After a flush a replica that joins has the others' averaged weights and states, bit for bit;
    all three go on with the same syncs and end the same; the joiner that reads what replica 0 reads
    has replica 0's first loss."""
    results = ranks.run(3, joined, 7)
    for before, after, _ in results[1:]:
        assert same(before, results[0][0]) and same(after, results[0][1])
    assert any("exp_avg_sq" in name for name in results[2][0])
    assert results[2][2][0] == results[0][2][0]


def survives(name: str) -> dict[str, Tensor] | None:
    """Rank 2 of three is killed while results are in flight; the others go on."""
    rank = dist.get_rank()
    config = replace(CASES[name][0], timeout=6.0)  # a busy machine takes seconds to attach
    model = make_net()
    optimizer = INNER["adam"][0](model.parameters())
    sync = edit_ext.attach(model, optimizer, config)
    train((model, optimizer, sync), 0, 6)
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="rank 2"):
        for t in range(6, 60):
            train((model, optimizer, sync), t, t + 1)
            time.sleep(0.1)
    optimizer.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of momentum that is lost
        sync.resize([0, 1])
    train((model, optimizer, sync), 60, 72)
    sync.flush()
    sync.detach()
    return values(model)


@pytest.mark.parametrize("name", ["CO2", "StreamingDiLoCo", "StreamingDiLoCo-late", "DESLOC"])
def test_a_replica_dies(ranks: Ranks, name: str) -> None:
    """The survivors agree again and train on, whatever was in flight."""
    *found, dead = ranks.outcomes(3, survives, name, seconds=60)
    assert dead.exitcode == -signal.SIGKILL
    left, right = (outcome.value for outcome in found)
    assert left is not None and right is not None, [o.error for o in found]
    assert same(left, right)
