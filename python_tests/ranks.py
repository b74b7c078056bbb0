"""A pool of processes that tests use as ranks: importing torch costs seconds, a job milliseconds.

A job is an importable function; the pool gives it a fresh Gloo process group. Its process is
replaced after an error or a missed deadline, and when groups that were abandoned on purpose have
left their threads in it (some spin), so that no test sees the ruins of another.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

START_SECONDS = 60
MOST_THREADS = 32  # a group has two to four; an idle rank that has seen FSDP2 about twelve


@dataclass
class Outcome:
    """How a job ended on one rank: with a value, an error, or the death of its process."""

    value: Any = None
    error: str | None = None  # "RuntimeError: ..."
    trace: str = ""
    exitcode: int | None = None
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return self.error is None and self.exitcode is None


class Ranks:
    """The pool. `run` wants values from all ranks; `outcomes` also takes errors and deaths."""

    def __init__(self) -> None:
        for name, value in (("OMP_NUM_THREADS", "1"), ("GLOO_SOCKET_IFNAME", "lo")):
            os.environ.setdefault(name, value)
        # Forked from a process that has imported torch and edit_ext and done nothing with them.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["torch", "torch.distributed", "edit_ext"])
        self._store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        self._workers: list[_Worker | None] = []
        self._jobs = 0

    def run(
        self, world: int, job: Callable[..., Any], *args: Any, seconds: float = 60.0
    ) -> list[Any]:
        """Call `job(*args)` on `world` ranks; their values by rank. Fails with their tracebacks."""
        outcomes = self.outcomes(world, job, *args, seconds=seconds)
        bad = [
            f"--- rank {rank}: {o.error or f'died with exit code {o.exitcode}'}\n{o.trace}"
            for rank, o in enumerate(outcomes)
            if not o.good
        ]
        assert not bad, "\n".join(bad)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self, world: int, job: Callable[..., Any], *args: Any, seconds: float = 60.0
    ) -> list[Outcome]:
        """As `run`, with what became of each rank. A rank that misses the deadline is killed."""
        self._jobs += 1
        workers = [self._worker(rank) for rank in range(world)]
        began = time.monotonic()
        for rank, worker in enumerate(workers):
            worker.send((self._jobs, world, rank, job.__module__, job.__qualname__, args, seconds))
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < world:
            left = began + seconds - time.monotonic()
            open_ranks = [rank for rank in range(world) if rank not in outcomes]
            ready = wait([workers[r].connection for r in open_ranks], timeout=max(left, 0))
            for rank in open_ranks:
                if workers[rank].connection in ready:
                    outcomes[rank] = workers[rank].outcome()
                elif not ready:
                    workers[rank].process.kill()
                    outcomes[rank] = Outcome(error=f"no answer within {seconds:g} s")
                else:
                    continue
                outcomes[rank].seconds = time.monotonic() - began
                if not outcomes[rank].good:
                    self._workers[rank] = None
        return [outcomes[rank] for rank in range(world)]

    def close(self) -> None:
        for worker in filter(None, self._workers):
            worker.process.kill()
            worker.process.join()

    def _worker(self, rank: int) -> _Worker:
        while len(self._workers) <= rank:
            self._workers.append(None)
        worker = self._workers[rank]
        if worker is not None and worker.threads() > MOST_THREADS:
            worker.process.kill()
            worker.process.join()
        if worker is None or not worker.process.is_alive():
            worker = self._workers[rank] = _Worker(self._context, self._store.port)
        return worker


class _Worker:
    def __init__(self, context: Any, port: int) -> None:
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, port), daemon=True)
        self.process.start()
        theirs.close()

    def send(self, job: tuple[Any, ...]) -> None:
        self.connection.send_bytes(pickle.dumps(job))

    def threads(self) -> int:
        try:
            return len(os.listdir(f"/proc/{self.process.pid}/task"))
        except FileNotFoundError:
            return 0

    def outcome(self) -> Outcome:
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.process.join(START_SECONDS)
            return Outcome(exitcode=self.process.exitcode)


def _serve(connection: Connection, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, False, timeout=timedelta(seconds=START_SECONDS))
    while True:
        try:
            number, world, rank, module, name, args, seconds = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        faulthandler.dump_traceback_later(max(seconds - 1, 1), file=sys.__stderr__)
        torch.manual_seed(rank)
        try:
            # Before the ranks meet: in a fresh process imports take longer than some timeouts.
            call = _resolve(module, name)
            dist.init_process_group(
                "gloo",
                store=dist.PrefixStore(f"job{number}", store),
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=seconds),
            )
            outcome = Outcome(value=call(*args))
        except BaseException as error:
            text = "".join(traceback.format_exception(error))
            outcome = Outcome(error=f"{type(error).__name__}: {error}", trace=text)
        faulthandler.cancel_dump_traceback_later()
        with contextlib.suppress(BrokenPipeError):
            connection.send_bytes(pickle.dumps(outcome))
        if not outcome.good:
            return  # through the interpreter's exit, which must not hang either
        dist.destroy_process_group()
        _forget_meshes()
        gc.collect()


def _forget_meshes() -> None:
    """torch keeps what it found out about operators on a mesh, and takes the mesh of an earlier job
    for this one's, with groups that are gone."""
    if "torch.distributed.tensor" in sys.modules:
        debug = importlib.import_module("torch.distributed.tensor.debug")
        debug._clear_python_sharding_prop_cache()  # both; one call does it from torch 2.11 on
        debug._clear_fast_path_sharding_prop_cache()


def _resolve(module: str, name: str) -> Callable[..., Any]:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found
