"""Loops as people write them, with one replica: every window syncs once, whatever the loop does."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from nets import batch, loss, make_net, plain, same, sgd, train_step, values
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import edit_ext
from edit_ext import Handle


@pytest.fixture(autouse=True)
def _no_unexpected_warnings() -> Iterator[None]:
    """Warnings of ours are part of the behaviour: a test has to expect them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="edit_ext")
        yield


def attached(model: nn.Module | None = None, **changes: Any) -> tuple[Any, Any, Handle]:
    """A model, its SGD and the handle; a window of two steps."""
    model = model if model is not None else make_net()
    optimizer = sgd(model)
    return model, optimizer, edit_ext.attach(model, optimizer, plain(**changes))


def test_row_06_counters() -> None:
    """Three param groups, two optimizers and accumulation: one tick per logical step."""
    model = make_net()
    groups = [{"params": [p]} for p in model.parameters()]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    sync = edit_ext.attach(model, optimizer, plain(sync_every=3))
    for t in range(10):
        train_step(model, optimizer, 0, t)
    assert (sync.step, sync.sync_index) == (10, 3)

    model = make_net()
    halves = list(model.parameters())
    first, second = torch.optim.SGD(halves[:3], lr=0.1), torch.optim.Adam(halves[3:])
    sync = edit_ext.attach(model, [first, second], plain(sync_every=3))
    for t in range(10):
        loss(model, batch(0, t)).backward()
        first.step()
        second.step()
        model.zero_grad()
    assert (sync.step, sync.sync_index) == (10, 3)

    model, optimizer, sync = attached(sync_every=3)
    for t in range(10):
        for micro in range(4):
            with sync.no_sync():
                loss(model, batch(micro, t)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (sync.step, sync.sync_index) == (10, 3)


def test_optimizers_take_turns() -> None:
    """An optimizer that owns no gradients need not step; without any gradients all have to."""
    model = make_net()
    halves = list(model.parameters())
    first, second = torch.optim.SGD(halves[:3], lr=0.1), torch.optim.SGD(halves[3:], lr=0.1)
    sync = edit_ext.attach(model, [first, second], plain())
    halves[0].grad = torch.zeros_like(halves[0])
    first.step()
    assert sync.step == 1
    first.zero_grad()
    first.step()
    assert sync.step == 1
    second.step()
    assert sync.step == 2


def test_optimizer_that_never_steps() -> None:
    """An optimizer that owns gradients but never steps is reported: no sync would become due."""
    model = make_net()
    halves = list(model.parameters())
    first, second = torch.optim.SGD(halves[:3], lr=0.1), torch.optim.SGD(halves[3:], lr=0.1)
    edit_ext.attach(model, [first, second], plain())
    loss(model, batch(0, 0)).backward()
    with pytest.warns(UserWarning, match=r"optimizer 1 \(SGD\) owns gradients but does not step"):
        for _ in range(70):
            first.step()


def test_row_07_forward_patterns() -> None:
    """Two forwards, GAN loops, evaluation in between, a failing forward: a window syncs once."""
    model, optimizer, sync = attached()
    for t in range(6):  # (a) two forwards, then two backwards
        one, two = loss(model, batch(0, t)), loss(model, batch(1, t))
        one.backward()
        two.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (sync.step, sync.totals()["syncs"]) == (6, 2)

    (g, g_step, g_sync), (d, d_step, d_sync) = attached(), attached()  # (b) two models
    for t in range(6):
        x, y = batch(0, t)
        d(torch.cat([g(x).detach(), y[:, :2]], 1)).mean().backward()
        d_step.step()
        d_step.zero_grad()
        d(torch.cat([g(x), y[:, :2]], 1)).mean().backward()
        g_step.step()
        g_step.zero_grad()
    assert (g_sync.step, g_sync.totals()["syncs"]) == (6, 2)
    assert (d_sync.step, d_sync.sync_index) == (6, 3)  # G's forward of step 6 goes through D

    model, optimizer, sync = attached(outer_lr=0.5)
    for t in range(3):  # (c) training, evaluation and training forwards mixed
        train_step(model, optimizer, 0, t)
        before = values(model)
        model.eval()
        loss(model, batch(0, t)).item()
        model.train()
        with torch.no_grad():
            loss(model, batch(0, t)).item()
        assert same(before, values(model)) and sync.sync_index == (t + 1) // 3

    model, optimizer, sync = attached()
    model.blocks[2].register_forward_pre_hook(fail_at(step=[2, 3]))
    for t in range(8):  # (d) a forward that raises, then a retry
        with pytest.raises(ZeroDivisionError) if t in (2, 3) else warnings.catch_warnings():
            train_step(model, optimizer, 0, t)
    assert (sync.step, sync.totals()["syncs"]) == (6, 2)


def fail_at(step: list[int]) -> Any:
    """A hook that raises in its n-th calls."""
    calls = iter(range(1000))

    def hook(module: nn.Module, args: Any) -> None:
        if next(calls) in step:
            raise ZeroDivisionError

    return hook


class Direct(nn.Module):
    """A model that is trained through a method, not through its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"features": nn.Linear(5, 3), "rest": nn.Linear(2, 2)})
        self.tied = nn.Linear(5, 3)

    def loss(self, x: Tensor) -> Tensor:
        return self.encoder["features"](x).square().mean() + self.tied.weight.square().mean()

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(x)


def test_row_08_hooks_not_called() -> None:
    """Training past model(...): all layers sync before the step, and that is said once."""
    for call in (Direct.loss, Direct.forward):
        model = Direct()
        optimizer = sgd(model)
        sync = edit_ext.attach(model, optimizer, plain())
        with pytest.warns(UserWarning, match="no forward of model") as caught:
            for t in range(7):
                call(model, batch(0, t)[0]).backward()
                optimizer.step()
                optimizer.zero_grad()
        assert len(caught) == 1
        assert (sync.step, sync.totals()["syncs"]) == (7, 3)
        assert {m["layer"] for m in sync.metrics()} == {"encoder", "tied"}

    model = Direct()  # a parameter of one layer used by another, a module that never runs
    optimizer = sgd(model)
    sync = edit_ext.attach(model, optimizer, plain())
    with pytest.warns(UserWarning, match="sync 1: the forward used layer 'tied' without") as caught:
        for t in range(7):
            model(batch(0, t)[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert len(caught) == 1 and sync.totals()["syncs"] == 3
    assert "because a forward used layer 'tied' past the hook of its module" in sync.explain()


def test_row_17_param_groups() -> None:
    """The optimizer stays the user's: schedulers, loads and new groups reach the real one."""
    model, optimizer, sync = attached()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train_step(model, optimizer, 0, 0)
    optimizer.load_state_dict(optimizer.state_dict())
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.05)
    train_step(model, optimizer, 0, 1)
    assert isinstance(optimizer, torch.optim.Optimizer) and sync.step == 2
    model.stem.weight.requires_grad_(True)
    optimizer.add_param_group({"params": [], "lr": 1.0})
    train_step(model, optimizer, 0, 2)
    assert (sync.step, sync.sync_index) == (3, 1)


