"""What orders the caller's stream, side streams and the memory that both use.

On a GPU these are races that may happen to end well. The emulator's streams end badly whenever they
may: test_emulated.py runs this file with late, early and random ones.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from test_gpu import GPU, HOME, POLICY, draw, flat, hold_up, no_host_sync
from torch import Tensor

from edit_ext import _C, ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _C.on_cuda(torch.zeros(1)) and not GPU, reason="no CUDA device here"),
]

SYNCS = 12
RULES = {**POLICY, "z_threshold": None}
DECISIONS = {
    name: RULES[name]
    for name in (
        "weighting",
        "temperature",
        "z_threshold",
        "ema_alpha",
        "ema_warmup",
        "max_flags_in_a_row",
    )
}


def settle() -> None:
    """Wait until every stream is empty; torch's own operations may follow on any."""
    if GPU:
        torch.cuda.synchronize()
    else:
        torch.ops.edit_ext_emulated.synchronize()


@contextmanager
def on_stream(index: int) -> Iterator[None]:
    """One of the caller's streams as the current one; 0 is torch's default stream."""
    if GPU:
        with torch.cuda.stream(STREAMS[index]):
            yield
        return
    torch.ops.edit_ext_emulated.use_stream(index)
    try:
        yield
    finally:
        torch.ops.edit_ext_emulated.use_stream(0)


STREAMS = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()] if GPU else []


class Twin:
    """All replicas of a layer, synced step by step on the CPU's memory with nothing beside them."""

    def __init__(self, seed: int, replicas: int = 1, count: int = 5) -> None:
        self.params = [draw(seed)[:count] for _ in range(replicas)]
        self.anchor = flat(self.params[0])
        self.momentum = torch.zeros_like(self.anchor)
        self.detector = torch.zeros(replicas, 5, dtype=torch.float64)

    def sync(self) -> None:
        sends = [torch.zeros_like(self.anchor) for _ in self.params]
        sumsq = [
            ops.pseudo_grad(self.anchor, params, send)
            for params, send in zip(self.params, sends, strict=True)
        ]
        steps = torch.ones(len(sends), dtype=torch.int64)
        weights, _, _ = ops.decide(torch.cat(sumsq).sqrt(), steps, self.detector, **DECISIONS)
        merged = torch.zeros_like(self.anchor)
        norm2 = ops.merge(sends, weights, merged)
        rules = (RULES[name] for name in ("outer_lr", "outer_momentum", "nesterov", "clip_norm"))
        ops.outer_step(merged, self.anchor, self.momentum, norm2, *rules)
        for params in self.params:
            ops.write_back(self.anchor, params)


def layer_with(seed: int, pool: _C.BufferPool, count: int = 5) -> _C.Layer:
    params = [t.to(HOME) for t in draw(seed)[:count]]
    return _C.Layer("block", params, replica=None, lane=_C.make_lane(params[0]), pool=pool)


def begin(layer: _C.Layer, sync_index: int) -> None:
    layer.begin(_C.Policy(outer="sgd", **RULES), sync_index=sync_index, steps=1, done=False)


def move(params: list[Tensor], k: int) -> None:
    with torch.no_grad():
        for i, p in enumerate(params):
            p.add_(1e-3 * (i + k % 7))


def same(layer: _C.Layer, twin: Twin) -> None:
    assert torch.equal(layer.anchor.cpu(), twin.anchor)
    for ours, theirs in zip(layer.params, twin.params[0], strict=True):
        assert torch.equal(ours.cpu(), theirs)


def finish(stream: int, layer: _C.Layer) -> None:
    with on_stream(stream):
        layer.wait()


def run_and_compare(
    pool: _C.BufferPool, streams: tuple[int, int], in_flight: int, syncs: int = SYNCS
) -> None:
    layers, twins = [layer_with(s, pool) for s in (5, 6)], [Twin(s) for s in (5, 6)]
    for k in range(syncs):
        for params in [*(x.params for x in layers), *(x.params[0] for x in twins)]:
            move(params, k)
        settle()
        open_layers: deque[tuple[int, _C.Layer]] = deque()
        for stream, layer in zip(streams, layers, strict=True):
            with on_stream(stream):
                begin(layer, k)
            open_layers.append((stream, layer))
            if len(open_layers) == in_flight:
                finish(*open_layers.popleft())
        while open_layers:
            finish(*open_layers.popleft())
        for layer in reversed(layers):
            assert layer.stats()["flags"] == [False]
        settle()
        for layer, twin in zip(layers, twins, strict=True):
            twin.sync()
            same(layer, twin)


