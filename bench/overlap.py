"""`python -m edit_ext.bench.overlap`: how much a sync slows down the GEMMs that hide it.

One rank, no communication. A run has as many spans as layers; a span is the begin of one layer's
sync, untimed, then a few GEMMs, timed on the caller's stream. The side stream merges and steps that
layer meanwhile. All layers are waited for at the end. The same run without syncs takes turns with
it; figures are medians over rounds.

  gemm_seconds        of the GEMMs of a run, alone and beside a sync
  slow_down_percent   of the second against the first; the goal is at most 3
  noise_percent       p90 - p10 of the GEMMs alone; a slow-down below it says nothing
  side_seconds        what the side stream (on the CPU the worker thread) took
  overlap             share of side_seconds that lies inside the spans
  busy                share of the spans in which the side stream worked
  begin_seconds, write_back_seconds
                      of a sync on the caller's own stream: exposed, and no part of the slow-down
  sync_bytes          what a sync reads and writes (the ledger of edit_ext.reference); side_bytes:
                      the part of the side stream
  host_seconds        from the first begin to the return of the last wait
  host_syncs          0: begin and wait run under torch's sync-debug mode, where a wait of torch is
                      an error, which ends the program. It sees torch's calls only; host_ahead says
                      that the GPU was still at work each time the last wait had returned
  bytes_sent          0: there is no peer

What would mislead: side work outside the spans slows nothing down, so a small slow-down with an
overlap well below 1 or little busy time proves nothing. Overlap is put together from durations:
side work begins when its begin is over and the layer before it is done. A GPU that waits for the
host's launches makes spans longer: host_seconds must be below gemm_seconds. NCCL takes SMs of its
own, which one rank cannot show. On the CPU both sides share cores: only that the program runs is
shown there.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import torch

from edit_ext import _C, EDiT, reference

from .command_line import positive
from .machine import header, machine
from .problem import block_shapes
from .spans import Clock, Span, shared_seconds, side_spans
from .table import write_json
from .timing import Case, Times, interleave

GOAL_PERCENT = 3.0
WARMUP = 2  # rounds; the first compiles, allocates and wakes the clocks up
LEAD = 12  # untimed GEMMs that keep a GPU busy while the host gets ahead of it


@dataclass(frozen=True)
class Size:
    """gemm: side of the square matrices; gemms: a span; layers: spans; params: elements a layer."""

    gemm: int
    gemms: int
    layers: int
    params: int


SIZES = {
    "cuda": Size(4096, 6, 16, 2**25),  # bf16: 13 TFLOP, about 20 ms of an H100; 11 GB in all
    "cpu": Size(192, 4, 4, 2**16),
}


@dataclass(frozen=True)
class Reading:
    """One run: seconds, or for `ahead` whether the GPU was still at work at the end."""

    gemm: float
    host: float
    ahead: bool
    side: float = 0.0
    inside: float = 0.0  # of `side`, in the spans
    begin: float = 0.0
    write_back: float = 0.0


class Bench:
    """Layers, matrices, and the runs over them."""

    def __init__(self, size: Size, device: torch.device) -> None:
        self.size, self.clock = size, Clock(device)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        shape = (size.gemm, size.gemm)
        self.a, self.b = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
        self.out = torch.empty_like(self.a)
        shapes = block_shapes(size.params)
        lists = [
            [torch.randn(s, device=device).mul_(0.02) for s in shapes] for _ in range(size.layers)
        ]
        # As syncs over NCCL run: enqueued by the calling thread.
        lane = _C.make_lane(self.a, direct=device.type == "cuda")
        pool = _C.BufferPool(size.layers)
        self.layers = [
            _C.Layer(f"layer {i}", params, replica=None, lane=lane, pool=pool)
            for i, params in enumerate(lists)
        ]
        # Without the z-test, which might flag the only replica: a weight of 0 is not even read.
        self.policy = _C.Policy(**EDiT(z_threshold=None).recipe().policy)
        self.syncs = 0
        self.readings: dict[bool, list[Reading]] = {False: [], True: []}

    def reset(self) -> None:
        """Local steps, for both kinds of run: they also leave both with the same caches."""
        for layer in self.layers:
            torch._foreach_mul_(layer.params, 1.001)

    def gemms(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self.a, self.b, out=self.out)

    def run(self, sync: bool) -> None:
        clock, marks = self.clock, []
        self.gemms(LEAD)
        with clock.no_host_sync():
            began = time.perf_counter()
            for layer in self.layers:
                if sync:
                    layer.begin(self.policy, sync_index=self.syncs, steps=1, done=False)
                start = clock.mark()
                self.gemms(self.size.gemms)
                marks.append((start, clock.mark()))
            for layer in self.layers if sync else ():
                layer.wait()
            host = time.perf_counter() - began
            ahead = not clock.passed(marks[-1][1])
        clock.settle()
        first = marks[0][0]
        spans = [(clock.seconds(first, s), clock.seconds(first, e)) for s, e in marks]
        reading = Reading(sum(e - s for s, e in spans), host, ahead)
        if sync:
            self.syncs += 1
            reading = self.with_side(reading, spans)
        self.readings[sync].append(reading)

    def with_side(self, reading: Reading, spans: list[Span]) -> Reading:
        stats: list[Any] = [layer.stats() for layer in self.layers]
        if any(each["skip"] or each["flags"] != [False] for each in stats):
            raise RuntimeError("a layer was skipped: its sync moved fewer bytes than is counted")
        took = [each["exchange_seconds"] for each in stats]
        side = side_spans([start for start, _ in spans], took)
        return replace(
            reading,
            side=sum(took),
            inside=min(sum(took), shared_seconds(side, spans)),  # rounding
            begin=sum(each["begin_seconds"] for each in stats),
            write_back=sum(each["write_back_seconds"] for each in stats),
        )


def measure(size: Size, device: torch.device, repeats: int) -> dict[str, Any]:
    """The figures of the module's docstring. Raises RuntimeError where the host had to wait."""
    bench = Bench(size, device)
    cases = {
        "alone": Case(lambda: bench.run(False), bench.reset),
        "beside": Case(lambda: bench.run(True), bench.reset),
    }
    interleave(cases, repeats, WARMUP, bench.clock.settle)
    alone, beside = (bench.readings[sync][WARMUP:] for sync in (False, True))
    gemms = {
        name: Times(tuple(each.gemm for each in readings))
        for name, readings in (("alone", alone), ("beside", beside))
    }
    ledger = reference.memory_bytes(1)
    count = size.params * size.layers
    side = median(each.side for each in beside)
    return {
        **asdict(size),
        "repeats": repeats,
        "gemm_seconds": {
            name: {"median": t.median, "p10": t.p10, "p90": t.p90} for name, t in gemms.items()
        },
        "slow_down_percent": 100 * (gemms["beside"].median / gemms["alone"].median - 1),
        "goal_percent": GOAL_PERCENT,
        "noise_percent": 100 * (gemms["alone"].p90 - gemms["alone"].p10) / gemms["alone"].median,
        "side_seconds": side,
        "overlap": median(each.inside / each.side if each.side else 0.0 for each in beside),
        "busy": median(each.inside / each.gemm for each in beside),
        "begin_seconds": median(each.begin for each in beside),
        "write_back_seconds": median(each.write_back for each in beside),
        "sync_bytes": round(ledger["total"] * count),
        "side_bytes": round((ledger["merge"] + ledger["outer_step"]) * count),
        "host_seconds": median(each.host for each in beside),
        "host_syncs": 0 if bench.clock.cuda else None,
        "host_ahead": all(each.ahead for each in beside) if bench.clock.cuda else None,
        "bytes_sent": sum(int(str(layer.stats()["bytes_sent"])) for layer in bench.layers),
    }


