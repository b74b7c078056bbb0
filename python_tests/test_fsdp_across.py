"""What crosses replicas of FSDP2 models, and when: gradients, buffers, silence; and a dead rank."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from typing import Any

import nets
import shards
import torch
import torch.distributed as dist
from fsdp_cases import attached, built
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import edit_ext
from edit_ext import _C
from edit_ext.sharding import local

TIMEOUT = 3.0


def quiet(frozen: bool) -> dict[str, Any]:
    """What leaves the replica, step by step: bytes, and operations of every group across."""
    mesh, model = built(plain=False)
    if frozen:
        for block in model.blocks:
            block.requires_grad_(False)
    optimizer, sync = attached(model, mesh)
    across = [group for each in sync._engine.mesh.groups for group in each.groups]
    across.append(mesh.get_group("replica"))
    counts, weights = [], []
    for t in range(9):
        loss = nets.loss(model, shards.batch_of(mesh, t))
        if sync.sync_index > (counts[-1][2] if counts else 0):
            sync._engine.syncs.finish()  # `spare` too, which the forward does not visit
            model.reshard()
            weights.append([local(p).clone() for p in model.parameters()])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        operations = [group._get_sequence_number_for_group() for group in across]
        counts.append((sync.totals()["bytes_sent"], operations, sync.sync_index))
        weights.append([local(p).clone() for p in model.parameters()])
    bytes_of = {entry["layer"]: entry["bytes_sent"] for entry in sync.metrics()}
    state = sync.state_dict()
    sync.detach()
    held = [unit["momentum"] for unit in state["layers"].values()]
    memory = sum(t.numel() for t in held if t is not None)
    return {
        "counts": counts,
        "weights": weights,
        "bytes": bytes_of,
        "anchors": sum(t.numel() for t in state["anchors"].values()),
        "momentum": memory,
        "trainable": sum(local(p).numel() for p in model.parameters() if p.requires_grad),
    }


def test_row_15_silent_between_syncs(ranks: Ranks) -> None:
    """No byte and no operation crosses replicas outside syncs; their weights differ before one and
    are equal after it; frozen weights cost nothing."""
    results = {frozen: ranks.run(4, quiet, frozen) for frozen in (False, True)}
    for result in (*results[False], *results[True]):
        counts = result["counts"]
        changed = [before[:2] != after[:2] for before, after in itertools.pairwise(counts)]
        assert changed == [False, False, True] * 2 + [False, False]
    for rank in (0, 1):
        looks = [results[False][r]["weights"] for r in (rank, rank + 2)]
        equal = [all(map(torch.equal, *pair)) for pair in zip(*looks, strict=True)]
        assert equal == [False, False, False, True] * 2 + [False, False, False]
    for whole, less in zip(results[False], results[True], strict=True):
        assert less["anchors"] == less["trainable"] < whole["anchors"] == whole["trainable"]
        assert less["momentum"] < whole["momentum"]
        blocks = {f"blocks.{index}" for index in range(3)}
        assert set(whole["bytes"]) - set(less["bytes"]) == blocks
        assert all(whole["bytes"][layer] == sent for layer, sent in less["bytes"].items())


class Normed(nn.Module):
    """Statistics of activations, a count of batches, and a buffer that no state dict holds."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x[0, 0]
        return self.head(self.norm(self.stem(x)))


