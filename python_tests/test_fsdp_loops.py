"""Training loops as people write them around FSDP2: each trains as plain replicas do."""

from __future__ import annotations

import warnings
from typing import Any

import nets
import pytest
import shards
import torch
from fsdp_cases import Case, seeded
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method


def pair(replica: int, t: int) -> list[Any]:
    return [nets.batch(replica, t), nets.batch(replica, t + 100)]


def sum_of_two(model: nn.Module, data: list[Any]) -> Tensor:
    return nets.loss(model, data[0]) + nets.loss(model, data[1])


def accumulating(model: Any, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, t: int) -> None:
    """Two micro-batches, of which only the second reduces over the shards."""
    for micro, last in ((t, False), (t + 100, True)):
        model.set_requires_gradient_sync(last)
        nets.loss(model, shards.batch_of(mesh, micro)).backward()
    optimizer.step()
    optimizer.zero_grad()


def two_and_two(model: Any, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, t: int) -> None:
    """Two forwards, then two backwards."""
    losses = [nets.loss(model, shards.batch_of(mesh, micro)) for micro in (t, t + 100)]
    for loss in losses:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def looking(model: Any, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, t: int) -> None:
    """Evaluations around, and a training forward whose backward never comes."""
    model.eval()
    with torch.no_grad():
        model(nets.batch(0, 5)[0])
    model.train()
    nets.loss(model, shards.batch_of(mesh, t + 50))
    with torch.no_grad():
        model(nets.batch(0, 6)[0])
    shards.train_step(model, optimizer, mesh, t)


class Fragile(shards.Net):
    """Its second block raises where it is told to."""

    broken = False

    def forward(self, x: Tensor) -> Tensor:
        if self.broken and torch.is_grad_enabled():
            self.blocks[0](torch.tanh(self.stem(x)))
            raise ZeroDivisionError
        return super().forward(x)


def retrying(model: Any, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, t: int) -> None:
    """Every forward raises half way, in the middle of a sync too; then it is evaluated, which
    gathers what the sync has not written yet, and tried again."""
    model.broken = True
    with pytest.raises(ZeroDivisionError):
        nets.loss(model, shards.batch_of(mesh, t))
    model.reset_iter_state()
    model.broken = False
    with torch.no_grad():
        model(nets.batch(0, 5)[0])
    shards.train_step(model, optimizer, mesh, t)


class Method(shards.Net):
    def objective(self, data: tuple[Tensor, Tensor]) -> Tensor:
        return (self.forward(data[0]) - data[1]).square().mean()


def registered(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    shards.shard(model, mesh)
    register_fsdp_forward_method(model, "objective")
    return model


def plain_root(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Children only: without the root's hooks FSDP2 gathers nothing of the root itself."""
    model.scale.requires_grad_(False)
    model.spare.requires_grad_(False)
    for module in [model.stem, *model.blocks, model.head]:
        fully_shard(module, mesh=mesh["shard"])
    return model


def without_root() -> nn.Module:
    model = seeded(Method)()
    model.scale.requires_grad_(False)
    model.spare.requires_grad_(False)
    return model


def by_method(model: Any, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, t: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="edit_ext: a sync was due but no forward")
        model.objective(shards.batch_of(mesh, t)).backward()
        optimizer.step()
    optimizer.zero_grad()


def by_forward(model: Any, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, t: int) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="edit_ext: a sync was due but no forward")
        x, y = shards.batch_of(mesh, t)
        (model.forward(x) - y).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()


def empty_batch(replica: int, t: int) -> Any:
    """Replica 1 has nothing in a step of the warm-up and in two of a window and a half."""
    return None if replica == 1 and t in (1, 3, 4) else nets.batch(replica, t)


def loss_or_none(model: nn.Module, data: Any) -> Tensor:
    return torch.zeros((), requires_grad=True) if data is None else nets.loss(model, data)


def skipping(model: Any, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, t: int) -> None:
    if empty_batch(mesh["replica"].get_local_rank(), t) is not None:
        nets.loss(model, shards.batch_of(mesh, t)).backward()
    optimizer.step()
    optimizer.zero_grad()


def clipping(model: Any, optimizer: torch.optim.Optimizer, mesh: DeviceMesh, t: int) -> None:
    nets.loss(model, shards.batch_of(mesh, t)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad()


class ClippingSGD(torch.optim.SGD):
    """Clips at the beginning of its step."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.05)
        return super().step(closure)


def clipping_sgd(params: Any) -> torch.optim.Optimizer:
    return ClippingSGD(params, lr=0.1, momentum=0.9)


def unreduced(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return shards.shard(model, mesh, reshard_after_forward=False)


CASES: dict[str, Case] = {
    "accumulation": Case(step=accumulating, batch=pair, loss=sum_of_two),
    "two forwards, two backwards": Case(step=two_and_two, batch=pair, loss=sum_of_two),
    "looking around": Case(prepare=unreduced, step=looking),
    "forward that raises": Case(seeded(Fragile), unreduced, step=retrying, rules={"prefetch": 1}),
    "replica without data": Case(step=skipping, batch=empty_batch, loss=loss_or_none),
    "replica without data, plain root": Case(
        without_root, plain_root, step=skipping, batch=empty_batch, loss=loss_or_none
    ),
    "clipping": Case(step=clipping, truth={"optimizer": clipping_sgd}),
    "uneven data": Case(quota=[7, 5]),
}
# Past model(...) a sync comes before the step, behind the gradients: no matter of the equations.
PAST_FORWARD: dict[str, Case] = {
    "registered method": Case(seeded(Method), registered, step=by_method),
    "method": Case(without_root, plain_root, step=by_method),
    "forward by name": Case(without_root, plain_root, step=by_forward),
}


def run(name: str, plain: bool = False) -> dict[str, Any]:
    return {**CASES, **PAST_FORWARD}[name].run(plain)


@pytest.mark.parametrize("name", CASES)
def test_trains_like_plain_replicas(ranks: Ranks, name: str) -> None:
    """Whole weights, norms and clips equal the simulation of the same loop."""
    CASES[name].check(ranks.run(4, run, name))


@pytest.mark.parametrize("name", PAST_FORWARD)
def test_trains_like_two_attached_plain_models(ranks: Ranks, name: str) -> None:
    """Trained past model(...), sharded replicas do what whole replicas do there."""
    plain = ranks.run(2, run, name, True)[0]
    for result in ranks.run(4, run, name):
        assert result["totals"]["syncs"] == plain["totals"]["syncs"] > 1
        for key, value in plain["values"].items():
            torch.testing.assert_close(result["values"][key], value, rtol=0, atol=3e-6)
