"""The launcher: what each process is told, and that all of them end together, whatever happens."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from edit_ext import launch as launcher
from edit_ext.launch import launch

# Loads the launcher without importing torch, which would take seconds.
DRIVER = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location("launch", {str(Path(launcher.__file__))!r})
module = importlib.util.module_from_spec(spec)
sys.modules["launch"] = module
spec.loader.exec_module(module)
sys.exit(module.launch([sys.executable, *sys.argv[2:]], int(sys.argv[1])))
"""
# Reports its process id in a file, then sleeps for good.
SLEEPER = """
import os, signal, sys, time
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
with open(f"pid_{os.environ['RANK']}.part", "w") as file:
    file.write(str(os.getpid()))
os.rename(file.name, file.name.removesuffix(".part"))
time.sleep(600)
"""


def script(folder: Path, source: str) -> str:
    path = folder / "program.py"
    path.write_text(textwrap.dedent(source))
    return str(path)


def wait_until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the deadline"
        time.sleep(0.01)


def ended(pid: int) -> bool:
    """No such process, or one that is only waiting to be reaped."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return True
    return state in "ZX"


@contextmanager
def sleepers(folder: Path, replicas: int, *words: str) -> Iterator[tuple[subprocess.Popen, list]]:
    """A launcher of `replicas` sleepers, and their process ids once all of them are up."""
    command = [sys.executable, "-c", DRIVER, str(replicas), script(folder, SLEEPER), *words]
    process = subprocess.Popen(
        command, cwd=folder, start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    pids: list[int] = []
    try:
        files = [folder / f"pid_{rank}" for rank in range(replicas)]
        wait_until(lambda: all(f.exists() for f in files))
        pids = [int(f.read_text()) for f in files]
        yield process, pids
    finally:
        process.kill()
        process.communicate(timeout=10)
        for pid in pids:
            if not ended(pid):
                os.kill(pid, signal.SIGKILL)


def test_each_process_is_told_its_place(tmp_path, monkeypatch):
    """RANK counts up, all share address and port, and the cores are divided."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.chdir(tmp_path)
    program = script(
        tmp_path,
        """
        import json, os
        with open(f"env_{os.environ['RANK']}.json", "w") as file:
            json.dump(dict(os.environ), file)
        """,
    )
    assert launch([sys.executable, program], 3) == 0
    envs = [json.loads((tmp_path / f"env_{rank}.json").read_text()) for rank in range(3)]
    assert [e["RANK"] for e in envs] == [e["LOCAL_RANK"] for e in envs] == ["0", "1", "2"]
    assert {e["WORLD_SIZE"] for e in envs} == {e["LOCAL_WORLD_SIZE"] for e in envs} == {"3"}
    assert {e["MASTER_ADDR"] for e in envs} == {"127.0.0.1"}
    assert len({e["MASTER_PORT"] for e in envs}) == 1
    share = max(1, launcher.usable_cores() // 3)
    assert {e["OMP_NUM_THREADS"] for e in envs} == {str(share)}


def test_threads_are_the_users_to_choose(monkeypatch):
    """An OMP_NUM_THREADS that is set stays; `threads` goes before it."""
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert launcher.rank_environment(0, 2, 1234, None)["OMP_NUM_THREADS"] == "7"
    assert launcher.rank_environment(0, 2, 1234, 3)["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("replicas", "threads", "name"), [(0, None, "replicas"), (2, 0, "threads")]
)
def test_impossible_numbers_are_refused(replicas, threads, name):
    """The error names the argument and its value."""
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        launch([sys.executable, "-c", ""], replicas, threads)


def test_one_failure_ends_the_rest(tmp_path, capfd):
    """The others are ended, one line names the rank, and its exit code is handed on."""
    program = script(
        tmp_path,
        """
        import os, sys, time
        sys.exit(7) if os.environ["RANK"] == "1" else time.sleep(600)
        """,
    )
    began = time.monotonic()
    assert launch([sys.executable, program], 3) == 7
    assert time.monotonic() - began < 10
    assert capfd.readouterr().err == "edit-ext: rank 1 exited with code 7. Ending the others.\n"


def test_a_killed_process_is_named_with_its_signal(tmp_path, capfd):
    """A process ended by SIGKILL, as by the kernel out of memory: exit code 128 + 9."""
    program = script(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert launch([sys.executable, program], 1) == 137
    assert capfd.readouterr().err == "edit-ext: rank 0 was ended by SIGKILL.\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_signal_ends_all_at_once(tmp_path, number):
    """Ctrl-C or SIGTERM: no process is left, within a second, and the exit code says why."""
    with sleepers(tmp_path, 3) as (process, pids):
        began = time.monotonic()
        process.send_signal(number)
        assert process.wait(timeout=10) == 128 + number
        assert time.monotonic() - began < 1.0
        assert all(ended(pid) for pid in pids)


def test_stubborn_processes_are_killed_after_the_grace(tmp_path):
    """A process that ignores SIGTERM is gone within the grace and a second."""
    with sleepers(tmp_path, 2, "stubborn") as (process, pids):
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 130
        assert time.monotonic() - began < launcher.GRACE + 1.0
        assert all(ended(pid) for pid in pids)


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG")
def test_no_orphans_when_the_launcher_is_killed(tmp_path):
    """Even SIGKILL of the launcher, which it cannot handle, takes all processes along."""
    with sleepers(tmp_path, 3, "stubborn") as (process, pids):
        process.kill()
        process.wait(timeout=10)
        wait_until(lambda: all(ended(pid) for pid in pids), seconds=5)


def test_nohup_is_respected(tmp_path):
    """A hang-up that was ignored before stays ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        program = "import os, signal; os.kill(os.getppid(), signal.SIGHUP)"
        assert launch([sys.executable, "-c", program], 1) == 0
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
