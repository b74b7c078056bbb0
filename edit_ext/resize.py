"""A run that goes on in the same processes with other replicas: some leave, some die, some join.

`leave` takes what a rank has out of the old group, `rejoin` and `take_over` bring it into the new
one. All numbers there come from one replica, the *source*: the first of those that are furthest on.
When every rank of the old group takes part, the outer momentum is gathered first and all of it goes
on. After a failure each survivor brings what it holds; of a layer whose sync was broken off, each
piece of the anchor comes from the replica that owned it, and so fits its momentum.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import _C, momentum, optimizer_state
from .connect import connect, peers
from .engine import Engine
from .layer import clean
from .mesh import Members
from .metrics import Metrics
from .reference import padded
from .start import broadcast_into, tensors_of

PATIENCE = 10.0  # seconds for an exchange to end after its group was aborted


@dataclass
class Carried:
    """What one rank brings from the old group to the new one."""

    about: dict[str, Any]
    """Plain values that all ranks of the new group hear; see `_about`."""
    anchors: list[Tensor]
    """[size] fp32 for each layer of parameters."""
    momenta: list[Tensor]
    """All of it, or the piece that this replica owned; empty where there is none."""
    detectors: list[Tensor]
    metrics: Metrics
    bytes_sent: int


def leave(engine: Engine, refusal: str) -> Carried:
    """Leave the old group with everything. Collective over it, unless it has failed.

    refusal: why this rank cannot, for all to hear; empty if it can.

    Raises RuntimeError on every rank when one of them cannot leave now, and when not all come.
    """
    if engine.swapped:
        refusal = "inside anchor_weights(): leave the context first"
    elif engine.syncs.active and engine.error is None:
        refusal = "while a sync is in progress; call it after optimizer.step()"
    elif engine.syncs.in_flight and engine.error is None:
        refusal = (
            f"while {engine.config.name} has an exchange in flight whose result is due later; call "
            "flush() before"
        )
    if engine.error is not None and refusal:
        raise RuntimeError(f"resize() was refused: {refusal}")
    together = engine.error is None and _all_come(engine, refusal)
    layers = engine.held.anchored()
    if together:
        with engine.watched():
            engine.syncs.settle()
            engine.held.refresh()
            if engine.alarm is not None:
                engine.alarm.settle()
            group = engine.mesh.replica
            momenta = [momentum.gather(layer, group, "resize") for layer in layers]
        engine.close()
    else:
        engine.broken_off(RuntimeError("a peer is gone, and resize() goes on without it"))
        engine.close()
        if not engine.lane.close(PATIENCE):
            raise RuntimeError(
                f"resize(): an exchange of the failed group has not ended within {PATIENCE:g} s"
            )
        engine.syncs.give_up()
        empty = torch.zeros(0)
        momenta = [empty if (m := layer.momentum) is None else m.cpu() for layer in layers]
    return Carried(
        _about(engine, momenta, together or all(layer.whole_momentum for layer in layers)),
        [layer.anchor for layer in layers if layer.anchor is not None],
        momenta,
        [layer.detector.cpu() for layer in layers],
        engine.syncs.metrics,
        engine.bytes_sent,
    )


def rejoin(old: Engine, group: Members | None, carried: Carried) -> Engine:
    """The engine in the new group. Collective over it, together with `attach(start="join")`."""
    engine, _ = connect(
        old.model,
        old.config,
        "join",
        old.link,
        lambda: peers(old.model, None, group),
        lambda: (old.ticker.optimizers, old.plan, old.recipe),
    )
    take_over(engine, carried)
    engine.paused = old.paused
    engine.accumulating = old.accumulating
    engine.skip_averages()
    return engine


def take_over(engine: Engine, carried: Carried | None) -> None:
    """Bring the new group to one state. `carried`: None for a replica that joins. Collective."""
    try:
        with engine.watched():
            said = json.dumps(carried.about if carried is not None else None)
            table = [json.loads(text) for text in engine.mesh.all.gather_text(said, "resize")]
            old = _Old(table, engine.mesh.shard.size, engine.mesh.shard.rank)
            _take_counts(engine, old, carried)
            if old.source["anchored"]:
                _take_layers(engine, old, carried)
            if None in old.seats:
                _take_model(engine, old.first, joins=carried is None)
            if carried is not None:
                engine.syncs.metrics = carried.metrics
                engine.bytes_before = carried.bytes_sent
            engine.warmup_may_be_over()
    except BaseException:
        engine.close()
        raise


class _Old:
    """The old run as the ranks of the new one tell it, the same on all of them.

    seats: of each new replica its index in the old run, None if it joins; first: the new replica
    that is the source; source: what it has told.
    """

    def __init__(self, table: Sequence[dict[str, Any] | None], shards: int, shard: int) -> None:
        rows = [table[i : i + shards] for i in range(0, len(table), shards)]
        self.seats: list[int | None] = []
        for new, row in enumerate(rows):
            seats = {told["replica"] if told else None for told in row}
            if len(seats) > 1 or any(told and told["shard"] != s for s, told in enumerate(row)):
                raise ValueError(
                    f"resize(): the ranks of replica {new} were not the shards of one before"
                )
            self.seats.append(seats.pop())
        here = [t for t in table if t]
        if not here:
            raise ValueError("start='join': no rank of the group brings a run, by Handle.resize()")
        if len({t["run"] for t in here}) > 1:
            raise ValueError("resize(): the ranks of the group come from different runs")

        def progress(new: int) -> tuple[bool, int]:
            told = [t for t in rows[new] if t]
            return all(t["anchored"] for t in told), min(t["sync_index"] for t in told)

        going_on = [new for new, seat in enumerate(self.seats) if seat is not None]
        self.first = max(going_on, key=progress)
        self.column = [row[shard] for row in rows]
        self.source: dict[str, Any] = self.column[self.first] or {}
        self.armed = sorted({track for t in here for track in t["counts"]["armed"]})
        self.lost = set(range(self.source["replicas"])) - {s for s in self.seats if s is not None}

    def share(self, layer: int, replica: int) -> tuple[int, int]:
        """First element and number of elements of the piece that an old replica owned."""
        each, size = self.source["held"][layer], self.source["sizes"][layer]
        first = min(replica * each, size)
        return first, min(each, size - first)


def _all_come(engine: Engine, refusal: str) -> bool:
    """Whether all ranks of the old group leave together; False when one is gone."""
    heartbeat = engine.mesh.heartbeat
    said: list[str] | None = [refusal]
    names = [engine.mesh.all.name(0)]
    if heartbeat is not None:
        with engine.watched():
            said = heartbeat.meet("resize()", refusal)
        names = [engine.mesh.all.name(member) for member in range(engine.mesh.all.size)]
    if said is None:
        return False
    for name, text in zip(names, said, strict=True):
        if text:
            raise RuntimeError(f"resize() was refused on {name}: {text}")
    return True


def _about(engine: Engine, momenta: list[Tensor], whole: bool) -> dict[str, Any]:
    layers, units = engine.held.anchored(), engine.plan.units
    # Of anchors a replica owns what it owns of the momentum.
    held = [
        tensor.numel() or (layer.size if whole else layer.piece)
        for tensor, layer in zip(momenta, layers, strict=True)
    ]
    clock, alarm = engine.clock, engine.alarm
    return {
        "run": engine.mesh.run,
        "replica": engine.mesh.replica.rank,
        "replicas": engine.mesh.replica.size,
        "shard": engine.mesh.shard.rank,
        "anchored": clock.anchored,
        "sync_index": clock.sync_index,
        "counts": clock.counts(),
        "elapsed": alarm.elapsed if alarm is not None else 0.0,
        "outer_lr": engine.syncs.outer_lr,
        "order": [units[i].name for i in engine.syncs.order] if clock.sync_index else [],
        "sizes": [layer.size for layer in layers],
        "held": held,
        "momentum": engine.recipe.momentum is not None,
        "whole": whole,
    }


def _take_counts(engine: Engine, old: _Old, carried: Carried | None) -> None:
    """A replica that joins stands where the source does. If one is due for a sync, all are."""
    about = carried.about if carried is not None else old.source
    counts = {**about["counts"], "armed": old.armed}
    for name in ("sync_index", "anchored", "periods", "measured"):
        counts[name] = old.source["counts"][name]
    for name in ("agreed_steps", "shown_steps"):  # of all replicas together
        mean = old.source["counts"][name] / old.source["replicas"]
        counts[name] = round(mean * engine.mesh.replica.size)
    engine.clock.restore(counts)
    if engine.alarm is not None:
        asked = counts["sync_index"] + bool(old.armed)
        engine.alarm.load(asked, about["elapsed"], running=counts["anchored"])
    engine.syncs.outer_lr = old.source["outer_lr"]
    if old.source["order"]:
        places = {unit.name: index for index, unit in enumerate(engine.plan.units)}
        engine.syncs.set_order([places[name] for name in old.source["order"]])


@torch.no_grad()
def _take_layers(engine: Engine, old: _Old, carried: Carried | None) -> None:
    """Anchors, outer momentum and detectors of all layers."""
    group = engine.mesh.replica
    seats = [seat if seat is not None else old.seats[old.first] for seat in old.seats]
    lost = 0
    for index, layer in enumerate(engine.held.anchored()):
        what = f"resize, layer {layer.name!r}"
        anchor, whole = torch.zeros(layer.size), torch.zeros(layer.size)
        detectors = torch.zeros(old.source["replicas"], 5, dtype=torch.float64)
        if carried is not None:
            anchor.copy_(carried.anchors[index])
            detectors.copy_(carried.detectors[index])
        group.broadcast(anchor, what, old.first)
        group.broadcast(detectors, what, old.first)
        for replica, new in _owners(old):
            first, count = old.share(index, replica)
            if carried is not None and group.rank == new:
                mine = carried.momenta[index]
                whole[first : first + len(mine[:count])] = mine[:count]
                anchor[first : first + count] = carried.anchors[index][first : first + count]
            for tensor in (anchor, whole):
                group.broadcast(tensor[first : first + count], what, new)
        if old.source["momentum"] and not old.source["whole"]:
            lost += sum(_elements(layer, *old.share(index, gone)) for gone in old.lost)
        assert layer.anchor is not None
        layer.anchor.copy_(anchor)
        layer.detector.copy_(detectors[seats])
        momentum.put(layer, whole, group.rank)
    if lost:
        total = sum(_elements(layer, 0, layer.size) for layer in engine.held.anchored())
        warnings.warn(
            f"edit_ext: {len(old.lost)} of {old.source['replicas']} replicas did not hand over "
            f"their parts of the outer momentum: {lost:,} of {total:,} elements on this rank "
            "restart at zero; momentum='replicated' keeps them.",
            stacklevel=2,
        )


def _elements(layer: _C.Layer, first: int, count: int) -> int:
    """How many elements of a part of a flat layer are parameters and not padding."""
    found = start = 0
    for param in layer.params:
        overlap = min(start + param.numel(), first + count) - max(start, first)
        found += max(overlap, 0)
        start += padded(param.numel())
    return found


def _owners(old: _Old) -> list[tuple[int, int]]:
    """(old replica, new replica) of those that bring a piece of a layer; the source if it has all
    pieces."""
    if old.source["whole"]:
        return [(0, old.first)]
    return [(seat, new) for new, seat in enumerate(old.seats) if seat is not None]


@torch.no_grad()
def _take_model(engine: Engine, source: int, *, joins: bool) -> None:
    """Weights, buffers and inner optimizer of the source, for those that join."""
    group = engine.mesh.replica
    for name, tensor in tensors_of(engine.model).items():
        # What is not the joiner's own stays as it is: a replica trains on weights of its own.
        into = tensor if joins or group.rank == source else torch.empty_like(tensor)
        broadcast_into(group, into, f"resize, broadcast of {name!r}", source)
    names: dict[Tensor, str] = {p: clean(n) for n, p in engine.model.named_parameters()}
    optimizer_state.broadcast(engine.ticker.optimizers, names, group, source, joins)
