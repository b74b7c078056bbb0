"""`edit-ext report RUN... -o report.png`: pictures and a short account of trainings.

The first picture compares all runs: loss against tokens, bytes sent, speed. The syncs of a run
(norms, weights, flags, clip factor, exposed and hidden time) go below it when one run has several,
and otherwise into one further picture a run, named report-RUN.png. Runs may still be going on.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

from .report_overview import bytes_sent, draw_overview, speed
from .report_read import Record, ReportError, Run, number, read_run, short_names
from .report_style import DPI, RC, WIDTH, scaled
from .report_sync import draw_sync, flag_count, heights

SUMMARY_KEYS = (
    "steps",
    "tokens",
    "final_val_loss",
    "syncs",
    "sync_seconds",
    "exposed_sync_seconds",
)


def report(runs: list[Path], out: Path) -> Record:
    """Draw the pictures of `runs` and return what they say as plain values.

    runs: directories with a metrics.jsonl, or such files; unfinished runs are fine.
    out: the first picture; its suffix chooses the format (.png, .svg, .pdf). Folders are created.
    Returns {"pictures": [paths], "runs": [one dict a run, see `account`]}.
    Raises ReportError: a run cannot be read, the format is unknown, matplotlib is not installed.
    """
    if not runs:
        raise ReportError("runs: expected at least one run, got none")
    loaded = [read_run(path, name) for path, name in zip(runs, short_names(runs), strict=True)]
    try:
        import matplotlib
    except ImportError as error:
        raise ReportError(
            "edit-ext report draws with matplotlib, which is not installed: pip install matplotlib"
        ) from error
    out.parent.mkdir(parents=True, exist_ok=True)
    # A synchronous run may close with a single sync; only when nothing else has any is it drawn.
    synced = [run for run in loaded if len(run.sync_indices) > 1]
    synced = synced or [run for run in loaded if run.sync]
    with matplotlib.rc_context(RC):
        if len(synced) == 1:
            pictures = [_save(out, loaded, synced[0])]
        else:
            pictures = [_save(out, loaded, None)]
            pictures += [_save(_beside(out, run.name), None, run) for run in synced]
    return {"pictures": [str(path) for path in pictures], "runs": [account(run) for run in loaded]}


def _beside(out: Path, name: str) -> Path:
    return out.with_name(f"{out.stem}-{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}{out.suffix}")


def _save(out: Path, overview: list[Run] | None, synced: Run | None) -> Path:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    top = [max(4.6, 2.4 + 0.75 * len(overview))] if overview else []
    below = [sum(heights(synced))] if synced else []
    fig = Figure(figsize=(WIDTH, sum(top + below)), dpi=DPI, layout="constrained")
    FigureCanvasAgg(fig)
    parts = list(
        fig.subfigures(len(top + below), 1, height_ratios=top + below, squeeze=False).ravel()
    )
    if overview:
        draw_overview(parts.pop(0), overview)
    if synced:
        draw_sync(parts.pop(0), synced)
    try:
        fig.savefig(out, dpi=DPI)
    except ValueError as error:
        raise ReportError(f"out {out}: {error}") from error
    return out


def account(run: Run) -> Record:
    """What is known of one run: the keys of its summary, how it ended, and who was flagged where.

    `flags` maps "replica K" to {layer: times flagged}; `never_flagged` lists, for each flagged
    replica, the layers in which it was always accepted.
    """
    summary = run.summary or {}
    latest_val = number(run.val[-1].get("val_loss")) if run.val else math.nan
    steps = [int(r["step"]) for r in run.train + run.val + run.sync if r.get("step") is not None]
    tokens = [int(r["tokens"]) for r in run.train + run.val if r.get("tokens") is not None]
    so_far = {
        "steps": max(steps, default=0),
        "tokens": max(tokens, default=0),
        "final_val_loss": latest_val,
        "syncs": len(run.sync_indices),
        "sync_seconds": sum(number(r.get("exchange_seconds", 0.0)) for r in run.sync),
        "exposed_sync_seconds": sum(number(r.get("exposed_seconds", 0.0)) for r in run.sync),
    }
    flags: dict[str, dict[str, int]] = {}
    for (layer, replica), times in sorted(flag_count(run).items(), key=lambda item: item[0][1]):
        if times:
            flags.setdefault(f"replica {replica}", {})[layer] = times
    return {
        "name": run.name,
        "metrics": str(run.path),
        "method": run.method,
        "replicas": run.replicas,
        "finished": run.summary is not None,
        "truncated_last_line": run.truncated,
        "broken_lines": run.broken_lines,
        **{key: _plain(summary.get(key, so_far[key])) for key in SUMMARY_KEYS},
        "tokens_per_s": _plain(speed(run)),
        "bytes_sent_per_rank": _plain(bytes_sent(run)),
        "layers": len(run.layers),
        "flags": flags,
        "never_flagged": {
            who: [x for x in run.layers if x not in where] for who, where in flags.items()
        },
        "skipped_layer_syncs": sum(bool(r.get("skip")) for r in run.sync),
    }


def _plain(value: Any) -> Any:
    """NaN and infinity have no place in JSON: null says that there is no number."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _sentences(entry: Record) -> list[str]:
    ended = "finished" if entry["finished"] else "unfinished"
    loss = "unknown" if entry["final_val_loss"] is None else f"{entry['final_val_loss']:.4f}"
    sent = (
        "unknown"
        if entry["bytes_sent_per_rank"] is None
        else scaled(entry["bytes_sent_per_rank"], "B")
    )
    lines = [
        f"{entry['name']}: {entry['method']}, {entry['replicas']} replicas, "
        f"{ended} at step {entry['steps']}, validation loss {loss}, "
        f"{entry['syncs']} syncs, bytes sent per rank {sent}"
    ]
    for who, where in entry["flags"].items():
        missed = entry["never_flagged"][who]
        lines.append(
            f"  {who} flagged in {len(where)} of {entry['layers']} layers"
            + (f"; never in {', '.join(missed)}" if missed else "")
        )
    if entry["broken_lines"]:
        lines.append(f"  left out: unreadable lines {entry['broken_lines']} of {entry['metrics']}")
    return lines


def main(argv: list[str] | None = None) -> int:
    """Entry of `edit-ext report`; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="edit-ext report",
        description=(__doc__ or "").split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "runs",
        nargs="+",
        type=Path,
        metavar="RUN",
        help="directory with metrics.jsonl, or the file",
    )
    parser.add_argument(
        "-o",
        "--out",
        type=Path,
        default=Path("report.png"),
        help="first picture (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print what the pictures say as JSON")
    args = parser.parse_args(argv)
    try:
        result = report(args.runs, args.out)
    except ReportError as error:
        print(f"edit-ext report: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(result, indent=2))
    else:
        for entry in result["runs"]:
            print("\n".join(_sentences(entry)))
        print("\n".join(f"wrote {path}" for path in result["pictures"]))
    return 0
