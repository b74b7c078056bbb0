"""Field reports on models that FSDP2 shards: each row's scenario with its right outcome."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import nets
import pytest
import shards
import test_fsdp_refusals
import torch
import torch.distributed as dist
from fsdp_cases import attached, built, look, seeded
from ranks import Ranks
from test_fsdp_models import Stack, shard_stack
from test_rows_values import lookahead
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import edit_ext
from edit_ext.explain import memory
from edit_ext.sharding import local


def own(model: nn.Module) -> dict[str, Tensor]:
    """Copies of this rank's shards."""
    return {name: local(p).clone() for name, p in model.named_parameters()}


def other_seeds() -> dict[str, Any]:
    """Every rank draws its own weights: what is said of that, and what a broadcast makes of it."""
    mesh = shards.mesh_of(2, 2)
    torch.manual_seed(dist.get_rank())
    model = shards.shard(shards.Net(), mesh)
    said = refusal(lambda: attached(model, mesh))
    before = own(model)
    attached(model, mesh, start="broadcast")[1].detach()
    half = shards.make_net().to(torch.bfloat16 if mesh["replica"].get_local_rank() else None)
    dtypes = refusal(lambda: attached(shards.shard(half, mesh), mesh))
    model_0 = shards.shard(shards.make_net(), mesh)
    start = own(model_0)
    with attached(model_0, mesh)[1] as sync:
        sync.flush()
        norms = {norm for entry in sync.metrics() for norm in entry["norms"]}
    assert nets.same(start, own(model_0))
    return {"said": said, "before": before, "after": own(model), "dtypes": dtypes, "norms": norms}


def refusal(way: Callable[[], Any]) -> str:
    try:
        way()
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_row_02_start_up_of_shards(ranks: Ranks) -> None:
    """Replicas of other seeds or dtypes: an error that names the first difference on every rank, or
    replica 0's shards in each replica; a sync without steps is zero."""
    results = ranks.run(4, other_seeds)
    for rank, result in enumerate(results):
        assert nets.same(result["after"], results[rank % 2]["before"])
        assert result["norms"] == {0.0}
        for said, words in (
            (result["said"], "ValueError: replicas differ in their values: 'stem.weight': "),
            (result["dtypes"], "ValueError: replicas differ in their model: 'scale': "),
        ):
            assert said.startswith(words) and "replica 1, shard 0 (rank 2) has" in said, said
        assert "torch.float32" in result["dtypes"] and "torch.bfloat16" in result["dtypes"]


def one_rank(lr: float, momentum: float) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    """A mesh of one rank, and the same loop around a plain model with a lookahead by hand."""
    mesh = shards.mesh_of(1, 1)
    reference = shards.make_net()
    model = shards.shard(shards.make_net(), mesh)
    optimizer, inner = nets.sgd(model), nets.sgd(reference)
    slow = {name: p.detach().double() for name, p in reference.named_parameters()}
    speed = {name: torch.zeros_like(p) for name, p in slow.items()}
    config = nets.plain(outer_lr=lr, outer_momentum=momentum)
    with edit_ext.attach(model, optimizer, config, mesh=mesh) as sync:
        for t in range(9):
            if t and t % 2 == 0:
                lookahead(reference, slow, speed, lr, momentum)
            shards.train_step(model, optimizer, mesh, t)
            nets.train_step(reference, inner, 0, t)
        found = shards.full(model)
        totals = sync.totals()
    return found, nets.values(reference), (totals["syncs"], totals["bytes_sent"])


@pytest.mark.parametrize(("lr", "momentum"), [(1.0, 0.0), (0.7, 0.0), (0.7, 0.8)])
def test_row_03_mesh_of_one_rank(ranks: Ranks, lr: float, momentum: float) -> None:
    """FSDP2 on a mesh of one rank is a world of one: plain training, or a lookahead optimizer."""
    ((found, expected, totals),) = ranks.run(1, one_rank, lr, momentum)
    assert totals == (4, 0)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=2e-6, atol=1e-7)


