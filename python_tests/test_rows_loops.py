"""Field reports about loops on several ranks: each row's scenario with its right outcome."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nets import batch, loss, make_net, plain, same, sgd, train_step, values
from ranks import Ranks
from torch import Tensor, nn

import edit_ext


def rank() -> int:
    return dist.get_rank()


def syncs_at(sync: edit_ext.Handle) -> list[int]:
    """The steps at which syncs happened, from the metrics since the last call."""
    return sorted({entry["step"] for entry in sync.metrics()})


def frozen(most: bool) -> dict[str, Any]:
    """Ten syncs of a model of which, if `most`, 99 % are frozen."""
    model = make_net()
    big = nn.Linear(400, 400)
    with torch.no_grad():
        for p in big.parameters():
            p.fill_(0.25)
    model.blocks.append(big)
    if most:
        big.requires_grad_(False)
        model.stem.requires_grad_(False)
    still = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = sgd(model)
    with edit_ext.attach(model, optimizer, plain(sync_every=1)) as sync:
        before = sync.totals()["bytes_sent"]
        for t in range(10):
            train_step(model, optimizer, rank(), t)
        sync.flush()
        sent = sync.totals()["bytes_sent"] - before
        memory = sum(t.numel() for t in sync.state_dict()["anchors"].values())
    now = values(model)
    assert all(torch.equal(value, now[name]) for name, value in still.items())
    return {"sent": sent, "memory": memory, "trainable": count(model)}


def count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def unfreeze() -> str:
    model = make_net()
    model.stem.requires_grad_(False)
    optimizer = sgd(model)
    sync = edit_ext.attach(model, optimizer, plain(sync_every=2))
    try:
        for t in range(5):
            model.stem.requires_grad_(t > 2)
            train_step(model, optimizer, rank(), t)
    except RuntimeError as error:
        sync.detach()
        return str(error)
    return "no error"


def test_row_04_frozen_parameters(ranks: Ranks) -> None:
    """Frozen weights cost no memory and no bytes and never move; unfreezing is refused by name."""
    for little, whole in zip(ranks.run(2, frozen, True), ranks.run(2, frozen, False), strict=True):
        assert little["memory"] == little["trainable"] < 1000
        # Half of each layer goes there in fp32 and half comes back, ten times; padding aside.
        saved = 10 * 4 * (whole["trainable"] - little["trainable"])
        assert whole["sent"] - little["sent"] == pytest.approx(saved, rel=0.01)
    for said in ranks.run(2, unfreeze):
        assert "'stem.weight' was frozen at attach" in said


def resumable(stop: int, total: int) -> dict[str, Any]:
    """Warm-up 5, H = 4: stops at `stop`, saves, goes on in new objects; the syncs and the end."""
    config = edit_ext.EDiT(sync_every=4, warmup_steps=5, timeout=20.0)
    model, steps = make_net(), []
    optimizer = sgd(model, momentum=0.9)
    sync = edit_ext.attach(model, optimizer, config)
    for t in range(stop):
        train_step(model, optimizer, rank(), t)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), sync.state_dict()))
    steps += syncs_at(sync)
    sync.detach()

    model = make_net()
    optimizer = sgd(model, momentum=0.9)
    with edit_ext.attach(model, optimizer, config) as sync:
        for part, state in zip((model, optimizer, sync), saved, strict=True):
            part.load_state_dict(state)
        for t in range(stop, total):
            train_step(model, optimizer, rank(), t)
        assert sync.step == total
        sync.flush()
        steps += syncs_at(sync)
    return {"steps": steps, "params": values(model)}


def test_row_05_resume(ranks: Ranks) -> None:
    """A resumed run has no second warm-up, syncs at the same steps, and ends bit for bit alike."""
    whole = ranks.run(2, resumable, 0, 23)
    for stop in (3, 5, 9, 15):
        for one, other in zip(ranks.run(2, resumable, stop, 23), whole, strict=True):
            assert one["steps"] == other["steps"] == [9, 13, 17, 21, 23], stop
            assert same(one["params"], other["params"]), stop


def no_gradients(warmup: int) -> tuple[int, int, dict[str, Tensor]]:
    """Rank 1 has no batch in steps 1 and 3 (which closes a window): every gradient is None."""
    model = make_net()
    optimizer = sgd(model)
    with edit_ext.attach(model, optimizer, plain(warmup_steps=warmup)) as sync:
        for t in range(7):
            if rank() == 0 or t not in (1, 3):
                loss(model, batch(rank(), t)).backward()
            optimizer.step()
            optimizer.zero_grad()
        sync.flush()
        result = sync.step, sync.sync_index
    return *result, values(model)


@pytest.mark.parametrize("warmup", [0, 4])
def test_row_09_no_gradients(ranks: Ranks, warmup: int) -> None:
    """A rank without gradients still takes part, in averages and in syncs; counters stay equal."""
    first, second = ranks.run(2, no_gradients, warmup)
    assert first[:2] == second[:2] == (7, 4 if warmup == 0 else 2)
    assert same(first[2], second[2])
    if warmup == 0:
        return
    model = make_net()
    optimizer = sgd(model)
    for t in range(4):  # the warm-up by hand: what is missing counts as zero
        for r in (0, 1):
            if r == 0 or t not in (1, 3):
                (loss(model, batch(r, t)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    got = ranks.run(2, warm_only, 4)
    for name, value in values(model).items():
        torch.testing.assert_close(got[0][name], value, rtol=1e-6, atol=1e-7)


def warm_only(steps: int) -> dict[str, Tensor]:
    """Only the warm-up of `no_gradients`."""
    model = make_net()
    optimizer = sgd(model)
    with edit_ext.attach(model, optimizer, plain(warmup_steps=steps)):
        for t in range(steps):
            if rank() == 0 or t not in (1, 3):
                loss(model, batch(rank(), t)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return values(model)


class Normed(nn.Module):
    """BatchNorm statistics differ between replicas; one buffer is not persistent, one is odd."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)
        self.head = nn.Linear(5, 3)
        self.register_buffer("ema", torch.zeros(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.ema = 0.9 * self.ema + x[0, :3]
        return self.head(self.norm(x))


def buffers(average: bool) -> dict[str, Tensor]:
    """Three steps with a sync inside the third forward; buffers before and after it."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Normed()
    optimizer = sgd(model)
    with edit_ext.attach(model, optimizer, plain(average_buffers=average)) as sync:
        for t in range(2):
            train_step(model, optimizer, rank(), t)
        local = {f"local.{name}": b.clone() for name, b in model.named_buffers()}
        sync.flush()
    return {**local, **{name: b.clone() for name, b in model.named_buffers()}}


def test_row_16_buffers(ranks: Ranks) -> None:
    """Float buffers are averaged, integers and non-persistent ones stay; one option switches it."""
    one, two = ranks.run(2, buffers, True)
    for name in ("norm.running_mean", "norm.running_var"):
        mean = (one[f"local.{name}"] + two[f"local.{name}"]) / 2
        assert not torch.equal(one[f"local.{name}"], two[f"local.{name}"])
        torch.testing.assert_close(one[name], mean)
        assert torch.equal(one[name], two[name])
    for result in (one, two, *ranks.run(2, buffers, False)):
        assert result["norm.num_batches_tracked"].dtype == torch.int64
        assert result["norm.num_batches_tracked"] == 2
        assert torch.equal(result["ema"], result["local.ema"])
    one, two = ranks.run(2, buffers, False)
    assert torch.equal(one["norm.running_mean"], one["local.norm.running_mean"])


def uneven(counts: list[int], warmup: int = 0) -> dict[str, Any]:
    """Every rank makes its own number of steps and then flushes."""
    model = make_net()
    optimizer = sgd(model)
    try:
        with edit_ext.attach(model, optimizer, plain(sync_every=4, warmup_steps=warmup)) as sync:
            for t in range(counts[rank()]):
                train_step(model, optimizer, rank(), t)
            sync.flush()
            steps = [entry["steps"] for entry in sync.metrics() if entry["layer"] == "head"]
    except RuntimeError as error:
        return {"error": str(error)}
    return {"steps": steps, "params": values(model)}


def test_row_29_uneven_data(ranks: Ranks) -> None:
    """10 and 8 steps: flush joins until all are done, and the last partial window counts."""
    for counts, windows in (
        ([10, 8], [[4, 4], [4, 4], [2, 0]]),
        ([3, 13], [[3, 4], [0, 4], [0, 4], [0, 1]]),
        ([0, 5], [[0, 4], [0, 1]]),
        ([8, 8], [[4, 4], [4, 4]]),
    ):
        first, second = ranks.run(2, uneven, counts, seconds=40)
        assert [[int(s) for s in w] for w in first["steps"]] == windows
        assert same(first["params"], second["params"])
    for result in ranks.run(2, uneven, [5, 9], 7, seconds=40):
        assert "ended their training during the warm-up" in result["error"]


class Maybe(nn.Module):
    """Blocks that some inputs skip, in an order that depends on the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(5, 5) for _ in range(5)])
        self.head = nn.Linear(5, 3)
        self.path: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        for place in self.path:
            x = x + self.blocks[place](x).tanh()
        return self.head(x)


