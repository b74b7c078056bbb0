"""Random methods, settings, numbers of steps and of replicas, against the references.

Hypothesis draws the cases, always the same ones; `make test-long` runs more of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import method_references as ref
import pytest
import shards
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from method_cases import INNER, PLAIN, SHARDED
from ranks import Ranks
from torch import Tensor

import edit_ext

DEADLINE = 60.0  # seconds for a case; they take one or two


@dataclass(frozen=True)
class Case:
    """count: shards of FSDP2, 0 for a plain model."""

    method: str
    fields: tuple[tuple[str, Any], ...]
    inner: str
    replicas: int
    count: int
    steps: int


def run(case: Case) -> dict[str, Tensor]:
    mesh = shards.mesh_of(case.replicas, case.count or 1)
    model = shards.shard(shards.make_net(), mesh) if case.count else PLAIN.make()
    optimizer = INNER[case.inner][0](model.parameters())
    config = getattr(edit_ext, case.method)(timeout=20.0, **dict(case.fields))
    with edit_ext.attach(model, optimizer, config, mesh=mesh["replica"]) as sync:
        for t in range(case.steps):
            shards.train_step(model, optimizer, mesh, t)
        sync.flush()
    return shards.full(model)


def rule(case: Case) -> ref.Rule:
    """The reference of a case."""
    kind, f = SHARDED if case.count else PLAIN, dict(case.fields)
    start = kind.start()
    if case.method == "StreamingDiLoCo":
        cut = kind.cut(f["fragments"], f.get("pattern") != "sequential")
        return ref.Streaming(
            start, f["sync_every"], f["outer_lr"], 0.9, cut, f["delay"], f["alpha"]
        )
    if case.method == "CO2":
        gap = f["penalty"] if f["staleness"] == "gap" else 0.0
        return ref.CO2(
            start, f["sync_every"], f["outer_lr"], 0.5, f["clip_value"], kind.layer_of,
            constant=f["penalty"], gap=gap,
        )  # fmt: skip
    if case.method == "DESLOC":
        every = {"x": f["param_every"], **f["state_every"]}
        mu = 0.9 if f["outer"] == "nesterov" else 0.0
        return ref.Clocks(
            start, ref.periods(every), f["state_every"], f["order"] == "before_step",
            f.get("outer_lr", 1.0), mu,
        )  # fmt: skip
    if case.method == "DiLoCo":
        return ref.Outer(
            start, f["sync_every"], f["outer_lr"], 0.9, f["nesterov"], f["warmup_steps"]
        )
    return ref.Reset(start, f["sync_every"], f["reset_step"])


@st.composite
def cases(draw: st.DrawFn) -> Case:
    meshes = [(1, 0), (2, 0), (3, 0), (4, 0), (1, 2), (2, 2), (2, 1)]
    replicas, count = draw(st.sampled_from(meshes))
    method = draw(st.sampled_from(["StreamingDiLoCo", "CO2", "DESLOC", "DiLoCo", "FedAvgReset"]))
    number = st.integers(1, 4)
    fields: dict[str, Any] = {}
    if method == "StreamingDiLoCo":
        fragments = draw(number)
        interval = draw(st.integers(1, 3))
        fields = {
            "fragments": fragments, "sync_every": fragments * interval,
            "delay": draw(st.integers(0, interval - 1)),
            "alpha": draw(st.sampled_from([0.0, 0.5])),
        }  # fmt: skip
        if fragments > 1 and draw(st.booleans()):
            fields["pattern"] = "sequential"
    elif method == "DESLOC":
        fields = {
            "param_every": draw(number),
            "order": draw(st.sampled_from(["after_step", "before_step"])),
            "state_every": {"exp_avg": draw(number), "exp_avg_sq": draw(number)},
            "outer": draw(st.sampled_from(["replace", "nesterov"])),
        }  # fmt: skip
    else:
        fields = {"sync_every": draw(number)}
    if method in ("StreamingDiLoCo", "CO2", "DiLoCo") or fields.get("outer") == "nesterov":
        fields["outer_lr"] = draw(st.sampled_from([0.4, 1.0]))
        fields["momentum"] = draw(st.sampled_from(["sharded", "replicated"]))
    if method == "CO2":
        fields["clip_value"] = draw(st.sampled_from([None, 0.02]))
        fields["staleness"] = draw(st.sampled_from(["constant", "gap"]))
        fields["penalty"] = 1.5
    if method == "DiLoCo":
        fields |= {"nesterov": draw(st.booleans()), "warmup_steps": draw(st.integers(0, 2))}
    if method == "FedAvgReset":
        fields["reset_step"] = draw(st.booleans())
    if method != "DESLOC" or fields["order"] == "after_step":
        fields["granularity"] = draw(st.sampled_from(["layer", "model"]))
    steps = fields.get("warmup_steps", 0) + draw(st.integers(0, 9))
    return Case(method, tuple(fields.items()), "adam", replicas, count, steps)


def check(ranks: Ranks, case: Case) -> None:
    results = ranks.run(case.replicas * (case.count or 1), run, case, seconds=DEADLINE)
    kind = SHARDED if case.count else PLAIN
    truth = ref.train(
        kind.start(), kind.grad, case.replicas, case.steps, INNER[case.inner][1], rule(case)
    )
    for rank, weights in enumerate(results):
        for name, value in weights.items():
            torch.testing.assert_close(value.double(), truth.final[0][name], rtol=0, atol=3e-6)
            assert torch.equal(value, results[0][name]), (rank, name)


def drawn(ranks: Ranks, count: int) -> None:
    found: list[Case] = []

    @settings(
        max_examples=count, deadline=None, database=None, derandomize=True,
        phases=[Phase.generate], suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(cases())
    def each(case: Case) -> None:
        found.append(case)
        check(ranks, case)

    each()
    assert len({case.method for case in found}) == 5, found


@pytest.mark.timeout(20 * DEADLINE)
def test_random_methods(ranks: Ranks) -> None:
    """Twenty cases."""
    drawn(ranks, 20)


@pytest.mark.slow
@pytest.mark.timeout(100 * DEADLINE)
def test_more_random_methods(ranks: Ranks) -> None:
    """A hundred."""
    drawn(ranks, 100)