def frozen(big: bool) -> dict[str, Any]:
    """Ten syncs of a model to which, if `big`, a frozen block of 99 % of its weights is added."""
    mesh = shards.mesh_of(2, 2)
    model = shards.make_net()
    if big:
        model.blocks.append(seeded(lambda: nn.Linear(400, 400))().requires_grad_(False))
    shards.shard(model, mesh)
    still = {n: local(p).clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer, sync = attached(model, mesh, sync_every=1)
    for t in range(11):
        shards.train_step(model, optimizer, mesh, t)
    found = {"sent": sync.totals()["bytes_sent"], "memory": memory(sync._engine)}
    assert sync.totals()["syncs"] == 10
    now = own(model)
    assert all(torch.equal(value, now[name]) for name, value in still.items())
    model.blocks[-1].requires_grad_(True)
    found["unfrozen"] = refusal(lambda: shards.train_step(model, optimizer, mesh, 11))
    sync.detach()
    return found


def test_row_04_frozen_shards(ranks: Ranks) -> None:
    """What is frozen costs no anchor, momentum, buffer or byte and never moves: all figures are
    those of a model without it. Unfreezing is refused by name."""
    without = ranks.run(4, frozen, False)
    for mine, theirs in zip(ranks.run(4, frozen, True), without, strict=True):
        assert mine["memory"] == theirs["memory"] and mine["memory"]["anchors"] > 0
        assert mine["sent"] == theirs["sent"]
        assert "'blocks.3.weight' was frozen at attach and is not now" in mine["unfrozen"]
        assert theirs["unfrozen"] == "no error"


def uneven() -> dict[str, Any]:
    """Ten rows on four ranks: what parameters, anchors and momentum are around a sync."""
    mesh = shards.mesh_of(1, 4)
    model = shard_stack(seeded(Stack)(), mesh)
    start = shards.full(model)
    rows = local(model.stem.weight).shape[0]
    optimizer, sync = attached(model, mesh, sync_every=2, outer_lr=0.5, outer_momentum=0.5)
    looks = [look(model)]
    for t in range(2):
        nets.train_step(model, optimizer, 0, t)
    before = shards.full(model)
    sync.flush()
    looks.append(look(model))
    tree = sync.checkpoint(model, optimizer).state_dict()
    described = {
        (key, name): (t.shape, t.stride(), t.placements, local(t).shape, t.full_tensor())
        for key in ("anchors", "momentum")
        for name, t in tree[key].items()
    }
    params = {name: (p.placements, local(p).shape) for name, p in model.named_parameters()}
    sync.detach()
    return {
        "rows": rows,
        "start": start,
        "before": before,
        "after": shards.full(model),
        "looks": looks,
        "described": described,
        "params": params,
    }


def test_row_11_uneven_shards(ranks: Ranks) -> None:
    """Ten rows on four ranks keep global shape, strides and placements through a sync; anchors and
    momentum in the checkpoint are whole tensors of ten rows with the right values."""
    results = ranks.run(4, uneven)
    assert [result["rows"] for result in results] == [3, 3, 3, 1]
    for result in results:
        assert result["looks"][0] == result["looks"][1]
        for (key, name), (shape, stride, placements, part, whole) in result["described"].items():
            before = result["start"][name]
            assert (shape, stride) == (before.shape, before.stride())
            assert (placements, part) == result["params"][name]
            moved = before.double() - result["before"][name].double()  # the pseudo-gradient
            after = before.double() - 0.5 * (moved + 0.5 * moved)
            expected = moved if key == "momentum" else after
            torch.testing.assert_close(whole.double(), expected, rtol=1e-5, atol=1e-7)
            if key == "anchors":
                assert torch.equal(whole, result["after"][name])
        assert result["described"]["anchors", "stem.weight"][0] == (10, 5)


def adapt(model: nn.Module) -> None:
    model.head.adapter = nn.Linear(2, 2)


def assign(model: nn.Module) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


CHANGES = {
    adapt: "parameter 'head.adapter.weight' was added after attach",
    assign: "parameter 'scale' was replaced by another object after attach",
}


def changed(sharded: bool, warmup: int) -> list[tuple[str, int]]:
    """What each change after two steps leads to, and after how many steps; window of four."""
    found = []
    for change in CHANGES:
        mesh, model = built(plain=not sharded)
        optimizer, sync = attached(model, mesh, sync_every=4, warmup_steps=warmup)
        said, t = "no error", 0
        while said == "no error" and t < 9:
            if t == 2:
                change(model)
            said = refusal(functools.partial(shards.train_step, model, optimizer, mesh, t))
            t += 1
        sync.detach()
        dist.barrier()
        found.append((said, t))
    return found


@pytest.mark.parametrize(("warmup", "noticed"), [(0, 5), (4, 3)], ids=["local", "warm-up"])
@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "plain"])
def test_row_13_stale_references(ranks: Ranks, sharded: bool, warmup: int, noticed: int) -> None:
    """An adapter injected after attach, and load_state_dict(assign=True), are reported by name: in
    the forward of the next sync, and in the warm-up before the next step, on every rank."""
    for found in ranks.run(4 if sharded else 2, changed, sharded, warmup):
        for (said, t), words in zip(found, CHANGES.values(), strict=True):
            assert words in said and t == noticed, (said, t)


