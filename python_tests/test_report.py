"""The report reads what a training writes, tolerates what it leaves behind, and draws."""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from edit_ext import report as report_module
from edit_ext.report import main, report
from edit_ext.report_overview import SMOOTHED_FROM, bytes_sent, draw_bars, draw_loss, smooth
from edit_ext.report_panels import draw_clip, draw_weights
from edit_ext.report_read import ReportError, read_run, short_names
from edit_ext.report_sync import MAX_LAYERS, flag_count, shown_layers

pytest.importorskip("matplotlib", reason="pictures need matplotlib")
PNG = b"\x89PNG\r\n\x1a\n"


def sync_line(
    rng: random.Random, index: int, layer: str, replicas: int, step: int, noisy: set[int]
) -> dict[str, Any]:
    """One made-up sync record; replicas in `noisy` are large, and flagged in most layers."""
    scale = 1.5 * (1 + 2 / (1 + index)) * (0.6 + hash_of(layer))
    norms = [scale * rng.uniform(0.9, 1.1) for _ in range(replicas)]
    flags = [False] * replicas
    for r in noisy:
        norms[r] *= 6
        flags[r] = not layer.endswith("0")
    raw = [0.0 if flag else math.exp(-norm) for norm, flag in zip(norms, flags, strict=True)]
    weights = [x / sum(raw) for x in raw]
    merged = sum(w * n for w, n in zip(weights, norms, strict=True)) * 0.7
    exchange = rng.uniform(0.010, 0.014)
    return {
        "kind": "sync",
        "step": step,
        "sync_index": index,
        "layer": layer,
        "norms": norms,
        "weights": weights,
        "flags": flags,
        "idle": [False] * replicas,
        "steps": [16] * replicas,
        "merged_norm": merged,
        "clip": min(1.0, 2.0 / merged),
        "skip": all(flags),
        "exchange_seconds": exchange,
        "exposed_seconds": exchange * rng.uniform(0.05, 0.3),
        "begin_seconds": 0.0004,
        "write_back_seconds": 0.0003,
        "bytes_sent": 1_900_000,
    }


def hash_of(layer: str) -> float:
    return (sum(map(ord, layer)) % 17) / 17


def write_run(
    folder: Path,
    method: str = "edit",
    *,
    steps: int = 320,
    every: int = 16,
    replicas: int = 4,
    layers: int = 7,
    noisy: dict[int, set[int]] | None = None,
    end: str = "summary",
    loss: float = 2.0,
    seed: int = 0,
) -> Path:
    """Write metrics.jsonl as a training does; `end` is "summary", "open" or "broken"."""
    rng = random.Random(seed)
    names = ["embed", *(f"layers.{i}" for i in range(layers - 2)), "head"]
    lines: list[dict[str, Any]] = [
        {
            "kind": "config",
            "method": method,
            "replicas": replicas,
            "layers": names,
            "sync_every": every,
            "warmup_steps": 2 * every,
        }
    ]
    index = 0
    for step in range(1, steps + 1):
        tokens, value = step * 8192, loss + 3.5 * math.exp(-step / 60)
        lines.append(
            {
                "kind": "train",
                "step": step,
                "tokens": tokens,
                "loss": value + rng.gauss(0, 0.08),
                "lr": 1e-3,
                "tokens_per_s": 9000.0 + rng.gauss(0, 200),
                "seconds": step * 0.9,
                "replica": 0,
            }
        )
        if step % 32 == 0:
            lines.append({"kind": "val", "step": step, "tokens": tokens, "val_loss": value + 0.05})
        if method == "edit" and step > 2 * every and step % every == 0:
            bad = (noisy or {}).get(index, set())
            lines += [sync_line(rng, index, name, replicas, step, bad) for name in names]
            index += 1
    if end == "summary":
        sent = 2 * index * layers * 1_900_000 if method == "edit" else steps * 13_500_000
        lines.append(
            {
                "kind": "summary",
                "method": method,
                "replicas": replicas,
                "steps": steps,
                "tokens": steps * 8192,
                "final_val_loss": loss + 0.06,
                "tokens_per_s": 9100.0,
                "bytes_sent_per_rank": sent,
                "syncs": index,
                "sync_seconds": 2.0,
                "exposed_sync_seconds": 0.3,
            }
        )
    text = "\n".join(json.dumps(line) for line in lines) + "\n"
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text(text[:-40] if end == "broken" else text)
    return folder


