"""Every method over Gloo against its own fp64 reference, and against the others where they meet."""

from __future__ import annotations

import math
from typing import Any

import method_references as ref
import pytest
import torch
import torch.distributed as dist
from nets import batch, layer_of, loss, make_net, values
from ranks import Ranks
from torch import Tensor, nn

import edit_ext

STEPS = 14
LAYERS = ["(root)", "stem", "blocks.0", "blocks.1", "blocks.2", "spare", "head"]  # registered so
INNER = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1), ref.sgd(0.1)),
    "sgdm": (lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), ref.sgd(0.05, 0.9)),
    "adam": (
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.9, 0.99)),
        ref.adam(0.01, (0.9, 0.99)),
    ),
}


def fragments(count: int, strided: bool) -> list[list[str]]:
    """Parameters of Net by fragment."""
    place = {name: i for i, name in enumerate(LAYERS)}
    cut: list[list[str]] = [[] for _ in range(count)]
    for name, _ in make_net().named_parameters():
        index = place[layer_of(name)]
        cut[index % count if strided else index * count // len(LAYERS)].append(name)
    return cut


def grad(replica: int, t: int, x: ref.Values) -> ref.Values:
    """Gradients in fp64 of those parameters that have one."""
    model = make_net().double()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(x[name])
    data, target = (part.double() for part in batch(replica, t))
    (model(data) - target).square().mean().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


class Watch:
    """The weights that a forward uses, each taken when its module runs."""

    def __init__(self, model: nn.Module) -> None:
        self.seen: dict[str, Tensor] = {}
        for name, module in model.named_modules():
            module.register_forward_pre_hook(self._hook(f"{name}." if name else ""))

    def _hook(self, prefix: str) -> Any:
        def look(module: nn.Module, args: Any) -> None:
            for name, param in module.named_parameters(recurse=False):
                self.seen[prefix + name] = param.detach().clone()

        return look


def run(config: edit_ext.config.Method, inner: str, steps: int) -> dict[str, Any]:
    """One replica's training: weights of every forward, the end, and how it went."""
    model = make_net()
    optimizer = INNER[inner][0](model.parameters())
    forwards = []
    with edit_ext.attach(model, optimizer, config) as sync:
        watch = Watch(model)
        for t in range(steps):
            loss(model, batch(dist.get_rank(), t)).backward()
            forwards.append(dict(watch.seen))
            optimizer.step()
            optimizer.zero_grad()
        sync.flush()
        totals, metrics = sync.totals(), sync.metrics()
    names = {p: n for n, p in model.named_parameters()}
    states: dict[str, dict[str, Tensor]] = {}
    for param, own in optimizer.state.items():
        for key, value in own.items():
            if isinstance(value, Tensor) and key != "step":
                states.setdefault(key, {})[names[param]] = value
    return {
        "forwards": forwards, "final": values(model), "states": states, "totals": totals,
        "metrics": metrics,
    }  # fmt: skip


def start() -> ref.Values:
    return {name: p.detach().double() for name, p in make_net().named_parameters()}


def due_by_chance(seed: int, every: dict[tuple[str, str], float]) -> Any:
    """The schedule by chance as the settings have it; by item and name of its track."""
    tracks = {
        key: edit_ext.recipe.Track(name=name, every=period, seed=seed)
        for (key, name), period in every.items()
    }
    return lambda key, t: tracks[key].due(t)


E = edit_ext
CASES: dict[str, tuple[Any, str, Any]] = {
    "Synchronous": (E.Synchronous(), "adam", lambda s: ref.Synchronous(s)),
    "PostLocalSGD": (
        E.PostLocalSGD(sync_every=3, warmup_steps=2), "adam",
        lambda s: ref.post_local_sgd(s, 3, 2),
    ),
    "DiLoCo": (E.DiLoCo(sync_every=3), "adam", lambda s: ref.Outer(s, 3, 0.7, 0.9)),
    "DiLoCo-heavy-ball": (
        E.DiLoCo(sync_every=4, nesterov=False, momentum="replicated"), "sgd",
        lambda s: ref.Outer(s, 4, 0.7, 0.9, nesterov=False),
    ),
    "StreamingDiLoCo": (
        E.StreamingDiLoCo(sync_every=6, fragments=3, delay=1), "adam",
        lambda s: ref.Streaming(s, 6, 0.4, 0.9, fragments(3, True), 1, 0.5),
    ),
    "StreamingDiLoCo-sequential": (
        E.StreamingDiLoCo(
            sync_every=4, fragments=2, delay=0, alpha=0.25, pattern="sequential", prefetch=1
        ), "sgdm",
        lambda s: ref.Streaming(s, 4, 0.4, 0.9, fragments(2, False), 0, 0.25),
    ),
    "StreamingDiLoCo-late": (
        E.StreamingDiLoCo(sync_every=8, fragments=2, delay=3, alpha=0.0, momentum="replicated"),
        "adam", lambda s: ref.Streaming(s, 8, 0.4, 0.9, fragments(2, True), 3, 0.0),
    ),
    "CO2": (
        E.CO2(sync_every=3, clip_value=0.02, penalty=1.5), "adam",
        lambda s: ref.CO2(s, 3, 1.0, 0.5, 0.02, layer_of, constant=1.5),
    ),
    "CO2-gap": (
        E.CO2(sync_every=3, clip_value=None, staleness="gap", penalty=0.1), "sgd",
        lambda s: ref.CO2(s, 3, 1.0, 0.5, None, layer_of, gap=0.1),
    ),
    "CO2-replicated": (
        E.CO2(sync_every=2, staleness="gap", penalty=0.1, momentum="replicated"), "adam",
        lambda s: ref.CO2(s, 2, 1.0, 0.5, 1.0, layer_of, gap=0.1),
    ),
    "CO2Star": (
        E.CO2Star(sync_every=3, clip_value=0.02), "adam",
        lambda s: ref.Outer(s, 3, 1.0, 0.5, nesterov=False, clip=0.02),
    ),
    "LocalAdam": (
        E.LocalAdam(sync_every=3), "adam",
        lambda s: ref.Clocks(
            s, ref.periods({"x": 3, "exp_avg": 3, "exp_avg_sq": 3}), ["exp_avg", "exp_avg_sq"]
        ),
    ),
    "DESLOC": (
        E.DESLOC(param_every=2, state_every={"exp_avg": 3, "exp_avg_sq": 5}), "adam",
        lambda s: ref.Clocks(
            s, ref.periods({"x": 2, "exp_avg": 3, "exp_avg_sq": 5}), ["exp_avg", "exp_avg_sq"]
        ),
    ),
    "DESLOC-paper": (
        E.DESLOC(
            param_every=2, state_every={"exp_avg": 3, "exp_avg_sq": 5}, order="before_step"
        ), "adam",
        lambda s: ref.Clocks(
            s, ref.periods({"x": 2, "exp_avg": 3, "exp_avg_sq": 5}), ["exp_avg", "exp_avg_sq"],
            paper=True,
        ),
    ),
    "DESLOC-nesterov": (
        E.DESLOC(param_every=3, state_every=4, outer="nesterov", outer_lr=0.9), "adam",
        lambda s: ref.Clocks(
            s, ref.periods({"x": 3, "exp_avg": 4, "exp_avg_sq": 4}), ["exp_avg", "exp_avg_sq"],
            lr=0.9, mu=0.9,
        ),
    ),
    "DESLOC-one-state": (
        E.DESLOC(param_every=2, state_every={"exp_avg_sq": math.inf}, schedule="bernoulli", seed=5),
        "adam", lambda s: ref.Clocks(s, due_by_chance(5, {("x", "parameters"): 2}), []),
    ),
    "FedAvgPersistent": (
        E.FedAvgPersistent(sync_every=3), "adam", lambda s: ref.post_local_sgd(s, 3),
    ),
    "FedAvgReset": (E.FedAvgReset(sync_every=3), "adam", lambda s: ref.Reset(s, 3, False)),
    "FedAvgReset-step": (
        E.FedAvgReset(sync_every=4, reset_step=True), "adam", lambda s: ref.Reset(s, 4, True),
    ),
    "LocalSGDM": (
        E.LocalSGDM(param_every=2, state_every=3, seed=3), "sgdm",
        lambda s: ref.Clocks(
            s, due_by_chance(3, {("x", "parameters"): 2, ("momentum_buffer", "states"): 3}),
            ["momentum_buffer"],
        ),
    ),
    "LocalSGDM-periodic": (
        E.LocalSGDM(param_every=2, state_every=3, schedule="periodic"), "sgdm",
        lambda s: ref.Clocks(
            s, ref.periods({"x": 2, "momentum_buffer": 3}), ["momentum_buffer"]
        ),
    ),
}  # fmt: skip


def near(found: Tensor, wanted: Tensor) -> bool:
    scale = max(wanted.abs().max().item(), 1e-3)
    return bool((found.double() - wanted).abs().max().item() <= 1e-6 * max(scale, 1.0))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world", [2, 4])
def test_trajectory(ranks: Ranks, world: int, name: str) -> None:
    """The weights of every forward and of the end equal the reference to 1e-6; replicas end with
    the same bits; optimizer states too where they are averaged."""
    config, inner, rule = CASES[name]
    results = ranks.run(world, run, config, inner, STEPS)
    truth = ref.train(start(), grad, world, STEPS, INNER[inner][1], rule(start()))
    for rank, result in enumerate(results):
        for t, seen in enumerate(result["forwards"]):
            for param, value in seen.items():
                assert near(value, truth.forwards[t][rank][param]), (rank, t, param)
        for param, value in result["final"].items():
            assert near(value, truth.final[rank][param]), (rank, param)
            assert torch.equal(value, results[0]["final"][param]), (rank, param)
        for key, state in result["states"].items():
            for param, value in state.items():
                assert near(value, truth.states[rank][key][param]), (rank, key, param)
