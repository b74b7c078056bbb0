"""Test hosts: their links' rate and counters, ranks on them, and that nothing of them is left."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from edit_ext.bench import namespaces, net, net_check
from edit_ext.bench.net import RankError, TestHosts, available

# Slow as a whole: it needs root, and rates that other tests would disturb.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]
# A process, and one that has left its group; both deaf to SIGTERM.
STUBBORN = ["sh", "-c", "trap '' TERM; setsid sleep 600 & sleep 600"]
TRIES = 6  # on a busy machine processes fall asleep in mid-transfer
ALL_REDUCE = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
value = torch.full((1000,), dist.get_rank() + 1.0)
dist.all_reduce(value)
print("sum", int(value.sum()))
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def can() -> None:
    if reason := available():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def pair(can) -> Iterator[TestHosts]:
    with TestHosts(2, "1gbit") as hosts:
        yield hosts


def wait_until(condition, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the deadline"
        time.sleep(0.02)


def ended(pid: int) -> bool:
    """No such process, or one that is only waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX"
    except OSError:
        return True


def running(names: list[str]) -> list[int]:
    return [pid for name in names for pid in namespaces._pids(name)]


@pytest.mark.parametrize(
    ("count", "rate", "said"),
    [
        (0, "1gbit", "count must be 1 to 254 hosts, but is 0"),
        (300, "1gbit", "count must be 1 to 254 hosts, but is 300"),
        (2, "100tbit", "rate must be from 10mbit to 10gbit, but is '100tbit'"),
        (2, "9mbit", "rate must be from 10mbit to 10gbit, but is '9mbit'"),
        (2, "0", "rate must be a rate above 0 in bit/s, .*, but is '0'"),
        (2, "fast", "rate must be a rate above 0 in bit/s, .*, but is 'fast'"),
    ],
)
def test_impossible_hosts_are_refused(count, rate, said):
    """One sentence that names the argument, its value and what was expected."""
    with pytest.raises(ValueError, match=f"^{said}$"):
        TestHosts(count, rate)


def test_the_reason_why_not_is_said(monkeypatch):
    """Without root or a program: what is needed, and TestHosts raises it."""
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: None if tool == "tc" else tool)
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 0)
    assert available() == "needs the program 'tc', which the package iproute2 brings"
    monkeypatch.setattr(namespaces.os, "geteuid", lambda: 1000)
    assert available() == "needs root to make network namespaces"
    with pytest.raises(RuntimeError, match=r"^TestHosts needs root to make network namespaces$"):
        TestHosts(2, "1gbit").__enter__()


def test_a_kernel_that_refuses_is_said(monkeypatch, can):
    """What `ip` or `tc` said is in the sentence, and what was made by then is removed."""
    mine = f"{namespaces.PREFIX}-{os.getpid()}-"
    before = len([n for n in namespaces._all() if n.startswith(mine)])
    monkeypatch.setattr(namespaces, "LATENCY", "never")
    reason = available()
    assert reason.startswith("needs a kernel that grants") and "never" in reason
    assert len([n for n in namespaces._all() if n.startswith(mine)]) == before


@pytest.mark.parametrize(("rate", "size"), [("100mbit", 5 * 10**6), ("500mbit", 25 * 10**6)])
def test_rate_and_counters(can, rate, size):
    """Within 5 % of what was asked, both ways; the counters within 5 % of the payload."""
    with TestHosts(2, rate) as hosts:
        for _ in range(TRIES):
            received = [host.received() for host in hosts]
            row = net_check.transfer(hosts, "tcp", size)
            received = [host.received() - old for host, old in zip(hosts, received, strict=True)]
            assert row["highest"] < 1.05 * hosts.rate
            assert row["sent"] == pytest.approx(1, abs=0.05)
            assert received == pytest.approx([size, size], rel=0.05)
            if row["of_asked"] > 0.95:
                return
    pytest.fail(f"the slower way reached {row['of_asked']:.3f} of the rate")


def test_gloo_ranks_meet(pair):
    """Two ranks find each other by the variables they were given, and all-reduce."""
    outputs = pair.run(lambda rank: [sys.executable, "-c", ALL_REDUCE], 60)
    assert ["sum 3000" in text for text in outputs] == [True, True]


def test_a_failing_rank_ends_the_other(pair):
    """It is named with its exit code and last words; nothing runs on any host a moment later."""
    began = time.monotonic()
    bad = ["sh", "-c", "echo no luck; exit 7"]
    with pytest.raises(RankError, match=r"rank 1 exited with code 7.*\n.*no luck") as caught:
        pair.run(lambda rank: bad if rank == 1 else ["sleep", "600"], 60)
    assert (caught.value.rank, caught.value.code) == (1, 7)
    assert time.monotonic() - began < 10
    assert not running([host.namespace for host in pair])


