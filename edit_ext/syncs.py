"""The syncs of one attached model: its layers, their order, and the switch that makes anchors."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from . import _C, fsdp
from .checks import IdentityWatch, persistent_buffers
from .layer import Plan, Unit
from .mesh import ReplicaMesh
from .metrics import Metrics
from .pipeline import Pipeline
from .schedule import Clock
from .sharding import counts_here, local
from .start import broadcast_into, values_digest
from .transport import Carriers

BUFFERS = "(buffers)"


class Syncs:
    """Holds the memory of all layers and takes them through sync after sync.

    Collective calls come in one static order on all ranks: the switch, the order of layers, then
    sync after sync, layer after layer. The layer of buffers, if there is one, is the last of
    `layers` and the first in the order, because the forward itself changes buffers.
    """

    def __init__(
        self,
        model: nn.Module,
        clock: Clock,
        plan: Plan,
        mesh: ReplicaMesh,
        lane: _C.Lane,
        comms: Carriers,
    ) -> None:
        config = clock.config
        self.plan = plan
        self.metrics = Metrics()
        self.outer_lr = float(config.outer_lr)
        self.trainable = {name: p for unit in plan.units for name, p in unit.params.items()}
        self._gathering = fsdp.fsdp_modules(model)
        # One more for the layer that is fetched while those in flight are exchanged.
        self.pool = _C.BufferPool(max(config.prefetch, 1) + config.offload)
        self._model, self._clock, self._mesh = model, clock, mesh
        self._lane, self._comms = lane, comms
        for unit in plan.units:
            # What another rank of this replica counts in its norms comes last.
            here = {name: counts_here(p, mesh.shard.ranks) for name, p in unit.params.items()}
            unit.params = dict(sorted(unit.params.items(), key=lambda item: not here[item[0]]))
            unit.counted = sum(here.values())
        self.layers = [self._parameter_layer(unit) for unit in plan.units]
        self._buffers = self._averaged_buffers()
        if self._buffers:
            self.layers.append(self._buffer_layer())
        self.pipeline = Pipeline(self.layers, config.prefetch, self._layer_done)
        self._identity = IdentityWatch(model)
        self._visited = list(plan.root)
        self._forward_seen = False
        self.recording = True
        self._ordered = False  # the order of layers is fixed, on all ranks
        self.said_done = False  # in the last sync that has begun
        self._window = 0  # steps of this replica in the window that it closed
        # What has finished and not been counted: (step, layer), None at the end of a sync. A GPU
        # tells its statistics when it gets there, and nobody waits for it.
        self._unsettled: deque[tuple[int, _C.Layer] | None] = deque()

    @property
    def active(self) -> bool:
        """Whether a sync has started and some of its layers are not done."""
        return self.pipeline.active

    def anchored_layers(self) -> list[_C.Layer]:
        """The layers of parameters, without the buffers."""
        return self.layers[: len(self.plan.units)]

    def order(self) -> list[int]:
        """The order in which layers of parameters are exchanged."""
        return [index for index in self.pipeline.order if index < len(self.plan.units)]

    def set_order(self, order: list[int]) -> None:
        """Fix the order for the rest of the training."""
        self.pipeline.order = [*range(len(self.plan.units), len(self.layers)), *order]
        self._ordered = True
        self.recording = False

    def enter_forward(self) -> None:
        """A training forward of the root begins: record its visits until they are needed."""
        if self.recording:
            self._visited = list(self.plan.root)
            self._forward_seen = True

    def leave_step(self) -> None:
        """A step is complete: its forward, if there was one, has shown the order."""
        self.recording = self.recording and not self._forward_seen

    def visit(self, module: nn.Module, wanted: list[int]) -> None:
        """`module`, which needs the layers `wanted`, is about to run."""
        behind = self.plan.behind.get(module, ())
        gathered = list(dict.fromkeys(each for inner in behind for each in fsdp.gathers(inner)))
        wanted = [*wanted, *(self.plan.sharded[m] for m in gathered if m in self.plan.sharded)]
        if self.recording:
            self._visited += [i for i in dict.fromkeys(wanted) if i not in self._visited]
        if self.active:
            self.need(wanted)
            # FSDP2's own streams wait for ours at the root's forward only.
            for each in gathered:
                if module is not self._model:
                    fsdp.gather(each)

    def refresh(self) -> None:
        """Before parameters are read or written outside a sync, or by a new one: FSDP2 holds no
        gathered copy, every layer knows where its parameters are, and they are those of attach."""
        self.check_identity()
        for layer, unit in zip(self.anchored_layers(), self.plan.units, strict=True):
            layer.rebind([local(p) for p in unit.params.values()])

    def check_identity(self) -> None:
        """Raise RuntimeError naming a parameter that is not what it was at attach."""
        fsdp.reshard(self._gathering)
        self._identity.check(self._model)

    def switch(self) -> None:
        """From warm-up to local steps: the weights, replica 0's if they differ, become anchors."""
        self.refresh()
        if self._mesh.all.size > 1:
            mine = values_digest(list(self.trainable.values()))
            digests = self._mesh.all.gather([mine], "the switch to local steps")
            shards = self._mesh.shard.size
            if any(row != digests[i % shards] for i, row in enumerate(digests)):
                self._take_over()
        for layer in self.anchored_layers():
            layer.capture()
        self._clock.anchored = True

    def start(self, *, done: bool) -> None:
        """Open the next sync. `done`: this replica has ended its training."""
        self.settle()
        self.refresh()
        self._renew_buffers()
        if not self._ordered:
            self._agree_on_order()
        sync_index, steps = self._clock.begin_sync()
        self._window = steps
        if self._mesh.heartbeat is not None:
            self._mesh.heartbeat.waiting_for(sync_index)
        self.said_done = done
        mean, policy = self._policy(buffers=True), self._policy(buffers=False)

        def begin(layer: _C.Layer) -> None:
            rules = mean if layer.name == BUFFERS else policy
            layer.begin(rules, sync_index=sync_index, steps=steps, done=done)

        self.pipeline.start(begin)

    def enter_root(self) -> None:
        """The root's own forward begins inside a sync: buffers and its own parameters are due."""
        self.pipeline.look_ahead()
        self.need(range(len(self.plan.units), len(self.layers)))
        self.visit(
            self._model, list(range(len(self.layers))) if self.plan.whole else self.plan.root
        )

    def late(self) -> str | None:
        """A layer that has gradients, though the open sync has not come to it yet. Waits for a GPU
        if there is one."""
        for index, unit in enumerate(self.plan.units):
            if index not in self.pipeline.done:
                grads = [p.grad for p in unit.params.values() if p.grad is not None]
                if any(bool(local(g).any()) for g in grads if not g.is_sparse):
                    return unit.name
        return None

    def need(self, wanted: Iterable[int]) -> None:
        """Return when the results of the layers `wanted` are in their parameters."""
        self.pipeline.need(wanted)
        self._maybe_over()

    def finish(self) -> None:
        """Take the open sync, if there is one, to its end."""
        if self.active:
            self.pipeline.finish()
            self._maybe_over()

    def give_up(self) -> None:
        """The group is gone: what a sync has not finished belongs to the open window again."""
        fsdp.reshard(self._gathering)
        self._identity.check(self._model)
        if self.active:
            self._clock.window_steps += self._window
            self._clock.armed = True
        self._unsettled.clear()

    def all_done(self) -> bool:
        """Whether every replica has said in the last sync that it has ended its training."""
        self.settle()
        done = self.layers[0].stats()["done"]
        assert isinstance(done, list)
        return all(done)

    def _take_over(self) -> None:
        warnings.warn(
            f"edit_ext: at the switch to local steps (step {self._clock.step}) the replicas have "
            "different weights; they all take replica 0's.",
            stacklevel=2,
        )
        for name, param in self.trainable.items():
            broadcast_into(self._mesh.replica, param, f"switch, broadcast of {name!r}")

    def _agree_on_order(self) -> None:
        """Replica 0's order of visits, for all; layers that it did not visit last."""
        rest = [index for index in range(len(self.plan.units)) if index not in self._visited]
        mine = torch.tensor([*self._visited, *rest], dtype=torch.int64)
        self._mesh.all.broadcast(mine, "the order of layers")
        self.set_order(mine.tolist())

    def _maybe_over(self) -> None:
        if self.pipeline.over():
            self._unsettled.append(None)
            self.settle(wait=False)
            if self._mesh.heartbeat is not None:
                self._mesh.heartbeat.reached(self._clock.sync_index)

    def _layer_done(self, index: int) -> None:
        # A forward that the sync did not wait for may have gathered it: an evaluation after one
        # that raised, or the user's unshard() ahead of the module.
        fsdp.reshard(module for module, layer in self.plan.sharded.items() if layer == index)
        self._unsettled.append((self._clock.step, self.layers[index]))
        self.settle(wait=False)

    def settle(self, *, wait: bool = True) -> None:
        """Count finished layers; `wait`: also those whose statistics are still on their way.

        Raises what the ranks' decisions were wrong about, on a GPU here and not at the layer.
        """
        while self._unsettled:
            if self._unsettled[0] is None:
                self._close_window()
            else:
                step, layer = self._unsettled[0]
                if not (wait or layer.settled):
                    return
                self.metrics.add(step, layer.name, layer.stats())
            self._unsettled.popleft()

    def _close_window(self) -> None:
        """A sync is over and all of it is known: count the steps of its window."""
        stats = self.layers[0].stats()
        steps, void = stats["steps"], stats["void"] is True
        assert isinstance(steps, list)
        self._clock.settle(steps, self._window, void=void)
        self.metrics.end_sync(void=void)

    def _policy(self, *, buffers: bool) -> _C.Policy:
        """The settings' rules, or a plain mean for the buffers."""
        fields = self._clock.config.policy_fields()
        fields["outer_lr"] = self.outer_lr
        if buffers:
            fields["min_steps"] *= self._mesh.shard.size  # every shard tells its replica's steps
            fields.update(outer="replace", weighting="uniform", z_threshold=None, clip_norm=None)
        return _C.Policy(**fields)

    def _parameter_layer(self, unit: Unit) -> _C.Layer:
        return _C.Layer(
            unit.name,
            [local(p) for p in unit.params.values()],
            replica=self._comms.replica,
            shard=self._comms.shard,
            mesh=self._comms.all,
            lane=self._lane,
            pool=self.pool,
            wire=self._clock.config.wire,
            counted=unit.counted,
            replicated=self._clock.config.momentum == "replicated",
            offload=self._clock.config.offload,
        )

    def _buffer_layer(self) -> _C.Layer:
        """Buffers are not sharded, and every rank has seen other data: one mean over all ranks."""
        return _C.Layer(
            BUFFERS,
            self._buffers,
            replica=self._comms.all,
            mesh=self._comms.all,
            lane=self._lane,
            pool=self.pool,
            wire=self._clock.config.wire,
            anchored=False,
        )

    def _averaged_buffers(self) -> list[Tensor]:
        """Persistent floating buffers, unless the settings leave them alone."""
        if not self._clock.config.average_buffers:
            return []
        return [b for b in persistent_buffers(self._model).values() if b.is_floating_point()]

    def _renew_buffers(self) -> None:
        """A module may put a new tensor where a buffer was; that layer has no state to keep."""
        now = self._averaged_buffers()
        if len(now) != len(self._buffers):
            raise RuntimeError(
                f"the model had {len(self._buffers)} averaged buffers at attach and has {len(now)} "
                "now; detach() the handle and attach again"
            )
        if any(new is not old for new, old in zip(now, self._buffers, strict=True)):
            self._buffers = now
            self.layers[-1] = self._buffer_layer()
