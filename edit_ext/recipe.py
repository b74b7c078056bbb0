"""What a method comes down to for the engine: which rules, on what, and on whose clock.

A method is data: its settings, a dataclass in methods.py, become one Recipe, and every recipe runs
through the same syncs.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

PARAMETERS = "parameters"  # name of the track of all of them


@dataclass(frozen=True, kw_only=True)
class Track:
    """What is synced together, on one clock: parameters, a fragment of them, or optimizer states.

    Steps are local optimizer steps, counted from the end of the warm-up.
    """

    name: str
    every: float
    """Steps between two syncs; math.inf: never by steps."""
    offset: int = 0
    """Step of the first sync; 0: `every`."""
    seed: int | None = None
    """Not None: due by chance, with probability 1 / `every` at each step (Bernoulli)."""
    fragment: int | None = None
    """Which fragment of the layers of parameters; None: all of them."""
    states: tuple[str, ...] | None = None
    """Names of optimizer states, () for all there are; None: parameters."""
    at_step: bool = False
    """Written back before the optimizer steps; else each layer at its own forward."""
    delay: int = 0
    """Steps from the step after which a sync begins to the one after which it is written back."""
    keep: float = 0.0
    """Share of the local weights that a write-back leaves."""
    target: float | None = None
    """Not None: the period follows the drift, so that an average comes at this one (drift.py)."""
    shortest: int = 1
    """Bounds of a period that does."""
    longest: int = 1
    """See `shortest`."""

    def due(self, local: int) -> bool:
        """Whether a sync is armed once `local` steps are complete."""
        if local <= 0 or math.isinf(self.every):
            return False
        every = int(self.every)
        if self.seed is not None:
            told = hashlib.sha256(f"{self.seed}/{self.name}/{local}".encode()).digest()
            return int.from_bytes(told[:8], "little") * every < 2**64
        first = self.offset or every
        return local >= first and (local - first) % every == 0


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that the engine has to know of a method."""

    tracks: tuple[Track, ...]
    """The first one counts the steps of all replicas, and buffers travel with it."""
    policy: dict[str, Any] = field(default_factory=dict)
    """Rules for the parameters: keyword arguments of `_C.Policy`."""
    averaged_steps: float = 0
    """Optimizer steps with averaged gradients, before the local ones; math.inf: all."""
    fragments: int = 1
    strided: bool = False
    """Whether the layers go round the fragments; else each fragment has neighbours."""
    momentum: str | None = "sharded"
    """Where the outer momentum is: "sharded", "replicated"; None: there is none."""
    overtakes: bool = False
    """Whether a layer begins its next sync before the last one is written back."""
    prefetch: int = 2
    granularity: str = "layer"
    wire: str = "fp32"
    offload: bool = False
    average_buffers: bool = False
    resets: str | None = None
    """What a sync of parameters sets to zero: "states" of the optimizer, or "states and step"."""

    @property
    def late(self) -> bool:
        """Whether results are written back steps after their exchange began."""
        return any(track.delay for track in self.tracks)

    def due(self, local: int) -> set[int]:
        """Numbers of the tracks that are armed once `local` steps are complete."""
        return {number for number, track in enumerate(self.tracks) if track.due(local)}

    @property
    def every_track(self) -> set[int]:
        """Numbers of the tracks that a flush closes: all but states that are never averaged."""
        tracks = enumerate(self.tracks)
        return {n for n, track in tracks if track.states is None or not math.isinf(track.every)}

    def fragment_of(self, unit: int, units: int) -> int:
        """The fragment of layer number `unit` of `units`."""
        return unit % self.fragments if self.strided else unit * self.fragments // units

    def track_of(self, unit: int, units: int) -> int:
        """The track of layer number `unit` of parameters."""
        fragment = self.fragment_of(unit, units)
        return next(
            number
            for number, track in enumerate(self.tracks)
            if track.states is None and track.fragment in (None, fragment)
        )

    def state_tracks(self) -> Iterator[tuple[int, Track]]:
        """Number and track of those that average optimizer states."""
        return ((n, track) for n, track in enumerate(self.tracks) if track.states is not None)
