"""Replicas of unequal speed whose windows are known beforehand, whatever the machine does."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.distributed import distributed_c10d

import edit_ext

SECONDS = 20.0  # for which the others are waited for


class Paced:
    """Stands in for the clocks of a run of AEDiT, and lets replicas step in an order.

    windows[w][r]: local steps of replica r in window w; leaders[w]: the replica whose clock ends
    that window. The clocks of the others never reach `sync_seconds`, so they hear of it. Where a
    replica has shards a decision holds one step later. A replica must not wait for another before
    the forward in which all meet: no window has fewer than two steps, or three with shards.
    """

    def __init__(
        self, sync: edit_ext.Handle, windows: Sequence[Sequence[int]], leaders: Sequence[int]
    ) -> None:
        engine = sync._engine
        assert engine.alarm is not None
        self.windows, self.leaders = windows, leaders
        self.seconds = 1e6 * (engine.mesh.all.rank + 1)  # no two clocks have anything in common
        self._sync, self._alarm, self._mesh = sync, engine.alarm, engine.mesh
        self._jump = engine.config.as_dict()["sync_seconds"]
        self._late = int(engine.mesh.shard.size > 1)
        self._store = dist.PrefixStore("paced", distributed_c10d._get_default_store())
        engine.alarm.now = lambda: self.seconds

    def before(self, window: int, made: int) -> None:
        """This replica has made `made` steps of the window and is about to make the next."""
        self.seconds += 1.0
        replica, others = self._mesh.replica.rank, range(self._mesh.replica.size)
        if window >= len(self.leaders) or self._mesh.shard.rank != 0:
            return
        if made != self.windows[window][replica] - 1 - self._late:
            return
        if replica == self.leaders[window]:
            for other in others:
                if other != replica:
                    key = f"{window}/{other}"
                    until(lambda key=key: self._store.check([key]), key)  # type: ignore[misc]
            self.seconds += self._jump
        else:
            self._store.set(f"{window}/{replica}", "here")
            heartbeat = self._mesh.heartbeat
            assert heartbeat is not None
            until(lambda: heartbeat.asks_for(self._sync.sync_index + 1), f"call {window}")


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for the condition, at most SECONDS."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.002)
