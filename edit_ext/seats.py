"""Who sits where: the grid of replicas and shards around this rank, found through the store."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist


@dataclass(frozen=True)
class Grid:
    """R replicas of S shards each.

    ranks: [R][S] global ranks; replica, shard: where this rank sits; prefix: of store keys that
    only this attach uses, the same on all its ranks.
    """

    ranks: list[list[int]]
    replica: int
    shard: int
    prefix: str

    def name(self, replica: int, shard: int) -> str:
        """How messages call a rank."""
        where = f"replica {replica}"
        if len(self.ranks[0]) > 1:
            where += f", shard {shard}"
        return f"{where} (rank {self.ranks[replica][shard]})"

    @property
    def names(self) -> list[str]:
        """Of all ranks, replica after replica."""
        return [self.name(r, s) for r, row in enumerate(self.ranks) for s in range(len(row))]


class _NotMet(RuntimeError):
    """Some ranks did not come, or not with these lists."""


def find_grid(
    store: dist.Store,
    rank: int,
    replica_ranks: Sequence[int],
    shard_ranks: Sequence[int],
    problem: str | None,
    timeout: float,
) -> Grid:
    """Meet all ranks that are in some group with this one, directly or through others.

    replica_ranks, shard_ranks: global ranks of this rank's two groups. problem: why this rank could
    not tell them, for its peers to hear.

    Raises RuntimeError after `timeout` seconds naming the ranks that did not come, or with a peer's
    problem, and ValueError when the groups form no grid; the same on every rank.
    """
    mine: dict[str, Any] = {"problem": problem}
    for kind, members in (("replica", replica_ranks), ("shard", shard_ranks)):
        place = _place(kind, members)
        mine[kind] = list(members)
        mine[f"{kind} prefix"] = f"{place}/{store.add(f'{place}/attaches/{rank}', 1)}"
    for kind in ("replica", "shard"):
        store.set(f"{mine[f'{kind} prefix']}/seat/{rank}", json.dumps(mine))
    try:
        seats = _meet(store, rank, mine, timeout)
    except _NotMet as error:
        # As if this attach had not been: ranks that came with other lists, or did not come, have
        # not counted it either, and the next one with the right lists has to find them in step.
        for kind in ("replica", "shard"):
            store.set(f"{mine[f'{kind} prefix']}/seat/{rank}", json.dumps(None))
            store.add(f"{mine[f'{kind} prefix'].rpartition('/')[0]}/attaches/{rank}", -1)
        raise RuntimeError(str(error)) from None
    _check(seats)
    table = [list(seats[other]["shard"]) for other in mine["replica"]]
    first = seats[table[0][0]]
    return Grid(
        table, mine["replica"].index(rank), mine["shard"].index(rank), first["replica prefix"]
    )


def _meet(
    store: dist.Store, rank: int, mine: dict[str, Any], timeout: float
) -> dict[int, dict[str, Any]]:
    attempt = store.add(_attempts(rank), 1)
    seats: dict[int, dict[str, Any]] = {}
    keys: dict[int, str] = {}  # ranks known and not read yet

    def read(who: int, seat: dict[str, Any]) -> None:
        seats[who] = seat
        keys.pop(who, None)
        for kind in ("replica", "shard"):
            for other in seat[kind]:
                if other not in seats:
                    keys.setdefault(other, f"{seat[f'{kind} prefix']}/seat/{other}")

    read(rank, mine)
    deadline = time.monotonic() + timeout
    while keys:
        found = [(who, key) for who, key in keys.items() if store.check([key])]
        told = [(who, json.loads(store.get(key))) for who, key in found]
        here = [(who, seat) for who, seat in told if seat is not None]
        for who, seat in here:
            read(who, seat)
        if keys and not here:
            for who in keys:
                refused = f"{_attempts(who)}/refused/{attempt}"
                if store.check([refused]):
                    reason = store.get(refused).decode()
                    raise _NotMet(f"attach was refused on rank {who}: {reason}")
            if time.monotonic() > deadline:
                alone = all(len(seat["shard"]) == 1 for seat in seats.values())
                said = [
                    f"replica {mine['replica'].index(who)} (rank {who})" if alone else f"rank {who}"
                    for who in sorted(keys)
                ]
                raise _NotMet(
                    f"attach on rank {rank} waited {timeout:g} s in vain for {', '.join(said)}: "
                    "every rank of the group must call attach, or resize, with the same ranks."
                )
            time.sleep(0.01)
    for who in sorted(seats):
        if seats[who]["problem"] is not None:
            raise RuntimeError(f"attach was refused on rank {who}: {seats[who]['problem']}")
    return seats


def _check(seats: dict[int, dict[str, Any]]) -> None:
    for who in sorted(seats):
        replica, shard = seats[who]["replica"], seats[who]["shard"]
        place = (replica.index(who), shard.index(who))
        for other in replica:
            there = seats[other]["shard"]
            if len(there) != len(shard) or there.index(other) != place[1]:
                raise ValueError(
                    f"replicas do not match: rank {who} holds shard {place[1]} of {len(shard)} "
                    f"and rank {other} of its replica group {replica} shard {there.index(other)} "
                    f"of {len(there)}; the replica group must join ranks that hold the same shard"
                )
        for other in shard:
            there = seats[other]["replica"]
            if len(there) != len(replica) or there.index(other) != place[0]:
                raise ValueError(
                    f"replica groups do not match: the ranks {shard} hold one replica, but rank "
                    f"{who} has the replica group {replica} and rank {other} has {there}"
                )


def refuse(store: dist.Store, rank: int, reason: str) -> None:
    """Tell those who wait for this rank that it does not come to this attach. They hear it if they
    have called attach as often as this rank has."""
    attempt = store.add(_attempts(rank), 1)
    store.set(f"{_attempts(rank)}/refused/{attempt}", reason)


def _attempts(rank: int) -> str:
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"edit_ext/attempts/{rank}/{life}"


def _place(kind: str, members: Sequence[int]) -> str:
    """Store keys of these ranks in this life of the job."""
    digest = hashlib.sha256(repr(list(members)).encode()).hexdigest()[:16]
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"edit_ext/{kind}/{digest}/{life}"
