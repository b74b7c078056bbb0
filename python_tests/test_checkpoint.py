"""Checkpoints by DCP: they change nothing, resume bit for bit, and fit other meshes."""

from __future__ import annotations

import warnings
from typing import Any

import nets
import pytest
import shards
import torch
import torch.distributed.checkpoint as dcp
from ranks import Ranks
from test_fsdp import adam
from torch import Tensor, nn

import edit_ext
from edit_ext import reference
from edit_ext.checkpoint import saved_in

RULES: dict[str, Any] = {"sync_every": 4, "clip_norm": 0.2, "ema_warmup": 2, "timeout": 30.0}
WHOLE, HALF = 15, 10  # steps; half is inside a window


def attached(replicas: int, count: int, **changes: Any) -> tuple[Any, nn.Module, Any, Any]:
    """count: shards of FSDP2; 0 is a plain model."""
    mesh = shards.mesh_of(replicas, count or 1)
    model = shards.shard(shards.make_net(), mesh) if count else shards.make_net()
    optimizer = adam(model.parameters())
    config = edit_ext.EDiT(**{**RULES, **changes})
    handle = edit_ext.attach(model, optimizer, config, mesh=mesh["replica"])
    return mesh, model, optimizer, handle


def train(run: tuple[Any, nn.Module, Any, Any], first: int, last: int, each: Any = None) -> None:
    mesh, model, optimizer, _ = run
    for t in range(first, last):
        shards.train_step(model, optimizer, mesh, t)
        if each is not None:
            each()


def save(run: tuple[Any, nn.Module, Any, Any], path: str, asynchronous: bool = False) -> None:
    _, model, optimizer, sync = run
    tree = {"run": sync.checkpoint(model, optimizer)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of DCP, about itself
        if asynchronous:
            dcp.async_save(tree, checkpoint_id=path).result()
        else:
            dcp.save(tree, checkpoint_id=path)


def load(run: tuple[Any, nn.Module, Any, Any], path: str) -> None:
    _, model, optimizer, sync = run
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load({"run": sync.checkpoint(model, optimizer, path)}, checkpoint_id=path)


def end(run: tuple[Any, nn.Module, Any, Any]) -> dict[str, Tensor]:
    """Everything that must be equal bit for bit: weights, anchors, outer momentum, inner states."""
    _, model, optimizer, sync = run
    tree = sync.checkpoint(model, optimizer).state_dict()
    found = {f"weight {n}": v for n, v in shards.full(model).items()}
    for key in ("anchors", "momentum"):
        found |= {f"{key} {n}": shards.whole(v) for n, v in tree[key].items()}
    own = next(value for key, value in tree.items() if key.startswith("replica"))
    for name, state in own["optimizer"]["state"].items():
        found |= {f"{name} {k}": shards.whole(v) for k, v in state.items()}
    found["meta"] = torch.tensor([ord(c) for c in tree["meta"] + own["meta"]])
    return found


def unbroken(replicas: int, count: int, changes: dict[str, Any]) -> dict[str, Tensor]:
    run = attached(replicas, count, **changes)
    train(run, 0, WHOLE)
    out = end(run)
    run[3].detach()
    return out


def saving(replicas: int, count: int, changes: dict[str, Any], path: str) -> dict[str, Tensor]:
    """Saves after every step, resumes in the middle in a new model, and trains to the end."""
    run = attached(replicas, count, **changes)
    save(run, f"{path}/0")
    step = iter(range(1, WHOLE))
    train(run, 0, HALF, lambda: save(run, f"{path}/{next(step)}", asynchronous=True))
    run[3].detach()
    again = attached(replicas, count, **changes)
    load(again, f"{path}/{HALF}")
    train(again, HALF, WHOLE)
    out = end(again)
    again[3].detach()
    return out


@pytest.mark.parametrize(
    ("replicas", "count", "changes"),
    [(2, 2, {}), (2, 1, {"warmup_steps": 12}), (1, 2, {"wire": "bf16"})],
)
def test_saving_and_resuming_change_nothing(
    ranks: Ranks, tmp_path: Any, replicas: int, count: int, changes: dict[str, Any]
) -> None:
    """A run that saves at every step and is resumed in a window equals one that does neither."""
    world = replicas * count
    straight = ranks.run(world, unbroken, replicas, count, changes)
    broken = ranks.run(world, saving, replicas, count, changes, str(tmp_path), seconds=120)
    for left, right in zip(straight, broken, strict=True):
        assert nets.same(left, right)


def first_part(replicas: int, count: int, path: str, momentum: str) -> dict[str, Any]:
    run = attached(replicas, count, momentum=momentum)
    train(run, 0, HALF)
    save(run, path)
    out = described(run)
    run[3].detach()
    return out


def described(run: tuple[Any, nn.Module, Any, Any]) -> dict[str, Any]:
    tensors = end(run)
    kept = {n: v for n, v in tensors.items() if n.split()[0] in ("anchors", "momentum")}
    sync = run[3]
    own = {n: v for n, v in tensors.items() if n not in kept and n != "meta"}
    layers = {n: layer["detector"] for n, layer in sync.state_dict()["layers"].items()}
    return {"kept": kept, "own": own, "detectors": layers, "step": sync.step}


def second_part(
    replicas: int, count: int, path: str, momentum: str
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, Tensor]]:
    """What was loaded; whole weights of this replica at the end of its window, and after a sync."""
    run = attached(replicas, count, momentum=momentum)
    load(run, path)
    out = described(run)
    train(run, HALF, HALF + 2)
    ready = shards.full(run[1])
    with run[3]:
        pass
    return out, ready, shards.full(run[1])


