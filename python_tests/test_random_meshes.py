"""Random small models on random meshes with random settings, against the simulation.

Hypothesis draws the cases, always the same ones; `make test-long` runs more of them.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import shards
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from ranks import Ranks
from simulate import simulate
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import edit_ext

DEADLINE = 40.0  # seconds for a case; they take one or two


@dataclass(frozen=True)
class Case:
    """widths: of the layers of a net from 4 inputs to 2 outputs, each with a gain vector; sharded:
    which of its blocks are parameter groups of their own, None for a plain model."""

    replicas: int
    count: int
    widths: tuple[int, ...]
    sharded: tuple[bool, ...] | None
    steps: int
    rules: dict[str, Any]


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)
        self.gain = nn.Parameter(torch.ones(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.gain


def make(widths: tuple[int, ...]) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        sizes = [4, *widths, 2]
        return nn.Sequential(*(Block(a, b) for a, b in itertools.pairwise(sizes)))


def batch(replica: int, t: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * replica + t)
    x = torch.randn(4, 4, generator=generator)
    return x, x[:, :2].sin()


def loss(model: nn.Module, data: tuple[Tensor, Tensor]) -> Tensor:
    return (model(data[0]) - data[1]).square().mean()


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.2, momentum=0.5)


def layer_of(sharded: tuple[bool, ...] | None, name: str) -> str:
    child = name.split(".")[0]
    return child if sharded is None or sharded[int(child)] else "(root)"


def run(case: Case) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    """One rank's training."""
    mesh = shards.mesh_of(case.replicas, case.count)
    model = make(case.widths)
    if case.sharded is not None:
        for block, own in zip(model, case.sharded, strict=True):
            if own:
                fully_shard(block, mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
    optimizer = sgd(model.parameters())
    replica, shard = mesh["replica"].get_local_rank(), mesh["shard"].get_local_rank()
    each = 4 // case.count
    config = edit_ext.EDiT(timeout=20.0, **case.rules)
    with edit_ext.attach(model, optimizer, config, mesh=mesh["replica"]) as sync:
        for t in range(case.steps):
            x, y = batch(replica, t)
            mine = slice(shard * each, (shard + 1) * each)
            loss(model, (x[mine], y[mine])).backward()
            optimizer.step()
            optimizer.zero_grad()
        sync.flush()
        metrics = sync.metrics()
    return shards.full(model), metrics


@st.composite
def cases(draw: st.DrawFn) -> Case:
    meshes = [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (1, 4), (2, 2)]
    replicas, count = draw(st.sampled_from(meshes))
    widths = tuple(draw(st.lists(st.integers(1, 7), max_size=3)))
    plain = count == 1 and draw(st.booleans())
    flags = tuple(draw(st.booleans()) for _ in range(len(widths) + 1))
    warmup = draw(st.integers(0, 3))
    rules: dict[str, Any] = {
        "sync_every": draw(st.integers(1, 4)),
        "warmup_steps": warmup,
        "prefetch": draw(st.integers(0, 3)),
        "granularity": draw(st.sampled_from(["layer", "model"])),
        "weighting": draw(st.sampled_from(["softmax", "uniform", "steps"])),
        "outer_lr": draw(st.sampled_from([0.3, 0.7, 1.0])),
        "outer_momentum": draw(st.sampled_from([0.0, 0.8])),
        "nesterov": draw(st.booleans()),
        "clip_norm": draw(st.sampled_from([None, 0.05, 10.0])),
        "momentum": draw(st.sampled_from(["sharded", "replicated"])),
    }
    steps = warmup + draw(st.integers(0, 8))
    return Case(replicas, count, widths, None if plain else flags, steps, rules)


def check(ranks: Ranks, case: Case) -> None:
    results = ranks.run(case.replicas * case.count, run, case, seconds=DEADLINE)
    truth = simulate(
        partial(make, case.widths),
        batch,
        loss,
        replicas=case.replicas,
        steps=case.steps,
        optimizer=sgd,
        layer_of=partial(layer_of, case.sharded),
        **{k: v for k, v in case.rules.items() if k not in ("granularity", "prefetch")},
    )
    for rank, (weights, metrics) in enumerate(results):
        expected = truth.params(rank // case.count)
        for name, value in weights.items():
            torch.testing.assert_close(value, expected[name], rtol=0, atol=3e-6)
            assert torch.equal(value, results[0][0][name]), (rank, name)
        for entry in metrics:
            if entry["sync_index"] > len(truth.syncs):  # flush() of a window without steps
                assert all(entry["idle"])
                continue
            layer = truth.syncs[entry["sync_index"] - 1].layers[entry["layer"]]
            assert entry["norms"] == pytest.approx(layer.norms, rel=1e-3, abs=2e-6)


def several(ranks: Ranks, count: int) -> None:
    """`count` cases, the same in every run; no shrinking, which would repeat slow ones."""

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=cases())
    def each(case: Case) -> None:
        check(ranks, case)

    each()


@pytest.mark.timeout(25 * DEADLINE)
def test_a_few(ranks: Ranks) -> None:
    """No hang, and nothing that differs from the simulation, in 25 cases."""
    several(ranks, 25)


@pytest.mark.slow
@pytest.mark.timeout(100 * DEADLINE)
def test_many(ranks: Ranks) -> None:
    """The same in 100."""
    several(ranks, 100)
