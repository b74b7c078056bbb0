"""The straggler experiment of EDiT's paper in small: one replica of four is slow, or the link is.
Writes straggler.json, straggler.png and the runs themselves into --out.

A step of each replica is a sleep and little computing, so that four replicas on few cores are as
independent as on machines of their own: what is measured is who waits for whom. All runs train for
the same seconds, each method also without a straggler, to which its rates are compared. AEDiT's
clock is set to the seconds that a window of EDiT took there.

  tokens/s   of all replicas, over whole windows: the steps that the syncs have merged, by the
             seconds until replica 0 was done with the step that began with the last of them. A
             window that the end of the run cuts off is left out, because in it the fast replicas
             have not waited yet. With gradients averaged at every step all of the run counts.
  kept       these tokens/s by those of the same method without a straggler
  no waits   what would be kept if the sleep that slows one replica down delayed no other: by
             arithmetic, from the seconds of a step without a straggler; a late link delays nobody
  steps      of replica 0 and of replica 1, the slow one, when the run ended
  val loss   of the agreed weights when the run ended, in nats a byte: at equal time, not at equal
             tokens
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
from edit_ext.bench.machine import header, machine
from edit_ext.bench.straggler_picture import draw

Result = dict[str, Any]
METHODS = ("sync", "edit", "aedit")
REPLICAS, SLOW = 4, 1  # replica 0 writes the records, so another one is slow
SECONDS = 15  # of training in each run
STEP_SECONDS = 0.15  # slept in a step, several times what one computes
SYNC_EVERY = 16  # steps of EDiT
PATIENCE = 120  # s, for processes to start and end
POLL = 0.02  # s
PAUSE, LATE = 0.15, 0.05  # s, of the random straggler and of the slow link
# No decay of the learning rate: it would need to know how many steps there will be.
RUN = {
    "--preset": "tiny", "--batch-size": 2, "--seq-len": 64, "--lr": 2e-3, "--warmup-lr": 20,
    "--final-lr": 1, "--steps": 10**6, "--eval-every": 0, "--eval-windows": 512, "--log-every": 1,
    "--threads": 1,
}  # fmt: skip
STEADY = "none"
FACTORS = {"x2": 2, "x3": 3}
CASES: dict[str, dict[str, object]] = {
    STEADY: {},
    **{case: {"--slow-replica": f"{SLOW}:{factor}"} for case, factor in FACTORS.items()},
    "random": {"--slow-random": PAUSE},
    "link": {"--slow-link": LATE},
}
WORDS = {
    STEADY: "no straggler",
    **{case: f"one replica {factor} times as slow" for case, factor in FACTORS.items()},
    "random": "at each step a random one pauses",
    "link": "exchanges begin late",
}


class StragglerError(Exception):
    """A training run failed, or was too short to be measured. One sentence."""


def settings(method: str, case: str, seconds: float, window: float) -> list[str]:
    """The command line of a run but for --out; `window`: seconds between two syncs of AEDiT."""
    given: dict[str, object] = {
        "--method": method, **RUN, "--seconds": seconds, "--step-seconds": STEP_SECONDS,
        "--replicas": REPLICAS, **CASES[case],
    }  # fmt: skip
    if method == "edit":
        given["--sync-every"] = SYNC_EVERY
    if method == "aedit":
        given["--sync-seconds"] = window
    return [str(word) for pair in given.items() for word in pair]


def trained(out: Path, words: Sequence[str], seconds: float) -> None:
    """One run with these settings, a line a step in its train.log. Raises StragglerError."""
    words = [*words, "--out", str(out), "--overwrite"]
    command = [sys.executable, "-m", "edit_ext.examples.train_lm", *words]
    out.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 10 * seconds + PATIENCE
    with (out / "train.log").open("wb") as log:
        group = launch.ProcessGroup(command, REPLICAS, threads=1, output=log)
        try:
            while group.running() and not group.failed() and time.monotonic() < deadline:
                time.sleep(POLL)
            failed, late = group.failed(), group.running()
        finally:
            group.stop(grace=0.0)
    if failed:
        raise StragglerError(f"rank {failed[0][0]} ended with {failed[0][1]}")
    if late:
        raise StragglerError("it did not end in time")


def read(out: Path) -> Result:
    """What a run came to. Raises StragglerError if it ended before its first window."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    config, summary = lines[0], lines[-1]
    each = config["batch_size"] * config["seq_len"]  # tokens of a step of one replica
    if config["method"] == "sync":
        windows, tokens, seconds = summary["steps"], summary["tokens"], summary["seconds"]
    else:
        merged, seconds = whole_windows(lines)
        windows, tokens = len(merged), each * sum(map(sum, merged.values()))
    if not windows:
        raise StragglerError("no window was over when it ended: give more --seconds")
    return {
        "tokens_per_s": tokens / seconds, "counted_tokens": tokens, "counted_seconds": seconds,
        "tokens_of_a_step": each * config["replicas"], "windows": windows,
        "steps_of_replicas": summary["steps_of_replicas"], "tokens": summary["tokens"],
        "seconds": summary["seconds"],
        "exposed_sync_seconds": summary["exposed_sync_seconds"],
        "bytes_sent_per_rank": summary["bytes_sent_per_rank"],
        "final_val_loss": summary["final_val_loss"],
    }  # fmt: skip


