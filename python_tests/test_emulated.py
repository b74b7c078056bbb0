"""The CUDA part from Python without a GPU: a build whose kernels run under the emulator.

Its operators, layers, side streams and staged communicators work on the CPU's memory, so the tests
of the CPU run on them unchanged, whole trajectories over Gloo among them. Side streams run as late
as they may.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_boundary import ROOT

FILES = (
    "test_ops.py",
    "test_trajectory.py",
    "test_hook_patterns.py",
    "test_hook_handle.py",
    "test_state.py",
    "test_rows_values.py",
    "test_fsdp.py",
)
TRAJECTORIES = (
    "CO2", "CO2-gap", "CO2-replicated", "CO2Star", "StreamingDiLoCo", "StreamingDiLoCo-sequential",
    "DESLOC", "DESLOC-paper", "DESLOC-nesterov", "PostLocalSGD",
)  # fmt: skip
RESUMED = ("CO2", "CO2-replicated", "StreamingDiLoCo-late", "DESLOC")
MODES = ("late", "early", "random")  # of the emulator's streams; late is the default
BUILD_SECONDS, TEST_SECONDS = 900, 400


def run(*command: str, seconds: float, **env: str) -> str:
    done = subprocess.run(
        command,
        cwd=ROOT / "build",
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    return done.stdout


def build(root: Path) -> dict[str, str]:
    """The environment in which `import edit_ext` finds the emulated build of the sources there."""
    folder = root / "build" / "emulated"
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "build_ext", "--build-lib", str(folder)],
        cwd=root,
        env={**os.environ, "EDIT_EXT_CUDA": "emulated"},
        check=True,
        timeout=BUILD_SECONDS,
    )
    package = folder / "edit_ext"
    for source in [*(ROOT / "edit_ext").glob("*.py"), ROOT / "bench", ROOT / "examples"]:
        link = package / source.name
        if not link.exists():
            link.symlink_to(source)
    return {"PYTHONPATH": str(folder)}


@pytest.fixture(scope="module")
def emulated() -> dict[str, str]:
    return build(ROOT)


@pytest.mark.timeout(BUILD_SECONDS + TEST_SECONDS)
def test_cuda_paths_pass_the_tests_of_the_cpu(emulated: dict[str, str]) -> None:
    """Operators, hooks, state and trajectories give the same on the CUDA part's code."""
    code = "import edit_ext, torch; print(edit_ext._C.on_cuda(torch.zeros(1)))"
    assert run(sys.executable, "-c", code, seconds=60, **emulated).strip() == "True"
    files = [str(ROOT / "python_tests" / name) for name in FILES]
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    assert passed(*options, *files, env=emulated) >= 100


@pytest.mark.timeout(BUILD_SECONDS + TEST_SECONDS)
def test_methods_on_the_cuda_path(emulated: dict[str, str]) -> None:
    """Late results, states without anchors and clipped momenta, over side streams that run late:
    the references' trajectories, and states saved while something is in flight."""
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow"]
    files = [str(ROOT / "python_tests" / f"test_methods{part}.py") for part in ("", "_state")]
    names = [f"{files[0]}::test_trajectory[{name}]" for name in TRAJECTORIES]
    names += [f"{files[1]}::test_resume[{name}]" for name in RESUMED]
    assert passed(*options, *names, env=emulated) == len(TRAJECTORIES) + len(RESUMED)


@pytest.mark.timeout(BUILD_SECONDS + TEST_SECONDS)
def test_tests_for_a_gpu_pass_under_the_emulator(emulated: dict[str, str]) -> None:
    """What `pytest -m gpu` will ask of a GPU is right at least as a program."""
    tests = [str(ROOT / "python_tests" / name) for name in ("test_gpu.py", "test_memory.py")]
    assert passed("-q", "-p", "no:cacheprovider", "-m", "gpu", *tests, env=emulated) >= 11


@pytest.mark.timeout(BUILD_SECONDS + TEST_SECONDS)
def test_ranks_over_nccl(emulated: dict[str, str]) -> None:
    """What syncs over NCCL promise, with processes as ranks and a library of sockets."""
    names = ("test_nccl_ranks.py", "test_nccl_mesh.py")
    tests = [str(ROOT / "python_tests" / name) for name in names]
    assert passed("-q", "-p", "no:cacheprovider", *tests, env=emulated) >= 26


@pytest.mark.timeout(BUILD_SECONDS + TEST_SECONDS)
@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=pytest.mark.slow if mode != "late" else ()) for mode in MODES]
)
def test_streams_in_any_order(emulated: dict[str, str], mode: str) -> None:
    """Whatever order CUDA allows streams to run in, waits and held memory keep the bits right."""
    names = ("test_streams.py", "test_offload_streams.py", "test_offload.py")
    tests = [str(ROOT / "python_tests" / name) for name in names]
    env = {**emulated, "EDIT_EXT_EMULATED_STREAMS": mode}
    assert passed("-q", "-p", "no:cacheprovider", "-m", "gpu", *tests, env=env) >= 42


def passed(*arguments: str, env: dict[str, str]) -> int:
    out = run(sys.executable, "-m", "pytest", *arguments, seconds=TEST_SECONDS, **env)
    found = re.search(r"(\d+) passed", out)
    assert found and " failed" not in out, out[-500:]
    return int(found.group(1))
