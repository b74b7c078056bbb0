"""The syncs of one attached model, one after the other, and the switch that makes anchors."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from . import _C, fsdp
from .config import MEAN
from .drift import Apart, Samples, apart
from .held import Held
from .mesh import ReplicaMesh
from .metrics import Metrics
from .pipeline import Pipeline
from .schedule import Clock
from .sharding import local
from .start import broadcast_into, values_digest


@dataclass
class Sync:
    """One sync from its begin until all its results are in place."""

    windows: dict[int, int]
    """Steps of this replica in the window of each of its tracks."""
    layers: set[int] = field(default_factory=set)
    """Late layers of it that are in flight."""
    due: int = 0
    """The step after which those land."""
    keep: float = 0.0
    """The share of the local weights that stays then."""
    at: int = 0
    """Local steps after which it was begun."""
    first: _C.Layer | None = None
    """A layer that tells what all replicas have said; None where a saved state has brought it."""


class Syncs:
    """Takes the layers through sync after sync.

    Collective calls come in one static order on all ranks: the switch, the order of layers, then
    sync after sync, layer after layer.
    """

    def __init__(self, model: nn.Module, clock: Clock, held: Held, mesh: ReplicaMesh) -> None:
        self.held, self.metrics = held, Metrics()
        self._recipe = clock.recipe
        self.outer_lr = float(self._recipe.policy.get("outer_lr", 1.0))
        self._model, self._clock, self._mesh = model, clock, mesh
        self.pipeline = Pipeline(
            held.layers, self._recipe.prefetch, held.is_state, self._layer_done
        )
        self.airborne: deque[Sync] = deque()
        """Syncs whose results come later, oldest first."""
        self._landing: list[Sync] = []
        self._open: Sync | None = None
        self.order = list(range(held.units))
        """In which layers of parameters are exchanged: of the forward, once that is known."""
        self.ordered = False  # on all ranks
        self._visited = list(held.plan.root)
        self._forward_seen = False
        self.recording = True
        self.said_done = False  # in the last sync that has begun
        self.of_all = False  # whether that was a sync of every track
        # What has finished and not been counted: (step, index, layer), or a sync that is over. A
        # GPU tells its statistics when it gets there, and nobody waits for it.
        self._unsettled: deque[tuple[int, int, _C.Layer] | Sync] = deque()
        self._last: _C.Layer | None = None
        self.samples, self._apart = Samples(), Apart()
        self._moved: dict[int, torch.Tensor | None] = {}  # of layers of states: over their window

    @property
    def active(self) -> bool:
        """Whether new weights of some layer are to come before the next step."""
        return self.pipeline.active

    def forget_states(self) -> None:
        """What comes next is no continuation: states have moved from nowhere known."""
        self.samples = Samples()

    @property
    def in_flight(self) -> bool:
        """Whether an exchange has begun whose result has not been written back."""
        return self.pipeline.in_flight or bool(self.airborne) or bool(self._landing)

    def set_order(self, order: list[int]) -> None:
        """Fix the order for the rest of the training."""
        self.order, self.ordered, self.recording = order, True, False

    def enter_forward(self) -> None:
        """A training forward of the root begins: record its visits until they are needed."""
        if self.recording:
            self._visited = list(self.held.plan.root)
            self._forward_seen = True

    def leave_step(self) -> None:
        """A step is complete: its forward, if there was one, has shown the order."""
        self.recording = self.recording and not self._forward_seen

    def visit(self, module: nn.Module, wanted: list[int]) -> None:
        """`module`, which needs the layers `wanted`, is about to run."""
        plan = self.held.plan
        behind = plan.behind.get(module, ())
        gathered = list(dict.fromkeys(each for inner in behind for each in fsdp.gathers(inner)))
        wanted = [*wanted, *(plan.sharded[m] for m in gathered if m in plan.sharded)]
        if self.recording:
            self._visited += [i for i in dict.fromkeys(wanted) if i not in self._visited]
        if self.active:
            self.need(wanted)
            # FSDP2's own streams wait for ours at the root's forward only.
            for each in gathered:
                if module is not self._model:
                    fsdp.gather(each)

    def switch(self) -> None:
        """From warm-up to local steps: the weights, replica 0's if they differ, become anchors."""
        self.held.refresh()
        if self._mesh.all.size > 1:
            mine = values_digest(list(self.held.trainable.values()))
            digests = self._mesh.all.gather([mine], "the switch to local steps")
            shards = self._mesh.shard.size
            if any(row != digests[i % shards] for i, row in enumerate(digests)):
                self._take_over()
        for layer in self.held.anchored():
            layer.capture()
        self._clock.anchored = True

    @property
    def due(self) -> bool:
        """Whether the next training forward has to begin or land something."""
        return bool(self._clock.armed) or self._next_lands()

    def start(self, *, done: bool) -> None:
        """Land what is due and open the sync that is armed, if one is. `done`: this replica has
        ended its training."""
        self.settle()
        self._clock.adapt()
        self.held.refresh()
        if not self.ordered:
            self._agree_on_order()
        while self._next_lands() or (done and self.airborne):
            self._land(self.airborne.popleft())
        if self._clock.armed:
            self._begin(done)

    def wait_for_flights(self) -> None:
        """Return when everything in flight has arrived; nothing is written."""
        for sync in self.airborne:
            for index in sync.layers:
                self.held.layers[index].arrive()

    def land_all(self) -> None:
        """Everything that is in flight is due now."""
        self.held.refresh()
        while self.airborne:
            self._land(self.airborne.popleft())
            self.finish()

    def enter_root(self) -> None:
        """The root's own forward begins inside a sync: buffers and its own parameters are due."""
        self.pipeline.look_ahead()
        held = self.held
        if held.buffers is not None:
            self.need([held.buffers])
        self.visit(self._model, held.plan.root if not held.plan.whole else self.order)

    def leave_root(self) -> None:
        """The root's forward is over: what nobody waits for before the step goes on."""
        self.pipeline.look_ahead()

    def late(self) -> str | None:
        """A layer that has gradients, though the open sync has not come to it yet. Waits for a GPU
        if there is one."""
        for index, unit in enumerate(self.held.plan.units):
            if self.pipeline.waits_for(index) and self.held.at_forward(index):
                grads = [p.grad for p in unit.params.values() if p.grad is not None]
                if any(bool(local(g).any()) for g in grads if not g.is_sparse):
                    return unit.name
        return None

    def need(self, wanted: Iterable[int]) -> None:
        """Return when results that are due at a forward are in the parameters of these layers."""
        self.pipeline.need(index for index in wanted if self.held.at_forward(index))
        self._maybe_over()

    def finish(self) -> None:
        """Take the open sync, if there is one, to its end."""
        if self.active:
            self.pipeline.finish()
            self._maybe_over()

    def give_up(self) -> None:
        """The group is gone: what a sync has not finished belongs to the open window again."""
        self.held.check_identity()
        for sync in [self._open, *self._landing, *self.airborne]:
            if sync is not None:
                self._clock.give_back(sync.windows)
        self._unsettled.clear()

    def all_done(self) -> bool:
        """Whether every replica has said in the last sync that it has ended its training."""
        self.settle()
        if self._last is None:
            return False
        done = self._last.stats()["done"]
        assert isinstance(done, list)
        return all(done)

    def _next_lands(self) -> bool:
        return bool(self.airborne) and self.airborne[0].due <= self._clock.step

    def _land(self, sync: Sync) -> None:
        self._landing.append(sync)
        self.pipeline.land(dict.fromkeys(sync.layers, sync.keep))

    def _begin(self, done: bool) -> None:
        self.held.find_states()
        self.held.renew_buffers()
        index, windows = self._clock.begin_sync()
        if self._mesh.heartbeat is not None:
            self._mesh.heartbeat.waiting_for(index)
        self.said_done, self.of_all = done, self._recipe.every_track <= set(windows)
        layers = self.held.of(set(windows), self.order)
        # Who is done waits at once, and so holds the buffers of a few layers at a time.
        late = {i for i in layers if self.held.is_late(i) and (self._recipe.overtakes or not done)}
        telling = [layer for layer in layers if layer < self.held.units] or layers
        sync = Sync(
            windows, at=self._clock.now, first=self.held.layers[telling[-1]] if telling else None
        )
        self._last = None
        tracks = [self._recipe.tracks[track] for track in windows]
        keep = 0.0 if done and not late else max(track.keep for track in tracks)
        if late:
            sync.layers, sync.keep = late, keep
            sync.due = self._clock.step + max(track.delay for track in tracks)
        rules, mean = self._policy(), self._policy(averages=True)

        def begin(layer: int) -> None:
            self.held.renew(layer)
            if self.held.is_state(layer):
                self._moved[layer] = self.samples.moved(layer, self.held.layers[layer].params)
            policy = rules if layer < self.held.units else mean
            steps = windows[self.held.tracks[layer]]
            here = self.held.layers[layer]
            first = self._recipe.overtakes and layer in late and not here.in_flight
            here.begin(policy, sync_index=index, steps=steps, done=done)
            if first:  # nothing has come back yet: x stays, and the next window starts from it
                here.restore()
                self._reshard(layer)

        self._open = sync
        kept = dict.fromkeys((i for i in layers if i < self.held.units and keep), keep)
        self.pipeline.start(layers, late, begin, kept)

    def _take_over(self) -> None:
        warnings.warn(
            f"edit_ext: at the switch to local steps (step {self._clock.step}) the replicas have "
            "different weights; they all take replica 0's.",
            stacklevel=2,
        )
        for name, param in self.held.trainable.items():
            broadcast_into(self._mesh.replica, param, f"switch, broadcast of {name!r}")

    def _agree_on_order(self) -> None:
        """Replica 0's order of visits, for all; layers that it did not visit last."""
        rest = [index for index in range(self.held.units) if index not in self._visited]
        mine = torch.tensor([*self._visited, *rest], dtype=torch.int64)
        self._mesh.all.broadcast(mine, "the order of layers")
        self.set_order(mine.tolist())

    def _maybe_over(self) -> None:
        if self.pipeline.over():
            sync, self._open = self._open, None
            assert sync is not None
            if 0 in sync.windows:
                self.held.reset_states()
            if sync.layers:
                self.airborne.append(sync)
            else:
                self._close(sync)
        for sync in [each for each in self._landing if not each.layers]:
            self._landing.remove(sync)
            self._close(sync)

    def _close(self, sync: Sync) -> None:
        self._unsettled.append(sync)
        self.settle(wait=False)
        if self._mesh.heartbeat is not None:
            self._mesh.heartbeat.reached(self._clock.sync_index)

    def _layer_done(self, index: int) -> None:
        self._reshard(index)
        if self.held.is_state(index):
            self.samples.keep(index, self.held.layers[index].params)
        told = True
        for sync in self._landing:
            if index in sync.layers:
                sync.layers.discard(index)
                told = sync.first is not None
                break
        if told:
            self._unsettled.append((self._clock.step, index, self.held.layers[index]))
            self.settle(wait=False)

    def _reshard(self, index: int) -> None:
        # A forward that the sync did not wait for may have gathered it: an evaluation after one
        # that raised, or the user's unshard() ahead of the module.
        sharded = self.held.plan.sharded.items()
        fsdp.reshard(module for module, layer in sharded if layer == index)

    def settle(self, *, wait: bool = True) -> None:
        """Count finished layers; `wait`: also those whose statistics are still on their way.

        Raises what the ranks' decisions were wrong about, on a GPU here and not at the layer.
        """
        while self._unsettled:
            oldest = self._unsettled[0]
            if isinstance(oldest, Sync):
                self._count(oldest)
            else:
                step, index, layer = oldest
                if not (wait or layer.settled):
                    return
                self._add(step, index, layer)
            self._unsettled.popleft()

    def _add(self, step: int, index: int, layer: _C.Layer) -> None:
        """Record a layer; of states also how they have drifted."""
        stats: dict[str, Any] = layer.stats()
        drift = None
        if self.held.is_state(index):
            track = self.held.tracks[index]
            self._apart.add(track, stats)
            moved = self._moved.pop(index, None)
            distance = apart(stats["norms"], stats["merged_norm"])
            drift = {
                "drift": None if moved is None else _known(float(moved)),
                "apart": _known(distance),
                "every": self._clock.every(track),
            }
        anchored = index < self.held.units
        self.metrics.add(step, layer.name, stats, anchored=anchored, drift=drift)

    def _count(self, sync: Sync) -> None:
        """A sync is over and all of it is known: count the steps of its window."""
        for track, (window, drift) in self._apart.take().items():
            if self._recipe.tracks[track].target is not None:
                self._clock.measured[track] = (sync.at, window, drift)
        void = False
        if sync.first is not None:
            self._last = sync.first
            stats = sync.first.stats()
            void = stats["void"] is True
        if 0 in sync.windows:
            own = sync.windows[0]
            # One that a saved state has brought comes after windows of equal length.
            steps = [own] * self._mesh.replica.size
            if sync.first is not None:
                told = stats["steps"]
                assert isinstance(told, list)
                steps = told
            self._clock.settle(steps, own, void=void)
        self.metrics.end_sync(void=void)

    def _policy(self, *, averages: bool = False) -> _C.Policy:
        """The settings' rules, or a plain mean for buffers and optimizer states."""
        fields = {**self._recipe.policy, "outer_lr": self.outer_lr}
        if averages:
            # Every shard tells its replica's steps.
            least = fields.get("min_steps", 0) * self._mesh.shard.size
            limit = fields["max_flags_in_a_row"]
            fields = {**MEAN, "min_steps": least, "max_flags_in_a_row": limit}
        return _C.Policy(**fields)


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None
