"""One run of the evidence: a byte-level Llama, replicas stacked in one process, one method."""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import edit_ext
from edit_ext.bench.stacked import Replicas
from edit_ext.config import Method
from edit_ext.examples.data import Batches, Corpus, load_corpus, validation_batches
from edit_ext.examples.model import Llama, LlamaConfig

MODEL = LlamaConfig(dim=64, layers=2, heads=2, hidden=176)
SEQ_LEN, BATCH = 64, 6  # bytes of a window, windows of a replica's step
STEPS, RISE = 400, 20  # optimizer steps; those over which the learning rate rises
WARMUP = 16  # steps with averaged gradients
GRAD_CLIP = 1.0
EVAL_EVERY, EVAL_WINDOWS = 16, 256
NOISY = 1  # the replica that reads random bytes
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p, lr: torch.optim.AdamW(p, lr=lr, betas=(0.9, 0.95), weight_decay=0.1),
    "adopt": lambda p, lr: edit_ext.optim.ADOPT(p, lr=lr, betas=(0.95, 0.999)),
    "sgdm": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run trains, but for its seed."""

    method: Method
    lr: float = 1e-3
    final_lr: float = 0.1
    """Share of the learning rate that is left at the end."""
    optimizer: str = "adamw"
    replicas: int = 4
    steps: int = STEPS
    noise: tuple[int, int] | None = None
    """First step and end of those in which replica NOISY reads random bytes."""
    slow: int = 1
    """The last replica makes a step only every so many steps of the others."""
    sync_ticks: int = 0
    """Steps of the fastest replica between two syncs by the clock on the wall; 0: there is none."""
    joins: str | None = None
    """In the middle the replicas double: new ones take the weights, and "all" states of the
    optimizer too or "none"."""

    def described(self) -> dict[str, Any]:
        """The settings that are not the defaults: two runs with the same ones learn the same."""
        plain = Run(method=type(self.method)())
        given, usual = self.method.as_dict(), plain.method.as_dict()
        differ = {key: str(value) for key, value in given.items() if value != usual[key]}
        rest = {k: v for k, v in vars(self).items() if k != "method" and v != vars(plain)[k]}
        return {"method": {"name": self.method.name, **differ}, **rest}


@functools.cache
def corpus() -> Corpus:
    """The text of all runs: the source code of Python's standard library."""
    return load_corpus([], window=SEQ_LEN + 1)


@functools.cache
def validation() -> list[tuple[Tensor, Tensor]]:
    """EVAL_WINDOWS windows spread over the text held out, in one batch."""
    return list(
        validation_batches(
            corpus().validation, batch_size=EVAL_WINDOWS, seq_len=SEQ_LEN, count=EVAL_WINDOWS,
            rank=0, world=1,
        )
    )  # fmt: skip


def learning_rate(run: Run, step: int) -> float:
    """A linear rise over RISE steps, then half a cosine down to its last share."""
    rise = min(1.0, (step + 1) / RISE)
    progress = max(0, step - RISE) / max(1, run.steps - RISE)
    fall = 0.5 * (1 + math.cos(math.pi * progress))
    return run.lr * rise * (run.final_lr + (1 - run.final_lr) * fall)


