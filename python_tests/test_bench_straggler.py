"""The straggler experiment: what it counts, its table and its picture, and that it runs."""

from __future__ import annotations

import json
import re

import pytest

from edit_ext.bench import straggler
from edit_ext.bench.straggler_picture import TICKS, draw


@pytest.fixture
def small(monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    few = {"--batch-size": 1, "--seq-len": 16, "--eval-windows": 8}
    monkeypatch.setattr(straggler, "RUN", {**straggler.RUN, **few})
    monkeypatch.setattr(straggler, "REPLICAS", 2)
    monkeypatch.setattr(straggler, "SYNC_EVERY", 3)
    monkeypatch.setattr(straggler, "CASES", {"none": {}, "x3": straggler.CASES["x3"]})


STEADY = 1000 / straggler.STEP_SECONDS  # tokens/s


def made_up(rate: float) -> straggler.Result:
    return {"tokens_per_s": rate, "tokens_of_a_step": 1000, "tokens": 12345,
            "steps_of_replicas": [9, 8, 9, 9], "final_val_loss": 2.5}  # fmt: skip


def made_up_runs() -> dict[str, dict[str, straggler.Result]]:
    """Without a straggler steps are as long as the sleep; of the rate half is kept."""
    return {
        case: {m: made_up(STEADY if case == "none" else STEADY / 2) for m in straggler.METHODS}
        for case in straggler.CASES
    }


def test_table_and_picture(tmp_path):
    """A line a run, with what is kept of the rate and what could be; and a PNG."""
    runs = made_up_runs()
    lines = straggler.table(runs).splitlines()
    assert len(lines) == 1 + 3 * len(straggler.CASES)
    first, twice = lines[1], lines[4]
    assert first.endswith("6,667   100%      100%       9, 8    12,345     2.500")
    assert twice.split()[-7:] == ["3,333", "50%", "88%", "9,", "8", "12,345", "2.500"]
    assert straggler.no_waits(runs["none"]["edit"], "x3") == pytest.approx(3.333 / 4, abs=1e-3)
    assert straggler.no_waits(runs["none"]["edit"], "random") == pytest.approx(0.8)
    assert list(TICKS) == list(straggler.CASES)
    pytest.importorskip("matplotlib")
    each = {case: dict.fromkeys(straggler.METHODS, 0.5) for case in runs}
    result = {"runs": runs, "kept": each, "no_waits": each, "seconds_of_a_run": 3}
    draw(result, tmp_path / "straggler.png")
    assert (tmp_path / "straggler.png").read_bytes().startswith(b"\x89PNG")


def test_a_window_cut_off_is_not_counted():
    """Nor is the sync at the end of the run, which no step follows."""
    lines = [
        {"kind": "config"},
        {"kind": "train", "seconds": 1.0},
        *[{"kind": "sync", "sync_index": 1, "steps": [3, 2]}] * 2,  # of two layers
        {"kind": "train", "seconds": 2.0},
        {"kind": "sync", "sync_index": 2, "steps": [4, 1]},
        {"kind": "train", "seconds": 3.0},
        {"kind": "train", "seconds": 4.0},
        {"kind": "sync", "sync_index": 3, "steps": [2, 1]},
        {"kind": "summary"},
    ]
    assert straggler.whole_windows(lines) == ({1: [3, 2], 2: [4, 1]}, 3.0)


def test_slow_cases_are_said():
    """Each case has words and a tick; only --seconds and the slow part tell runs apart."""
    assert list(straggler.WORDS) == list(straggler.CASES)
    steady = straggler.settings("aedit", "none", 3, 1.5)
    assert steady[-2:] == ["--sync-seconds", "1.5"]
    slow = straggler.settings("aedit", "x2", 3, 1.5)
    assert [word for word in slow if word not in steady] == ["--slow-replica", "1:2"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_replicas_two_cases(tmp_path, small):
    """The whole program with few of everything. What A-EDiT keeps is not asked of runs as short as
    this, in which a busy machine has the last word."""
    assert straggler.main(["--out", str(tmp_path), "--seconds", "4"]) == 0
    result = json.loads((tmp_path / "straggler.json").read_text())
    assert set(result["runs"]["x3"]) == {"sync", "edit", "aedit"}
    assert result["kept"]["x3"]["sync"] < 0.9
    words = result["settings"]["aedit"]
    assert float(words[words.index("--sync-seconds") + 1]) > 3 * straggler.STEP_SECONDS
    for run in result["runs"]["x3"].values():
        assert run["windows"] >= 1 and run["counted_tokens"] <= run["tokens"]


def test_a_run_that_fails_is_a_sentence(tmp_path, small, monkeypatch, capfd):
    """The program's own line, which run it was, and exit code 1; no table of half an experiment."""
    monkeypatch.setitem(straggler.RUN, "--lr", -1)
    assert straggler.main(["--out", str(tmp_path), "--seconds", "1"]) == 1
    errors = capfd.readouterr().err
    assert "--lr must be positive" in errors
    assert re.search(r"straggler: sync_none: rank [01] ended with 2\n", errors)
    assert not (tmp_path / "straggler.json").exists()
