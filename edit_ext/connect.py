"""How a rank finds its peers and agrees with them: the way from arguments to an engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from . import _C, fsdp
from .config import Method
from .engine import Engine
from .layer import Plan
from .mesh import Members, ReplicaMesh, replica_ranks, stay_away
from .methods import METHODS, EDiT
from .recipe import Recipe
from .sharding import local, replica_group, shard_ranks
from .start import agree
from .transport import Link, carriers_for, check_kind, choose

STARTS = ("check", "broadcast", "join")


def connect(
    model: nn.Module,
    config: Method,
    start: str,
    link: Link,
    find_peers: Callable[[], tuple[list[int], list[int] | None, str | None]],
    prepare: Callable[[], tuple[list[torch.optim.Optimizer], Plan, Recipe]],
) -> tuple[Engine, list[torch.optim.Optimizer]]:
    """Meet the peers and agree with them: the engine, without hooks yet, and its optimizers.

    find_peers: see `peers`; prepare: what can be checked without the peers. Whatever either of
    them raises the peers hear of.
    """
    engine: Engine | None = None

    def on_failure(reason: str) -> None:
        if engine is not None:
            engine.peer_failed(reason)

    # Also with bad arguments this rank meets its peers, so that they hear of it and need not wait.
    problem: Exception | None = None
    timeout = config.timeout if isinstance(config, METHODS) else EDiT().timeout
    try:
        mine, shards, why_not = find_peers()
    except Exception as error:
        stay_away(f"{type(error).__name__}: {error}")
        raise
    ranks = ReplicaMesh(mine, shards, why_not, timeout, on_failure)
    try:
        optimizers: list[torch.optim.Optimizer] = []
        plan: Plan | None = None
        recipe: Recipe | None = None
        try:
            if start not in STARTS:
                known = ", ".join(map(repr, STARTS))
                raise ValueError(f"start must be one of {known}, but is {start!r}")
            check_kind(link.kind, link.max_ctas)
            optimizers, plan, recipe = prepare()
        except Exception as error:
            problem = error
        arguments: dict[str, Any] = {"start": start, "comm": link.kind, "max_ctas": link.max_ctas}
        if recipe is not None:  # periods may follow the optimizer's settings
            arguments["clocks"] = [[track.name, str(track.every)] for track in recipe.tracks]
        agree(ranks, model, plan, config, arguments, problem)
        assert plan is not None and recipe is not None  # agree() has raised the problem
        like = local(next(p for p in model.parameters() if p.requires_grad))
        direct, why = choose(ranks.all, link.kind, like, link.max_ctas)
        lane = _C.make_lane(like, direct)
        carriers = carriers_for(ranks, direct, lane, config.timeout, link.max_ctas, link.wrap)
        engine = Engine(model, optimizers, config, recipe, plan, ranks, lane, carriers, why, link)
    except BaseException as error:
        if ranks.heartbeat is not None and problem is None:
            ranks.heartbeat.say_failed(f"attach: {error}")
        ranks.close()
        raise
    if ranks.heartbeat is not None and ranks.heartbeat.failure is not None:
        engine.peer_failed(ranks.heartbeat.failure)
    return engine, optimizers


def peers(
    model: nn.Module, mesh: DeviceMesh | None, group: Members | None
) -> tuple[list[int], list[int] | None, str | None]:
    """Global ranks of this rank's replica group, and of its replica, or why those are unknown."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    fsdp.refuse_hybrid(model)
    fsdp.reshard(fsdp.fsdp_modules(model))
    if mesh is not None:
        if group is not None:
            raise ValueError("mesh= and group= both say which ranks hold the replicas; pass one")
        group = replica_group(mesh, model)
    replicas = replica_ranks(group)
    try:
        return replicas, shard_ranks(model.named_parameters()), None
    except TypeError as error:
        return replicas, None, f"TypeError: {error}"
