"""Do all replicas start with the same model, layers, settings and values? Else all raise."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from . import _C
from .checks import persistent_buffers
from .comm import RankGroup
from .config import Method
from .layer import Plan, clean
from .mesh import ReplicaMesh
from .sharding import describe, is_sharded, local

Rows = list[list[Any]]  # [label, what is said about it], in a fixed order


def agree(
    mesh: ReplicaMesh,
    model: nn.Module,
    plan: Plan | None,
    config: Method,
    arguments: dict[str, Any],
    problem: Exception | None,
) -> None:
    """Compare all ranks, in fixed-size digests first, and raise the same error on every rank.

    problem: what this rank found wrong on its own; it is raised here after the peers have heard.
    arguments: those of attach() that must be equal. Its `start`: "check" raises ValueError naming
    the first value that differs; "broadcast" copies replica 0's parameters and persistent buffers
    to all; "join" leaves them alone.
    """
    group = mesh.all
    if problem is not None or plan is None:
        group.gather([1, 0, 0, 0], "start check")
        text = f"{type(problem).__name__}: {problem}"
        group.gather_text(text, "start check")
        raise problem or RuntimeError("the model has no layers")
    sections: dict[str, Callable[[], Rows]] = {
        "model": lambda: _structure(model),
        "settings": lambda: [
            ["method", config.name],
            *([name, value] for name, value in config.as_dict().items()),
            *([name, value] for name, value in arguments.items()),
        ],
        # By name: shards order them differently, and the model's own order is compared already.
        "layers": lambda: [[unit.name, sorted(unit.params)] for unit in plan.units],
    }
    digests = [_digest(rows()) for rows in sections.values()]
    gathered = group.gather([0, *digests], "start check")
    if any(row[0] for row in gathered):
        texts = group.gather_text("", "start check")
        first = next(replica for replica, row in enumerate(gathered) if row[0])
        raise RuntimeError(f"attach was refused on {group.name(first)}: {texts[first]}")
    for column, (title, rows) in enumerate(sections.items(), 1):
        if len({row[column] for row in gathered}) > 1:
            _raise_difference(group, title, rows(), group.size)
    if arguments["start"] != "join":
        _agree_on_values(mesh, model, arguments["start"])


def _agree_on_values(mesh: ReplicaMesh, model: nn.Module, start: str) -> None:
    if mesh.all.size == 1:
        return
    # A shard has the same values in all replicas; what is not sharded has them on all ranks.
    sharded, whole = _values(model, sharded=True), _values(model, sharded=False)
    digests = mesh.all.gather([_digest(sharded), _digest(whole)], "start check")
    shards = mesh.shard.size
    shards_differ = any(row[0] != digests[i % shards][0] for i, row in enumerate(digests))
    wholes_differ = any(row[1] != digests[0][1] for row in digests)
    if not shards_differ and not wholes_differ:
        return
    if start == "check":
        rows, period = (sharded, shards) if shards_differ else (whole, mesh.all.size)
        _raise_difference(mesh.all, "values", rows, period)
    for name, tensor in tensors_of(model).items():
        group = mesh.replica if is_sharded(tensor) else mesh.all
        broadcast_into(group, tensor, f"start, broadcast of {name!r}")


@torch.no_grad()
def broadcast_into(group: RankGroup, tensor: Tensor, what: str, source: int = 0) -> None:
    """Overwrite this rank's memory of a tensor, of any strides, with that of member `source`."""
    own = local(tensor)
    dense = own.clone(memory_format=torch.contiguous_format)
    group.broadcast(dense, what, source)
    if group.rank != source:
        own.copy_(dense)


def values_digest(params: list[nn.Parameter]) -> int:
    """One signed 64-bit number that depends on every byte of this rank's parameters."""
    return _digest([[_C.checksum(local(p))] for p in params])


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """What replicas must have alike at the start: all parameters and persistent buffers."""
    named = {clean(name): param for name, param in model.named_parameters()}
    return {**named, **persistent_buffers(model)}


def _structure(model: nn.Module) -> Rows:
    params = {clean(name): p for name, p in model.named_parameters()}
    rows: Rows = [
        [
            name,
            describe(p),
            "trainable" if p.requires_grad else "frozen",
        ]
        for name, p in params.items()
    ]
    rows += [
        [name, f"buffer {b.dtype} {list(b.shape)}"] for name, b in persistent_buffers(model).items()
    ]
    return rows


def _values(model: nn.Module, *, sharded: bool) -> Rows:
    return [
        [name, f"a value with checksum {_C.checksum(local(t)):016x}"]
        for name, t in tensors_of(model).items()
        if is_sharded(t) == sharded
    ]


def _digest(rows: Rows) -> int:
    raw = hashlib.sha256(json.dumps(rows).encode()).digest()[:8]
    return int.from_bytes(raw, "little", signed=True)


def _raise_difference(group: RankGroup, title: str, rows: Rows, period: int) -> None:
    """Raise the same ValueError on every rank: the first row that two ranks do not share.

    Rank i is compared with rank i % period, and if `period` is the group's size with rank 0.
    """
    tables = [json.loads(text) for text in group.gather_text(json.dumps(rows), "start check")]
    first = [0 if period == group.size else i % period for i in range(group.size)]
    other = next(i for i, table in enumerate(tables) if table != tables[first[i]])
    for left, right in zip_longest(tables[first[other]], tables[other]):
        if left != right:
            break
    names = [row[0] if row else None for row in (left, right)]
    where = f"{names[0]!r}" if names[0] == names[1] else f"{names[0]!r} against {names[1]!r}"
    hint = ""
    if title == "values":
        hint = "; give every replica the same seed, or pass start='broadcast'"
    raise ValueError(
        f"replicas differ in their {title}: {where}: {group.name(first[other])} has {_say(left)}, "
        f"{group.name(other)} has {_say(right)}{hint}"
    )


def _say(row: list[Any] | None) -> str:
    if row is None:
        return "nothing more"
    return ", ".join(str(item) for item in row[1:])
