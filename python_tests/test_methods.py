"""Every method over Gloo against its own fp64 reference, and against the others where they meet."""

from __future__ import annotations

from typing import Any

import pytest
import shards
import torch
import torch.distributed as dist
from method_cases import CASES, INNER, PLAIN, SHARDED, STEPS
from nets import batch, loss, make_net, values
from ranks import Ranks
from torch import Tensor, nn

import edit_ext


class Watch:
    """The weights that a forward uses, each taken when its module runs."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: dict[str, Tensor] = {}
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._hook(f"{name}." if name else ""))

    def _hook(self, prefix: str) -> Any:
        def look(module: nn.Module, args: Any) -> None:
            for name, param in module.named_parameters(recurse=False):
                self.seen[prefix + name] = param.detach().clone()

        return look


def run(name: str) -> dict[str, Any]:
    """One replica's training: weights of every forward, the end, and how it went."""
    config, inner, _ = CASES[name]
    model = make_net()
    optimizer = INNER[inner][0](model.parameters())
    forwards = []
    with edit_ext.attach(model, optimizer, config) as sync:
        watch = Watch(model)
        for t in range(STEPS):
            loss(model, batch(dist.get_rank(), t)).backward()
            forwards.append(dict(watch.seen))
            optimizer.step()
            optimizer.zero_grad()
        sync.flush()
        totals, metrics = sync.totals(), sync.metrics()
    names = {p: n for n, p in model.named_parameters()}
    states: dict[str, dict[str, Tensor]] = {}
    for param, own in optimizer.state.items():
        for key, value in own.items():
            if isinstance(value, Tensor) and key != "step":
                states.setdefault(key, {})[names[param]] = value
    return {
        "forwards": forwards, "final": values(model), "states": states, "totals": totals,
        "metrics": metrics,
    }  # fmt: skip


def near(found: Tensor, wanted: Tensor) -> bool:
    scale = max(wanted.abs().max().item(), 1e-3)
    return bool((found.double() - wanted).abs().max().item() <= 1e-6 * max(scale, 1.0))


# Processes and shards are of the engine, not of a method; test_stacked.py has every method on four
# replicas. The slow ones are all the rest.
WIDE = ("DiLoCo", "StreamingDiLoCo-late", "CO2-replicated", "DESLOC-ADOPT")
SHARDS = (*WIDE, "PostLocalSGD", "CO2", "DESLOC", "DESLOC-adaptive")


def slow_unless(names: tuple[str, ...]) -> list[Any]:
    return [pytest.param(n, marks=() if n in names else pytest.mark.slow) for n in CASES]


@pytest.mark.parametrize("name", CASES)
def test_trajectory(ranks: Ranks, name: str) -> None:
    """The weights of every forward and of the end equal the reference to 1e-6; replicas end with
    the same bits; optimizer states too where they are averaged."""
    compare(ranks, 2, name)


@pytest.mark.parametrize("name", slow_unless(WIDE))
def test_four_processes(ranks: Ranks, name: str) -> None:
    """The same with four replicas."""
    compare(ranks, 4, name)


def compare(ranks: Ranks, world: int, name: str) -> None:
    results, truth = ranks.run(world, run, name), PLAIN.train(name, world)
    for rank, result in enumerate(results):
        for t, seen in enumerate(result["forwards"]):
            for param, value in seen.items():
                assert near(value, truth.forwards[t][rank][param]), (rank, t, param)
        for param, value in result["final"].items():
            assert near(value, truth.final[rank][param]), (rank, param)
            assert torch.equal(value, results[0]["final"][param]), (rank, param)
        for key, state in result["states"].items():
            for param, value in state.items():
                assert near(value, truth.states[rank][key][param]), (rank, key, param)


def run_sharded(replicas: int, count: int, name: str) -> dict[str, Tensor]:
    """One rank's training of FSDP2 shards; whole weights at the end."""
    config, inner, _ = CASES[name]
    mesh = shards.mesh_of(replicas, count)
    model = shards.shard(shards.make_net(), mesh)
    optimizer = INNER[inner][0](model.parameters())
    with edit_ext.attach(model, optimizer, config, mesh=mesh) as sync:
        for t in range(STEPS):
            shards.train_step(model, optimizer, mesh, t)
        sync.flush()
    return shards.full(model)


@pytest.mark.parametrize("name", slow_unless(SHARDS))
def test_sharded(ranks: Ranks, name: str) -> None:
    """Over replicas of two FSDP2 shards each, optimizer states as DTensors, all ends the same."""
    results, truth = ranks.run(4, run_sharded, 2, 2, name), SHARDED.train(name, 2)
    for rank, result in enumerate(results):
        for param, value in result.items():
            assert near(value, truth.final[0][param]), (rank, param)
            assert torch.equal(value, results[0][param]), (rank, param)
