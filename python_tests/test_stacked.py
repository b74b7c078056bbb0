"""Replicas stacked in one process learn what replicas in processes of their own do."""

from __future__ import annotations

import nets
import pytest
import torch
from method_cases import CASES, INNER, PLAIN, STEPS
from torch import Tensor, nn

import edit_ext
from edit_ext.bench.stacked import Replicas
from edit_ext.reference import wire_bytes


def make_loss_net() -> nn.Module:
    """The net of the trajectories of processes; its forward gives the loss."""
    net = nets.make_net()
    outputs = net.forward
    net.forward = lambda data, target: (outputs(data) - target).square().mean()
    return net


def batches(count: int, t: int) -> tuple[Tensor, ...]:
    each = [nets.batch(rank, t) for rank in range(count)]
    return tuple(torch.stack(part) for part in zip(*each, strict=True))


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.timeout(60)
def test_trajectory(name: str, count: int) -> None:
    """Every method ends where its fp64 reference does, to 1e-6, all replicas with the same bits."""
    config, inner, _ = CASES[name]
    truth = PLAIN.train(name, count).final
    with Replicas(
        make_loss_net, lambda net: INNER[inner][0](net.parameters()), config, count
    ) as stacked:
        for t in range(STEPS):
            stacked.step(batches(count, t))
        stacked.flush()
    for key, stack in stacked.weights.items():
        for rank in range(count):
            scale = max(truth[rank][key].abs().max().item(), 1.0)
            difference = (stack[rank].double() - truth[rank][key]).abs().max().item()
            assert difference <= 1e-6 * scale, (key, rank)
            assert torch.equal(stack[rank], stack[0]), (key, rank)


def test_bytes() -> None:
    """What a rank sends in one sync is what the formula of the ledger says."""
    method = edit_ext.DiLoCo(sync_every=STEPS)
    with Replicas(
        make_loss_net, lambda net: torch.optim.SGD(net.parameters(), lr=0.1), method, 2
    ) as stacked:
        for t in range(STEPS):
            stacked.step(batches(2, t))
        assert stacked.bytes_sent == 0
        stacked.flush()
        units = stacked.replicas[0].held.plan.units
        counts = [[p.numel() for p in unit.params.values()] for unit in units]
        wanted = [sum(wire_bytes(each, 2, rank) for each in counts) for rank in range(2)]
        assert stacked.bytes_sent == max(wanted)


def test_idle_replicas() -> None:
    """A replica that is left out of a step keeps its weights, and the sync counts its steps."""
    method = edit_ext.AEDiT(sync_seconds=1e6, weighting="steps", z_threshold=None)
    with Replicas(
        make_loss_net, lambda net: torch.optim.SGD(net.parameters(), lr=0.1), method, 2
    ) as stacked:
        stacked.step(batches(2, 0))
        before = {key: stack[1].clone() for key, stack in stacked.weights.items()}
        stacked.step(batches(2, 1), active=[0])
        assert all(torch.equal(stack[1], before[key]) for key, stack in stacked.weights.items())
        stacked.sync_now()
        stacked.step(batches(2, 2))
        record = stacked.replicas[0].syncs.metrics.drain()[0]
    assert record["steps"] == [2, 1]
    assert record["weights"] == pytest.approx([2 / 3, 1 / 3])


def test_gradients_are_clipped_by_replica() -> None:
    """`clip` bounds the norm of each replica's gradient, and leaves smaller ones alone."""
    moved = []
    for clip in (None, 1e9, 1e-3):
        with Replicas(
            make_loss_net, lambda net: torch.optim.SGD(net.parameters(), lr=1.0),
            edit_ext.DiLoCo(), 2,
        ) as stacked:  # fmt: skip
            start = {key: stack.detach().clone() for key, stack in stacked.weights.items()}
            stacked.step(batches(2, 0), clip=clip)
            squares = [
                (stacked.weights[k] - start[k]).reshape(2, -1).square().sum(1) for k in start
            ]
            moved.append(torch.stack(squares).sum(0).sqrt())
    assert torch.equal(moved[0], moved[1])
    assert torch.allclose(moved[2], torch.full((2,), 1e-3), rtol=1e-2)
