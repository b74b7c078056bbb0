"""`python -m edit_ext.bench.plan_check`: the planner's seconds a step against measured ones.

Two replicas of this machine train over Gloo by one method after the other, on two links: one that a
forward cannot hide, and one that it hides but for the first layer. A layer's forward and backward
sleep, so that two cores are enough, and each exchange of a layer begins as late as its bytes would
take on a link of the named bandwidth and latency. The planner is told that link, its latency longer
by what a layer's messages take without it (the quicker ones of a run of its own), and the seconds
of the steps of a run that never syncs.

  s/step      of replica 0: the mean over a cycle of all clocks, at each place the median of cycles
  alone       of a step of the run without syncs
  predicted   by the model with overlap: `edit-ext plan`, s/step*
  error       of predicted, in percent of measured
  plain       predicted by the model that hides nothing, with a single latency
  exposed     measured and predicted milliseconds of a cycle that nothing hides: most of a step is
              not predicted at all, so these say more than the error
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from edit_ext import _C, CO2, DESLOC, EDiT, LocalAdam, StreamingDiLoCo, attach, launch
from edit_ext.config import Method
from edit_ext.planner import Job, Schedule, rows
from edit_ext.planner_time import exchange_seconds

from .machine import header, machine
from .table import text_table, write_json

REPLICAS = 2
Row = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A method's settings, and what the planner is told of them."""

    config: Method
    schedule: Schedule

    @property
    def cycle(self) -> int:
        """Steps after which all clocks are where they were."""
        return math.lcm(*(int(n) for n in (self.schedule.every, *self.schedule.states)))


CASES = (
    *(Case(EDiT(sync_every=n, z_threshold=None), Schedule(method="edit", every=n)) for n in (2, 8)),
    Case(
        StreamingDiLoCo(sync_every=8, fragments=2, delay=1),
        Schedule(method="streaming-diloco", every=8, hidden_by="delay", fragments=2, delay=1),
    ),
    Case(CO2(sync_every=2), Schedule(method="co2", every=2, hidden_by="window")),
    Case(LocalAdam(sync_every=4), Schedule(method="local-adam", every=4, states=(4, 4))),
    Case(
        DESLOC(param_every=2, state_every={"exp_avg": 4, "exp_avg_sq": 8}),
        Schedule(method="des-loc", every=2, states=(4, 8)),
    ),
)


@dataclass(frozen=True)
class Size:
    """What is trained; `links`: bytes/s and seconds of latency; `cycles` of a run are counted."""

    layers: int = 8
    width: int = 128  # of a layer's square weight: 65,536 bytes
    layer_seconds: float = 0.01  # slept in a layer's forward; twice that in its backward
    links: tuple[tuple[float, float], ...] = ((2e6, 0.001), (16e6, 0.001))
    cycles: int = 5

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


def trained(
    size: Size, config: Method, cycle: int, cycles: int, late: float
) -> tuple[list[float], float]:
    """Seconds of this replica's steps at each place of the cycle, medians, and the lower quartile
    of a layer's exchange (0 without any). Both replicas begin each step together. Collective."""
    model = nn.Sequential(*(Slow(size) for _ in range(size.layers)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    data = torch.randn(1, size.width)
    times: list[float] = []
    with attach(
        model, optimizer, config, start="broadcast",
        comm_wrapper=lambda inner: _C.DelayedComm(inner, late),
    ) as sync:  # fmt: skip
        # The first cycle connects, and nothing lands in it; a sync comes in the step that follows.
        for _ in range(1 + (1 + cycles) * cycle):
            dist.barrier()
            began = time.perf_counter()
            model(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - began)
        records = sync.metrics()
    counted = times[1 + cycle :]
    exchanges = [each["exchange_seconds"] for each in records[size.layers :]]
    # Slower ones have waited for the peer, whose forward is not exactly as far.
    quick = quantiles(exchanges, n=4)[0] if len(exchanges) > 1 else 0.0
    return [median(counted[place::cycle]) for place in range(cycle)], quick


def measured(size: Size, cases: Sequence[Case] = CASES) -> Row:
    """Seconds of steps, by link and case, and of a layer's messages. Collective."""
    _, own = trained(size, CASES[0].config, 2, size.cycles, 0.0)
    never = EDiT(sync_every=1_000_000, z_threshold=None)
    (alone,), _ = trained(size, never, 1, 4 * size.cycles, 0.0)
    runs = []
    for number, link in enumerate(size.links):
        layer = Job(
            params=size.params / size.layers, replicas=REPLICAS, bandwidth=link[0],
            latency=link[1], step_time=1.0,
        )  # fmt: skip
        late = exchange_seconds(layer, Schedule(method="edit", every=1))
        for place, case in enumerate(cases):
            steps, _ = trained(size, case.config, case.cycle, size.cycles, late)
            runs.append({"link": number, "case": place, "step": fmean(steps)})
    return {"own": own, "alone": alone, "runs": runs}


def compared(size: Size, found: Row, cases: Sequence[Case] = CASES) -> list[Row]:
    """A row for each run: measured, predicted, and by how much they differ."""
    lines = []
    for run in found["runs"]:
        (link, latency), case = size.links[run["link"]], cases[run["case"]]
        told = Job(
            params=size.params, replicas=REPLICAS, bandwidth=link, latency=latency + found["own"],
            step_time=found["alone"], layers=size.layers,
        )  # fmt: skip
        ours, plain = (rows(told, [case.schedule], overlap=hide)[0] for hide in (True, False))
        real = run["step"]
        lines.append(
            {
                "method": case.schedule.method,
                "every": case.schedule.every,
                "link_bytes_per_second": link,
                "latency_seconds": told.latency,
                "step_time": told.step_time,
                "measured_seconds_per_step": real,
                "predicted_seconds_per_step": ours.seconds_per_step,
                "plain_seconds_per_step": plain.seconds_per_step,
                "error_percent": 100 * (ours.seconds_per_step / real - 1),
                "plain_error_percent": 100 * (plain.seconds_per_step / real - 1),
                "measured_exposed_seconds": case.cycle * (real - told.step_time),
                "predicted_exposed_seconds": case.cycle * ours.exposed_seconds_per_step,
            }
        )
    return lines


def table(lines: Sequence[Row]) -> str:
    """The rows for people; the columns are those of the module's docstring."""
    shown = [
        {
            "method": each["method"],
            "every": each["every"],
            "link": f"{each['link_bytes_per_second'] / 1e6:g} MB/s",
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
        f"the link {1e3 * found['own']:.2f} ms; a step alone {found['alone']:.4f} s\n\n"
        + table(lines)
    )
    if options.json:
        write_json(options.json, {"machine": info, "size": asdict(size),
                                  "own_seconds": found["own"], "rows": lines})  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
