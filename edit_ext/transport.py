"""What carries a sync between replicas: NCCL on a side stream, or a c10d group of the host."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from . import _C
from .comm import RankGroup
from .mesh import ReplicaMesh

KINDS = ("auto", "nccl", "c10d")
log = logging.getLogger("edit_ext")


@dataclass(frozen=True)
class Link:
    """What attach() was asked for: its arguments `comm`, `max_ctas` and `comm_wrapper`."""

    kind: str = "auto"
    max_ctas: int = 0
    wrap: Callable[[_C.Comm], _C.Comm] | None = None


@dataclass
class Carriers:
    """The communicators of this rank's groups in the mesh; None is a group of one."""

    replica: _C.Comm | None
    shard: _C.Comm | None
    all: _C.Comm | None

    @property
    def each(self) -> list[_C.Comm]:
        """Every communicator once."""
        three = (self.replica, self.shard, self.all)
        return list({id(comm): comm for comm in three if comm is not None}.values())

    @property
    def bytes_sent(self) -> int:
        """What this rank has sent over them."""
        return sum(comm.bytes_sent for comm in self.each)


def check_kind(kind: str, max_ctas: int = 0) -> None:
    """Raise ValueError for an unknown transport or a number of SMs that cannot be."""
    if not isinstance(max_ctas, int) or isinstance(max_ctas, bool) or not 0 <= max_ctas <= 64:
        raise ValueError(f"max_ctas must be a whole number from 0 to 64, but is {max_ctas!r}")
    if kind not in KINDS:
        raise ValueError(f"comm must be one of {', '.join(map(repr, KINDS))}, but is {kind!r}")


def choose(group: RankGroup, kind: str, like: torch.Tensor, max_ctas: int = 0) -> tuple[bool, str]:
    """Whether NCCL carries the syncs of parameters where `like` is, and why. Collective.

    All ranks come to the same choice. Raises ValueError on every rank when comm="nccl" cannot be,
    or when max_ctas would have no effect.
    """
    # A rank alone does not load the library to say that it needs none.
    obstacle = _obstacle(kind, like) if group.size > 1 or kind == "nccl" else ""
    if group.size == 1:
        chosen = False, "one rank: nothing is sent"
    else:
        said = group.gather_text(f"{obstacle}\n{_place(like)}", "the choice of a transport")
        obstacles, places = zip(*(text.split("\n") for text in said), strict=True)
        first = next((o for o in obstacles if o), "")
        if not first and len(set(places)) < len(places):
            place = next(p for p in places if places.count(p) > 1)
            who = " and ".join(group.name(i) for i, p in enumerate(places) if p == place)
            first = f"{who} share the GPU {place}, which NCCL refuses"
        chosen = not first, first or f"NCCL {_versions()} on a side stream"
        obstacle = first
    if kind == "nccl" and obstacle:
        raise ValueError(f"comm='nccl' cannot be used: {obstacle}")
    if max_ctas and not chosen[0]:
        raise ValueError(f"max_ctas={max_ctas} has no effect without NCCL: {chosen[1]}")
    if group.size > 1 and not chosen[0]:
        staged = ", staged in pinned memory" if like.device.type == "cuda" else ""
        chosen = False, f"a c10d group of its own (gloo){staged}: {chosen[1]}"
    log.info("edit_ext: syncs travel by %s", chosen[1])
    return chosen


def carriers_for(
    mesh: ReplicaMesh,
    direct: bool,
    lane: _C.Lane,
    timeout: float,
    max_ctas: int,
    wrap: Callable[[_C.Comm], _C.Comm] | None,
) -> Carriers:
    """The communicators of the choice. Collective. wrap: see attach()."""
    made: dict[int, _C.Comm | None] = {}
    for group in mesh.groups:
        made[id(group)] = _comm(group, direct, lane, timeout, max_ctas)
    replica = made[id(mesh.replica)]
    if wrap is not None and replica is not None:
        made[id(mesh.replica)] = wrap(replica)
    return Carriers(made[id(mesh.replica)], made[id(mesh.shard)], made[id(mesh.all)])


def _comm(
    group: RankGroup, direct: bool, lane: _C.Lane, timeout: float, max_ctas: int
) -> _C.Comm | None:
    if not direct or group.size == 1:
        return group.comm()
    mine = _C.nccl_unique_id().hex() if group.rank == 0 else ""
    first = group.gather_text(mine, "the id of an NCCL group")[0]
    check = group.heartbeat.check if group.heartbeat is not None else None
    return _C.make_nccl_comm(
        bytes.fromhex(first), group.rank, group.size, lane, timeout, max_ctas, group.title, check
    )


def _obstacle(kind: str, like: torch.Tensor) -> str:
    """Why this rank cannot use NCCL, in one line; empty if it can."""
    if kind == "c10d":
        return "comm='c10d' was asked for"
    if not _C.on_cuda(like):
        return f"the parameters are on {like.device}"
    try:
        _C.nccl_version()
    except RuntimeError as error:
        return str(error).replace("\n", " ")
    return ""


def _versions() -> str:
    """The version of our NCCL, and of torch's where that is another library."""
    ours = _C.nccl_version()
    if not (dist.is_available() and dist.is_nccl_available()):
        return ours
    theirs = ".".join(map(str, torch.cuda.nccl.version()[:3]))
    return ours if ours == theirs else f"{ours} (torch itself uses {theirs})"


def _place(like: torch.Tensor) -> str:
    """A name of the device that no other device has; the CPU's memory is one for each process."""
    if like.device.type != "cuda":
        return f"{like.device} {os.getpid()} of {socket.gethostname()}"
    uuid = torch.cuda.get_device_properties(like.device).uuid
    return f"{uuid} of {socket.gethostname()}"
