"""Tables for people and JSON for programs, from the same rows."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def text_table(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """Columns aligned, numbers to the right with three or four figures, missing values as "-".

    >>> rows = [{"op": "merge", "gbps": 19.5432}, {"op": "x", "gbps": None}]
    >>> print(text_table(rows, ["op", "gbps"]))
    op      gbps
    merge  19.54
    x          -
    """
    cells = [list(columns), *[[_cell(row.get(name)) for name in columns] for row in rows]]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    numeric = [
        any(isinstance(row.get(name), int | float) for row in rows)
        and not any(isinstance(row.get(name), str) for row in rows)
        for name in columns
    ]
    lines = []
    for line in cells:
        parts = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        ]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return "-" if math.isnan(value) else f"{value:.4g}"
    return str(value)


def write_json(where: str, content: dict[str, Any]) -> None:
    """Write to a file, or to standard output for "-"; folders are created."""
    text = json.dumps(content, indent=2, allow_nan=False) + "\n"
    if where == "-":
        sys.stdout.write(text)
        return
    path = Path(where)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
