"""Syncs over NCCL on the training thread, from attach() to the end: replicas are processes.

The library is csrc/tests/socket_nccl.cpp, which works on the CPU's memory, so the emulated build
runs these tests (test_emulated.py) and every other build skips them.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import test_faults
import torch
import torch.distributed as dist
from nets import layer_of, make_net, plain, same, sgd, train_step, values
from ranks import Ranks
from test_native import build
from test_trajectory import RULES, spoil
from torch import nn

import edit_ext
from edit_ext import _C

TIMEOUT = test_faults.TIMEOUT
LEFT_TO_THE_LIBRARY = -(2**31)

pytestmark = [
    pytest.mark.skipif(
        not _C.on_cuda(torch.zeros(1)), reason="runs in the emulated build, by test_emulated.py"
    ),
    pytest.mark.timeout(100),
]


@pytest.fixture(scope="module")
def nccl() -> str:
    """A library that is fit for use."""
    return library("socket_nccl")


def library(name: str) -> str:
    return str(build("plain", name) / f"lib{name}.so")


@pytest.fixture(scope="module")
def _pool() -> Iterator[Ranks]:
    """Processes of this module alone: what they have loaded stays loaded."""
    pool = Ranks()
    yield pool
    pool.close()


class Seen(ctypes.Structure):
    """What the library has seen in this process."""

    _fields_ = (
        ("max_ctas", ctypes.c_int),
        ("destroys", ctypes.c_int),
        ("aborts", ctypes.c_int),
    )


def load(path: str) -> Seen:
    """Load a library as torch would have: edit_ext finds what is there."""
    return Seen.in_dll(ctypes.CDLL(path), "socket_nccl_seen")


def meet(path: str) -> None:
    """Before jobs with a short timeout: a fresh process takes seconds to import all of torch."""
    load(path)
    sgd(make_net())
    dist.barrier()


def rank() -> int:
    return dist.get_rank()


def train(
    comm: str, rules: dict[str, Any], steps: int, stop: int | None = None, **options: Any
) -> dict[str, Any]:
    """One replica's training, perhaps stopped and resumed; its anchors, decisions and weights."""
    anchors, metrics, explained = [], [], ""
    saved: dict[str, Any] | None = None
    for first, last in ((0, stop or steps), (stop or steps, steps)):
        if first == last:
            break
        model = make_net()
        optimizer = sgd(model)
        config = edit_ext.EDiT(timeout=30.0, **rules)
        sync = edit_ext.attach(model, optimizer, config, comm=comm, **options)
        if saved is not None:
            model.load_state_dict(saved["model"])
            sync.load_state_dict(saved["sync"])
        explained = sync.explain()
        for t in range(first, last):
            seen = sync.sync_index
            train_step(model, optimizer, rank(), t)
            spoil(rank(), t + 1, model)
            if sync.sync_index != seen:
                anchors.append(sync.state_dict()["anchors"])
        saved = {"model": values(model), "sync": sync.state_dict()}
        if last == steps:
            sync.flush()
            anchors.append(sync.state_dict()["anchors"])
        metrics += sync.metrics()
        sync.detach()
    decided = [{k: v for k, v in m.items() if k in DECIDED} for m in metrics]
    return {
        "anchors": anchors,
        "decided": decided,
        "params": values(model),
        "explain": explained,
        "sent": sum(m["bytes_sent"] for m in metrics),
    }


DECIDED = (
    "step",
    "sync_index",
    "layer",
    "norms",
    "weights",
    "flags",
    "merged_norm",
    "clip",
    "skip",
)


def both(path: str, rules: dict[str, Any], stop: int | None) -> tuple[Any, Any, Any]:
    seen = load(path)
    before = seen.aborts, seen.destroys
    ours = train("nccl", rules, 14, stop)
    ends = seen.aborts - before[0], seen.destroys - before[1]
    return ours, train("c10d", rules, 14), ends


CASES: dict[str, tuple[int, dict[str, Any], int | None]] = {
    "prefetch": (2, {}, None),
    "three": (3, {}, None),
    "one-ahead": (3, {"prefetch": 1}, None),
    "blocking": (2, {"prefetch": 0, "weighting": "steps"}, None),
    "bf16-wire": (3, {"wire": "bf16"}, None),
    "model": (2, {"granularity": "model", "weighting": "uniform", "nesterov": False}, None),
    "warm-up": (2, {"warmup_steps": 4}, None),
    "resumed-in-a-window": (2, {}, 7),
    "resumed-at-its-end": (3, {}, 6),
}


