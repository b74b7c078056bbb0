"""The methods' settings that tests run, and the reference that each has to equal."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import method_references as ref
import nets
import shards
import torch
from torch import nn

import edit_ext

STEPS = 14
INNER = {
    "adopt": (
        lambda p: edit_ext.optim.ADOPT(p, lr=0.01, betas=(0.9, 0.99)),
        ref.adopt(0.01, (0.9, 0.99)),
    ),
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1), ref.sgd(0.1)),
    "sgdm": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), ref.sgd(0.05, 0.9)),
    "adam": (
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.9, 0.99)),
        ref.adam(0.01, (0.9, 0.99)),
    ),
}


@dataclass(frozen=True)
class Kind:
    """A model, and how the hook should cut it; layers in order of registration."""

    make: Callable[[], nn.Module]
    layer_of: Callable[[str], str]
    layers: tuple[str, ...]

    def start(self) -> ref.Values:
        """Its weights at the start."""
        return {name: p.detach().double() for name, p in self.make().named_parameters()}

    def cut(self, count: int, strided: bool) -> list[list[str]]:
        """Parameters by fragment."""
        place = {name: i for i, name in enumerate(self.layers)}
        parts: list[list[str]] = [[] for _ in range(count)]
        for name, _ in self.make().named_parameters():
            index = place[self.layer_of(name)]
            parts[index % count if strided else index * count // len(self.layers)].append(name)
        return parts

    def grad(self, replica: int, t: int, x: ref.Values) -> ref.Values:
        """Gradients in fp64 of those parameters that have one."""
        model = self.make().double()
        with torch.no_grad():
            for name, param in model.named_parameters():
                param.copy_(x[name])
        data, target = (part.double() for part in nets.batch(replica, t))
        (model(data) - target).square().mean().backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    def train(self, case: str, replicas: int) -> ref.Trajectory:
        """The trajectory that a case has to follow."""
        _, inner, rule = CASES[case]
        start = self.start()
        return ref.train(start, self.grad, replicas, STEPS, INNER[inner][1], rule(start, self))


BLOCKS = ("blocks.0", "blocks.1", "blocks.2")
PLAIN = Kind(nets.make_net, nets.layer_of, ("(root)", "stem", *BLOCKS, "spare", "head"))
SHARDED = Kind(shards.make_net, shards.layer_of, ("(root)", "stem", *BLOCKS, "head"))


def due_by_chance(seed: int, every: dict[tuple[str, str], float]) -> Any:
    """The schedule by chance as the settings have it; by item and name of its track."""
    tracks = {
        key: edit_ext.recipe.Track(name=name, every=period, seed=seed)
        for (key, name), period in every.items()
    }
    return lambda key, t: tracks[key].due(t)


E = edit_ext
CASES: dict[str, tuple[Any, str, Any]] = {
    "Synchronous": (E.Synchronous(), "adam", lambda s, k: ref.Synchronous(s)),
    "PostLocalSGD": (
        E.PostLocalSGD(sync_every=3, warmup_steps=2), "adam",
        lambda s, k: ref.post_local_sgd(s, 3, 2),
    ),
    "DiLoCo": (E.DiLoCo(sync_every=3), "adam", lambda s, k: ref.Outer(s, 3, 0.7, 0.9)),
    "DiLoCo-heavy-ball": (
        E.DiLoCo(sync_every=4, nesterov=False, momentum="replicated"), "sgd",
        lambda s, k: ref.Outer(s, 4, 0.7, 0.9, nesterov=False),
    ),
    "StreamingDiLoCo": (
        E.StreamingDiLoCo(sync_every=6, fragments=3, delay=1), "adam",
        lambda s, k: ref.Streaming(s, 6, 0.4, 0.9, k.cut(3, True), 1, 0.5),
    ),
    "StreamingDiLoCo-sequential": (
        E.StreamingDiLoCo(
            sync_every=4, fragments=2, delay=0, alpha=0.25, pattern="sequential", prefetch=1
        ), "sgdm",
        lambda s, k: ref.Streaming(s, 4, 0.4, 0.9, k.cut(2, False), 0, 0.25),
    ),
    "StreamingDiLoCo-late": (
        E.StreamingDiLoCo(sync_every=8, fragments=2, delay=3, alpha=0.0, momentum="replicated"),
        "adam", lambda s, k: ref.Streaming(s, 8, 0.4, 0.9, k.cut(2, True), 3, 0.0),
    ),
    "CO2": (
        E.CO2(sync_every=3, clip_value=0.02, penalty=1.5), "adam",
        lambda s, k: ref.CO2(s, 3, 1.0, 0.5, 0.02, k.layer_of, constant=1.5),
    ),
    "CO2-gap": (
        E.CO2(sync_every=3, clip_value=None, staleness="gap", penalty=0.1), "sgd",
        lambda s, k: ref.CO2(s, 3, 1.0, 0.5, None, k.layer_of, gap=0.1),
    ),
    "CO2-replicated": (
        E.CO2(sync_every=2, staleness="gap", penalty=0.1, momentum="replicated"), "adam",
        lambda s, k: ref.CO2(s, 2, 1.0, 0.5, 1.0, k.layer_of, gap=0.1),
    ),
    "CO2Star": (
        E.CO2Star(sync_every=3, clip_value=0.02), "adam",
        lambda s, k: ref.Outer(s, 3, 1.0, 0.5, nesterov=False, clip=0.02),
    ),
    "LocalAdam": (
        E.LocalAdam(sync_every=3), "adam",
        lambda s, k: ref.Clocks(
            s, ref.periods({"x": 3, "exp_avg": 3, "exp_avg_sq": 3}), ["exp_avg", "exp_avg_sq"]
        ),
    ),
    "DESLOC": (
        E.DESLOC(param_every=2, state_every={"exp_avg": 3, "exp_avg_sq": 5}), "adam",
        lambda s, k: ref.Clocks(
            s, ref.periods({"x": 2, "exp_avg": 3, "exp_avg_sq": 5}), ["exp_avg", "exp_avg_sq"]
        ),
    ),
    "DESLOC-adaptive": (
        E.DESLOC(
            param_every=2, state_every={"exp_avg": 2, "exp_avg_sq": 4}, adaptive=0.15
        ), "adam",
        lambda s, k: ref.Adaptive(
            s, {"x": 2, "exp_avg": 2, "exp_avg_sq": 4}, 0.15,
            {"exp_avg": (2, 32), "exp_avg_sq": (2, 64)},
        ),
    ),
    "DESLOC-ADOPT": (
        E.DESLOC(param_every=2, state_every={"exp_avg": 3, "exp_avg_sq": 5}), "adopt",
        lambda s, k: ref.Clocks(
            s, ref.periods({"x": 2, "exp_avg": 3, "exp_avg_sq": 5}), ["exp_avg", "exp_avg_sq"]
        ),
    ),
    "DESLOC-paper": (
        E.DESLOC(
            param_every=2, state_every={"exp_avg": 3, "exp_avg_sq": 5}, order="before_step"
        ), "adam",
        lambda s, k: ref.Clocks(
            s, ref.periods({"x": 2, "exp_avg": 3, "exp_avg_sq": 5}), ["exp_avg", "exp_avg_sq"],
            paper=True,
        ),
    ),
    "DESLOC-nesterov": (
        E.DESLOC(param_every=3, state_every=4, outer="nesterov", outer_lr=0.9), "adam",
        lambda s, k: ref.Clocks(
            s, ref.periods({"x": 3, "exp_avg": 4, "exp_avg_sq": 4}), ["exp_avg", "exp_avg_sq"],
            lr=0.9, mu=0.9,
        ),
    ),
    "DESLOC-one-state": (
        E.DESLOC(param_every=2, state_every={"exp_avg_sq": math.inf}, schedule="bernoulli", seed=5),
        "adam", lambda s, k: ref.Clocks(s, due_by_chance(5, {("x", "parameters"): 2}), []),
    ),
    "FedAvgPersistent": (
        E.FedAvgPersistent(sync_every=3), "adam", lambda s, k: ref.post_local_sgd(s, 3),
    ),
    "FedAvgReset": (E.FedAvgReset(sync_every=3), "adam", lambda s, k: ref.Reset(s, 3, False)),
    "FedAvgReset-step": (
        E.FedAvgReset(sync_every=4, reset_step=True), "adam", lambda s, k: ref.Reset(s, 4, True),
    ),
    "LocalSGDM": (
        E.LocalSGDM(param_every=2, state_every=3, seed=3), "sgdm",
        lambda s, k: ref.Clocks(
            s, due_by_chance(3, {("x", "parameters"): 2, ("momentum_buffer", "states"): 3}),
            ["momentum_buffer"],
        ),
    ),
    "LocalSGDM-periodic": (
        E.LocalSGDM(param_every=2, state_every=3, schedule="periodic"), "sgdm",
        lambda s, k: ref.Clocks(
            s, ref.periods({"x": 2, "momentum_buffer": 3}), ["momentum_buffer"]
        ),
    ),
}  # fmt: skip
