"""Field reports about models that are built and tied in unusual ways."""

from __future__ import annotations

from typing import Any

import nets
import pytest
import shards
import torch
import torch.distributed as dist
from ranks import Ranks
from test_fsdp_parts import Tied
from torch import Tensor, nn

import edit_ext
from edit_ext import checks


def materialised(seed: int) -> Tied:
    """A model built on the meta device whose values come later; its tie is lost by then."""
    with torch.device("meta"):
        model = Tied()
    with pytest.raises(ValueError, match=r"'emb\.weight' is on the meta device; give it values"):
        edit_ext.attach(model, nets.sgd(model), nets.plain())
    model.to_empty(device="cpu")
    assert model.head.weight is not model.emb.weight
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator))
    return model


def tie(model: nn.Module) -> None:
    model.head.weight = model.emb.weight


def train(model: nn.Module, sync: edit_ext.Handle, steps: int) -> None:
    optimizer = sync._engine.ticker.optimizers[0]
    for t in range(steps):
        nets.train_step(model, optimizer, sync.data_rank, t)


def agreed(sync: edit_ext.Handle, model: nn.Module) -> None:
    """In the first forward the anchors are the weights, each once."""
    nets.loss(model, nets.batch(0, 99))
    assert nets.same(sync.state_dict()["anchors"], nets.values(model))


def meta_start() -> list[dict[str, Tensor]]:
    """Tied before attach, or after it; only replica 0 has loaded what counts."""
    rank, ends = dist.get_rank(), []
    for late in (False, True):
        model = materialised(seed=rank)
        if not late:
            tie(model)
        config = nets.plain(outer_lr=0.5)
        sync = edit_ext.attach(model, nets.sgd(model), config, start="broadcast")
        if late:
            tie(model)
            words = r"'head\.weight' was replaced by another object after attach"
            with pytest.raises(RuntimeError, match=words):
                train(model, sync, 1)
            sync.detach()
            dist.barrier()
            sync = edit_ext.attach(model, nets.sgd(model), config)
        assert model.head.weight is model.emb.weight
        start = materialised(seed=0)
        assert torch.equal(model.emb.weight, start.emb.weight)
        agreed(sync, model)
        train(model, sync, 5)
        sync.flush()
        assert model.head.weight is model.emb.weight
        sync.detach()
        ends.append(nets.values(model))
    return ends


def test_row_12_meta_start(ranks: Ranks) -> None:
    """On meta: refused. After to_empty and a broadcast of replica 0's values the anchors are the
    weights. A tie made again after attach is reported by name; attached anew, the run is the one
    that was tied before."""
    first, second = ranks.run(2, meta_start)
    for end in (*first, *second):
        assert nets.same(end, first[0]) and "head.weight" not in end


def sharded_meta() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """fully_shard on the meta device, memory, then values on the ranks of replica 0 alone."""
    mesh = shards.mesh_of(2, 2)
    with torch.device("meta"):
        model = shards.Net()
    shards.shard(model, mesh)
    with pytest.raises(ValueError, match="is on the meta device"):
        edit_ext.attach(model, nets.sgd(model), nets.plain(), mesh=mesh)
    dist.barrier()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.0 if mesh["replica"].get_local_rank() else 0.25)
    optimizer = nets.sgd(model)
    with edit_ext.attach(model, optimizer, nets.plain(), mesh=mesh, start="broadcast") as sync:
        nets.loss(model, shards.batch_of(mesh, 0))
        with sync.anchor_weights():
            anchors = shards.full(model)
        for t in range(3):
            shards.train_step(model, optimizer, mesh, t)
        sync.flush()
        return anchors, shards.full(model)


def test_row_12_sharded_meta_start(ranks: Ranks) -> None:
    """The same for fully_shard before there are values: anchors are replica 0's, and they train."""
    results = ranks.run(4, sharded_meta)
    for anchors, end in results:
        assert all(bool((value == 0.25).all()) for value in anchors.values())
        assert nets.same(end, results[0][1]) and not nets.same(end, anchors)


class Elsewhere:
    """A tensor that says it is on another device: this machine may have one only."""

    device = torch.device("cuda:0")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tensor, name)


def test_short_several_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainable parameters on two devices are refused with the first of each."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    there = {id(p) for p in model[1].parameters()}
    real = checks._check_parameter
    late = iter([False] * 3 + [True])  # all four have been checked one by one

    def check(name: str, param: nn.Parameter) -> None:
        real(name, param)
        if next(late):
            monkeypatch.setattr(
                checks, "local", lambda t: Elsewhere(t.detach()) if id(t) in there else t.detach()
            )

    monkeypatch.setattr(checks, "_check_parameter", check)
    with pytest.raises(ValueError, match=r"several devices: '0\.weight' on cpu, '1\.weight' on cu"):
        edit_ext.attach(model, nets.sgd(model), edit_ext.EDiT())
