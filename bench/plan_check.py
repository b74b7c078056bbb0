"""`python -m edit_ext.bench.plan_check`: the planner's seconds a step against measured ones.

Two replicas of this machine train over Gloo by EDiT, with long and short windows, on two links:
one that a forward cannot hide, and one that it hides but for the first layer. A layer's forward
and backward sleep, so that two cores are enough, and each exchange of a layer begins as late as
its bytes would take on a link of the named bandwidth and latency. The planner is told that link,
its latency longer by what a layer's messages take without it (the quicker ones of a run of its
own), and the seconds of the same run's steps without a sync.

  s/step      of replica 0: a window of steps, by the medians of those with and without a sync
  alone       of a step without a sync
  predicted   by the model with overlap: `edit-ext plan`, s/step*
  error       of predicted, in percent of measured
  plain       predicted by the model that hides nothing, with a single latency
  exposed     measured and predicted milliseconds of a sync that nothing hides: most of a step is
              not predicted at all, so these say more than the error
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from edit_ext import _C, EDiT, attach, launch
from edit_ext.planner import Job, Schedule, rows
from edit_ext.planner_time import exchange_seconds

from .machine import header, machine
from .table import text_table, write_json

REPLICAS = 2
Row = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """What is trained; `links`: bytes/s and seconds of latency; `syncs` of a run are counted."""

    layers: int = 8
    width: int = 128  # of a layer's square weight: 65,536 bytes
    layer_seconds: float = 0.01  # slept in a layer's forward; twice that in its backward
    links: tuple[tuple[float, float], ...] = ((2e6, 0.001), (16e6, 0.001))
    periods: tuple[int, ...] = (2, 8)
    syncs: int = 5

    @property
    def params(self) -> int:
        return self.layers * self.width * self.width


class Pause(torch.autograd.Function):
    """Sleeps `seconds` on the way there, and twice as long on the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad, None


class Slow(nn.Module):
    """A layer that takes time and hardly a core."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.linear = nn.Linear(size.width, size.width, bias=False)
        self.seconds = size.layer_seconds

    def forward(self, x: Tensor) -> Tensor:
        return Pause.apply(self.linear(x), self.seconds)  # type: ignore[no-any-return]


def trained(size: Size, every: int, steps: int, late: float) -> tuple[float, float, float]:
    """Median seconds of this replica's steps without a sync and of those with one, and the lower
    quartile of a layer's exchange. Both replicas begin each step together. Collective."""
    model = nn.Sequential(*(Slow(size) for _ in range(size.layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    config = EDiT(sync_every=every, z_threshold=None)
    data = torch.randn(1, size.width)
    times: list[float] = []
    with attach(
        model, optimizer, config, start="broadcast",
        comm_wrapper=lambda inner: _C.DelayedComm(inner, late),
    ) as sync:  # fmt: skip
        for _ in range(1 + every + steps):
            dist.barrier()
            began = time.perf_counter()
            model(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - began)
        records = sync.metrics()
    # A window's sync is in the forward after it; the first one connects, and is not counted.
    counted = range(1 + every, len(times))
    plain = median(times[n] for n in counted if n % every)
    synced = median(times[n] for n in counted if n % every == 0)
    exchanges = [each["exchange_seconds"] for each in records[size.layers :]]
    # Slower ones have waited for the peer, whose forward is not exactly as far.
    return plain, synced, quantiles(exchanges, n=4)[0]


def measured(size: Size) -> Row:
    """Seconds of steps, for each link and period, and of a layer's messages. Collective."""
    own = trained(size, 2, 2 * size.syncs, 0.0)[2]
    runs = []
    for link in size.links:
        layer = Job(
            params=size.params / size.layers, replicas=REPLICAS, bandwidth=link[0],
            latency=link[1], step_time=1.0,
        )  # fmt: skip
        late = exchange_seconds(layer, Schedule(method="edit", every=1))
        for every in size.periods:
            plain, synced, _ = trained(size, every, every * size.syncs, late)
            runs.append({"link": link, "every": every, "plain": plain, "synced": synced})
    return {"own": own, "runs": runs}


def compared(size: Size, found: Row) -> list[Row]:
    """A row for each run: measured, predicted, and by how much they differ."""
    lines = []
    for run in found["runs"]:
        (link, latency), every = run["link"], run["every"]
        told = Job(
            params=size.params, replicas=REPLICAS, bandwidth=link, latency=latency + found["own"],
            step_time=run["plain"], layers=size.layers,
        )  # fmt: skip
        schedule = [Schedule(method="edit", every=every)]
        ours, plain = (rows(told, schedule, overlap=overlap)[0] for overlap in (True, False))
        extra = run["synced"] - run["plain"]
        real = run["plain"] + extra / every
        lines.append(
            {
                "link_bytes_per_second": link,
                "latency_seconds": told.latency,
                "sync_every": every,
                "step_time": run["plain"],
                "measured_seconds_per_step": real,
                "predicted_seconds_per_step": ours.seconds_per_step,
                "plain_seconds_per_step": plain.seconds_per_step,
                "error_percent": 100 * (ours.seconds_per_step / real - 1),
                "plain_error_percent": 100 * (plain.seconds_per_step / real - 1),
                "measured_exposed_seconds": extra,
                "predicted_exposed_seconds": every * ours.exposed_seconds_per_step,
            }
        )
    return lines


def table(lines: Sequence[Row]) -> str:
    """The rows for people; the columns are those of the module's docstring."""
    shown = [
        {
            "link": f"{each['link_bytes_per_second'] / 1e6:g} MB/s",
            "every": each["sync_every"],
            "alone": f"{each['step_time']:.4f}",
            "s/step": f"{each['measured_seconds_per_step']:.4f}",
            "predicted": f"{each['predicted_seconds_per_step']:.4f}",
            "error": f"{each['error_percent']:+.1f} %",
            "plain": f"{each['plain_seconds_per_step']:.4f}",
            "its error": f"{each['plain_error_percent']:+.1f} %",
            "exposed": f"{1e3 * each['measured_exposed_seconds']:.1f} ms",
            "predicted exposed": f"{1e3 * each['predicted_exposed_seconds']:.1f} ms",
        }
        for each in lines
    ]
    return text_table(shown, list(shown[0]))


def rank(out: Path) -> int:
    """One of the processes; replica 0 writes what it found."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = measured(Size())
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m edit_ext.bench.plan_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", metavar="FILE", help="also write the figures here")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.rank is not None and "RANK" in os.environ:
        return rank(options.rank)
    size, info = Size(), machine()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = [sys.executable, "-m", "edit_ext.bench.plan_check", "--rank", str(out)]
        if code := launch.launch(command, REPLICAS, threads=1):
            return code
        found = json.loads(out.read_text())
    lines = compared(size, found)
    print(
        f"{header(info)}\n{size.layers} layers, {REPLICAS} replicas; messages of a layer without "
        f"the link {1e3 * found['own']:.2f} ms\n\n{table(lines)}"
    )
    if options.json:
        write_json(options.json, {"machine": info, "size": asdict(size),
                                  "own_seconds": found["own"], "rows": lines})  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
