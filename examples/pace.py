"""Replicas and links slowed on purpose, to see who waits for whom; and runs that end by the clock.

A slow replica sleeps: it takes time and no core, so that replicas that share a machine, a few cores
even, are as independent as on machines of their own.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from edit_ext import _C
from edit_ext.examples.kinds import above_zero, replica_factor


def add_pace_options(add: Callable[..., None]) -> None:
    """The options of this file, for the group that `add` adds to."""
    add("--step-seconds", above_zero, None, "each replica sleeps so long in each step, between "
        "forward and backward, in place of a larger model's computing", metavar="S")  # fmt: skip
    add("--slow-replica", replica_factor, None, "replica R sleeps FACTOR times --step-seconds",
        metavar="R:FACTOR")  # fmt: skip
    add("--slow-random", above_zero, None, "in each step one replica, drawn from --seed and "
        "the number of the step, sleeps so many seconds more", metavar="S")  # fmt: skip
    add("--slow-link", above_zero, None, "each exchange of a layer's pseudo-gradients, or of a "
        "bucket of gradients, begins so many seconds late: a latency, whatever its size",
        metavar="S")  # fmt: skip


def check_pace(options: argparse.Namespace) -> None:
    """Relations between options. Raises ValueError with one sentence."""
    if options.slow_replica is not None:
        replica, factor = options.slow_replica
        if replica >= options.replicas:
            raise ValueError(
                f"--slow-replica {replica}:{factor:g}: there are only replicas 0 to "
                f"{options.replicas - 1}"
            )
        if options.step_seconds is None:
            raise ValueError("--slow-replica needs --step-seconds: it multiplies these")
    if options.slow_link is not None and options.replicas == 1:
        raise ValueError("--slow-link has no effect with one replica")
    if options.seconds is not None and (options.eval_every or options.checkpoint_every):
        raise ValueError(
            "--seconds ends replicas after different numbers of steps, so they could not meet at "
            "one: it needs --eval-every 0 and --checkpoint-every 0"
        )
    if options.seconds is not None and options.resume:
        raise ValueError("--seconds begins a run; it cannot be given with --resume")


class Pace:
    """How long one replica sleeps in each of its steps."""

    def __init__(self, options: argparse.Namespace, replica: int, replicas: int) -> None:
        slow, factor = options.slow_replica or (None, 1.0)
        self._every = (options.step_seconds or 0.0) * (factor if slow == replica else 1.0)
        self._random = options.slow_random or 0.0
        self._seed, self._replica, self._replicas = options.seed, replica, replicas

    def seconds(self, step: int) -> float:
        """Of sleep in this step of this replica."""
        drawn = self._random and straggler(self._seed, step, self._replicas) == self._replica
        return self._every + (self._random if drawn else 0.0)

    def sleep(self, step: int) -> None:
        if seconds := self.seconds(step):
            time.sleep(seconds)


def straggler(seed: int, step: int, replicas: int) -> int:
    """The replica that is slow at this step: the same on all, and unrelated to the step before."""
    digest = hashlib.sha256(f"straggler {seed} {step}".encode()).digest()
    return int.from_bytes(digest[:8], "little") % replicas


def link(options: argparse.Namespace) -> Callable[[_C.Comm], _C.Comm] | None:
    """What `attach` takes as `comm_wrapper`."""
    seconds = options.slow_link
    return None if seconds is None else lambda inner: _C.DelayedComm(inner, seconds)


def out_of_time(options: argparse.Namespace, seconds: float) -> bool:
    """Whether this replica ends, having trained for so many seconds; before each of its steps.

    With gradients averaged at every step all must end together, so replica 0 decides for all, at
    the cost of a byte a step. The other methods take replicas that end one by one.
    """
    if options.seconds is None:
        return False
    over = seconds >= options.seconds
    if options.method != "sync" or not dist.is_initialized():
        return over
    told = torch.tensor([over])
    dist.broadcast(told, src=0)
    return bool(told)


def steps_of_all(step: int) -> list[int]:
    """The steps that each replica has made. Collective."""
    if not dist.is_initialized():
        return [step]
    steps = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(steps, torch.tensor([step]))
    return [int(each) for each in steps]
