"""What explain() says of memory, against what the process really holds."""

from __future__ import annotations

import ctypes
import threading

import pytest
import torch
from nets import sgd
from ranks import Ranks
from torch import nn

import edit_ext
from edit_ext import _C
from edit_ext.explain import ON_HOST, memory

WIDTH, LAYERS = 1024, 24  # 25 M parameters: 100 MB of anchors
GPU = torch.cuda.is_available()
HOME = torch.device("cuda" if GPU else "cpu")
SMALL = WIDTH if GPU else 256  # of the emulator


class Heap(ctypes.Structure):
    """glibc's mallinfo2: all arenas together, and what was mapped apart from them."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    )  # fmt: skip


def held() -> int:
    """Bytes that this process has allocated and not freed."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Heap
    heap = mallinfo2()
    return int(heap.uordblks + heap.hblkhd)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    like = next(model.parameters())
    for _ in range(steps):
        model(torch.ones(1, like.shape[1], device=like.device)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def grown(prefetch: int, momentum: str) -> tuple[int, dict[str, int]]:
    """Memory gained from before attach to after three syncs, and what explain() counts."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = sgd(model, lr=1e-6)
    train(model, optimizer, 2)
    config = edit_ext.EDiT(sync_every=1, prefetch=prefetch, momentum=momentum, timeout=30.0)
    small = nn.Linear(WIDTH, 1)
    with edit_ext.attach(small, sgd(small), config, start="broadcast"):
        train(small, sgd(small), 1)  # loads what attach and a sync load
    before = held()
    with edit_ext.attach(model, optimizer, config, start="broadcast") as sync:
        train(model, optimizer, 4)
        return held() - before, memory(sync._engine)


@pytest.mark.parametrize(
    ("replicas", "prefetch", "momentum"),
    [(1, 2, "sharded"), (2, 2, "sharded"), (4, 2, "sharded"), (2, 0, "replicated")],
)
def test_explain_counts_what_is_there(
    ranks: Ranks, replicas: int, prefetch: int, momentum: str
) -> None:
    """Within 5 %; anchors take 4 bytes a parameter, outer momentum 4/R or 4, buffers those of the
    layers in flight."""
    results = ranks.run(replicas, grown, prefetch, momentum)
    count = WIDTH * WIDTH * LAYERS
    for gained, kinds in results:
        assert kinds["anchors"] == 4 * count
        held_by = replicas if momentum == "sharded" else 1
        assert kinds["outer momentum"] == 4 * count / held_by
        layer = 4 * WIDTH * WIDTH  # send; recv and merged are R pieces together
        assert kinds["buffers of layers in flight"] <= max(prefetch, 1) * layer * 2.05
        assert gained == pytest.approx(sum(kinds.values()), rel=0.05)


def peaks() -> tuple[int, int]:
    """Most memory above what is held between syncs, in a sync's forward and in a plain one."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    optimizer = sgd(model, lr=1e-6)
    config = edit_ext.EDiT(sync_every=2, timeout=30.0)
    found: dict[bool, int] = {}
    with edit_ext.attach(model, optimizer, config, start="broadcast") as sync:
        train(model, optimizer, 3)  # everything is there that stays
        for _ in range(4):
            syncs, before = sync.sync_index, held()
            seen, end = [before], threading.Event()

            def watch(seen: list[int] = seen, end: threading.Event = end) -> None:
                while not end.wait(2e-4):
                    seen.append(held())

            watcher = threading.Thread(target=watch)
            watcher.start()
            model(torch.ones(1, WIDTH))
            end.set()
            watcher.join()
            train(model, optimizer, 1)
            inside = sync.sync_index > syncs
            found[inside] = max(found.get(inside, 0), max(seen) - before)
        sync.flush()
    return found[True], found[False]


def test_short_peak_memory(ranks: Ranks) -> None:
    """A sync of 24 layers takes no more than one of them above what its buffers hold anyway."""
    for with_sync, without in ranks.run(2, peaks):
        assert with_sync - without < 4 * WIDTH * WIDTH * 1.05, (with_sync, without)


def on_device() -> tuple[int, int]:
    """Bytes allocated on the device, and of pinned memory if that can be told."""
    if GPU:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), 0
    there = torch.ops.edit_ext_emulated
    there.synchronize()
    return there.held(False), there.held(True)


def gained_by(offload: bool) -> tuple[int, int, dict[str, int]]:
    """Bytes of the device and of pinned memory after three syncs, and what explain() counts."""
    model = nn.Sequential(*(nn.Linear(SMALL, SMALL, bias=False) for _ in range(LAYERS))).to(HOME)
    optimizer = sgd(model, lr=1e-6)
    train(model, optimizer, 2)
    before = on_device()
    config = edit_ext.EDiT(sync_every=1, offload=offload, timeout=30.0)
    with edit_ext.attach(model, optimizer, config) as sync:
        train(model, optimizer, 4)
        after = on_device()
        kinds, text = memory(sync._engine), sync.explain()
    assert ("'s device and " in text) == offload
    return after[0] - before[0], after[1] - before[1], kinds


@pytest.mark.gpu
@pytest.mark.skipif(not GPU and not _C.on_cuda(torch.zeros(1)), reason="no CUDA device here")
def test_offload_moves_memory_to_the_host() -> None:
    """Anchor and momentum, 8 bytes a parameter alone, leave the device but for three layers' room:
    two in flight and the next. Device and pinned bytes are those of explain(), within 5 %."""
    device, pinned, kinds = gained_by(True)
    before, _, plain = gained_by(False)
    count, buffers = SMALL * SMALL * LAYERS, "buffers of layers in flight"
    assert kinds["anchors" + ON_HOST] == kinds["outer momentum" + ON_HOST] == 4 * count
    assert kinds[buffers] <= 3 * 16 * SMALL * SMALL * 1.02  # send, merged, anchor, momentum
    on_host = sum(n for kind, n in kinds.items() if kind.endswith(ON_HOST))
    assert device == pytest.approx(sum(kinds.values()) - on_host, rel=0.05)
    if GPU:
        less = 8 * count - (kinds[buffers] - plain[buffers])
        assert before - device == pytest.approx(less, rel=0.05)
    else:
        assert pinned == pytest.approx(on_host, rel=0.05)