def whole_windows(lines: list[Result]) -> tuple[dict[int, list[int]], float]:
    """Steps of each replica in the windows that ended in training, by the index of the sync, and
    replica 0's seconds at the end of the step that the last of them began."""
    merged: dict[int, list[int]] = {}
    new: dict[int, list[int]] = {}
    seconds = 0.0
    for entry in lines:
        if entry["kind"] == "sync":
            new[entry["sync_index"]] = entry["steps"]
        elif entry["kind"] == "train" and new:  # no step follows the syncs of the end
            merged, new, seconds = merged | new, {}, entry["seconds"]
    return merged, seconds


def no_waits(steady: Result, case: str) -> float:
    """What replicas keep of their steps if the sleep that a case adds delays nobody else. `steady`:
    the run without a straggler, which tells the seconds of a step."""
    step = steady["tokens_of_a_step"] / steady["tokens_per_s"]
    if case in FACTORS:
        slow = step + (FACTORS[case] - 1) * STEP_SECONDS
        return float((REPLICAS - 1 + step / slow) / REPLICAS)
    return float(step / (step + PAUSE / REPLICAS)) if case == "random" else 1.0


def kept(runs: dict[str, dict[str, Result]], case: str, method: str) -> float:
    """Tokens/s by those of the same method without a straggler."""
    return float(runs[case][method]["tokens_per_s"] / runs[STEADY][method]["tokens_per_s"])


def table(runs: dict[str, dict[str, Result]]) -> str:
    """A line for each run; the columns are those of the module's docstring."""
    lines = [
        f"{'':34}{'method':8}{'tokens/s':>9}{'kept':>7}{'no waits':>10}"
        f"{'steps':>11}{'tokens':>10}{'val loss':>10}"
    ]
    for case, methods in runs.items():
        for method, run in methods.items():
            most = no_waits(runs[STEADY][method], case)
            steps = f"{run['steps_of_replicas'][0]}, {run['steps_of_replicas'][SLOW]}"
            lines.append(
                f"{WORDS[case]:34}{method:8}{run['tokens_per_s']:9,.0f}"
                f"{kept(runs, case, method):7.0%}{most:10.0%}{steps:>11}"
                f"{run['tokens']:10,}{run['final_val_loss']:10.3f}"
            )
    return "\n".join(lines)


def measured(folder: Path, seconds: float) -> tuple[dict[str, dict[str, Result]], float]:
    """All runs, by case and method, and the seconds of a window. Raises StragglerError."""
    runs: dict[str, dict[str, Result]] = {}
    window = 0.0
    for case in CASES:  # the methods take turns, so that a machine that gets busy slows all down
        runs[case] = {}
        for method in METHODS:
            print(f"== {method}, {WORDS[case]}", flush=True)
            out = folder / f"{method}_{case}"
            try:
                trained(out, settings(method, case, seconds, window), seconds)
                run = runs[case][method] = read(out)
            except StragglerError as error:
                raise StragglerError(f"{out.name}: {error}") from error
            if (method, case) == ("edit", STEADY):
                window = round(run["counted_seconds"] / run["windows"], 2)
    return runs, window


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m edit_ext.bench.straggler",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("runs/straggler"), help="(runs/straggler)")
    parser.add_argument(
        "--seconds", type=positive, default=SECONDS, metavar="N", help=f"of each run ({SECONDS})"
    )
    options = parser.parse_args(arguments)
    began, before = time.perf_counter(), machine()
    try:
        runs, window = measured(options.out, options.seconds)
    except StragglerError as error:
        print(f"straggler: {error}", file=sys.stderr)
        return 1
    seconds = time.perf_counter() - began
    result = {
        "seconds_of_a_run": options.seconds, "seconds": round(seconds), "machine": before,
        "settings": {m: settings(m, STEADY, options.seconds, window) for m in METHODS},
        "cases": CASES, "runs": runs,
        "kept": {case: {m: kept(runs, case, m) for m in METHODS} for case in CASES},
        "no_waits": {
            case: {m: no_waits(runs[STEADY][m], case) for m in METHODS} for case in CASES
        },
    }  # fmt: skip
    (options.out / "straggler.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"\n{header(before)}\n{table(runs)}\n")
    print(draw(result, options.out / "straggler.png"))
    print(f"{seconds:.0f} s in all; everything is in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
