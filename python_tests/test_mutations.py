"""Would a test notice? Barriers and guards of the CUDA kernels, taken away one at a time."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from test_boundary import ROOT
from test_native import missing, tool

SECONDS = 240
# (file, text, what takes its place): a bound that keeps a chunk inside its tensor or a row inside
# its segment.
GUARDS = [
    ("team.cuh", "if (whole + thread < n) f(", "f("),
    ("team.cuh", "const int whole = n / 4 * 4,", "const int whole = (n + 3) / 4 * 4,"),
    ("team.cuh", "begin + kSegment < n ? begin + kSegment : n", "begin + kSegment"),
    ("team.cuh", "row + kLanes <= end", "row < end"),
    ("team.cuh", "begin + kRun < n ? begin + kRun : n", "begin + kRun"),
    ("team.cuh", "row + kProductLanes <= end", "row < end"),
    ("tensors.cuh", "static_cast<int>(left < kChunk ? left : kChunk)", "kChunk"),
    ("on_chip.cu", "static_cast<int32_t>(left < kRun ? left : kRun)", "kRun"),
    ("on_chip.cu", "r < count ? first[r] : 0.0f", "first[r]"),
    ("on_chip.cu", "lane == 0 && i < R &&", "lane == 0 &&"),
    ("passes.cu", "p.n - at < kChunk ? p.n - at : kChunk", "kChunk"),
    ("passes.cu", "n - at < kChunk ? n - at : kChunk", "kChunk"),
    ("passes.cu", "j < padded", "j < c.size"),
]
BARRIERS = ("__syncthreads();", "grid.wait();")
SKIPPED_LANES = [("team.cuh", "if (j >= end) continue;", "", count) for count in (0, 1)]


def mutants() -> list[tuple[str, str, str, int]]:
    """(file, text, replacement, which occurrence) of every mutation."""
    found = [
        (path.name, barrier, "", count)
        for path in sorted((ROOT / "csrc" / "cuda").glob("*.cu*"))
        for barrier in BARRIERS
        for count in range(path.read_text().count(barrier))
    ]
    return [*found, *SKIPPED_LANES, *((*guard, 0) for guard in GUARDS)]


def mutated(text: str, old: str, new: str, count: int) -> str:
    places = [match.start() for match in re.finditer(re.escape(old), text)]
    at = places[count]
    return text[:at] + new + text[at + len(old) :]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the C++ sources, configured."""
    why = missing("")
    if why:
        pytest.skip(f"needs a C++ compiler: {why}")
    root = tmp_path_factory.mktemp("mutants")
    shutil.copytree(ROOT / "csrc", root / "csrc")
    shutil.copy(ROOT / "CMakeLists.txt", root)
    options = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"]
    command = [tool("cmake"), "-S", str(root), "-B", str(root / "build"), *options]
    subprocess.run(command, check=True, capture_output=True, timeout=SECONDS)
    assert survives(root), "the sources as they are must pass"
    return root


def survives(root: Path) -> bool:
    """Whether test_cuda still builds and passes."""
    build = [tool("cmake"), "--build", str(root / "build"), "--target", "test_cuda"]
    if subprocess.run(build, capture_output=True, timeout=SECONDS).returncode:
        return False
    try:
        test = subprocess.run([root / "build" / "test_cuda"], capture_output=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return False
    return test.returncode == 0


@pytest.mark.slow
@pytest.mark.timeout(3 * SECONDS)
@pytest.mark.parametrize(("name", "old", "new", "count"), mutants())
def test_is_noticed(tree: Path, name: str, old: str, new: str, count: int) -> None:
    """test_cuda fails without this barrier or guard."""
    path = tree / "csrc" / "cuda" / name
    before = path.read_text()
    path.write_text(mutated(before, old, new, count))
    try:
        assert not survives(tree), f"{name}: nothing notices that {old!r} is gone"
    finally:
        path.write_text(before)
