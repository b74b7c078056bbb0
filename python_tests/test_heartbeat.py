"""The heartbeat by itself: who is silent, who failed, who left, on any store."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from edit_ext.heartbeat import Heartbeat

TIMEOUT = 0.8


def pair(store: Any) -> tuple[Heartbeat, Heartbeat, list[str]]:
    """Two ranks on one store; what the first is told."""
    told: list[str] = []
    names = ["replica 0 (rank 4)", "replica 1 (rank 7)"]
    first = Heartbeat(store, "p", 0, names, TIMEOUT, told.append)
    second = Heartbeat(store, "p", 1, names, TIMEOUT, lambda reason: None)
    second._beat()
    first.arrive()
    second.arrive()
    first.start()
    second.start()
    return first, second, told


def until(said: list[str], seconds: float = 5.0) -> str:
    deadline = time.monotonic() + seconds
    while not said and time.monotonic() < deadline:
        time.sleep(0.02)
    assert said, "nothing was said"
    return said[0]


def test_alive_on_every_store() -> None:
    """TCP, file and in-process stores carry the beat for longer than the timeout."""
    with tempfile.TemporaryDirectory() as folder:
        stores = [
            dist.HashStore(),
            dist.FileStore(str(Path(folder) / "store"), 2),
            dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False),
        ]
        pairs = [pair(dist.PrefixStore("job", store)) for store in stores]
        time.sleep(2 * TIMEOUT)
        for first, second, told in pairs:
            first.check()
            second.check()
            assert not told
            first.stop()
            second.stop()


def test_silent() -> None:
    """A rank whose counter stands still is named after the timeout."""
    first, second, told = pair(dist.HashStore())
    second._stop.set()  # the thread ends without a word
    began = time.monotonic()
    assert "replica 1 (rank 7) silent for" in until(told)
    assert TIMEOUT * 0.7 < time.monotonic() - began < TIMEOUT + 1
    with pytest.raises(RuntimeError, match="silent"):
        first.check()
    first.stop()


def test_failed() -> None:
    """A rank that says that it failed is passed on with its reason, at once."""
    first, second, told = pair(dist.HashStore())
    second.say_failed("no | more | disk")
    assert first.look() == "replica 1 (rank 7) failed: no | more | disk"
    assert until(told) == "replica 1 (rank 7) failed: no | more | disk"
    first.stop()
    second.stop()


def test_left() -> None:
    """A rank that left is a failure only for who needs it for a later sync."""
    first, second, told = pair(dist.HashStore())
    second.reached(3)
    second.stop()
    first.waiting_for(3)
    time.sleep(2 * TIMEOUT)
    assert not told
    first.waiting_for(4)
    assert "replica 1 (rank 7) left after sync 3, but this rank is in sync 4" in until(told)
    first.stop()


def test_asking() -> None:
    """A listener hears which sync a peer asks for long before the next beat is due."""
    store, told = dist.HashStore(), []  # type: ignore[var-annotated]
    names = ["replica 0 (rank 0)", "replica 1 (rank 1)"]
    first, second = (Heartbeat(store, "p", rank, names, 800.0, told.append) for rank in (0, 1))
    second._beat()
    first.arrive()
    second.arrive()
    for each in (first, second):
        each.start()  # beats every five seconds
    first.listen([1], 0.01)
    assert not first.asks_for(1)
    for index in (1, 2, 0):
        began = time.monotonic()
        second.ask(index)
        while not first.asks_for(index):
            assert time.monotonic() - began < 4.0, index
            time.sleep(0.002)
        assert [first.asks_for(k) for k in (1, 2, 3)] == [k == index for k in (1, 2, 3)]
    assert not told
    first.stop()
    second.stop()


def test_store_gone() -> None:
    """A store that no longer answers becomes a failure after the timeout."""

    class Gone:
        def multi_get(self, keys: list[str]) -> list[bytes]:
            raise RuntimeError("connection reset")

        def set(self, key: str, value: str) -> None:
            raise RuntimeError("connection reset")

    first, second, told = pair(dist.HashStore())
    first._store = Gone()  # type: ignore[assignment]
    assert "the c10d store has not answered for" in until(told)
    first.stop()
    second.stop()
