"""EDiT over replicas that are sharded by FSDP2: whole trajectories against plain replicas."""

from __future__ import annotations

import warnings
from typing import Any

import nets
import pytest
import shards
import torch
from ranks import Ranks
from simulate import simulate
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import edit_ext

RULES: dict[str, Any] = {"sync_every": 3, "clip_norm": 0.2, "ema_warmup": 2, "ema_alpha": 0.2}
STEPS = 11  # three whole windows and a part of one


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def run(replicas: int, count: int, rules: dict[str, Any]) -> dict[str, Any]:
    """One rank's training; whole anchors after every sync, metrics, whole weights at the end."""
    mesh = shards.mesh_of(replicas, count)
    model = shards.shard(shards.make_net(), mesh)
    optimizer = adam(model.parameters())
    config = edit_ext.EDiT(timeout=30.0, **rules)
    anchors: list[dict[str, Tensor]] = []
    with edit_ext.attach(model, optimizer, config, mesh=mesh) as sync:
        assert sync.data_world == replicas * count
        for t in range(STEPS):
            seen = sync.sync_index
            shards.train_step(model, optimizer, mesh, t)
            if sync.sync_index != seen:
                with sync.anchor_weights():
                    anchors.append(shards.full(model))
        sync.flush()
        anchors.append(shards.full(model))
        metrics = sync.metrics()
        order = sync.state_dict()["order"]
    return {"anchors": anchors, "metrics": metrics, "params": shards.full(model), "order": order}


CASES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "warm-up": {"warmup_steps": 4},
    "model": {"granularity": "model", "weighting": "uniform"},
    "bf16-wire": {"wire": "bf16", "prefetch": 1},
    "replicated": {"momentum": "replicated", "wire": "bf16"},
}


MORE = [(r, s, case) for r, s in ((4, 1), (1, 2), (2, 1)) for case in ("softmax", "warm-up")]


def decided(metrics: list[dict[str, Any]]) -> list[Any]:
    """What all ranks must have in common, shards too."""
    keys = ("layer", "sync_index", "norms", "weights", "flags", "clip", "merged_norm", "skip")
    return [[entry[key] for key in keys] for entry in metrics]


@pytest.mark.parametrize(("replicas", "count", "case"), [*((2, 2, case) for case in CASES), *MORE])
def test_trajectory(ranks: Ranks, replicas: int, count: int, case: str) -> None:
    """Full tensors equal the simulation of plain replicas; all ranks decide alike."""
    rules = {**RULES, **CASES[case]}
    results = ranks.run(replicas * count, run, replicas, count, rules)
    truth = simulate(
        shards.make_net,
        nets.batch,
        nets.loss,
        replicas=replicas,
        steps=STEPS,
        optimizer=adam,
        layer_of=shards.layer_of,
        anchor_dtype=torch.float32 if rules.get("wire") == "bf16" else torch.float64,
        **{k: v for k, v in rules.items() if k not in ("granularity", "prefetch")},
    )
    for rank, result in enumerate(results):
        assert len(result["anchors"]) == len(truth.syncs)
        for index, (anchors, expected) in enumerate(
            zip(result["anchors"], truth.syncs, strict=True)
        ):
            for name, anchor in anchors.items():
                assert torch.equal(anchor, results[0]["anchors"][index][name]), (rank, index, name)
                torch.testing.assert_close(
                    anchor.double(), expected.anchors[name].double(), rtol=0, atol=2e-6
                )
        for entry in result["metrics"]:
            layer = truth.syncs[entry["sync_index"] - 1].layers[entry["layer"]]
            assert entry["norms"] == pytest.approx(layer.norms, rel=1e-3, abs=1e-6)
            assert entry["clip"] == pytest.approx(layer.clip, rel=1e-3)
            assert list(entry["flags"]) == layer.flags
        assert decided(result["metrics"]) == decided(results[0]["metrics"]), rank


def inner_replicas() -> tuple[dict[str, Tensor], list[Any]]:
    """Neighbouring ranks are replicas; shards are two ranks apart."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "replica"))
    model = shards.shard(shards.make_net(), mesh)
    optimizer = adam(model.parameters())
    config = edit_ext.EDiT(timeout=30.0, **{**RULES, "warmup_steps": 2})
    with (
        warnings.catch_warnings(),
        edit_ext.attach(model, optimizer, config, mesh=mesh) as sync,
    ):
        warnings.simplefilter("error")  # of weights that differ at the switch
        for t in range(STEPS):
            shards.train_step(model, optimizer, mesh, t)
        sync.flush()
        metrics = sync.metrics()
    return shards.full(model), decided(metrics)


def test_replicas_may_be_the_inner_dimension(ranks: Ranks) -> None:
    """The same run as with replica after replica."""
    inner = ranks.run(4, inner_replicas)
    outer = ranks.run(4, run, 2, 2, {**RULES, "warmup_steps": 2})
    for (weights, scalars), result in zip(inner, outer, strict=True):
        assert nets.same(weights, result["params"])
        assert scalars == decided(result["metrics"])
