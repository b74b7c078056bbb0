"""Trains R replicas of a small model in one process, straight from the equations of EDiT.

What several processes do with hooks, workers and pieces is compared with this. It imports nothing
of the package, so a mistake shared by all of its rooms still shows. Models must be deterministic:
the same batch gives the same loss whatever was drawn before.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Options of the method, named and defaulted as in ``edit_ext.EDiT``; ``outer`` besides."""

    sync_every: int = 128
    warmup_steps: int = 0
    outer: str = "sgd"
    outer_lr: float = 0.7
    outer_momentum: float = 0.8
    nesterov: bool = True
    clip_norm: float | None = 10.0
    weighting: str = "softmax"
    temperature: float = 1.0
    z_threshold: float | None = 3.0
    ema_alpha: float = 0.02
    ema_warmup: int = 10
    max_flags_in_a_row: int = 10
    wire: str = "fp32"
    momentum: str = "sharded"
    average_buffers: bool = True


@dataclass
class LayerSync:
    """What one sync decided about one layer; lists have one entry a replica."""

    norms: list[float]
    flags: list[bool]
    weights: list[float]
    merged_norm: float
    clip: float
    skip: bool


@dataclass
class Sync:
    """One sync of all layers. ``anchors`` are copies after it, by parameter name."""

    index: int
    steps: list[int]
    layers: dict[str, LayerSync]
    anchors: dict[str, Tensor]

    @property
    def idle(self) -> list[bool]:
        return [n == 0 for n in self.steps]


@dataclass
class Trajectory:
    """The whole run: ``losses[r][t]`` of step t on replica r, and the models as they end."""

    syncs: list[Sync] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    models: list[nn.Module] = field(default_factory=list)

    def params(self, replica: int) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.models[replica].named_parameters()}


@dataclass
class History:
    """The norms of one replica's layer that count, kept whole: the detector by its definition."""

    accepted: list[float] = field(default_factory=list)
    flags_in_a_row: int = 0
    nonfinite_in_a_row: int = 0

    def outlier(self, norm: float, rules: Rules) -> bool:
        """Weighted mean and variance, newest norm heaviest, and the quantile of a new draw."""
        n = len(self.accepted)
        if rules.z_threshold is None or n < rules.ema_warmup or not any(self.accepted):
            return False  # before the warm-up, or no norm yet to compare with
        raw = [rules.ema_alpha * (1 - rules.ema_alpha) ** (n - 1 - i) for i in range(n)]
        share = [w / sum(raw) for w in raw]
        mean = sum(w * x for w, x in zip(share, self.accepted, strict=True))
        spread = sum(w * (x - mean) ** 2 for w, x in zip(share, self.accepted, strict=True))
        w2 = sum(w * w for w in share)
        sigma = max(math.sqrt(spread / (1 - w2)), 0.01 * mean)
        z, nu = rules.z_threshold, 1 / w2 - 1
        quantile = z + (z**3 + z) / (4 * nu) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * nu**2)
        return norm - mean > quantile * sigma * math.sqrt(1 + w2)

    def flags(self, norm: float, rules: Rules) -> bool:
        """Judges ``norm`` and remembers it if it is accepted."""
        if not math.isfinite(norm):
            self.nonfinite_in_a_row += 1
            if self.nonfinite_in_a_row > rules.max_flags_in_a_row:
                raise RuntimeError("a replica stays non-finite")
            return True
        self.nonfinite_in_a_row = 0
        if self.outlier(norm, rules):
            self.flags_in_a_row += 1
            if self.flags_in_a_row <= rules.max_flags_in_a_row:
                return True
            self.accepted = []
        self.flags_in_a_row = 0
        self.accepted.append(norm)
        return False


def share_out(norms: list[float], steps: list[int], chosen: list[int], rules: Rules) -> list[float]:
    """Weights of all replicas: those of ``chosen`` sum to one, the others are 0."""
    out = [0.0] * len(norms)
    least = min((norms[r] for r in chosen), default=0.0)
    value = {
        "softmax": lambda r: math.exp(-(norms[r] - least) / rules.temperature),
        "uniform": lambda r: 1.0,
        "steps": lambda r: float(steps[r]),
    }[rules.weighting]
    for r in chosen:
        out[r] = value(r) / sum(value(k) for k in chosen)
    return out


class Layer:
    """Anchor, outer momentum and histories of the parameters ``names`` of all replicas."""

    def __init__(self, names: list[str], replicas: list[dict[str, nn.Parameter]], dtype: Any):
        self.names, self.replicas, self.dtype = names, replicas, dtype
        self.anchor = {n: replicas[0][n].detach().to(dtype, copy=True) for n in names}
        self.momentum = {n: torch.zeros_like(self.anchor[n]) for n in names}
        self.history = [History() for _ in replicas]

    def held(self, name: str) -> Tensor:
        """The anchor as the parameters can hold it."""
        return self.anchor[name].to(self.replicas[0][name].dtype)

    @torch.no_grad()
    def write_back(self) -> None:
        for params in self.replicas:
            for name in self.names:
                params[name].copy_(self.held(name))

    def sync(self, steps: list[int], rules: Rules) -> LayerSync:
        def sent(x: Tensor) -> Tensor:
            return x.bfloat16().to(self.dtype) if rules.wire == "bf16" else x

        grads = [
            {n: self.held(n).to(self.dtype) - p[n].detach().to(self.dtype) for n in self.names}
            for p in self.replicas
        ]
        norms = [length(g.values()) for g in grads]
        live = [r for r, n in enumerate(steps) if n]
        flagged = {r for r in live if self.history[r].flags(norms[r], rules)}
        chosen = [r for r in live if r not in flagged]
        weights = share_out(norms, steps, chosen, rules)
        merged = {n: torch.zeros_like(a) for n, a in self.anchor.items()}
        for r in chosen:
            for n in self.names:
                merged[n] = merged[n] + weights[r] * sent(grads[r][n])
        norm = length(merged.values())
        clip = 1.0 if rules.clip_norm is None else min(rules.clip_norm / (norm + 1e-6), 1.0)
        skip = not chosen or not math.isfinite(norm)
        whole = rules.momentum == "replicated" and len(self.replicas) > 1
        for n in [] if skip else self.names:
            step = clip * (sent(merged[n]) if whole else merged[n])
            if rules.outer == "sgd":
                self.momentum[n] = rules.outer_momentum * self.momentum[n] + step
                ahead = rules.outer_momentum * self.momentum[n]
                step = rules.outer_lr * (step + ahead if rules.nesterov else self.momentum[n])
            self.anchor[n] = self.anchor[n] - (step if whole else sent(step))
        self.write_back()
        flags = [r in flagged for r in range(len(steps))]
        return LayerSync(norms, flags, weights, norm, clip, skip)


