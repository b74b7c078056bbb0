"""AEDiT's alarm: by the clock of one replica the next sync is due for all of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from .mesh import ReplicaMesh
from .methods import AEDiT
from .schedule import Clock


class Alarm:
    """Looks at the time after each local step and arms the clock, on all shards after one step.

    Shard 0 of each replica has the say. It asks for the next sync when `sync_seconds` have passed
    since it last asked, or when another replica asks: the heartbeat carries the index of the sync
    that a rank asks for. So a clock that jumps, stops or runs at another rate makes windows shorter
    or longer, but no replica waits in a sync for longer than the slowest needs for the step that it
    is in (with shards, and one more), and for a beat.

    What shard 0 decides after step n its peers hear by a broadcast of 8 bytes a step that has all
    of step n + 1 to arrive; all shards act on it after that step, shard 0 too.
    """

    BEAT = 0.25  # seconds at most between two looks at what the other replicas ask for
    POLL = 0.01  # seconds between two looks at the time by a replica that makes no steps

    def __init__(self, config: AEDiT, clock: Clock, mesh: ReplicaMesh) -> None:
        self.now: Callable[[], float] = time.monotonic
        self.asked = 0
        """The newest sync that this replica has asked for, as far as this shard knows."""
        self._seconds = float(config.sync_seconds)
        self._clock, self._mesh, self._shard = clock, mesh, mesh.shard
        self._since: float | None = None  # when this replica last asked, by its clock
        self._told = torch.zeros(1, dtype=torch.int64)
        self._work: Any = None
        if mesh.heartbeat is not None and self._decides:
            deciding = range(0, mesh.all.size, mesh.shard.size)
            period = min(max(self._seconds / 20, 0.01), self.BEAT)
            mesh.heartbeat.listen([i for i in deciding if i != mesh.all.rank], period)

    @property
    def elapsed(self) -> float:
        """Seconds of the open window by this rank's clock."""
        return 0.0 if self._since is None else self.now() - self._since

    @property
    def left(self) -> float:
        """Seconds until this rank's clock is due, if no other replica asks earlier."""
        return max(self._seconds - self.elapsed, 0.0)

    def start(self, elapsed: float = 0.0) -> None:
        """The first window begins, or one of which `elapsed` seconds are over."""
        self._since = self.now() - elapsed

    def load(self, asked: int, elapsed: float, *, running: bool) -> None:
        """Go on where a state was saved: what this replica has asked for it asks for again."""
        self.settle()
        self.asked, self._since = asked, None
        if running:
            self.start(elapsed)
        if self._mesh.heartbeat is not None and self._decides:
            self._mesh.heartbeat.ask(asked if asked > self._clock.sync_index else 0)

    def tick(self) -> None:
        """A local step is complete: arm the clock if a sync is due."""
        self.settle()
        if self._shard.size == 1:
            self._look()
        if self.asked > self._clock.sync_index:
            self._clock.arm()
        if self._shard.size > 1:
            if self._decides:
                self._look()
            self._told.fill_(self.asked)
            self._work = self._shard.start_broadcast(self._told)

    def settle(self) -> None:
        """Hear what shard 0 decided after the last step, if it has not been heard yet."""
        if self._work is not None:
            self._shard.finish(self._work, "the alarm's broadcast")
            self._work = None
            self.asked = int(self._told)

    def ask(self) -> None:
        """Ask for the next sync now, on behalf of this replica; its next window begins."""
        if not self._decides:
            return
        self.asked = self._clock.sync_index + 1
        self.start()
        if self._mesh.heartbeat is not None:
            self._mesh.heartbeat.ask(self.asked)

    def wait(self) -> None:
        """Return when the next sync is due, on a replica that makes no steps any more."""
        heartbeat = self._mesh.heartbeat
        while self._decides and not self._due():
            if heartbeat is not None:
                heartbeat.check()
                if heartbeat.departed() is not None:
                    break  # the sync itself tells whether that peer was needed
            time.sleep(self.POLL)
        self.ask()

    def leave(self, seconds: float) -> None:
        """Give a broadcast that is under way `seconds` to end, then give its group up."""
        deadline = time.monotonic() + seconds
        while self._work is not None:
            if self._work.is_completed():
                self._work = None
            elif time.monotonic() > deadline:
                self._shard.broken = True
                return
            else:
                time.sleep(1e-3)

    @property
    def _decides(self) -> bool:
        return self._shard.rank == 0

    def _look(self) -> None:
        if self.asked <= self._clock.sync_index and self._due():
            self.ask()

    def _due(self) -> bool:
        """By this replica's clock, or because another asks for the very next sync."""
        heartbeat = self._mesh.heartbeat
        called = heartbeat is not None and heartbeat.asks_for(self._clock.sync_index + 1)
        return called or self.elapsed >= self._seconds
