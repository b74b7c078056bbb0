"""Our own groups of ranks, and watched collectives on them."""

from __future__ import annotations

import ctypes
import os
import socket
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from . import _C
from .heartbeat import Heartbeat

# The heartbeat decides when a peer is lost; the operations themselves wait for a slow one.
PATIENCE = timedelta(days=365)
GRACE = 1.0  # seconds for what a peer has sent before it left or failed


class RankGroup:
    """Some ranks on Gloo groups that nobody else uses.

    A group shared with other code would see calls in an order that differs between ranks. A group
    of one has no process group at all and every method returns at once.

    title: what it is called in messages, as "replica group". ranks: the members' global ranks;
    rank: this rank's index among them; names: how messages call them. prefix: what no other attach
    puts before the names of its groups, equal on all members.
    bytes_sent: what the collectives of this class have sent from this rank, as a ring would.
    broken: a collective has not been completed, so the groups cannot be used any more.
    """

    def __init__(
        self,
        title: str,
        ranks: list[int],
        rank: int,
        names: list[str],
        heartbeat: Heartbeat | None,
        timeout: float,
        prefix: str,
    ) -> None:
        self.title, self.ranks, self.rank, self.size = title, ranks, rank, len(ranks)
        self.bytes_sent = 0
        self.broken = False
        self.heartbeat = heartbeat
        self.groups: list[dist.ProcessGroup] = []
        self._names = names
        if self.size == 1:
            return
        patience = timedelta(seconds=max(timeout, 1.0))
        for purpose in ("payload", "scalars"):
            name = f"{prefix}/{purpose}/{'-'.join(map(str, ranks))}"
            try:
                group = _new_group(ranks, rank, name, patience)
            except (RuntimeError, ValueError) as error:
                raise RuntimeError(
                    f"the {title} of ranks {ranks} cannot be made: {error}. {gloo_address()}"
                ) from error
            distributed_c10d._set_pg_timeout(PATIENCE, group)
            self.groups.append(group)

    def comm(self) -> _C.Comm | None:
        """The C++ communicator over these groups; None for a group of one."""
        if self.size == 1:
            return None
        return _C.C10dComm(self.groups[0].group_name, self.groups[1].group_name, self._names)

    def name(self, member: int) -> str:
        """How messages call a member."""
        return self._names[member]

    def gather(self, values: list[int], what: str) -> list[list[int]]:
        """All members' lists of signed 64-bit integers, of one length, by member."""
        mine = torch.tensor(values, dtype=torch.int64)
        return [part.tolist() for part in self._gather(mine, what)]

    def gather_tensor(self, mine: Tensor, what: str) -> list[Tensor]:
        """All members' tensors of the host, of one shape and dtype, by member."""
        return self._gather(mine, what)

    def gather_text(self, text: str, what: str) -> list[str]:
        """All members' texts, of any length, by member."""
        raw = text.encode()
        lengths = [row[0] for row in self.gather([len(raw)], what)]
        mine = torch.zeros(max(*lengths, 1), dtype=torch.uint8)
        if raw:
            mine[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        parts = self._gather(mine, what)
        return [
            bytes(part[:length].tolist()).decode()
            for part, length in zip(parts, lengths, strict=True)
        ]

    def broadcast(self, tensor: Tensor, what: str, source: int = 0) -> None:
        """Overwrite `tensor` (contiguous) with that of member `source`."""
        if self.size == 1 or tensor.numel() == 0:
            return
        work = dist.broadcast(
            _bytes_of(tensor), self.ranks[source], group=self.groups[0], async_op=True
        )
        self.finish(work, what)
        if self.rank == source:
            self.bytes_sent += tensor.numel() * tensor.element_size()

    def start_sum(self, flat: Tensor) -> Any:
        """Begin to sum a flat tensor of the host, a few numbers, over the members in place; the
        work to `finish`."""
        self.bytes_sent += 2 * (self.size - 1) * flat.numel() * flat.element_size() // self.size
        return dist.all_reduce(flat, group=self.groups[1], async_op=True)

    def start_broadcast(self, flat: Tensor) -> Any:
        """Begin to overwrite a flat tensor of the host, a few numbers, with that of member 0; the
        work to `finish`."""
        if self.rank == 0:
            self.bytes_sent += flat.numel() * flat.element_size()
        return dist.broadcast(flat, self.ranks[0], group=self.groups[1], async_op=True)

    def finish(self, work: Any, what: str) -> None:
        """Wait for a collective while the peers live; Ctrl-C is seen within milliseconds.

        Raises RuntimeError naming `what` and the peer or the connection that failed.
        """
        pause = 5e-5
        left_at: float | None = None
        try:
            while not work.is_completed():
                if self.heartbeat is not None:
                    departed = self.heartbeat.departed()
                    if departed is not None or self.heartbeat.failure is not None:
                        # What it sent before may still be under way: an error that all ranks find
                        # in what they gather is to be the same on all of them.
                        left_at = left_at or time.monotonic()
                        if time.monotonic() - left_at > GRACE:
                            self.heartbeat.check()
                            raise RuntimeError(f"{departed}, but this rank still waits for it")
                time.sleep(pause)
                pause = min(pause * 1.5, 2e-3)
            work.wait()
        except BaseException as error:
            self.broken = True
            if not isinstance(error, RuntimeError):
                raise
            said = str(error).split(". This is typically caused by")[0]  # Gloo's guess
            reason = self.why() or f"the {self.title} of ranks {self.ranks}: {said}"
            raise RuntimeError(f"{what}: {reason}") from error

    def why(self) -> str | None:
        """What the peers say about a failure that this rank has seen, if they say anything."""
        return self.heartbeat.look() if self.heartbeat is not None else None

    def close(self, *, clean: bool = True) -> None:
        """Leave the groups. `clean` says that C++ has no operation open on them.

        A Gloo group with an open operation would block until its peer is gone, at interpreter exit
        too, so such a group is kept alive on purpose.
        """
        groups, self.groups = self.groups, []
        for group in groups:
            if self.broken or not clean:
                keep_for_ever(group)
            elif dist.is_initialized() and group in distributed_c10d._world.pg_map:
                dist.destroy_process_group(group)

    def _gather(self, mine: Tensor, what: str) -> list[Tensor]:
        if self.size == 1:
            return [mine]
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        work = dist.all_gather(parts, mine, group=self.groups[1], async_op=True)
        self.finish(work, what)
        self.bytes_sent += (self.size - 1) * mine.numel() * mine.element_size()
        return parts


def gloo_address() -> str:
    """In a sentence: where Gloo listens, and the variable that says where."""
    name = os.environ.get("GLOO_SOCKET_IFNAME")
    if name:
        return (
            f"Gloo listens at the interface that GLOO_SOCKET_IFNAME={name!r} names; several are "
            "separated by commas, and NCCL's ^ and = are not known to it"
        )
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
    except OSError as error:
        address = f"none ({error})"
    return (
        f"Gloo listens at the address of this host's name {host!r}, {address}; if other machines "
        "do not reach that, set GLOO_SOCKET_IFNAME to the interface that they reach"
    )


def keep_for_ever(thing: object) -> None:
    """Take a reference that nothing gives back, so that `thing` is not destroyed at exit either."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _new_group(ranks: list[int], rank: int, name: str, patience: timedelta) -> dist.ProcessGroup:
    """As dist.new_group(use_local_synchronization=True), under a name of ours.

    That takes its name from the number of groups that this rank is in: ranks with different numbers
    would wait for each other in vain, and a group made after another one was destroyed would find
    its addresses in the store.
    """
    group: dist.ProcessGroup
    group, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        rank,
        ranks,
        "gloo",
        distributed_c10d._get_default_store(),
        group_name=name,  # type: ignore[arg-type]
        timeout=patience,
        group_desc=name,
    )
    distributed_c10d._world.pg_group_ranks[group] = {r: i for i, r in enumerate(ranks)}
    return group


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)
