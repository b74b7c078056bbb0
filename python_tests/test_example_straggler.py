"""Replicas that are slow on purpose, and runs that end by the clock."""

from __future__ import annotations

import argparse
import subprocess
import time
from pathlib import Path

import pytest
from test_example_train import command, records, text  # noqa: F401

from edit_ext.examples import pace, train_lm
from edit_ext.examples.options import parse_options

SHORT = ["--batch-size", "1", "--seq-len", "16", "--eval-every", "0", "--eval-windows", "4",
         "--log-every", "5", "--threads", "1", "--final-lr", "1"]  # fmt: skip
PACED = ["--step-seconds", "0.1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--slow-replica", "2"], "wants R:FACTOR, such as 1:2.5, got '2'"),
        (["--slow-replica", "a:2"], "wants R:FACTOR, such as 1:2.5, got 'a:2'"),
        (["--slow-replica", "0:nan"], "--slow-replica: must be finite, got nan"),
        (["--slow-replica", "0:0.5"], "wants R >= 0 and FACTOR >= 1, got '0:0.5'"),
        ([*PACED, "--slow-replica", "1:2"], "--slow-replica 1:2: there are only replicas 0 to 0"),
        (["--slow-replica", "0:2"], "--slow-replica needs --step-seconds"),
        (["--step-seconds", "0"], "argument --step-seconds: must be above 0, got 0"),
        (["--slow-random", "-1"], "argument --slow-random: must be above 0, got -1"),
        (["--slow-random", "often"], "argument --slow-random: invalid number value: 'often'"),
        (["--slow-link", "inf"], "argument --slow-link: must be finite, got inf"),
        (["--slow-link", "0.1"], "--slow-link has no effect with one replica"),
        (["--seconds", "2"], "it needs --eval-every 0 and --checkpoint-every 0"),
        (["--seconds", "2", "--eval-every", "0", "--resume"], "cannot be given with --resume"),
    ],
)
def test_wrong_options_are_one_line(text, tmp_path, words, message, capsys):  # noqa: F811
    with pytest.raises(SystemExit) as end:
        parse_options(["--data", text, "--out", str(tmp_path / "run"), *words])
    assert end.value.code == 2
    errors = capsys.readouterr().err
    assert message in errors and len(errors.splitlines()) == 1


def options(**given: object) -> argparse.Namespace:
    known = {"step_seconds": None, "slow_replica": None, "slow_random": None, "seed": 0}
    return argparse.Namespace(**{**known, **given})


def test_one_replica_sleeps_longer():
    """By the factor in every step; the others sleep --step-seconds."""
    slowed = options(step_seconds=0.25, slow_replica=(2, 3.0))
    paces = [pace.Pace(slowed, replica, 4) for replica in range(4)]
    for step in range(5):
        assert [each.seconds(step) for each in paces] == [0.25, 0.25, 0.75, 0.25]
    began = time.perf_counter()
    paces[2].sleep(0)
    assert time.perf_counter() - began >= 0.75


def test_nothing_asked_for_is_no_sleep(monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"slept {seconds} s"))
    pace.Pace(options(), 0, 2).sleep(0)


def test_one_replica_is_drawn_for_each_step():
    """Exactly one pauses, the same whoever asks; each in its turn; other seeds draw others."""
    paces = [pace.Pace(options(step_seconds=0.5, slow_random=1.0), r, 4) for r in range(4)]
    drawn = []
    for step in range(400):
        seconds = [each.seconds(step) for each in paces]
        assert sorted(seconds) == [0.5, 0.5, 0.5, 1.5]
        drawn.append(seconds.index(1.5))
    assert all(70 <= drawn.count(replica) <= 130 for replica in range(4))
    assert drawn != [pace.straggler(1, step, 4) for step in range(400)]


def run(text: str, out: Path, *words: str) -> dict:  # noqa: F811
    """The summary of a run with two replicas."""
    common = [*SHORT, "--data", text, "--out", str(out), "--replicas", "2"]
    subprocess.run(command(*common, *words), check=True, timeout=60)
    summary = records(out)[-1]
    assert summary["kind"] == "summary"
    assert summary["tokens"] == 16 * sum(summary["steps_of_replicas"])
    return summary


def test_by_the_clock_fast_replicas_make_more_steps(text, tmp_path):  # noqa: F811
    """Of A-EDiT, with one replica 5 times as slow: it alone is slowed, the other goes on."""
    words = ["--method", "aedit", "--sync-seconds", "1", "--seconds", "3", *PACED]
    fast, slow = run(text, tmp_path, *words, "--slow-replica", "1:5")["steps_of_replicas"]
    assert slow <= 7 and fast > slow + 2, (fast, slow)  # 0.5 s a step


def test_averaged_gradients_end_together(text, tmp_path):  # noqa: F811
    """Of sync, all wait for the slow replica, and stop after the same step, though replica 0 alone
    looks at its watch; a late link and a random pause keep it no more from that."""
    words = ["--method", "sync", "--seconds", "2", *PACED, "--slow-replica", "1:4"]
    summary = run(text, tmp_path, *words, "--slow-random", "0.01", "--slow-link", "0.05")
    fast, slow = summary["steps_of_replicas"]
    assert fast == slow <= 6  # 0.4 s a step
    assert 2 <= summary["seconds"] < 6


def test_one_replica_by_the_clock(text, tmp_path):  # noqa: F811
    """Without a process group; --steps that are over first end it too."""
    common = [*SHORT, "--data", text, "--overwrite", "--out", str(tmp_path), *PACED]
    for words, least, most in (
        (["--seconds", "0.5"], 1, 5),
        (["--seconds", "50", "--steps", "3"], 3, 3),
    ):
        assert train_lm.main([*common, "--sync-every", "2", *words]) == 0
        summary = records(tmp_path)[-1]
        assert least <= summary["steps"] <= most
        assert summary["steps_of_replicas"] == [summary["steps"]]
