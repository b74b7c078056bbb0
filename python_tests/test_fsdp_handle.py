"""What a handle does on FSDP2 models: pause, anchors, state, leaving and coming back."""

from __future__ import annotations

import io
from typing import Any

import nets
import pytest
import shards
import torch
from fsdp_cases import attached, built
from ranks import Ranks
from torch import Tensor

from edit_ext.sharding import local
from edit_ext.state import FORMAT


def life(plain: bool) -> list[dict[str, Tensor]]:
    """Anchors, a pause, a detach with plain steps and a second attach; weights on the way."""
    mesh, model = built(plain)
    seen: list[dict[str, Tensor]] = []
    optimizer, sync = attached(model, mesh)
    for t in range(8):
        if t == 4:
            sync.pause()
        shards.train_step(model, optimizer, mesh, t)
        if t == 5:
            assert sync.step == 4
            sync.resume()
        seen.append(shards.full(model))
        with sync.anchor_weights():
            shards.full(model)
            with torch.no_grad():
                model.eval()(nets.batch(0, 9)[0])
                model.train()
            seen.append(shards.full(model))
        seen.append(shards.full(model))
        assert nets.same(seen[-3], seen[-1]), "anchor_weights() did not put the weights back"
    sync.detach()
    shards.train_step(model, optimizer, mesh, 8)
    optimizer, sync = attached(model, mesh, start="broadcast", warmup_steps=1)
    with sync:
        for t in range(5):
            with sync.no_sync():
                nets.loss(model, shards.batch_of(mesh, t + 50)).backward()
            shards.train_step(model, optimizer, mesh, t)
    seen.append(shards.full(model))
    return seen


def adversaries(plain: bool) -> list[dict[str, Tensor]]:
    """Two attached models: one is trained through the other."""
    mesh, first = built(plain)
    second = shards.make_net() if plain else shards.shard(shards.make_net(), mesh)
    one, first_sync = attached(first, mesh, sync_every=2)
    two, second_sync = attached(second, mesh, sync_every=3)
    with first_sync, second_sync:
        for t in range(7):
            x, y = shards.batch_of(mesh, t)
            second(torch.cat([first(x).detach(), y[:, :2]], 1)).square().mean().backward()
            two.step()
            two.zero_grad()
            second(torch.cat([first(x), y[:, :2]], 1)).square().mean().backward()
            one.step()
            one.zero_grad()
            two.zero_grad()
        assert (first_sync.step, second_sync.step) == (7, 7)
        assert (first_sync.sync_index, second_sync.sync_index) == (3, 2)
        first_sync.flush()
        second_sync.flush()
    return [shards.full(first), shards.full(second)]


@pytest.mark.parametrize("what", [life, adversaries], ids=["life", "adversaries"])
def test_like_plain_replicas(ranks: Ranks, what: Any) -> None:
    """The handle of a sharded model does at every point what that of a plain one does."""
    plain = ranks.run(2, what, True)
    sharded = ranks.run(4, what, False)
    for rank, seen in enumerate(sharded):
        for index, (mine, theirs) in enumerate(zip(seen, plain[rank // 2], strict=True)):
            for name, value in theirs.items():
                torch.testing.assert_close(
                    mine[name], value, rtol=0, atol=3e-6, msg=f"{rank}, {index}, {name}"
                )


def resumed(stop: int, steps: int) -> dict[str, Any]:
    """Stops at `stop`, saves each rank's state, and goes on in new objects."""
    mesh, model = built(plain=False)
    rules = {"warmup_steps": 2, "clip_norm": 0.2, "outer_momentum": 0.8, "outer_lr": 0.7}
    optimizer, sync = attached(model, mesh, **rules)
    for t in range(stop):
        shards.train_step(model, optimizer, mesh, t)
    saved = io.BytesIO()
    torch.save(sync.state_dict(), saved)
    held = {name: local(p).clone() for name, p in model.named_parameters()}
    inner = optimizer.state_dict()
    sync.detach()

    mesh, model = built(plain=False)
    optimizer, sync = attached(model, mesh, **rules)
    for name, p in model.named_parameters():
        local(p).copy_(held[name])
    optimizer.load_state_dict(inner)
    saved.seek(0)
    state = torch.load(saved)
    seat = (mesh["replica"].get_local_rank(), mesh["shard"].get_local_rank())
    assert (state["replica"], state["shard"], state["format"]) == (*seat, FORMAT)
    with pytest.raises(ValueError, match="continues on the rank that saved it"):
        sync.load_state_dict({**state, "shard": 1 - state["shard"]})
    sync.load_state_dict(state)
    with sync:
        for t in range(stop, steps):
            shards.train_step(model, optimizer, mesh, t)
    return shards.full(model)


def all_resumed() -> list[dict[str, Any]]:
    return [resumed(stop, 9) for stop in (0, 1, 2, 4, 5, 8)]


def test_resume_bit_for_bit(ranks: Ranks) -> None:
    """A run that is stopped in the warm-up, in a window or at its end goes on as if it had not."""
    for runs in ranks.run(4, all_resumed):
        for run in runs[1:]:
            assert nets.same(runs[0], run)
