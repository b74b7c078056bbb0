"""No option is without effect: changing any field of any method changes what a run does.

The table below must name every field of every dataclass; what a run does is told by its weights,
buffers, bytes, syncs, memory, waits and the weights that each forward starts with.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from torch import nn

import edit_ext
from edit_ext import methods
from edit_ext.explain import memory

STEPS = 12
LOCAL = {"warmup_steps": 2, "granularity": "model", "wire": "bf16", "average_buffers": False}
PIPELINED = {**LOCAL, "prefetch": 3, "offload": ValueError}
OUTER = {"outer_lr": 0.3, "outer_momentum": 0.1, "momentum": "replicated"}
CLOCKED = {**PIPELINED, "param_every": 3, "state_every": 5, "schedule": None, "seed": None}
PENALTY = {
    "clip_norm": 0.02, "weighting": "uniform", "temperature": 0.01, "z_threshold": 100.0,
    "ema_alpha": 0.5, "ema_warmup": 5, "max_flags_in_a_row": 1,
}  # fmt: skip
EVERY = {"sync_every": 3}
# Of each method settings under which all its options matter, and another value for each field; an
# error where the value is refused here; a dict where other fields have to change along.
TABLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Synchronous": ({}, {}),
    "EDiT": (
        {"sync_every": 1, "z_threshold": 0.05, "ema_warmup": 2, "clip_norm": 5.0},
        {**PIPELINED, **OUTER, **PENALTY, **EVERY, "nesterov": False},
    ),
    "AEDiT": (
        {"sync_seconds": 1.0, "z_threshold": 0.05, "ema_warmup": 2, "clip_norm": 5.0},
        {
            **PIPELINED, **OUTER, **PENALTY, "nesterov": False, "sync_seconds": 3.0,
            "min_steps": 5,
        },
    ),
    "DiLoCo": ({"sync_every": 2}, {**PIPELINED, **OUTER, **EVERY, "nesterov": False}),
    "StreamingDiLoCo": (
        {"sync_every": 6, "fragments": 3, "delay": 0},
        {
            **PIPELINED, **OUTER, "sync_every": 3, "nesterov": False, "fragments": 2,
            "pattern": "sequential", "delay": 1, "alpha": 0.1,
        },
    ),
    "PostLocalSGD": ({"sync_every": 2}, {**PIPELINED, **EVERY}),
    "FedAvgPersistent": ({"sync_every": 2}, {**PIPELINED, **EVERY}),
    "FedAvgReset": ({"sync_every": 2}, {**PIPELINED, **EVERY, "reset_step": True}),
    "CO2": (
        {"sync_every": 2, "clip_value": 0.02},
        {
            **LOCAL, **OUTER, **EVERY, "clip_value": None, "staleness": "gap", "penalty": 2.0,
        },
    ),
    "CO2Star": (
        {"sync_every": 2, "clip_value": 0.02}, {**PIPELINED, **OUTER, **EVERY, "clip_value": None}
    ),
    "LocalAdam": ({"sync_every": 2}, {**PIPELINED, **EVERY}),
    "DESLOC": (
        {"param_every": 2, "state_every": 3, "outer": "nesterov"},
        {
            **CLOCKED, **OUTER, "schedule": "bernoulli", "seed": {"schedule": "bernoulli"},
            "order": "before_step", "outer": {"outer": "replace"}, "adaptive": 0.01,
        },
    ),
    "LocalSGDM": (
        {"param_every": 2, "state_every": 3},
        {**CLOCKED, "schedule": "periodic", "seed": 7},
    ),
}  # fmt: skip


class Net(nn.Module):
    """Four layers, one with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def does(config: edit_ext.config.Method) -> dict[str, Any]:
    """Everything that a run of one replica shows of its settings."""
    torch.manual_seed(0)
    model = Net()
    inner = torch.optim.Adam
    optimizer = inner(model.parameters(), lr=0.02)
    starts: list[float] = []
    with edit_ext.attach(model, optimizer, config) as sync:
        engine = sync._engine
        if engine.alarm is not None:
            engine.alarm.now = lambda: float(engine.clock.step)
        # After the root's own hook: what has been waited for by then.
        model.register_forward_pre_hook(
            lambda module, _: starts.append(module.head.weight.sum().item())
        )
        for t in range(STEPS):
            generator = torch.Generator().manual_seed(100 * dist.get_rank() + t)
            x = torch.randn(8, 6, generator=generator)
            (model(x) - x.flip(1) * (1 + dist.get_rank())).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            optimizer.param_groups[0]["lr"] *= 1.1  # norms rise, so that some are flagged
        sync.flush()
        heartbeat = engine.mesh.heartbeat
        assert heartbeat is not None
        return {
            "weights": [p.tolist() for p in model.state_dict().values()],
            "bytes": sync.totals()["bytes_sent"],
            "syncs": [(m["step"], m["sync_index"], m["layer"]) for m in sync.metrics()],
            "memory": memory(engine),
            "patience": heartbeat._timeout,
            "starts": starts,
        }


def changes(name: str) -> tuple[dict[str, Any], Any]:
    """The base run's doings twice, and by field those of a run with that field changed."""
    base, table = TABLE[name]
    cls = getattr(edit_ext, name)
    found: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        value = {"timeout": 77.0, **table}[field.name]
        if isinstance(value, type):
            found[field.name] = value
            with pytest.raises(value, match=field.name):
                does(cls(**{**base, field.name: True}))
        elif isinstance(value, dict):
            along = {**base, **value}
            other = {**along, field.name: 7} if field.name not in value else along
            before = {**along} if field.name not in value else {**base}
            found[field.name] = (does(cls(**before)), does(cls(**other)))
        else:
            found[field.name] = (None, does(cls(**{**base, field.name: value})))
    return {"first": does(cls(**base)), "again": does(cls(**base))}, found