def wandering(prefetch: int) -> tuple[list[str], dict[str, Tensor]]:
    """Each rank visits other blocks in another order, and one sometimes skips the root."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = Maybe()
    optimizer = sgd(model)
    paths = [[3, 1, 0], [0, 4, 3, 2]] if rank() == 0 else [[4, 4, 2], [1], []]
    with edit_ext.attach(model, optimizer, plain(sync_every=1, prefetch=prefetch)) as sync:
        for t in range(8):
            model.path = paths[t % len(paths)]
            if rank() == 1 and t == 5:
                optimizer.step()  # no forward at all
                continue
            train_step(model, optimizer, rank(), t)
        sync.flush()
        order = sync.state_dict()["order"]
    return order, values(model)


@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
def test_ranks_wander(ranks: Ranks, prefetch: int) -> None:
    """Other paths on other ranks: no deadlock, equal weights, and replica 0's first order."""
    with warnings.catch_warnings():
        first, second = ranks.run(2, wandering, prefetch, seconds=40)
    assert first[0] == second[0] == ["blocks.3", "blocks.1", "blocks.0", "head", *REST]
    assert same(first[1], second[1])


REST = ["blocks.2", "blocks.4"]


def evaluate_on_one() -> dict[str, Any]:
    """Rank 0 alone evaluates, saves and looks at the anchor, at every moment of the loop."""
    model = make_net()
    optimizer = sgd(model)
    plain_model = make_net()
    with edit_ext.attach(model, optimizer, plain(outer_lr=0.5)) as sync:
        for t in range(6):
            look(model, sync)
            value = loss(model, batch(rank(), t))
            look(model, sync)
            value.backward()
            look(model, sync)
            optimizer.step()
            look(model, sync)
            if rank() == 0:
                with sync.anchor_weights():
                    plain_model.load_state_dict(model.state_dict())
            optimizer.zero_grad()
        sync.flush()
    return {"params": values(model), "anchor": values(plain_model)}


