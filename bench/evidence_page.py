"""The page of the evidence, docs/evidence.md, made from the results alone.

python -m edit_ext.bench.evidence_page      writes the page and its pictures anew
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edit_ext.bench.evidence import SEEDS
from edit_ext.bench.evidence_claims import CLAIMS
from edit_ext.bench.evidence_picture import draw
from edit_ext.bench.evidence_read import Table, load
from edit_ext.bench.evidence_rows import ROWS
from edit_ext.bench.evidence_run import (
    BATCH,
    EVAL_WINDOWS,
    GRAD_CLIP,
    MODEL,
    RISE,
    SEQ_LEN,
    STEPS,
    WARMUP,
)

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PAGE = ROOT / "docs" / "evidence.md"
PICTURES = {
    "methods": ("methods", "Final loss of every method"),
    "noise": ("ablation", "Loss above the clean run with one noisy replica"),
    "windows": ("periods", "Final loss by window and by DES-LOC's periods"),
    "rates": ("rates", "Final loss by learning rate and number of replicas"),
}
INTRODUCTION = f"""\
# Evidence, with error bars

What the methods learn at a small scale, and which of the papers' claims can be seen there. This
page is written by `python -m edit_ext.bench.evidence_page` from `bench/results/evidence.json`;
`python -m edit_ext.bench.evidence --json bench/results/evidence.json` makes that file, run by run,
and goes on where it was broken off.

Each run trains a byte-level Llama ({{parameters:,}} parameters: {MODEL.layers} blocks of width
{MODEL.dim}) on the source code of Python's standard library: {STEPS} steps of {BATCH} windows of
{SEQ_LEN} bytes in each replica, four replicas unless a row says otherwise, {WARMUP} steps with
averaged gradients at first (64 where the rate stays). AdamW (betas 0.9, 0.95; decay 0.1), norm of
a replica's gradient at most {GRAD_CLIP:g}, a rise over {RISE} steps, then a cosine from 1e-3 to a
tenth; in the rows on noise, flags and windows the rate stays. Windows have 16 steps unless told,
settings are the defaults otherwise. Replicas are stacked in one process: forward and backward of
all at once, and then the product's own clocks, syncs and compiled decisions, with threads in place
of links. The loss is that of the agreed weights on {EVAL_WINDOWS} windows of text held out, in
nats a byte.

A value is the mean over seeds ± their standard deviation. Runs of one seed start from the same
weights and read the same text, so they are compared seed by seed: one ends below another if the
mean difference is more than twice its standard error. With three seeds that is a rough test; and a
model of this size, trained for {STEPS} steps, says little about large ones: it shows what the code
does, and where a claim would need a larger scale.
"""


def page(head: dict[str, Any], tables: dict[str, Table], pictures: Sequence[str]) -> str:
    """The whole page."""
    from edit_ext.examples.model import Llama, parameter_count

    parts = [INTRODUCTION.format(parameters=parameter_count(Llama(MODEL)))]
    machine = head["machine"]
    parts.append(
        f"Machine: {machine['cpu']}, torch {machine['torch']}, commit {machine['commit']}.\n"
    )
    # One seed has no spread, and so nothing to hold a difference against.
    found = {n: CLAIMS[n](table) if len(table.seeds) > 1 else [] for n, table in tables.items()}
    total = sum(len(claims) for claims in found.values())
    held = sum(claim.holds for claims in found.values() for claim in claims)
    parts.append(f"Of {total} statements {held} hold here; the rest are marked.\n")
    for number, row in enumerate(ROWS, start=1):
        parts.append(f"## {number}. {row.asks}\n")
        if row.name not in tables:
            parts.append("Not run.\n")
            continue
        table = tables[row.name]
        seeds = len(table.seeds)
        if seeds < SEEDS:
            parts.append(f"**{seeds} of {SEEDS} seeds so far.**\n")
        for claim in found[row.name]:
            mark = "Holds" if claim.holds else "**Does not hold here**"
            parts.append(f"- {mark}: {claim.text} ({claim.figures})")
        parts.append("")
        parts.append(_table(row.name, table))
        for name, (at, words) in PICTURES.items():
            if at == row.name and f"evidence_{name}.png" in pictures:
                parts.append(f"![{words}](../bench/results/evidence_{name}.png)\n")
    return "\n".join(parts).rstrip() + "\n"


def _table(name: str, table: Table) -> str:
    """Labels, losses and bytes; in the order of the losses."""
    lines = [
        "| run | seeds | final validation loss | bytes a step | syncs |",
        "|---|---|---|---|---|",
    ]
    for label in sorted(table.results, key=lambda each: table.value(each).mean):
        result = table.results[label][0]
        lines.append(
            f"| {label} | {len(table.seeds)} | {table.value(label)} | "
            f"{result['bytes_per_step']:,} | {result['syncs']} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m edit_ext.bench.evidence_page")
    parser.add_argument("--json", type=Path, default=RESULTS / "evidence.json", metavar="FILE")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE")
    parser.add_argument("--pictures", type=Path, default=RESULTS, metavar="FOLDER")
    options = parser.parse_args(arguments)
    try:
        head, tables = load(options.json, SEEDS)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"--json {options.json}: {type(error).__name__}: {error}")
    drawn = draw(tables, options.pictures)
    options.page.parent.mkdir(parents=True, exist_ok=True)
    options.page.write_text(page(head, tables, drawn))
    print(f"{options.page}, {', '.join(drawn) or 'no picture: it needs the package matplotlib'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
