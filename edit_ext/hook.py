"""attach(): local-update training as hooks on an ordinary loop's model and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from . import _C, fsdp
from .checks import check_average_buffers, check_model, check_optimizers
from .config import METHODS, EDiT, Method
from .engine import Engine, live_engines
from .handle import Handle
from .layer import Plan, find_layers
from .mesh import ReplicaMesh, replica_ranks, stay_away
from .module_hooks import register
from .sharding import local, replica_group, shard_ranks
from .start import agree
from .transport import carriers_for, check_kind, choose


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    config: Method,
    *,
    mesh: DeviceMesh | None = None,
    group: dist.ProcessGroup | None = None,
    layers: Sequence[str | nn.Module] | None = None,
    start: str = "check",
    comm: str = "auto",
    max_ctas: int = 0,
    comm_wrapper: Callable[[_C.Comm], _C.Comm] | None = None,
) -> Handle:
    """Train `model` by EDiT or A-EDiT (arXiv 2412.07210): local steps, and a sync inside a forward,
    every `sync_every` steps or `sync_seconds` seconds. The loop itself stays as it is.

    Collective: every rank of every replica calls it with a model of the same structure. Hooks count
    `optimizer.step()` and act in training-mode forwards of `model` with gradients enabled.

    model: parameters in float32, bfloat16 or float16, on the CPU or, in a build with the CUDA part,
        on one CUDA device; frozen ones are left alone.
    optimizer: one, or a list of those that step parts of the model.
    mesh: a DeviceMesh with named dimensions, one of which counts the replicas; the model is sharded
        over the others (`fully_shard` on `mesh["shard"]`, tensor parallelism, or both).
    group: instead of a mesh, the ranks that hold the same part of the model in all replicas; None:
        all ranks, or this process alone when torch.distributed is not initialised. The ranks that
        share a replica are those of the parameters' DTensors.
    layers: modules, or their names, to be synced as one layer each; None: the parameter groups of
        FSDP2, else the children of the outermost ModuleLists, else the direct children. What is
        left over is split by direct child.
    start: "check": replicas must have equal values; "broadcast": all take replica 0's.
    comm: "nccl": an NCCL communicator of our own on a side stream; "c10d": Gloo groups of our own,
        for CUDA parameters through pinned memory; "auto": NCCL where it can be. `explain()` says
        what was chosen and why.
    max_ctas: SMs that one NCCL exchange may take from the training, 1 to 64; 0: the library's
        choice.
    comm_wrapper: gets the communicator and returns the one to use; for tests and measurements.

    New weights are in place when a module that owns them runs. A forward that reads a weight before
    that needs `granularity="model"`; nothing may read weights for autograd before `model(...)`.

    Raises TypeError or ValueError, naming the parameter, module, field or replica, on every rank,
    for what cannot work or differs between replicas; RuntimeError when a peer does not come.
    """
    engine: Engine | None = None

    def on_failure(reason: str) -> None:
        if engine is not None:
            engine.peer_failed(reason)

    # Also with bad arguments this rank meets its peers, so that they hear of it and need not wait.
    problem: Exception | None = None
    timeout = config.timeout if isinstance(config, METHODS) else EDiT().timeout
    try:
        mine, shards, why_not = _peers(model, mesh, group)
    except Exception as error:
        stay_away(f"{type(error).__name__}: {error}")
        raise
    ranks = ReplicaMesh(mine, shards, why_not, timeout, on_failure)
    try:
        optimizers: list[torch.optim.Optimizer] = []
        plan: Plan | None = None
        try:
            check_kind(comm, max_ctas)
            optimizers, plan = _prepare(model, optimizer, config, layers, start)
        except Exception as error:
            problem = error
        arguments = {"start": start, "comm": comm, "max_ctas": max_ctas}
        agree(ranks, model, plan, config, arguments, problem)
        assert plan is not None  # agree() has raised the problem
        like = local(next(p for p in model.parameters() if p.requires_grad))
        direct, why = choose(ranks.all, comm, like, max_ctas)
        lane = _C.make_lane(like, direct)
        carriers = carriers_for(ranks, direct, lane, config.timeout, max_ctas, comm_wrapper)
        engine = Engine(model, optimizers, config, plan, ranks, lane, carriers, why)
    except BaseException as error:
        if ranks.heartbeat is not None and problem is None:
            ranks.heartbeat.say_failed(f"attach: {error}")
        ranks.close()
        raise
    if ranks.heartbeat is not None and ranks.heartbeat.failure is not None:
        engine.peer_failed(ranks.heartbeat.failure)
    return Handle(engine, register(engine, optimizers))


def _peers(
    model: nn.Module, mesh: DeviceMesh | None, group: dist.ProcessGroup | None
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


def _prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    config: Method,
    layers: Sequence[str | nn.Module] | None,
    start: str,
) -> tuple[list[torch.optim.Optimizer], Plan]:
    """What can be checked without the peers."""
    if not isinstance(config, METHODS):
        known = " or ".join(f"edit_ext.{method.__name__}" for method in METHODS)
        raise TypeError(f"config must be an {known}, not {type(config).__name__}")
    if start not in ("check", "broadcast"):
        raise ValueError(f"start must be 'check' or 'broadcast', but is {start!r}")
    check_model(model, warmup=config.warmup_steps > 0)
    if config.average_buffers:
        check_average_buffers(model)
    owned = {id(p): name for e in live_engines() for name, p in e.syncs.trainable.items()}
    for name, param in model.named_parameters():
        if id(param) in owned:
            raise ValueError(
                f"parameter {name!r} is attached already, by an earlier attach(); detach() its "
                "handle first"
            )
    return check_optimizers(model, optimizer), find_layers(model, layers, config.granularity)
