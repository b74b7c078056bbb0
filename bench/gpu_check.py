"""One command for a machine with one NVIDIA GPU: is it right there, and how fast?

    python bench/gpu_check.py --out DIR [--dry-run]

Builds for the GPU's own architecture, runs `pytest -m gpu`, compute-sanitizer on a small run, the
benchmarks of kernels and of overlap, NCCL as far as one GPU can show it and a short training run,
prints a table, and writes DIR/gpu_check.json after every step, so that a run that is stopped
half-way leaves what it has. --dry-run does on a machine without a GPU everything but the device
parts: the emulated build stands in for the GPU.

Needs what `make build` has installed; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BUDGET = 420.0  # seconds for everything; later steps get what earlier ones leave
MEASURED = ("kernels", "overlap")  # steps that write a JSON, which the report takes in
TAIL = 2000  # characters of output kept per step


@dataclass
class Step:
    """A command, how long it may take, and whether it needs the device."""

    name: str
    command: list[str]
    seconds: float
    device: bool = True
    env: dict[str, str] = field(default_factory=dict)


@dataclass
class Outcome:
    """What came of a step: "ok", "failed", "timeout", or "left out" with the reason in `tail`."""

    name: str
    result: str
    seconds: float
    tail: str


def machine(dry: bool) -> dict[str, Any]:
    """GPU, driver, torch, NCCL, commit."""
    import torch

    found: dict[str, Any] = {
        "dry_run": dry,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "commit": _line("git", "-C", str(ROOT), "describe", "--always", "--dirty"),
        "gpu": None,
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
        found["driver"] = _line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def steps(out: Path, dry: bool, capability: str | None) -> list[Step]:
    """All steps in order."""
    python = sys.executable
    switch = {"EDIT_EXT_CUDA": "emulated"} if dry else {"EDIT_EXT_CUDA": "1"}
    arch = {"TORCH_CUDA_ARCH_LIST": capability} if capability else {}
    # Another compiler than ours may warn of what we have not seen.
    arch |= {"MAX_JOBS": str(os.cpu_count() or 2), "EDIT_EXT_WERROR": "0"}
    package = ROOT / "build" / ("gpu-check-dry" if dry else "gpu-check")
    build = [python, "setup.py", "--quiet", "build_ext", "--build-lib", str(package)]
    use = {"PYTHONPATH": str(package)}
    pytest = [python, "-m", "pytest", "-q", "-rsx", "-p", "no:cacheprovider", "-m", "gpu"]
    tests = [*pytest, str(ROOT / "python_tests" / "test_gpu.py")]
    streams = [*pytest, str(ROOT / "python_tests" / "test_streams.py")]
    offload = [str(ROOT / "python_tests" / f"test_{name}.py") for name in ("offload", "memory")]
    nccl = [*pytest, str(ROOT / "python_tests" / "test_gpu_nccl.py")]
    cli = [python, "-m", "edit_ext.cli"]
    kernels = [*cli, "bench", "kernels", "--json", str(out / "kernels.json")]
    # One size of each op in a dry run: torch.compile calls a C++ compiler for each.
    small_run = ["--n", "100000", "--replicas", "4", "--repeats", "3"]
    kernels += small_run if dry else ["--n", "100000000", "--device", "cuda"]
    overlap = [python, "-m", "edit_ext.bench.overlap", "--json", str(out / "overlap.json")]
    overlap += ["--repeats", "3"] if dry else ["--device", "cuda"]
    sanitizer = shutil.which("compute-sanitizer") or "compute-sanitizer"
    small = [*tests, "-k", "same_bits or whole_sync"]
    train = [*cli, "train", "--replicas", "2", "--steps", "40", "--sync-every", "8", "--overwrite"]
    train += ["--eval-windows", "8", "--out", str(out / "train")]
    train += ["--batch-size", "2"] if dry else ["--device", "cuda", "--preset", "15m"]
    return [
        Step("build", build, 240, False, {**switch, **arch}),
        Step("doctor", [*cli, "doctor", "--json"], 60, False, use),
        Step("tests", tests, 180, False, use),
        Step("streams", streams, 60, False, use),
        Step("memcheck", [sanitizer, "--tool", "memcheck", *small], 120, True, use),
        Step("racecheck", [sanitizer, "--tool", "racecheck", *small], 120, True, use),
        Step("kernels", kernels, 120, False, use),
        Step("overlap", overlap, 60, False, use),
        Step("nccl", nccl, 120, False, use),
        Step("offload", [*pytest, *offload], 120, False, use),
        Step("train", train, 120, False, use),
    ]


def overlay(package: Path) -> None:
    """Links to the Python files beside a freshly built extension."""
    for source in [*(ROOT / "edit_ext").glob("*.py"), ROOT / "bench", ROOT / "examples"]:
        link = package / "edit_ext" / source.name
        if not link.exists():
            link.symlink_to(source)


def do(step: Step, dry: bool, left: float) -> Outcome:
    """Run one step within its time and what is left of the budget."""
    if step.device and dry:
        return Outcome(step.name, "left out", 0.0, "needs a GPU")
    if shutil.which(step.command[0]) is None:
        return Outcome(step.name, "left out", 0.0, f"no {step.command[0]} on this machine")
    seconds = min(step.seconds, left)
    if seconds < 5:
        return Outcome(step.name, "left out", 0.0, "no time left")
    start = time.perf_counter()
    # In a folder of its own, so that `import edit_ext` finds the build under test; setup.py needs
    # the root.
    where = ROOT if "setup.py" in step.command else ROOT / "build"
    try:
        done = subprocess.run(
            step.command,
            cwd=where,
            env={**os.environ, **step.env},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
        )
    except subprocess.TimeoutExpired as error:
        text = error.stdout.decode() if isinstance(error.stdout, bytes) else str(error.stdout or "")
        return Outcome(step.name, "timeout", time.perf_counter() - start, text[-TAIL:])
    result = "ok" if done.returncode == 0 else "failed"
    return Outcome(step.name, result, time.perf_counter() - start, done.stdout[-TAIL:])


def main() -> int:
    """Exit code 0 when no step failed or ran out of time."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the JSON")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: the emulator stands in")
    args = parser.parse_args()
    out = args.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    for name in MEASURED:  # figures of an earlier run would pass for this one's
        (out / f"{name}.json").unlink(missing_ok=True)
    (ROOT / "build").mkdir(exist_ok=True)
    info = machine(args.dry_run)
    if not args.dry_run and info["gpu"] is None:
        sys.exit("gpu_check: torch sees no GPU here; --dry-run checks everything else")
    outcomes: list[Outcome] = []
    start = time.perf_counter()
    for step in steps(out, args.dry_run, info.get("capability")):
        if outcomes and outcomes[0].result != "ok":
            # What is installed here would be found instead, and pass for this build.
            outcomes.append(Outcome(step.name, "left out", 0.0, "nothing was built"))
        else:
            outcomes.append(do(step, args.dry_run, BUDGET - (time.perf_counter() - start)))
        if step.name == "build" and outcomes[-1].result == "ok":
            overlay(Path(step.command[-1]))
        last = outcomes[-1]
        print(f"{last.name:10} {last.result:9} {last.seconds:7.1f} s", flush=True)
        if last.result in ("failed", "timeout"):
            print(last.tail)
        report: dict[str, Any] = {**info, "steps": [asdict(each) for each in outcomes]}
        for name in MEASURED:
            measured = out / f"{name}.json"
            if measured.is_file():
                report[name] = json.loads(measured.read_text())
        (out / "gpu_check.json").write_text(json.dumps(report, indent=1) + "\n")
    return int(any(each.result in ("failed", "timeout") for each in outcomes))


def _line(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {error}"
    return done.stdout.strip().split("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
