"""Checkpoints of the training program: complete or not there, and refused in a line if damaged."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from test_example_train import SMALL, records

from edit_ext.examples import checkpoint, train_lm
from edit_ext.export import export

WORDS = [*SMALL, "--steps", "6", "--checkpoint-every", "2"]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"line {i} of the text, {i * i} squared\n" for i in range(3000)))
    return str(path)


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory) -> Path:
    """The folder of a run of 6 steps with checkpoints after 2, 4 and 6."""
    out = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WORLD_SIZE", raising=False)
        assert train_lm.main([*WORDS, "--data", text, "--out", str(out)]) == 0
    return out


@pytest.fixture
def out(finished, tmp_path) -> Path:
    """A copy to damage."""
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def latest(out: Path) -> Path:
    return out / "checkpoints" / (out / "checkpoints" / "latest").read_text()


def test_only_the_last_checkpoint_is_kept(out):
    """Facts in plain JSON, weights for `edit-ext export`, nothing of the steps before."""
    assert [p.name for p in (out / "checkpoints").glob("step_*")] == ["step_6"]
    facts = json.loads((latest(out) / "run.json").read_text())
    assert (facts["step"], facts["replicas"], facts["records"]["tokens"]) == (6, 1, 6 * 2 * 32)
    assert sum(value.numel() for value in export(latest(out)).values()) == 234_048


def test_a_resume_with_other_settings_is_refused(text, out, capsys):
    """The first differing option is named, with both values."""
    words = [*WORDS, "--data", text, "--out", str(out), "--resume", "--lr", "0.1"]
    assert train_lm.main(words) == 2
    assert "made with --lr 0.003, this run has 0.1" in capsys.readouterr().err


@pytest.mark.parametrize("moment", ["weights", "facts", "pointer", "removal"])
def test_a_kill_while_saving_leaves_the_checkpoint_before(text, out, monkeypatch, moment):
    """After each part of a save: the pointer names a checkpoint that resumes, and what the kill has
    left unfinished is gone afterwards."""
    (out / "checkpoints" / "latest").unlink()
    stop_after(monkeypatch, moment)
    words = [*WORDS, "--data", text, "--out", str(out), "--resume", "auto"]
    with pytest.raises(SystemError, match=moment):
        train_lm.main(words)
    monkeypatch.undo()
    left = "step_2" if moment in ("weights", "facts") else "step_4"
    assert latest(out).name == left
    assert len(list((out / "checkpoints").glob("step_*"))) == 2
    found = checkpoint.find_checkpoint(out, facts_of(out)["settings"], begin=False)
    assert found is not None and f"step_{found.step}" == left
    assert train_lm.main(words) == 0
    assert [p.name for p in (out / "checkpoints").glob("step_*")] == ["step_6"]
    assert [e["step"] for e in records(out) if e["kind"] == "train"] == [3, 6]


def facts_of(out: Path) -> dict:
    return json.loads((latest(out) / "run.json").read_text())


def stop_after(monkeypatch, moment: str) -> None:
    """Stops the program in its save of step 4."""

    def stopping(original: Callable, last: Callable[..., bool]) -> Callable:
        def call(*args, **kwargs):
            if moment == "removal" and last(*args, **kwargs):
                raise SystemError(moment)
            result = original(*args, **kwargs)
            if last(*args, **kwargs):
                raise SystemError(moment)
            return result

        return call

    if moment == "weights":
        save = stopping(
            checkpoint.dcp.save, lambda *_, checkpoint_id: "step_4" in str(checkpoint_id)
        )
        monkeypatch.setattr(checkpoint.dcp, "save", save)
    elif moment == "removal":
        remove = stopping(shutil.rmtree, lambda path: path.name == "step_2")
        monkeypatch.setattr(checkpoint.shutil, "rmtree", remove)
    else:
        name = {"facts": "step_4/run.json", "pointer": "latest"}[moment]
        write = stopping(
            checkpoint._write,
            lambda path, text: str(path).endswith(name) and "4" in text,
        )
        monkeypatch.setattr(checkpoint, "_write", write)


def cut(size: int) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, size)


def zeros(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("run.json", cut(0), "run.json is damaged or cut short"),
        ("run.json", cut(40), "run.json is damaged or cut short"),
        ("run.json", Path.unlink, "run.json is missing"),
        (".metadata", cut(0), ".metadata is damaged or cut short"),
        (".metadata", cut(1000), ".metadata is damaged or cut short"),
        (".metadata", Path.unlink, ".metadata is missing"),
        ("__0_0.distcp", cut(0), "__0_0.distcp is damaged or cut short"),
        ("__0_0.distcp", cut(100_000), "__0_0.distcp is damaged or cut short"),
        ("__0_0.distcp", Path.unlink, "__0_0.distcp is missing"),
        ("__0_0.distcp", zeros, "step_6 is damaged or cut short"),
    ],
)
@pytest.mark.parametrize("how", [[], ["auto"]])
def test_a_damaged_checkpoint_is_named(text, out, capsys, file, damage, message, how):
    """One line with its path, also where `auto` would begin if there were none; and it stays."""
    damage(latest(out) / file)
    words = [*WORDS, "--data", text, "--out", str(out), "--resume", *how]
    assert train_lm.main(words) == 2
    printed = capsys.readouterr().err
    assert f"edit-ext train: --resume: {latest(out)}" in printed
    assert message in printed and printed.count("\n") == 1
    assert len(records(out)) > 5
