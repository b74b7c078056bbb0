"""Whole trajectories over Gloo, compared with the simulation that is written from the equations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import batch, layer_of, loss, make_net, sgd, train_step, values
from ranks import Ranks
from simulate import simulate
from torch import Tensor, nn

import edit_ext

RULES: dict[str, Any] = {"sync_every": 3, "clip_norm": 0.2, "ema_warmup": 2, "ema_alpha": 0.2}
STEPS = 14  # four whole windows and a part of one


def make_bf16() -> nn.Module:
    return make_net().to(torch.bfloat16)


def spoil(replica: int, t: int, model: nn.Module) -> None:
    """Replica 1 goes astray in the fourth window."""
    if (replica, t) == (1, 11):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(3.0)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def run(rules: dict[str, Any], steps: int, bf16: bool, spoilt: bool, adamw: bool) -> dict[str, Any]:
    """One replica's training; the anchors and metrics of every sync, and how it ends."""
    rank = dist.get_rank()
    model = make_bf16() if bf16 else make_net()
    optimizer = adam(model.parameters()) if adamw else sgd(model)
    config = edit_ext.EDiT(timeout=30.0, **rules)
    anchors: list[dict[str, Tensor]] = []
    with edit_ext.attach(model, optimizer, config) as sync:
        for t in range(steps):
            seen = sync.sync_index
            train_step(model, optimizer, rank, t)
            if spoilt:
                spoil(rank, t + 1, model)
            if sync.sync_index != seen:
                anchors.append(sync.state_dict()["anchors"])
        sync.flush()
        anchors.append(sync.state_dict()["anchors"])
        order = sync.state_dict()["order"]
        metrics = sync.metrics()
        sync.flush()  # with no step left: the weights are the anchors and stay
    return {"anchors": anchors, "metrics": metrics, "params": values(model), "order": order}


def distance(left: Tensor, right: Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return ((left.double() - right.double()).abs().max() / right.double().abs().max()).item()


CASES = {
    "softmax": {},
    "warm-up": {"warmup_steps": 4},
    "uniform-model": {"weighting": "uniform", "granularity": "model", "nesterov": False},
    "steps-blocking": {"weighting": "steps", "prefetch": 0},
    "bf16-wire": {"wire": "bf16"},
    "one-ahead": {"prefetch": 1, "clip_norm": None},
    "far-ahead": {"prefetch": 20},
    "replicated": {"momentum": "replicated"},
    "replicated-bf16-wire": {"momentum": "replicated", "wire": "bf16"},
}


MORE = [(3, "softmax", False), (3, "warm-up", True), (4, "softmax", True), (4, "bf16-wire", False)]


@pytest.mark.parametrize(
    ("world", "case", "adamw"), [*((2, name, name == "softmax") for name in CASES), *MORE]
)
def test_trajectory(ranks: Ranks, world: int, case: str, adamw: bool) -> None:
    """Anchors, decisions and final weights equal the simulation; anchors agree bit for bit."""
    compare(ranks, world, {**RULES, **CASES[case]}, adamw=adamw, tolerance=1e-6)


@pytest.mark.parametrize("world", [2, 3])
def test_flagged_replica(ranks: Ranks, world: int) -> None:
    """A replica that goes astray mid-run is flagged in every layer, there and in the simulation."""
    metrics = compare(ranks, world, RULES, spoilt=True, tolerance=1e-6)
    flagged = {(m["sync_index"], m["layer"]): m["flags"] for m in metrics}
    for (index, layer), flags in flagged.items():
        if layer != "spare":
            assert flags == [r == 1 and index == 4 for r in range(world)], (index, layer)


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_bf16_model(ranks: Ranks, wire: str) -> None:
    """A bf16 model keeps fp32 anchors that follow the simulation."""
    compare(ranks, 2, {**RULES, "wire": wire}, bf16=True, tolerance=1e-6)


def compare(
    ranks: Ranks,
    world: int,
    rules: dict[str, Any],
    *,
    bf16: bool = False,
    spoilt: bool = False,
    adamw: bool = False,
    tolerance: float,
) -> list[dict[str, Any]]:
    """Run both ways and compare; the metrics of rank 0."""
    results = ranks.run(world, run, rules, STEPS, bf16, spoilt, adamw)
    truth = simulate(
        make_bf16 if bf16 else make_net,
        batch,
        loss,
        replicas=world,
        steps=STEPS,
        optimizer=adam if adamw else lambda params: torch.optim.SGD(params, lr=0.1),
        layer_of=layer_of,
        corrupt=spoil if spoilt else None,
        anchor_dtype=torch.float32 if bf16 or rules.get("wire") == "bf16" else torch.float64,
        **{k: v for k, v in rules.items() if k not in ("granularity", "prefetch")},
    )
    assert len(truth.syncs) >= 3
    for rank, result in enumerate(results):
        assert len(result["anchors"]) == len(truth.syncs)
        for index, (anchors, sync) in enumerate(zip(result["anchors"], truth.syncs, strict=True)):
            for name, anchor in anchors.items():
                assert torch.equal(anchor, results[0]["anchors"][index][name]), (rank, index, name)
                assert distance(anchor, sync.anchors[name]) <= tolerance, (rank, index, name)
        for name, value in result["params"].items():
            assert torch.equal(value, results[0]["params"][name]), (rank, name)
            assert distance(value, truth.params(rank)[name]) <= tolerance, (rank, name)
        for entry in result["metrics"]:
            expected = truth.syncs[entry["sync_index"] - 1].layers[entry["layer"]]
            assert entry["norms"] == pytest.approx(expected.norms, rel=1e-4, abs=3e-7)
            assert entry["weights"] == pytest.approx(expected.weights, rel=1e-4, abs=3e-7)
            assert list(entry["flags"]) == expected.flags
            assert entry["skip"] == expected.skip
            assert entry["clip"] == pytest.approx(expected.clip, rel=1e-4)
    if rules.get("granularity") != "model":
        visited = ["(root)", "stem", "blocks.0", "blocks.1", "blocks.2", "head", "spare"]
        assert results[0]["order"] == visited
    return results[0]["metrics"]
