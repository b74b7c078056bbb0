"""What only shows with several ranks: two models in one job, forks, threads, gradient averages."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from nets import batch, layer_of, loss, make_net, plain, same, sgd, train_step, values
from ranks import Ranks
from simulate import average_gradients
from torch import Tensor, nn

import edit_ext


def rank() -> int:
    return dist.get_rank()


def two_models() -> dict[str, dict[str, Tensor]]:
    """A generator and a critic, each attached, in one loop."""
    g, d = make_net(), make_net(twice=False)
    g_step, d_step = sgd(g), sgd(d)
    with (
        edit_ext.attach(g, g_step, plain()) as g_sync,
        edit_ext.attach(d, d_step, plain(sync_every=3)) as d_sync,
    ):
        for t in range(7):
            x, y = batch(rank(), t)
            d(torch.cat([g(x).detach(), y[:, :2]], 1)).mean().backward()
            d_step.step()
            d_step.zero_grad()
            d(torch.cat([g(x), y[:, :2]], 1)).mean().backward()
            g_step.step()
            g_step.zero_grad()
        g_sync.flush()
        d_sync.flush()
        assert (g_sync.step, d_sync.step) == (7, 7)
    return {"g": values(g), "d": values(d)}


def test_two_models(ranks: Ranks) -> None:
    """Two attached models in one job do not get into each other's way."""
    first, second = ranks.run(2, two_models)
    assert same(first["g"], second["g"]) and same(first["d"], second["d"])


def forked() -> int:
    """A forked child uses the model and ends; the parent goes on."""
    model = make_net()
    optimizer = sgd(model)
    with edit_ext.attach(model, optimizer, plain()) as sync:
        for t in range(2):
            train_step(model, optimizer, rank(), t)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # fork in a process with threads
            child = os.fork()
        if child == 0:
            model(batch(0, 0)[0])
            train_step(model, optimizer, 0, 0)
            sync.detach()
            os._exit(7 if sync.sync_index == 0 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        for t in range(2, 5):
            train_step(model, optimizer, rank(), t)
    return sync.sync_index


def test_forked_child(ranks: Ranks) -> None:
    """A forked child never touches the communicator."""
    assert ranks.run(2, forked) == [3, 3]


def accumulate(inside: bool) -> dict[str, Tensor]:
    """Warm-up with two micro-batches a step, the first in no_sync() or not."""
    model = make_net()
    optimizer = sgd(model)
    with edit_ext.attach(model, optimizer, plain(warmup_steps=3)) as sync:
        sent = []
        for t in range(3):
            before = sync.totals()["bytes_sent"]
            if inside:
                with sync.no_sync():
                    loss(model, batch(rank(), 2 * t)).backward()
            else:
                loss(model, batch(rank(), 2 * t)).backward()
            loss(model, batch(rank(), 2 * t + 1)).backward()
            gradients = {
                n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
            }
            optimizer.step()
            optimizer.zero_grad()
            sent.append(sync.totals()["bytes_sent"] - before)
        assert len(set(sent)) == 1
        return {**gradients, "bytes": torch.tensor(sent[0])}


def test_gradient_accumulation(ranks: Ranks) -> None:
    """Averages are the same with and without no_sync(), which halves the bytes; clipping and
    everything else after the backward sees averaged gradients."""
    models = [make_net(), make_net()]
    optimizers = [sgd(model) for model in models]
    for t in range(3):
        for r, model in enumerate(models):
            optimizers[r].zero_grad()
            loss(model, batch(r, 2 * t)).backward()
            loss(model, batch(r, 2 * t + 1)).backward()
        average_gradients(models)
        for optimizer in optimizers:
            optimizer.step()
    expected = {n: p.grad for n, p in models[0].named_parameters() if p.grad is not None}
    inside, outside = (ranks.run(2, accumulate, how) for how in (True, False))
    for result in (*inside, *outside):
        for name, grad in expected.items():
            torch.testing.assert_close(result[name], grad, rtol=1e-5, atol=1e-7)
    assert 0.45 < inside[0]["bytes"] / outside[0]["bytes"] < 0.55
    count = sum(p.numel() for p in models[0].parameters())
    assert abs(inside[0]["bytes"].item() - 4 * count) < 400  # ring: 2 (R-1)/R of fp32 and a map


def missing_somewhere() -> dict[str, Any]:
    """A gradient that only rank 1 has, one that nobody has."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    with edit_ext.attach(model, sgd(model), plain(warmup_steps=9)):
        x = model[0](torch.ones(1, 2))
        (model[1](x) if rank() == 1 else x).sum().backward()
        return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def test_missing_gradients(ranks: Ranks) -> None:
    """A gradient that some replicas lack counts as zero there; one that all lack stays None."""
    first, second = ranks.run(2, missing_somewhere)
    assert first["2.weight"] is None and second["2.bias"] is None
    assert torch.equal(first["1.bias"], torch.full((2,), 0.5))
    assert torch.equal(first["1.weight"], second["1.weight"])
    assert torch.equal(first["0.bias"], second["0.bias"])


def out_of_step() -> str:
    """Rank 1 makes one backward more than rank 0 during the warm-up."""
    model = make_net()
    optimizer = sgd(model)
    try:
        with edit_ext.attach(model, optimizer, plain(warmup_steps=9, timeout=5.0)):
            for t in range(3):
                for _ in range(1 + rank()):
                    loss(model, batch(rank(), t)).backward()
                optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_replicas_out_of_step(ranks: Ranks) -> None:
    """Unequal numbers of backwards in the warm-up become an error instead of a wrong average."""
    said = ranks.run(2, out_of_step, seconds=30)
    assert any("different numbers of steps" in text for text in said), said
    assert "no error" not in said


def spoilt_at_the_switch() -> tuple[list[str], dict[str, Tensor]]:
    """Rank 1's weights are changed between attach and the first forward."""
    model = make_net()
    optimizer = sgd(model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with edit_ext.attach(model, optimizer, plain()):
            if rank() == 1:
                with torch.no_grad():
                    model.head.bias.add_(1.0)
            train_step(model, optimizer, 0, 0)
            after = values(model)
    return [str(w.message) for w in said], after


def test_switch_takes_replica_zero(ranks: Ranks) -> None:
    """Weights that differ when the anchors are made are replaced by replica 0's, with a warning."""
    first, second = ranks.run(2, spoilt_at_the_switch)
    assert same(first[1], second[1])
    assert any("they all take replica 0's" in text for text in second[0])


def loads_after_attach() -> dict[str, Tensor]:
    """A checkpoint is loaded after attach: the anchors are what was loaded."""
    model = make_net()
    optimizer = sgd(model)
    with edit_ext.attach(model, optimizer, plain(outer_lr=0.5)) as sync:
        model.load_state_dict({n: v + 1.0 for n, v in values(model).items()})
        start = values(model)
        train_step(model, optimizer, rank(), 0)
        anchors = sync.state_dict()["anchors"]
    assert same(start, anchors)
    return start


def test_load_after_attach(ranks: Ranks) -> None:
    """Anchors are made in the first training forward, so a load after attach is no movement."""
    ranks.run(2, loads_after_attach)


def test_layer_names_of_the_tests() -> None:
    """The layers that the tests expect are those of the rule."""
    assert {layer_of(name) for name, _ in make_net().named_parameters()} == {
        "(root)",
        "stem",
        "blocks.0",
        "blocks.1",
        "blocks.2",
        "spare",
        "head",
    }
