"""Where methods meet: equal bits under settings that make them equal; and what each one sends."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import batch, loss, make_net, same, values
from ranks import Ranks
from torch import Tensor, nn

import edit_ext
from edit_ext import reference

E = edit_ext
PENALTIES_OFF = {"clip_norm": None, "weighting": "uniform", "z_threshold": None}
STEPS = 11
# Pairs of settings that are one method.
EQUAL: dict[str, tuple[Any, Any]] = {
    "EDiT without penalties is DiLoCo": (
        E.EDiT(sync_every=3, outer_momentum=0.9, **PENALTIES_OFF), E.DiLoCo(sync_every=3),
    ),
    "DiLoCo with lr 1 and no momentum is Post Local SGD": (
        E.DiLoCo(sync_every=3, outer_lr=1.0, outer_momentum=0.0, warmup_steps=2),
        E.PostLocalSGD(sync_every=3, warmup_steps=2),
    ),
    "Streaming DiLoCo in one fragment at once is DiLoCo": (
        E.StreamingDiLoCo(
            sync_every=3, fragments=1, delay=0, alpha=0.0, outer_lr=0.7, outer_momentum=0.9
        ),
        E.DiLoCo(sync_every=3),
    ),
    "DES-LOC with equal periods is Local Adam": (
        E.DESLOC(param_every=3, state_every=3), E.LocalAdam(sync_every=3),
    ),
    "DES-LOC with states by name is the same": (
        E.DESLOC(param_every=3, state_every={"exp_avg": 3, "exp_avg_sq": 3}),
        E.LocalAdam(sync_every=3),
    ),
    "DES-LOC with states that never meet is federated averaging": (
        E.DESLOC(param_every=3, state_every=math.inf), E.FedAvgPersistent(sync_every=3),
    ),
    "federated averaging is Post Local SGD without warm-up": (
        E.FedAvgPersistent(sync_every=3), E.PostLocalSGD(sync_every=3),
    ),
    "DES-LOC with Nesterov and states that never meet is DiLoCo": (
        E.DESLOC(param_every=3, state_every=math.inf, outer="nesterov", outer_lr=0.7),
        E.DiLoCo(sync_every=3),
    ),
    "half-lives are those of AdamW's betas": (
        E.DESLOC(param_every=3, state_every="half-life"),
        E.DESLOC(param_every=3, state_every={"exp_avg": 7, "exp_avg_sq": 693}),
    ),
    "by chance with probability 1 is every step": (
        E.DESLOC(param_every=1, state_every=1, schedule="bernoulli"), E.LocalAdam(sync_every=1),
    ),
    "CO2* without clipping is DiLoCo with a heavy ball": (
        E.CO2Star(sync_every=3, clip_value=None),
        E.DiLoCo(sync_every=3, outer_lr=1.0, outer_momentum=0.5, nesterov=False),
    ),
    "a sync at every step that replaces is the same in two ways": (
        E.PostLocalSGD(sync_every=1), E.EDiT(
            sync_every=1, outer_lr=1.0, outer_momentum=0.0, nesterov=False, **PENALTIES_OFF
        ),
    ),
}  # fmt: skip


def run(config: edit_ext.config.Method, sgd: bool = False) -> dict[str, Tensor]:
    model = make_net()
    params = model.parameters()
    optimizer = torch.optim.SGD(params, lr=0.05) if sgd else torch.optim.AdamW(params, lr=0.01)
    with edit_ext.attach(model, optimizer, config) as sync:
        for t in range(STEPS):
            loss(model, batch(dist.get_rank(), t)).backward()
            optimizer.step()
            optimizer.zero_grad()
        sync.flush()
    return values(model)


@pytest.mark.parametrize("name", EQUAL)
def test_equal(ranks: Ranks, name: str) -> None:
    """The same bits in all weights."""
    left, right = EQUAL[name]
    for one, other in zip(ranks.run(2, run, left), ranks.run(2, run, right), strict=True):
        assert same(one, other), name


def test_at_every_step_not_synchronous(ranks: Ranks) -> None:
    """Averaging weights and states of Adam at every step is no averaging of gradients."""
    local, plain = ranks.run(2, run, E.LocalAdam(sync_every=1)), ranks.run(2, run, E.Synchronous())
    assert not same(local[0], plain[0])


def test_plain_sgd_at_every_step_is_synchronous(ranks: Ranks) -> None:
    """H = 1: the mean of weights after a step of SGD is the step by the mean of gradients."""
    local = ranks.run(2, run, E.PostLocalSGD(sync_every=1), True)
    plain = ranks.run(2, run, E.Synchronous(), True)
    for name, value in local[0].items():
        torch.testing.assert_close(value, plain[0][name], rtol=0, atol=1e-6)


WIDTH, LAYERS = 128, 4  # a layer of WIDTH^2 elements divides into pieces without padding
SIZE = LAYERS * WIDTH**2
PERIOD = 12
# Payloads of the model's size a step, as algorithms have it: 1/K_x + 1/K_u + 1/K_v.
SENT: dict[str, tuple[Any, float]] = {
    "Synchronous": (E.Synchronous(), 1.0),
    "PostLocalSGD": (E.PostLocalSGD(sync_every=4), 1 / 4),
    "DiLoCo": (E.DiLoCo(sync_every=4), 1 / 4),
    "EDiT": (E.EDiT(sync_every=3), 1 / 3),
    "EDiT-replicated": (E.EDiT(sync_every=3, momentum="replicated"), 1 / 3),
    "StreamingDiLoCo": (E.StreamingDiLoCo(sync_every=4, fragments=2, delay=1), 1 / 4),
    "CO2": (E.CO2(sync_every=3), 1 / 3),
    "CO2-gap": (E.CO2(sync_every=3, staleness="gap"), 1 / 3),
    "CO2Star": (E.CO2Star(sync_every=4), 1 / 4),
    "LocalAdam": (E.LocalAdam(sync_every=4), 3 / 4),
    "DESLOC": (
        E.DESLOC(param_every=2, state_every={"exp_avg": 4, "exp_avg_sq": 6}), 1 / 2 + 1 / 4 + 1 / 6,
    ),
    "FedAvgPersistent": (E.FedAvgPersistent(sync_every=6), 1 / 6),
    "FedAvgReset": (E.FedAvgReset(sync_every=6), 1 / 6),
    "bf16": (E.DESLOC(param_every=2, state_every=4, wire="bf16"), (1 / 2 + 2 / 4) / 2),
}  # fmt: skip


def count(name: str) -> tuple[int, int, int]:
    """Bytes sent by this rank's communicators in PERIOD steps; those of records; layers synced."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    sync = edit_ext.attach(model, optimizer, SENT[name][0], start="broadcast")
    engine = sync._engine

    def steps(number: int) -> None:
        for _ in range(number):
            model(torch.randn(2, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    steps(PERIOD + 1)  # the forward of the last has done what came due
    engine.syncs.wait_for_flights()
    before, records = engine.comms.bytes_sent, len(sync.metrics())
    began = engine.clock.sync_index
    steps(PERIOD)
    engine.syncs.wait_for_flights()
    sent = engine.comms.bytes_sent - before
    records = sum(1 for _ in sync.metrics())
    assert began or name == "Synchronous"
    sync.detach()
    return sent, records, dist.get_rank()


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", SENT)
def test_bytes(ranks: Ranks, world: int, name: str) -> None:
    """What the communicators count over a whole number of windows is the formula, to the byte:
    2 (R-1)/R of the payload, and the records of each layer."""
    for sent, layers, rank in ranks.run(world, count, name):
        payload = 2 * (world - 1) * SIZE * 4 * SENT[name][1] * PERIOD / world
        one = reference.wire_bytes([WIDTH**2], world, rank)
        records = one - 2 * (world - 1) * WIDTH**2 * 4 // world
        if name == "CO2-gap":
            records += 8 * (world - 1)
        assert sent == payload + layers * records, name
        assert layers == round(SENT[name][1] * PERIOD * LAYERS * (2 if name == "bf16" else 1)) or (
            name == "Synchronous" and layers == 0
        )