def sentences(found: dict[str, Any]) -> str:
    """The figures for people."""
    ms = {name: 1e3 * times["median"] for name, times in found["gemm_seconds"].items()}
    ms |= {name: 1e3 * found[f"{name}_seconds"] for name in ("side", "begin", "write_back", "host")}
    on_gpu = found["host_syncs"] is not None
    goal = f"goal: at most {found['goal_percent']:g} %" if on_gpu else "one CPU does both"
    return (
        f"GEMMs alone {ms['alone']:.2f} ms, beside a sync {ms['beside']:.2f} ms: "
        f"{found['slow_down_percent']:+.1f} % ({goal}; noise {found['noise_percent']:.1f} %)\n"
        f"side work {ms['side']:.2f} ms for {found['side_bytes'] / 1e9:.3g} GB, "
        f"{found['overlap']:.2f} of it beside GEMMs, in {found['busy']:.2f} of their time\n"
        f"exposed: begin {ms['begin']:.2f} ms, write-back {ms['write_back']:.2f} ms; host "
        f"{ms['host']:.2f} ms, waiting for the GPU {'never' if on_gpu else 'not looked at'}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 1 when the host had to wait for the GPU or a sync was skipped."""
    parser = argparse.ArgumentParser(
        prog="python -m edit_ext.bench.overlap",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=list(SIZES), default="cpu")
    parser.add_argument("--repeats", type=positive, default=15, help="rounds (%(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures here")
    for field in asdict(SIZES["cpu"]):
        parser.add_argument(f"--{field}", type=positive, help="see the class Size")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no GPU here")
    given = {name: value for name in asdict(SIZES["cpu"]) if (value := getattr(args, name))}
    info = machine(args.device)
    print(header(info))
    try:
        found = measure(
            replace(SIZES[args.device], **given), torch.device(args.device), args.repeats
        )
    except RuntimeError as error:
        print(f"overlap: {error}", file=sys.stderr)
        return 1
    print(sentences(found))
    if args.json:
        write_json(args.json, {"machine": info, **found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
