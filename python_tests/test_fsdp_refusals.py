"""What cannot work on sharded models is refused in a sentence, on every rank, within seconds."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import nets
import shards
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, distribute_tensor

import edit_ext


def attach(model: nn.Module, **options: Any) -> edit_ext.Handle:
    return edit_ext.attach(model, nets.sgd(model), nets.plain(timeout=5.0), **options)


def hybrid(how: str) -> None:
    """fully_shard over both dimensions: FSDP2's own replicas."""
    mesh = shards.mesh_of(2, 2)
    model = shards.make_net()
    fully_shard(model, mesh=mesh)
    options = {"mesh": mesh, "replica": mesh["replica"], "nothing": None}
    attach(model, mesh=options[how])


def hybrid_and_its_mesh() -> None:
    hybrid("mesh")


def hybrid_and_its_replicas() -> None:
    hybrid("replica")


def hybrid_alone() -> None:
    hybrid("nothing")


def no_mesh_at_all() -> None:
    mesh = shards.mesh_of(2, 2)
    attach(shards.shard(shards.make_net(), mesh), mesh="cuda")


def without_names() -> None:
    mesh = shards.mesh_of(2, 2)
    model = shards.shard(shards.make_net(), mesh)
    attach(model, mesh=DeviceMesh("cpu", [[0, 1], [2, 3]]))


def nothing_left() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    model = nn.Linear(4, 4)
    for name, p in list(model.named_parameters()):
        both = distribute_tensor(p.detach(), mesh)
        model.register_parameter(name, nn.Parameter(both))
    attach(model, mesh=mesh)


def two_left() -> None:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("replica", "shard", "more"))
    attach(shards.shard(shards.make_net(), mesh), mesh=mesh)


def mesh_and_group() -> None:
    mesh = shards.mesh_of(2, 2)
    model = shards.shard(shards.make_net(), mesh)
    attach(model, mesh=mesh, group=mesh.get_group("replica"))


def wrong_group() -> None:
    """A group over the shards of one replica."""
    mesh = shards.mesh_of(2, 2)
    attach(shards.shard(shards.make_net(), mesh), group=mesh.get_group("shard"))


def no_group() -> None:
    """All ranks as replicas, as for a model that is not sharded."""
    attach(shards.shard(shards.make_net(), shards.mesh_of(2, 2)))


def crossed_group() -> None:
    """Rank 0 with rank 3, rank 1 with rank 2."""
    mesh = shards.mesh_of(2, 2)
    pairs = [dist.new_group(pair) for pair in ([0, 3], [1, 2])]
    group = pairs[dist.get_rank() in (1, 2)]
    attach(shards.shard(shards.make_net(), mesh), group=group)


def default_mesh() -> None:
    """fully_shard(model) without a mesh takes all ranks."""
    mesh = shards.mesh_of(2, 2)
    model = shards.make_net()
    fully_shard(model)
    attach(model, mesh=mesh)


def not_sharded() -> None:
    attach(shards.make_net(), mesh=shards.mesh_of(2, 2))


def too_early() -> None:
    """attach, then fully_shard."""
    mesh = shards.mesh_of(2, 2)
    model = shards.make_net()
    attach(model, mesh=mesh["replica"])
    shards.shard(model, mesh)
    optimizer = nets.sgd(model)
    for t in range(3):
        shards.train_step(model, optimizer, mesh, t)


def old_optimizer() -> None:
    """An optimizer made before fully_shard."""
    mesh = shards.mesh_of(2, 2)
    model = shards.make_net()
    optimizer = nets.sgd(model)
    shards.shard(model, mesh)
    edit_ext.attach(model, optimizer, nets.plain(timeout=5.0), mesh=mesh)


def layers() -> None:
    mesh = shards.mesh_of(2, 2)
    attach(shards.shard(shards.make_net(), mesh), mesh=mesh, layers=["stem"])


def meta() -> None:
    mesh = shards.mesh_of(2, 2)
    with torch.device("meta"):
        model = shards.Net()
    attach(shards.shard(model, mesh), mesh=mesh)


def partial(group_of_one: bool = False) -> None:
    mesh = shards.mesh_of(2, 2)
    model = nn.Linear(4, 4)
    weight = DTensor.from_local(model.weight.detach(), mesh["shard"], [Partial()])
    model.weight = nn.Parameter(weight)
    alone = [dist.new_group([rank]) for rank in range(4)] if group_of_one else []
    attach(model, **({"group": alone[dist.get_rank()]} if group_of_one else {"mesh": mesh}))


def partial_alone() -> None:
    partial(group_of_one=True)


def scalar() -> None:
    shards.shard(nets.make_net(), shards.mesh_of(2, 2))


def tied_apart() -> None:
    """One weight in two parameter groups."""
    mesh = shards.mesh_of(2, 2)
    torch.manual_seed(11)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    model[1].weight = model[0].weight
    for module in [*model, model]:
        fully_shard(module, mesh=mesh["shard"])
    attach(model, mesh=mesh)
    model(torch.zeros(2, 5))


# The words that must stand in the sentence.
REFUSALS: dict[Callable[[], None], str] = {
    hybrid_and_its_mesh: "fully_shard was given a mesh that also replicates",
    hybrid_and_its_replicas: "fully_shard was given a mesh that also replicates",
    hybrid_alone: "fully_shard was given a mesh that also replicates",
    no_mesh_at_all: "mesh must be a DeviceMesh, not str",
    without_names: "mesh has 2 dimensions without names",
    nothing_left: "exactly one dimension must be left for the replicas, not 0",
    two_left: "exactly one dimension must be left for the replicas, not 2",
    mesh_and_group: "mesh= and group= both say",
    wrong_group: "the replica group must join ranks that hold the same shard",
    no_group: "the replica group must join ranks that hold the same shard",
    crossed_group: "the replica group must join ranks that hold the same shard",
    default_mesh: "the parameters are sharded over DeviceMesh",
    not_sharded: "no parameter of the model is sharded; shard the model over one of them",
    too_early: "was replaced by another object after attach",
    old_optimizer: "that the model lacks; build the optimizer from this model's parameters",
    layers: "layers= has no effect on a model of fully_shard",
    meta: "is on the meta device; give it values before attach",
    partial: "a partial sum is no weight that replicas could agree on",
    partial_alone: "a partial sum is no weight that replicas could agree on",
    scalar: "fully_shard doesn't support scalar parameters",
    tied_apart: "is shared with a parameter already managed by another FSDP group",
}


def refused() -> dict[str, tuple[str, float]]:
    """What each of them raises, and after how many seconds; then an attach that works."""
    said = {}
    for way in REFUSALS:
        began = time.monotonic()
        try:
            way()
            text = "no error"
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        said[way.__name__] = (text, time.monotonic() - began)
        dist.barrier()
    mesh = shards.mesh_of(2, 2)
    attach(shards.shard(shards.make_net(), mesh), mesh=mesh).detach()
    return said


def test_refused_on_every_rank(ranks: Ranks) -> None:
    """Each mistake is an error with the same sentence everywhere; nothing is left behind."""
    results = ranks.run(4, refused, seconds=90)
    for way, words in REFUSALS.items():
        for rank, said in enumerate(results):
            text, seconds = said[way.__name__]
            assert words in text and "\n" not in text, (way.__name__, rank, text)
            assert seconds < 5, (way.__name__, rank, seconds)