@pytest.mark.parametrize("case", CASES)
def test_same_bits_as_over_gloo(ranks: Ranks, nccl: str, case: str) -> None:
    """Anchors, decisions and weights equal those of comm="c10d" in every bit; the end is orderly.

    Penalty and clip are on, and replica 1 goes astray once. What was stopped and resumed over NCCL
    equals what went through over Gloo.
    """
    world, rules, stop = CASES[case]
    results = ranks.run(world, both, nccl, {**RULES, "clip_norm": 0.05, **rules}, stop)
    for ours, theirs, (aborts, destroys) in results:
        assert ours["decided"] == theirs["decided"] and ours["decided"]
        assert same(ours["params"], theirs["params"])
        assert len(ours["anchors"]) == len(theirs["anchors"]) >= 4
        for left, right in zip(ours["anchors"], theirs["anchors"], strict=True):
            assert same(left, right)
        assert same(ours["params"], results[0][0]["params"])
        assert "transport: NCCL 2.27.7 on a side stream" in ours["explain"]
        assert "c10d" in theirs["explain"] and ours["sent"] > 0
        assert (aborts, destroys) == (0, 1 if stop is None else 2)
    decided = results[0][0]["decided"]
    if not rules.get("granularity"):
        assert {m["layer"] for m in decided} == {
            layer_of(n) for n, _ in make_net().named_parameters()
        }
        assert any(m["flags"][1] for m in decided) and any(m["clip"] < 1 for m in decided)


def chosen(path: str, max_ctas: int) -> tuple[str, int]:
    seen = load(path)
    model = make_net()
    with edit_ext.attach(model, sgd(model), plain(), max_ctas=max_ctas) as sync:
        return sync.explain(), seen.max_ctas


@pytest.mark.parametrize(("max_ctas", "arrives"), [(0, LEFT_TO_THE_LIBRARY), (5, 5)])
def test_short_library_is_torchs(ranks: Ranks, nccl: str, max_ctas: int, arrives: int) -> None:
    """Where all can, "auto" is NCCL, by the library that is loaded already; max_ctas gets there."""
    for text, seen in ranks.run(2, chosen, nccl, max_ctas):
        assert "transport: NCCL 2.27.7 on a side stream" in text and "Gloo" not in text
        assert seen == arrives


