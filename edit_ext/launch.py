"""Start the processes of one training run on this machine, and end them together.

torchrun remains the launcher for several machines, and the training program runs under it
unchanged. For one machine this file is used because torchrun keeps a stuck process for 30 s after
Ctrl-C, leaves orphans when it is killed itself, and reports every failure as exit code 1 under a
page of traceback.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import IO

GRACE = 3.0  # s between SIGTERM and SIGKILL
LAST_WORDS = 1.0  # s for the other ranks to say what they saw, after one has failed
POLL = 0.02  # s
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def usable_cores() -> int:
    """Cores this process may run on; a container's or taskset's share, not the machine's count."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def rank_environment(rank: int, replicas: int, port: int, threads: int | None) -> dict[str, str]:
    """The variables `torch.distributed` reads with ``env://``, on top of this process's own.

    `threads` is torch threads a process; None keeps an OMP_NUM_THREADS that is set, and shares the
    cores evenly otherwise.
    """
    env = dict(os.environ)
    if threads is not None or "OMP_NUM_THREADS" not in env:
        env["OMP_NUM_THREADS"] = str(threads or max(1, usable_cores() // replicas))
    if "lo" in (name for _, name in socket.if_nameindex()):
        # Gloo would otherwise ask for an interface by host name, which may be a VPN or nothing.
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    env.update(
        RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0",
        WORLD_SIZE=str(replicas), LOCAL_WORLD_SIZE=str(replicas),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), PYTHONUNBUFFERED="1",
    )  # fmt: skip
    return env


class ProcessGroup:
    """R processes, each in a session of its own, that live and die together.

    A session of its own keeps the terminal's Ctrl-C away from the processes, so that this one
    decides; on Linux the kernel ends them too should this process be killed (PR_SET_PDEATHSIG).
    What they print goes to `output`, else where this process prints.
    """

    def __init__(
        self,
        command: Sequence[str],
        replicas: int,
        threads: int | None = None,
        output: IO[bytes] | None = None,
    ) -> None:
        port = free_port()
        self.processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(replicas):
                self.processes.append(
                    subprocess.Popen(
                        list(command),
                        env=rank_environment(rank, replicas, port, threads),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        start_new_session=True,
                        preexec_fn=die_with_parent(),
                    )
                )
        except BaseException:
            self.stop(grace=0.0)
            raise

    def running(self) -> list[subprocess.Popen[bytes]]:
        return [p for p in self.processes if p.poll() is None]

    def failed(self) -> list[tuple[int, int]]:
        """(rank, return code) of processes that ended badly, those ended by a signal first."""
        codes = ((rank, p.returncode) for rank, p in enumerate(self.processes) if p.returncode)
        return sorted(codes, key=lambda item: (item[1] > 0, item[0]))

    def wait(self, seconds: float) -> bool:
        """Wait until all have ended; False when `seconds` pass first."""
        deadline = time.monotonic() + seconds
        while self.running():
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL)
        return True

    def stop(self, grace: float = GRACE) -> None:
        """End all: SIGTERM, and SIGKILL for what is left after `grace` seconds."""
        self._signal_all(signal.SIGTERM)
        if not self.wait(grace):
            self._signal_all(signal.SIGKILL)
            self.wait(GRACE)

    def _signal_all(self, number: signal.Signals) -> None:
        for process in self.running():
            try:
                os.killpg(process.pid, number)
            except ProcessLookupError:
                continue  # ended between the poll and the signal


class _Stop(Exception):
    """A stop signal arrived; carries its number."""


def launch(command: Sequence[str], replicas: int, threads: int | None = None) -> int:
    """Run `command` in `replicas` processes of this machine until all have ended.

    Each process gets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT and OMP_NUM_THREADS.
    Returns 0 when all end well. When one fails, the others are ended, one line on stderr names the
    rank, and its exit code is returned (128 + n when signal n ended it). SIGINT, SIGTERM and SIGHUP
    to this process end all of them within `GRACE` seconds; the return value is 128 + n. To be
    called from the main thread, which is where Python delivers signals.

    Raises ValueError for `replicas` or `threads` below 1.
    """
    if replicas < 1:
        raise ValueError(f"replicas must be at least 1, got {replicas}")
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1, got {threads}")
    group: ProcessGroup | None = None
    handlers = {n: signal.getsignal(n) for n in STOP_SIGNALS}
    handlers = {n: h for n, h in handlers.items() if h not in (None, signal.SIG_IGN)}  # nohup
    try:
        for number in handlers:
            signal.signal(number, _raise_stop)
        group = ProcessGroup(command, replicas, threads)
        while group.running() and not group.failed():
            time.sleep(POLL)
        return _report(group)
    except _Stop as stop:
        return 128 + int(stop.args[0])
    finally:
        for number in handlers:  # a second Ctrl-C must not interrupt the clearing up
            signal.signal(number, signal.SIG_IGN)
        if group is not None:
            group.stop()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def train(arguments: Sequence[str]) -> int:
    """`edit-ext train ARGUMENTS`: the example's training program in ``--replicas`` processes.

    The arguments are checked here first, so that a mistake is one line and not one from each
    process; it ends the program with exit code 2 (SystemExit). Returns what `launch` returns.
    """
    from edit_ext.examples.options import parse_options

    options = parse_options(arguments)
    command = [sys.executable, "-m", "edit_ext.examples.train_lm", *arguments]
    return launch(command, options.replicas, options.threads)


def _report(group: ProcessGroup) -> int:
    failed = group.failed()
    if not failed:
        return 0
    rank, code = failed[0]
    how = f"exited with code {code}" if code > 0 else f"was ended by {signal.Signals(-code).name}"
    rest = " Ending the others." if len(group.processes) > 1 else ""
    print(f"edit-ext: rank {rank} {how}.{rest}", file=sys.stderr, flush=True)
    group.wait(LAST_WORDS)
    return code if code > 0 else 128 - code


def _raise_stop(number: int, frame: FrameType | None) -> None:
    raise _Stop(number)


def die_with_parent() -> Callable[[], None] | None:
    """What a new process calls between fork and exec; None where the system has no such call."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up here: after fork only the call itself is safe
    parent = os.getpid()

    def die_with_parent() -> None:
        prctl(1, signal.SIGKILL)  # 1 = PR_SET_PDEATHSIG
        if os.getppid() != parent:  # the parent was killed before the line above
            os._exit(1)

    return die_with_parent