def buffers() -> list[dict[str, Tensor]]:
    """Buffers before and after two syncs; before the second, rank 3 has counted a NaN."""
    mesh = shards.mesh_of(2, 2)
    with torch.random.fork_rng():
        torch.manual_seed(11)
        model = Normed()
    fully_shard(model.stem, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer, sync = attached(model, mesh)
    looks = []
    for t in range(2):
        shards.train_step(model, optimizer, mesh, t)
        if t == 1 and dist.get_rank() == 3:
            model.norm.running_var[2] = torch.nan
        looks.append({name: b.clone() for name, b in model.named_buffers()})
        sync.flush()
        looks.append({name: b.clone() for name, b in model.named_buffers()})
    with torch.no_grad():
        looks.append({"evaluated": model.eval()(nets.batch(0, 9)[0])})
    sync.detach()
    return looks


def test_row_16_buffers_of_shards(ranks: Ranks) -> None:
    """Floating buffers become the mean over all ranks that are finite; others stay as they are. All
    ranks evaluate alike then."""
    results = ranks.run(4, buffers)
    for before, after, finite in ((0, 1, 4), (2, 3, 3)):
        for name in ("norm.running_mean", "norm.running_var"):
            mean = torch.stack([r[before][name].double() for r in results[:finite]]).mean(0)
            for result in results:
                torch.testing.assert_close(result[after][name].double(), mean, rtol=1e-6, atol=0)
        for result in results:
            for name in ("norm.num_batches_tracked", "seen"):
                assert torch.equal(result[before][name], result[after][name])
    assert all(nets.same(result[4], results[0][4]) for result in results)
    assert results[0][1]["norm.num_batches_tracked"] == 1
    assert len({result[0]["seen"].item() for result in results}) == 4


def warm_gradients() -> dict[str, list[dict[str, Tensor]]]:
    """Whole gradients after the backward of a warm-up step and of a local one."""
    mesh = shards.mesh_of(2, 2)
    model = shards.shard(shards.make_net(), mesh)
    optimizer, sync = attached(model, mesh, warmup_steps=1)
    found = []
    for t in range(2):
        nets.loss(model, shards.batch_of(mesh, t)).backward()
        grads = {n: shards.whole(p.grad) for n, p in model.named_parameters() if p.grad is not None}
        found.append(grads)
        optimizer.zero_grad()
        optimizer.step()
    sync.detach()
    return found


def test_gradients_are_divided_rightly(ranks: Ranks) -> None:
    """In the warm-up the mean over replicas and shards, then over the shards of a replica."""
    model = shards.make_net()
    for rank, (warm, local_step) in enumerate(ranks.run(4, warm_gradients)):
        for t, found, replicas in ((0, warm, (0, 1)), (1, local_step, (rank // 2,))):
            model.zero_grad()
            for replica in replicas:
                (nets.loss(model, nets.batch(replica, t)) / len(replicas)).backward()
            for name, p in model.named_parameters():
                assert (p.grad is None) == (name not in found), name
                if p.grad is not None:
                    torch.testing.assert_close(found[name], p.grad, rtol=1e-5, atol=1e-7)


def uneven_groups() -> list[dict[str, Tensor]]:
    """Ranks are in different numbers of groups, as with a group for logging; attached twice."""
    mesh = shards.mesh_of(2, 2)
    model = shards.shard(shards.make_net(), mesh)
    dist.new_group([0, 1])
    if dist.get_rank() == 3:
        dist.new_group([3], use_local_synchronization=True)
    for _ in range(2):
        optimizer, sync = attached(model, mesh)
        with sync:
            for t in range(4):
                shards.train_step(model, optimizer, mesh, t)
    return shards.full(model)


def test_other_groups_do_not_matter(ranks: Ranks) -> None:
    """attach finds its peers whatever groups a rank is in or has left."""
    first, *others = ranks.run(4, uneven_groups, seconds=30)
    assert all(nets.same(first, other) for other in others)


def killed() -> tuple[str, float]:
    """Rank 3 dies while a sync is under way."""
    mesh = shards.mesh_of(2, 2)
    model = shards.shard(shards.make_net(), mesh)
    optimizer = nets.sgd(model)
    slow = {"comm_wrapper": lambda inner: _C.DelayedComm(inner, 0.3)}
    config = nets.plain(timeout=TIMEOUT)
    sync = edit_ext.attach(model, optimizer, config, mesh=mesh, **slow)
    began = time.monotonic()
    try:
        for t in range(6):
            if dist.get_rank() == 3 and t == 2:
                threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGKILL)).start()
            began = time.monotonic()
            shards.train_step(model, optimizer, mesh, t)
    except RuntimeError as error:
        return str(error), time.monotonic() - began
    finally:
        sync.detach()
    return "no error", 0.0


def test_dead_rank_in_a_sync(ranks: Ranks) -> None:
    """The other three end within the timeout, with an error that says who is dead."""
    *others, dead = ranks.outcomes(4, killed, seconds=40)
    assert dead.exitcode == -signal.SIGKILL
    for rank, outcome in enumerate(others):
        assert outcome.good, outcome.error
        text, seconds = outcome.value
        assert "sync 1" in text and seconds < TIMEOUT + 5, (rank, text, seconds)
        assert "rank 3" in text, (rank, text)
