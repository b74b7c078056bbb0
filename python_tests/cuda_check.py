"""`make cuda-check`: the CUDA build, as far as a machine without a GPU can prove it.

In an environment of its own (about 6 GB) with a CUDA build of torch: builds the wheel with the CUDA
part, installs it, imports it, runs the tests that need no GPU, looks at what the extension links
to, and compares our declarations of NCCL with the nccl.h that came with torch.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.14.1"  # CUDA 13.0; the newest that these tests ran with
PINNED = ("setuptools", "ninja", "pytest", "pytest-timeout", "hypothesis", "cmake", "numpy")
NEEDED_BYTES = 9 << 30
TESTS = (
    "test_ops.py",
    "test_ops_input.py",
    "test_reference.py",
    "test_trajectory.py",
    "test_hook_patterns.py",
    "test_fsdp.py",
    "test_fsdp_gather.py",
)
FORBIDDEN = re.compile(r"\b(nccl[A-Z]\w+|cublas\w+|cu[A-Z]\w+)\b")  # NCCL, cuBLAS, the driver
NO_TOOL = 3  # exit code: a tool is missing


def run(*command: str | Path, cwd: Path = ROOT, seconds: float = 1800, **env: str) -> str:
    """Output of a command; ends the check with it when the command fails."""
    words = [str(part) for part in command]
    print("+", " ".join(words), flush=True)
    kept = {key: value for key, value in os.environ.items() if key != "VIRTUAL_ENV"}
    done = subprocess.run(
        words,
        cwd=cwd,
        env={**kept, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
    )
    if done.returncode:
        sys.exit(f"{done.stdout[-8000:]}\ncuda-check: exit code {done.returncode} of {words[0]}")
    return done.stdout


def pins() -> list[str]:
    lines = (ROOT / "constraints.txt").read_text().split()
    return [line for line in lines if line.split("==")[0] in PINNED]


def environment(folder: Path) -> Path:
    """The Python of the environment, made and filled if need be."""
    python = folder / "bin" / "python"
    stamp = folder / ".filled"
    wanted = " ".join([TORCH, *pins()])
    if not stamp.is_file() or stamp.read_text() != wanted:
        run(sys.executable, "-m", "venv", folder)
        run(python, "-m", "pip", "install", "--quiet", TORCH, *pins())
        stamp.write_text(wanted)
    return python


def missing(folder: Path) -> str:
    """Why the check cannot run here; empty if it can."""
    if shutil.which("nvcc") is None:
        return "needs nvcc, the CUDA compiler"
    if not (folder / ".filled").is_file():
        free = shutil.disk_usage(folder.parent).free
        if free < NEEDED_BYTES:
            return f"needs {NEEDED_BYTES >> 30} GB of disk, {free >> 30} are free"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv-cuda")
    folder = parser.parse_args().venv.absolute()
    why = missing(folder)
    if why:
        print(f"cuda-check: skipped: {why}")
        return NO_TOOL
    python = environment(folder)
    wheels = ROOT / "build" / "cuda-wheel"
    shutil.rmtree(wheels, ignore_errors=True)
    built = run(
        *(python, "-m", "pip", "wheel", "--verbose", "--no-deps", "--no-build-isolation"),
        *("--wheel-dir", wheels, "."),
        EDIT_EXT_CUDA="1",
    )
    print("\n".join(line.strip() for line in built.split("\n") if "CUDA part" in line))
    (wheel,) = wheels.glob("*.whl")
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", wheel)
    info = run(python, "-c", "import edit_ext; print(edit_ext._C.build_info())", cwd=wheels)
    assert "'cuda': True" in info, info
    extension = run(
        python, "-c", "import edit_ext; print(edit_ext._C.__file__, end='')", cwd=wheels
    )
    wrong = FORBIDDEN.findall(run("nm", "--dynamic", "--undefined-only", extension))
    assert not wrong, f"the extension must not link to {wrong}"
    tests = [str(ROOT / "python_tests" / name) for name in TESTS]
    out = run(folder / "bin" / "pytest", "-q", "-m", "not slow and not gpu", *tests, cwd=wheels)
    headers = Path(extension).parent.parent / "nvidia" / "nccl" / "include"
    layout = "csrc/tests/nccl_layout.cpp"
    run("nvcc", "-std=c++17", "-c", layout, "-isystem", headers, "-o", wheels / "layout.o")
    print(f"cuda-check: wheel of {wheel.stat().st_size / 2**20:.1f} MiB; {out.split(chr(10))[-2]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
