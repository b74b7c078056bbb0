"""`python -m edit_ext.bench.net`: do test hosts reach the rate that was asked for?

A payload goes once around the ring of hosts, over plain TCP connections and over a Gloo group.

  Mbit/s     of payload, as its receiver saw it: the lowest and the highest of the hosts
  of asked   the lowest by the rate asked for; headers and acknowledgements take about 1 %
  sent       bytes that left a host by its interface's counter, by those of the payload: the host
             that differs most from 1
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .command_line import positive
from .machine import header, machine
from .net import TestHosts
from .table import Row, text_table, write_json

OVER = ("tcp", "gloo")
MOST_BYTES = 1 << 28
PATIENCE = 60.0  # s, for processes to start and end


def transfer(hosts: TestHosts, over: str, size: int) -> Row:
    """`size` bytes from each host to the next; the figures of the module's docstring, in bits a
    second. Raises RankError."""
    program = str(Path(__file__).with_name("net_transfer.py"))
    # -P: the folder of the program is no place to import from.
    argv = [sys.executable, "-P", program, over, str(size), *(host.address for host in hosts)]
    before = [host.sent() for host in hosts]
    timeout = PATIENCE + 4 * len(hosts) * 8 * size / hosts.rate
    rates = [float(text.split()[-1]) for text in hosts.run(lambda rank: argv, timeout)]
    sent = [(host.sent() - old) / size for host, old in zip(hosts, before, strict=True)]
    return {
        "over": over,
        "lowest": min(rates),
        "highest": max(rates),
        "of_asked": min(rates) / hosts.rate,
        "sent": max(sent, key=lambda share: abs(share - 1)),
    }


def sentences(found: dict[str, Any]) -> str:
    """The figures for people."""
    rows = [
        {
            "over": row["over"],
            "lowest Mbit/s": row["lowest"] / 1e6,
            "highest Mbit/s": row["highest"] / 1e6,
            "of asked": row["of_asked"],
            "sent": row["sent"],
        }
        for row in found["transfers"]
    ]
    return (
        f"{found['hosts']} hosts at {found['rate'] / 1e6:g} Mbit/s, "
        f"{found['payload_bytes'] / 1e6:.3g} MB from each to the next\n"
        f"{text_table(rows, list(rows[0]))}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 where there can be no test hosts or a process on them failed."""
    parser = argparse.ArgumentParser(
        prog="python -m edit_ext.bench.net",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rate", default="200mbit", help="of each link (%(default)s)")
    parser.add_argument("--hosts", type=positive, default=2, help="at least 2 (%(default)s)")
    parser.add_argument("--mb", type=positive, help="of a payload (what takes 1 s, at most 268)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures here")
    args = parser.parse_args(argv)
    if args.hosts < 2:
        parser.error("--hosts must be at least 2: a host sends to another")
    try:
        made = TestHosts(args.hosts, args.rate)
    except ValueError as error:
        parser.error(str(error))
    size = 10**6 * args.mb if args.mb else min(MOST_BYTES, made.rate // 8)
    info = machine()
    print(header(info))
    try:
        with made as hosts:
            transfers = [transfer(hosts, over, size) for over in OVER]
    except RuntimeError as error:
        print(f"net: {error}", file=sys.stderr)
        return 1
    found = {
        "hosts": args.hosts, "rate": made.rate, "payload_bytes": size, "transfers": transfers,
    }  # fmt: skip
    print(sentences(found))
    if args.json:
        write_json(args.json, {"machine": info, **found})
    return 0
