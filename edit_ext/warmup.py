"""Warm-up: gradients are averaged over the replicas, in buckets, while the backward runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import _C
from .comm import RankGroup
from .schedule import Clock
from .sharding import local

BUCKET = 25 * 2**18  # fp32 elements, 25 MiB


class GradientAverager:
    """Averages `.grad` of all parameters over the replicas at the end of each backward.

    Buckets are averaged in one fixed order, the last parameters first, as soon as their gradients
    and those of all buckets before them are there. A gradient that is missing travels as zeros; a
    map of presence, sent last, decides who receives one. Every replica runs the same number of
    rounds: one that had no backward runs its round before the optimizer's step.

    comm, lane: what carries the syncs and where; the buckets travel the same way. group: for the
    map. clock: counts completed optimizer steps, which must be equal on all replicas.
    """

    def __init__(
        self,
        params: Sequence[tuple[str, nn.Parameter]],
        group: RankGroup,
        comm: _C.Comm,
        lane: _C.Lane,
        clock: Clock,
        on_error: Callable[[BaseException], None],
    ) -> None:
        self.skip = False  # inside no_sync(), or while the handle is paused
        self._names = [name for name, _ in params]
        self._params = [param for _, param in params]
        self._group, self._comm, self._lane = group, comm, lane
        self._clock = clock
        self._on_error = on_error
        self._buckets = _split(self._params)
        self._bucket_of = {i: b for b, bucket in enumerate(self._buckets) for i in bucket}
        self._running = False
        self._ran = False  # a round has run since the last optimizer step
        self._missing: list[int] = []
        self._flats: list[Tensor] = []
        self._works: list[Any] = []
        self._room: Tensor | None = None
        self._hooks = [
            param.register_post_accumulate_grad_hook(_ReadyHook(self, index))
            for index, param in enumerate(self._params)
        ]

    def close(self) -> None:
        """Remove the hooks; the model keeps no trace."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def ready(self, index: int) -> None:
        """The gradient of parameter `index` has been accumulated in the backward that runs now."""
        if self.skip:
            return
        grad = self._params[index].grad
        if grad is not None and grad.is_sparse:
            raise RuntimeError(
                f"the gradient of {self._names[index]!r} is sparse and cannot be averaged during "
                "the warm-up; set warmup_steps=0"
            )
        if not self._running:
            self._start()
            # Twice, to be behind the callbacks that are queued while the backward runs: in one of
            # them FSDP2 reduces the last gradients.
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(lambda: queue(self._finish_backward))
        self._missing[self._bucket_of[index]] -= 1
        while len(self._works) < len(self._buckets) and self._missing[len(self._works)] <= 0:
            self._launch()

    def before_step(self) -> None:
        """Run the round of a step that has had none: no backward, or all of them in no_sync()."""
        if not self._ran:
            self.reset()
            self._start()
            self._finish(done=False)

    def after_step(self) -> None:
        """The optimizer has stepped."""
        self._ran = False

    def reset(self) -> None:
        """A new forward or a step begins: end a round whose backward was broken off.

        Its buckets are on their way, so the peers must hear that they mean nothing. Raises
        RuntimeError, as on the peers, unless all of them have broken off.
        """
        if self._running and self._works:
            self._finish(done=False, broken=True)
        self._running = False

    def join(self) -> None:
        """Run one round without gradients, as a replica that has ended.

        Raises RuntimeError, as on the peers, unless all of them have ended too.
        """
        self.reset()
        self._start()
        self._finish(done=True)

    def _start(self) -> None:
        self._running = True
        self._missing = [len(bucket) for bucket in self._buckets]
        self._flats, self._works = [], []

    def _finish_backward(self) -> None:
        try:
            self._finish(done=False)
        except BaseException as error:
            self._on_error(error)
            raise

    @torch.no_grad()
    def _launch(self, empty: bool = False) -> None:
        """Pack the next bucket in fp32 and begin its average."""
        bucket = self._buckets[len(self._works)]
        own = [local(self._params[i]) for i in bucket]
        total = sum(p.numel() for p in own)
        flat = torch.zeros(_C.Mean.padded(total, self._comm.size), device=own[0].device)
        start = 0
        for i, param in zip(bucket, own, strict=True):
            grad, size = self._params[i].grad, param.numel()
            if grad is not None and not empty:
                flat[start : start + size].view_as(param).copy_(local(grad))
            start += size
        self._flats.append(flat)
        self._works.append(_C.Mean(flat, total, self._scratch(), self._comm, self._lane))

    def _scratch(self) -> Tensor:
        """What arrives of one bucket; buckets travel one after the other and share it."""
        if self._room is None:
            most = max(sum(local(self._params[i]).numel() for i in b) for b in self._buckets)
            size = _C.Mean.scratch(most, self._comm.size)
            self._room = torch.empty(size, device=local(self._params[0]).device)
        return self._room

    @torch.no_grad()
    def _finish(self, done: bool, broken: bool = False) -> None:
        what = f"warm-up, step {self._clock.step + 1}, gradient average"
        while len(self._works) < len(self._buckets):
            self._launch(empty=done or broken)
        presence = [int(p.grad is not None and not done) for p in self._params]
        numbers = [*presence, int(broken), int(done), self._clock.step]
        tail = torch.tensor(numbers, dtype=torch.float64)
        self._works.append(self._group.start_sum(tail))
        for work in self._works:
            self._group.finish(work, what)
        self._running, self._ran = False, True
        size = self._group.size
        cut, ended, steps = (int(value) for value in tail[-3:])
        if cut:
            self._flats, self._works, self._ran = [], [], False
            if cut < size:
                raise RuntimeError(
                    f"{what}: {cut} of {size} replicas broke off a backward whose gradients were "
                    "on their way; during the warm-up catch such an error on all replicas or none"
                )
            return
        if steps != size * self._clock.step:
            raise RuntimeError(
                f"{what}: replicas have different numbers of steps (this one {self._clock.step}, "
                f"the mean is {steps / size:g}); during the warm-up every replica must make the "
                "same steps"
            )
        if 0 < ended < size:
            raise RuntimeError(
                f"{what}: {ended} of {size} replicas have ended their training during the "
                f"warm-up; give every replica at least warmup_steps steps"
            )
        if not done:
            self._write_back(tail)
        self._flats, self._works = [], []

    def _write_back(self, tail: Tensor) -> None:
        present = tail.tolist()
        for bucket, flat in zip(self._buckets, self._flats, strict=True):
            start = 0
            for i in bucket:
                param, size = self._params[i], local(self._params[i]).numel()
                if present[i]:
                    if param.grad is None:
                        param.grad = torch.zeros_like(param)
                    own = local(param.grad)
                    own.copy_(flat[start : start + size].view_as(own))
                start += size


class _ReadyHook:
    """A parameter's hook. It does not keep the averager alive."""

    def __init__(self, averager: GradientAverager, index: int) -> None:
        self._averager, self._index = weakref.ref(averager), index

    def __call__(self, param: Tensor) -> None:
        averager = self._averager()
        if averager is None:
            return
        try:
            averager.ready(self._index)
        except BaseException as error:
            averager._on_error(error)
            raise


def _split(params: Sequence[nn.Parameter]) -> list[list[int]]:
    """Parameter indexes in buckets of at most BUCKET elements, last parameters first."""
    buckets: list[list[int]] = []
    room = 0
    for index in reversed(range(len(params))):
        size = local(params[index]).numel()
        if not buckets or size > room:
            buckets.append([])
            room = BUCKET
        buckets[-1].append(index)
        room -= size
    return buckets
