"""Would a test notice? Waits between streams and held memory, taken away one at a time."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from test_boundary import ROOT
from test_emulated import BUILD_SECONDS, MODES, TEST_SECONDS, build, passed
from test_mutations import mutated

# (file, text, what takes its place, which occurrence). GONE is true for the mutant that is asked
# for, so that one build serves all. The waits at the end of StagedComm::exchange and all_gather are
# not here: what follows them in a sync waits before it touches the buffer, and only another order
# of calls would need them. Nor is the wait for the current stream in Offload::fetch when it makes
# room: the emulator's memory is new each time, and nobody has used it before.
MUTANTS = [
    ("lane.cpp", "span->ready.before(", "if (!GONE) span->ready.before(", 0),
    (
        "lane.cpp",
        "spans_.at(ticket)->done.before(",
        "if (!GONE) spans_.at(ticket)->done.before(",
        0,
    ),
    ("lane.cpp", "!close(0.0)", "!GONE && !close(0.0)", 0),
    (
        "lane.cpp",
        "stream = stream_]",
        "stream = GONE ? decltype(stream_)(decltype(stream_)(), stream()) : stream_]",
        0,
    ),
    ("lane.cpp", "status == cudaErrorNotReady &&", "!GONE && status == cudaErrorNotReady &&", 0),
    ("staged.cpp", "  finish();", "if (!GONE) finish();", 0),
    ("staged.cpp", "  finish();", "if (!GONE) finish();", 2),
    ("staged.cpp", "  finish();", "if (!GONE) finish();", 4),
    ("staged.cpp", "  finish();", "if (!GONE) finish();", 5),
    ("flight.cpp", "if (b.use_count() == 1)", "if (GONE || b.use_count() == 1)", 0),
    ("layer.cpp", "if (f->buffers->last_use)", "if (!GONE && f->buffers->last_use)", 0),
    ("lane.cpp", "{stream_, copy_streams_[0],", "{stream_, GONE ? stream_ : copy_streams_[0],", 0),
    ("offload.cpp", "!t->end->passed()", "!GONE && !t->end->passed()", 0),
    ("offload.cpp", "after{b->last_use,", "after{GONE ? nullptr : b->last_use,", 0),
    ("offload.cpp", "down_.end};", "GONE ? nullptr : down_.end};", 0),
    ("offload.cpp", "b->last_use = up_.end", "if (!GONE) b->last_use = up_.end", 0),
    ("offload.cpp", "{b.last_use})", "{GONE ? nullptr : b.last_use})", 0),
    ("offload.cpp", "b.last_use = down_.end", "if (!GONE) b.last_use = down_.end", 0),
    ("offload.cpp", "fetched_.reset()", "if (!GONE) fetched_.reset()", 0),
    ("offload.cpp", "if (down_.end)", "if (!GONE && down_.end)", 0),
]


@pytest.fixture(scope="module")
def mutants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a build that holds all mutants and is, unless asked for one, right."""
    root = tmp_path_factory.mktemp("mutants")
    for name in ("csrc", "edit_ext"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("*.so"))
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, root)
    plant(root / "csrc" / "torch")
    env = build(root)
    assert survives(env), "the sources as they are must pass"
    return env


def plant(folder: Path) -> None:
    # From the last occurrence of a text to the first: the ones before keep their count.
    for index, (name, old, new, count) in reversed(list(enumerate(MUTANTS))):
        asked = f'(std::getenv("EDIT_EXT_MUTANT_{index}") != nullptr)'
        path = folder / name
        path.write_text(mutated(path.read_text(), old, new.replace("GONE", asked), count))
    for name in {name for name, *_ in MUTANTS}:
        path = folder / name
        path.write_text(f"#include <cstdlib>\n{path.read_text()}")


def survives(env: dict[str, str]) -> bool:
    """Whether test_streams.py and test_offload_streams.py pass with streams of every mode."""
    names = ("test_streams.py", "test_offload_streams.py")
    tests = [str(ROOT / "python_tests" / name) for name in names]
    try:
        for mode in MODES:
            asked = {**env, "EDIT_EXT_EMULATED_STREAMS": mode}
            passed("-q", "-x", "-p", "no:cacheprovider", "-m", "gpu", *tests, env=asked)
    except (AssertionError, subprocess.TimeoutExpired):
        return False
    return True


@pytest.mark.slow
@pytest.mark.timeout(BUILD_SECONDS + 3 * TEST_SECONDS)
@pytest.mark.parametrize("index", range(len(MUTANTS)))
def test_is_noticed(mutants: dict[str, str], index: int) -> None:
    """One of the two fails, in at least one mode, without this wait or this hold."""
    name, old, _, count = MUTANTS[index]
    asked = {**mutants, f"EDIT_EXT_MUTANT_{index}": "1"}
    assert not survives(asked), f"{name}: nothing notices that {old!r} ({count}) is gone"
