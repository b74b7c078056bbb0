"""The elastic experiment of EDiT's paper (section 4.4) in small: workers come and go, the learning
rate stays. Writes elastic.json, elastic.png and the runs themselves into --out.

Replicas 1-2-4-8 and 8-4-2-1 in phases of equal length, and four all the time, each with gradients
averaged at every step and with EDiT. At the end of a phase the processes are killed as soon as
their checkpoint is complete, and the next number of them goes on from it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edit_ext import launch
from edit_ext.bench.command_line import positive
from edit_ext.bench.elastic_picture import draw
from edit_ext.bench.machine import machine
from edit_ext.examples.checkpoint import LATEST, clear_checkpoints

Result = dict[str, Any]
PHASES = {"1-2-4-8": (1, 2, 4, 8), "8-4-2-1": (8, 4, 2, 1), "4-4-4-4": (4, 4, 4, 4)}
METHODS = ("sync", "edit")
STEPS = 60  # of a phase
# 2e-3 was the best rate for `sync` with four replicas among those that the demo tried.
RUN = {
    "--preset": "tiny", "--batch-size": 8, "--seq-len": 64, "--lr": 2e-3, "--warmup-lr": 20,
    "--eval-windows": 512, "--log-every": 10,
}  # fmt: skip
SYNC_EVERY = 16  # no divisor of a phase after its warm-up: replicas are lost inside windows
POLL = 0.005  # s


class ElasticError(Exception):
    """A training run failed, or could not be stopped in time. One sentence."""


def settings(method: str, steps: int, replicas: int) -> list[str]:
    """The command line of a run but for --out; `steps` are those of a phase."""
    given: dict[str, object] = {
        "--method": method, **RUN, "--steps": steps * 4, "--checkpoint-every": steps,
        "--eval-every": max(1, steps // 4), "--replicas": replicas,
    }  # fmt: skip
    if method == "edit":
        given |= {"--warmup-steps": steps // 2, "--sync-every": SYNC_EVERY}
    return [str(word) for pair in given.items() for word in pair]


def trained(out: Path, method: str, phases: Sequence[int], steps: int) -> None:
    """One run through all phases. Raises ElasticError."""
    clear_checkpoints(out)
    begun = False
    for number, replicas in enumerate(phases, 1):
        if number < len(phases) and phases[number] == replicas:
            continue  # nobody comes or goes
        print(f"== {out.name}: {replicas} replicas, to step {number * steps}", flush=True)
        how = "--resume" if begun else "--overwrite"
        words = [*settings(method, steps, replicas), "--out", str(out), how]
        command = [sys.executable, "-m", "edit_ext.examples.train_lm", *words]
        group = launch.ProcessGroup(command, replicas)
        try:
            end = None if number == len(phases) else f"step_{number * steps}"
            _wait(group, out / "checkpoints" / LATEST, end)
        finally:
            group.stop(grace=0.0)
        begun = True


def _wait(group: launch.ProcessGroup, pointer: Path, end: str | None) -> None:
    """Until the checkpoint `end` is complete; None: until the processes have ended."""
    while group.running():
        if group.failed():
            break
        if end is not None and pointer.exists():
            name = pointer.read_text()
            if name == end:
                return
            if int(name[5:]) > int(end[5:]):
                raise ElasticError(f"stopped after {name}, past {end}: give more --steps-per-phase")
        time.sleep(POLL)
    if group.failed():
        rank, code = group.failed()[0]
        raise ElasticError(f"rank {rank} ended with {code}")
    if end is not None:
        raise ElasticError(f"the run ended before {end}")


def read(out: Path, phases: Sequence[int], steps: int) -> Result:
    """Validation losses of a run: the curve, and what each phase came to."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    curve = [[e["step"], e["val_loss"]] for e in lines if e["kind"] == "val"]
    losses = dict(map(tuple, curve))
    summary = lines[-1]
    return {
        "phases": [
            {"replicas": replicas, "last_step": n * steps, "val_loss": losses[n * steps]}
            for n, replicas in enumerate(phases, 1)
        ],
        "curve": curve,
        "tokens": summary["tokens"],
        "final_val_loss": summary["final_val_loss"],
    }


def table(runs: dict[str, dict[str, Result]]) -> str:
    """Validation loss at the end of each phase, and how much more than four replicas it is."""
    lines = [f"{'replicas':10}{'method':8}" + "".join(f"{f'phase {n}':>10}" for n in range(1, 5))]
    lines[0] += f"{'above 4-4-4-4':>16}"
    for name in PHASES:
        for method in METHODS:
            run, steady = runs[method][name], runs[method]["4-4-4-4"]
            losses = "".join(f"{phase['val_loss']:10.4f}" for phase in run["phases"])
            above = run["final_val_loss"] - steady["final_val_loss"]
            lines.append(f"{name:10}{method:8}{losses}{above:+16.4f}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m edit_ext.bench.elastic", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/elastic"), help="(runs/elastic)")
    parser.add_argument(
        "--steps-per-phase", type=positive, default=STEPS, metavar="N", help=f"({STEPS})"
    )
    options = parser.parse_args(arguments)
    steps, began, before = options.steps_per_phase, time.perf_counter(), machine()
    runs: dict[str, dict[str, Result]] = {method: {} for method in METHODS}
    try:
        for method in METHODS:
            for name, phases in PHASES.items():
                out = options.out / f"{method}_{name}"
                trained(out, method, phases, steps)
                runs[method][name] = read(out, phases, steps)
    except ElasticError as error:
        print(f"elastic: {out.name}: {error}", file=sys.stderr)
        return 1
    seconds = time.perf_counter() - began
    result = {
        "steps_per_phase": steps, "seconds": round(seconds), "machine": before,
        "settings": {method: settings(method, steps, 4) for method in METHODS}, "runs": runs,
    }  # fmt: skip
    (options.out / "elastic.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{table(runs)}\n")
    print(draw(result, options.out / "elastic.png"))
    print(f"{seconds:.0f} s in all; everything is in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
