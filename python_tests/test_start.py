"""Replicas that do not match: an error on every rank that names the first difference, at once."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import Net, make_net, plain, same, sgd, train_step, values
from ranks import Ranks
from torch import Tensor, nn

import edit_ext


def rank() -> int:
    return dist.get_rank()


def other_seed() -> None:
    """Same structure, other values."""
    torch.manual_seed(rank())
    model = Net()
    edit_ext.attach(model, sgd(model), plain())


def one_value() -> None:
    model = make_net()
    if rank() == 1:
        with torch.no_grad():
            model.head.bias[1] = torch.nextafter(model.head.bias[1], torch.tensor(9.0))
    edit_ext.attach(model, sgd(model), plain())


def buffer_value() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
        model[1].running_mean.fill_(float(rank()))
    edit_ext.attach(model, sgd(model), plain())


def other_shape() -> None:
    model = make_net()
    if rank() == 1:
        model.head = nn.Linear(7, 4)
    edit_ext.attach(model, sgd(model), plain())


def more_parameters() -> None:
    model = make_net()
    if rank() == 1:
        model.tail = nn.Linear(2, 2)
    edit_ext.attach(model, sgd(model), plain())


def other_dtype() -> None:
    model = make_net()
    if rank() == 1:
        model.stem.to(torch.bfloat16)
    edit_ext.attach(model, sgd(model), plain())


def other_strides() -> None:
    model = make_net()
    if rank() == 1:
        weight = model.stem.weight
        model.stem.weight = nn.Parameter(weight.detach().t().contiguous().t())
    edit_ext.attach(model, sgd(model), plain())


def frozen_here() -> None:
    model = make_net()
    model.head.requires_grad_(rank() == 0)
    edit_ext.attach(model, sgd(model), plain())


def other_config() -> None:
    model = make_net()
    config = dataclasses.replace(plain(), sync_every=2 + rank())
    edit_ext.attach(model, sgd(model), config)


def other_layers() -> None:
    model = make_net()
    edit_ext.attach(model, sgd(model), plain(), layers=["blocks"] if rank() == 1 else None)


def refused_there() -> None:
    model = make_net()
    if rank() == 1:
        model.double()
    edit_ext.attach(model, sgd(model), plain())


SAID: dict[Callable[[], None], list[str]] = {
    other_seed: ["values", "'stem.weight'", "replica 0 (rank 0) has", "replica 1 (rank 1) has"],
    one_value: ["values", "'head.bias'", "start='broadcast'"],
    buffer_value: ["values", "'1.running_mean'"],
    other_shape: ["model", "'head.weight'", "[3, 7]", "[4, 7]"],
    more_parameters: ["model", "None against 'tail.weight'", "nothing more"],
    other_dtype: ["model", "'stem.weight'", "float32", "bfloat16"],
    other_strides: ["model", "'stem.weight'", "strides [5, 1]", "strides [1, 7]"],
    frozen_here: ["model", "'head.weight'", "trainable", "frozen"],
    other_config: ["settings", "'sync_every'", "has 2", "has 3"],
    other_layers: ["layers", "'blocks.0' against 'blocks'"],
    refused_there: ["'scale' is torch.float64"],
}


def all_differences() -> dict[str, tuple[str, float]]:
    """What each of them raises, and after how many seconds; then an attach that works."""
    said = {}
    for job in SAID:
        began = time.monotonic()
        try:
            job()
        except Exception as error:
            said[job.__name__] = f"{type(error).__name__}: {error}", time.monotonic() - began
    model = make_net()
    optimizer = sgd(model)
    with edit_ext.attach(model, optimizer, plain()):
        for t in range(3):
            train_step(model, optimizer, rank(), t)
    return said


def test_difference_is_named(ranks: Ranks) -> None:
    """Every rank raises within seconds and says what differs and where; nothing is left behind."""
    first, second = ranks.run(2, all_differences)
    for job, words in SAID.items():
        for said, seconds in (first[job.__name__], second[job.__name__]):
            assert all(word in said for word in words), f"{job.__name__}: {said}"
            assert seconds < 10
        if job is not refused_there:
            assert first[job.__name__][0] == second[job.__name__][0]
    assert first["refused_there"][0].startswith("RuntimeError: attach was refused on replica 1")
    assert second["refused_there"][0].startswith("TypeError: parameter 'scale'")


def broadcast() -> dict[str, Tensor]:
    torch.manual_seed(rank())
    model = Net()
    model.stem.weight = nn.Parameter(model.stem.weight.detach().t().contiguous().t())
    model.register_buffer("count", torch.tensor(rank()))
    edit_ext.attach(model, sgd(model), plain(), start="broadcast")
    return {**values(model), "count": model.count}


def zero_steps() -> list[float]:
    model = make_net()
    sync = edit_ext.attach(model, sgd(model), plain())
    before = values(model)
    sync.flush()
    assert same(before, values(model))
    return [norm for entry in sync.metrics() for norm in entry["norms"]]


def test_row_02_start_up(ranks: Ranks) -> None:
    """Other seeds: an error, or replica 0's values everywhere; a sync without steps is zero."""
    first, *others = ranks.run(3, broadcast)
    assert all(same(first, other) for other in others) and first["count"] == 0
    assert set(ranks.run(2, zero_steps)[0]) == {0.0}
    for outcome in ranks.outcomes(3, other_seed, seconds=30):
        assert outcome.error is not None and "replicas differ in their values" in outcome.error


