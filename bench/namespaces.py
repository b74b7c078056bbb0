"""Network namespaces behind a switch, made by `ip` and `tc`: what the hosts of `net` consist of.

Each host is a namespace with one interface, `eth0`. Its peer is a port of a bridge, in a namespace
too, so that the machine's own network is never touched, nor does its choice of addresses matter.
Both ends send through a token bucket (tbf), which shapes what a host sends and what it receives.

Names carry the process that made them, by its number and start time, and a counter: runs side by
side do not collide, and what a killed run has left is known by its process being gone.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

PREFIX = "edit-ext-net"
INTERFACE = "eth0"
MOST_HOSTS = 254  # addresses of a /24
MTU = 9000  # bytes. Headers take 0.7 % of the rate then, of frames of 1500 bytes 4.4 %
LATENCY = "50ms"  # the longest that a packet waits in a bucket's queue before it is dropped
BURST_SECONDS = 0.004  # of the rate; less, and a core that wakes up late loses tokens for good
PATIENCE = 20.0  # s, for one command
POLL = 0.02  # s
SYSCTLS = {"ipv4/tcp_congestion_control": "reno", "ipv6/conf/all/disable_ipv6": "1"}
_serials = itertools.count()


def available() -> str | None:
    """Why hosts cannot be made here, as "needs ...", or None. Makes one and removes it."""
    if not sys.platform.startswith("linux"):
        return f"needs Linux for network namespaces, and this is {sys.platform}"
    if os.geteuid() != 0:
        return "needs root to make network namespaces"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"needs the program {tool!r}, which the package iproute2 brings"
    run = new_run()
    try:
        build(run, 1, 10**8)
    except RuntimeError as error:
        return f"needs a kernel that grants network namespaces, bridges and tbf: {error}"
    finally:
        remove(of_run(run))
    return None


def new_run() -> str:
    """The beginning of the names of a set of hosts: unique on this machine."""
    return f"{PREFIX}-{os.getpid()}-{_start_time(os.getpid())}-{next(_serials)}"


def host_name(run: str, index: int) -> str:
    return f"{run}-h{index}"


def address(index: int) -> str:
    """In the range that RFC 2544 keeps for benchmarks, 198.18.0.0/15."""
    return f"198.18.0.{index + 1}"


def build(run: str, count: int, rate: int) -> None:
    """A switch and `count` hosts, each on a link of `rate` bits a second both ways. Raises
    RuntimeError with what `ip` or `tc` said; what was made by then stays, see `of_run`."""
    switch = f"{run}-switch"
    _call("ip", "netns", "add", switch)
    _batch("ip", switch, [f"link add switch mtu {MTU} type bridge", "link set switch up"])
    burst = max(2 * MTU, round(rate / 8 * BURST_SECONDS))
    bucket = f"root tbf rate {rate}bit burst {burst}b latency {LATENCY}"
    for index in range(count):
        host, port = host_name(run, index), f"port{index}"
        _call("ip", "netns", "add", host)
        peer = f"peer name {INTERFACE} mtu {MTU} netns {host}"
        up = f"link set {port} master switch up"
        _batch("ip", switch, [f"link add {port} mtu {MTU} type veth {peer}", up])
        _set_sysctls(host)
        own = f"addr add {address(index)}/24 dev {INTERFACE}"
        _batch("ip", host, ["link set lo up", own, f"link set {INTERFACE} up"])
        _batch("tc", switch, [f"qdisc add dev {port} {bucket}"])
        _batch("tc", host, [f"qdisc add dev {INTERFACE} {bucket}"])


def counters(host: str) -> tuple[int, int]:
    """Bytes that the interface of a host has sent and received, Ethernet headers included. The
    system hands segments on in bundles of up to 64 KB, and a bundle counts one header."""
    links = json.loads(_call("ip", "-n", host, "-s", "-j", "link", "show", "dev", INTERFACE))
    stats = links[0]["stats64"]
    return int(stats["tx"]["bytes"]), int(stats["rx"]["bytes"])


def of_run(run: str) -> list[str]:
    """The namespaces that there are of a set of hosts."""
    return [name for name in _all() if name.startswith(f"{run}-")]


def left_over() -> list[str]:
    """Namespaces whose process is gone."""
    return [name for name in _all() if not _has_owner(name)]


def remove(names: list[str]) -> None:
    """End what runs in the namespaces, by SIGKILL, and remove them. Another process may be at the
    same. Raises RuntimeError when one is still there afterwards."""
    deadline = time.monotonic() + PATIENCE
    for name in names:
        while (pids := _pids(name)) and time.monotonic() < deadline:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL)
        with suppress(RuntimeError):
            _call("ip", "netns", "delete", name)
    if left := sorted(set(names) & set(_all())):
        raise RuntimeError(f"could not remove the network namespaces {', '.join(left)}")


def _all() -> list[str]:
    lines = _call("ip", "netns", "list").splitlines()
    return [name for line in lines if (name := line.split()[0]).startswith(f"{PREFIX}-")]


def _pids(name: str) -> list[int]:
    try:
        return [int(word) for word in _call("ip", "netns", "pids", name).split()]
    except RuntimeError:  # removed meanwhile
        return []


def _has_owner(name: str) -> bool:
    pid, start = name.removeprefix(f"{PREFIX}-").split("-")[:2]
    return _start_time(int(pid)) == start


def _start_time(pid: int) -> str | None:
    """In clock ticks since the machine started; None for a process that is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def _set_sysctls(host: str) -> None:
    """Those that the kernel has; it may not know reno either."""
    each = [f"echo {value} > /proc/sys/net/{name}" for name, value in SYSCTLS.items()]
    _call("ip", "netns", "exec", host, "sh", "-c", f"{{ {'; '.join(each)}; }} 2>/dev/null; true")


def _batch(tool: str, namespace: str, lines: list[str]) -> None:
    _call(tool, "-n", namespace, "-batch", "-", lines=lines)


def _call(*words: str, lines: list[str] | None = None) -> str:
    """Output of a command. Raises RuntimeError when it fails or hangs."""
    said = " ".join([*words, *(lines or [])])
    try:
        done = subprocess.run(
            words,
            input="\n".join(lines or []),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            start_new_session=True,  # Ctrl-C is for this process to handle
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"{said}: {error}") from error
    if done.returncode:
        raise RuntimeError(f"{said}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
