"""Sharded models for tests: replicas of FSDP2 shards, and what they should equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nets
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard


class Net(nets.Net):
    """nets.Net whose scale has a dimension, because FSDP2 does not shard 0-dim parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5]))


def make_net() -> Net:
    """The same weights in every process; sizes 1, 3, 5, 7, 31: shards are uneven, some empty."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return Net()


def layer_of(name: str) -> str:
    """The layer of a parameter of Net when `shard` has sharded it: what is left is the root's."""
    parts = name.split(".")
    if parts[0] == "blocks":
        return ".".join(parts[:2])
    return parts[0] if parts[0] in ("stem", "head") else "(root)"


def mesh_of(replicas: int, shards: int) -> DeviceMesh:
    """Replica after replica."""
    return init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replica", "shard"))


def shard(model: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
    """A parameter group for each block, the stem and the head; the rest is the root's."""
    for module in [model.stem, *model.blocks, model.head]:
        fully_shard(module, mesh=mesh["shard"], **options)
    return fully_shard(model, mesh=mesh["shard"], **options)


def batch_of(mesh: DeviceMesh, t: int) -> tuple[Tensor, Tensor]:
    """This shard's rows of its replica's batch: 4 rows over 1, 2 or 4 shards."""
    x, y = nets.batch(mesh["replica"].get_local_rank(), t)
    rank, size = mesh["shard"].get_local_rank(), mesh["shard"].size()
    each = len(x) // size
    return x[rank * each : (rank + 1) * each], y[rank * each : (rank + 1) * each]


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, t: int
) -> None:
    """One ordinary iteration; the mean over the shards' losses is the loss of the replica."""
    nets.loss(model, batch_of(mesh, t)).backward()
    optimizer.step()
    optimizer.zero_grad()


def full(model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters by name. Collective over the shards."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    return {name: whole(p) for name, p in model.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    """A copy of a plain or sharded tensor as one tensor."""
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return (gather() if gather is not None else tensor).detach().clone()


def gather_ranks(value: Any) -> list[Any]:
    """The values of all ranks, on every rank."""
    out: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(out, value)
    return out
