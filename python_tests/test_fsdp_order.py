"""When layers are waited for in a forward of FSDP2, from the profiler's trace of one step."""

from __future__ import annotations

import itertools
from typing import Any

import nets
import shards
import torch
from ranks import Ranks

import edit_ext

MODULES = ("stem", "blocks.0", "blocks.1", "blocks.2", "head")


def trace() -> list[tuple[str, float, float]]:
    """(name, begin, end) of the ranges in the forward of a sync, by begin."""
    mesh = shards.mesh_of(2, 2)
    model = shards.shard(shards.make_net(), mesh)
    optimizer = nets.sgd(model)
    for name in MODULES:

        def mark(module: Any, args: Any, name: str = name) -> None:
            with torch.profiler.record_function(f"turn of {name}"):
                pass

        model.get_submodule(name).register_forward_pre_hook(mark)
    with edit_ext.attach(model, optimizer, nets.plain(sync_every=2), mesh=mesh) as sync:
        for t in range(4):
            shards.train_step(model, optimizer, mesh, t)
        before = sync.sync_index
        with torch.profiler.profile() as profile:
            loss = nets.loss(model, shards.batch_of(mesh, 4))
        assert sync.sync_index == before + 1
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [
        (e.name, e.time_range.start, e.time_range.end)
        for e in profile.events()
        if e.name.startswith(("edit_ext::", "FSDP::", "turn of"))
    ]
    return sorted(found, key=lambda event: event[1])


def test_waits_come_before_the_gather_and_not_before_their_turn(ranks: Ranks) -> None:
    """On every rank: a module has run before the next one's layer is waited for, and that layer is
    written before FSDP2 gathers it. test_fsdp_gather.py has the values."""
    for events in ranks.run(4, trace):
        first: dict[str, tuple[float, float]] = {}
        for name, begin, end in events:
            first.setdefault(name, (begin, end))
        for before, module in itertools.pairwise(MODULES):
            turn = first[f"turn of {before}"][1]
            wait = first[f"edit_ext::{module}::wait"]
            written = first[f"edit_ext::{module}::write_back"]
            gather = first[f"FSDP::all_gather ({module})"]
            assert turn <= wait[0] <= wait[1] <= written[0], (module, events)
            assert written[1] <= gather[0] <= first[f"turn of {module}"][0], (module, events)
        root = first["edit_ext::(root)::write_back"][1]
        assert root <= first["FSDP::all_gather"][0] <= first["turn of stem"][0]