def missing_peer() -> str:
    """Rank 1 never attaches."""
    if rank() == 1:
        dist.barrier()
        return ""
    model = make_net()
    try:
        edit_ext.attach(model, sgd(model), plain(timeout=1.0))
    except RuntimeError as error:
        dist.barrier()
        return str(error)
    return "no error"


def test_peer_that_never_attaches(ranks: Ranks) -> None:
    """attach gives up after the timeout and names who is missing."""
    said, _ = ranks.run(2, missing_peer, seconds=20)
    assert "waited 1 s in vain for replica 1 (rank 1)" in said


def refused(what: str) -> str:
    """Rank 1 calls attach with something that rank 0 does not."""
    odd = rank() == 1
    model: Any = make_net()
    options: dict[str, Any] = {}
    if what == "mesh":
        options = {"mesh": object()} if odd else {}
    elif what == "comm":
        options = {"comm": "c10d" if odd else "auto"}
    elif what == "max_ctas":
        options = {"max_ctas": 4 if odd else 0}
    optimizer = sgd(model)
    began = time.monotonic()
    try:
        edit_ext.attach(model if what != "model" or not odd else 3, optimizer, plain(), **options)
    except (RuntimeError, TypeError, ValueError) as error:
        assert time.monotonic() - began < 10  # the timeout is 20 s
        return str(error)
    return "attached"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("mesh", "mesh must be a DeviceMesh, not object"),
        ("model", "model must be a torch.nn.Module, not int"),
        ("comm", "replicas differ in their settings: 'comm'"),
        ("max_ctas", "replicas differ in their settings: 'max_ctas'"),
    ],
)
def test_one_rank_that_refuses_is_heard(ranks: Ranks, what: str, words: str) -> None:
    """Both ranks raise the reason at once; nobody waits for the timeout."""
    for said in ranks.run(2, refused, what, seconds=30):
        assert words in said


def subgroup() -> tuple[int, int, dict[str, Tensor]]:
    """Ranks 0 and 2 of three train together, rank 1 by itself in a group of one."""
    pair = dist.new_group([0, 2])
    alone = dist.new_group([1])
    model = make_net()
    optimizer = sgd(model)
    group = alone if rank() == 1 else pair
    with edit_ext.attach(model, optimizer, plain(), group=group) as sync:
        for t in range(5):
            train_step(model, optimizer, rank(), t)
        place = sync.data_rank, sync.data_world
    return *place, values(model)


def test_groups(ranks: Ranks) -> None:
    """A group of some ranks works, so does a group of one inside a bigger world."""
    first, lone, last = ranks.run(3, subgroup)
    assert (first[:2], lone[:2], last[:2]) == ((0, 2), (0, 1), (1, 2))
    assert same(first[2], last[2]) and not same(first[2], lone[2])


def outside() -> None:
    group = dist.new_group([0])
    model = make_net()
    edit_ext.attach(model, sgd(model), plain(), group=group)


def test_rank_outside_its_group(ranks: Ranks) -> None:
    """A rank that passes a group it does not belong to is told so."""
    inside, out = ranks.outcomes(2, outside, seconds=20)
    assert inside.good and out.error is not None
    assert "group= must" in out.error
