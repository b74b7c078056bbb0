"""What each host of `net_check` runs: a payload goes once around the ring of hosts.

    net_transfer.py tcp|gloo BYTES ADDRESS...

Host 0 sends to host 1; when that has all of it, it sends to host 2, and so on back to host 0. One
transfer at a time, so that each has both links to itself. Prints the rate that this host has
received with, in bits of payload a second, from the first bytes on. Stands alone, because plain TCP
should not have to wait for torch.
"""

from __future__ import annotations

import os
import socket
import sys
import time

PORT = 5000  # of plain TCP
PIECE = 1 << 20  # bytes a call
PATIENCE = 60.0  # s, for a host to answer or be there


def over_tcp(rank: int, size: int, addresses: list[str]) -> float:
    with (
        socket.create_server((addresses[rank], PORT)) as server,
        _connection(addresses[(rank + 1) % len(addresses)]) as onward,
    ):
        server.settimeout(PATIENCE)
        inward, _ = server.accept()
        with inward:
            inward.settimeout(PATIENCE)
            if rank == 0:
                _send(onward, size)
            rate = _receive(inward, size)
            if rank != 0:
                _send(onward, size)
    return rate


def over_gloo(rank: int, size: int, addresses: list[str]) -> float:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE))
    world = len(addresses)
    first, payload = torch.zeros(1), torch.full((size,), rank, dtype=torch.uint8)
    received = torch.empty_like(payload)

    def send() -> None:
        for tensor in (first, payload):
            dist.send(tensor, (rank + 1) % world)

    if rank == 0:
        send()
    source = (rank - 1) % world
    dist.recv(first, source)
    began = time.monotonic()
    dist.recv(received, source)
    seconds = time.monotonic() - began
    if rank != 0:
        send()
    if not bool((received == source).all()):
        raise RuntimeError(f"rank {rank} received other bytes than rank {source} sent")
    dist.barrier()
    dist.destroy_process_group()
    return 8 * size / seconds


def _connection(address: str) -> socket.socket:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            return socket.create_connection((address, PORT), timeout=PATIENCE)
        except ConnectionRefusedError:  # not listening yet
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.02)


def _send(to: socket.socket, size: int) -> None:
    piece = memoryview(bytes(PIECE))
    for begin in range(0, size, PIECE):
        to.sendall(piece[: size - begin])


def _receive(source: socket.socket, size: int) -> float:
    buffer = bytearray(PIECE)
    first = got = source.recv_into(buffer)
    began = time.monotonic()
    while got < size:
        count = source.recv_into(buffer)
        if not count:
            raise RuntimeError(f"the connection ended after {got} of {size} bytes")
        got += count
    return 8 * (got - first) / (time.monotonic() - began)


if __name__ == "__main__":
    transfer = {"tcp": over_tcp, "gloo": over_gloo}[sys.argv[1]]
    print(transfer(int(os.environ["RANK"]), int(sys.argv[2]), sys.argv[3:]))
