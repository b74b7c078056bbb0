"""Read RUN/metrics.jsonl into lists that can be plotted.

One JSON object a line; `kind` says what it is: "config" (first line), "train", "val", "sync" (one
per layer per outer sync) and "summary" (last line). A run that was stopped half-way may end in a
broken line and lacks its summary; a synchronous run has no "sync" lines. Both are ordinary here. A
line that is broken anywhere else is reported by its number, never dropped in silence.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class ReportError(Exception):
    """A run that cannot be read, or an optional package that is missing; one sentence."""


@dataclass
class Run:
    """One run as lists of records in file order."""

    name: str
    path: Path
    config: Record = field(default_factory=dict)
    train: list[Record] = field(default_factory=list)
    val: list[Record] = field(default_factory=list)
    sync: list[Record] = field(default_factory=list)
    summary: Record | None = None
    broken_lines: list[int] = field(default_factory=list)  # 1-based, without a truncated last line
    truncated: bool = False

    @property
    def method(self) -> str:
        return str(self.config.get("method") or (self.summary or {}).get("method") or "unknown")

    @property
    def replicas(self) -> int:
        """Replicas by the sync records, else by the configuration (1 when neither says)."""
        if self.sync:
            return max(len(record["norms"]) for record in self.sync)
        return int(self.config.get("replicas") or (self.summary or {}).get("replicas") or 1)

    @property
    def layers(self) -> list[str]:
        """Names of the synced layers in the order of their first sync."""
        return list(dict.fromkeys(str(record["layer"]) for record in self.sync))

    @property
    def sync_indices(self) -> list[int]:
        return sorted({int(record["sync_index"]) for record in self.sync})


def number(value: Any) -> float:
    """A JSON value as a float; null and strings such as "nan" become what they mean."""
    return math.nan if value is None else float(value)


def find_metrics(run: Path) -> Path:
    """The metrics file of a run, given its directory or the file; ReportError without one."""
    path = run / "metrics.jsonl" if run.is_dir() else run
    if not path.is_file():
        raise ReportError(f"run {run}: expected a directory with metrics.jsonl in it, found none")
    return path


def read_run(run: Path, name: str | None = None) -> Run:
    """Read one run; `name` is used in legends (default: the name of its directory)."""
    path = find_metrics(run)
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    result = Run(name=name or path.resolve().parent.name, path=path)
    last = max((i for i, line in enumerate(lines) if line.strip()), default=-1)
    for i, line in enumerate(lines):
        if not line.strip():
            continue
        record = _parse(line)
        if record is not None:
            _store(result, record)
        elif i == last:
            result.truncated = True
        else:
            result.broken_lines.append(i + 1)
    if not (result.train or result.val or result.sync):
        raise ReportError(f"run {run}: {path.name} holds no train, val or sync line to draw")
    return result


def _parse(line: str) -> Record | None:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    return record if isinstance(record, dict) and "kind" in record else None


def _store(run: Run, record: Record) -> None:
    kind = record["kind"]
    if kind == "config":
        run.config = record
    elif kind == "summary":
        run.summary = record
    elif kind in ("train", "val", "sync"):
        getattr(run, kind).append(record)
    # Other kinds belong to newer versions and have nothing to draw here.


def short_names(paths: list[Path]) -> list[str]:
    """Directory names, with as many parents as it takes to tell the runs apart."""
    folders = [find_metrics(path).resolve().parent for path in paths]
    longest = max(len(folder.parts) for folder in folders)
    for depth in range(1, longest + 1):
        names = ["/".join(folder.parts[-depth:]) for folder in folders]
        if len(set(names)) == len(names):
            return names
    raise ReportError("the same run was given twice: " + ", ".join(str(path) for path in paths))
