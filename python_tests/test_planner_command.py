"""What `edit-ext plan` takes, refuses and writes."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edit_ext import cli
from edit_ext.planner import DEFAULTS, Job, Schedule, scheduled
from edit_ext.planner_units import PlanError, bandwidth, count, seconds

JOB = Job(params=1e9, replicas=4, bandwidth=1e9, latency=0.1, step_time=3.0, layers=10)
WEIGHTS = Schedule(method="edit", every=2)
ASKED = ["plan", "--params", "7e9", "--replicas", "8", "--link", "10gbit", "--latency", "30ms",
         "--step-time", "2.5"]  # fmt: skip
KEYS = ["method", "bytes_per_step", "reduction_vs_ddp", "seconds_per_step",
        "exposed_seconds_per_step", "utilisation", "state_bytes_per_rank"]  # fmt: skip


def written(capsys: pytest.CaptureFixture[str], *options: str) -> dict[str, Any]:
    """What --json - prints."""
    assert cli.main([*ASKED, *options, "--json", "-"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "text",
    ["", "fast", "10.5gbit/h", "-1gbit", "0", "nan", "inf", "1e999", "10 gibit", "1GB/m", "g",
     "1e9x", "10gbit 5"],
)  # fmt: skip
def test_odd_links_are_refused(text: str) -> None:
    """One sentence that names the argument, the value and what was expected."""
    with pytest.raises(
        PlanError, match=r"^--link must be a rate above 0 in bit/s, such as .*, but"
    ):
        bandwidth(text, "--link")


def test_odd_times_and_counts_are_refused() -> None:
    """As for links."""
    for text in ("", "soon", "-1", "0", "nan", "inf", "3 days", "30MS", "1e999"):
        with pytest.raises(
            PlanError, match=r"^--step-time must be a time above 0, such as .*, but"
        ):
            seconds(text, "--step-time")
    assert seconds("0", "--latency", zero=True) == 0 and seconds("1.5min", "t") == 90
    for text in ("", "some", "-1", "0", "2.5", "nan", "7q", "1e999"):
        with pytest.raises(PlanError, match=r"^--params must be a whole number of at least 1"):
            count(text, "--params")
    assert count("0", "--delay", zero=True) == 0 and count("1.7B", "n") == 1_700_000_000


@pytest.mark.parametrize(
    ("text", "bits"),
    [("10gbit", 1e10), ("800mbit", 8e8), ("1e9", 1e9), ("10G", 1e10), ("10Gbps", 1e10),
     ("2.5 Gb/s", 2.5e9), ("64kbit/s", 64e3), ("1GB/s", 8e9), ("12.5MBps", 1e8),
     ("3 bytes/s", 24), ("1E6", 1e6), ("1tbit", 1e12)],
)  # fmt: skip
def test_links(text: str, bits: float) -> None:
    """Bits unless bytes are meant."""
    assert bandwidth(text) == pytest.approx(bits / 8)


@pytest.mark.parametrize(
    ("field", "value"),
    [("params", 0), ("replicas", 1), ("bandwidth", 0.0), ("bandwidth", math.inf), ("latency", -1.0),
     ("latency", math.nan), ("step_time", math.nan), ("shards", 0), ("layers", 0), ("target", 1.0),
     ("wire", "int8"), ("prefetch", 0)],
)  # fmt: skip
def test_jobs_that_cannot_be(field: str, value: object) -> None:
    """The error names the field and its value."""
    with pytest.raises(PlanError, match=rf"^{field} must be .*{value}"):
        replace(JOB, **{field: value})  # type: ignore[arg-type]


def test_schedules_that_cannot_be() -> None:
    """The error names the field and its value."""
    for fields, said in (
        ({"every": 0}, "every must be at least 1 and finite, but is 0"),
        ({"every": math.inf}, "every must be at least 1 and finite, but is inf"),
        ({"states": (0.5,)}, "states must be at least 1, but is 0.5"),
        ({"states": (2.5,)}, "every and states must be whole steps, but one is 2.5"),
        ({"fragments": 3}, "every must be a multiple of fragments=3, but is 2"),
        ({"delay": 2}, "delay must be below every / fragments = 2 steps, but is 2"),
    ):
        with pytest.raises(PlanError, match=f"^{said}"):
            replace(WEIGHTS, **fields)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"^method must be one of synchronous, .* but is 'sgd'"):
        scheduled("sgd", JOB)


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Inputs, a row for each method in both models, smallest periods; and a table for people."""
    out = tmp_path / "new" / "plan.json"
    assert cli.main([*ASKED, "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert list(found) == ["inputs", "overlap", "no_overlap", "smallest_periods"]
    given = {"params": 7e9, "replicas": 8, "bandwidth": 1.25e9, "latency": 0.03, "step_time": 2.5}
    assert given.items() <= found["inputs"].items()
    for kind in ("overlap", "no_overlap"):
        assert [row["method"] for row in found[kind]] == list(DEFAULTS)
        assert all(list(row) == KEYS for row in found[kind])
    assert found["smallest_periods"][0] == {
        "method": "synchronous", "overlap": None, "no_overlap": None
    }  # fmt: skip
    edit = next(row for row in found["no_overlap"] if row["method"] == "edit")
    # (2 * 28e9 * 7/8 / 1.25e9 + 0.03) s every 128 steps
    assert edit["exposed_seconds_per_step"] == pytest.approx((39.2 + 0.03) / 128)
    assert edit["bytes_per_step"] == 49e9 / 128 and edit["reduction_vs_ddp"] == 128
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("7,000,000,000 parameters in 32 layers, 8 replicas, 10 Gbit/s")
    assert [line.split()[0] for line in said[4:]] == list(DEFAULTS)


def test_methods_and_periods(capsys: pytest.CaptureFixture[str]) -> None:
    """Methods in the order asked for, with the periods asked for."""
    found = written(
        capsys, "--method", "edit,des-loc", "--method", "a-edit", "--method", "edit",
        "--sync-every", "64", "--param-every", "256", "--sync-seconds", "5min",
    )  # fmt: skip
    told = [(s["method"], s["every"], s["states"]) for s in found["inputs"]["schedules"]]
    assert told == [("edit", 64, []), ("des-loc", 256, [768, 1536]), ("a-edit", 120, [])]
    assert found["overlap"][1]["reduction_vs_ddp"] == pytest.approx(512 / 3)
    found = written(
        capsys, "--method", "des-loc,streaming-diloco,local-adam", "--state-every", "100",
        "--sync-every", "40", "--fragments", "2", "--delay", "0",
    )  # fmt: skip
    described = found["inputs"]["schedules"]
    assert [s["every"] for s in described] == [32, 40, 40]
    assert [s["states"] for s in described] == [[100], [], [40, 40]]
    assert (described[1]["fragments"], described[1]["delay"]) == (2, 0)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--link", "fast"], "--link must be a rate above 0 in bit/s"),
        (["--latency", "-1"], "--latency must be a time of at least 0"),
        (["--step-time", "0"], "--step-time must be a time above 0"),
        (["--params", "many"], "--params must be a whole number of at least 1"),
        (["--replicas", "1"], "replicas must be at least 2 and finite, but is 1"),
        (["--shards", "0"], "--shards must be a whole number of at least 1"),
        (["--target-utilisation", "1"], "--target-utilisation must be a number above 0 and below"),
        (["--target-utilisation", "most"], "--target-utilisation must be a number above 0"),
        (["--method", "sgd"], "method must be one of synchronous, post-local-sgd"),
        (["--method", "edit,"], "method must be one of synchronous"),
        (["--method", "streaming-diloco", "--sync-every", "50"], "streaming-diloco: every must be"),
        (["--method", "streaming-diloco", "--delay", "x"], "--delay must be a whole number of at"),
        (["--method", "des-loc", "--state-every", "3,,4"], "--state-every must be a whole number"),
        (["--method", "des-loc", "--sync-every", "9"], "--sync-every has no effect on des-loc: it"),
        (
            ["--method", "edit", "--delay", "9"],
            "--delay has no effect on edit: it is for streaming",
        ),
        (["--sync-every", "none"], "--sync-every must be a whole number of at least 1"),
    ],
)
def test_refusals(options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One sentence on stderr that names the option, its value and what was expected; code 2."""
    assert cli.main([*ASKED, *options]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"edit-ext plan: {said}") and err.count("\n") == 1


def test_a_method_that_cannot_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    """When none was named, a period that one of them cannot have does not stop the rest."""
    assert cli.main([*ASKED, "--sync-every", "50"]) == 0
    out, err = capsys.readouterr()
    assert "streaming-diloco" not in out and "diloco" in out
    assert err == "streaming-diloco: every must be a multiple of fragments=4, but is 50: left out\n"


def test_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A picture of its suffix's format; an unknown one is refused."""
    pytest.importorskip("matplotlib", reason="needs matplotlib")
    out = tmp_path / "new" / "plan.png"
    assert cli.main([*ASKED, "--picture", str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert capsys.readouterr().out.endswith(f"picture: {out}\n")
    assert cli.main([*ASKED, "--picture", str(tmp_path / "plan.doc")]) == 2
    assert "edit-ext plan: --picture" in capsys.readouterr().err


def test_without_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan is there all the same; the picture is refused in a sentence."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main([*ASKED]) == 0
    assert cli.main([*ASKED, "--picture", str(tmp_path / "plan.png")]) == 2
    err = capsys.readouterr().err
    assert err.startswith("edit-ext plan: --picture draws with matplotlib, which is not installed")
