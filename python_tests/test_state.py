"""The handle's state, its records and its explanation."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import Net, batch, make_net, plain, plain_timed, same, sgd, train_step, values
from torch import nn

import edit_ext
from edit_ext.metrics import KEEP, Metrics


def attached(**changes: Any) -> tuple[nn.Module, torch.optim.Optimizer, edit_ext.Handle]:
    model = make_net()
    optimizer = sgd(model)
    return model, optimizer, edit_ext.attach(model, optimizer, plain(**changes))


def plain_things(value: Any) -> bool:
    """Whether a state holds tensors, numbers, strings, lists and dicts only."""
    if isinstance(value, dict):
        return all(isinstance(k, str) and plain_things(v) for k, v in value.items())
    if isinstance(value, list):
        return all(map(plain_things, value))
    return value is None or type(value) in (bool, int, float, str, torch.Tensor)


def test_row_19_weights_only(tmp_path: Path) -> None:
    """torch.load reads the state with its safe defaults; taking it changes nothing."""
    model, optimizer, sync = attached()
    for t in range(5):
        train_step(model, optimizer, 0, t)
    before = values(model), sync.step, sync.sync_index
    state = sync.state_dict()
    assert plain_things(state)
    torch.save(state, tmp_path / "state.pt")
    sync.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert same(before[0], values(model)) and before[1:] == (sync.step, sync.sync_index)
    anchors = state["anchors"]
    assert {n: a.shape for n, a in anchors.items()} == {n: v.shape for n, v in before[0].items()}
    assert all(a.dtype == torch.float32 for a in anchors.values())


def test_row_19_file_of_an_old_format(tmp_path: Path) -> None:
    """A file of another format is refused in a sentence that says which it is and which is read."""
    model, optimizer, sync = attached()
    train_step(model, optimizer, 0, 0)
    old = {**sync.state_dict(), "format": 2}
    del old["layers"], old["shown_steps"]
    torch.save(old, tmp_path / "old.pt")
    with pytest.raises(ValueError, match=r"format 6 from Handle\.state_dict\(\): format is 2$"):
        sync.load_state_dict(torch.load(tmp_path / "old.pt"))
    with pytest.raises(ValueError, match="format is 'list'"):
        sync.load_state_dict([old])  # type: ignore[arg-type]
    assert (sync.step, sync.sync_index) == (1, 0)


@pytest.mark.parametrize("stop", range(1, 8))
def test_resume_at_any_step(stop: int) -> None:
    """A run that is stopped in a window, at its end or before it goes on bit for bit."""
    model, optimizer, sync = attached(sync_every=3, outer_lr=0.7, outer_momentum=0.8)
    for t in range(stop):
        train_step(model, optimizer, 0, t)
    weights, state = values(model), sync.state_dict()
    other, inner, again = attached(sync_every=3, outer_lr=0.7, outer_momentum=0.8)
    other.load_state_dict(weights)
    again.load_state_dict(state)
    for t in range(stop, 11):
        train_step(model, optimizer, 0, t)
        train_step(other, inner, 0, t)
        assert same(values(model), values(other)) and sync.sync_index == again.sync_index


def test_state_that_does_not_fit() -> None:
    """A state of another model, place or format is refused in a sentence, and nothing changes."""
    model, optimizer, sync = attached()
    train_step(model, optimizer, 0, 0)
    state = sync.state_dict()
    with pytest.raises(ValueError, match="no state of format 6"):
        sync.load_state_dict({"step": 3})
    with pytest.raises(ValueError, match="the state has replicas 4, this run has 1"):
        sync.load_state_dict({**state, "replicas": 4})
    timed = edit_ext.attach(net := make_net(), sgd(net), plain_timed())
    with pytest.raises(ValueError, match="the state is of method 'EDiT', this run's is 'AEDiT'"):
        timed.load_state_dict(state)
    with pytest.raises(ValueError, match="the state is of method 'AEDiT', this run's is 'EDiT'"):
        sync.load_state_dict(timed.state_dict())
    for key in set(state) - {"format"}:
        with pytest.raises(ValueError, match=f"the state lacks '{key}', which"):
            sync.load_state_dict({k: v for k, v in state.items() if k != key})
    with pytest.raises(ValueError, match="'anchors' in the state lacks 'scale'"):
        sync.load_state_dict({**state, "anchors": {}})
    with pytest.raises(ValueError, match="layer 'stem' in the state lacks 'params'"):
        sync.load_state_dict({**state, "layers": {**state["layers"], "stem": {}}})
    stem = {**state["layers"]["stem"], "momentum": torch.zeros(128 * 3)}
    with pytest.raises(ValueError, match=r"256 elements of outer momentum .*, in the state 384"):
        sync.load_state_dict({**state, "layers": {**state["layers"], "stem": stem}})
    small = Net(spare=False)
    other = edit_ext.attach(small, sgd(small), plain())
    with pytest.raises(ValueError, match="layer 'spare' that this model lacks"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="lacks the layer 'spare'"):
        sync.load_state_dict(other.state_dict())
    changed = edit_ext.attach(net := make_net(), sgd(net), plain(sync_every=5))
    with pytest.warns(UserWarning, match="sync_every: 2 -> 5"):
        changed.load_state_dict(state)
    model(batch(0, 1)[0])
    train_step(model, optimizer, 0, 1)
    model(batch(0, 1)[0])
    with pytest.raises(RuntimeError, match="while a sync is in progress"):
        sync.state_dict()


def test_explain() -> None:
    """explain() lists layers in order, the syncs to come, and memory."""
    _, _, sync = attached(sync_every=4)
    text = sync.explain(steps=12)
    assert "in steps 1 to 12: 3, each in the forward that follows step 4, 8, 12" in text
    for name in ("(root)", "stem", "blocks.0", "blocks.1", "blocks.2", "spare", "head"):
        assert f"  {name} " in text
    assert "with one replica no layer is exchanged" in text and "memory: " in text
    assert "because granularity is 'model'" in explain_of(granularity="model")
    assert "none ahead (blocking)" in explain_of(prefetch=0)
    assert "gradients are averaged until step 7" in explain_of(warmup_steps=7)


def explain_of(**changes: Any) -> str:
    _, _, sync = attached(**changes)
    return sync.explain()


def stats(norms: list[float], flags: list[bool], index: int = 1) -> dict[str, Any]:
    """What a layer says of a sync."""
    return {
        "sync_index": index,
        "norms": norms,
        "weights": [0.5, 0.5],
        "flags": flags,
        "idle": [False, False],
        "steps": [2, 2],
        "done": [False, False],
        "merged_norm": 1.0,
        "clip": 1.0,
        "skip": all(flags),
        "void": False,
        "exchange_seconds": 0.5,
        "wait_seconds": 0.25,
        "begin_seconds": 0.125,
        "write_back_seconds": 0.0625,
        "bytes_sent": 10,
    }


def test_warning_when_all_are_flagged() -> None:
    """Once per layer and run of such syncs."""
    metrics = Metrics()
    with pytest.warns(UserWarning, match="layer 'head': every replica was flagged"):
        metrics.add(1, "head", stats([9.0, 9.5], [True, True]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        metrics.add(2, "head", stats([9.0, 9.5], [True, True]))
        metrics.add(3, "head", stats([1.0, 9.5], [False, True]))
    with pytest.warns(UserWarning, match="every replica was flagged"):
        metrics.add(4, "head", stats([9.0, 9.5], [True, True]))


def test_warning_when_replicas_do_the_same() -> None:
    """Bit-equal norms in three syncs in a row mean equal data; one warning, then silence."""
    metrics = Metrics()
    with pytest.warns(UserWarning, match="Do they train on the same data") as caught:
        for index in range(6):
            metrics.add(index, "a", stats([1.5, 1.5], [False, False], index))
            metrics.add(index, "b", stats([0.0, 0.0], [False, False], index))
            metrics.end_sync()
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for index in range(6):
            metrics.add(index, "a", stats([1.5, 1.5 + index % 2], [False, False], index))
            metrics.end_sync()


def test_warning_when_an_idle_replica_changed() -> None:
    """Weights that changed without a step have no part in the average: said once."""
    metrics = Metrics()
    with pytest.warns(UserWarning, match="replica 1 changed its weights without") as caught:
        for layer in ("a", "b"):
            metrics.add(1, layer, {**stats([1.0, 2.0], [False, False]), "idle": [False, True]})
    assert len(caught) == 1


def test_records() -> None:
    """metrics() drains; totals add up; what is never drained is dropped and counted."""
    metrics = Metrics()
    for index in range(KEEP + 5):
        metrics.add(index, "a", stats([1.0, 2.0], [False, False], index))
    assert metrics.totals.records_dropped == 5
    assert metrics.totals.exposed_sync_seconds == pytest.approx(0.4375 * (KEEP + 5))
    assert metrics.totals.sync_seconds == pytest.approx(0.6875 * (KEEP + 5))
    records = metrics.drain()
    assert len(records) == KEEP and records[0]["step"] == 5 and metrics.drain() == []