def test_picture_and_account_of_two_runs(tmp_path: Path) -> None:
    """A synchronous and an EDiT run give one picture of 1600 pixels and plain values."""
    sync = write_run(tmp_path / "demo" / "sync", "sync")
    edit = write_run(tmp_path / "demo" / "edit", noisy={12: {2}, 13: {2}})
    out = tmp_path / "new" / "report.png"
    result = report([sync, edit], out)
    assert result["pictures"] == [str(out)]
    data = out.read_bytes()
    assert data.startswith(PNG) and int.from_bytes(data[16:20], "big") == 1600
    first, second = result["runs"]
    assert (first["name"], first["syncs"], first["flags"]) == ("sync", 0, {})
    assert first["bytes_sent_per_rank"] == 320 * 13_500_000
    assert second["finished"] and second["final_val_loss"] == pytest.approx(2.06)
    assert set(second["flags"]) == {"replica 2"} and second["flags"]["replica 2"]["head"] == 2
    assert second["never_flagged"] == {"replica 2": ["layers.0"]}
    json.dumps(result, allow_nan=False)


def test_several_runs_with_syncs_get_a_picture_each(tmp_path: Path) -> None:
    """Of two EDiT runs the comparison comes first; each run's syncs have their own file."""
    runs = [write_run(tmp_path / name / "edit", seed=i, steps=96) for i, name in enumerate("ab")]
    result = report(runs, tmp_path / "r.png")
    assert [Path(p).name for p in result["pictures"]] == ["r.png", "r-a-edit.png", "r-b-edit.png"]
    assert all(Path(p).read_bytes().startswith(PNG) for p in result["pictures"])


@pytest.mark.parametrize("end", ["open", "broken"])
def test_unfinished_runs_are_drawn(tmp_path: Path, end: str) -> None:
    """A running or killed training lacks its summary, may end inside a line: drawn, and said."""
    result = report([write_run(tmp_path / "x", end=end, steps=100)], tmp_path / "r.svg")
    (entry,) = result["runs"]
    assert not entry["finished"] and entry["truncated_last_line"] == (end == "broken")
    assert entry["steps"] == (99 if end == "broken" else 100) and entry["broken_lines"] == []
    assert entry["bytes_sent_per_rank"] == sum(
        r["bytes_sent"] for r in read_run(tmp_path / "x").sync
    )


def test_not_finite_values_are_shown_not_fatal(tmp_path: Path) -> None:
    """NaN and infinity, all flagged, a skipped layer and an idle replica can be drawn."""
    run = write_run(tmp_path / "x", steps=80)
    path = run / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    syncs = [r for r in records if r["kind"] == "sync"]
    syncs[0].update(
        norms=[math.nan, math.inf, 1.0, 0.0],
        flags=[True, True, False, False],
        idle=[False] * 3 + [True],
    )
    syncs[1].update(
        norms=[math.nan] * 4, flags=[True] * 4, weights=[0.0] * 4, skip=True, clip=math.nan
    )
    next(r for r in records if r["kind"] == "train")["loss"] = math.inf
    records[-1]["final_val_loss"] = math.nan
    path.write_text("\n".join(json.dumps(r) for r in records))
    (entry,) = report([run], tmp_path / "r.png")["runs"]
    assert entry["skipped_layer_syncs"] == 1 and entry["final_val_loss"] is None
    assert entry["flags"]["replica 0"]["embed"] == 1


