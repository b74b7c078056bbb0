"""Machines that join a running job and are lost to it: torchrun with a range of --nnodes."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from test_example_train import SMALL

from edit_ext import launch

TOKENS = 2 * 32  # of a step of one replica
# A job without end, whose lines of metrics and checkpoints come at the same steps.
WORDS = [*SMALL, "--steps", "1000000", "--eval-every", "0", "--log-every", "10",
         "--checkpoint-every", "10", "--timeout", "30", "--resume", "auto"]  # fmt: skip


def agent(port: int, log: Path, words: list[str]) -> subprocess.Popen[bytes]:
    """torchrun on a machine with one worker."""
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2",
             "--nproc-per-node", "1", "--max-restarts", "5", "--rdzv-backend", "c10d",
             "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "job", "--monitor-interval",
             "0.5", "--rdzv-conf",
             "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3",
             "--local-addr", "localhost", "-m", "edit_ext.examples.train_lm", *words],
            stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def lose(machine: subprocess.Popen[bytes]) -> None:
    """As a power cut would end it: the agent and its workers, at once."""
    if machine.poll() is None:
        path = Path(f"/proc/{machine.pid}/task/{machine.pid}/children")
        workers = path.read_text().split()
        for pid in [machine.pid, *map(int, workers)]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    machine.wait(timeout=10)


def lines(out: Path) -> list[dict]:
    path = out / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    found = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [entry for entry in found if entry["kind"] == "train"]


def wait_for(what: str, condition: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < deadline, f"{what}: {log.read_text()[-3000:]}"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.timeout(360)
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_a_machine_joins_and_is_lost(tmp_path, monkeypatch):
    """One replica, then two, then one: steps go on without a gap, and tokens by the replicas that
    were there."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    text, out, log = tmp_path / "text.txt", tmp_path / "out", tmp_path / "first.log"
    text.write_text("".join(f"line {i} of the text, {i * i} squared\n" for i in range(3000)))
    words = [*WORDS, "--data", str(text), "--out", str(out)]
    port = launch.free_port()
    machines = [agent(port, log, words)]
    try:
        wait_for("one replica", lambda: len(lines(out)) > 1, log)
        machines.append(agent(port, tmp_path / "second.log", words))
        wait_for("two", lambda: [e["replicas"] for e in lines(out)[-2:]] == [2, 2], log)
        lose(machines[1])
        wait_for("one again", lambda: [e["replicas"] for e in lines(out)[-2:]] == [1, 1], log)
        assert machines[0].poll() is None
    finally:
        for machine in machines:
            lose(machine)
    train = lines(out)
    assert [count for count, _ in itertools.groupby(e["replicas"] for e in train)] == [1, 2, 1]
    assert [e["step"] for e in train] == [10 * n for n in range(1, len(train) + 1)]
    for before, after in itertools.pairwise(train):
        assert after["tokens"] - before["tokens"] == 10 * after["replicas"] * TOKENS
