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

import edit_ext
from edit_ext import _C

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
