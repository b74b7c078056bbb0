"""What the evidence asks, the most important first, and the runs that answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import edit_ext as e
from edit_ext.bench.evidence_run import WARMUP, Run

Runs = dict[str, Run]
EVERY = 16  # steps of a window
MANDATORY = 10  # rows that need three seeds
STATES = {"exp_avg": 3 * EVERY, "exp_avg_sq": 6 * EVERY}
NOISE = (264, 328)
RATES = (5e-4, 1e-3, 2e-3, 4e-3)
COUNTS = (1, 2, 4, 8)
SGD_LR = 0.3


@dataclass(frozen=True)
class Row:
    """A question. runs: by label, for a seed; those that several rows share run once."""

    name: str
    asks: str
    runs: Callable[[int], Runs]


def local(every: int = EVERY, warmup: int = WARMUP) -> dict[str, int]:
    """Keyword arguments of the methods with one period."""
    return {"sync_every": every, "warmup_steps": warmup}


def des_loc(param_every: int = EVERY, **others: Any) -> e.DESLOC:
    periods = others.pop("state_every", STATES)
    return e.DESLOC(param_every=param_every, state_every=periods, warmup_steps=WARMUP, **others)


def methods(seed: int, lr: float = 1e-3) -> Runs:
    every_method: dict[str, Any] = {
        "Synchronous": e.Synchronous(),
        "EDiT": e.EDiT(**local()),
        "PostLocalSGD": e.PostLocalSGD(**local()),
        "DiLoCo": e.DiLoCo(**local()),
        "StreamingDiLoCo": e.StreamingDiLoCo(**local(), delay=2),
        "CO2": e.CO2(**local()),
        "CO2Star": e.CO2Star(**local()),
        "LocalAdam": e.LocalAdam(**local()),
        "DESLOC": des_loc(),
        "DESLOC, Nesterov": des_loc(outer="nesterov"),
        "FedAvgPersistent": e.FedAvgPersistent(**local()),
        "FedAvgReset": e.FedAvgReset(**local()),
        "FedAvgReset, step too": e.FedAvgReset(**local(), reset_step=True),
    }
    runs = {label: Run(method=method, lr=lr) for label, method in every_method.items()}
    clocked = e.AEDiT(warmup_steps=WARMUP, sync_seconds=1e6)
    # As many tokens: three replicas make 7 steps where the slow one makes 4, on average 6.25 of 8.
    runs["AEDiT, one replica half as fast"] = Run(
        method=clocked, lr=lr, slow=2, sync_ticks=EVERY, steps=round(400 * 8 / 7)
    )
    runs["DESLOC, ADOPT"] = Run(method=des_loc(), lr=lr, optimizer="adopt")
    sgdm = e.LocalSGDM(param_every=EVERY, state_every=EVERY, warmup_steps=WARMUP, seed=seed)
    runs["LocalSGDM, SGD"] = Run(method=sgdm, lr=SGD_LR * lr / 1e-3, optimizer="sgdm")
    runs["Synchronous, SGD"] = Run(method=e.Synchronous(), lr=SGD_LR * lr / 1e-3, optimizer="sgdm")
    return runs


STEADY = {"warmup_steps": 64}  # the detector compares with norms before: a rate that stays
PENALTY = {"sync_every": 8, "ema_alpha": 0.1, **STEADY}


def steady(method: Any, *, noise: bool = False) -> Run:
    return Run(method=method, final_lr=1.0, noise=NOISE if noise else None)


def both(label: str, method: Any) -> Runs:
    """A method with the noise of one replica, and without."""
    return {label: steady(method), f"{label}, noise": steady(method, noise=True)}


def noise(seed: int) -> Runs:
    return {
        **both("EDiT", e.EDiT(**PENALTY)),
        **both("DiLoCo", e.DiLoCo(sync_every=8, **STEADY)),
        **both("DiLoCo, momentum 0.8", e.DiLoCo(sync_every=8, outer_momentum=0.8, **STEADY)),
    }


def ablation(seed: int) -> Runs:
    no_test = {key: value for key, value in PENALTY.items() if key != "ema_alpha"}
    return {
        **both("EDiT", e.EDiT(**PENALTY)),
        **both("no z-test", e.EDiT(**no_test, z_threshold=None)),
        **both("uniform weights", e.EDiT(**PENALTY, weighting="uniform")),
        **both("no clip", e.EDiT(**PENALTY, clip_norm=None)),
        **both("none", e.EDiT(**no_test, z_threshold=None, weighting="uniform", clip_norm=None)),
    }


def healthy(seed: int) -> Runs:
    return {
        f"alpha {alpha:g}, window {every}": steady(
            e.EDiT(sync_every=every, ema_alpha=alpha, **STEADY)
        )
        for alpha in (0.02, 0.1)
        for every in (4, 8)
    }


def windows(seed: int) -> Runs:
    return {
        f"{kind.__name__}, {every}": steady(kind(sync_every=every, **STEADY))
        for kind in (e.EDiT, e.DiLoCo)
        for every in (4, 8, 16, 32, 64)
    }


def schedules(seed: int) -> Runs:
    return {
        "periodic": Run(method=des_loc()),
        "bernoulli": Run(method=des_loc(schedule="bernoulli", seed=seed)),
    }


def never(seed: int) -> Runs:
    inf = math.inf
    return {
        "K_u = K_v = inf": Run(method=des_loc(state_every=inf)),
        "K_u = 48, K_v = 96": Run(method=des_loc()),
        "K_u = K_v = K_x": Run(method=e.LocalAdam(**local())),
    }


def periods(seed: int) -> Runs:
    def with_states(u: float, v: float) -> Run:
        return Run(method=des_loc(state_every={"exp_avg": u, "exp_avg_sq": v}))

    return {
        "16, 48, 96": Run(method=des_loc()),
        **{f"{x}, 48, 96": Run(method=des_loc(x)) for x in (4, 48, 128)},
        **{f"16, {u}, 96": with_states(u, 96) for u in (4, 192)},
        **{f"16, 48, {v}": with_states(48, v) for v in (4, 192)},
    }


def rates(seed: int) -> Runs:
    kinds = {"Synchronous": e.Synchronous(), "EDiT": e.EDiT(**local())}
    return {
        f"{label}, {count}, {lr:g}": Run(method=method, lr=lr, replicas=count)
        for label, method in kinds.items()
        for count in COUNTS
        for lr in RATES
    }


def joining(seed: int) -> Runs:
    return {
        "DESLOC, nobody joins": Run(method=des_loc(), replicas=2),
        "DESLOC, averaged states": Run(method=des_loc(), replicas=2, joins="all"),
        "DESLOC, zero states": Run(method=des_loc(), replicas=2, joins="none"),
        "FedAvgPersistent, one replica's states": Run(
            method=e.FedAvgPersistent(**local()), replicas=2, joins="all"
        ),
        "FedAvgPersistent, zero states": Run(
            method=e.FedAvgPersistent(**local()), replicas=2, joins="none"
        ),
    }


def sensitivity(seed: int) -> Runs:
    def edit(**changed: Any) -> Run:
        return steady(e.EDiT(**{**PENALTY, **changed}), noise=True)

    return {
        "EDiT, noise": edit(),
        **{f"delta {z:g}": edit(z_threshold=z) for z in (2.0, 4.0, 6.0)},
        **{f"alpha {a:g}": edit(ema_alpha=a) for a in (0.02, 0.3)},
        **{f"phi {c:g}": edit(clip_norm=c) for c in (0.4, 0.2, 0.1)},
    }


ROWS = [
    Row("methods", "What does each method reach with the same tokens?", methods),
    Row("noise", "One replica reads random bytes for a while: who suffers, how long?", noise),
    Row("ablation", "What does each part of the penalty do?", ablation),
    Row("healthy", "How often does the z-test flag a healthy replica?", healthy),
    Row("windows", "How long may a window be (tau)?", windows),
    Row("schedules", "Does DES-LOC need regular periods?", schedules),
    Row("never", "Must optimizer states be averaged at all?", never),
    Row("periods", "Which of DES-LOC's periods matters?", periods),
    Row("rates", "Does the best learning rate stay with more replicas?", rates),
    Row("joining", "What happens when replicas join?", joining),
    Row("sensitivity", "How do delta, alpha and phi matter under noise?", sensitivity),
    Row("methods-2e-3", "As the first row, at twice the rate.", lambda seed: methods(seed, 2e-3)),
]
