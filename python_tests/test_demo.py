"""The demo: what it writes and prints, on a run of a few steps."""

from __future__ import annotations

import json

import pytest

from edit_ext.bench import demo

ROW = {
    "method": "edit", "replicas": 4, "steps": 480, "tokens": 983040, "final_val_loss": 1.5,
    "tokens_per_s": 9000.0, "bytes_sent_per_rank": 100_000_000, "syncs": 27,
    "sync_seconds": 1.25, "exposed_sync_seconds": 0.5,
}  # fmt: skip


def test_the_settings_keep_the_promises():
    """A few hundred steps, 15 syncs or more, a fifth of the bytes; the same for both methods."""
    steps, warmup = demo.RUN["--steps"], demo.EDIT["--warmup-steps"]
    syncs = -(-(steps - warmup) // demo.EDIT["--sync-every"])
    assert 200 <= steps <= 1000
    assert syncs >= 15
    # A sync sends what a step of averaged gradients sends: a reduced piece, and the piece back.
    assert steps / (warmup + syncs) >= 5
    assert not demo.RUN.keys() & demo.EDIT.keys()


def test_the_noise_begins_after_the_detector_has_warmed_up():
    """Its first whole window comes after ten syncs, its last before sync 30."""
    first, last = map(int, demo.CORRUPT["--corrupt-steps"].split(":"))
    warmup, every = demo.PENALTY["--warmup-steps"], demo.PENALTY["--sync-every"]
    assert (first - warmup) // every >= 10
    assert -(-(last - warmup) // every) < 30
    assert (last - first) // every <= 10  # more flags in a row would be accepted again


def test_the_table_and_the_verdict_give_both_runs_in_numbers():
    """A run a column; the ratio of bytes and the difference of losses."""
    rows = {"sync": {**ROW, "method": "sync", "bytes_sent_per_rank": 650_000_000}, "edit": ROW}
    lines = demo.table(rows).splitlines()
    assert lines[0].split() == ["sync", "edit"]
    assert len(lines) == 1 + len(ROW)
    assert lines[-4].split() == ["bytes_sent_per_rank", "650,000,000", "100,000,000"]
    rows["edit"] = {**ROW, "final_val_loss": 1.51}
    assert "6.5 times fewer bytes" in demo.verdict(rows) and "+0.0100 nats" in demo.verdict(rows)


@pytest.mark.slow
def test_a_small_demo_writes_summary_and_picture(tmp_path, monkeypatch):
    """Both runs, summary.json with the promised keys, and report.png when matplotlib is there."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    small = {"--batch-size": 1, "--seq-len": 32, "--steps": 12, "--eval-windows": 8}
    monkeypatch.setattr(demo, "RUN", {**demo.RUN, **small})
    monkeypatch.setattr(demo, "EDIT", {"--warmup-steps": 4, "--sync-every": 4})
    assert demo.main(["--replicas", "2", "--out", str(tmp_path)]) == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary) == ["sync", "edit"]
    assert all(set(row) == set(ROW) for row in summary.values())
    assert summary["edit"]["syncs"] == 2 and summary["sync"]["syncs"] == 0
    pytest.importorskip("matplotlib")
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_failed_run_ends_the_demo_with_its_code(tmp_path, monkeypatch):
    """No table of half a comparison."""
    monkeypatch.setattr(demo.launch, "train", lambda words: 7)
    assert demo.main(["--out", str(tmp_path)]) == 7
    assert not (tmp_path / "summary.json").exists()
