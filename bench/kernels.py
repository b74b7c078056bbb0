"""`edit-ext bench kernels`: the arithmetic of a sync against the bandwidth of this machine.

ops
  sync_rank     what one rank of R computes in a sync: steps 1, 5, 7, 9; nothing is sent
  sync_stacked  a whole sync of R replicas that lie on one device (fp32 parameters only)
providers
  edit_ext      this library
  eager, foreach, compile
                torch, written the straightforward way: all-reduce form, full-size outer SGD step
  cupy          the same in CuPy's kernels, on a GPU where CuPy is installed; else left out
columns
  n             parameters, spread over the tensors of one Llama block that size
  seconds       median of the rounds; p10, p90: percentiles; a call starts with cold caches if the
                tensors are much larger than the last-level cache
  bytes         what a call of that provider reads and writes, counted by pass: for edit_ext the
                ledger of edit_ext.reference, 24 + 24/R a parameter for sync_rank and 12R + 20 for
                sync_stacked (fp32); for the peers see edit_ext.bench.peers
                and peers_cupy
  gbps          bytes / seconds, in 1e9 bytes a second
  of_yardstick  gbps / the best of five streaming kernels timed in the same rounds; 1 means that
                memory is the limit; over 1 means that some passes hit a cache
  vs_eager      seconds of eager / seconds: how many times faster for the same result

Before it is timed, each provider's result is compared with the fp64 reference (anchors to 1e-5 of
the largest weight); one that is wrong is an error (exit code 1).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, TextIO

import torch
from torch import Tensor

from . import machine, peers, peers_compiled, peers_cupy, providers, yardstick
from .command_line import kernels_parser
from .problem import DTYPES, Problem, WrongResult, check, make_problem
from .providers import Link, Peers, Provider
from .table import Row, text_table, write_json
from .timing import Case, interleave

Make = Callable[[Problem, list[list[Tensor]]], Provider]
PROVIDERS: dict[str, dict[str, Make]] = {
    "sync_rank": {
        "edit_ext": providers.EditExtRank,
        "eager": peers.EagerRank,
        "foreach": peers.ForeachRank,
        "compile": peers_compiled.CompileRank,
        "cupy": peers_cupy.CupyRank,
    },
    "sync_stacked": {
        "edit_ext": providers.EditExtStacked,
        "eager": peers.EagerStacked,
        "foreach": peers.ForeachStacked,
        "compile": peers_compiled.CompileStacked,
        "cupy": peers_cupy.CupyStacked,
    },
}
NAMES = list(PROVIDERS["sync_rank"])
REPLICAS = {"sync_rank": (4,), "sync_stacked": (2, 4, 8)}
COLUMNS = (
    "op",
    "provider",
    "n",
    "replicas",
    "dtype",
    "seconds",
    "p10",
    "p90",
    "bytes",
    "gbps",
    "of_yardstick",
    "vs_eager",
)


MOST_STACKED = 8  # replicas, as csrc/core/stacked.h


def measure(
    op: str,
    n: int,
    replicas: int,
    dtype: str,
    names: Sequence[str],
    repeats: int,
    device: torch.device,
) -> tuple[list[Row], Row]:
    """Rows of one op at one size, and the yardstick measured in the same rounds.

    Raises WrongResult when a provider's result differs from the reference.
    """
    problem = make_problem(n, replicas, DTYPES[dtype]).to(device)
    held = 1 if op == "sync_rank" else replicas
    params = [[p.clone() for p in own] for own in problem.replicas[:held]]  # shared: reset by each
    made: dict[str, Provider] = {}
    cases: dict[str, Case] = {}
    link = Link()
    with device:
        ceilings = yardstick.cases(n)
    for name in names:
        start = time.perf_counter()
        with device:
            provider = made[name] = PROVIDERS[op][name](problem, params)
            verify(f"{op} R={replicas} {dtype} {name}", provider, problem)
        _say(f"{op} R={replicas}: {name} is right ({time.perf_counter() - start:.1f} s)")
        cases[name] = Case(lambda p=provider: p.run(link), provider.reset)  # type: ignore[misc]
    settle = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times = interleave({**cases, **ceilings}, repeats, settle=settle)
    speeds = yardstick.gbps(times, n)
    best = max(speeds, key=lambda kernel: speeds[kernel])
    rows = []
    for name in names:
        took, count = times[name], made[name].bytes_per_param * n
        speed = count / took.median / 1e9
        rows.append(
            {
                "op": op,
                "provider": name,
                "n": n,
                "replicas": replicas,
                "dtype": dtype,
                "seconds": took.median,
                "p10": took.p10,
                "p90": took.p90,
                "best": took.best,
                "bytes": round(count),
                "gbps": speed,
                "of_yardstick": speed / speeds[best],
                "vs_eager": times["eager"].median / took.median if "eager" in times else None,
            }
        )
    return rows, {
        "op": op,
        "replicas": replicas,
        "kernel": best,
        "gbps": speeds[best],
        "all": speeds,
    }


def verify(who: str, provider: Provider, problem: Problem) -> None:
    """One run with the other replicas' part put in; then everything is compared.

    Anchors with the reference, to 1e-5; parameters with the rounded anchors, exactly.
    """
    provider.reset()
    provider.run(Peers(problem))
    anchor, replicas, momentum = provider.state()
    check(who, "anchors", anchor, problem.new_anchor)
    check(who, "momenta", momentum, problem.new_momentum, provider.momentum_tolerance)
    for r, params in enumerate(replicas):
        for i, (param, value) in enumerate(zip(params, anchor, strict=True)):
            if not torch.equal(param, value.to(problem.dtype)):
                raise WrongResult(f"{who}: replica {r}, tensor {i} is not the new anchor, rounded")


def chosen(asked: list[str] | None, device: str, dtype: str) -> tuple[list[str], str]:
    """The providers to time, and a sentence about one that is left out, or "".

    Raises ValueError for one that was asked for by name and cannot be timed here.
    """
    names = asked or NAMES
    why = peers_cupy.obstacle(device, dtype) if "cupy" in names else ""
    if why and asked:
        raise ValueError(f"--providers: cupy cannot be timed here: {why}")
    return [name for name in names if not (why and name == "cupy")], why and f"cupy left out: {why}"


def run(args: argparse.Namespace, left_out: str = "") -> dict[str, Any]:
    """All rows asked for, the yardsticks and the machine; `left_out` is said above the table."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    info = machine.machine(args.device)
    out = table_stream(args)
    if "cupy" in args.providers:
        info["cupy"] = peers_cupy.version()
    print(machine.header(info), file=out)
    if left_out:
        print(left_out, file=out)
    cache = info["last_level_cache"] if args.device == "cpu" else None
    if cache is not None and 4 * args.n < 4 * cache:
        print(
            f"n is small: a tensor set of {4 * args.n / 2**20:.0f} MiB against a cache of "
            f"{cache / 2**20:.0f} MiB; figures include cache hits",
            file=out,
        )
    rows: list[Row] = []
    ceilings: list[Row] = []
    for op in args.ops:
        if op == "sync_stacked" and args.dtype != "fp32":
            print(f"sync_stacked left out: it takes fp32 parameters, not {args.dtype}", file=out)
            continue
        for replicas in args.replicas or REPLICAS[op]:
            found, ceiling = measure(
                op,
                args.n,
                replicas,
                args.dtype,
                args.providers,
                args.repeats,
                torch.device(args.device),
            )
            rows += found
            ceilings.append(ceiling)
    return {"machine": info, "rows": rows, "yardstick": ceilings}


