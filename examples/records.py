"""What a run records: its settings, its steps, its syncs, its validation losses, its summary."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import edit_ext
from edit_ext.examples.checkpoint import Saved
from edit_ext.examples.data import Corpus
from edit_ext.examples.model import Llama, parameter_count
from edit_ext.examples.options import fixed_settings
from edit_ext.examples.runlog import RunLog

NOTHING: dict[str, Any] = {"tokens": 0, "seconds": 0.0, "losses": []}
SUMS = ("bytes_sent", "syncs", "sync_seconds", "exposed_sync_seconds")  # of Handle.totals()


class Records:
    """The records of one run, and its stopwatch. Only rank 0 writes; all ranks may call.

    `saved` is the checkpoint that the run goes on from, and its records those of replica 0: seconds
    and bytes are of one process, the one that is replica 0 at the time. Seconds and bytes leave out
    what happens inside `paused`: evaluation and checkpoints.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        rank: int,
        replicas: int,
        saved: Saved | None = None,
    ) -> None:
        self.options, self.replicas, self.saved = options, replicas, saved
        start = saved.step if saved else 0
        before = saved.records if saved else {**NOTHING, "sums": dict.fromkeys(SUMS, 0)}
        self._sums, self._seconds = before["sums"], before["seconds"]
        self.tokens_per_step = options.batch_size * options.seq_len * replicas
        self._tokens = before["tokens"] - start * self.tokens_per_step
        self._aside = 0.0  # bytes sent inside `paused`
        folder = Path(options.out) if rank == 0 else None
        self.log = RunLog(folder, start=start, steps=options.steps, tensorboard=options.tensorboard)
        self.step_done = start
        self._losses = [torch.tensor(loss) for loss in before["losses"]]  # since the last line
        self._since = time.perf_counter()
        self._stopped: float | None = None
        self._lap = (start, self.seconds())

    def seconds(self) -> float:
        """Seconds of training so far."""
        now = time.perf_counter() if self._stopped is None else self._stopped
        return self._seconds + now - self._since

    @property
    def tokens(self) -> int:
        """Tokens that all replicas together have seen, however many there were at the time."""
        return int(self._tokens) + self.step_done * self.tokens_per_step

    def sums(self, sync: edit_ext.Handle) -> dict[str, float]:
        """Bytes sent, syncs and their seconds over the whole run."""
        totals = sync.totals()
        totals["bytes_sent"] -= self._aside
        return {key: self._sums[key] + totals[key] for key in SUMS}

    def state(self, sync: edit_ext.Handle) -> dict[str, Any]:
        """What a checkpoint keeps, in plain numbers: tokens, seconds, sums, losses not written.

        Syncs are written down first, since a run that goes on from there cannot tell of them.
        """
        self._syncs(sync)
        return {
            "tokens": self.tokens, "seconds": self.seconds(), "sums": self.sums(sync),
            "losses": [float(loss) for loss in self._losses],
        }  # fmt: skip

    @contextmanager
    def paused(self, sync: edit_ext.Handle) -> Iterator[None]:
        """Stop the watch, and the count of bytes."""
        sent = sync.totals()["bytes_sent"]
        self._stopped = began = time.perf_counter()
        try:
            yield
        finally:
            self._aside += sync.totals()["bytes_sent"] - sent
            self._since += time.perf_counter() - began
            self._stopped = None

    def begin(self, model: Llama, corpus: Corpus) -> None:
        """The first line: all settings; of a resumed run, only words."""
        if self.saved:
            before, now = self.saved.replicas, self.replicas
            change = "" if before == now else f" in place of {before}"
            self.log.say(f"goes on after step {self.saved.step} with {now} replicas{change}")
            return
        parameters = parameter_count(model)
        self.log.write(
            "config", **fixed_settings(self.options), replicas=self.replicas, params=parameters,
            layers=len(model.layers), torch=torch.__version__,
        )  # fmt: skip
        self.log.say(
            f"{self.options.method}: {self.replicas} replicas of {self.options.preset} "
            f"({parameters / 1e6:.2f} M parameters, {self.options.dtype}), "
            f"{self.tokens_per_step:,} tokens a step"
        )
        self.log.say(corpus.description)

    def step(self, done: int, loss: Tensor, lr: float, sync: edit_ext.Handle) -> None:
        """After each optimizer step; every --log-every steps a line, and the syncs since."""
        self.step_done = done
        self._losses.append(loss.detach())
        if done % self.options.log_every and done != self.options.steps:
            return
        mean = float(torch.stack(self._losses).mean())
        self._losses.clear()
        seconds = self.seconds()
        rate = (done - self._lap[0]) * self.tokens_per_step / max(seconds - self._lap[1], 1e-9)
        self._lap = (done, seconds)
        self._syncs(sync)
        self.log.write(
            "train", step=done, tokens=self.tokens, loss=mean, lr=lr, tokens_per_s=rate,
            seconds=seconds, replica=0, replicas=self.replicas,
        )  # fmt: skip
        self.log.progress(done, f"loss {mean:.4f}  {rate:,.0f} tokens/s")

    def validation(self, value: float, tokens: int | None = None) -> None:
        seen = self.tokens if tokens is None else tokens
        self.log.write("val", step=self.step_done, tokens=seen, val_loss=value)
        self.log.say(f"step {self.step_done}  validation loss {value:.4f}")

    def end(self, sync: edit_ext.Handle, val_loss: float, steps: list[int]) -> None:
        """The last line: what the run came to, and what its syncs cost this rank.

        steps: of each replica. They differ where --seconds have ended the run.
        """
        self._syncs(sync)
        more = sum(each - self.step_done for each in steps)  # than if all had made replica 0's
        tokens = self.tokens + more * self.tokens_per_step // self.replicas
        self.validation(val_loss, tokens)
        sums, seconds = self.sums(sync), self.seconds()
        self.log.write(
            "summary", method=self.options.method, replicas=self.replicas, steps=self.step_done,
            steps_of_replicas=steps, seconds=seconds, tokens=tokens, final_val_loss=val_loss,
            tokens_per_s=tokens / seconds,
            bytes_sent_per_rank=sums["bytes_sent"], syncs=sums["syncs"],
            sync_seconds=sums["sync_seconds"], exposed_sync_seconds=sums["exposed_sync_seconds"],
        )  # fmt: skip
        self.log.say(
            f"{tokens:,} tokens in {seconds:.1f} s, {sums['bytes_sent'] / 1e6:,.1f} MB "
            f"sent by rank 0, {sums['syncs']} syncs of {sums['sync_seconds']:.2f} s together, of "
            f"which training waited {sums['exposed_sync_seconds']:.2f} s"
        )
        self.log.close()

    def _syncs(self, sync: edit_ext.Handle) -> None:
        """Write the syncs since the last call; say which replicas were left out."""
        left_out: dict[tuple[int, int], list[str]] = {}
        for entry in sync.metrics():
            self.log.write("sync", **entry)
            for replica, flagged in enumerate(entry["flags"]):
                if flagged:
                    left_out.setdefault((entry["step"], replica), []).append(entry["layer"])
        for (step, replica), layers in left_out.items():
            self.log.say(f"step {step}  replica {replica} left out of {', '.join(layers)}")
