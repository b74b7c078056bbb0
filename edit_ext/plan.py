"""`edit-ext plan`: what each method would cost on a link, before anything is trained.

A figure for each method and two models of time: with nothing hidden (the wall-clock model of
DES-LOC), and with what edit_ext hides behind computing. The smallest period is the number of steps
between two syncs from which on the wanted share of the time computes. Periods are given in steps;
those of a-edit follow from its seconds. Memory is what a method holds besides the model and its
optimizer. The formulas are in edit_ext/planner_time.py and planner_memory.py.

  edit-ext plan --params 7e9 --replicas 8 --link 10gbit --latency 30ms --step-time 2.5
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from .planner import DEFAULTS, STATE_RATIOS, SYNC_SECONDS, Job, Schedule, rows, scheduled
from .planner import smallest_period as smallest
from .planner_units import WIRES, PlanError, bandwidth, count, seconds
from .report_style import scaled

BY_NAME: tuple[str, ...] = tuple(DEFAULTS)
WITHOUT_SYNC_EVERY = ("synchronous", "a-edit", "des-loc")
# Option of a period -> the methods that it changes.
USED_BY: dict[str, tuple[str, ...]] = {
    "sync_every": tuple(name for name in BY_NAME if name not in WITHOUT_SYNC_EVERY),
    "sync_seconds": ("a-edit",),
    "param_every": ("des-loc",),
    "state_every": ("des-loc",),
    "fragments": ("streaming-diloco",),
    "delay": ("streaming-diloco",),
}


def job_of(args: argparse.Namespace) -> Job:
    """The numbers of the command line. Raises PlanError."""
    try:
        target = float(args.target_utilisation)
    except ValueError:
        target = 0.0
    if not 0 < target < 1:
        raise PlanError(
            "--target-utilisation must be a number above 0 and below 1, such as 0.95, but is "
            f"{args.target_utilisation!r}"
        )
    return Job(
        params=count(args.params, "--params"),
        replicas=count(args.replicas, "--replicas"),
        bandwidth=bandwidth(args.link, "--link"),
        latency=seconds(args.latency, "--latency", zero=True),
        step_time=seconds(args.step_time, "--step-time"),
        shards=count(args.shards, "--shards"),
        layers=count(args.layers, "--layers"),
        wire=args.wire,
        target=target,
    )


def schedules_of(args: argparse.Namespace, job: Job) -> tuple[list[Schedule], list[str]]:
    """The methods with their periods; and, where none was named, why some are left out. Raises
    PlanError: a method is unknown, a period cannot be, an option changes no method."""
    asked = _asked(args)
    named = [name for text in args.method or () for name in text.split(",")]
    methods = list(dict.fromkeys(named or BY_NAME))
    found, left_out = [], []
    for method in methods:
        try:
            found.append(_schedule(method, asked, job))
        except PlanError as error:
            if named:
                raise
            left_out.append(f"{error}: left out")
    for option in asked:
        if not set(USED_BY[option]) & set(methods):
            raise PlanError(
                f"{_flag(option)} has no effect on {', '.join(methods)}: it is for "
                f"{', '.join(USED_BY[option])}"
            )
    return found, left_out


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")


def _asked(args: argparse.Namespace) -> dict[str, Any]:
    """The periods that were given, as numbers. Raises PlanError."""
    asked: dict[str, Any] = {}
    for option in USED_BY:
        text, flag = getattr(args, option), _flag(option)
        if text is None:
            continue
        if option == "sync_seconds":
            asked[option] = seconds(text, flag)
        elif option == "state_every":
            asked[option] = tuple(count(part, flag) for part in text.split(","))
        else:
            asked[option] = count(text, flag, zero=option == "delay")
    return asked


def _schedule(method: str, asked: dict[str, Any], job: Job) -> Schedule:
    """The defaults of a method, changed by what was asked of it. Raises PlanError."""
    mine = {option: value for option, value in asked.items() if method in USED_BY[option]}
    schedule = scheduled(method, job, mine.pop("sync_seconds", SYNC_SECONDS))
    every = mine.pop("sync_every", None) or mine.pop("param_every", None)
    changed: dict[str, Any] = {} if every is None else {"every": every}
    if schedule.states and every is not None:
        ratios = STATE_RATIOS if method == "des-loc" else (1,) * len(schedule.states)
        changed["states"] = tuple(every * ratio for ratio in ratios)
    if "state_every" in mine:
        changed["states"] = mine.pop("state_every")
    try:
        return replace(schedule, **changed, **mine)
    except PlanError as error:
        raise PlanError(f"{method}: {error}") from None


def plan(job: Job, schedules: Sequence[Schedule]) -> dict[str, Any]:
    """The content of --json: inputs, rows of both models, smallest periods in steps."""
    return {
        "inputs": {**asdict(job), "schedules": [asdict(schedule) for schedule in schedules]},
        "overlap": [asdict(row) for row in rows(job, schedules, overlap=True)],
        "no_overlap": [asdict(row) for row in rows(job, schedules, overlap=False)],
        "smallest_periods": [
            {
                "method": each.method,
                "overlap": smallest(job, each, overlap=True),
                "no_overlap": smallest(job, each, overlap=False),
            }
            for each in schedules
        ],
    }


def said(job: Job, schedules: Sequence[Schedule], content: dict[str, Any]) -> str:
    """The plan for people: two lines of inputs, and a line for each method."""
    from edit_ext.bench.table import text_table

    lines = []
    parts = zip(schedules, *(content[k] for k in ("overlap", "no_overlap", "smallest_periods")),
                strict=True)  # fmt: skip
    for schedule, ours, plain, least in parts:
        lines.append(
            {
                "method": schedule.method,
                "every": _periods(schedule),
                "sent/step": scaled(ours["bytes_per_step"], "B"),
                "less": f"{ours['reduction_vs_ddp']:.3g}x",
                "s/step": f"{plain['seconds_per_step']:.4g}",
                "busy": f"{plain['utilisation']:.1%}",
                "from": _steps(least["no_overlap"]),
                "exposed": _duration(ours["exposed_seconds_per_step"]),
                "s/step*": f"{ours['seconds_per_step']:.4g}",
                "busy*": f"{ours['utilisation']:.1%}",
                "from*": _steps(least["overlap"]),
                "memory": scaled(ours["state_bytes_per_rank"], "B"),
            }
        )
    shards = f" of {job.shards} shards" if job.shards > 1 else ""
    header = (
        f"{job.params:,.0f} parameters in {job.layers} layers, {job.replicas} replicas"
        f"{shards}, {scaled(8 * job.bandwidth, 'bit/s')} and {job.latency:g} s of latency for each "
        f"rank, {job.step_time:g} s of computing a step, wire {job.wire}\n"
        f"busy: share of the time that computes; from: smallest period for {job.target:.1%}; "
        "*: with what edit_ext hides (exposed: the rest, a step)\n\n"
    )
    return header + text_table(lines, list(lines[0]))


def _periods(schedule: Schedule) -> str:
    return "/".join(f"{n:.0f}" for n in (schedule.every, *schedule.states))


def _steps(period: int | None) -> str | None:
    return None if period is None else f"{period:,}"


def _duration(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 or value == 0 else f"{1e3 * value:.3g} ms"


def parser() -> argparse.ArgumentParser:
    """The options; numbers stay text until `job_of`, which knows what to say of odd ones."""
    made = argparse.ArgumentParser(
        prog="edit-ext plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add("--params", required=True, metavar="N", help="of the model: 7e9, 7b, 350m")
    add("--replicas", required=True, metavar="R", help="at least 2")
    add("--link", required=True, metavar="RATE", help="of each rank: 10gbit, 800mbit, 1GB/s")
    add("--latency", default="0", metavar="TIME", help="of an exchange of a layer (default: 0); "
        "four messages in turn, so four times the way over a distance")  # fmt: skip
    add("--step-time", required=True, metavar="TIME", help="of computing a step: 2.5, 300ms")
    add("--method", action="append", metavar="NAME,...", help=f"default: all: {', '.join(BY_NAME)}")
    add("--shards", default="1", metavar="S", help="ranks that hold a replica (default: 1)")
    add("--layers", default="32", metavar="L", help="that sync one by one (default: 32)")
    add("--wire", choices=list(WIRES), default="fp32", help="of syncs (default: fp32)")
    add("--sync-every", metavar="K", help="steps, of all methods that have such a period")
    add("--sync-seconds", metavar="TIME", help=f"of a-edit (default: {SYNC_SECONDS:g})")
    add("--param-every", metavar="K", help="steps, of des-loc; its states then 3 K and 6 K")
    add("--state-every", metavar="K,...", help="steps, of the states of des-loc, one for each")
    add("--fragments", metavar="F", help="of streaming-diloco (default: 4)")
    add("--delay", metavar="D", help="steps, of streaming-diloco (default: 5)")
    add("--target-utilisation", default="0.95", metavar="U", help="(default: 0.95)")
    add("--json", metavar="FILE", help="also write everything here (-: standard output alone)")
    add("--picture", type=Path, metavar="FILE", help="draw DES-LOC's two wall-clock figures")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `edit-ext plan`; returns the exit code, 2 for what cannot be planned."""
    from edit_ext.bench.table import write_json

    args = parser().parse_args(argv)
    try:
        job = job_of(args)
        schedules, left_out = schedules_of(args, job)
        content = plan(job, schedules)
        if args.json != "-":
            print(said(job, schedules, content))
        print("\n".join(left_out), end="\n" * bool(left_out), file=sys.stderr)
        if args.json:
            write_json(args.json, content)
        if args.picture:
            from .planner_picture import draw

            picture = draw(job, args.picture)
            print(f"picture: {picture}", file=sys.stderr if args.json == "-" else sys.stdout)
    except (PlanError, OSError) as error:
        print(f"edit-ext plan: {error}", file=sys.stderr)
        return 2
    return 0
