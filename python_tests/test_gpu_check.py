"""bench/gpu_check.py, as far as a machine without a GPU can go."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_boundary import ROOT

from edit_ext.bench import gpu_check

SCRIPT = str(ROOT / "bench" / "gpu_check.py")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_dry_run_does_everything_but_the_device(tmp_path: Path) -> None:
    """Build, GPU tests, benchmarks and training run under the emulator; JSON after every step."""
    command = [sys.executable, SCRIPT, "--dry-run", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=840)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    results = {step["name"]: step["result"] for step in report["steps"]}
    assert report["dry_run"] is True and report["kernels"]["rows"]
    assert report["overlap"]["gemm_seconds"] and report["overlap"]["host_syncs"] is None
    left_out = {name for name, result in results.items() if result == "left out"}
    assert left_out == {"memcheck", "racecheck"}
    assert {results[name] for name in results.keys() - left_out} == {"ok"}


def test_nothing_else_passes_for_a_failed_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the build under test an installed one would be found, so all that follows is left
    out."""
    fails, works = ([sys.executable, "-c", f"raise SystemExit({code})"] for code in (1, 0))
    step = gpu_check.Step
    monkeypatch.setattr(
        gpu_check,
        "steps",
        lambda *_: [step("build", fails, 60, False), step("kernels", works, 60, False)],
    )
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--dry-run", "--out", str(tmp_path)])
    assert gpu_check.main() == 1
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert [each["result"] for each in report["steps"]] == ["failed", "left out"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    """One line, no traceback, no JSON that looks like a result."""
    command = [sys.executable, SCRIPT, "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "torch sees no GPU here" in done.stderr
    assert len(done.stderr.strip().split("\n")) == 1 and not list(tmp_path.iterdir())