def test_a_broken_line_in_the_middle_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unreadable lines other than the last are named with their line numbers."""
    run = write_run(tmp_path / "x", "sync", steps=10)
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[3] = lines[3][:20]
    path.write_text("\n".join(lines))
    assert read_run(run).broken_lines == [4]
    assert main([str(run), "-o", str(tmp_path / "r.png")]) == 0
    assert "unreadable lines [4]" in capsys.readouterr().out


def test_command_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """--json prints the same values as `report` returns."""
    run = write_run(tmp_path / "x", steps=64)
    assert main([str(run), "-o", str(tmp_path / "r.png"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["name"] == "x"


def test_bad_input_gets_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No metrics, an empty file, an unknown format, a run given twice: one line, exit 2."""
    empty = tmp_path / "empty"
    empty.mkdir()
    run = write_run(tmp_path / "run", "sync", steps=10)
    cases = [
        ([str(empty)], "metrics.jsonl"),
        ([str(run), str(run)], "given twice"),
        ([str(run), "-o", str(tmp_path / "r.gif2")], "gif2"),
    ]
    for argv, word in cases:
        assert main(["-o", str(tmp_path / "r.png"), *argv]) == 2
        error = capsys.readouterr().err
        assert word in error and error.count("\n") == 1
    (empty / "metrics.jsonl").write_text("")
    with pytest.raises(ReportError, match="no train, val or sync line"):
        report([empty], tmp_path / "r.png")


def test_without_matplotlib_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """matplotlib is optional: without it a sentence says what to install."""
    run = write_run(tmp_path / "x", "sync", steps=10)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([str(run), "-o", str(tmp_path / "r.png")]) == 2
    error = capsys.readouterr().err
    assert "pip install matplotlib" in error and error.count("\n") == 1


def test_many_layers_show_the_flagged_ones(tmp_path: Path) -> None:
    """Of 40 layers 12 norm panels are drawn, the most flagged among them, in model order."""
    run = read_run(write_run(tmp_path / "x", layers=40, replicas=3, steps=96))
    target = next(r for r in run.sync if r["layer"] == "layers.17")
    target["flags"][1] = True
    shown = shown_layers(run)
    assert (
        len(shown) == MAX_LAYERS
        and "layers.17" in shown
        and shown == [x for x in run.layers if x in shown]
    )
    assert flag_count(run)["layers.17", 1] == 1


def axes() -> Any:
    from matplotlib.figure import Figure

    return Figure().add_subplot()


def test_a_single_point_is_visible(tmp_path: Path) -> None:
    """A line of one point has a marker, a longer one has none."""
    run = read_run(write_run(tmp_path / "x"))
    everything, indices = run.sync, run.sync_indices
    for count, marker in ((2, "None"), (1, "o")):
        run.sync = [r for r in everything if r["sync_index"] in indices[:count]]
        for draw in (draw_weights, draw_clip):
            draw(ax := axes(), run)
            assert ax.lines[0].get_marker() == marker
    run.train, run.val = run.train[:1], []
    draw_loss(ax := axes(), [run])
    assert [line.get_marker() for line in ax.lines] == ["."]


def test_few_training_losses_are_not_smoothed(tmp_path: Path) -> None:
    """The title says whether the training curve is smoothed."""
    run = read_run(write_run(tmp_path / "x"))
    for count in (SMOOTHED_FROM - 1, SMOOTHED_FROM):
        run.train = [{"tokens": i, "loss": 2.0 + (i == 0)} for i in range(count)]
        draw_loss(ax := axes(), [run])
        smoothed = count == SMOOTHED_FROM
        assert ("smoothed" in ax.get_title()) == smoothed
        assert (ax.lines[0].get_ydata()[0] != 3.0) == smoothed


def test_speeds_of_one_method_are_not_compared(tmp_path: Path) -> None:
    """The ratio of two speeds is printed for runs of different methods only."""
    a = read_run(write_run(tmp_path / "a", "edit"))
    for method, compared in (("edit", False), ("sync", True)):
        b = read_run(write_run(tmp_path / method, method))
        draw_bars(ax := axes(), [a, b], [1.0, 2.0], "speed", str, better="faster")
        assert any("2.0x faster" in text.get_text() for text in ax.texts) == compared


def test_names_and_smoothing(tmp_path: Path) -> None:
    """Runs are told apart by as many folders as needed; smoothing ignores what is not finite."""
    a, b = (write_run(tmp_path / x / "edit", "sync", steps=4) for x in "ab")
    assert short_names([a, b]) == ["a/edit", "b/edit"]
    assert smooth([1.0, math.nan, 3.0]) == [1.0, 2.0, 3.0]
    assert math.isnan(bytes_sent(read_run(write_run(tmp_path / "c", "sync", steps=4, end="open"))))
    assert report_module.account(read_run(a))["method"] == "sync"
