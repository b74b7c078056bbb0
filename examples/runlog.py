"""Where a run's records go: metrics.jsonl, TensorBoard files, and lines or a bar on a terminal."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any, TextIO

METRICS = "metrics.jsonl"


class RunLog:
    """Writes what rank 0 is given; with `folder` None, as on the other ranks, it does nothing.

    metrics.jsonl holds one JSON object a line, each on disk when `write` returns. When a run
    resumes at step `start`, lines of later steps, left by its first part, are dropped.
    """

    def __init__(self, folder: Path | None, *, start: int, steps: int, tensorboard: bool) -> None:
        self._file: TextIO | None = None
        self._board: Any = None
        self._bar: Any = None
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / METRICS
        part = path.with_name(METRICS + ".part")
        part.write_text("".join(_lines_up_to(path, start) if start else []))
        os.replace(part, path)  # a kill in between must not cost the first part its lines
        self._file = path.open("a", buffering=1)
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=start)
        if sys.stderr.isatty() and importlib.util.find_spec("tqdm"):
            from tqdm import tqdm

            self._bar = tqdm(total=steps, initial=start, unit="step", dynamic_ncols=True)

    def write(self, kind: str, **values: Any) -> None:
        """One line of metrics.jsonl; its numbers go to TensorBoard under kind/name too."""
        if self._file is None:
            return
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")
        if self._board is not None and "step" in values:
            layer = f"/{values['layer']}" if "layer" in values else ""
            for name, value in values.items():
                if isinstance(value, (int, float)) and name not in ("step", "replica"):
                    self._board.add_scalar(f"{kind}/{name}{layer}", value, values["step"])

    def say(self, text: str) -> None:
        """A line for the reader, above the bar where there is one."""
        if self._bar is not None:
            self._bar.write(text)
        elif self._file is not None:
            print(text, flush=True)

    def progress(self, step: int, text: str) -> None:
        """Move the bar to `step`; without a bar, a plain line."""
        if self._bar is None:
            self.say(f"step {step}  {text}")
        else:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)

    def close(self) -> None:
        for part in (self._bar, self._board, self._file):
            if part is not None:
                part.close()
        self._file = self._board = self._bar = None


def tensorboard_missing() -> bool:
    return importlib.util.find_spec("tensorboard") is None


def _lines_up_to(path: Path, step: int) -> list[str]:
    if not path.exists():
        return []
    kept = []
    for line in path.read_text().splitlines(keepends=True):
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # the last line of a run that was killed while writing it
            continue
        if entry.get("step", 0) <= step and entry["kind"] != "summary":
            kept.append(line)
    return kept