def refused(ways: list[str]) -> list[str]:
    """What some of test_fsdp_refusals.py raises, by name."""
    said = []
    for way in ways:
        said.append(refusal(getattr(test_fsdp_refusals, way)))
        dist.barrier()
    return said


def test_row_13_sharded_too_late(ranks: Ranks) -> None:
    """An optimizer made before fully_shard is refused at attach; fully_shard after attach at the
    next forward."""
    for old, early in ranks.run(4, refused, ["old_optimizer", "too_early"]):
        assert old.startswith("ValueError: optimizer 0 (SGD) steps a parameter of shape (1,)")
        assert "that the model lacks; build the optimizer from this model's parameters" in old
        assert early.startswith("RuntimeError: parameter 'scale' was replaced by another object")


def test_row_15_mesh_that_replicates(ranks: Ranks) -> None:
    """fully_shard over replicas too averages every gradient: refused at attach, whatever else is
    passed, with the way out."""
    ways = ["hybrid_and_its_mesh", "hybrid_and_its_replicas", "hybrid_alone"]
    for texts in ranks.run(4, refused, ways):
        for said in texts:
            assert "FSDP2 then averages gradients over all replicas at every step" in said
            assert "Give fully_shard the shard dimension alone, as mesh['shard']" in said


def clipped(replicas: int, count: int, whole: bool) -> tuple[dict[str, Tensor], list[Any]]:
    """Three syncs of which every step is clipped; weights, and what was decided."""
    mesh = shards.mesh_of(replicas, count)
    model = shards.make_net()
    if whole:
        fully_shard(model, mesh=mesh["shard"])
    else:
        shards.shard(model, mesh)
    config = edit_ext.EDiT(sync_every=2, clip_norm=1e-3, timeout=20.0)
    with edit_ext.attach(model, nets.sgd(model), config, mesh=mesh) as sync:
        optimizer = sync._engine.ticker.optimizers[0]
        for t in range(7):
            shards.train_step(model, optimizer, mesh, t)
        keys = ("sync_index", "layer", "norms", "merged_norm", "clip")
        decided = [[entry[key] for key in keys] for entry in sync.metrics()]
        return shards.full(model), decided


@pytest.mark.parametrize("whole", [False, True], ids=["by layer", "whole model"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_row_23_norm_of_all_shards(ranks: Ranks, replicas: int, whole: bool) -> None:
    """On 1, 2 and 4 shards a clipped step has one norm, one factor and the same weights; the norms
    are plain numbers, equal on all ranks."""
    plain = ranks.run(replicas, clipped, replicas, 1, whole)
    decisions = plain[0][1]
    names = {entry[1] for entry in decisions}
    assert names == ({"(root)"} if whole else set(map(shards.layer_of, plain[0][0])))
    assert all(type(n) is float for _, _, norms, *more in decisions for n in (*norms, *more))
    assert all(clip < 1 for *_, merged, clip in decisions if merged)
    for count in (2, 4) if replicas == 1 else (2,):
        results = ranks.run(replicas * count, clipped, replicas, count, whole)
        for rank, (weights, decided) in enumerate(results):
            assert decided == results[0][1]
            for (*place, norms, merged, clip), (*there, n, m, c) in zip(
                decided, decisions, strict=True
            ):
                assert place == there
                assert [*norms, merged, clip] == pytest.approx([*n, m, c], rel=1e-5)
            for name, value in plain[rank // count][0].items():
                torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6)
