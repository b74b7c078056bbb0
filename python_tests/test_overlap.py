"""Syncs hide behind the forward: a slow link costs little with prefetch, and all of it without."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
import torch.distributed as dist
from nets import plain, sgd
from ranks import Ranks
from torch import Tensor, nn

import edit_ext


def stacked(prefetch: int) -> list[float]:
    """Median milliseconds of 20 steps with a sync and of 20 without; forward of 8 x 30 ms."""
    model = nn.Sequential(*(Sleepy() for _ in range(8)))
    optimizer = sgd(model)
    config = plain(sync_every=2, prefetch=prefetch)
    times: list[float] = []
    warnings.filterwarnings("ignore", message="edit_ext: in 3 syncs")  # equal data on purpose

    def slow_link(inner: Any) -> Any:
        return edit_ext._C.DelayedComm(inner, 0.02)

    with edit_ext.attach(model, optimizer, config, comm_wrapper=slow_link):
        for _ in range(42):
            dist.barrier()
            began = time.perf_counter()
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(1e3 * (time.perf_counter() - began))
    with_sync, without = sorted(times[2::2]), sorted(times[1::2])
    return [with_sync[10], without[10]]


class Sleepy(nn.Module):
    """A layer whose forward takes 30 ms of time and no core."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.03)
        return x * self.weight


def test_overlap(ranks: Ranks) -> None:
    """20 ms a layer on the wire hide behind the forward; blocking, they do not."""
    for with_sync, without in ranks.run(2, stacked, 2, seconds=90):
        assert without >= 160 and with_sync <= without + 45, (with_sync, without)
    for with_sync, without in ranks.run(2, stacked, 0, seconds=90):
        assert with_sync >= without + 150, (with_sync, without)


def states_in_flight() -> int:
    """How many layers of states arrive between a forward and its backward, although the training
    thread calls nothing."""
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    data = torch.randn(4, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    config = edit_ext.LocalAdam(sync_every=2)

    def slow_link(inner: Any) -> Any:
        return edit_ext._C.DelayedComm(inner, 0.02)

    with edit_ext.attach(model, optimizer, config, start="broadcast", comm_wrapper=slow_link) as s:
        for step in range(3):
            loss = model(data).square().mean()
            if step == 2:
                held = s._engine.held
                states = [held.layers[i] for i in range(len(held.layers)) if held.is_state(i)]
                end = time.perf_counter() + 30
                while not all(layer.ready() for layer in states):
                    assert time.perf_counter() < end, "states do not go on by themselves"
                    time.sleep(0.005)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        s.flush()
    return len(states)


def test_states_hide_behind_a_backward(ranks: Ranks) -> None:
    """All states of a sync begin in the forward, however few layers may be in flight, and need no
    hook to arrive."""
    assert ranks.run(2, states_in_flight) == [12, 12]