def test_a_late_or_killed_rank_is_named(pair):
    """The first that still runs at the deadline; a signal by its number."""
    with pytest.raises(RankError, match=r"rank 0 had not ended after 0.5 s"):
        pair.run(lambda rank: ["sleep", "600"] if rank == 0 else ["true"], 0.5)
    with pytest.raises(RankError, match=r"rank 1 was ended by signal 9") as caught:
        pair.run(lambda rank: ["sh", "-c", "kill -9 $$"] if rank else ["sleep", "600"], 60)
    assert caught.value.code == -9


def test_a_host_sees_its_own_network_only(pair):
    """Loopback and one interface, both up, and no way out."""
    text = pair.run(lambda rank: ["ip", "-j", "addr"], 20)[1]
    links = {link["ifname"]: link for link in json.loads(text)}
    assert set(links) == {"lo", namespaces.INTERFACE}
    assert all("UP" in link["flags"] for link in links.values())
    assert links[namespaces.INTERFACE]["addr_info"][0]["local"] == pair[1].address
    assert pair.run(lambda rank: ["ip", "route", "show", "default"], 20) == ["", ""]


def test_an_error_inside_leaves_nothing(can):
    """The error goes on as it is; namespaces and processes are gone, those deaf to SIGTERM too."""
    with pytest.raises(KeyError), TestHosts(1, "100mbit") as hosts:
        names = [hosts[0].namespace]
        hosts.popen(0, STUBBORN)
        wait_until(lambda: len(running(names)) == 3)
        pids = running(names)
        raise KeyError
    assert not set(names) & set(namespaces._all())
    assert all(map(ended, pids))


def hold_hosts(path: str) -> None:
    """Says in a file which namespaces it has, and sleeps on."""
    with TestHosts(2, "100mbit") as hosts:
        hosts.popen(1, STUBBORN)
        Path(f"{path}.part").write_text(json.dumps(namespaces.of_run(hosts._run)))
        os.rename(f"{path}.part", path)
        time.sleep(600)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_run_leaves_nothing(can, ranks, tmp_path, number):
    """Ctrl-C and SIGTERM clear up, after SIGKILL the next start; a start before that does not."""
    # `ranks` is here because it makes the fork server import torch.
    path = tmp_path / "names"
    process = multiprocessing.get_context("forkserver").Process(
        target=hold_hosts, args=(str(path),), daemon=True
    )
    process.start()
    try:
        wait_until(path.exists, 60)
        names = json.loads(path.read_text())
        wait_until(lambda: len(running(names)) == 3)
        pids = running(names)
        with TestHosts(1, "100mbit"):
            pass
        assert set(names) <= set(namespaces._all()) and sorted(running(names)) == sorted(pids)
        os.kill(process.pid, number)
        process.join(20)
        assert process.exitcode == {signal.SIGINT: 1, signal.SIGTERM: 143}.get(number, -number)
    finally:
        process.kill()
        process.join(20)
    if number == signal.SIGKILL:
        with TestHosts(1, "100mbit"):
            pass
    assert len(names) == 3 and not set(names) & set(namespaces._all())
    wait_until(lambda: all(map(ended, pids)))


def test_runs_side_by_side(pair):
    """Two sets of hosts in one process have names of their own and do not disturb each other."""
    with TestHosts(1, "100mbit") as other:
        assert other[0].namespace not in [host.namespace for host in pair]
        assert other.run(lambda rank: ["echo", "here"], 20) == ["here\n"]
    assert pair.run(lambda rank: ["echo", str(rank)], 20) == ["0\n", "1\n"]


def test_mistakes_at_the_command_line(capsys):
    """A sentence and exit code 2."""
    for words in (["--hosts", "1"], ["--hosts", "300"], ["--rate", "100tbit"]):
        with pytest.raises(SystemExit, match="2"):
            net_check.main(words)
        assert "must be" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.slow
def test_self_check(can, tmp_path, capsys):
    """Both transports, a line each, and the same figures as JSON."""
    assert net_check.main(["--rate", "100mbit", "--mb", "5", "--json", str(tmp_path / "f")]) == 0
    found = json.loads((tmp_path / "f").read_text())
    assert [row["over"] for row in found["transfers"]] == ["tcp", "gloo"]
    assert found["rate"] == net.parse_rate("100mbit") and found["payload_bytes"] == 5 * 10**6
    assert "2 hosts at 100 Mbit/s, 5 MB" in capsys.readouterr().out
