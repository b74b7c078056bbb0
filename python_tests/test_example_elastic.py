"""Runs that lose workers: restarts under torchrun, and other numbers of replicas."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from test_example_train import SMALL, command, lasting, records

from edit_ext.examples.meeting import agree_on_life

# The training program, in which a rank kills itself when it begins a step: LIFE:RANK:STEP,...
MORTAL = """
import os, signal, sys
from edit_ext import launch
from edit_ext.examples import train_lm

learning_rate = train_lm.set_learning_rate

def set_learning_rate(optimizer, step, options):
    here = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}:{os.environ['RANK']}:{step}"
    if here in os.environ["DIE"].split(","):
        os.kill(os.getpid(), signal.SIGKILL)
    return learning_rate(optimizer, step, options)

if sys.argv[1] == "launch":
    sys.exit(launch.launch([sys.executable, sys.argv[0], *sys.argv[3:]], int(sys.argv[2])))
train_lm.set_learning_rate = set_learning_rate
sys.exit(train_lm.main())
"""
WORDS = [*SMALL, "--steps", "16", "--checkpoint-every", "5", "--timeout", "60"]
TOKENS = 2 * 32  # of a step of one replica


@pytest.fixture
def text(tmp_path, monkeypatch) -> str:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "mortal.py").write_text(MORTAL)
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i} of the text, {i * i} squared\n" for i in range(3000)))
    return str(path)


def of(out: Path, kind: str) -> list[dict]:
    return [entry for entry in records(out) if entry["kind"] == kind]


def ended_well(words: list[str]) -> str:
    """What a launcher has printed; it may end its own processes before it is given up."""
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        printed, errors = process.communicate(timeout=150)
    except subprocess.TimeoutExpired:
        process.terminate()
        printed, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors[-3000:]
    return printed


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_row_30_restarts_under_torchrun(text, tmp_path, monkeypatch):
    """Rank 1 dies before the first sync and checkpoint, rank 0 after them: the job ends well, and
    its records are those of a run that nothing has happened to."""
    monkeypatch.setenv("DIE", "0:1:3,1:0:8")
    out, whole = tmp_path / "out", tmp_path / "whole"
    words = [*WORDS, "--data", text]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone",
                "--nproc-per-node", "2", "--max-restarts", "2"]  # fmt: skip
    printed = ended_well(
        [*launcher, str(tmp_path / "mortal.py"), *words, "--out", str(out), "--resume", "auto"]
    )
    assert printed.count("2 replicas of tiny") == 2  # begun twice
    assert printed.count("goes on after step 5 with 2 replicas\n") == 1
    assert sorted({e["step"] for e in of(out, "sync")}) == [6, 10, 14, 16]
    losses = [e["loss"] for e in of(out, "train")]
    assert losses[-1] < losses[0] - 0.3
    subprocess.run(command(*words, "--replicas", "2", "--out", str(whole)), check=True, timeout=100)
    restarted, unbroken = lasting(out), lasting(whole)
    for run in (restarted, unbroken):
        del run[-1]["bytes_sent_per_rank"]
    assert restarted == unbroken


def test_lives_that_share_a_store_do_not_meet():
    """Four lives of three ranks on one store, two of which lack a rank: what these leave behind
    misleads nobody, and each of the others has a name of its own."""
    store = dist.HashStore()
    seen: list[str] = []
    for life, present in enumerate(([0, 1], [1, 2], [2, 0, 1], [0, 1, 2])):
        with ThreadPoolExecutor(3) as pool:
            last = len(present) == 3
            calls = [
                pool.submit(agree_on_life, store, rank, 3, 20.0 if last else 0.3)
                for rank in present
            ]
            if last:
                names = {call.result() for call in calls}
                assert len(names) == 1 and not names & set(seen), life
                seen += names
            else:
                assert any(isinstance(call.exception(), RuntimeError) for call in calls)
    assert len(seen) == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_four_replicas_then_two_then_four(text, tmp_path, monkeypatch):
    """One command line but for the number of replicas, killed twice. Learning rate, syncs and
    validation stay at their steps, and no text is read twice or left out."""
    out = tmp_path / "out"
    for replicas, death in ((4, "0:1:6"), (2, "0:0:10"), (4, "none")):
        monkeypatch.setenv("DIE", death)
        program = [sys.executable, str(tmp_path / "mortal.py"), "launch", str(replicas)]
        words = [*WORDS, "--data", text, "--out", str(out), "--resume", "auto"]
        code = subprocess.run([*program, *words], timeout=90).returncode
        assert code == (0 if death == "none" else 137)
    train, summary = of(out, "train"), records(out)[-1]
    assert [(e["step"], e["replicas"]) for e in train] == [
        (3, 4), (6, 2), (9, 2), (12, 4), (15, 4), (16, 4)
    ]  # fmt: skip
    dealt = [3 * 4, 5 * 4 + 2, 5 * 4 + 4 * 2, 5 * 4 + 5 * 2 + 2 * 4]
    assert [e["tokens"] for e in train[:4]] == [n * TOKENS for n in dealt]
    assert summary["tokens"] == (5 * 4 + 5 * 2 + 6 * 4) * TOKENS and summary["replicas"] == 4
    syncs = {e["step"]: len(e["norms"]) for e in of(out, "sync")}
    assert syncs == {6: 2, 10: 4, 14: 4, 16: 4}
    assert [e["step"] for e in of(out, "val")] == [5, 10, 15, 16]
    rate = {e["step"]: e["lr"] for e in train}
    assert rate[16] == pytest.approx(0.003 * 16 / 20) and rate[6] == pytest.approx(0.003 * 6 / 20)
    assert train[-1]["loss"] < train[0]["loss"] - 0.3
    assert json.loads((out / "checkpoints" / "step_15" / "run.json").read_text())["replicas"] == 4
