"""The evidence: its runs, how a broken-off file goes on, its statistics, and the committed page."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

import edit_ext
from edit_ext.bench import evidence, evidence_page
from edit_ext.bench.evidence_claims import CLAIMS
from edit_ext.bench.evidence_read import Value, damage, load, over_seeds, recovery
from edit_ext.bench.evidence_rows import MANDATORY, ROWS, Row
from edit_ext.bench.evidence_run import BATCH, SEQ_LEN, Run, execute

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "bench" / "results" / "evidence.json"
SHORT = Run(method=edit_ext.EDiT(sync_every=4, warmup_steps=4), steps=40)


@pytest.mark.timeout(120)
def test_run_is_deterministic_and_learns() -> None:
    """The same settings and seed give the same numbers, another seed others; the loss falls."""
    one, again, other = (execute(SHORT, seed) for seed in (0, 0, 1))
    del one["cpu_seconds"], again["cpu_seconds"], other["cpu_seconds"]
    assert one == again
    assert one["curve"] != other["curve"]
    assert one["loss"] < one["curve"][0][1] < math.log(256)
    assert one["syncs"] == 9 and one["flags"]["healthy"] == [0, 0]  # ten syncs of warm-up


@pytest.mark.timeout(120)
def test_noise_reaches_one_replica() -> None:
    """A replica that reads random bytes has the loss of a guess, and the model gets worse."""
    noisy = execute(replace(SHORT, noise=(20, 40)), 0)
    assert noisy["loss"] > execute(SHORT, 0)["loss"]


@pytest.mark.timeout(120)
def test_joining_doubles_the_replicas() -> None:
    """In the middle the replicas double, and all go on from the agreed weights."""
    method = edit_ext.DESLOC(param_every=4, state_every={"exp_avg": 4}, warmup_steps=4)
    told = execute(Run(method=method, steps=40, replicas=2, joins="all"), 0)["joining"]
    assert told["new"] < told["before"] and abs(told["new"] - told["old"]) < 0.2


def test_same_tokens() -> None:
    """Every run of the first row reads as many tokens as the others, to a step of one replica."""
    tokens = {}
    for label, run in ROWS[0].runs(0).items():
        slow = len(range(16, run.steps, run.slow)) + 16 if run.slow > 1 else run.steps
        tokens[label] = ((run.replicas - 1) * run.steps + slow) * BATCH * SEQ_LEN
    most = max(tokens.values())
    assert all(most - n <= 12 * BATCH * SEQ_LEN for n in tokens.values()), tokens


@pytest.mark.timeout(240)
def test_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a file has is not run again; runs that rows share run once."""
    tiny = replace(SHORT, steps=8)
    rows = [Row("one", "?", lambda seed: {"a": tiny}), Row("two", "?", lambda seed: {"b": tiny})]
    monkeypatch.setattr(evidence, "ROWS", rows)
    where = tmp_path / "folder" / "evidence.json"
    arguments = ["--json", str(where), "--seeds", "2", "--workers", "1"]
    assert evidence.main([*arguments, "--minutes", "0"]) == 1
    assert evidence.main([*arguments, "--rows", "two", "--seeds", "1"]) == 0
    first = json.loads(where.read_text())["runs"]
    assert len(first) == 1
    assert evidence.main(arguments) == 0
    second = json.loads(where.read_text())["runs"]
    assert len(second) == 2 and first.items() <= second.items()
    before = where.stat().st_mtime_ns
    assert evidence.main(arguments) == 0 and where.stat().st_mtime_ns == before


@pytest.mark.parametrize("text", ["garbage", "[]", "{}", None])
def test_file_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    """What is no file of results, or cannot be written, is refused in a sentence at once."""
    where = tmp_path / "evidence.json"
    if text is None:
        where.mkdir()
    else:
        where.write_text(text)
    for program in (evidence, evidence_page):
        with pytest.raises(SystemExit):
            program.main(["--json", str(where)])
        assert f"error: --json {where}: " in capsys.readouterr().err


def test_keys_tell_settings_apart() -> None:
    """Rows without seeds of their own have different runs under different labels."""
    for row in ROWS:
        runs = row.runs(1)
        keys = {evidence.key(run, 1) for run in runs.values()}
        assert len(keys) == len(runs), row.name
        assert evidence.key(next(iter(runs.values())), 0) not in keys
    assert set(CLAIMS) == {row.name for row in ROWS} and len(ROWS) > MANDATORY


def test_statistics() -> None:
    """Mean, sample deviation, and twice the standard error."""
    a = over_seeds([1.0, 2.0, 3.0])
    assert (a.mean, a.deviation, str(a)) == (2.0, 1.0, "2.0000 ± 1.0000")
    assert a.positive and Value(1.2, 1.0, 3).positive and not Value(1.1, 1.0, 3).positive
    assert str(over_seeds([1.0])) == "1.0000" and str(over_seeds([1.0, math.inf])) == "inf"
    assert a.form("+.1f") == "+2.0 ± 1.0"


def test_recovery() -> None:
    """Excess over the clean twin, and the steps until it is gone for good."""
    clean = {"curve": [[step, 2.0] for step in (10, 20, 30, 40)]}

    def noisy(*excess: float) -> dict[str, list[list[float]]]:
        steps = (10, 20, 30, 40)
        return {"curve": [[s, 2.0 + e] for s, e in zip(steps, excess, strict=True)]}

    assert damage(noisy(0, 0.5, 0.2, 0), clean) == 0.5
    assert recovery(noisy(0, 0.5, 0.2, 0), clean, 20, 0.1) == 20
    assert recovery(noisy(0, 0.5, 0, 0.2), clean, 20, 0.1) == math.inf
    assert recovery(noisy(0.5, 0, 0, 0), clean, 20, 0.1) == 0


def test_committed_page() -> None:
    """docs/evidence.md says what bench/results/evidence.json holds, with three seeds of the first
    ten rows, each run within a minute."""
    head, tables = load(RESULT, evidence.SEEDS)
    for row in ROWS[:MANDATORY]:
        assert len(tables[row.name].seeds) == 3, row.name
    pictures = [path.name for path in RESULT.parent.glob("evidence_*.png")]
    assert len(pictures) == len(evidence_page.PICTURES)
    assert evidence_page.PAGE.read_text() == evidence_page.page(head, tables, pictures)
    runs = json.loads(RESULT.read_text())["runs"].values()
    assert all(run.get("cpu_seconds", 0.0) <= 60 for run in runs)
