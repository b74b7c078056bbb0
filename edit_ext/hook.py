"""attach(): local-update training as hooks on an ordinary loop's model and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from . import _C
from .checks import check_average_buffers, check_model, check_offload, check_optimizers
from .config import Method
from .connect import connect, peers
from .engine import live_engines
from .handle import Handle
from .layer import Plan, find_layers
from .mesh import Members
from .methods import METHODS
from .module_hooks import register
from .recipe import Recipe
from .resize import take_over
from .transport import Link


def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    config: Method,
    *,
    mesh: DeviceMesh | None = None,
    group: Members | None = None,
    layers: Sequence[str | nn.Module] | None = None,
    start: str = "check",
    comm: str = "auto",
    max_ctas: int = 0,
    comm_wrapper: Callable[[_C.Comm], _C.Comm] | None = None,
) -> Handle:
    """Train `model` by a method of local updates, such as `EDiT()` or `DiLoCo()`: local steps, and
    now and then a sync inside a forward. The loop itself stays as it is.

    Collective: every rank of every replica calls it with a model of the same structure. Hooks count
    `optimizer.step()` and act in training-mode forwards of `model` with gradients enabled.

    model: parameters in float32, bfloat16 or float16, on the CPU or, in a build with the CUDA part,
        on one CUDA device; frozen ones are left alone.
    optimizer: one, or a list of those that step parts of the model.
    mesh: a DeviceMesh with named dimensions, one of which counts the replicas; the model is sharded
        over the others (`fully_shard` on `mesh["shard"]`, tensor parallelism, or both).
    group: instead of a mesh, the ranks that hold the same part of the model in all replicas, as a
        process group or a list; None: all ranks, or this process alone when torch.distributed is
        not initialised. The ranks that share a replica are those of the parameters' DTensors.
    layers: modules, or their names, to be synced as one layer each; None: the parameter groups of
        FSDP2, else the children of the outermost ModuleLists, else the direct children. What is
        left over is split by direct child.
    start: "check": replicas must have equal values; "broadcast": all take replica 0's; "join": this
        replica joins a run whose replicas call `Handle.resize` meanwhile, and gets everything from
        one of them.
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
    engine, optimizers = connect(
        model,
        config,
        start,
        Link(comm, max_ctas, comm_wrapper),
        lambda: peers(model, mesh, group),
        lambda: _prepare(model, optimizer, config, layers),
    )
    if start == "join":
        take_over(engine, None)
    return Handle(engine, register(engine, optimizers))


def _prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    config: Method,
    layers: Sequence[str | nn.Module] | None,
) -> tuple[list[torch.optim.Optimizer], Plan, Recipe]:
    """What can be checked without the peers."""
    if not isinstance(config, METHODS):
        known = ", ".join(method.__name__ for method in METHODS)
        raise TypeError(
            f"config must be one of edit_ext's methods ({known}), not {type(config).__name__}"
        )
    settings = config.as_dict()
    check_model(model, warmup=config.averages)
    if settings.get("offload"):
        check_offload(model)
    if settings.get("average_buffers"):
        check_average_buffers(model)
    owned = {id(p): name for e in live_engines() for name, p in e.held.trainable.items()}
    for name, param in model.named_parameters():
        if id(param) in owned:
            raise ValueError(
                f"parameter {name!r} is attached already, by an earlier attach(); detach() its "
                "handle first"
            )
    optimizers = check_optimizers(model, optimizer)
    recipe = config.recipe(optimizers)
    plan = find_layers(model, layers, recipe.granularity)
    if recipe.fragments > len(plan.units):
        names = ", ".join(repr(unit.name) for unit in plan.units)
        raise ValueError(
            f"fragments={recipe.fragments}, but the model has only {len(plan.units)} layers "
            f"({names}); layers= can cut it finer"
        )
    return optimizers, plan, recipe
