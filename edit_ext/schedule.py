"""The clock: which optimizer step ends a window, and what the next training forward has to do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from .drift import next_period
from .recipe import Recipe

LONGEST = 1_000_000  # local steps that are searched for the next sync by chance
COUNTS = (
    "step", "sync_index", "window_steps", "agreed_steps", "shown_steps", "anchored", "armed",
    "base", "periods", "measured",
)  # fmt: skip


class Clock:
    """Counts completed optimizer steps of this replica and the syncs that all replicas share."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe
        self.step = 0
        """Completed optimizer steps, warm-up included."""
        self.sync_index = 0
        """Syncs begun; equal on all replicas, since every replica takes part in every sync."""
        self.window_steps = [0] * len(recipe.tracks)
        """Local steps of this replica in the open window of each track, those of void syncs
        included once these have settled."""
        self.agreed_steps = 0
        """Local steps of all replicas together in the closed windows of the first track."""
        self.shown_steps = 0
        """The same and those that its last sync, if it was void, has found in the open window."""
        self.anchored = False
        """Whether the anchors have been captured: the switch to local steps is done."""
        self.armed: set[int] = set()
        """Tracks of which the next training forward starts a sync."""
        self.base = 0 if math.isinf(recipe.averaged_steps) else int(recipe.averaged_steps)
        """Steps before those that the tracks count."""
        self.periods: dict[int, tuple[int, int]] = {}
        """Of tracks whose period follows the drift: the present one, and the local step from which
        it counts."""
        self.measured: dict[int, tuple[int, float, float]] = {}
        """Of those tracks that were synced last: after which local step, how many steps after the
        sync before, and how far they had drifted in them. The next sync, which begins after the
        same steps on all replicas, takes it up."""
        self._ahead = 0  # of a replica that makes no more steps: how far its peers have come

    @property
    def local(self) -> int:
        """Steps that the tracks have counted."""
        return self.step - self.base

    @property
    def warming_up(self) -> bool:
        """Whether gradients are still averaged over the replicas at every step."""
        return self.step < self.recipe.averaged_steps

    @property
    def switch_pending(self) -> bool:
        """Whether the anchors are due: the warm-up is over and they have not been captured."""
        return not self.anchored and not self.warming_up

    def tick(self) -> None:
        """One optimizer step is complete. Nothing is read yet: a sync that is due is only armed."""
        if not self.warming_up:
            self.window_steps = [steps + 1 for steps in self.window_steps]
        self.step += 1
        if not self.warming_up:
            self.armed |= self.due(self.local)

    def due(self, local: int) -> set[int]:
        """Numbers of the tracks that are armed once `local` steps are complete."""
        due = {track for track in self.recipe.due(local) if track not in self.periods}
        return due | {
            track
            for track, (every, since) in self.periods.items()
            if local > since and (local - since) % every == 0
        }

    def every(self, track: int) -> float:
        """Steps between two syncs of a track, as things stand."""
        return self.periods[track][0] if track in self.periods else self.recipe.tracks[track].every

    def adapt(self) -> None:
        """Before a sync begins: periods follow what was measured at those before."""
        for track, (at, steps, drift) in self.measured.items():
            every = next_period(self.recipe.tracks[track], int(self.every(track)), steps, drift)
            if at + every <= self.now:
                self.armed.add(track)  # its step is here already: it joins this sync
            # Also where the old period has brought it here: a window begins now.
            self.periods[track] = (every, self.now if track in self.armed else at)
        self.measured = {}

    @property
    def now(self) -> int:
        """Local steps that the replicas have come to; those that go on, if this one does not."""
        return max(self._ahead, self.local)

    def sync_steps(self, last: int) -> Iterator[tuple[int, set[int]]]:
        """The steps up to `last` after which a sync will be armed, and its tracks, in order."""
        for step in range(max(self.step, self.base) + 1, last + 1):
            if due := self.due(step - self.base):
                yield step, due

    def arm(self) -> None:
        """The next training forward starts a sync of everything."""
        self.armed = self.recipe.every_track

    def arm_next(self) -> None:
        """This replica makes no more steps: arm what its peers will sync next."""
        if not self.armed:
            self._ahead, self.armed = self._next_due(self.now)

    def begin_again(self) -> None:
        """Every window was closed at once. Where there are several clocks they start anew, so that
        replicas with unequal numbers of steps go on with the same syncs in the same order."""
        if len(self.recipe.tracks) > 1:
            self.base = self.step
        self._ahead = 0
        self.periods = {track: (every, 0) for track, (every, _) in self.periods.items()}
        self.measured = {}

    def _next_due(self, local: int) -> tuple[int, set[int]]:
        """The first step after `local` that arms a sync, and the tracks; all tracks if none does:
        what a replica that makes no more steps expects its peers to do next."""
        for step in range(local + 1, local + 1 + LONGEST):
            if due := self.due(step):
                return step, due
        return local, self.recipe.every_track

    def restore(self, saved: dict[str, Any]) -> None:
        """Take over the counts of a checkpoint."""
        for name in COUNTS:
            setattr(self, name, saved[name])
        self.window_steps = list(saved["window_steps"])
        self.armed = set(saved["armed"])
        self.periods = {track: (every, since) for track, every, since in saved["periods"]}
        self.measured = {track: (at, n, drift) for track, at, n, drift in saved["measured"]}

    def counts(self) -> dict[str, Any]:
        """What `restore` takes, as plain numbers."""
        return {
            **{name: getattr(self, name) for name in COUNTS},
            "window_steps": list(self.window_steps),
            "armed": sorted(self.armed),
            "periods": [[track, *each] for track, each in sorted(self.periods.items())],
            "measured": [[track, *each] for track, each in sorted(self.measured.items())],
        }

    def begin_sync(self) -> tuple[int, dict[int, int]]:
        """Start the next sync: its index (from 1), and of each of its tracks the steps in the
        window that it closes."""
        self.sync_index += 1
        steps = {track: self.window_steps[track] for track in sorted(self.armed)}
        for track in steps:
            self.window_steps[track] = 0
        self.armed = set()
        return self.sync_index, steps

    def give_back(self, windows: dict[int, int]) -> None:
        """A sync was broken off: its windows are open still, and it is due again."""
        for track, steps in windows.items():
            self.window_steps[track] += steps
            self.armed.add(track)

    def settle(self, steps: list[int], own: int, *, void: bool) -> None:
        """What has become of the first track's window that `begin_sync` closed, perhaps some steps
        ago.

        steps: of each replica in it; own: this replica's.
        """
        self.shown_steps = self.agreed_steps + sum(steps)
        if void:
            self.window_steps[0] += own
        else:
            self.agreed_steps = self.shown_steps