def table_stream(args: argparse.Namespace) -> TextIO:
    """Standard output, unless the JSON goes there."""
    return sys.stderr if args.json == "-" else sys.stdout


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    return kernels_parser(__doc__ or "", list(PROVIDERS), NAMES, list(DTYPES))


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `edit-ext bench kernels`; returns the exit code."""
    args = parser().parse_args(argv)
    if "sync_stacked" in args.ops and max(args.replicas or [1]) > MOST_STACKED:
        parser().error(f"--replicas: sync_stacked takes at most {MOST_STACKED}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser().error("--device cuda: torch sees no GPU here")
    try:
        args.providers, left_out = chosen(args.providers, args.device, args.dtype)
    except ValueError as error:
        parser().error(str(error))
    try:
        result = run(args, left_out)
    except WrongResult as error:
        _say(f"edit-ext bench kernels: {error}")
        return 1
    out = table_stream(args)
    print(text_table(result["rows"], COLUMNS), file=out)
    for line in result["yardstick"]:
        others = ", ".join(f"{name} {value:.1f}" for name, value in line["all"].items())
        print(
            f"yardstick of {line['op']} R={line['replicas']}: {line['gbps']:.1f} GB/s "
            f"({line['kernel']}); all: {others}",
            file=out,
        )
    if args.json:
        write_json(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
