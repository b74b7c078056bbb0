"""The handle's state on disk: plain tensors, numbers, strings, lists and dicts."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch

from .engine import Engine
from .sharding import local
from .syncs import Sync

FORMAT = 6
KEYS = (
    "method", "config", "outer_lr", "replica", "replicas", "shard", "shards", "step", "sync_index",
    "window_steps", "agreed_steps", "shown_steps", "anchored", "armed", "asked", "elapsed", "order",
    "anchors", "layers", "base", "flights", "periods", "measured",
)  # fmt: skip
LAYER_KEYS = ("params", "momentum", "detector")


def state_dict(engine: Engine) -> dict[str, Any]:
    """Copies of everything that a run needs to go on exactly; see `Handle.state_dict`."""
    _refuse_open_sync(engine, "state_dict()")
    counts = read_counts(engine)
    anchors: dict[str, torch.Tensor] = {}
    layers: dict[str, dict[str, Any]] = {}
    for layer, unit in zip(engine.held.anchored(), engine.plan.units, strict=False):
        anchors.update(zip(unit.params, layer.anchor_like(), strict=True))
        momentum = layer.momentum
        layers[unit.name] = {
            "params": list(unit.params),
            "momentum": None if momentum is None else momentum.clone(),
            "detector": layer.detector.clone(),
        }
    return {
        "format": FORMAT,
        "method": engine.config.name,
        "config": engine.config.as_dict(),
        "outer_lr": engine.syncs.outer_lr,
        **_seat(engine),
        **counts,
        "order": [engine.plan.units[i].name for i in engine.syncs.order]
        if counts["sync_index"]
        else [],
        "anchors": anchors,
        "layers": layers,
        "flights": read_flights(engine),
    }


@torch.no_grad()
def load_state_dict(engine: Engine, state: dict[str, Any]) -> None:
    """Take over a state; nothing is changed if it does not fit. See `Handle.load_state_dict`."""
    _refuse_open_sync(engine, "load_state_dict()")
    _check(engine, state)
    refuse_flights(engine)
    take_counts(engine, state)
    engine.syncs.outer_lr = state["outer_lr"]
    if state["order"]:
        places = {unit.name: index for index, unit in enumerate(engine.plan.units)}
        engine.syncs.set_order([places[name] for name in state["order"]])
    for layer, unit in zip(engine.held.anchored(), engine.plan.units, strict=False):
        saved = state["layers"][unit.name]
        layer.load_anchor([state["anchors"][name] for name in unit.params])
        layer.detector.copy_(saved["detector"])
        if layer.momentum is not None:
            layer.momentum.copy_(saved["momentum"])
    take_flights(engine, state["flights"])
    engine.warmup_may_be_over()


def read_counts(engine: Engine) -> dict[str, Any]:
    """Steps, syncs and the open window of this rank, as plain numbers. What is in flight has
    arrived afterwards, so that momenta and detectors stand still."""
    with engine.watched():
        engine.syncs.wait_for_flights()
        engine.syncs.settle()  # what a void sync gives back belongs to the window
        if engine.alarm is not None:
            engine.alarm.settle()
    clock, alarm = engine.clock, engine.alarm
    return {
        **clock.counts(),
        "asked": alarm.asked if alarm is not None else 0,
        "elapsed": alarm.elapsed if alarm is not None else 0.0,
    }


def take_counts(engine: Engine, saved: dict[str, Any]) -> None:
    """Go on from what `read_counts` has said."""
    engine.syncs.settle()  # what is still to be counted belongs to the clock of before
    engine.clock.restore(saved)
    engine.syncs.forget_states()
    if engine.alarm is not None:
        engine.alarm.load(saved["asked"], saved["elapsed"], running=engine.clock.anchored)


def read_flights(engine: Engine) -> list[dict[str, Any]]:
    """What is in flight and lands later: `windows`, `due` and `keep` of a sync, and by parameter
    the `steps` that will be taken off the anchors, shaped like this rank's part. After
    `read_counts`."""
    flights = []
    for sync in engine.syncs.airborne:
        steps: dict[str, torch.Tensor] = {}
        for index in sorted(sync.layers):
            layer, unit = engine.held.layers[index], engine.plan.units[index]
            steps.update(zip(unit.params, layer.step_in_flight(), strict=True))
        windows = [list(item) for item in sync.windows.items()]
        flights.append({"windows": windows, "due": sync.due, "keep": sync.keep, "steps": steps})
    return flights


def take_flights(engine: Engine, flights: list[dict[str, Any]]) -> None:
    """Put in flight what `read_flights` has found."""
    for flight in flights:
        steps = flight["steps"]
        sync = Sync(dict(flight["windows"]), due=flight["due"], keep=flight["keep"])
        for index, unit in enumerate(engine.plan.units):
            if all(name in steps for name in unit.params):
                engine.held.layers[index].load_step([steps[name] for name in unit.params])
                sync.layers.add(index)
        engine.syncs.airborne.append(sync)


def _seat(engine: Engine) -> dict[str, int]:
    mesh = engine.mesh
    return {
        "replicas": mesh.replica.size,
        "replica": mesh.replica.rank,
        "shards": mesh.shard.size,
        "shard": mesh.shard.rank,
    }


def _refuse_open_sync(engine: Engine, what: str) -> None:
    if engine.syncs.active:
        raise RuntimeError(f"{what} while a sync is in progress; call it after optimizer.step()")


def refuse_flights(engine: Engine) -> None:
    """Raise RuntimeError if something is in flight that a state would have to replace."""
    if engine.syncs.in_flight:
        raise RuntimeError(
            "a state cannot be loaded over an exchange in flight; load right after attach, or call "
            "flush() before"
        )


def _refuse_missing(what: str, holder: dict[str, Any], keys: Iterable[str]) -> None:
    missing = [repr(key) for key in keys if key not in holder]
    if missing:
        raise ValueError(f"{what} lacks {', '.join(missing)}, which Handle.state_dict() has saved")


def _check(engine: Engine, state: dict[str, Any]) -> None:
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else type(state).__name__
        raise ValueError(
            f"this is no state of format {FORMAT} from Handle.state_dict(): format is {found!r}"
        )
    _refuse_missing("the state", state, KEYS)
    if state["method"] != engine.config.name:
        raise ValueError(
            f"the state is of method {state['method']!r}, this run's is {engine.config.name!r}; a "
            "state continues with the method that saved it"
        )
    here = _seat(engine)
    for name, value in here.items():
        if state[name] != value:
            raise ValueError(
                f"the state has {name} {state[name]!r}, this run has {value!r}; a state continues "
                "on the rank that saved it, with the same number of replicas and shards"
            )
    held = {layer.name: layer.momentum for layer in engine.held.anchored()}
    for unit in engine.plan.units[: engine.held.units]:
        saved = state["layers"].get(unit.name)
        if saved is None:
            raise ValueError(f"the state lacks the layer {unit.name!r}")
        _refuse_missing(f"layer {unit.name!r} in the state", saved, LAYER_KEYS)
        if saved["params"] != list(unit.params):
            raise ValueError(
                f"layer {unit.name!r} has the parameters {list(unit.params)}, "
                f"in the state {saved['params']}"
            )
        momentum, here_too = saved["momentum"], held[unit.name]
        if here_too is not None and momentum.shape != here_too.shape:
            raise ValueError(
                f"layer {unit.name!r} has {here_too.numel()} elements of outer momentum on this "
                f"replica, in the state {momentum.numel()}; it was saved with momentum="
                f"{state['config'].get('momentum')!r}, this run has {engine.recipe.momentum!r}: "
                "Handle.checkpoint() can go on with another setting, a state cannot"
            )
        _refuse_missing("'anchors' in the state", state["anchors"], unit.params)
        for name, param in unit.params.items():
            shape, own = tuple(state["anchors"][name].shape), tuple(local(param).shape)
            if shape != own:
                raise ValueError(f"parameter {name!r} has shape {own}, in the state {shape}")
    extra = set(state["layers"]) - {unit.name for unit in engine.plan.units}
    if extra:
        raise ValueError(f"the state has a layer {min(extra)!r} that this model lacks")
    config = engine.config.as_dict()
    changed = [name for name, value in config.items() if state["config"].get(name) != value]
    if changed:
        said = ", ".join(f"{n}: {state['config'].get(n)!r} -> {config[n]!r}" for n in changed)
        warnings.warn(
            f"edit_ext: the run goes on with settings that differ from the saved ones ({said}).",
            stacklevel=3,
        )