def length(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum((t.double() ** 2).sum().item() for t in tensors))


def average_gradients(models: list[nn.Module]) -> None:
    """Warm-up: every replica steps with the mean; a gradient missing somewhere counts as zero."""
    for same in zip(*(m.parameters() for m in models), strict=True):
        present = [p.grad.double() for p in same if p.grad is not None]
        if present:
            mean = torch.stack(present).sum(0) / len(models)
            for p in same:
                p.grad = mean.to(p.dtype)


def average_buffers(models: list[nn.Module], steps: list[int]) -> None:
    """The plain mean of persistent floating buffers over replicas that stepped and are finite."""
    own = [
        {n: b for n, b in m.named_buffers() if b.is_floating_point() and n in m.state_dict()}
        for m in models
    ]
    good = [b for b, n in zip(own, steps, strict=True) if n and math.isfinite(length(b.values()))]
    for name in own[0] if good else ():
        mean = torch.stack([b[name].double() for b in good]).mean(0)
        for buffers in own:
            buffers[name].copy_(mean)


def simulate(
    make_model: Callable[[], nn.Module],
    batch: Callable[[int, int], Any],
    loss: Callable[[nn.Module, Any], Tensor],
    *,
    replicas: int,
    steps: int | Sequence[int] | None = None,
    windows: Sequence[Sequence[int]] | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    layer_of: Mapping[str, str] | Callable[[str], str],
    corrupt: Callable[[int, int, nn.Module], None] | None = None,
    anchor_dtype: torch.dtype = torch.float64,
    **rules: Any,
) -> Trajectory:
    """Trains and syncs to the end, the last unfinished window included, as ``flush()`` does.

    ``batch(replica, t)`` feeds the step that makes t+1 completed ones; ``steps`` may differ between
    replicas once warm-up is over. Instead, ``windows`` lists the local steps of each replica in
    every window, as replicas of unequal speed make them. ``layer_of`` gives the layer of every
    trainable parameter's name. ``corrupt(replica, t, model)`` runs when t steps are complete. In
    ``anchor_dtype`` float32 sums run in the order of the equations, as on a device; norms are
    always fp64.
    """
    r = Rules(**rules)
    assert (steps is None) != (windows is None)
    if steps is not None:
        quota = [steps] * replicas if isinstance(steps, int) else list(steps)
        assert len(quota) == replicas and min(quota) >= r.warmup_steps
        left = [n - r.warmup_steps for n in quota]
        windows = []
        while any(left):
            windows.append([min(r.sync_every, n) for n in left])
            left = [n - w for n, w in zip(left, windows[-1], strict=True)]
    first = make_model().train()
    models = [first, *(copy.deepcopy(first) for _ in range(replicas - 1))]
    optimizers = [optimizer(m.parameters()) for m in models]
    run = Trajectory(losses=[[] for _ in models], models=models)

    def backward(k: int, t: int) -> None:
        optimizers[k].zero_grad()
        value = loss(models[k], batch(k, t))
        value.backward()
        run.losses[k].append(value.item())

    def step(k: int, t: int) -> None:
        optimizers[k].step()
        if corrupt is not None:
            corrupt(k, t + 1, models[k])

    for t in range(r.warmup_steps):
        for k in range(replicas):
            backward(k, t)
        average_gradients(models)
        for k in range(replicas):
            step(k, t)

    trainable = [{n: p for n, p in m.named_parameters() if p.requires_grad} for m in models]
    place = layer_of if callable(layer_of) else layer_of.__getitem__
    groups: dict[str, list[str]] = {}
    for name in trainable[0]:
        groups.setdefault(place(name), []).append(name)
    layers = {layer: Layer(names, trainable, anchor_dtype) for layer, names in groups.items()}
    for layer in layers.values():
        layer.write_back()

    done = [r.warmup_steps] * replicas
    for window in map(list, windows or []):
        for k, count in enumerate(window):
            for t in range(done[k], done[k] + count):
                backward(k, t)
                step(k, t)
            done[k] += count
        decided = {name: layer.sync(window, r) for name, layer in layers.items()}
        if r.average_buffers:
            with torch.no_grad():
                average_buffers(models, window)
        anchors = {n: a.clone() for layer in layers.values() for n, a in layer.anchor.items()}
        run.syncs.append(Sync(len(run.syncs) + 1, window, decided, anchors))
    return run
