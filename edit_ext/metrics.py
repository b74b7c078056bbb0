"""What the syncs of this rank did: records per layer, totals, and warnings about decisions."""

from __future__ import annotations

import warnings
from collections import deque
from dataclasses import dataclass
from typing import Any

KEEP = 65536  # records between two calls of metrics(); older ones are dropped and counted
SAME_SYNCS = 3  # syncs with bit-equal norms before the warning


@dataclass
class Totals:
    """Sums since attach; seconds of wall clock of this rank."""

    syncs: int = 0
    void_syncs: int = 0
    sync_seconds: float = 0.0
    exposed_sync_seconds: float = 0.0
    records_dropped: int = 0


class Metrics:
    """Collects the statistics of finished layers.

    exposed: what the training thread spent on a sync (pseudo-gradient, wait, write-back).
    sync: what the sync would take with nothing hidden (pseudo-gradient, exchange, write-back).
    """

    def __init__(self) -> None:
        self.totals = Totals()
        self._records: deque[dict[str, Any]] = deque(maxlen=KEEP)
        self._skipping: set[str] = set()
        self._idle_said = False
        self._all_same = True
        self._compared = 0
        self._same_syncs = 0

    def add(
        self,
        step: int,
        layer: str,
        stats: dict[str, Any],
        *,
        anchored: bool = True,
        drift: dict[str, float | None] | None = None,
    ) -> None:
        """Record one layer of one sync; `stats` as `_C.Layer.stats()` gives it. anchored: whether
        its norms say how far weights have moved; drift: more that is known of optimizer states."""
        own = stats["begin_seconds"] + stats["write_back_seconds"]
        exposed = own + stats["wait_seconds"]
        self.totals.sync_seconds += own + stats["exchange_seconds"]
        self.totals.exposed_sync_seconds += exposed
        if len(self._records) == KEEP:
            self.totals.records_dropped += 1
        self._records.append(
            {
                "step": step,
                "sync_index": stats["sync_index"],
                "layer": layer,
                "norms": stats["norms"],
                "weights": stats["weights"],
                "flags": stats["flags"],
                "idle": stats["idle"],
                "steps": stats["steps"],
                "merged_norm": stats["merged_norm"],
                "clip": stats["clip"],
                "skip": stats["skip"],
                "void": stats["void"],
                "exchange_seconds": stats["exchange_seconds"],
                "exposed_seconds": exposed,
                "begin_seconds": stats["begin_seconds"],
                "write_back_seconds": stats["write_back_seconds"],
                "bytes_sent": stats["bytes_sent"],
                **(drift or {}),
            }
        )
        if stats["void"]:
            return  # nothing is lost, nothing was decided
        self._watch_skips(layer, stats)
        if anchored:
            self._watch_idle(layer, stats)
            self._compare(stats)

    def end_sync(self, *, void: bool = False) -> None:
        """All layers of a sync are recorded."""
        self.totals.syncs += 1
        if void:
            self.totals.void_syncs += 1
            return
        same = self._all_same and self._compared > 0
        self._same_syncs = self._same_syncs + 1 if same else 0
        self._all_same, self._compared = True, 0
        if self._same_syncs == SAME_SYNCS:
            warnings.warn(
                f"edit_ext: in {SAME_SYNCS} syncs in a row all replicas moved by exactly the same "
                "norms. Do they train on the same data? `data_rank` and `data_world` of the handle "
                "say which part each replica should read.",
                stacklevel=2,
            )

    def drain(self) -> list[dict[str, Any]]:
        """The records since the last call, oldest first."""
        records = list(self._records)
        self._records.clear()
        return records

    def _watch_skips(self, layer: str, stats: dict[str, Any]) -> None:
        """Warn once per run of syncs in which no replica of a layer was accepted."""
        rejected = all(f or i for f, i in zip(stats["flags"], stats["idle"], strict=True))
        if not (rejected and any(stats["flags"])):
            self._skipping.discard(layer)
        elif layer not in self._skipping:
            self._skipping.add(layer)
            warnings.warn(
                f"edit_ext: sync {stats['sync_index']}, layer {layer!r}: every replica was flagged "
                f"(norms {stats['norms']}); the layer returns to its last agreed weights.",
                stacklevel=2,
            )

    def _watch_idle(self, layer: str, stats: dict[str, Any]) -> None:
        """Warn once when a replica changed its weights but made no step: nobody will see that."""
        lost = [r for r, idle in enumerate(stats["idle"]) if idle and stats["norms"][r] != 0.0]
        if lost and not self._idle_said:
            self._idle_said = True
            warnings.warn(
                f"edit_ext: sync {stats['sync_index']}, layer {layer!r}: replica {lost[0]} changed "
                "its weights without an optimizer step since the last sync; a replica without "
                "steps has no weight in the average, so that change is lost.",
                stacklevel=2,
            )

    def _compare(self, stats: dict[str, Any]) -> None:
        norms = [n for n, idle in zip(stats["norms"], stats["idle"], strict=True) if not idle]
        if len(norms) < 2 or max(norms) == 0.0:
            return
        self._compared += 1
        self._all_same = self._all_same and all(norm == norms[0] for norm in norms)