def train_large(path: str) -> list[float]:
    load(path)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2000, 1500), nn.Linear(1500, 3))
    optimizer = sgd(model)
    with edit_ext.attach(model, optimizer, plain(), comm="nccl") as sync:
        for t in range(4):
            model(torch.full((2, 2000), 0.01 * (rank() + 1) * (t + 1))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        sync.flush()
        return [float(p.double().sum()) for p in model.parameters()]


def test_messages_larger_than_a_socket(ranks: Ranks, nccl: str) -> None:
    """Megabytes in both directions of three pairs at once do not wait for each other."""
    first, *others = ranks.run(3, train_large, nccl)
    assert all(other == first for other in others)


def fault(path: str, name: str, *args: Any) -> Any:
    """A job of test_faults.py, where "auto" finds NCCL."""
    meet(path)
    return getattr(test_faults, name)(*args)


@pytest.mark.parametrize("during", [False, True])
def test_killed_rank(ranks: Ranks, nccl: str, during: bool) -> None:
    """A rank killed between syncs or in one: the other's error names rank, layer and sync."""
    survivor, dead = ranks.outcomes(2, fault, nccl, "killed", during, seconds=30)
    assert dead.exitcode == -signal.SIGKILL
    assert survivor.good, survivor.error
    text, seconds, cleaned = survivor.value
    assert "NCCL, replica group, rank 0 of 2" in text and "rank 1" in text, text
    assert re.search("layer .*, sync 1: " if during else "layer .*, sync [12]: ", text), text
    assert seconds < TIMEOUT + 5 and cleaned


def test_silent_rank(ranks: Ranks, nccl: str) -> None:
    """A rank that stops without dying is given up after the timeout, in the middle of a call."""
    survivor, _ = ranks.outcomes(2, fault, nccl, "stopped", seconds=30)
    assert survivor.good, survivor.error
    text, seconds, cleaned = survivor.value
    assert "replica 1 (rank 1) silent for" in text and cleaned
    assert "NCCL, replica group, rank 0 of 2" in text and "layer " in text, text
    assert TIMEOUT * 0.8 < seconds < TIMEOUT + 3


def test_slow_rank(ranks: Ranks, nccl: str) -> None:
    """A rank that needs longer for a step than the timeout is waited for."""
    assert len(ranks.run(2, fault, nccl, "slow", seconds=30)) == 2


def test_rank_that_raises(ranks: Ranks, nccl: str) -> None:
    """An exception on one rank ends the others at once, with its text."""
    survivor, culprit = ranks.run(2, fault, nccl, "raised", seconds=30)
    assert culprit[0] == "out of coffee"
    assert "out of coffee" in survivor[0] and "replica 1 (rank 1)" in survivor[0], survivor[0]
    assert re.search("layer .*, sync [12]: NCCL, ", survivor[0]), survivor[0]
    assert survivor[1] < TIMEOUT + 3


def test_rank_that_leaves(ranks: Ranks, nccl: str) -> None:
    """A rank that detaches alone is reported by those who need it for the next sync."""
    survivor, leaver = ranks.run(2, fault, nccl, "left", seconds=30)
    assert leaver[0] == "no error"
    assert "rank 1" in survivor[0] and "sync 2" in survivor[0], survivor[0]
    assert survivor[1] < TIMEOUT + 3


def test_come_and_go(ranks: Ranks, nccl: str) -> None:
    """Many attachments one after another, left at different moments: no connection error."""
    assert ranks.run(2, fault, nccl, "come_and_go", 10, seconds=60) == [10, 10]


def interrupted(path: str) -> tuple[float, str]:
    """Rank 0 waits in an exchange for rank 1, and its user presses Ctrl-C."""
    meet(path)
    model, optimizer, sync = test_faults.attached()
    for t in range(4):
        train_step(model, optimizer, rank(), t)
    said = ""
    if rank() == 0:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            sync.flush()
        waited = time.monotonic() - began
        said = test_faults.survive(sync.flush)[0]
        dist.barrier()
        sync.detach()
        return waited, said
    dist.barrier()
    return 0.5, test_faults.survive(sync.flush)[0]


def test_ctrl_c_in_an_exchange(ranks: Ranks, nccl: str) -> None:
    """KeyboardInterrupt comes through as such within a second; the broken group is then named."""
    (waited, said), (_, peer) = ranks.run(2, interrupted, nccl, seconds=30)
    assert 0.4 < waited < 1.5
    assert "failed before: " in said and "was interrupted" in said, said
    assert "sync 2" in peer and "rank 0" in peer, peer


def aborted_unread(path: str) -> str:
    """The group is aborted while a layer's result is there but has not been looked at."""
    load(path)
    weights = torch.ones(5)
    lane = _C.make_lane(weights, direct=True)
    ids: list[Any] = [_C.nccl_unique_id()]
    dist.broadcast_object_list(ids)
    comm = _C.make_nccl_comm(ids[0], rank(), 2, lane, 10.0)
    pool = _C.BufferPool(1)
    layer = _C.Layer("block", [weights], replica=comm, mesh=comm, lane=lane, pool=pool)
    policy = _C.Policy(**edit_ext.EDiT().recipe().policy)
    layer.begin(policy, sync_index=3, steps=1, done=False)
    layer.wait()
    dist.barrier()
    comm.abort("a peer is lost")
    with pytest.raises(RuntimeError) as caught:
        layer.stats()
    return str(caught.value)


def test_numbers_of_an_aborted_group_are_not_believed(ranks: Ranks, nccl: str) -> None:
    """An abort ends what is on the stream as if it were done: stats() raises, and says where."""
    for text in ranks.run(2, aborted_unread, nccl):
        assert text.startswith("layer block, sync 3: NCCL, replica group, rank "), text
        assert text.endswith("aborted: a peer is lost")


def absent_at_init(path: str) -> str:
    """Rank 1 dies when the communicator is made."""
    meet(path)
    if rank() == 1:
        edit_ext.transport._C.make_nccl_comm = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    return test_faults.survive(lambda: test_faults.attached(comm="nccl"))[0]


def test_rank_that_does_not_come_to_the_init(ranks: Ranks, nccl: str) -> None:
    """attach() ends after its timeout with a sentence, not in the library."""
    survivor, dead = ranks.outcomes(2, absent_at_init, nccl, seconds=30)
    assert dead.exitcode == -signal.SIGKILL and survivor.good, survivor.error
    text = "NCCL, replica group, rank 0 of 2: init timed out after 2 s; a peer is missing or stuck"
    assert text in survivor.value


def with_library(paths: list[str | None], comm: str) -> tuple[str, list[str]]:
    """explain() or the error of attach(), and what was logged, with one library for each rank."""
    path = paths[rank()]
    if path is not None:
        load(path)
    logged: list[str] = []
    logger, handler = logging.getLogger("edit_ext"), _Lines(logged)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    model = make_net()
    optimizer = sgd(model)
    try:
        with edit_ext.attach(model, optimizer, plain(), comm=comm) as sync:
            for t in range(3):
                train_step(model, optimizer, rank(), t)
            return sync.explain(), logged
    except ValueError as error:
        return f"ValueError: {error}", logged


class _Lines(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


BAD = {
    "absent": (None, "no NCCL library: libnccl_emulated.so: cannot open"),
    "too-old": ("socket_nccl_old", "is too old: 2.27 or newer is needed"),
    "incomplete": ("socket_nccl_without_send", "has no symbol ncclSend"),
}


@pytest.mark.parametrize("comm", ["nccl", "auto"])
@pytest.mark.parametrize("bad", BAD)
def test_library_that_cannot_be_used(nccl: str, bad: str, comm: str) -> None:
    """One rank's library is enough: all refuse at attach with its sentence, or all take Gloo."""
    name, why = BAD[bad]
    with contextlib.closing(Ranks()) as fresh:
        path = library(name) if name else None
        results = fresh.run(2, with_library, [nccl, path], comm, seconds=60)
    for text, logged in results:
        if comm == "nccl":
            assert text.startswith("ValueError: comm='nccl' cannot be used: "), text
            assert why in text and "\n" not in text
        else:
            assert "transport: a c10d group of its own (gloo): " in text and why in text, text
            assert any("syncs travel by a c10d group" in line and why in line for line in logged)