def look(model: nn.Module, sync: edit_ext.Handle) -> None:
    """What a rank may do alone."""
    if rank() == 0:
        before = values(model), sync.step, sync.sync_index
        model.eval()
        with torch.no_grad():
            loss(model, batch(7, 7))
        model.train()
        model.state_dict()
        sync.explain(steps=10)
        assert same(before[0], values(model)) and before[1:] == (sync.step, sync.sync_index)


def undisturbed() -> dict[str, Tensor]:
    model = make_net()
    optimizer = sgd(model)
    with edit_ext.attach(model, optimizer, plain(outer_lr=0.5)):
        for t in range(6):
            train_step(model, optimizer, rank(), t)
    return values(model)


def test_rank_zero_evaluates(ranks: Ranks) -> None:
    """`if rank == 0: evaluate()` and rank 0's state_dict() change nothing and hang nowhere."""
    seen = ranks.run(2, evaluate_on_one, seconds=40)
    for result, clean in zip(seen, ranks.run(2, undisturbed), strict=True):
        assert same(result["params"], clean)


def between(what: str) -> dict[str, Any]:
    """Something happens to the weights between the closing step and the next forward."""
    model = make_net()
    head = model.head.bias
    optimizer = sgd(model)
    second = torch.optim.SGD([head], lr=1.0)
    kept = copy.deepcopy(model)
    with edit_ext.attach(model, optimizer, plain()) as sync:
        for t in range(2):
            train_step(model, optimizer, rank(), t)
        with torch.no_grad():
            if what == "clamp":
                head.clamp_(-0.01, 0.01)
            elif what == "ema":
                for p, k in zip(model.parameters(), kept.parameters(), strict=True):
                    p.lerp_(k, 0.5)
            elif what == "load":
                model.load_state_dict(kept.state_dict())
            elif what == "second":
                head.grad = torch.ones_like(head)
                second.step()
                head.grad = None
        local = values(model)
        model(batch(rank(), 2)[0])
        assert sync.sync_index == 1
        optimizer.step()
        return {"local": local, "agreed": values(model)}


@pytest.mark.parametrize("what", ["clamp", "ema", "load", "second"])
def test_nothing_is_lost_before_the_forward(ranks: Ranks, what: str) -> None:
    """What the loop does to the weights after the step is part of what is averaged."""
    one, two = ranks.run(2, between, what)
    for name, value in one["agreed"].items():
        mean = (one["local"][name].double() + two["local"][name].double()) / 2
        torch.testing.assert_close(value.double(), mean, rtol=1e-6, atol=1e-7)
        assert torch.equal(value, two["agreed"][name])
