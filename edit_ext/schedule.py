"""The clock: which optimizer step ends a window, and what the next training forward has to do."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .config import EDiT, Method


def is_due(step: int, config: Method) -> bool:
    """Whether the number of complete optimizer steps arms a sync (Algorithm 1)."""
    if not isinstance(config, EDiT):
        return False  # the alarm does
    local = step - config.warmup_steps
    return local > 0 and local % config.sync_every == 0


def sync_steps(first: int, last: int, config: Method) -> Iterator[int]:
    """The steps in [first, last] after which a sync is armed, in order."""
    return (step for step in range(max(first, 1), last + 1) if is_due(step, config))


COUNTS = (
    "step", "sync_index", "window_steps", "agreed_steps", "shown_steps", "anchored", "armed",
)  # fmt: skip


@dataclass
class Clock:
    """Counts completed optimizer steps of this replica and the syncs that all replicas share."""

    config: Method
    step: int = 0
    """Completed optimizer steps, warm-up included."""
    sync_index: int = 0
    """Syncs begun; equal on all replicas, since every replica takes part in every sync."""
    window_steps: int = 0
    """Local steps of this replica in the window, those of void syncs included once these have
    settled."""
    agreed_steps: int = 0
    """Local steps of all replicas together in the windows that are closed."""
    shown_steps: int = 0
    """The same and those that the last sync, if it was void, has found in the open window."""
    anchored: bool = False
    """Whether the anchors have been captured: the switch from warm-up to local steps is done."""
    armed: bool = False
    """Whether the next training forward starts a sync."""

    @property
    def warming_up(self) -> bool:
        """Whether gradients are still averaged over the replicas at every step."""
        return self.step < self.config.warmup_steps

    @property
    def switch_pending(self) -> bool:
        """Whether the anchors are due: the warm-up is over and they have not been captured."""
        return not self.anchored and not self.warming_up

    def tick(self) -> None:
        """One optimizer step is complete. Nothing is read yet: a sync that is due is only armed."""
        if not self.warming_up:
            self.window_steps += 1
        self.step += 1
        if is_due(self.step, self.config):
            self.armed = True

    def restore(self, saved: dict[str, Any]) -> None:
        """Take over the counts of a checkpoint."""
        for name in COUNTS:
            setattr(self, name, saved[name])

    def begin_sync(self) -> tuple[int, int]:
        """Start the next sync; returns its index (from 1) and the steps in the window it closes."""
        steps = self.window_steps
        self.sync_index += 1
        self.window_steps = 0
        self.armed = False
        return self.sync_index, steps

    def settle(self, steps: list[int], own: int, *, void: bool) -> None:
        """What has become of the window that `begin_sync` closed, perhaps some steps ago.

        steps: of each replica in it; own: this replica's.
        """
        self.shown_steps = self.agreed_steps + sum(steps)
        if void:
            self.window_steps += own
        else:
            self.agreed_steps = self.shown_steps
