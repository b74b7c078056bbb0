"""Replicas of one model in one process: forward and backward of all at once, and the product's own
clocks and syncs, whose ranks are threads. No process group, no link, no hook: for experiments on
what a method learns, not on how fast it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from edit_ext import _C
from edit_ext.closing import flush
from edit_ext.config import Method
from edit_ext.held import Held
from edit_ext.layer import find_layers
from edit_ext.schedule import Clock
from edit_ext.syncs import Syncs
from edit_ext.transport import Carriers

PATIENCE = 60.0  # seconds for a thread to come to a meeting of all


class Meeting:
    """Where the threads of one group of ranks tell each other things."""

    def __init__(self, size: int) -> None:
        self.told: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=PATIENCE)


class ThreadRanks:
    """As `edit_ext.comm.RankGroup`, of ranks that are threads."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, len(meeting.told)
        self.ranks = list(range(self.size))

    def gather(self, values: Any, what: str) -> list[Any]:
        """What all members hand in, by member."""
        self._meeting.told[self.rank] = values
        self._meeting.barrier.wait()
        told = list(self._meeting.told)
        self._meeting.barrier.wait()
        return told

    gather_text = gather_tensor = gather

    def broadcast(self, tensor: Tensor, what: str, source: int = 0) -> None:
        """Overwrite `tensor` with that of member `source`."""
        theirs = self.gather(tensor.clone(), what)
        tensor.copy_(theirs[source])


@dataclass
class ThreadMesh:
    """As `edit_ext.mesh.ReplicaMesh`: whole replicas, each a thread."""

    replica: ThreadRanks
    shard: ThreadRanks
    all: ThreadRanks
    heartbeat: None = None


class Replica:
    """One of them: what `edit_ext.engine.Engine` holds, called by a loop and not by hooks."""

    averager = alarm = None

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, method: Method,
        group: ThreadRanks, comm: _C.Comm | None,
    ) -> None:  # fmt: skip
        self.model, self.optimizer, self.comm = model, optimizer, comm
        self.recipe = method.recipe([optimizer])
        self.clock = Clock(self.recipe)
        mesh: Any = ThreadMesh(group, ThreadRanks(Meeting(1), 0), group)
        self.lane = _C.make_lane(next(model.parameters()))
        carriers = Carriers(comm, None, comm)
        plan = find_layers(model)
        self.held = Held(model, [optimizer], self.recipe, plan, mesh, self.lane, carriers)
        self.syncs = Syncs(model, self.clock, self.held, mesh)

    def switch_if_due(self) -> None:
        """At the end of the warm-up the weights become anchors."""
        if self.clock.switch_pending:
            self.syncs.switch()

    def before_forward(self) -> None:
        """Begin what is due, and wait for what a forward waits for."""
        self.switch_if_due()
        if self.syncs.due:
            self.syncs.start(done=False)
        self.syncs.need(self.syncs.order)

    def after_step(self) -> None:
        """A step is complete: count it."""
        self.held.check_states()
        self.clock.tick()


class Replicas:
    """R replicas of a model, each with an optimizer of its own, trained by one method.

    make_model: the same weights at each call; a model without buffers that returns its mean loss,
    which torch.func.vmap can take. make_optimizer: of a model's parameters.
    """

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
        method: Method,
        count: int,
    ) -> None:
        self.template = make_model()
        self.weights = {
            name: torch.stack([p.detach()] * count).requires_grad_()
            for name, p in self.template.named_parameters()
        }
        for stack in self.weights.values():
            stack.grad = torch.zeros_like(stack)
        comms = _C.thread_comms(count, PATIENCE) if count > 1 else [None]
        meeting = Meeting(count)
        self.replicas = []
        for rank, comm in enumerate(comms):
            model = make_model()
            for name, p in model.named_parameters():
                p.data, p.grad = self.weights[name].data[rank], self.weights[name].grad[rank]
            group = ThreadRanks(meeting, rank)
            self.replicas.append(Replica(model, make_optimizer(model), method, group, comm))
        self._threads = ThreadPoolExecutor(count)
        self.gradient_bytes = 0.0  # of each rank so far, for averages of gradients by a ring

    def __enter__(self) -> Replicas:
        return self

    def __exit__(self, *exception: object) -> None:
        self._threads.shutdown()
        for replica in self.replicas:
            replica.lane.close(1.0)

    @property
    def clock(self) -> Clock:
        """Of the first replica; the others' shows the same syncs."""
        return self.replicas[0].clock

    def step(
        self,
        batches: tuple[Tensor, ...],
        *,
        clip: float | None = None,
        active: Sequence[int] | None = None,
    ) -> Tensor:
        """One optimizer step of each replica, or of those of numbers `active`, with the syncs that
        are due before it. Returns the losses, [R].

        batches: the model's arguments, [R, ...] each; clip: largest norm of a replica's gradient.
        """
        count = len(self.replicas)
        if any(r.clock.switch_pending or r.syncs.due for r in self.replicas):
            self.each(Replica.before_forward)
        for stack in self.weights.values():
            stack.grad.zero_()
        losses = vmap(self._loss)(self.weights, *batches)
        losses.sum().backward()
        grads = [stack.grad for stack in self.weights.values()]
        if self.clock.warming_up and count > 1:
            for grad in grads:
                grad.copy_(grad.mean(0, keepdim=True).expand_as(grad))
                self.gradient_bytes += 2 * (count - 1) / count * grad[0].numel() * 4
        if clip is not None:
            norms = torch.stack([g.reshape(count, -1).norm(dim=1) for g in grads]).norm(dim=0)
            scale = (clip / (norms + 1e-6)).clamp(max=1.0)
            for grad in grads:
                grad.mul_(scale.view(-1, *[1] * (grad.dim() - 1)))
        if any(r.syncs.active for r in self.replicas):
            self.each(lambda r: r.syncs.finish())
        for rank in range(count) if active is None else active:
            self.replicas[rank].optimizer.step()
            self.replicas[rank].after_step()
        return losses.detach()

    def sync_now(self) -> None:
        """The next step begins with a sync of everything, as an alarm clock asks for it."""
        for replica in self.replicas:
            replica.clock.arm()

    def flush(self) -> None:
        """End all windows: every replica holds the agreed weights."""
        self.each(flush)

    def each(self, act: Callable[[Any], None]) -> None:
        """Call `act` for each replica, all at once, since they wait for each other."""
        for done in [self._threads.submit(act, replica) for replica in self.replicas]:
            done.result()

    def evaluate(self, batches: Iterable[tuple[Tensor, ...]]) -> float:
        """Mean loss over batches of equal size of the mean of the replicas' weights; right after a
        sync of all that is the agreed ones."""
        weights = {name: stack.detach().mean(0) for name, stack in self.weights.items()}
        with torch.no_grad():
            losses = [float(self._loss(weights, *batch)) for batch in batches]
        return sum(losses) / len(losses)

    def _loss(self, weights: dict[str, Tensor], *batch: Tensor) -> Tensor:
        return functional_call(self.template, weights, batch)

    @property
    def bytes_sent(self) -> int:
        """What a rank has sent, the largest: syncs as counted, and averages of gradients."""
        sent = max((r.comm.bytes_sent if r.comm else 0) for r in self.replicas)
        return sent + round(self.gradient_bytes)
