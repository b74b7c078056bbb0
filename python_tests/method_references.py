"""Every method once more, in fp64 from its equations: what the trajectories are compared with.

Nothing of edit_ext is imported. All replicas live in one process as dictionaries of tensors by
parameter name. A rule sees them before forward t (after t complete steps), between its gradients
and its step, and at the end. Equations: DiLoCo arXiv 2311.08105, Streaming DiLoCo 2501.18512, CO2
2401.16265, DES-LOC 2505.22549.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

Values = dict[str, Tensor]
Gradient = Callable[[int, int, Values], Values]  # replica, step, weights


@dataclass
class Worker:
    """One replica: weights, optimizer states by name, updates made."""

    x: Values
    states: dict[str, Values] = field(default_factory=dict)
    count: int = 0


Step = Callable[[Worker, Values], None]


def sgd(lr: float, momentum: float = 0.0, dampening: float = 0.0) -> Step:
    """torch.optim.SGD: the first buffer is the gradient itself."""

    def step(w: Worker, grads: Values) -> None:
        for name, g in grads.items():
            if momentum:
                bufs = w.states.setdefault("momentum_buffer", {})
                old = bufs.get(name)
                bufs[name] = g.clone() if old is None else momentum * old + (1 - dampening) * g
                g = bufs[name]
            w.x[name] = w.x[name] - lr * g

    return step


def adam(
    lr: float,
    betas: tuple[float, float] = (0.9, 0.99),
    eps: float = 1e-8,
    clip: float = float("inf"),
    floor: float | None = None,
) -> Step:
    """Adam with bias correction; with `floor` (lambda of DES-LOC's Alg. 2) without, under the root.
    clip: of each coordinate of the gradient."""

    def step(w: Worker, grads: Values) -> None:
        w.count += 1
        m, v = w.states.setdefault("exp_avg", {}), w.states.setdefault("exp_avg_sq", {})
        for name, g in grads.items():
            g = g.clamp(-clip, clip)
            m[name] = betas[0] * m.get(name, torch.zeros_like(g)) + (1 - betas[0]) * g
            v[name] = betas[1] * v.get(name, torch.zeros_like(g)) + (1 - betas[1]) * g * g
            if floor is not None:
                w.x[name] = w.x[name] - lr * m[name] / (v[name] + floor * floor).sqrt()
                continue
            up, down = (1 - b**w.count for b in betas)
            w.x[name] = w.x[name] - lr * (m[name] / up) / ((v[name] / down).sqrt() + eps)

    return step


def adopt(lr: float, betas: tuple[float, float], eps: float = 1e-6) -> Step:
    """ADOPT, arXiv 2411.02853: the first gradient only sets the second moment."""

    def step(w: Worker, grads: Values) -> None:
        m, v = w.states.setdefault("exp_avg", {}), w.states.setdefault("exp_avg_sq", {})
        bound = w.count**0.25
        w.count += 1
        for name, g in grads.items():
            if name not in v:
                v[name], m[name] = g * g, torch.zeros_like(g)
                continue
            n = (g / v[name].sqrt().clamp(min=eps)).clamp(-bound, bound)
            m[name] = betas[0] * m[name] + (1 - betas[0]) * n
            w.x[name] = w.x[name] - lr * m[name]
            v[name] = betas[1] * v[name] + (1 - betas[1]) * g * g

    return step


class Rule:
    """What a method adds to local steps: nothing."""

    averaged = 0  # steps whose gradients are averaged

    def __init__(self, start: Values) -> None:
        self.anchor = dict(start)

    def before_forward(self, t: int, workers: list[Worker]) -> None:
        """After t complete steps."""

    def before_step(self, t: int, workers: list[Worker]) -> None:
        """After the gradients of step t."""

    def close(self, t: int, workers: list[Worker]) -> None:
        """The end: everything that is open is synced."""


@dataclass
class Trajectory:
    forwards: list[list[Values]]  # [t][replica]: the weights that forward t uses
    final: list[Values]
    states: list[dict[str, Values]]  # of each replica, at the end


def train(
    start: Values, grad: Gradient, replicas: int, steps: int, inner: Step, rule: Rule
) -> Trajectory:
    """Train `replicas` workers for `steps` steps and close."""
    workers = [Worker(dict(start)) for _ in range(replicas)]
    forwards = []
    for t in range(steps):
        rule.before_forward(t, workers)
        forwards.append([dict(w.x) for w in workers])
        grads = [grad(r, t, w.x) for r, w in enumerate(workers)]
        if t < rule.averaged:
            both = {n: sum(g[n] for g in grads) / replicas for n in grads[0]}
            grads = [both for _ in grads]
        rule.before_step(t, workers)
        for worker, own in zip(workers, grads, strict=True):
            inner(worker, own)
    rule.close(steps, workers)
    return Trajectory(forwards, [w.x for w in workers], [w.states for w in workers])


def mean(parts: Iterable[Values], names: Iterable[str]) -> Values:
    """The plain mean of the named tensors."""
    parts = list(parts)
    return {n: torch.stack([p[n] for p in parts]).mean(0) for n in names}


class Synchronous(Rule):
    averaged = 10**9


class Outer(Rule):
    """DiLoCo: theta = Nesterov(theta, theta - mean of the workers), every `every` steps."""

    def __init__(self, start: Values, every: int, lr: float, mu: float, nesterov: bool = True,
                 averaged: int = 0, clip: float | None = None) -> None:  # fmt: skip
        super().__init__(start)
        self.every, self.lr, self.mu, self.nesterov = every, lr, mu, nesterov
        self.averaged, self.clip = averaged, clip
        self.buf = {n: torch.zeros_like(v) for n, v in start.items()}

    def delta(self, workers: list[Worker], names: Iterable[str]) -> Values:
        found = mean([w.x for w in workers], names)
        return {n: self.anchor[n] - found[n] for n in names}

    def step(self, delta: Values) -> None:
        for n, g in delta.items():
            self.buf[n] = self.mu * self.buf[n] + g
            if self.clip is not None:
                self.buf[n] = self.buf[n].clamp(-self.clip, self.clip)
            move = g + self.mu * self.buf[n] if self.nesterov else self.buf[n]
            self.anchor[n] = self.anchor[n] - self.lr * move

    def put(self, workers: list[Worker], names: Iterable[str], keep: float = 0.0) -> None:
        for w in workers:
            for n in names:
                w.x[n] = keep * w.x[n] + (1 - keep) * self.anchor[n]

    def sync(self, workers: list[Worker]) -> None:
        self.step(self.delta(workers, self.anchor))
        self.put(workers, self.anchor)

    def before_forward(self, t: int, workers: list[Worker]) -> None:
        if t == self.averaged:
            self.anchor = dict(workers[0].x)
        elif t > self.averaged and (t - self.averaged) % self.every == 0:
            self.sync(workers)

    def close(self, t: int, workers: list[Worker]) -> None:
        if t > self.averaged:
            self.sync(workers)


def post_local_sgd(start: Values, every: int, averaged: int = 0) -> Outer:
    """The mean itself: an outer step of 1 without momentum."""
    return Outer(start, every, 1.0, 0.0, averaged=averaged)


class Reset(Outer):
    """A mean of the weights after which all optimizer states are zero."""

    def __init__(self, start: Values, every: int, step: bool) -> None:
        super().__init__(start, every, 1.0, 0.0)
        self.resets_step = step

    def sync(self, workers: list[Worker]) -> None:
        super().sync(workers)
        for w in workers:
            w.states = {k: {n: v * 0 for n, v in s.items()} for k, s in w.states.items()}
            w.count = 0 if self.resets_step else w.count


class Streaming(Outer):
    """Fragments one after the other; a result is mixed in `delay` steps after it was sent."""

    def __init__(self, start: Values, every: int, lr: float, mu: float, fragments: list[list[str]],
                 delay: int, alpha: float) -> None:  # fmt: skip
        super().__init__(start, every, lr, mu)
        self.fragments, self.delay, self.alpha = fragments, delay, alpha
        self.flying: list[tuple[int, Values]] = []

    def before_forward(self, t: int, workers: list[Worker]) -> None:
        for p, names in enumerate(self.fragments):
            first = (p + 1) * self.every // len(self.fragments)
            if t >= first and (t - first) % self.every == 0:
                self.flying.append((t + self.delay, self.delta(workers, names)))
        self.land(t, workers)

    def land(self, t: int, workers: list[Worker]) -> None:
        while self.flying and self.flying[0][0] <= t:
            delta = self.flying.pop(0)[1]
            self.step(delta)
            self.put(workers, delta, self.alpha)

    def close(self, t: int, workers: list[Worker]) -> None:
        self.land(10**9, workers)
        self.sync(workers)


class CO2(Outer):
    """One window late: x_{t+1} = x_t - lr m_t with m_t from what was sent a window earlier."""

    def __init__(self, start: Values, every: int, lr: float, mu: float, clip: float | None,
                 layer_of: Callable[[str], str], constant: float = 1.0,
                 gap: float = 0.0) -> None:  # fmt: skip
        super().__init__(start, every, lr, mu, nesterov=False, clip=clip)
        self.constant, self.gap, self.layer_of = constant, gap, layer_of
        self.sent: Values | None = None

    def apply(self, workers: list[Worker]) -> None:
        if self.sent is not None:
            moved: dict[str, float] = {}
            for n, m in self.buf.items():
                where = self.layer_of(n)
                moved[where] = moved.get(where, 0.0) + (self.lr * m).square().sum().item()
            stale = {
                n: 1 + moved[self.layer_of(n)] ** 0.5 / self.gap if self.gap else self.constant
                for n in self.sent
            }
            self.step({n: g / stale[n] for n, g in self.sent.items()})
        self.put(workers, self.anchor)

    def sync(self, workers: list[Worker]) -> None:
        new = self.delta(workers, self.anchor)
        self.apply(workers)
        self.sent = new

    def close(self, t: int, workers: list[Worker]) -> None:
        self.sync(workers)
        self.apply(workers)


class Clocks(Outer):
    """DES-LOC: weights and each state on its own clock; `due(item, t)` after t complete steps."""

    def __init__(self, start: Values, due: Callable[[str, int], bool], states: Iterable[str],
                 paper: bool = False, lr: float = 1.0, mu: float = 0.0) -> None:  # fmt: skip
        super().__init__(start, 1, lr, mu)
        self.due, self.averages, self.paper = due, list(states), paper

    def run(self, t: int, workers: list[Worker], every: bool = False) -> None:
        for key in self.averages:
            if workers[0].states.get(key) and (every or self.due(key, t)):
                both = mean([w.states[key] for w in workers], workers[0].states[key])
                for w in workers:
                    w.states[key] = dict(both)
        if every or self.due("x", t):
            self.sync(workers)

    def before_forward(self, t: int, workers: list[Worker]) -> None:
        if t and not self.paper:
            self.run(t, workers)

    def before_step(self, t: int, workers: list[Worker]) -> None:
        if t and self.paper:
            self.run(t, workers)

    def close(self, t: int, workers: list[Worker]) -> None:
        self.run(t, workers, every=True)


class Adaptive(Clocks):
    """Periods of states that follow how far workers come apart: every * target / drift, from half
    to twice the old one and within bounds, where `every` is the window that the drift came in; a
    new one holds from the next sync of anything on, which an item joins whose step has come."""

    def __init__(self, start: Values, every: Mapping[str, int], target: float,
                 bounds: Mapping[str, tuple[int, int]]) -> None:  # fmt: skip
        super().__init__(start, self.is_due, [key for key in every if key != "x"])
        self.periods = {key: (period, 0) for key, period in every.items()}
        self.target, self.bounds = target, bounds
        self.measured: dict[str, tuple[int, int, float]] = {}
        self.last = dict.fromkeys(every, 0)  # sync of each item

    def is_due(self, key: str, t: int) -> bool:
        every, since = self.periods[key]
        return t > since and (t - since) % every == 0

    def run(self, t: int, workers: list[Worker], every: bool = False) -> None:
        due = [key for key in self.periods if self.is_due(key, t)]
        if every or not due:
            return super().run(t, workers, every)
        for key, (at, window, drift) in self.measured.items():
            old, (low, high) = self.periods[key][0], self.bounds[key]
            new = round(min(max(window * self.target / drift, old / 2), 2.0 * old))
            new = min(max(new, low), high)
            if at + new == t and key not in due:
                due.append(key)
            self.periods[key] = (new, t if key in due else at)
        self.measured = {}
        for key in due:
            window, self.last[key] = t - self.last[key], t
            parts = [w.states.get(key) for w in workers]
            if key != "x" and all(parts):
                both = mean(parts, parts[0])
                agreed = sum((b * b).sum() for b in both.values())
                apart = sum(((p[n] - both[n]) ** 2).sum() for p in parts for n in both)
                if len(parts) > 1:
                    self.measured[key] = (t, window, float((apart / len(parts) / agreed).sqrt()))
                for w in workers:
                    w.states[key] = dict(both)
        if "x" in due:
            self.sync(workers)
        return None


def periods(every: Mapping[str, float]) -> Callable[[str, int], bool]:
    """Due after each multiple of an item's period; math.inf: never."""
    return lambda item, t: t % every[item] == 0
