"""The engine behind a handle: decides, at each hook, what is begun and what is waited for."""

from __future__ import annotations

import atexit
import os
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from . import _C
from .alarm import Alarm
from .closing import flush
from .comm import keep_for_ever
from .config import Method
from .held import Held
from .layer import Plan
from .mesh import ReplicaMesh
from .methods import AEDiT
from .recipe import Recipe
from .schedule import Clock
from .syncs import Syncs
from .ticker import Ticker
from .transport import Carriers, Link
from .warmup import GradientAverager

FORWARDS = 1000  # in training without a step, before that is reported
LEAVE_SECONDS = 1.0  # of a closed handle, for what still travels to or from its peers

_live: weakref.WeakSet[Engine] = weakref.WeakSet()


def live_engines() -> list[Engine]:
    """The engines of this process that have not been closed."""
    return [engine for engine in _live if not engine.closed]


@atexit.register
def _close_all() -> None:
    """At interpreter exit nobody is waited for longer than LEAVE_SECONDS, whatever is open."""
    for engine in live_engines():
        engine.close()


class Engine:
    """State machine of one attached model; its hooks call it on the training thread."""

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        config: Method,
        recipe: Recipe,
        plan: Plan,
        mesh: ReplicaMesh,
        lane: _C.Lane,
        comms: Carriers,
        transport: str,
        link: Link,
    ) -> None:
        self.transport = transport  # what carries the syncs, and why, for people
        self.link = link
        self.model, self.config, self.recipe, self.plan = model, config, recipe, plan
        self.mesh, self.lane, self.comms = mesh, lane, comms
        self.ticker = Ticker(optimizers)
        self.clock = Clock(recipe)
        self.held = Held(model, optimizers, recipe, plan, mesh, lane, comms)
        self.syncs = Syncs(model, self.clock, self.held, mesh)
        self.alarm = Alarm(config, self.clock, mesh) if isinstance(config, AEDiT) else None
        self.error: str | None = None
        self.adrift: str | None = None  # why this model belongs to no run until resize() succeeds
        self.bytes_before = 0  # sent before the last resize()
        self.closed = False
        self.paused = False
        self.accumulating = 0  # depth of no_sync()
        self.swapped = False  # inside anchor_weights()
        self.forward_thread: int | None = None  # thread inside a training forward of the root
        self.thread = threading.get_ident()  # thread that trains
        self.process = os.getpid()
        self._on_gpu = any(p.is_cuda for p in self.held.trainable.values())
        self._forward_since_tick = False
        self._no_root_said = False
        self._late_looked = False
        self._forwards = 0  # training forwards since the last step
        self.averager: GradientAverager | None = None
        if recipe.averaged_steps and comms.replica is not None:
            trainable = list(self.held.trainable.items())
            self.averager = GradientAverager(
                trainable, mesh.replica, comms.replica, lane, self.clock, self.failed
            )
        _live.add(self)

    # What hooks call

    def enter_root(self, module: nn.Module) -> None:
        """Before the root's forward: only a training forward with gradients acts."""
        if threading.get_ident() != self.thread:
            return
        self.forward_thread = None
        if not (module.training and torch.is_grad_enabled()) or self._inert():
            return
        self._refuse_capture()
        with self.watched():
            if self.averager is not None:
                self.averager.reset()
            self.switch_if_due()
            if self.syncs.due and not self.syncs.active:
                self.syncs.start(done=False)
            self.forward_thread = self.thread
            self._forward_since_tick = True
            self._count_forward()
            self.syncs.enter_forward()
            if self.syncs.active:
                self.syncs.enter_root()

    def leave_root(self) -> None:
        """After the root's forward, also when it raised."""
        if self.forward_thread == threading.get_ident():
            self.forward_thread = None
            if self.syncs.active and self.error is None:
                with self.watched():
                    self.syncs.leave_root()

    def visit(self, module: nn.Module, wanted: list[int]) -> None:
        """Before the forward of a module that needs the layers `wanted`."""
        if not (self.syncs.active or self.syncs.recording):
            return
        if self.forward_thread == threading.get_ident():
            with self.watched():
                self.syncs.visit(module, wanted)

    def before_step(self, optimizer: torch.optim.Optimizer, closure: object | None) -> None:
        """Before an optimizer's step: finish what the forward did not visit."""
        self.forward_thread = None
        if self.swapped:
            raise RuntimeError("optimizer.step() inside anchor_weights(): leave the context first")
        if self._gone():
            return
        self._refuse_capture()
        with self.watched():
            self._look_for_late()
            self.syncs.finish()
            if self.paused:
                return
            if self.averager is not None:
                # A parameter that came after attach has a gradient of this replica alone.
                self.held.check_identity()
                if closure is None:
                    self.averager.before_step()
            self.switch_if_due()
            # With a closure the forward is still to come; another optimizer of the same logical
            # step may follow the one that armed the sync.
            again = closure is None and self.ticker.in_last_tick(optimizer)
            if self.syncs.due and (self._forward_since_tick or again):
                self._say_no_root()
                self.syncs.start(done=False)
                self.syncs.finish()

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """After an optimizer's step: count it."""
        if self._inert():
            return
        self.thread = threading.get_ident()
        with self.watched():
            self.syncs.finish()
        if not self.ticker.stepped(optimizer):
            return
        with self.watched():
            self.held.check_states()
        self.clock.tick()
        self._forwards = 0
        if self.alarm is not None and self.clock.anchored:
            with self.watched():
                self.alarm.tick()
        self.syncs.leave_step()
        self._forward_since_tick = False
        if self.averager is not None:
            self.averager.after_step()
            self.warmup_may_be_over()

    def _refuse_capture(self) -> None:
        """A CUDA graph would hold this step for ever, with or without its sync."""
        if self._on_gpu and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "edit_ext: a training step is being captured into a CUDA graph; its replays would "
                "run no hook, so steps would not be counted and no sync would ever begin. Capture "
                "parts of the model instead, and leave model(...) and optimizer.step() outside"
            )

    # What the handle calls

    def check(self) -> None:
        """Raise RuntimeError if the handle is closed or has failed."""
        if self.error is not None:
            raise RuntimeError(self.error)
        if self.closed:
            raise RuntimeError("this handle is closed: its model is no longer attached")

    def flush(self) -> None:
        """Sync until every replica has said that it is done; see `Handle.flush`."""
        if self.swapped:
            raise RuntimeError("flush() inside anchor_weights(): leave the context first")
        if self.paused:
            raise RuntimeError("flush() while paused: resume() first, or detach() without flush")
        with self.watched():
            flush(self)

    def skip_averages(self) -> None:
        """Tell the warm-up whether gradients are averaged now."""
        if self.averager is not None:
            self.averager.skip = self.paused or self.accumulating > 0

    def warmup_may_be_over(self) -> None:
        """Stop averaging gradients if the clock says so."""
        if self.averager is not None and not self.clock.warming_up:
            self.averager.close()
            self.averager = None

    def broken_off(self, error: BaseException) -> None:
        """The training loop ended with an exception: the peers need not wait for this replica."""
        self._stick(f"the training loop ended with {type(error).__name__}: {error}")

    def failed(self, error: BaseException) -> None:
        """Make an error stick to the handle and tell the peers.

        Ctrl-C while a layer is waited for is no error: the wait can be taken up again.
        """
        if isinstance(error, Exception) or self.mesh.broken:
            self._stick(str(error) or type(error).__name__)

    def peer_failed(self, reason: str) -> None:
        """The heartbeat has lost a peer: every wait in C++ ends with this reason."""
        self.lane.fail(reason)
        _C.abort_all(self.comms.each, reason)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent: gradients, scalars, payload, checks."""
        return self.bytes_before + self.mesh.bytes_sent + self.comms.bytes_sent

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Errors inside stick to the handle."""
        self.check()
        try:
            yield
        except BaseException as error:
            reason = self.mesh.why() if type(error) is RuntimeError else None
            if reason is None or reason in str(error):
                self.failed(error)
                raise
            told = RuntimeError(f"{error} ({reason})")
            self.failed(told)
            raise told from error

    def close(self) -> None:
        """Leave the groups; an open exchange is broken off, what has ended gets LEAVE_SECONDS."""
        if self.closed:
            return
        self.closed = True
        if self.averager is not None:
            self.averager.close()
        if self._foreign():
            return
        clean = self.error is None and not self.syncs.in_flight
        if self.alarm is not None:
            self.alarm.leave(LEAVE_SECONDS if clean else 0.0)
        if not clean:
            _C.abort_all(self.comms.each, self.error or "the handle was closed")
        for comm in self.comms.each:
            if clean:  # before the stream is asked, which then has nothing left
                comm.close(LEAVE_SECONDS)
            else:
                keep_for_ever(comm)
        clean = self.lane.close(LEAVE_SECONDS if clean else 0.0) and clean
        self.mesh.close(clean=clean)

    def __del__(self) -> None:
        if hasattr(self, "averager") and not self.closed:
            self.close()

    def switch_if_due(self) -> None:
        """At the end of the warm-up the weights become anchors."""
        if self.clock.switch_pending:
            self.syncs.switch()
            if self.alarm is not None:
                self.alarm.start()

    def _stick(self, reason: str) -> None:
        if self.error is None:
            self.error = reason
            if self.mesh.heartbeat is not None:
                self.mesh.heartbeat.say_failed(reason)

    def _inert(self) -> bool:
        """Whether hooks must do nothing now."""
        return self._gone() or self.paused or self.swapped

    def _gone(self) -> bool:
        """Whether hooks have nothing to do any more. Raises while this model belongs to no run."""
        if self._foreign():
            return True
        if self.adrift is not None:
            raise RuntimeError(self.adrift)
        return self.closed

    def _foreign(self) -> bool:
        """Whether this is a forked child, which must not touch the parent's groups."""
        return os.getpid() != self.process

    def _look_for_late(self) -> None:
        """At the end of the first sync in a forward: has that used a layer without its module's
        hook? Then it has read the weights of before, and from now on all layers are waited for.
        """
        if self._late_looked or not (self.syncs.active and self._forward_since_tick):
            return
        self._late_looked = True
        late = self.syncs.late()
        if late is None:
            return
        self.plan.whole = f"a forward used layer {late!r} past the hook of its module"
        warnings.warn(
            f"edit_ext: sync {self.clock.sync_index}: the forward used layer {late!r} without "
            "calling its module, or was compiled before attach, and so did not wait for its new "
            "weights, which come now, before the step. From now on all layers are waited for "
            "before model(...), as with granularity='model'.",
            stacklevel=2,
        )

    def _count_forward(self) -> None:
        """Steps that a loop skips, for gradients that are not finite, are no steps to the clock:
        the peers wait for this replica, and nobody would know why."""
        self._forwards += 1
        if self._forwards == FORWARDS:
            warnings.warn(
                f"edit_ext: {FORWARDS} training forwards in a row without a step of the optimizer "
                f"(after step {self.clock.step}). If a GradScaler or the loop skips steps, this "
                "replica's syncs do not become due, and the others wait for it.",
                stacklevel=2,
            )

    def _say_no_root(self) -> None:
        if self._forward_since_tick or self._no_root_said:
            return
        self._no_root_said = True
        warnings.warn(
            "edit_ext: a sync was due but no forward of model(...) itself in training mode came "
            "before the step; all its layers are synced now, with nothing hidden.",
            stacklevel=2,
        )
