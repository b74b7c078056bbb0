"""The elastic experiment: where its phases end, that a run goes through them, what it writes."""

from __future__ import annotations

import json

import pytest

from edit_ext.bench import elastic
from edit_ext.bench.elastic_picture import draw


@pytest.fixture
def small(monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    few = {"--batch-size": 1, "--seq-len": 32, "--eval-windows": 32}
    monkeypatch.setattr(elastic, "RUN", {**elastic.RUN, **few})


def made_up(final: float) -> elastic.Result:
    curve = [[step, 5.5 - (5.5 - final) * step / 40] for step in range(5, 45, 5)]
    phases = [{"replicas": r, "last_step": 10 * n, "val_loss": curve[2 * n - 1][1]}
              for n, r in enumerate((1, 2, 4, 8), 1)]  # fmt: skip
    return {"phases": phases, "curve": curve, "tokens": 1, "final_val_loss": final}


def test_replicas_come_and_go_inside_windows():
    """No phase of EDiT ends where a sync is due: its end is as any moment would be."""
    words = elastic.settings("edit", elastic.STEPS, 4)
    given = dict(zip(words[::2], words[1::2], strict=True))
    warmup, every = int(given["--warmup-steps"]), int(given["--sync-every"])
    assert int(given["--steps"]) == 4 * elastic.STEPS
    for phase in (1, 2, 3):
        assert (phase * elastic.STEPS - warmup) % every
    assert all(len(phases) == 4 for phases in elastic.PHASES.values())


def test_table_and_picture(tmp_path):
    """Losses by phase, the distance to four replicas, and a PNG."""
    finals = {"sync": (2.0, 2.1, 1.9), "edit": (2.2, 2.3, 2.4)}
    runs = {
        method: dict(zip(elastic.PHASES, map(made_up, values), strict=True))
        for method, values in finals.items()
    }
    lines = elastic.table(runs).splitlines()
    assert len(lines) == 1 + 3 * 2
    assert lines[1].split() == [
        "1-2-4-8",
        "sync",
        "4.6250",
        "3.7500",
        "2.8750",
        "2.0000",
        "+0.1000",
    ]
    assert lines[4].split()[-1] == "-0.1000"
    pytest.importorskip("matplotlib")
    draw({"steps_per_phase": 10, "runs": runs}, tmp_path / "elastic.png")
    assert (tmp_path / "elastic.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_run_goes_through_its_phases(tmp_path, small):
    """Killed at the checkpoint between two phases, it goes on with two replicas and the same
    learning rates; a second run in the same place begins anew."""
    for _ in range(2):
        elastic.trained(tmp_path, "edit", (1, 2), 20)
        result = elastic.read(tmp_path, (1, 2), 20)
        assert [phase["last_step"] for phase in result["phases"]] == [20, 40]
        assert [step for step, _ in result["curve"]] == list(range(5, 85, 5))
        assert result["tokens"] == (20 * 1 + 60 * 2) * 32
        train = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
        replicas = {e["step"]: e["replicas"] for e in train if e["kind"] == "train"}
        assert replicas == {step: 1 if step <= 20 else 2 for step in range(10, 90, 10)}


def test_a_run_that_fails_is_a_sentence(tmp_path, small, monkeypatch, capfd):
    """The program's own line, which run it was, and exit code 1; no table of half an experiment."""
    monkeypatch.setitem(elastic.RUN, "--lr", -1)
    assert elastic.main(["--out", str(tmp_path), "--steps-per-phase", "4"]) == 1
    errors = capfd.readouterr().err
    assert "--lr must be positive" in errors
    assert "elastic: sync_1-2-4-8: rank 0 ended with 2" in errors
    assert not (tmp_path / "elastic.json").exists()
