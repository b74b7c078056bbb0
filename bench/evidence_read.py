"""The runs of the evidence by row and label, and their means and spreads over seeds."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edit_ext.bench.evidence import key
from edit_ext.bench.evidence_rows import ROWS

Result = dict[str, Any]


@dataclass(frozen=True)
class Value:
    """A mean over seeds and their sample standard deviation; NaN for a single seed, or where one of
    the values is not finite."""

    mean: float
    deviation: float
    seeds: int

    def __str__(self) -> str:
        return self.form(".4f")

    def form(self, form: str) -> str:
        """Both numbers, each in this form."""
        spread = "" if math.isnan(self.deviation) else f" ± {self.deviation:{form.strip('+')}}"
        return f"{self.mean:{form}}{spread}"

    @property
    def positive(self) -> bool:
        """Whether the mean is above zero by more than twice its standard error."""
        return self.mean > 2 * self.deviation / math.sqrt(self.seeds)


def over_seeds(values: Sequence[float]) -> Value:
    known = len(values) > 1 and all(map(math.isfinite, values))
    deviation = statistics.stdev(values) if known else math.nan
    return Value(statistics.fmean(values), deviation, len(values))


class Table:
    """A row of which all seeds that are there have all labels."""

    def __init__(self, name: str, runs: dict[str, Result], seeds: int) -> None:
        self.row = next(row for row in ROWS if row.name == name)
        self.seeds = [
            seed for seed in range(seeds)
            if all(key(run, seed) in runs for run in self.row.runs(seed).values())
        ]  # fmt: skip
        self.results: dict[str, list[Result]] = {}
        for seed in self.seeds:
            for label, run in self.row.runs(seed).items():
                self.results.setdefault(label, []).append(runs[key(run, seed)])

    def __bool__(self) -> bool:
        return bool(self.seeds)

    def value(self, label: str, of: Callable[[Result], float] = lambda r: r["loss"]) -> Value:
        """Of a label: the final validation loss, or what else `of` takes from a result."""
        return over_seeds([of(result) for result in self.results[label]])

    def excess(self, label: str, base: str) -> Value:
        """Of the final loss over another's, seed by seed: the same text in the same order."""
        return self.paired(label, base, lambda ours, theirs: ours["loss"] - theirs["loss"])

    def paired(self, label: str, base: str, of: Callable[[Result, Result], float]) -> Value:
        """What `of` makes of two labels' results of the same seed."""
        pairs = zip(self.results[label], self.results[base], strict=True)
        return over_seeds([of(ours, theirs) for ours, theirs in pairs])


def load(path: Path, seeds: int) -> tuple[dict[str, Any], dict[str, Table]]:
    """What the file says of itself, and the tables of the rows that have a whole seed."""
    told = json.loads(path.read_text())
    tables = {row.name: Table(row.name, told["runs"], seeds) for row in ROWS}
    head = {name: value for name, value in told.items() if name != "runs"}
    return head, {name: table for name, table in tables.items() if table}


def damage(noisy: Result, clean: Result) -> float:
    """The largest excess of a noisy run's validation loss over that of its clean twin, nats."""
    return max(_excess(noisy, clean).values())


def recovery(noisy: Result, clean: Result, end: int, within: float) -> float:
    """Steps from the noise's end until the excess is below `within` nats and stays there, to the
    next evaluation; infinite if it is not at the end."""
    over = [step for step, excess in _excess(noisy, clean).items() if excess > within]
    steps = [step for step, _ in noisy["curve"]]
    if not over or max(over) < end:
        return 0.0
    later = [step for step in steps if step > max(over)]
    return float(later[0] - end) if later else math.inf


def _excess(noisy: Result, clean: Result) -> dict[int, float]:
    twins = zip(noisy["curve"], clean["curve"], strict=True)
    return {step: loss - other for (step, loss), (_, other) in twins}
