"""Tells a peer that is slow from one that is gone: a counter per rank in the c10d store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch.distributed as dist

ALIVE, LEFT, FAILED = "alive", "left", "failed"


class Heartbeat:
    """A daemon thread that counts up this rank's key and watches those of its peers.

    A peer whose counter stands still for `timeout` seconds is silent; one that says that it failed,
    or left before a sync that this rank waits for, is reported at once. The first failure stays in
    `failure` and is handed to `on_failure` once.

    A rank may also ask for a sync: the index travels with its beat, at once, and who listens to it
    reads it within the listener's period.

    store: any c10d store; the thread works on a clone, that is on a connection of its own.
    names: how messages call the members; rank: this rank's index among them.
    """

    def __init__(
        self,
        store: dist.Store,
        prefix: str,
        rank: int,
        names: Sequence[str],
        timeout: float,
        on_failure: Callable[[str], None],
    ) -> None:
        self.failure: str | None = None
        self._rank = rank
        self._names = list(names)
        self._timeout = timeout
        self._on_failure = on_failure
        self._prefix = prefix
        self._meetings = 0
        self._keys = [f"{prefix}/beat/{index}" for index in range(len(names))]
        self._period = min(max(timeout / 8, 0.05), 5.0)
        self._pace = self._period  # of looking
        self._store = _own_connection(store, timeout)
        self._stop = threading.Event()
        self._wake = threading.Event()  # there is something to say, or to do at another pace
        self._listening: list[int] = []
        self._asking = 0
        self._asked: dict[int, int] = {}
        self._lock = threading.Lock()
        self._count = 0
        self._said = (ALIVE, "")
        self._reached = 0
        self._waiting_for = 0
        self._left: dict[int, int] = {}
        self._thread: threading.Thread | None = None

    def arrive(self) -> None:
        """Say that this rank is here and wait for its peers, at most `timeout` seconds.

        Raises RuntimeError naming the ranks that did not come.
        """
        self._beat()
        deadline = time.monotonic() + self._timeout
        missing = [index for index in range(len(self._keys)) if index != self._rank]
        while missing:
            missing = [index for index in missing if not self._store.check([self._keys[index]])]
            if missing and time.monotonic() > deadline:
                names = ", ".join(self._names[index] for index in missing)
                raise RuntimeError(
                    f"attach on {self._names[self._rank]} waited {self._timeout:g} s in vain "
                    f"for {names}: every rank of the group must call attach."
                )
            if missing:
                time.sleep(0.01)

    def meet(self, what: str, text: str) -> list[str] | None:
        """Wait until all members have called this, at most `timeout` seconds; their texts, or None
        when one of them has failed or left instead.

        Raises RuntimeError naming the ranks that did not come.
        """
        self._meetings += 1
        place = f"{self._prefix}/meeting {self._meetings}"
        keys = [f"{place}/{index}" for index in range(len(self._keys))]
        self._store.set(keys[self._rank], text)
        deadline = time.monotonic() + self._timeout
        while missing := [index for index, key in enumerate(keys) if not self._store.check([key])]:
            if self.failure is not None or self.departed() is not None:
                return None
            if time.monotonic() > deadline:
                names = ", ".join(self._names[index] for index in missing)
                raise RuntimeError(
                    f"{what} on {self._names[self._rank]} waited {self._timeout:g} s in vain for "
                    f"{names}: every rank of the run must call it"
                )
            time.sleep(0.01)
        return [self._store.get(key).decode() for key in keys]

    def start(self) -> None:
        """Start the thread; all peers have arrived."""
        self._thread = threading.Thread(target=self._run, name="edit_ext heartbeat", daemon=True)
        self._thread.start()

    def listen(self, members: Sequence[int], period: float) -> None:
        """Read what these ranks ask for every `period` seconds, more often than the others' beat.

        The pace of the beats themselves stays, so a listener costs the store one short read.
        """
        self._listening = list(members)
        if members:
            self._pace = min(period, self._period)
            self._wake.set()

    def ask(self, sync_index: int) -> None:
        """Tell the peers that this rank is about to take part in sync `sync_index`; 0: in none."""
        self._asking = sync_index
        self._wake.set()

    def asks_for(self, sync_index: int) -> bool:
        """Whether a peer has been heard to ask for this very sync."""
        return sync_index in self._asked.values()

    def check(self) -> None:
        """Raise RuntimeError when a peer has failed, left or gone silent."""
        if self.failure is not None:
            raise RuntimeError(self.failure)

    def look(self) -> str | None:
        """Read the peers' keys now; the failure that they tell, if they do."""
        if self.failure is None:
            try:
                values = self._store.multi_get(self._keys)
            except Exception:  # the store may be gone with its host
                return None
            for index, value in enumerate(values):
                _, _, state, detail = value.decode().split("|", 3)
                if index != self._rank and state == FAILED:
                    return f"{self._names[index]} failed: {detail}"
                if index != self._rank and state == LEFT:
                    return f"{self._names[index]} left after sync {detail}"
        return self.failure

    def departed(self) -> str | None:
        """A peer that has left the group, if one has, in words."""
        for index, reached in list(self._left.items()):
            return f"{self._names[index]} left after sync {reached}"
        return None

    def waiting_for(self, sync_index: int) -> None:
        """This rank takes part in sync `sync_index`: a peer that left before it is a failure."""
        self._waiting_for = sync_index
        for index, reached in list(self._left.items()):
            self._judge_left(index, reached)

    def reached(self, sync_index: int) -> None:
        """This rank has completed sync `sync_index`."""
        self._reached = sync_index

    def say_failed(self, reason: str) -> None:
        """Tell the peers, once, that this rank has failed, so that they need not wait."""
        if self._said[0] == ALIVE:
            self._said = (FAILED, reason)
            self._try_to_beat()

    def stop(self) -> None:
        """Tell the peers that this rank leaves, and end the thread."""
        if self._said[0] == ALIVE:
            self._said = (LEFT, str(self._reached))
            self._try_to_beat()
        self._stop.set()
        self._wake.set()

    def _run(self) -> None:
        """Beat and watch until stopped."""
        peers = [index for index in range(len(self._keys)) if index != self._rank]
        now = time.monotonic()
        seen: dict[int, tuple[str, float]] = dict.fromkeys(peers, ("", now))
        store_seen, next_beat = now, now + self._period
        while True:
            woken = self._wake.wait(min(self._pace, max(next_beat - time.monotonic(), 0)))
            if woken:
                self._wake.clear()
            if self._stop.is_set():
                return
            whole = time.monotonic() >= next_beat
            if whole:
                next_beat = time.monotonic() + self._period
            members = peers if whole else self._listening
            try:
                if whole or woken:
                    self._beat()
                if not members:
                    continue
                values = self._store.multi_get([self._keys[index] for index in members])
            except Exception as error:  # any store raises its own kind
                silent = time.monotonic() - store_seen
                if silent > self._timeout:
                    self._fail(f"the c10d store has not answered for {silent:.1f} s ({error})")
                continue
            now = store_seen = time.monotonic()
            for index, value in zip(members, values, strict=True):
                text = value.decode()
                if text != seen[index][0]:
                    seen[index] = (text, now)
                self._judge(index, text, now - seen[index][1])

    def _judge(self, index: int, text: str, silent: float) -> None:
        _, asking, state, detail = text.split("|", 3)
        self._asked[index] = int(asking)
        if state == LEFT:
            self._left[index] = int(detail)
            self._judge_left(index, int(detail))
        elif state == FAILED:
            self._fail(f"{self._names[index]} failed: {detail}")
        elif silent > self._timeout:
            self._fail(f"{self._names[index]} silent for {silent:.1f} s")

    def _judge_left(self, index: int, reached: int) -> None:
        if reached < self._waiting_for:
            self._fail(
                f"{self._names[index]} left after sync {reached}, "
                f"but this rank is in sync {self._waiting_for}"
            )

    def _fail(self, reason: str) -> None:
        with self._lock:
            if self.failure is not None or self._stop.is_set():
                return
            self.failure = reason
        self._on_failure(reason)

    def _beat(self) -> None:
        with self._lock:
            self._count += 1
            state, detail = self._said
            self._store.set(
                self._keys[self._rank], f"{self._count}|{self._asking}|{state}|{detail}"
            )

    def _try_to_beat(self) -> None:
        try:
            self._beat()
        except Exception:  # the store may be gone already; the peers notice the silence
            return


def _own_connection(store: dist.Store, timeout: float) -> dist.Store:
    """A clone of the store whose calls end within `timeout` seconds; the store if it has none."""
    try:
        own: dist.Store = store.clone()  # type: ignore[attr-defined]  # missing in the stubs
    except (AttributeError, RuntimeError, NotImplementedError):
        return store
    if own is not store:  # an in-process store clones to itself; its timeout is not ours to set
        own.set_timeout(timedelta(seconds=max(timeout, 1.0)))
    return own
