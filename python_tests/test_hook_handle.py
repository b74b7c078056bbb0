"""What the handle offers besides the hooks: pause, anchor weights, outer rate, detach."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from nets import batch, make_net, plain, same, sgd, train_step, values
from test_hook_patterns import attached
from torch import nn

import edit_ext


def test_outer_lr_schedule() -> None:
    """The outer learning rate can follow a schedule; a bad value is refused in a sentence."""
    model, optimizer, sync = attached(sync_every=1)
    anchor = values(model)
    for t, rate in enumerate([1.0, 0.5, 0.25]):
        train_step(model, optimizer, 0, t)
        local = values(model)
        sync.outer_lr = rate
        model(batch(0, t)[0])
        for name, value in values(model).items():
            if not name.startswith("spare"):
                expected = anchor[name] - rate * (anchor[name] - local[name])
                assert torch.allclose(value, expected, rtol=1e-6, atol=1e-7)
        optimizer.step()  # a step without gradients, to let the spare layer sync
        anchor = values(model)
        sync.flush()
    with pytest.raises(ValueError, match="outer_lr must be above 0"):
        sync.outer_lr = -1.0


def test_wrapped_optimizer_counts_once() -> None:
    """The handle may be dropped: the optimizer keeps the sync alive, and detach ends it."""
    model = make_net()
    optimizer = sgd(model)
    edit_ext.attach(model, optimizer, plain(outer_lr=0.5))
    reference = make_net()
    other = sgd(reference)
    for t in range(3):
        train_step(model, optimizer, 0, t)
        train_step(reference, other, 0, t)
    assert not same(values(model), values(reference))


def test_detach_leaves_no_trace() -> None:
    """After detach the model has no hooks, the optimizer none, and training is plain."""
    model, optimizer, sync = attached(outer_lr=0.5)
    train_step(model, optimizer, 0, 0)
    sync.detach()
    sync.detach()
    for module in model.modules():
        assert not module._forward_pre_hooks and not module._forward_hooks
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
    train_step(model, optimizer, 0, 1)
    assert sync.step == 1
    with pytest.raises(RuntimeError, match="closed"):
        sync.flush()


def test_pause() -> None:
    """Between pause and resume nothing is counted and nothing synced."""
    model, optimizer, sync = attached()
    train_step(model, optimizer, 0, 0)
    sync.pause()
    for t in range(5):
        train_step(model, optimizer, 0, t)
    assert (sync.step, sync.sync_index) == (1, 0)
    with pytest.raises(RuntimeError, match=r"flush\(\) while paused"):
        sync.flush()
    sync.resume()
    for t in range(3):
        train_step(model, optimizer, 0, t)
    assert (sync.step, sync.sync_index) == (4, 1)


def test_anchor_weights() -> None:
    """The agreed weights for evaluation, and the own ones back bit for bit."""
    model, optimizer, sync = attached(outer_lr=0.5)
    start = values(model)
    for t in range(2):
        train_step(model, optimizer, 0, t)
    local = values(model)
    with sync.anchor_weights():
        assert same(start, values(model))
        model(batch(0, 9)[0])  # a training forward inside does not sync
        with pytest.raises(RuntimeError, match="inside anchor_weights"):
            optimizer.step()
        with pytest.raises(RuntimeError, match="inside anchor_weights"), sync.anchor_weights():
            pass
    assert same(local, values(model)) and sync.sync_index == 0
    model(batch(0, 2)[0])
    with pytest.raises(RuntimeError, match="sync is in progress"), sync.anchor_weights():
        pass
    optimizer.step()
    with sync.anchor_weights():
        agreed = values(model)
    for name in start:
        middle = 0.5 * (start[name] + local[name])
        assert torch.allclose(agreed[name], middle, rtol=1e-6, atol=1e-7)


def add_adapter(model: nn.Module) -> None:
    model.head.adapter = nn.Linear(2, 2)


def assign(model: nn.Module) -> None:
    model.load_state_dict(make_net().state_dict(), assign=True)


def resize(model: nn.Module) -> None:
    model.stem = nn.Linear(5, 7)


def convert(model: nn.Module) -> None:
    model.head.to(torch.bfloat16)


def remove(model: nn.Module) -> None:
    del model.spare


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (add_adapter, "'head.adapter.weight' was added after attach"),
        (assign, "'scale' was replaced by another object"),
        (resize, "'stem.weight' was replaced by another object"),
        (convert, "'head.weight' was torch.float32 .* and is torch.bfloat16"),
        (remove, "'spare.weight' has gone since attach"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_parameters_changed_behind_our_back(
    change: Callable[[nn.Module], None], words: str
) -> None:
    """Parameters added, replaced, converted or removed are reported by name at the next sync."""
    model, optimizer, sync = attached()
    for t in range(2):
        train_step(model, optimizer, 0, t)
    change(model)
    with pytest.raises(RuntimeError, match=words):
        model(batch(0, 2)[0])
    with pytest.raises(RuntimeError, match=words):
        sync.flush()
    sync.detach()
    refreshed = sgd(model)
    with edit_ext.attach(model, refreshed, plain()) as again:
        if change is not convert:
            train_step(model, refreshed, 0, 2)
            assert again.step == 1


def test_steps_are_ranges_of_the_profiler() -> None:
    """Each layer's begin, exchange, wait and write-back is a range edit_ext::layer::step."""
    model, optimizer, _ = attached(sync_every=1)
    train_step(model, optimizer, 0, 0)
    with torch.profiler.profile() as profile:
        model(batch(0, 1)[0])
    names = {event.name for event in profile.events()}
    for step in ("begin", "exchange", "wait", "write_back"):
        assert f"edit_ext::stem::{step}" in names, sorted(n for n in names if "edit_ext" in n)


def test_a_training_step_in_a_cuda_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and step say why; evaluation may be captured."""
    model, optimizer, sync = attached(sync_every=1)
    train_step(model, optimizer, 0, 0)
    sync._engine._on_gpu = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with torch.no_grad():
        model.eval()(batch(0, 1)[0])
    model.train()
    with pytest.raises(RuntimeError, match="being captured into a CUDA graph"):
        model(batch(0, 1)[0])
    with pytest.raises(RuntimeError, match="leave model"):
        optimizer.step()
