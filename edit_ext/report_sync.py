"""The lower part of a report: what happened in the outer syncs of one run.

Every panel has the sync index on its x axis; colours mean replicas, explained once at the top.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

from .report_panels import draw_clip, draw_times, draw_weights
from .report_read import Record, Run, number
from .report_style import BLACK, MAX_REPLICAS, SKY, VERMILION, colour, dash, integer_ticks

MAX_LAYERS, COLUMNS = 12, 4
STATES = (("accepted", "#e4e4e4"), ("flagged", VERMILION), ("idle", SKY), ("layer skipped", BLACK))


def heights(run: Run) -> list[float]:
    """Inches for norms, the middle row and flags: what `draw_sync` needs for this run."""
    rows = math.ceil(len(shown_layers(run)) / COLUMNS)
    flag_rows = math.ceil(min(run.replicas, MAX_REPLICAS) / COLUMNS)
    return [
        0.9 + 2.0 * rows,
        3.9,
        0.9 + flag_rows * (0.8 + 0.17 * min(max(len(run.layers), 6), 30)),
    ]


def draw_sync(fig: Any, run: Run) -> None:
    """Norms, weights, clip, times and flags of a run with at least one sync record."""
    norms, middle, flags = fig.subfigures(3, 1, height_ratios=heights(run))
    draw_norms(norms, run)
    axes = middle.subplots(1, 3)
    draw_weights(axes[0], run)
    draw_clip(axes[1], run)
    draw_times(axes[2], run)
    draw_flags(flags, run)


def flag_count(run: Run) -> dict[tuple[str, int], int]:
    """How often each (layer, replica) was flagged."""
    count: dict[tuple[str, int], int] = defaultdict(int)
    for record in run.sync:
        for replica, flagged in enumerate(record.get("flags", [])):
            count[record["layer"], replica] += bool(flagged)
    return dict(count)


def shown_layers(run: Run) -> list[str]:
    """All layers, or MAX_LAYERS of them: half by number of flags, the rest spread evenly."""
    layers = run.layers
    if len(layers) <= MAX_LAYERS:
        return layers
    flags: dict[str, int] = defaultdict(int)
    for (layer, _), times in flag_count(run).items():
        flags[layer] += times
    chosen = {
        name
        for name in sorted(layers, key=lambda name: -flags[name])[: MAX_LAYERS // 2]
        if flags[name]
    }
    rest = [name for name in layers if name not in chosen]
    free = MAX_LAYERS - len(chosen)
    chosen.update(rest[round(i * (len(rest) - 1) / (free - 1))] for i in range(free))
    return [name for name in layers if name in chosen]


def draw_norms(fig: Any, run: Run) -> None:
    """One small panel a layer: the norm of each replica's pseudo-gradient, flagged ones ringed."""
    from matplotlib.ticker import FormatStrFormatter, LogLocator, MaxNLocator, NullFormatter

    layers = shown_layers(run)
    rows = math.ceil(len(layers) / COLUMNS)
    axes = fig.subplots(rows, COLUMNS, sharex=True, sharey=True, squeeze=False).ravel()
    records: dict[str, list[Record]] = defaultdict(list)
    for record in run.sync:
        records[record["layer"]].append(record)
    for ax, layer in zip(axes, layers, strict=False):
        ax.set_title(layer, fontsize=12, fontweight="normal", pad=3)
        ax.set_yscale("log")
        for replica in range(run.replicas):
            _draw_norm(ax, records[layer], replica)
        integer_ticks(ax.xaxis)
    # Few and plain labels: a panel is small, and matplotlib's own overlap within a decade.
    low, high = axes[0].get_ylim()  # shared by all
    steps = LogLocator(subs=(1.0, 3.0), numticks=7) if high > 4 * low else MaxNLocator(4)
    axes[0].yaxis.set_major_locator(steps)
    axes[0].yaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes[0].yaxis.set_minor_formatter(NullFormatter())
    for i, ax in enumerate(axes):
        if i >= len(layers):
            ax.set_visible(False)
        elif i + COLUMNS >= len(layers):
            ax.tick_params(labelbottom=True)
            ax.set_xlabel("sync index")
    title = f"{run.name}: L2 norm of the pseudo-gradient"
    if len(layers) < len(run.layers):
        title += f" ({len(layers)} of {len(run.layers)} layers: most flagged, and evenly spread)"
    fig.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    fig.supylabel("norm (log scale)", fontsize=12)
    handles, labels = _replica_legend(run)
    fig.legend(handles, labels, loc="outside right upper", title="replica", handlelength=1.6)


