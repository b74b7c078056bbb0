"""How the processes of a job find each other, in this life of the job.

torchrun keeps one store for all lives of a job, in which `init_process_group` would find addresses
of processes that are dead (pytorch/pytorch 135712). TORCHELASTIC_RESTART_COUNT does not tell lives
apart: it differs between machines, and a worker that joins leaves it as it is. So the ranks agree
on a name for this life first, and meet below it.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

POLL = 0.02  # s


def init_replicas(timeout: float) -> tuple[int, int]:
    """(rank, replicas) of this process; a single replica needs no process group.

    Raises RuntimeError when a rank does not come within `timeout` seconds.
    """
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return 0, 1
    span = timedelta(seconds=timeout)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group("gloo", timeout=span)
        return rank, world
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, world, is_master=False, timeout=span)
    life = agree_on_life(dist.PrefixStore("edit_ext", store), rank, world, timeout)
    below = dist.PrefixStore(f"edit_ext/{life}", store)
    dist.init_process_group("gloo", store=below, rank=rank, world_size=world, timeout=span)
    return rank, world


def agree_on_life(store: dist.Store, rank: int, world: int, timeout: float) -> str:
    """A name that all ranks of this life get and none of another, whatever these have left behind.

    Each rank asks with a word of its own, which rank 0 answers with the name; an answer to a word
    of an earlier life is read by nobody. Rank 0 goes on answering until all have thanked.
    """
    deadline = time.monotonic() + timeout
    if rank:
        word = uuid.uuid4().hex
        store.set(f"ask/{rank}", word)
        while not store.check([f"answer/{word}"]):
            _wait(deadline, "rank 0", timeout)
        life = store.get(f"answer/{word}").decode()
        store.set(f"thanks/{life}/{rank}", "")
        return life
    life = uuid.uuid4().hex
    missing = set(range(1, world))
    while missing:
        for other in sorted(missing):
            if store.check([f"ask/{other}"]):
                store.set(f"answer/{store.get(f'ask/{other}').decode()}", life)
        missing -= {other for other in missing if store.check([f"thanks/{life}/{other}"])}
        if missing:
            _wait(deadline, "rank " + ", ".join(map(str, sorted(missing))), timeout)
    return life


def _wait(deadline: float, who: str, timeout: float) -> None:
    if time.monotonic() > deadline:
        raise RuntimeError(f"waited {timeout:g} s in vain for {who} to start")
    time.sleep(POLL)
