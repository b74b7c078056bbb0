"""The processes of one `TestHosts.run`: what each is told, and which of them fails first."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from edit_ext.launch import POLL, usable_cores

from .namespaces import INTERFACE

TAIL = 2000  # characters of output that an error shows


class RankError(RuntimeError):
    """A process failed or was late. `code` is its exit code, -n after signal n, and None when it
    was late; `output` is the end of what it printed."""

    def __init__(self, rank: int, code: int | None, output: str, timeout: float) -> None:
        if code is None:
            how = f"had not ended after {timeout:g} s"
        elif code > 0:
            how = f"exited with code {code}"
        else:
            how = f"was ended by signal {-code} ({signal.strsignal(-code)})"
        output = output[-TAIL:]
        super().__init__(f"rank {rank} {how}; the end of its output:\n{output}")
        self.rank, self.code, self.output = rank, code, output


def environment(rank: int, world: int, address: str, port: int) -> dict[str, str]:
    """The variables that `torch.distributed` reads, for one process on each host; the cores are
    shared evenly unless OMP_NUM_THREADS is set."""
    env = {
        "RANK": str(rank), "LOCAL_RANK": "0", "GROUP_RANK": str(rank),
        "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": address, "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": INTERFACE, "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    if "OMP_NUM_THREADS" not in os.environ:
        env["OMP_NUM_THREADS"] = str(max(1, usable_cores() // world))
    return env


def first_bad(
    processes: Sequence[subprocess.Popen[bytes]], deadline: float
) -> tuple[int, int | None] | None:
    """(rank, exit code) of the first that failed, or (rank, None) of the first that still runs at
    the deadline; None when all ended well."""
    while True:
        codes = [process.poll() for process in processes]
        for rank, code in enumerate(codes):
            if code:
                return rank, code
        if None not in codes:
            return None
        if time.monotonic() >= deadline:
            return codes.index(None), None
        time.sleep(POLL)


def read(path: str) -> str:
    """What a process printed, or nothing where it was not even started."""
    file = Path(path)
    return file.read_text(errors="replace") if file.exists() else ""
