"""The middle row of a run's syncs: weights, clip factor and time, each against the sync index."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

from .report_read import Run, number
from .report_style import (
    BLUE,
    GREEN,
    MAX_REPLICAS,
    ORANGE,
    VERMILION,
    colour,
    dash,
    integer_ticks,
    legend_above,
    time_unit,
)


def by_sync(run: Run, value: Any) -> tuple[list[int], list[list[float]]]:
    """Per sync index, the list over layers of value(record), without those that are None."""
    table: dict[int, list[float]] = defaultdict(list)
    for record in run.sync:
        found = value(record)
        if found is not None:
            table[int(record["sync_index"])].append(number(found))
    return sorted(table), [table[i] for i in sorted(table)]


def draw_weights(ax: Any, run: Run) -> None:
    """Mean weight of each replica over the layers, with the range over layers as a band."""
    band = " and range" if run.replicas <= MAX_REPLICAS else ""  # more bands would cover each other
    ax.set_title(f"Weight of each replica\n(mean{band} over layers)")
    for replica in range(run.replicas):
        x, rows = by_sync(
            run, lambda r, i=replica: r["weights"][i] if i < len(r["weights"]) else None
        )
        ax.plot(
            x,
            [statistics.fmean(row) for row in rows],
            color=colour(replica),
            ls=dash(replica),
            lw=1.8,
            marker="o" if len(x) < 2 else None,
        )
        if run.replicas <= MAX_REPLICAS:
            ax.fill_between(
                x,
                [min(row) for row in rows],
                [max(row) for row in rows],
                color=colour(replica),
                alpha=0.10,
                lw=0,
            )
    ax.axhline(1 / run.replicas, color="#666666", lw=1, ls=(0, (1, 2)))
    ax.set(
        xlabel="sync index",
        ylabel="weight (they sum to 1)",
        ylim=(-0.02, 1.02 if run.replicas == 1 else None),
    )
    integer_ticks(ax.xaxis)


def draw_clip(ax: Any, run: Run) -> None:
    """Factor by which the merged pseudo-gradient was scaled down: 1 means not clipped."""
    ax.set_title("Clip factor\n(median and range over layers)")
    x, rows = by_sync(run, lambda r: None if r.get("skip") else r.get("clip"))
    if x:
        marker = "o" if len(x) < 2 else None
        ax.plot(x, [statistics.median(row) for row in rows], color=BLUE, lw=1.8, marker=marker)
        ax.fill_between(
            x, [min(row) for row in rows], [max(row) for row in rows], color=BLUE, alpha=0.15, lw=0
        )
    skipped = sorted({int(r["sync_index"]) for r in run.sync if r.get("skip")})
    if skipped:
        ax.plot(
            skipped,
            [0.0] * len(skipped),
            ls="none",
            marker="x",
            color=VERMILION,
            mew=2,
            ms=8,
            label="a layer was skipped",
            clip_on=False,
        )
        legend_above(ax, columns=1)
    ax.set(xlabel="sync index", ylabel="factor (1: not clipped)", ylim=(0, 1.05))
    integer_ticks(ax.xaxis)


def draw_times(ax: Any, run: Run) -> None:
    """Stacked time of each sync, summed over layers: what the loop felt, and what it did not."""
    total: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for record in run.sync:
        row = total[int(record["sync_index"])]
        exposed = number(record.get("exposed_seconds", 0.0))
        row[0] += number(record.get("begin_seconds", 0.0)) + number(
            record.get("write_back_seconds", 0.0)
        )
        row[1] += exposed
        row[2] += max(number(record.get("exchange_seconds", 0.0)) - exposed, 0.0)
    x = sorted(total)
    factor, unit = time_unit(max(sum(row) for row in total.values()))
    bottom = [0.0] * len(x)
    parts = (("begin, write-back", GREEN), ("exposed wait", ORANGE), ("hidden", BLUE))
    for part, (label, shade) in enumerate(parts):
        height = [factor * total[i][part] for i in x]
        ax.bar(
            x, height, bottom=bottom, width=0.85 if len(x) < 80 else 1.0, color=shade, label=label
        )
        bottom = [b + h for b, h in zip(bottom, height, strict=True)]
    ax.set_title("Time of each sync (sum over layers)")
    ax.set(xlabel="sync index", ylabel=f"time ({unit})")
    integer_ticks(ax.xaxis)
    legend_above(ax, columns=3)