def test_grad_scaler() -> None:
    """A step that the scaler skips is no step; the next one counts."""
    model, optimizer, sync = attached()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for t in range(6):
        value = loss(model, batch(0, t)) * (torch.inf if t == 2 else 1.0)
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert (sync.step, sync.totals()["syncs"]) == (5, 2)


def test_closure() -> None:
    """An optimizer that calls the forward inside step() counts once and syncs once per window."""
    model = make_net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    sync = edit_ext.attach(model, optimizer, plain())
    for t in range(7):

        def closure(t: int = t) -> Tensor:
            optimizer.zero_grad()
            value = loss(model, batch(0, t))
            value.backward()
            return value

        optimizer.step(closure)
    assert (sync.step, sync.totals()["syncs"]) == (7, 3)


class Checkpointed(nn.Module):
    """Blocks that are computed again in the backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 7)
        self.blocks = nn.ModuleList([nn.Linear(7, 7) for _ in range(3)])
        self.head = nn.Linear(7, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant).tanh()
        return self.head(x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    """Hooks that fire again in the backward do nothing: gradients are those of the plain model."""
    torch.manual_seed(1)
    model, optimizer, sync = attached(Checkpointed(reentrant), outer_lr=0.5)
    for t in range(5):
        train_step(model, optimizer, 0, t)
        assert sync.totals()["syncs"] == t // 2


@pytest.mark.parametrize("mode", ["eval", "no_grad", "inference", "thread", "copy"])
def test_inert(mode: str) -> None:
    """Evaluation, no_grad, other threads and copies neither sync nor tick nor change weights."""
    model, optimizer, sync = attached(outer_lr=0.5)
    for t in range(2):
        train_step(model, optimizer, 0, t)
    before = values(model)
    x = batch(0, 2)[0]
    if mode == "eval":
        model.eval()(x)
        model.train()
    elif mode == "no_grad":
        with torch.no_grad():
            model(x)
    elif mode == "inference":
        with torch.inference_mode():
            model(x)
    elif mode == "thread":
        thread = threading.Thread(target=model, args=(x,))
        thread.start()
        thread.join()
    else:
        other = copy.deepcopy(model)
        train_step(other, sgd(other), 0, 2)
    assert same(before, values(model)) and (sync.step, sync.sync_index) == (2, 0)
    train_step(model, optimizer, 0, 2)
    assert (sync.step, sync.totals()["syncs"]) == (3, 1)


def test_another_thread_in_the_middle() -> None:
    """A forward of another thread while ours runs does not stop our waits."""
    model, optimizer, sync = attached(outer_lr=0.5)
    reference, other, _ = attached(outer_lr=0.5)

    def intrude(module: nn.Module, args: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=model, args=(args[0],))
            thread.start()
            thread.join()

    model.register_forward_pre_hook(intrude)
    for t in range(5):
        train_step(model, optimizer, 0, t)
        train_step(reference, other, 0, t)
    assert same(values(model), values(reference)) and sync.totals()["syncs"] == 2


def test_short_copies_and_pickles() -> None:
    """deepcopy, pickle and torch.save of an attached model work; the copies are plain models."""
    model, optimizer, sync = attached()
    train_step(model, optimizer, 0, 0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same(values(model), values(other))
        inner = sgd(other)
        for t in range(5):
            train_step(other, inner, 0, t)
    assert (sync.step, sync.sync_index) == (1, 0)
