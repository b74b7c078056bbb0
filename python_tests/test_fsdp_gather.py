"""What FSDP2 has gathered before we write: six ways to compute with old weights, by value.

In the forward of a sync every module must see the whole new weights. Each way is also run with the
part of edit_ext/fsdp.py that handles it taken out, which must show.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import nets
import pytest
import shards
import torch
from ranks import Ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import edit_ext
from edit_ext import fsdp
from edit_ext.checks import IdentityWatch


def plainly(model: nn.Module, mesh: Any) -> None:
    shards.shard(model, mesh)


def unreduced(model: nn.Module, mesh: Any) -> None:
    shards.shard(model, mesh, reshard_after_forward=False)


def prefetching(model: nn.Module, mesh: Any) -> None:
    shards.shard(model, mesh)
    chain = [model.stem, *model.blocks, model.head]
    model.set_modules_to_forward_prefetch([model.stem, model.blocks[0]])
    for module, after in itertools.pairwise(chain):
        module.set_modules_to_forward_prefetch([after])


def grouped(model: nn.Module, mesh: Any) -> None:
    fully_shard([model.stem, model.head], mesh=mesh["shard"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])


def unsharding_inside(model: nn.Module, mesh: Any) -> None:
    """The stem's forward unshards two blocks ahead, as explicit prefetching does."""
    shards.shard(model, mesh, reshard_after_forward=False)

    def ahead(module: nn.Module, args: Any) -> None:
        model.blocks[1].unshard(async_op=True)
        model.blocks[2].unshard()

    model.stem.register_forward_pre_hook(ahead)


def nothing(model: nn.Module) -> None:
    """A plain loop."""


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model.eval()(nets.batch(0, 99)[0])
    model.train()


def gather(model: nn.Module) -> None:
    model.blocks[1].unshard()


def gather_later(model: nn.Module) -> None:
    model.blocks[1].unshard(async_op=True)


# name: (how the model is sharded, what happens between the step and the next forward)
WAYS: dict[str, tuple[Callable[[nn.Module, Any], None], Callable[[nn.Module], None]]] = {
    "plain": (plainly, nothing),
    "prefetch": (prefetching, nothing),
    "root after an eval forward": (plainly, evaluate),
    "reshard_after_forward=False": (unreduced, evaluate),
    "unshard by the user": (plainly, gather),
    "pending unshard by the user": (plainly, gather_later),
    "unshard inside the forward": (unsharding_inside, nothing),
    "second module of a group": (grouped, nothing),
}


def seen_and_held(way: str, without: str | None) -> list[str]:
    """Names of weights that a module has seen in the forward of a sync and that are not those that
    the replicas have agreed on. without: what of edit_ext.fsdp is taken out."""
    mesh = shards.mesh_of(2, 2)
    model = shards.make_net()
    sharded, between = WAYS[way]
    sharded(model, mesh)
    patch = pytest.MonkeyPatch()
    if without == "both":
        patch.setattr(fsdp, "gathers", lambda module: [module])
    if without is not None:
        patch.setattr(fsdp, "reshard", lambda modules: None)
        patch.setattr(IdentityWatch, "check", lambda self, model: None)  # it would notice first
    optimizer = nets.sgd(model)
    seen: dict[str, Tensor] = {}

    def watch(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            for key, value in module.named_parameters(recurse=False):
                seen[f"{name}.{key}" if name else key] = value.detach().clone()

        return hook

    for name, module in model.named_modules():
        module.register_forward_pre_hook(watch(name))
    try:
        with edit_ext.attach(model, optimizer, nets.plain(sync_every=2), mesh=mesh) as sync:
            wrong: set[str] = set()
            for t in range(5):
                between(model)
                seen.clear()
                before = sync.sync_index
                loss = nets.loss(model, shards.batch_of(mesh, t))
                saw = dict(seen)
                loss.backward()
                if sync.sync_index > before:
                    held = shards.full(model)  # nothing has stepped: what was written
                    wrong |= {name for name, value in saw.items() if (value != held[name]).any()}
                optimizer.step()
                optimizer.zero_grad()
            assert sync.sync_index == 2
    finally:
        patch.undo()
    return sorted(wrong)


@pytest.mark.parametrize("way", WAYS)
def test_every_module_sees_the_new_weights(ranks: Ranks, way: str) -> None:
    """The weights in a sync's forward are the merged ones, on all ranks."""
    assert ranks.run(4, seen_and_held, way, None) == [[], [], [], []]


@pytest.mark.parametrize(
    ("way", "without"),
    [
        ("prefetch", "both"),
        ("root after an eval forward", "reshard"),
        ("reshard_after_forward=False", "reshard"),
        ("unshard by the user", "reshard"),
        ("pending unshard by the user", "reshard"),
        ("unshard inside the forward", "reshard"),
    ],
)
def test_the_check_bites(ranks: Ranks, way: str, without: str) -> None:
    """With what handles it taken out, some module computes with old weights."""
    assert all(wrong for wrong in ranks.run(4, seen_and_held, way, without))