@pytest.mark.parametrize("streams", [(0, 0), (1, 1), (1, 2)])
def test_row_25_layers_on_the_callers_streams(streams: tuple[int, int]) -> None:
    """Two layers through one set of buffers, each on a stream of the caller: right 100 times, under
    the emulator a third of them in each of its orders."""
    rounds = (100 if GPU else 34) if streams == (1, 2) else SYNCS
    run_and_compare(_C.BufferPool(1), streams, in_flight=1, syncs=rounds)


def test_outgrown_buffers_wait_for_their_last_use() -> None:
    """A layer needs larger buffers on another stream of the caller, and the one before it has not
    run yet: what it still uses is not given to anybody else."""
    for k in range(SYNCS):
        pool, seeds, counts = _C.BufferPool(1), (5, 6), (1, 5)
        layers = [layer_with(s, pool, n) for s, n in zip(seeds, counts, strict=True)]
        twins = [Twin(s, count=n) for s, n in zip(seeds, counts, strict=True)]
        for params in [*(x.params for x in layers), *(x.params[0] for x in twins)]:
            move(params, k)
        settle()
        for stream, layer in enumerate(layers, 1):
            with on_stream(stream):
                begin(layer, 0)
            finish(stream, layer)
        settle()
        for layer, twin in zip(layers, twins, strict=True):
            twin.sync()
            same(layer, twin)


@pytest.mark.parametrize("streams", [(0, 0), (1, 1)])
def test_layers_in_flight_have_buffers_of_their_own(streams: tuple[int, int]) -> None:
    """The second layer begins before the first has been waited for: every bit right."""
    run_and_compare(_C.BufferPool(2), streams, in_flight=2)


def test_row_25_the_callers_stream() -> None:
    """Each operator behind a kernel that fills its inputs late, on a stream of the caller, without
    a wait of the host: right 100 times, read on that stream."""
    for k in range(100 if GPU else 3):
        twin = chain(torch.device("cpu"), k)
        # torch's own kernels, which operators use, know nothing of the emulator's streams.
        with on_stream(1 + k % 2 if GPU else 0):
            ours = [t.clone() for t in chain(HOME, k)]
            if GPU:
                torch.cuda.current_stream().synchronize()
            for mine, theirs in zip(ours, twin, strict=True):
                assert torch.equal(mine.cpu(), theirs), k


def chain(home: torch.device, k: int) -> list[Tensor]:
    """All operators, each fed by the one before; what they change and return."""
    sources = [[t.to(home) for t in draw(k + r)] for r in range(3)]
    params = [[torch.zeros_like(t) for t in tensors] for tensors in sources]
    anchor, momentum = flat(draw(k + 9)).to(home), flat(draw(k + 8)).to(home)
    apart = [anchor.clone(), momentum.clone()]
    sends = [torch.zeros_like(anchor) for _ in params]
    detectors = [torch.zeros(3, 5, dtype=torch.float64, device=home) for _ in range(2)]
    steps = torch.ones(3, dtype=torch.int64, device=home)
    merged = torch.zeros_like(anchor)
    settle()
    with no_host_sync():
        if home.type == "cuda":
            hold_up()
        for tensors, values in zip(params, sources, strict=True):
            torch._foreach_copy_(tensors, values)
        sums = [ops.pseudo_grad(anchor, t, send) for t, send in zip(params, sends, strict=True)]
        norms = torch.cat(sums).sqrt()
        weights, flags, skip = ops.decide(norms, steps, detectors[0], **DECISIONS)
        norm2 = ops.merge(sends, weights, merged)
        rules = (RULES[name] for name in ("outer_lr", "outer_momentum", "nesterov", "clip_norm"))
        ops.outer_step(merged, anchor, momentum, norm2, *rules)
        ops.stacked_outer_step(params, *apart, detectors[1], **RULES)
        ops.write_back(anchor, params[0])
    kept = [*sends, *sums, weights, flags, skip, merged, norm2, anchor, momentum]
    return [*kept, *apart, *detectors, *(t for tensors in params for t in tensors)]


