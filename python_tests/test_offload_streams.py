"""What orders copies to and from pinned memory with everything else, and holds what they use.

As test_streams.py: on a GPU these are races that may end well, the emulator's streams end badly
whenever they may.
"""

from __future__ import annotations

import os
import time
from collections import deque

import pytest
import torch
from ranks import Ranks
from test_gpu import GPU, HOME, draw, no_host_sync
from test_streams import begin, finish, move, on_stream, settle
from torch import Tensor

from edit_ext import _C

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _C.on_cuda(torch.zeros(1)) and not GPU, reason="no CUDA device here"),
]

SEEDS = (5, 6, 7)
BURSTS, BURST = 6, 2  # nothing is waited for between the syncs of a burst
LATE = not GPU and os.environ.get("EDIT_EXT_EMULATED_STREAMS", "late") == "late"


def layers_on(lane: _C.Lane, pool: _C.BufferPool, wire: str, *, offload: bool) -> list[_C.Layer]:
    return [
        _C.Layer(
            f"block {seed}",
            [t.to(HOME) for t in draw(seed)],
            replica=None,
            lane=lane,
            pool=pool,
            wire=wire,
            offload=offload,
        )
        for seed in SEEDS
    ]


def pair(count: int, wire: str) -> tuple[list[_C.Layer], list[_C.Layer]]:
    """Layers with offload that share `count` buffers, and their twins on the device."""
    lane = _C.make_lane(torch.zeros(1, device=HOME))
    return (
        layers_on(lane, _C.BufferPool(count), wire, offload=True),
        layers_on(lane, _C.BufferPool(1), wire, offload=False),
    )


def sync_slowly(layers: list[_C.Layer], k: int) -> None:
    for layer in layers:
        begin(layer, k)
        layer.wait()
        layer.stats()
        settle()


def same(left: Tensor | None, right: Tensor | None) -> bool:
    return left is not None and right is not None and torch.equal(left.cpu(), right.cpu())


def check(layers: list[_C.Layer], twins: list[_C.Layer]) -> None:
    """State of the host, which the reads wait for, and then the parameters."""
    for layer, twin in zip(layers, twins, strict=True):
        assert same(layer.anchor, twin.anchor) and same(layer.momentum, twin.momentum)
    settle()
    for layer, twin in zip(layers, twins, strict=True):
        assert all(map(same, layer.params, twin.params))


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
@pytest.mark.parametrize("streams", [(0, 0, 0), (1, 1, 1), (1, 2, 1)])
@pytest.mark.parametrize(("in_flight", "ahead"), [(1, 1), (2, 1), (1, 0)])
def test_state_comes_and_goes(
    streams: tuple[int, ...], wire: str, in_flight: int, ahead: int
) -> None:
    """Three layers, fetched one ahead of those in flight or when they begin, in changing order:
    every bit as on the device. Without new parameters momentum still moves the anchors."""
    layers, twins = pair(in_flight + ahead, wire)
    for burst in range(BURSTS):
        for layer in [*layers, *twins]:
            move(layer.params, burst)
        settle()
        for k in range(burst * BURST, burst * BURST + BURST):
            order = deque(zip(streams, layers, strict=True))
            order.rotate(k)
            waiting: deque[tuple[int, _C.Layer]] = deque()
            while order:
                stream, layer = order.popleft()
                with on_stream(stream):
                    begin(layer, k)
                    if ahead and order:
                        order[0][1].fetch()
                waiting.append((stream, layer))
                if len(waiting) == in_flight:
                    finish(*waiting.popleft())
            while waiting:
                finish(*waiting.popleft())
        for k in range(burst * BURST, burst * BURST + BURST):
            sync_slowly(twins, k)
        check(layers, twins)


def test_nobody_waits_for_the_host() -> None:
    """fetch, begin and wait only enqueue: where streams run late nothing has happened yet."""
    layers, twins = pair(2, "fp32")
    before = [p.clone() for p in layers[0].params]
    move(layers[0].params, 3)
    move(twins[0].params, 3)
    moved = [p.clone() for p in layers[0].params]
    settle()
    with on_stream(1), no_host_sync():
        layers[0].fetch()
        begin(layers[0], 0)
        layers[1].fetch()
        layers[0].wait()
    if LATE:
        assert all(map(same, layers[0].params, moved))
    sync_slowly(twins[:1], 0)
    check(layers[:1], twins[:1])
    assert not all(map(same, layers[0].params, before))


