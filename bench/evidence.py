"""Evidence with error bars: a byte-level Llama (133,440 parameters) on the source code of Python's
standard library, four replicas stacked in one process, every method on the product's own clocks,
syncs and decisions. Each run is at most a minute of one core.

Runs what FILE lacks, the most important rows first, and writes FILE after each run: broken off, it
goes on where it was. `python -m edit_ext.bench.evidence_page` makes page and pictures from it.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from edit_ext.bench.command_line import positive
from edit_ext.bench.evidence_rows import ROWS, Row
from edit_ext.bench.evidence_run import Run, execute
from edit_ext.bench.machine import machine

SEEDS = 3


def key(run: Run, seed: int) -> str:
    """Of a run in FILE: settings and seed."""
    told = json.dumps([run.described(), seed], sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:16]


def wanted(rows: Sequence[Row], seeds: int) -> dict[str, tuple[Run, int]]:
    """All runs of these rows by key, in the order of their importance."""
    found: dict[str, tuple[Run, int]] = {}
    for row in rows:
        for seed in range(seeds):
            for run in row.runs(seed).values():
                found.setdefault(key(run, seed), (run, seed))
    return found


def work(run: Run, seed: int) -> dict[str, Any]:
    """In a process of its own, on one core."""
    torch.set_num_threads(1)
    # vmap takes the attention one replica after the other, and is faster than a loop all the same.
    warnings.filterwarnings("ignore", message="There is a performance drop")
    return {"run": run.described(), "seed": seed, **execute(run, seed)}


def save(path: Path, results: dict[str, Any]) -> None:
    """At once or not at all; a run a line."""
    lines = [f"{json.dumps(k)}: {json.dumps(r)}" for k, r in results["runs"].items()]
    head = json.dumps({k: v for k, v in results.items() if k != "runs"}, indent=1)
    text = head[:-2] + ',\n "runs": {\n' + ",\n".join(lines) + "\n }\n}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(text)
    os.replace(part, path)


def main(arguments: Sequence[str] | None = None) -> int:
    names = [row.name for row in ROWS]
    parser = argparse.ArgumentParser(
        prog="python -m edit_ext.bench.evidence",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="of the results")
    parser.add_argument(
        "--rows", nargs="+", choices=names, default=names, metavar="ROW", help=", ".join(names)
    )
    parser.add_argument(
        "--seeds", type=positive, default=SEEDS, metavar="N", help="of each run (3)"
    )
    parser.add_argument("--workers", type=positive, default=os.cpu_count() or 1, metavar="N",
                        help="processes (the number of cores)")  # fmt: skip
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="begin no run after so many"
    )
    options = parser.parse_args(arguments)
    rows = [row for row in ROWS if row.name in options.rows]
    results: dict[str, Any] = {"machine": machine(), "runs": {}}
    try:
        if options.json.exists():
            results["runs"] = json.loads(options.json.read_text())["runs"]
        else:
            save(options.json, results)  # rather now than after the first run
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"--json {options.json}: {type(error).__name__}: {error}")
    missing = {k: v for k, v in wanted(rows, options.seeds).items() if k not in results["runs"]}
    print(f"{len(missing)} runs to go; {len(results['runs'])} in {options.json}", flush=True)
    end = time.monotonic() + 60 * options.minutes
    queue = iter(missing.items())
    pool = concurrent.futures.ProcessPoolExecutor(
        options.workers, mp_context=multiprocessing.get_context("spawn")
    )
    with pool:
        open_runs: dict[Any, str] = {}
        done = 0
        while True:
            while len(open_runs) < options.workers and time.monotonic() < end:
                name, (run, seed) = next(queue, (None, (None, 0)))
                if name is None or run is None:
                    break
                open_runs[pool.submit(work, run, seed)] = name
            if not open_runs:
                break
            over, _ = concurrent.futures.wait(
                open_runs, return_when=concurrent.futures.FIRST_COMPLETED
            )
            for future in over:
                result = future.result()
                results["runs"][open_runs.pop(future)] = result
                done += 1
                save(options.json, results)
                print(
                    f"{done}/{len(missing)} {result['run']} seed {result['seed']}: "
                    f"{result['loss']:.4f} in {result['cpu_seconds']:.0f} s",
                    flush=True,
                )
    return 0 if done == len(missing) else 1


if __name__ == "__main__":
    sys.exit(main())
