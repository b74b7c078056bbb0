"""The mesh of replicas and shards: which of our groups of ranks this rank belongs to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch.distributed import distributed_c10d

from .comm import RankGroup
from .heartbeat import Heartbeat
from .seats import Grid, find_grid, refuse


class ReplicaMesh:
    """R replicas of S ranks each, and this rank's groups in it.

    replica: the ranks that hold the same shard in all replicas, what outer syncs cross; shard: the
    ranks of this replica; all: everybody, replica after replica, to agree on things. Where two of
    them have the same members they are one object.

    replica_ranks: global ranks of the replica group; shard_ranks: of this replica, None for this
    rank alone; problem: why they are not known, for the peers to hear.
    """

    def __init__(
        self,
        replica_ranks: list[int],
        shard_ranks: list[int] | None,
        problem: str | None,
        timeout: float,
        on_failure: Callable[[str], None],
    ) -> None:
        self.heartbeat: Heartbeat | None = None
        self.run = ""  # of this attach alone, the same on all its ranks
        rank = dist.get_rank() if _initialised() else 0
        shard_ranks = shard_ranks or [rank]
        grid = Grid([[rank]], 0, 0, "")
        if problem is not None and len(replica_ranks) == 1:
            raise RuntimeError(f"attach was refused on rank {rank}: {problem}")
        if len(replica_ranks) > 1 or len(shard_ranks) > 1:
            store = distributed_c10d._get_default_store()
            grid = find_grid(store, rank, replica_ranks, shard_ranks, problem, timeout)
            self.run = grid.prefix
            everybody = [other for row in grid.ranks for other in row]
            place = everybody.index(rank)
            self.heartbeat = Heartbeat(store, grid.prefix, place, grid.names, timeout, on_failure)
            self.heartbeat.arrive()

        def group_of(title: str, seats: list[tuple[int, int]]) -> RankGroup:
            ranks = [grid.ranks[r][s] for r, s in seats]
            names = [grid.name(r, s) for r, s in seats]
            own = seats.index((grid.replica, grid.shard))
            return RankGroup(title, ranks, own, names, self.heartbeat, timeout, grid.prefix)

        replicas, shards = range(len(grid.ranks)), range(len(grid.ranks[0]))
        try:
            self.replica = group_of("replica group", [(r, grid.shard) for r in replicas])
            self.shard = group_of("shard group", [(grid.replica, s) for s in shards])
            self.all = self.replica if len(shards) == 1 else self.shard
            if len(shards) > 1 and len(replicas) > 1:
                self.all = group_of("mesh", [(r, s) for r in replicas for s in shards])
        except Exception as error:
            if self.heartbeat is not None:
                self.heartbeat.say_failed(f"attach: {error}")
            raise
        if self.heartbeat is not None:
            self.heartbeat.start()

    @property
    def groups(self) -> list[RankGroup]:
        """Each group once."""
        return list({id(g): g for g in (self.replica, self.shard, self.all)}.values())

    @property
    def bytes_sent(self) -> int:
        """What the collectives of the groups have sent from this rank."""
        return sum(group.bytes_sent for group in self.groups)

    @property
    def broken(self) -> bool:
        """Whether a collective has not been completed."""
        return any(group.broken for group in self.groups)

    def why(self) -> str | None:
        """What the peers say about a failure that this rank has seen, if they say anything."""
        return self.heartbeat.look() if self.heartbeat is not None else None

    def close(self, *, clean: bool = True) -> None:
        """Leave the groups; see `RankGroup.close`."""
        if self.heartbeat is not None:
            self.heartbeat.stop()
        clean = clean and not self.broken
        for group in self.groups:
            group.close(clean=clean)


Members = dist.ProcessGroup | Sequence[int]


def replica_ranks(group: Members | None) -> list[int]:
    """Global ranks of a replica group; None: all ranks, or this process alone without torch's
    process groups. Raises ValueError when this rank is not in it."""
    if not _initialised():
        if group is not None:
            raise ValueError("group= was given, but torch.distributed is not initialised")
        return [0]
    if group is None:
        return list(range(dist.get_world_size()))
    if isinstance(group, dist.ProcessGroup):
        return dist.get_process_group_ranks(group)
    wrong, rank = why_no_group(group), dist.get_rank()
    if wrong or left_out(group) or rank not in group:
        wrong = wrong or f"contain rank {rank}"
        raise ValueError(f"group= must {wrong}; it is {group!r}")
    return list(group)


def why_no_group(group: object) -> str | None:
    """What neither a process group nor a list of ranks is: what it must do, to follow "must"."""
    if group is None or isinstance(group, dist.ProcessGroup) or left_out(group):
        return None
    if not isinstance(group, Sequence) or not all(type(rank) is int for rank in group):
        return "be a process group that contains this rank, or a list of ranks"
    world = dist.get_world_size() if _initialised() else 1
    if not group or len(set(group)) < len(group) or min(group) < 0 or max(group) >= world:
        return f"list one rank or more, each once, of 0 to {world - 1}"
    return None


def left_out(group: object) -> bool:
    """Whether this is what dist.new_group gives a rank that is not in the new group."""
    return bool(group == dist.GroupMember.NON_GROUP_MEMBER)


def stay_away(reason: str) -> None:
    """Tell the ranks that may wait for this one that it does not come to this attach."""
    if _initialised():
        refuse(distributed_c10d._get_default_store(), dist.get_rank(), reason)


def _initialised() -> bool:
    return dist.is_available() and dist.is_initialized()
