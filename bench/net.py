"""Test hosts inside this machine, on links of a rate one chooses, for benchmarks over real sockets.

    with TestHosts(2, rate="200mbit") as hosts:
        outputs = hosts.run(lambda rank: [sys.executable, "train.py"], timeout=60)
        print(hosts[0].sent(), hosts[0].received())

Needs Linux, root and iproute2. The links have a rate and a queue but no delay of their own.

`python -m edit_ext.bench.net --rate 200mbit --hosts 2` compares the rate that a plain TCP
connection and a Gloo group reach with the one asked for, and the payload with the counters.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import IO

from edit_ext.launch import die_with_parent
from edit_ext.planner_units import bandwidth

from . import namespaces
from .namespaces import available
from .net_ranks import RankError, environment, first_bad, read
from .stop_signals import ExitOnStop, held_back

__all__ = ["Host", "RankError", "TestHosts", "available", "parse_rate"]

SLOWEST, FASTEST = 10**7, 10**10  # bit/s
PORT = 29500  # of a rendezvous; each run takes the next, as the last one's may not be free yet
REAP = 5.0  # s for a killed process to be gone


@dataclass(frozen=True)
class Host:
    """One host: its IPv4 address and the name of its network namespace."""

    address: str
    namespace: str

    def command(self, argv: Sequence[str]) -> list[str]:
        """`argv` such that it runs on this host."""
        return ["ip", "netns", "exec", self.namespace, *argv]

    def sent(self) -> int:
        """Bytes that the interface has sent since the host was made, with headers."""
        return namespaces.counters(self.namespace)[0]

    def received(self) -> int:
        """Bytes that the interface has received since the host was made, with headers."""
        return namespaces.counters(self.namespace)[1]


class TestHosts:
    """`count` hosts (1 to 254), each on a link of `rate` (10 Mbit/s to 10 Gbit/s) both ways.

    A context manager: everything is removed and every process on the hosts ended when the block is
    left, also by an error, by Ctrl-C, and by SIGTERM or SIGHUP, which raise SystemExit(128 + n)
    inside where nothing else handles them. What a killed run left goes when the next one starts.

    Raises ValueError for a count or rate out of range; on entry RuntimeError where hosts cannot be
    made (`available` says why).
    """

    __test__ = False  # not a test class of pytest

    def __init__(self, count: int, rate: str) -> None:
        if not 1 <= count <= namespaces.MOST_HOSTS:
            raise ValueError(f"count must be 1 to {namespaces.MOST_HOSTS} hosts, but is {count}")
        self.count, self.rate = count, parse_rate(rate)
        if not SLOWEST <= self.rate <= FASTEST:
            raise ValueError(f"rate must be from 10mbit to 10gbit, but is {rate!r}")
        self._hosts: list[Host] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stop_signals = ExitOnStop()
        self._run, self._port = "", PORT

    def __enter__(self) -> TestHosts:
        if self._run:
            raise RuntimeError("these TestHosts are in use already")
        if reason := available():
            raise RuntimeError(f"TestHosts {reason}")
        self._run = namespaces.new_run()
        try:
            self._stop_signals.start()
            namespaces.remove(namespaces.left_over())
            namespaces.build(self._run, self.count, self.rate)
        except BaseException:
            self._close()
            raise
        names = (namespaces.host_name(self._run, index) for index in range(self.count))
        self._hosts = [Host(namespaces.address(i), name) for i, name in enumerate(names)]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def __len__(self) -> int:
        return len(self._hosts)

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def popen(
        self,
        index: int,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        output: IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a process on host `index`, in a session of its own; it is killed when the block is
        left or this thread ends. `env` goes on top of this process's own; what it prints goes to
        `output`, else where this process prints. Give every wait for it a timeout."""
        process = subprocess.Popen(
            self[index].command(argv),
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
        self._processes.append(process)
        return process

    def run(
        self,
        argv_of: Callable[[int], Sequence[str]],
        timeout: float,
        *,
        env: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Run `argv_of(rank)` on each host, with the variables of a `torch.distributed` rank, until
        all have ended; what each printed (stdout and stderr), by rank.

        The first that fails ends the others at once. Raises RankError for it, or after `timeout`
        seconds for the first that still runs.
        """
        self._port += 1
        with tempfile.TemporaryDirectory(prefix="edit_ext_net_") as folder:
            paths = [os.path.join(folder, str(rank)) for rank in range(self.count)]
            processes: list[subprocess.Popen[bytes]] = []
            try:
                for rank, path in enumerate(paths):
                    own = environment(rank, self.count, self[0].address, self._port)
                    with open(path, "wb") as file:
                        own.update(env or {})
                        processes.append(self.popen(rank, argv_of(rank), env=own, output=file))
                bad = first_bad(processes, time.monotonic() + timeout)
            finally:
                self._kill(processes)
            texts = [read(path) for path in paths]
        if bad is not None:
            rank, code = bad
            raise RankError(rank, code, texts[rank], timeout)
        return texts

    def _kill(self, processes: Sequence[subprocess.Popen[bytes]]) -> None:
        running = [process for process in processes if process.poll() is None]
        for process in running:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(REAP)
        self._processes = [p for p in self._processes if p.returncode is None]

    def _close(self) -> None:
        try:
            with held_back():
                self._kill(self._processes)
                namespaces.remove(namespaces.of_run(self._run))
        finally:
            self._hosts, self._run = [], ""
            self._stop_signals.stop()


def parse_rate(text: str) -> int:
    """Bits a second of "200mbit", "1gbit", "1e9" or "1GB/s". Raises ValueError, in one sentence,
    unless it is a finite rate above 0.

    >>> parse_rate("200mbit"), parse_rate("1gbit")
    (200000000, 1000000000)
    """
    return round(8 * bandwidth(text, "rate"))


if __name__ == "__main__":
    from .net_check import main

    sys.exit(main())