def test_what_was_fetched_is_not_used_after_a_write() -> None:
    """Values that the host writes between a fetch and begin are those that the sync starts from;
    so are those that it writes at once after a sync."""
    layers, twins = pair(2, "fp32")
    for k, seed in enumerate((11, 12, 13)):
        for layer, twin in zip(layers, twins, strict=True):
            values = [t.to(HOME) for t in draw(seed)]
            with on_stream(1):
                layer.fetch()
                layer.load_anchor(values)
                assert layer.momentum is not None and twin.momentum is not None
                layer.momentum.add_(1.0)
                begin(layer, k)
                layer.wait()
            twin.load_anchor(values)
            twin.momentum.add_(1.0)
            sync_slowly([twin], k)
    check(layers, twins)


def test_params_come_back_from_the_host() -> None:
    """restore() and capture() right after a sync: the anchor that it has left, not an older one."""
    layers, twins = pair(1, "bf16")
    move(layers[0].params, 3)
    move(twins[0].params, 3)
    settle()
    with on_stream(1):
        begin(layers[0], 0)
        layers[0].wait()
    layers[0].restore()
    sync_slowly(twins[:1], 0)
    twins[0].restore()
    assert all(map(same, layers[0].params, twins[0].params))
    for layer in (layers[0], twins[0]):
        with torch.no_grad():
            layer.params[0].fill_(0.125)
    with on_stream(1):
        begin(layers[0], 1)
        layers[0].wait()
    settle()
    sync_slowly(twins[:1], 1)
    for layer in (layers[0], twins[0]):
        layer.capture()
    check(layers[:1], twins[:1])


def test_a_closed_lane_has_brought_everything_back() -> None:
    """A lane that closes in good time waits for copies too; their memory may go then."""
    lane = _C.make_lane(torch.zeros(1, device=HOME))
    layer = layers_on(lane, _C.BufferPool(1), "fp32", offload=True)[0]
    twin = layers_on(lane, _C.BufferPool(1), "fp32", offload=False)[0]
    anchor, momentum = layer.anchor, layer.momentum
    for each in (layer, twin):
        move(each.params, 3)
    sync_slowly([twin], 0)
    with on_stream(1):
        begin(layer, 0)
        layer.wait()
        assert lane.close(10.0)
    assert same(anchor, twin.anchor) and same(momentum, twin.momentum)
    settle()


def test_a_layer_may_go_while_its_state_travels(ranks: Ranks) -> None:
    """What copies still read and write is not given to anybody else, fetched or on its way back."""
    assert ranks.run(1, drop_on_the_way) == [True]


def drop_on_the_way() -> bool:
    lane = _C.make_lane(torch.zeros(1, device=HOME))
    for k in range(6):
        layer = layers_on(lane, _C.BufferPool(2), "fp32", offload=True)[0]
        layer.fetch()
        if k % 3:
            begin(layer, k)
        if k % 3 == 1:
            layer.wait()
        while k % 3 == 2 and not layer.ready():
            time.sleep(1e-3)
        del layer
    others = [torch.full((70001,), float(i), device=HOME) for i in range(20)]
    settle()
    return all(bool((t == i).all()) for i, t in enumerate(others))


def test_fetch_is_for_layers_at_rest() -> None:
    """In the middle of a sync there is nothing to fetch; without offload never, and no error."""
    layers, twins = pair(2, "fp32")
    begin(layers[0], 0)
    with pytest.raises(RuntimeError, match=r"block 5: fetch\(\) while a sync is in flight"):
        layers[0].fetch()
    begin(twins[0], 0)
    twins[0].fetch()
    layers[0].wait()
    layers[1].fetch()
    layers[1].fetch()
    layers[2].fetch()
    with pytest.raises(RuntimeError, match="all 2 buffers are in flight"):
        layers[0].fetch()