def _replica_legend(run: Run) -> tuple[list[Any], list[str]]:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], color=colour(r), ls=dash(r), lw=2) for r in range(run.replicas)]
    ring = Line2D([], [], color=BLACK, marker="o", mfc="none", ls="none", ms=9, mew=1.4)
    cross = Line2D([], [], color=BLACK, marker="x", ls="none", ms=8, mew=1.6)
    return [*lines, ring, cross], [*map(str, range(run.replicas)), "flagged", "not finite"]


def _draw_norm(ax: Any, records: list[Record], replica: int) -> None:
    present = [r for r in records if replica < len(r["norms"])]
    x = [int(r["sync_index"]) for r in present]
    y = [number(r["norms"][replica]) for r in present]
    # An idle replica has norm zero, which a log axis cannot show: a gap says the same.
    gaps = [v if math.isfinite(v) and v > 0 else math.nan for v in y]
    ax.plot(
        x,
        gaps,
        color=colour(replica),
        ls=dash(replica),
        lw=1.4,
        marker="." if len(x) < 40 else None,
    )
    ringed = [
        (a, b)
        for a, b, r in zip(x, gaps, present, strict=True)
        if r.get("flags", [])[replica : replica + 1] == [True]
    ]
    ax.plot(
        [a for a, _ in ringed],
        [b for _, b in ringed],
        ls="none",
        marker="o",
        mfc="none",
        mec=BLACK,
        ms=8,
    )
    lost = [a for a, b in zip(x, y, strict=True) if not math.isfinite(b)]
    ax.plot(
        lost,
        [0.94] * len(lost),
        ls="none",
        marker="x",
        color=colour(replica),
        ms=7,
        mew=1.6,
        transform=ax.get_xaxis_transform(),
    )


def draw_flags(fig: Any, run: Run) -> None:
    """One heat map a replica: layers down, syncs across; a cell says what became of it there."""
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    layers, syncs, replicas = run.layers, run.sync_indices, _shown_replicas(run)
    rows = math.ceil(len(replicas) / COLUMNS)
    columns = min(COLUMNS, len(replicas))
    axes = fig.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel()
    cmap = ListedColormap(["#ffffff", *(shade for _, shade in STATES)])
    place = {name: i for i, name in enumerate(layers)}
    edges = [syncs[0] - 0.5, syncs[-1] + 0.5, len(layers) - 0.5, -0.5]
    width = syncs[-1] - syncs[0] + 1
    for ax, replica in zip(axes, replicas, strict=False):
        cells = [[0] * width for _ in layers]
        for record in run.sync:
            cells[place[record["layer"]]][int(record["sync_index"]) - syncs[0]] = _state(
                record, replica
            )
        ax.imshow(
            cells,
            cmap=cmap,
            vmin=0,
            vmax=len(STATES),
            aspect="auto",
            interpolation="nearest",
            extent=edges,
        )
        ax.set_title(f"replica {replica}", fontsize=12, fontweight="normal", pad=3)
        integer_ticks(ax.xaxis)
        ax.grid(False)
    for i, ax in enumerate(axes):
        if i >= len(replicas):
            ax.set_visible(False)
        elif i + columns >= len(replicas):
            ax.tick_params(labelbottom=True)
            ax.set_xlabel("sync index")
    every = math.ceil(len(layers) / 30)
    axes[0].set_yticks(range(0, len(layers), every), layers[::every], fontsize=11)
    title = "Flags: which replica was left out, where and when"
    if len(replicas) < run.replicas:
        title += f" (the {len(replicas)} most flagged of {run.replicas} replicas)"
    fig.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    fig.legend(
        [Patch(fc=shade, ec="#888888") for _, shade in STATES],
        [name for name, _ in STATES],
        loc="outside upper right",
        ncols=len(STATES),
    )


def _state(record: Record, replica: int) -> int:
    """Index into the colours: 0 no record, then as in STATES."""
    if replica >= len(record.get("flags", [])):
        return 0
    if record["flags"][replica]:
        return 2
    if replica < len(record.get("idle", [])) and record["idle"][replica]:
        return 3
    return 4 if record.get("skip") else 1


def _shown_replicas(run: Run) -> list[int]:
    flags: dict[int, int] = defaultdict(int)
    for (_, replica), times in flag_count(run).items():
        flags[replica] += times
    return sorted(sorted(range(run.replicas), key=lambda r: -flags[r])[:MAX_REPLICAS])
