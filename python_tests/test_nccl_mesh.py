"""FSDP2 replicas whose syncs travel over NCCL: three communicators a rank, in one order.

Runs in the emulated build, by test_emulated.py, over the library of test_nccl_ranks.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import shards
import torch
from ranks import Ranks
from test_fsdp import RULES, adam, decided
from test_nccl_ranks import library, load
from torch.distributed.fsdp import fully_shard

import edit_ext
from edit_ext import _C

SYNCS = 100  # of two layers, five operations each: a thousand in turns with those of FSDP2

pytestmark = [
    pytest.mark.skipif(
        not _C.on_cuda(torch.zeros(1)), reason="runs in the emulated build, by test_emulated.py"
    ),
    pytest.mark.timeout(100),
]


def train(path: str, comm: str) -> tuple[Any, Any, int]:
    """One rank of a 2x2 mesh, warm-up included."""
    seen = load(path)
    before = seen.destroys
    mesh = shards.mesh_of(2, 2)
    model = shards.shard(shards.make_net(), mesh)
    optimizer = adam(model.parameters())
    config = edit_ext.EDiT(timeout=30.0, **{**RULES, "warmup_steps": 2})
    with edit_ext.attach(model, optimizer, config, mesh=mesh, comm=comm) as sync:
        for t in range(9):
            shards.train_step(model, optimizer, mesh, t)
        sync.flush()
        metrics = sync.metrics()
    return shards.full(model), decided(metrics), seen.destroys - before


def both(path: str) -> tuple[Any, Any]:
    return train(path, "nccl"), train(path, "c10d")


def test_a_mesh_over_nccl(ranks: Ranks) -> None:
    """The same bits as over Gloo, and every communicator is closed in order."""
    for ours, theirs in ranks.run(4, both, library("socket_nccl"), seconds=90):
        assert ours[1] == theirs[1] and ours[1]
        assert all(torch.equal(value, theirs[0][name]) for name, value in ours[0].items())
        assert (ours[2], theirs[2]) == (3, 0)  # replica group, shard group, mesh


def often(path: str, syncs: int) -> tuple[int, dict[str, torch.Tensor]]:
    """A sync after every step: gathers and reductions of FSDP2 between those of our three."""
    load(path)
    mesh = shards.mesh_of(2, 2)
    model = shards.make_net()
    fully_shard(model.blocks[1], mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = adam(model.parameters())
    config = edit_ext.EDiT(sync_every=1, timeout=30.0)
    with edit_ext.attach(model, optimizer, config, mesh=mesh, comm="nccl") as sync:
        for t in range(syncs):
            shards.train_step(model, optimizer, mesh, t)
        sync.flush()
        return sync.sync_index, shards.full(model)


def test_short_communicators_at_once(ranks: Ranks) -> None:
    """Beside FSDP2's own group, sync after sync: nobody waits for ever, and all agree."""
    for count, weights in ranks.run(4, often, library("socket_nccl"), SYNCS, seconds=90):
        assert count == SYNCS and all(bool(w.isfinite().all()) for w in weights.values())