@pytest.mark.skipif(GPU, reason="counts the emulator's copies")
@pytest.mark.parametrize("streams", [(1, 1), (1, 2)])
def test_a_table_of_tensors_is_copied_when_an_address_changes(streams: tuple[int, int]) -> None:
    """More tensors than a launch carries: one copy for all syncs until one of them is elsewhere."""
    copies = torch.ops.edit_ext_emulated.copies_up
    values = [torch.full((3 + i % 5,), 0.1 * i) for i in range(70)]
    params, theirs = [v.clone() for v in values], [v.clone() for v in values]
    made = _C.Layer(
        "many", params, replica=None, lane=_C.make_lane(params[0]), pool=_C.BufferPool(1)
    )
    twin = Twin(5)
    twin.params, twin.anchor = [theirs], flat(theirs)
    twin.momentum = torch.zeros_like(twin.anchor)
    for k in range(8):
        if k == 4:
            params = [p.clone() if i % 2 else p for i, p in enumerate(params)]
            made.rebind(params)
        move(params, k)
        move(theirs, k)
        settle()
        before = copies()
        with on_stream(streams[0]):
            begin(made, k)
        with on_stream(streams[1]):
            made.wait()
        made.stats()
        assert copies() - before == (k in (0, 4))
        settle()
        twin.sync()
        same(made, twin)


def test_the_end_of_a_sync_is_waited_for() -> None:
    """A lane that closes in good time is idle: it waits for its stream, not only for its worker."""
    params = [t.to(HOME) for t in draw(5)]
    lane = _C.make_lane(params[0])
    layer = _C.Layer("block", params, replica=None, lane=lane, pool=_C.BufferPool(1))
    with on_stream(1):
        begin(layer, 0)
        layer.wait()
        assert lane.close(10.0)
    settle()  # the write-back, before its memory goes


def test_a_layer_may_go_while_it_is_in_flight(ranks: Ranks) -> None:
    """What the side stream still writes is not given to anybody else."""
    assert ranks.run(1, drop_in_flight) == [True]


def drop_in_flight() -> bool:
    pool = _C.BufferPool(1)
    for seed in range(5):
        layer = layer_with(seed, pool)
        begin(layer, 0)
        while not layer.ready():
            time.sleep(1e-3)
        del layer
        pool = _C.BufferPool(1)
    others = [torch.full((70001,), float(i), device=HOME) for i in range(20)]
    settle()
    return all(bool((t == i).all()) for i, t in enumerate(others))


def test_a_lane_may_go_while_its_worker_is_in_a_call(ranks: Ranks) -> None:
    """The worker comes back to a stream that is still there."""
    assert ranks.run(2, drop_in_a_call) == [True, True]


def drop_in_a_call() -> bool:
    comm, params = made_comm(), [t.to(HOME) for t in draw(5)]
    lane, slow = _C.make_lane(params[0]), _C.DelayedComm(comm, 0.5)
    layer = _C.Layer("block", params, replica=slow, mesh=comm, lane=lane, pool=_C.BufferPool(1))
    begin(layer, 0)
    time.sleep(0.1)
    del layer, lane
    make = _C.make_lane(params[0])  # what may take the place of the first
    time.sleep(1.0)
    before = comm.bytes_sent
    settle()
    return make.close(1.0) and before > 0


def test_staged_buffers_wait_for_the_stream(ranks: Ranks) -> None:
    """Two replicas, staged through pinned memory behind a caller that lags: every bit right."""
    assert ranks.run(2, staged_syncs) == [True, True]


def staged_syncs() -> bool:
    comm, params = made_comm(), [t.to(HOME) for t in draw(5)]
    lane = _C.make_lane(params[0])
    layer = _C.Layer("block", params, replica=comm, mesh=comm, lane=lane, pool=_C.BufferPool(1))
    twin = Twin(5, replicas=2)
    for k in range(SYNCS):
        move(layer.params, k + 3 * dist.get_rank())
        for replica, replica_params in enumerate(twin.params):
            move(replica_params, k + 3 * replica)
        settle()
        with on_stream(1):
            begin(layer, k)
            layer.wait()
        assert layer.stats()["flags"] == [False, False]
        settle()
        twin.sync()
        same(layer, twin)
    return lane.close(1.0)


def made_comm() -> _C.C10dComm:
    return _C.C10dComm(*(dist.new_group().group_name for _ in range(2)), ["one", "other"])
