"""The handle that attach() returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from .engine import Engine
from .explain import explain
from .fsdp import data_seat
from .mesh import Members, left_out, why_no_group
from .module_hooks import register
from .resize import Carried, leave, rejoin
from .state import load_state_dict, state_dict

if TYPE_CHECKING:
    import torch.distributed.checkpoint as dcp

    from .checkpoint import Checkpoint


class Handle:
    """Control over one attached model: a context manager that flushes when it is left in peace.

    After an error of a sync every method but `detach` and `metrics` raises that error again.
    """

    def __init__(self, engine: Engine, removers: Sequence[Any]) -> None:
        self._engine = engine
        self._removers = list(removers)
        self._carried: Carried | None = None  # between two groups

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Flush and detach; after an exception tell the peers and detach at once."""
        try:
            if error is None:
                self.flush()
            else:
                self._engine.broken_off(error)
        finally:
            self.detach()

    @property
    def step(self) -> int:
        """Completed optimizer steps of this replica, warm-up included."""
        return self._engine.clock.step

    @property
    def sync_index(self) -> int:
        """Syncs begun since the start of the training; the first has index 1."""
        return self._engine.clock.sync_index

    @property
    def mean_step(self) -> float:
        """Completed optimizer steps at the last sync, the mean over all replicas: what a learning
        rate can follow where replicas differ in speed, since it is the same on all of them."""
        engine = self._engine
        engine.syncs.settle()
        warmup = min(engine.clock.step, engine.recipe.averaged_steps)
        return warmup + engine.clock.shown_steps / engine.mesh.replica.size

    @property
    def data_rank(self) -> int:
        """Which part of the data this rank should read: in a model that is not sharded the index of
        the replica; shards of FSDP2 each read a part of their own."""
        rank, world = data_seat(self._engine.model)
        return self._engine.mesh.replica.rank * world + rank

    @property
    def data_world(self) -> int:
        """Into how many parts the data should be split: replicas times shards of FSDP2."""
        return self._engine.mesh.replica.size * data_seat(self._engine.model)[1]

    @property
    def outer_lr(self) -> float:
        """Learning rate of the outer step; set it to the same value on every replica."""
        return self._engine.syncs.outer_lr

    @outer_lr.setter
    def outer_lr(self, value: float) -> None:
        self._engine.check()
        config = self._engine.config
        if "outer_lr" not in config.as_dict():
            raise ValueError(f"{config.name} has no outer_lr: its outer step is a mean")
        replace(config, outer_lr=value)  # type: ignore[call-arg]  # raises if it cannot work
        self._engine.syncs.outer_lr = float(value)

    def flush(self) -> None:
        """Sync until every replica has flushed: no step of the last window is lost.

        Collective. Replicas may come with different numbers of steps; one that has none left takes
        part with weight zero. Afterwards all replicas hold the agreed weights, and may train on.
        Under AEDiT the others take part after their next step, and then whenever a clock says so.
        """
        self._engine.flush()

    def detach(self) -> None:
        """Remove all hooks and leave the groups; may be called twice.

        The model keeps its present weights. An exchange in flight is broken off; over NCCL, peers
        get a second to read what has been sent before.
        """
        for remover in self._removers:
            remover.remove()
        self._removers = []
        self._carried = None
        self._engine.close()

    def resize(self, group: Members | None) -> None:
        """Go on with other replicas, in the same processes; between two steps.

        group: the ranks that from now on hold this rank's part of the model, one in each replica,
            as a list or a process group; None: all ranks. A rank that is not among them (that has
            `GroupMember.NON_GROUP_MEMBER`) is detached. A list is safer: torch can make a new group
            of only some ranks if they have made equally many before, and one that joins has not.

        Collective: every rank of the old group calls it, whether it stays or leaves, so that the
        outer momentum is handed over; local steps of a leaving replica are lost unless it calls
        `flush` before. When a replica has died, or after any error of a sync, the survivors call
        it: what the dead held of a sharded momentum restarts at zero, with a warning. Ranks that
        join call ``attach(..., start="join")`` with this group meanwhile; they get weights, inner
        optimizer, anchors and counts of one replica. While it runs it needs the memory of the
        anchors and the momentum a second time.

        Raises RuntimeError on every rank while a sync is in progress on one of them, when a group
        cannot be, and for a rank that does not come within `timeout`; ValueError when ranks of
        different runs meet. After an error `resize` may be called again; once it has left the old
        group a training step raises until it succeeds.
        """
        engine = self._engine
        if engine.closed and self._carried is None:
            engine.check()
        wrong = why_no_group(group)
        refusal = f"group must {wrong}; it is {group!r}" if wrong else ""
        if self._carried is None:
            self._carried = leave(engine, refusal)
        elif wrong:
            raise ValueError(f"resize(): {refusal}")
        rank = dist.get_rank() if dist.is_initialized() else 0
        if left_out(group) or (isinstance(group, Sequence) and rank not in group):
            self.detach()
            return
        engine.adrift = "resize() has not succeeded: call it again, or detach() to train alone"
        self._engine = rejoin(engine, group, self._carried)
        engine.adrift = self._carried = None
        for remover in self._removers:
            remover.remove()
        self._removers = register(self._engine, self._engine.ticker.optimizers)

    def pause(self) -> None:
        """Stop counting steps, averaging gradients and starting syncs, on this replica.

        What the weights gain meanwhile is part of the window that goes on after `resume`.
        """
        self._engine.check()
        self._engine.paused = True
        self._engine.skip_averages()

    def resume(self) -> None:
        """Undo `pause`."""
        self._engine.check()
        self._engine.paused = False
        self._engine.skip_averages()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only accumulate: the warm-up does not average their gradients.

        The next backward outside averages what has been accumulated; if there is none before the
        optimizer's step, the step does.
        """
        self._engine.check()
        self._engine.accumulating += 1
        self._engine.skip_averages()
        try:
            yield
        finally:
            self._engine.accumulating -= 1
            self._engine.skip_averages()

    @contextmanager
    def anchor_weights(self) -> Iterator[None]:
        """The model holds the last agreed weights inside, and its own, bit for bit, afterwards.

        Not collective: one rank may evaluate or export alone. During the warm-up the weights are
        the agreed ones already. Raises RuntimeError while a sync is in progress, that is between a
        forward and the optimizer's step.
        """
        self._engine.check()
        if self._engine.syncs.active:
            raise RuntimeError(
                "anchor_weights() while a sync is in progress; call it after optimizer.step()"
            )
        if self._engine.swapped:
            raise RuntimeError("anchor_weights() inside anchor_weights()")
        if not self._engine.clock.anchored:
            yield
            return
        held = self._engine.held
        held.refresh()
        params = [param for layer in held.anchored() for param in layer.params]
        own = [param.detach().clone() for param in params]
        self._engine.swapped = True
        try:
            for layer in held.anchored():
                layer.restore()
            yield
        finally:
            held.refresh()  # a forward inside may have gathered the agreed weights
            with torch.no_grad():
                for param, value in zip(params, own, strict=True):
                    param.detach().copy_(value)
            self._engine.swapped = False

    def metrics(self) -> list[dict[str, Any]]:
        """One record per layer per sync since the last call, oldest first; at most 65,536 are kept.

        Keys: step, sync_index, layer; norms, weights, flags, idle, steps (one per replica);
        merged_norm, clip, skip, void (too few steps: nothing changed); exchange_seconds;
        exposed_seconds, what the training thread spent
        (begin_seconds, waiting, write_back_seconds), so it can exceed the exchange; bytes_sent. All
        norms, weights and flags are equal on all ranks. Of optimizer states also, relative to them:
        drift, how far this rank's have moved over the window, |now - then| / |then| of 65,536
        elements at most; apart, how far the replicas' are from their mean; every, steps between two
        syncs as things stand. None where that is not known: drift at the first sync, and at the
        first after a state was loaded or `resize`.
        """
        self._engine.syncs.settle()
        return self._engine.syncs.metrics.drain()

    def totals(self) -> dict[str, float]:
        """Sums since attach: syncs, void_syncs of them, steps, bytes_sent (warm-up gradients,
        scalars and payload), sync_seconds, exposed_sync_seconds (what the training thread spent),
        records_dropped."""
        self._engine.syncs.settle()
        engine, totals = self._engine, self._engine.syncs.metrics.totals
        return {
            "syncs": totals.syncs,
            "void_syncs": totals.void_syncs,
            "steps": engine.clock.step,
            "bytes_sent": engine.bytes_sent,
            "sync_seconds": totals.sync_seconds,
            "exposed_sync_seconds": totals.exposed_sync_seconds,
            "records_dropped": totals.records_dropped,
        }

    def explain(self, steps: int | None = None) -> str:
        """What is going to happen: layers, order, the syncs of the next `steps` optimizer steps,
        bytes per rank, memory and transport; of AEDiT the seconds to the next sync. Not
        collective."""
        self._engine.check()
        return explain(self._engine, steps)

    def state_dict(self) -> dict[str, Any]:
        """This replica's state as plain tensors, numbers and strings; save one per replica.

        Not collective and without side effects. Raises RuntimeError while a sync is in progress.
        """
        self._engine.check()
        return state_dict(self._engine)

    def checkpoint(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        source: str | PathLike[str] | dcp.StorageReader | None = None,
    ) -> Checkpoint:
        """The whole run as a Stateful of torch.distributed.checkpoint: model, optimizer and this.

        ``dcp.save({"run": sync.checkpoint(model, optimizer)}, checkpoint_id=path)`` after a step,
        from all ranks; ``async_save`` likewise. To go on, attach first, then
        ``dcp.load({"run": sync.checkpoint(model, optimizer, path)}, checkpoint_id=path)``. The
        numbers of replicas and shards may differ then; edit_ext/checkpoint.py says what becomes of
        each replica.

        source: what is going to be loaded; not needed to save.
        Raises ValueError when `source` is no such checkpoint.
        """
        from .checkpoint import Checkpoint  # loads DCP

        self._engine.check()
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
        return Checkpoint(self._engine, model, optimizers, source)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was saved: attach first, then load model, optimizer and this.

        Raises ValueError for a state of another number of replicas, another replica or model.
        """
        self._engine.check()
        load_state_dict(self._engine, state)
