"""Shorter field reports: one scenario each, with its right outcome."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import nets
import pytest
import shards
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import Tensor

import edit_ext
from edit_ext import comm, engine, start


def rank() -> int:
    return dist.get_rank()


def attached(**changes: Any) -> tuple[Any, Any, edit_ext.Handle]:
    model = nets.make_net()
    optimizer = nets.sgd(model)
    return model, optimizer, edit_ext.attach(model, optimizer, nets.plain(**changes))


def joins(changes: list[dict[str, int]]) -> tuple[str, list[Any], dict[str, Tensor]]:
    """Each rank goes on from a state with its own counts; the steps of the first sync."""
    model, optimizer, sync = attached(sync_every=4, timeout=5.0)
    nets.train_step(model, optimizer, rank(), 0)
    sync.load_state_dict({**sync.state_dict(), **changes[rank()]})
    said, steps = "no error", []
    try:
        while sync.sync_index < 1 + changes[rank()].get("sync_index", 0):
            nets.train_step(model, optimizer, rank(), sync.step)
        steps = [sync.step, *sync.metrics()[0]["steps"]]
        with sync.anchor_weights():
            weights = nets.values(model)
    except RuntimeError as error:
        said, weights = str(error), {}
    sync.detach()
    dist.barrier()
    return said, steps, weights


def test_short_joins_with_another_step(ranks: Ranks) -> None:
    """Replicas that resume at other steps of one window agree on layers and weights; one that is a
    sync ahead is an error on both that names the sync."""
    inside: list[dict[str, Any]] = [{}, {"step": 3, "window_steps": [3]}]
    first, second = ranks.run(2, joins, inside, seconds=30)
    assert first[:2] == second[:2] == ("no error", [5, 4, 4]) and nets.same(first[2], second[2])
    for said, *_ in ranks.run(2, joins, [{}, {"sync_index": 1}], seconds=40):
        assert "sync 1" in said or "sync 2" in said, said


def dies_as_source() -> str:
    """Rank 0, whose weights all shall take, dies after the first of them."""
    if rank() == 0:
        real, calls = start.broadcast_into, iter(range(99))

        def broadcast(*args: Any) -> None:
            if next(calls) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            real(*args)

        start.broadcast_into = broadcast
    torch.manual_seed(rank())
    model = nets.Net()
    try:
        edit_ext.attach(model, nets.sgd(model), nets.plain(timeout=3.0), start="broadcast")
    except RuntimeError as error:
        return str(error)
    return "attached"


def test_short_source_of_a_start_dies(ranks: Ranks) -> None:
    """The others stop with an error that names it; no half of a model is trained on."""
    source, *others = ranks.outcomes(3, dies_as_source, seconds=40)
    assert source.exitcode == -signal.SIGKILL
    for outcome in others:
        assert outcome.good, outcome.error
        assert "start, broadcast of 'stem.weight'" in outcome.value
        assert "ranks [0, 1, 2]" in outcome.value or "rank 0" in outcome.value


def skips(how: str) -> tuple[Any, ...]:
    """Rank 1 skips three steps in a row of its first window, or has weights of NaN for good."""
    model, optimizer, sync = attached(sync_every=3, max_flags_in_a_row=2, timeout=10.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    t, said = 0, "no error"
    try:
        while sync.step < 14:
            value = nets.loss(model, nets.batch(rank(), t))
            bad = how == "scaler" and rank() == 1 and t in (1, 2, 3)
            if how == "scaler":
                scaler.scale(value * (torch.inf if bad else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                value.backward()
                optimizer.step()
                if rank() == 1:
                    with torch.no_grad():
                        model.head.bias.fill_(torch.nan)
            optimizer.zero_grad()
            t += 1
        sync.flush()
    except RuntimeError as error:
        said = str(error)
    steps = [entry["steps"] for entry in sync.metrics() if entry["layer"] == "head"]
    sync.detach()
    return said, t, steps, nets.values(model)


def test_short_skipped_steps(ranks: Ranks) -> None:
    """A replica whose scaler skips steps still comes to every sync, with its steps; one that stays
    non-finite is an error on both after max_flags_in_a_row syncs, by its number."""
    first, second = ranks.run(2, skips, "scaler")
    assert (first[:2], second[:2]) == (("no error", 14), ("no error", 17))
    assert first[2] == second[2] == [[3, 3]] * 4 + [[2, 2]]
    assert nets.same(first[3], second[3])
    for said, *_ in ranks.run(2, skips, "weights", seconds=30):
        assert "replica 1" in said and "not finite" in said, said


def test_short_skips_are_reported() -> None:
    """Forwards without end and no step: said once, since the others wait."""
    model, optimizer, sync = attached()
    x = nets.batch(0, 0)[0]
    with pytest.warns(UserWarning, match="1000 training forwards in a row without a step") as said:
        for _ in range(engine.FORWARDS + 9):
            model(x)
    assert len(said) == 1 and sync.step == 0
    nets.train_step(model, optimizer, 0, 0)
    assert sync.step == 1


@pytest.fixture
def interface(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    yield monkeypatch


def test_short_gloo_address(ranks: Ranks, interface: pytest.MonkeyPatch) -> None:
    """A group that cannot be made says where Gloo listens, and the variable that tells it."""
    for said in ranks.run(2, wrong_interface, seconds=30):
        assert "the replica group of ranks [0, 1] cannot be made" in said
        assert "that GLOO_SOCKET_IFNAME='^lo' names" in said and "NCCL's ^" in said
    interface.setattr(comm.socket, "gethostname", lambda: "node7")
    interface.setattr(comm.socket, "gethostbyname", lambda name: "127.0.1.1")
    assert "this host's name 'node7', 127.0.1.1; if other machines" in comm.gloo_address()
    assert "set GLOO_SOCKET_IFNAME to the interface" in comm.gloo_address()


def wrong_interface() -> str:
    """NCCL's way to exclude an interface, in Gloo's variable."""
    before = os.environ.get("GLOO_SOCKET_IFNAME")
    os.environ["GLOO_SOCKET_IFNAME"] = "^lo"
    try:
        attached(timeout=5.0)
    except RuntimeError as error:
        return str(error)
    finally:
        os.environ.pop("GLOO_SOCKET_IFNAME")
        if before is not None:
            os.environ["GLOO_SOCKET_IFNAME"] = before
    return "attached"


def test_short_compiled_part_first() -> None:
    """The compiled module can be imported before torch: its package imports torch first."""
    code = "import sys; assert 'torch' not in sys.modules; import edit_ext._C as c; c.build_info()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def small_gradients(sharded: bool) -> list[dict[str, Tensor]]:
    """Gradients of a model of small parameters, step by step, warm-up and a sync among them."""
    mesh = shards.mesh_of(1, 1)
    model = shards.make_net()
    if sharded:
        shards.shard(model, mesh)
    optimizer = nets.sgd(model)
    found = []
    config = nets.plain(warmup_steps=2, outer_lr=0.5)
    with edit_ext.attach(model, optimizer, config, mesh=mesh["replica"]):
        for t in range(7):
            nets.loss(model, nets.batch(0, t)).backward()
            grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            found.append({name: shards.whole(grad) for name, grad in grads.items()})
            optimizer.step()
            optimizer.zero_grad()
    return found


def test_short_small_gradients_on_one_rank(ranks: Ranks) -> None:
    """FSDP2 on one rank: every gradient is the plain model's, and none is zero."""
    (found,), (plain,) = (ranks.run(1, small_gradients, sharded) for sharded in (True, False))
    for ours, theirs in zip(found, plain, strict=True):
        assert ours.keys() == theirs.keys() and len(ours) == 12
        for name, grad in theirs.items():
            torch.testing.assert_close(ours[name], grad, rtol=1e-5, atol=1e-7)
            assert bool(grad.any()), name