class Training:
    """A run under way."""

    def __init__(self, run: Run, seed: int) -> None:
        self.run, self.seed, self.tick = run, seed, 0
        self.curve: list[tuple[int, float]] = []
        self.losses: list[list[float]] = []
        self.records: list[dict[str, Any]] = []
        self.dealt = self.bytes_sent = 0
        self.group = self._group(run.method, run.replicas)

    def _group(self, method: Method, count: int) -> Replicas:
        run = self.run

        def model() -> nn.Module:
            with torch.random.fork_rng():
                torch.manual_seed(self.seed)
                return Llama(MODEL)

        self.batches = [
            Batches(
                corpus().train, batch_size=BATCH, seq_len=SEQ_LEN, seed=self.seed, rank=rank,
                world=count, start=self.tick, dealt=self.dealt,
            )
            for rank in range(count)
        ]  # fmt: skip
        make = OPTIMIZERS[run.optimizer]
        return Replicas(model, lambda net: make(net.parameters(), run.lr), method, count)

    def step(self) -> None:
        """One tick: a step of every replica that is not slow."""
        run, tick = self.run, self.tick
        noisy = run.noise is not None and run.noise[0] <= tick < run.noise[1]
        each = [
            part.noise(tick) if noisy and part.rank == NOISY else part.batch(tick)
            for part in self.batches
        ]
        rate = learning_rate(run, tick)
        for replica in self.group.replicas:
            for group in replica.optimizer.param_groups:
                group["lr"] = rate
        if run.sync_ticks and self.group.clock.local and tick % run.sync_ticks == 0:
            self.group.sync_now()
        count = len(self.batches)
        left_out = tick % run.slow and not self.group.clock.warming_up
        active = range(count - 1) if left_out else range(count)
        batch = tuple(torch.stack(part) for part in zip(*each, strict=True))
        losses = self.group.step(batch, clip=GRAD_CLIP, active=active)
        self.losses.append(losses.tolist())
        self.dealt += BATCH * count
        self.tick += 1

    def double(self) -> None:
        """Close all windows; as many new replicas join with the agreed weights."""
        old = self.group
        self.close()
        count = len(old.replicas)
        method = type(self.run.method)(**{**self.run.method.as_dict(), "warmup_steps": 0})
        self.group = self._group(method, 2 * count)
        for name, stack in self.group.weights.items():
            stack.data.copy_(old.weights[name].detach()[:1].expand_as(stack))
        for rank, replica in enumerate(self.group.replicas):
            if rank < count or self.run.joins == "all":
                source = old.replicas[rank if rank < count else 0]
                replica.optimizer.load_state_dict(source.optimizer.state_dict())

    def close(self) -> None:
        """End the windows and keep what the syncs have told."""
        with self.group as group:
            group.flush()
        self.records += group.replicas[0].syncs.metrics.drain()
        self.bytes_sent += group.bytes_sent

    def evaluate(self) -> None:
        self.curve.append((self.tick, round(self.group.evaluate(validation()), 5)))


def execute(run: Run, seed: int) -> dict[str, Any]:
    """Train; what it came to, as plain values."""
    began = time.process_time()
    torch.manual_seed(seed)
    training = Training(run, seed)
    for tick in range(run.steps):
        if run.joins and tick == run.steps // 2:
            training.double()
        training.step()
        # One step behind the syncs of windows that EVAL_EVERY is a multiple of.
        if tick % EVAL_EVERY == 0 and tick:
            training.evaluate()
    training.close()
    training.evaluate()
    group, records = training.group, training.records
    return {
        "loss": training.curve[-1][1],
        "curve": training.curve,
        **after_joining(training),
        "bytes_per_step": round(training.bytes_sent / run.steps),
        "syncs": group.clock.sync_index,
        **decisions(records, run),
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def after_joining(training: Training) -> dict[str, Any]:
    """Mean training loss of the last EVAL_EVERY steps before new replicas join, and of the first
    ones after, of old and new replicas."""
    if training.run.joins is None:
        return {}
    middle, count = training.run.steps // 2, training.run.replicas

    def mean(losses: list[list[float]]) -> float:
        return round(statistics.fmean(loss for each in losses for loss in each), 5)

    before = training.losses[middle - EVAL_EVERY : middle]
    after = training.losses[middle : middle + EVAL_EVERY]
    old, new = ([each[part] for each in after] for part in (slice(count), slice(count, None)))
    return {"joining": {"before": mean(before), "old": mean(old), "new": mean(new)}}


def decisions(records: Sequence[dict[str, Any]], run: Run) -> dict[str, Any]:
    """What the detector and the clip did: of the syncs of layers of parameters."""
    fields = run.method.as_dict()
    if fields.get("z_threshold", None) is None and fields.get("clip_norm", None) is None:
        return {}
    judged = {"healthy": [0, 0], "noisy": [0, 0]}  # flagged, judged
    seen: dict[str, int] = {}
    for record in records:
        seen[record["layer"]] = seen.get(record["layer"], 0) + 1
        if seen[record["layer"]] <= fields["ema_warmup"]:
            continue
        bad = run.noise is not None and run.noise[0] < record["step"] <= run.noise[1] + 1
        for rank, flag in enumerate(record["flags"]):
            kind = judged["noisy" if bad and rank == NOISY else "healthy"]
            kind[0] += flag
            kind[1] += 1
    if not records:
        return {}
    clips = [record["clip"] for record in records]  # 1 where the layer was skipped
    return {
        "flags": judged,
        "clip": {
            "mean": round(statistics.fmean(clips), 5),
            "deviation": round(statistics.pstdev(clips), 5),
            "share": round(sum(c < 1 for c in clips) / len(clips), 4),
        },
        "weights": round(
            statistics.fmean(max(r["weights"]) - min(r["weights"]) for r in records), 4
        ),
    }