def synced(found: dict[str, Any], ready: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The weights that replicas which are `ready` have after a sync, by the reference."""
    rules = {name: value for name, value in RULES.items() if name in ("clip_norm", "ema_warmup")}
    out: dict[str, Tensor] = {}
    for layer, table in found["detectors"].items():
        names = [name for name in ready[0] if shards.layer_of(name) == layer]

        def flat(tensors: Any, names: list[str] = names) -> Tensor:
            return torch.cat([tensors(name).flatten().double() for name in names])

        result = reference.sync_layer(
            flat(lambda name: found["kept"][f"anchors {name}"]),
            [flat(weights.__getitem__) for weights in ready],
            flat(lambda name: found["kept"][f"momentum {name}"]),
            [reference.Detector(*row) for row in table.tolist()],
            reference.Policy(**rules),
            [4] * len(ready),
            param_dtype=torch.float32,
        )
        parts = result.anchor.split([ready[0][name].numel() for name in names])
        out |= {n: v.view_as(ready[0][n]) for n, v in zip(names, parts, strict=True)}
    return out


SHARDED, REPLICATED = "sharded", "replicated"


@pytest.mark.parametrize(
    ("before", "after", "momenta"),
    [
        ((2, 2), (1, 2), (SHARDED, SHARDED)),
        ((2, 2), (2, 1), (SHARDED, REPLICATED)),
        ((2, 2), (1, 3), (SHARDED, SHARDED)),
        ((2, 2), (4, 1), (REPLICATED, SHARDED)),
        ((2, 2), (1, 4), (SHARDED, SHARDED)),
        ((2, 2), (1, 1), (REPLICATED, REPLICATED)),
        ((1, 2), (2, 2), (SHARDED, REPLICATED)),
        ((4, 1), (2, 2), (REPLICATED, REPLICATED)),
        ((2, 2), (2, 0), (SHARDED, SHARDED)),
        ((2, 0), (1, 2), (SHARDED, SHARDED)),
    ],
)
def test_row_18_resharding(
    ranks: Ranks, tmp_path: Any, before: Any, after: Any, momenta: tuple[str, str]
) -> None:
    """On another mesh anchors and momentum are those that were saved, whoever holds them; replica r
    takes the weights, inner states and detectors of replica r mod R; the next sync is that of the
    reference."""
    path = str(tmp_path / "saved")
    sizes = [max(count, 1) for _, count in (before, after)]
    saved = ranks.run(before[0] * sizes[0], first_part, *before, path, momenta[0])
    assert saved_in(path).replicas == before[0]
    results = ranks.run(after[0] * sizes[1], second_part, *after, path, momenta[1])
    expected = None
    if before[1] and after[1]:  # else the layers are cut otherwise, and detectors start anew
        expected = synced(results[0][0], [results[r * sizes[1]][1] for r in range(after[0])])
    for rank, (found, ready, end_weights) in enumerate(results):
        source = rank // sizes[1] % before[0]
        assert nets.same(found["kept"], saved[0]["kept"])
        assert nets.same(found["own"], saved[source * sizes[0]]["own"])
        assert found["step"] == HALF
        rows = [r % before[0] for r in range(after[0])]
        for layer in ("stem", "blocks.1", "head"):
            assert torch.equal(found["detectors"][layer], saved[0]["detectors"][layer][rows])
        assert nets.same(end_weights, results[0][2])
        assert any((v != ready[n]).any() for n, v in end_weights.items())
        for name, value in (expected or {}).items():
            torch.testing.assert_close(end_weights[name].double(), value, rtol=0, atol=1e-6)
