"""Parameters of which a rank holds a shard: DTensors of FSDP2, of tensor parallelism, or both."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> bool:
    """Whether `tensor` is a DTensor. Does not load torch's DTensor where nobody has."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """This rank's memory of a parameter or gradient, without autograd; the tensor, if it is plain.

    What is written to it is what the DTensor holds from then on.
    """
    if not is_sharded(tensor):
        return tensor.detach()
    shard: Tensor = tensor.detach().to_local()  # type: ignore[attr-defined]
    return shard.detach()


def from_local(shard: Tensor, like: Tensor) -> Tensor:
    """The DTensor of which this rank holds `shard`, where that is, cut and placed as `like`."""
    kind: Any = type(like.detach())
    made: Tensor = kind.from_local(
        shard,
        like.device_mesh,  # type: ignore[attr-defined]
        like.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    # from_local has moved it to the mesh's device, which need not have room for all of the host's.
    return made if made.device == shard.device else made.to(shard.device)


def shard_ranks(params: Iterable[tuple[str, Tensor]]) -> list[int] | None:
    """Global ranks that together hold one replica, in order; None where nothing is sharded."""
    ranks: set[int] = set()
    for name, param in params:
        if not is_sharded(param):
            continue
        _refuse_partial(name, param)
        ranks.update(_ranks_of(param))
    return sorted(ranks) or None


def counts_here(tensor: Tensor, replica: Sequence[int]) -> bool:
    """Whether this rank is the first of `replica`, global ranks, to hold this part of `tensor`.

    The other ranks that hold it too leave it out of their norms.
    """
    if not is_sharded(tensor):
        return len(replica) == 1 or dist.get_rank() == replica[0]
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    if replica[0] not in _ranks_of(tensor):
        return False  # another mesh holds the whole of it, with the first rank in it
    coordinate = mesh.get_coordinate()
    placements = tensor.placements  # type: ignore[attr-defined]
    return all(
        place == 0
        for place, placement in zip(coordinate, placements, strict=True)
        if placement.is_replicate()
    )


def describe(tensor: Tensor) -> str:
    """dtype, global shape, strides and placements, for comparisons between ranks."""
    said = f"{tensor.dtype} {list(tensor.shape)} strides {list(tensor.stride())}"
    if is_sharded(tensor):
        said += f" {' '.join(map(repr, tensor.placements))}"  # type: ignore[attr-defined]
    return said


def replica_group(mesh: Any, model: nn.Module) -> dist.ProcessGroup:
    """The group along the one dimension of a DeviceMesh that no parameter is sharded over.

    Raises TypeError or ValueError naming the dimensions when there is no such one.
    """
    kind = type(mesh)
    if kind.__name__ != "DeviceMesh":
        raise TypeError(f"mesh must be a DeviceMesh, not {kind.__name__}")
    if mesh.ndim == 1:
        group: dist.ProcessGroup = mesh.get_group()
        return group
    names = mesh.mesh_dim_names
    if names is None:
        raise ValueError(
            f"mesh has {mesh.ndim} dimensions without names; pass mesh_dim_names to "
            "init_device_mesh, or the replica group as group="
        )
    params: list[Any] = [p for p in model.parameters() if is_sharded(p)]
    meshes = [p.device_mesh for p in params]
    used = {name for each in meshes for name in each.mesh_dim_names or ()}
    if not used:
        said = "no parameter of the model is sharded"
        if meshes:
            said = f"the parameters are sharded over {meshes[0]}, whose dimensions have no names"
        raise ValueError(
            f"mesh has the dimensions {names}, but {said}; shard the model over one of them, as "
            f"fully_shard(..., mesh=mesh[{names[-1]!r}]), or pass the replicas' dimension alone, "
            f"as mesh[{names[0]!r}]"
        )
    rest = [name for name in names if name not in used]
    if len(rest) != 1:
        raise ValueError(
            f"mesh has the dimensions {names} and the parameters are sharded over "
            f"{tuple(sorted(used))}; exactly one dimension must be left for the replicas, not "
            f"{len(rest)}"
        )
    along: dist.ProcessGroup = mesh.get_group(rest[0])
    return along


def _ranks_of(tensor: Tensor) -> list[int]:
    ranks: list[int] = tensor.device_mesh.mesh.flatten().tolist()  # type: ignore[attr-defined]
    return ranks


def _refuse_partial(name: str, param: Tensor) -> None:
    placements = param.placements  # type: ignore[attr-defined]
    if any(placement.is_partial() for placement in placements):
        raise TypeError(
            f"parameter {name!r} is a DTensor with placements {placements}: a partial sum is no "
            "weight that replicas could agree on"
        )
