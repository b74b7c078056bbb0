"""The training program as its users run it: what it writes, how it resumes, how it refuses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from edit_ext.examples import train_lm
from edit_ext.examples.runlog import RunLog

SMALL = [
    "--batch-size", "2", "--seq-len", "32", "--steps", "12", "--sync-every", "4",
    "--warmup-steps", "2", "--eval-every", "5", "--eval-windows", "8", "--log-every", "3",
    "--lr", "0.003", "--warmup-lr", "20",
]  # fmt: skip
CLOCK = {"seconds", "sync_seconds", "exposed_sync_seconds", "exchange_seconds", "exposed_seconds",
         "begin_seconds", "write_back_seconds", "tokens_per_s"}  # fmt: skip
SUMMARY = {
    "kind", "method", "replicas", "steps", "steps_of_replicas", "seconds", "tokens",
    "final_val_loss", "tokens_per_s", "bytes_sent_per_rank", "syncs", "sync_seconds",
    "exposed_sync_seconds",
}  # fmt: skip


@pytest.fixture
def text(tmp_path, monkeypatch) -> str:
    """A file of text to train on, in a process that no launcher has started."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i} of the text, {i * i} squared\n" for i in range(3000)))
    return str(path)


def records(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def lasting(out: Path) -> list[dict]:
    """The records without what depends on the clock."""
    return [{k: v for k, v in entry.items() if k not in CLOCK} for entry in records(out)]


def command(*words: str) -> list[str]:
    return [sys.executable, "-c", "from edit_ext.cli import main; import sys; sys.exit(main())",
            "train", *words]  # fmt: skip


def test_a_run_writes_what_the_report_reads(text, tmp_path):
    """First line config, last line summary; train, val and sync lines in between."""
    out = tmp_path / "run"
    assert train_lm.main([*SMALL, "--data", text, "--out", str(out)]) == 0
    lines = records(out)
    assert lines[0]["kind"] == "config" and lines[0]["params"] == 234_048
    assert set(lines[-1]) == SUMMARY
    assert lines[-1]["steps"] == 12 and lines[-1]["tokens"] == 12 * 2 * 32
    assert lines[-1]["syncs"] == 3  # after steps 6 and 10, and at the end
    assert [e["step"] for e in lines if e["kind"] == "train"] == [3, 6, 9, 12]
    assert [e["step"] for e in lines if e["kind"] == "val"] == [5, 10, 12]
    layers = {e["layer"] for e in lines if e["kind"] == "sync"}
    assert {f"layers.{i}" for i in range(4)} < layers
    assert lines[-1]["final_val_loss"] < 5.5


def test_sync_never_leaves_the_warm_up(text, tmp_path):
    """Method sync: no outer sync, not even at the end."""
    out = tmp_path / "run"
    words = ["--method", "sync", "--steps", "3", "--batch-size", "2", "--seq-len", "32"]
    assert train_lm.main([*words, "--data", text, "--out", str(out)]) == 0
    assert records(out)[-1]["syncs"] == 0


@pytest.mark.parametrize("by", ["local", "mean"])
def test_by_the_clock(text, tmp_path, by):
    """Method aedit with a clock that never fires: replicas meet where they must and at the end, and
    the learning rate follows a replica's own steps or the mean at the last sync."""
    out = tmp_path / "run"
    words = ["--method", "aedit", "--sync-seconds", "1e6", "--min-steps", "2", "--lr-by", by,
             "--steps", "12", "--batch-size", "2", "--seq-len", "32", "--warmup-lr", "12",
             "--eval-every", "5", "--eval-windows", "4", "--log-every", "1",
             "--checkpoint-every", "4"]  # fmt: skip
    assert train_lm.main([*words, "--data", text, "--out", str(out)]) == 0
    lines = records(out)
    assert lines[-1]["syncs"] == 6  # at steps 4, 5, 8, 10, 12 and at the end
    rates = [e["lr"] / 2e-3 * 12 for e in lines if e["kind"] == "train"]
    last = [0, 0, 0, 0, 4, 5, 5, 5, 8, 8, 10, 10]
    assert rates == pytest.approx([1 + (t if by == "local" else last[t]) for t in range(12)])


@pytest.mark.parametrize("stop", [8, 9])
def test_a_resumed_run_equals_an_unbroken_one(text, tmp_path, stop):
    """Stopped in the middle of a window, at once after the checkpoint of step 8 and later: the same
    records to the last digit, and the same sums."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    common = [*SMALL, "--data", text, "--checkpoint-every", "4"]
    assert train_lm.main([*common, "--out", str(whole)]) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_lm, "set_learning_rate", stop_at(stop))
        with pytest.raises(OSError, match="power cut"):
            train_lm.main([*common, "--out", str(parts)])
    assert train_lm.main([*common, "--out", str(parts), "--resume"]) == 0
    assert lasting(parts) == lasting(whole)


def stop_at(stop: int):
    original = train_lm.set_learning_rate

    def set_learning_rate(optimizer, step, options):
        if step == stop:
            raise OSError("power cut")
        return original(optimizer, step, options)

    return set_learning_rate


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--data", "nowhere.txt"], "--data nowhere.txt: no such file or folder"),
        (["--sync-every", "0"], "sync_every must be at least 1, but is 0."),
        (["--method", "sync", "--sync-every", "4"], "--sync-every has no effect"),
        (["--sync-seconds", "4"], "--sync-seconds has no effect with --method edit"),
        (["--method", "aedit", "--sync-every", "4"], "no effect with --method aedit"),
        (["--method", "aedit", "--sync-seconds", "0"], "sync_seconds must be above 0 and finite"),
        (["--warmup-steps", "1000"], "leaves none of the 1000 steps"),
        (["--corrupt-replica", "0"], "go together"),
        (["--corrupt-replica", "2", "--corrupt-steps", "1:2"], "only replicas 0 to 0"),
        (["--corrupt-steps", "5:2"], "wants A:B with A < B, got '5:2'"),
        (["--lr", "-1"], "--lr must be positive, got -1.0"),
        (["--lr", "nan"], "argument --lr: must be finite, got nan"),
        (["--weight-decay", "inf"], "argument --weight-decay: must be finite, got inf"),
        (["--weight-decay", "-1"], "--weight-decay must be at least 0, got -1.0"),
        (["--grad-clip", "nan"], "argument --grad-clip: must be finite, got nan"),
        (["--grad-clip", "0"], "--grad-clip must be positive, got 0.0; none switches it off"),
        (["--out", "text.txt"], "--out text.txt cannot be written to: File exists"),
        (["--out", "text.txt/run"], "cannot be written to: Not a directory"),
        (["--steps", "0"], "must be at least 1, got 0"),
        (["--resume"], "holds no checkpoint"),
        (["--resume", "auto"], "--resume auto needs --checkpoint-every"),
        (["--resume", "--overwrite"], "give one of them"),
        (["--no-such-option"], "unrecognized arguments: --no-such-option"),
    ],
)
def test_bad_input_is_one_line_and_code_2(text, tmp_path, capsys, monkeypatch, words, message):
    """No traceback, nothing on stdout, nothing trained."""
    monkeypatch.chdir(tmp_path)
    try:
        code = train_lm.main(words)
    except SystemExit as end:
        code = end.code
    printed = capsys.readouterr()
    assert code == 2
    assert message in printed.err and printed.err.count("\n") == 1
    assert printed.out == ""


def test_an_earlier_run_is_not_lost(text, tmp_path, capsys):
    """--out with a run in it wants --resume or --overwrite."""
    out = tmp_path / "run"
    common = [*SMALL, "--steps", "3", "--data", text, "--out", str(out)]
    assert train_lm.main(common) == 0
    with pytest.raises(SystemExit):
        train_lm.main(common)
    assert "already holds a run" in capsys.readouterr().err
    assert train_lm.main([*common, "--overwrite"]) == 0


def test_a_corrupt_replica_sees_noise_in_its_steps_only(text, tmp_path, monkeypatch):
    """Inputs and targets are random bytes from step A up to, not including, B."""
    from edit_ext.examples.data import Batches, load_corpus
    from edit_ext.examples.options import parse_options

    options = parse_options(["--data", text, "--out", str(tmp_path), "--replicas", "2",
                             "--corrupt-replica", "1", "--corrupt-steps", "3:5"])  # fmt: skip
    corpus = load_corpus([text], window=33)
    for rank in (0, 1):
        stream = Batches(corpus.train, batch_size=2, seq_len=32, seed=0, rank=rank, world=2)
        for step in range(7):
            got = train_lm.next_batch(stream, step, options)
            expected = stream.noise(step) if rank == 1 and step in (3, 4) else stream.batch(step)
            assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])


def test_a_resumed_log_drops_what_came_after_the_checkpoint(tmp_path):
    """Later lines, an old summary and a half-written last line go; the rest stays."""
    path = tmp_path / "metrics.jsonl"
    lines = [{"kind": "config"}, {"kind": "train", "step": 5}, {"kind": "train", "step": 9},
             {"kind": "summary"}]  # fmt: skip
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "tr')
    log = RunLog(tmp_path, start=5, steps=10, tensorboard=False)
    log.write("train", step=6)
    log.close()
    assert records(tmp_path) == [*lines[:2], {"kind": "train", "step": 6}]


def test_tensorboard_files_are_written_when_asked_for(text, tmp_path):
    """Scalars of the run appear under kind/name."""
    pytest.importorskip("tensorboard")
    out = tmp_path / "run"
    assert train_lm.main([*SMALL, "--data", text, "--out", str(out), "--tensorboard"]) == 0
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    assert {"train/loss", "val/val_loss", "sync/merged_norm/layers.0"} <= set(
        events.Tags()["scalars"]
    )


def test_tensorboard_asked_for_and_absent_is_one_sentence(text, monkeypatch, capsys):
    """The sentence says what to install."""
    monkeypatch.setattr("edit_ext.examples.options.tensorboard_missing", lambda: True)
    with pytest.raises(SystemExit):
        train_lm.main(["--tensorboard", "--data", text])
    assert "pip install tensorboard" in capsys.readouterr().err


@pytest.mark.slow
def test_two_replicas_resume_inside_a_window(text, tmp_path):
    """A run of `edit-ext train` that is killed after its checkpoint and resumed ends as one that
    was not, but for the bytes with which the replicas found each other once more."""
    common = [*SMALL, "--data", text, "--replicas", "2", "--checkpoint-every", "5"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    subprocess.run(command(*common, "--out", str(whole)), check=True, timeout=60)
    shorter = [*common, "--out", str(parts)]
    process = subprocess.Popen(command(*shorter), start_new_session=True)
    latest = parts / "checkpoints" / "latest"
    deadline = time.monotonic() + 60
    while not latest.exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=10)
    subprocess.run(command(*shorter, "--resume"), check=True, timeout=60)
    resumed, unbroken = lasting(parts), lasting(whole)
    sent = [run[-1].pop("bytes_sent_per_rank") for run in (resumed, unbroken)]
    assert resumed == unbroken
    assert 0 <= sent[0] - sent[1] < 1000


def test_a_killed_replica_ends_the_run(text, tmp_path):
    """SIGKILL of one replica in training: non-zero exit within seconds, and a line naming it."""
    out = tmp_path / "run"
    words = [*SMALL, "--steps", "100000", "--log-every", "1", "--data", text, "--replicas", "2",
             "--out", str(out), "--timeout", "20"]  # fmt: skip
    process = subprocess.Popen(command(*words), stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not (out / "metrics.jsonl").exists() or len(records(out)) < 3:
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[1]), signal.SIGKILL)
        _, errors = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 137
    assert "rank 1 was ended by SIGKILL" in errors
