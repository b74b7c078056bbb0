"""The overlap benchmark on a CPU: it syncs what it says, and adds up spans rightly."""

from __future__ import annotations

import doctest
import json
from pathlib import Path

import pytest
import torch

from edit_ext.bench import overlap, spans
from edit_ext.bench.overlap import Bench, Reading, Size

TINY = Size(gemm=16, gemms=2, layers=3, params=300)


class Told:
    """Stands for a layer whose sync took what a test says."""

    def __init__(self, seconds: float, skip: bool = False) -> None:
        self.told = {"exchange_seconds": seconds, "skip": skip, "flags": [False]}

    def stats(self) -> dict[str, object]:
        return {**self.told, "begin_seconds": 0.5, "write_back_seconds": 0.25}


def bench_told(*layers: Told) -> Bench:
    bench = Bench(TINY, torch.device("cpu"))
    bench.layers = list(layers)  # type: ignore[assignment]
    return bench


def test_the_program_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sizes come from the command line; bytes are the ledger's; nothing is said of a GPU."""
    where = tmp_path / "overlap.json"
    sizes = ["--gemm", "16", "--gemms", "2", "--layers", "3", "--params", "300"]
    assert overlap.main([*sizes, "--repeats", "3", "--json", str(where)]) == 0
    found = json.loads(where.read_text())
    assert found["sync_bytes"] == 48 * 900 and found["side_bytes"] == 28 * 900
    assert found["bytes_sent"] == 0 and found["repeats"] == 3
    assert found["host_syncs"] is None and found["machine"]["device"] == "cpu"
    assert 0 < found["overlap"] <= 1 and found["side_seconds"] > 0
    assert all(0 < t["p10"] <= t["median"] <= t["p90"] for t in found["gemm_seconds"].values())
    said = capsys.readouterr().out
    assert "one CPU does both" in said and "goal" not in said


def test_each_run_is_a_sync_of_every_layer() -> None:
    """Anchors follow the local steps in runs with a sync, and in no others."""
    bench = Bench(TINY, torch.device("cpu"))
    for sync in (False, True):
        before = [layer.anchor.clone() for layer in bench.layers]
        bench.reset()
        bench.run(sync)
        after = [layer.anchor for layer in bench.layers]
        assert [not torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [sync] * 3


def test_work_outside_the_spans_is_no_overlap() -> None:
    """Side work that runs on after its span counts as far as the next spans reach."""
    bench = bench_told(Told(1.5), Told(1.0), Told(4.0))
    spans_of_gemms = [(0.0, 1.0), (2.0, 3.0), (4.0, 5.0)]
    found = bench.with_side(Reading(3.0, 1.0, True), spans_of_gemms)
    assert (found.side, found.inside) == (6.5, 3.0)
    assert (found.begin, found.write_back) == (1.5, 0.75)


def test_a_skipped_sync_is_an_error() -> None:
    """A sync that moved fewer bytes than counted gives no figure."""
    with pytest.raises(RuntimeError, match="a layer was skipped"):
        bench_told(Told(1.0, skip=True)).with_side(Reading(1.0, 1.0, True), [(0.0, 1.0)])


def test_arithmetic_of_spans() -> None:
    """What the docstrings show is what happens."""
    result = doctest.testmod(spans)
    assert result.attempted > 1 and result.failed == 0