@pytest.mark.parametrize("name", TABLE)
def test_every_option_has_an_effect(ranks: Ranks, name: str) -> None:
    """The same settings do the same twice; another value of any field does something else."""
    base, found = ranks.run(2, changes, name, seconds=200)[0]
    assert base["first"] == base["again"]
    assert set(found) == {field.name for field in dataclasses.fields(getattr(edit_ext, name))}
    for field, value in found.items():
        if not isinstance(value, type):
            before, after = value
            assert after != (before or base["first"]), f"{name}.{field} changes nothing"


def test_the_table_is_complete() -> None:
    """Every method is in it."""
    assert set(TABLE) == {cls.__name__ for cls in methods.METHODS}


BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("StreamingDiLoCo", {"sync_every": 10, "fragments": 3}, ValueError,
     r"fragments=3 does not divide sync_every=10\."),
    ("StreamingDiLoCo", {"sync_every": 8, "fragments": 2, "delay": 4}, ValueError,
     r"delay=4 must be smaller than the 4 steps"),
    ("StreamingDiLoCo", {"alpha": 1.0}, ValueError, "alpha must be at least 0 and below 1"),
    ("StreamingDiLoCo", {"fragments": 1, "pattern": "sequential"}, ValueError, "has no effect"),
    ("StreamingDiLoCo", {"prefetch": 1}, ValueError, "prefetch=1 has no effect with delay=5"),
    ("CO2", {"clip_value": -1.0}, ValueError, "clip_value must be above 0"),
    ("CO2", {"penalty": 0.5}, ValueError, "penalty must be at least 1"),
    ("CO2", {"staleness": "linear"}, ValueError, "staleness must be one of"),
    ("DESLOC", {"state_every": {"exp_avg": 0}}, ValueError, r"state_every\['exp_avg'\] must be at"),
    ("DESLOC", {"state_every": 2.5}, TypeError, "state_every must be an integer or math.inf"),
    ("DESLOC", {"state_every": -math.inf}, TypeError, "state_every must be an integer"),
    ("DESLOC", {"state_every": {3: 4}}, TypeError, "must name states by strings"),
    ("DESLOC", {"param_every": math.inf}, TypeError, "param_every must be an integer"),
    ("DESLOC", {"outer_lr": 0.5}, ValueError, "outer_lr=0.5 has no effect with outer='replace'"),
    ("DESLOC", {"seed": 3}, ValueError, "seed=3 has no effect with schedule='periodic'"),
    ("DESLOC", {"order": "before_step", "granularity": "model"}, ValueError, "has no effect"),
    ("LocalSGDM", {"state_every": {"momentum_buffer": 3}}, TypeError, "must be a number"),
    ("FedAvgReset", {"reset_step": 1}, TypeError, "reset_step must be True or False"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "fields", "kind", "message"), BAD)
def test_bad_settings(
    name: str, fields: dict[str, Any], kind: type[Exception], message: str
) -> None:
    """Settings that cannot work together are refused when they are made."""
    with pytest.raises(kind, match=message):
        getattr(edit_ext, name)(**fields)


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_more_fragments_than_layers() -> None:
    """Refused at attach, with the layers that there are."""
    model = sequential()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"fragments=4, but the model has only 2 layers"):
        edit_ext.attach(model, optimizer, edit_ext.StreamingDiLoCo())


class Factored(torch.optim.SGD):
    """Its state is one number a row."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("row", torch.zeros(len(p)))


class Quantized(torch.optim.SGD):
    """Its state has 8 bits."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("state1", torch.zeros_like(p, dtype=torch.uint8))


@pytest.mark.parametrize(
    ("optimizer", "config", "kind", "message"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), edit_ext.DESLOC(state_every={"exp_avg": 4}),
         ValueError, r"no state 'exp_avg' after its first step; its states are: none"),
        (lambda p: torch.optim.Adam(p), edit_ext.DESLOC(state_every={"exp_avg": 4, "v": 8}),
         ValueError, r"no state 'v' after .* are: 'exp_avg', 'exp_avg_sq'"),
        (lambda p: Factored(p, lr=0.1), edit_ext.LocalAdam(), ValueError,
         r"optimizer state 'row' of '0.weight' is torch.float32 of shape \[4\]"),
        (lambda p: Quantized(p, lr=0.1), edit_ext.LocalAdam(), TypeError,
         r"optimizer state 'state1' of '0.weight' is torch.uint8"),
    ],
)  # fmt: skip
def test_states_that_cannot_be_averaged(
    optimizer: Any, config: Any, kind: type[Exception], message: str
) -> None:
    """Found after the optimizer's first step, by name; the error sticks to the handle."""
    model = sequential()
    inner = optimizer(model.parameters())
    sync = edit_ext.attach(model, inner, config)
    with pytest.raises(kind, match=message):
        step(model, inner)
    with pytest.raises(RuntimeError, match="optimizer"):
        sync.flush()
    sync.detach()


def test_outer_lr_of_a_mean() -> None:
    """A method without an outer learning rate says so."""
    model = sequential()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = edit_ext.attach(model, optimizer, edit_ext.LocalAdam())
    with pytest.raises(ValueError, match="LocalAdam has no outer_lr"):
        sync.outer_lr = 0.5
    sync.detach()
