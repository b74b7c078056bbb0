"""FSDP2 models of which parts are tied, frozen, not sharded, or sharded by tensor parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import nets
import pytest
import shards
import torch
import torch.distributed as dist
from fsdp_cases import Case, attached, seeded
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class Tied(nn.Module):
    """The head is the embedding's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(7, 6)
        self.mid = nn.Linear(6, 6)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x: Tensor) -> Tensor:
        rows = self.emb((x.abs() * 3).long() % 7).mean(1)
        return self.head(torch.tanh(self.mid(rows)))[:, :3]


def tied_group(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fully_shard([model.emb, model.head], mesh=mesh["shard"])
    fully_shard(model.mid, mesh=mesh["shard"])
    return fully_shard(model, mesh=mesh["shard"])


def tied_in_root(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fully_shard(model.mid, mesh=mesh["shard"])
    return fully_shard(model, mesh=mesh["shard"])


def grouped(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    fully_shard([model.stem, model.head], mesh=mesh["shard"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    return fully_shard(model, mesh=mesh["shard"])


def in_group(name: str) -> str:
    layer = shards.layer_of(name)
    return "stem" if layer == "head" else layer


def frozen_group() -> nn.Module:
    """A whole parameter group is frozen, and a half of another."""
    model = shards.make_net()
    model.blocks[1].requires_grad_(False)
    model.stem.bias.requires_grad_(False)
    return model


class Adapted(nn.Module):
    """A frozen linear layer and what is learnt besides, of rank two."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted() -> nn.Module:
    """Low-rank adapters; everything else is frozen."""

    def build() -> nn.Module:
        model = shards.Net().requires_grad_(False)
        model.stem, model.blocks[0] = Adapted(model.stem), Adapted(model.blocks[0])
        return model

    return seeded(build)()


def unsharded_root(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """`scale` and `spare` stay plain."""
    for module in [model.stem, *model.blocks, model.head]:
        fully_shard(module, mesh=mesh["shard"])
    return model


def ignoring(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """`scale` stays plain in a root that is sharded."""
    for module in [model.stem, *model.blocks, model.head]:
        fully_shard(module, mesh=mesh["shard"])
    return fully_shard(model, mesh=mesh["shard"], ignored_params={model.scale})


def reducing_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, t: int
) -> None:
    """FSDP2 leaves the gradients of plain parameters alone, so the loop averages them."""
    nets.loss(model, shards.batch_of(mesh, t)).backward()
    for p in model.parameters():
        if p.grad is not None and not hasattr(p, "full_tensor"):
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM, group=mesh.get_group("shard"))
            p.grad /= mesh["shard"].size()
    optimizer.step()
    optimizer.zero_grad()


class Wide(nn.Module):
    """For tensor parallelism: up over columns, down over rows, and a norm that is replicated."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 10)
        self.down = nn.Linear(10, 3)
        self.norm = nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(torch.tanh(self.up(x))))


def tensor_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    assert mesh.mesh_dim_names is not None
    return parallelize_module(model, mesh[mesh.mesh_dim_names[-1]], plan)


def both(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    tensor_parallel(model, mesh)
    for module in (model.up, model.down):
        fully_shard(module, mesh=mesh["shard"])
    return fully_shard(model, mesh=mesh["shard"])


def whole_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, t: int
) -> None:
    """Ranks of tensor parallelism read the same rows."""
    nets.train_step(model, optimizer, mesh["replica"].get_local_rank(), t)


def child(name: str) -> str:
    return name.split(".")[0]


def or_root(name: str) -> str:
    return child(name) if child(name) in ("up", "down") else "(root)"


def with_mid(root: str) -> Callable[[str], str]:
    return lambda name: "mid" if name.startswith("mid") else root


# Their names differ, because torch caches what it knows of a mesh by them, and processes live on.
DIMS = ("replica", "shard")
CASES: dict[str, Case] = {
    "tied in a group": Case(seeded(Tied), tied_group, layer_of=with_mid("emb")),
    "tied in the root's group": Case(seeded(Tied), tied_in_root, layer_of=with_mid("(root)")),
    "two modules, one group": Case(prepare=grouped, layer_of=in_group),
    "frozen group": Case(frozen_group),
    "low-rank adapters": Case(adapted),
    "root not sharded": Case(
        prepare=unsharded_root,
        step=reducing_step,
        layer_of=nets.layer_of,
    ),
    "ignored_params": Case(prepare=ignoring, step=reducing_step),
    "tensor parallel": Case(
        seeded(Wide),
        tensor_parallel,
        step=whole_step,
        layer_of=child,
        dims=("replica", "tp"),
    ),
    "one shard, two of tensor parallelism": Case(
        seeded(Wide), both, step=whole_step, layer_of=or_root, shape=(2, 1, 2), dims=(*DIMS, "tp1")
    ),
    "two shards, two of tensor parallelism": Case(
        seeded(Wide),
        both,
        layer_of=or_root,
        shape=(1, 2, 2),
        dims=(*DIMS, "tp2"),
    ),
}


def run(name: str) -> dict[str, Any]:
    return CASES[name].run()


@pytest.mark.parametrize("name", CASES)
def test_trains_like_its_plain_twin(ranks: Ranks, name: str) -> None:
    """Whole weights, norms and clips equal the simulation; frozen weights never move."""
    results = ranks.run(4, run, name)
    CASES[name].check(results)
    plain = CASES[name].make()
    trainable = {n: p for n, p in plain.named_parameters() if p.requires_grad}
    assert set(results[0]["names"]) == set(trainable)
    for result in results:
        for key, p in plain.named_parameters():
            if not p.requires_grad:
                assert torch.equal(result["values"][key], p), key


def left_alone() -> dict[str, float]:
    """`scale` is plain and nobody averages its gradient over the shards."""
    mesh = shards.mesh_of(2, 2)
    model = ignoring(shards.make_net(), mesh)
    optimizer, sync = attached(model, mesh, sync_every=2)
    with sync:
        for t in range(4):
            shards.train_step(model, optimizer, mesh, t)
    return {"scale": model.scale.item(), "weight": shards.full(model)["stem.weight"].sum().item()}


def test_plain_parameters_are_the_loops_business(ranks: Ranks) -> None:
    """What FSDP2 does not reduce stays different on the shards of a replica; over the replicas each
    place in it agrees, and what is sharded agrees everywhere."""
    results = ranks.run(4, left_alone)
    scales = [result["scale"] for result in results]
    assert scales[0] == scales[2] != scales[1] == scales[3]
    assert len({result["weight"] for result in results}) == 1
