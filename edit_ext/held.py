"""All that is synced of one attached model: layers of parameters, the buffers, optimizer states."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn

from . import _C, fsdp
from .checks import IdentityWatch, persistent_buffers
from .inner_states import InnerStates
from .layer import Plan, Unit
from .mesh import ReplicaMesh
from .recipe import Recipe
from .sharding import counts_here, local
from .transport import Carriers

BUFFERS = "(buffers)"


class Held:
    """The layers with their memory, each on its track.

    layers: those of parameters, in the order of `plan.units`; then the buffers, if some are
    averaged; then the optimizer's states, once `find_states` has been called.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        recipe: Recipe,
        plan: Plan,
        mesh: ReplicaMesh,
        lane: _C.Lane,
        comms: Carriers,
    ) -> None:
        self.plan, self.recipe = plan, recipe
        self._model, self._mesh, self._lane, self._comms = model, mesh, lane, comms
        self.trainable = {name: p for unit in plan.units for name, p in unit.params.items()}
        self.states = InnerStates(optimizers, recipe)
        self._state_of: dict[int, tuple[Unit, str, str]] = {}  # unit, state and its dtype
        self._states_found = self.states.checked
        self.units = len(plan.units) if recipe.tracks else 0
        self.tracks = [recipe.track_of(unit, self.units) for unit in range(self.units)]
        self.pool = _C.BufferPool(self._flights())
        self.state_pool = _C.BufferPool(1)
        for unit in plan.units:
            # What another rank of this replica counts in its norms comes last.
            here = {name: counts_here(p, mesh.shard.ranks) for name, p in unit.params.items()}
            unit.params = dict(sorted(unit.params.items(), key=lambda item: not here[item[0]]))
            unit.counted = sum(here.values())
        self.layers = [self._parameter_layer(unit) for unit in plan.units[: self.units]]
        self._gathering = fsdp.fsdp_modules(model)
        self._identity = IdentityWatch(model)
        self._buffers = self._averaged_buffers()
        self.buffers: int | None = None
        """The number of the layer of buffers."""
        if self._buffers:
            self.buffers = len(self.layers)
            self.layers.append(self._buffer_layer())
            self.tracks.append(0)

    def is_late(self, index: int) -> bool:
        """Whether the results of a layer come steps after its exchange began."""
        return index < self.units and self.recipe.tracks[self.tracks[index]].delay > 0

    def at_forward(self, index: int) -> bool:
        """Whether a layer is written back at its forward, and not before the step."""
        return not self.recipe.tracks[self.tracks[index]].at_step or index == self.buffers

    def of(self, tracks: set[int], order: list[int]) -> list[int]:
        """The layers of these tracks: buffers, because the forward itself changes them; parameters
        in the order given; states."""
        every = [*range(self.units, len(self.layers))]
        first = [index for index in every if index == self.buffers]
        rest = [index for index in every if index != self.buffers]
        return [index for index in [*first, *order, *rest] if self.tracks[index] in tracks]

    def find_states(self) -> None:
        """Make layers of the optimizer's states, the same on all ranks. Collective, once; after
        every rank has had a first step, or its loop has ended."""
        if self._states_found:
            return
        self._states_found = True
        units = self.plan.units
        mine = [self.states.averaged(unit.params.values()) for unit in units]
        told = self._mesh.all.gather_text(json.dumps(mine), "states of the optimizer")
        for number, unit in enumerate(units):
            found: dict[str, str] = {}
            for text in told:
                found |= json.loads(text)[number]
            for key, dtype in sorted(found.items()):
                self._state_of[len(self.layers)] = (unit, key, dtype)
                self.layers.append(self._state_layer(unit, key, dtype))
                self.tracks.append(self.states.track(key))

    def renew(self, index: int) -> None:
        """Before a layer of states begins: an optimizer may have put new tensors in their place."""
        if index in self._state_of:
            unit, key, dtype = self._state_of[index]
            self.layers[index].rebind(self.states.tensors([*unit.params.values()], key, dtype))

    def is_state(self, index: int) -> bool:
        """Whether a layer is one of optimizer states."""
        return index in self._state_of

    def check_states(self) -> None:
        """After a step: raise ValueError or TypeError for states that cannot be averaged."""
        if not self.states.checked:
            self.states.check(self.trainable)

    def reset_states(self) -> None:
        """Zero the optimizer's states, if the method does so after a sync of the parameters."""
        if self.recipe.resets is not None:
            step = self.recipe.resets == "states and step"
            self.states.reset(self.trainable.values(), step=step)

    def refresh(self) -> None:
        """Before parameters are read or written outside a sync, or by a new one: FSDP2 holds no
        gathered copy, every layer knows where its parameters are, and they are those of attach."""
        self.check_identity()
        for layer, unit in zip(self.anchored(), self.plan.units, strict=False):
            layer.rebind([local(p) for p in unit.params.values()])

    def check_identity(self) -> None:
        """Raise RuntimeError naming a parameter that is not what it was at attach."""
        fsdp.reshard(self._gathering)
        self._identity.check(self._model)

    def anchored(self) -> list[_C.Layer]:
        """The layers of parameters alone."""
        return self.layers[: self.units]

    def _flights(self) -> int:
        """How many layers may hold buffers at a time."""
        recipe = self.recipe
        if not recipe.late:
            # One more for the layer that is fetched while those in flight are exchanged.
            return max(recipe.prefetch, 1) + recipe.offload
        # All layers where a broken sync is made up for; what is not used takes no memory. One more
        # for the buffers, and one for a layer that begins before it lands.
        return max(self.units, recipe.prefetch) + recipe.overtakes + 1

    def _layer(
        self, name: str, tensors: list[Tensor], unit: Unit | None = None, **kind: Any
    ) -> _C.Layer:
        """A layer of what belongs to a unit; without one it has no shards: every rank of the mesh
        takes part as a replica."""
        return _C.Layer(
            name,
            tensors,
            replica=self._comms.replica if unit else self._comms.all,
            shard=self._comms.shard if unit else None,
            mesh=self._comms.all,
            lane=self._lane,
            pool=self.state_pool if kind.get("through") else self.pool,
            wire=self.recipe.wire,
            counted=unit.counted if unit else None,
            **kind,
        )

    def _parameter_layer(self, unit: Unit) -> _C.Layer:
        return self._layer(
            unit.name,
            [local(p) for p in unit.params.values()],
            unit,
            momentum=self.recipe.momentum is not None,
            replicated=self.recipe.momentum == "replicated",
            late=self.recipe.late,
            offload=self.recipe.offload,
        )

    def _state_layer(self, unit: Unit, key: str, dtype: str) -> _C.Layer:
        tensors = self.states.tensors([*unit.params.values()], key, dtype)
        # Nobody looks at states between a forward and its step, so the lane can take all of them
        # from one to the next, in one layer's buffers, while the training thread is in autograd.
        return self._layer(f"{unit.name}: {key}", tensors, unit, anchored=False, through=True)

    def _buffer_layer(self) -> _C.Layer:
        """Buffers are not sharded, and every rank has seen other data: one mean over all ranks."""
        return self._layer(BUFFERS, self._buffers, anchored=False)

    def _averaged_buffers(self) -> list[Tensor]:
        """Persistent floating buffers, unless the settings leave them alone."""
        if not self.recipe.average_buffers:
            return []
        return [b for b in persistent_buffers(self._model).values() if b.is_floating_point()]

    def renew_buffers(self) -> None:
        """A module may put a new tensor where a buffer was; that layer has no state to keep."""
        now = self._averaged_buffers()
        if len(now) != len(self._buffers):
            raise RuntimeError(
                f"the model had {len(self._buffers)} averaged buffers at attach and has {len(now)} "
                "now; detach() the handle and attach again"
            )
        if any(new is not old for new, old in zip(now, self._buffers, strict=True)):
            assert self.buffers is not None
            self._buffers = now
            self.layers[self.buffers] = self._buffer_layer()
