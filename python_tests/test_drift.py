"""How far optimizer states drift, as metrics tell it, and periods that follow."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from method_cases import CASES
from nets import make_net
from ranks import Ranks
from test_methods_state import attached, train
from test_stacked import batches, make_loss_net
from torch import Tensor

import edit_ext
from edit_ext.bench.stacked import Replicas
from edit_ext.drift import SAMPLE, Samples, next_period
from edit_ext.recipe import Track
from edit_ext.schedule import Clock

STEPS = 14
STATES = ("exp_avg", "exp_avg_sq")


def stacked(count: int = 2, **settings: Any) -> Replicas:
    periods = {"exp_avg": 3, "exp_avg_sq": 4, **settings.pop("state_every", {})}
    method = edit_ext.DESLOC(param_every=2, state_every=periods, **settings)
    return Replicas(
        make_loss_net, lambda net: torch.optim.Adam(net.parameters(), lr=0.01), method, count
    )


def head_states(group: Replicas, key: str) -> list[list[Tensor]]:
    """Of each replica, the state of the layer `head`."""
    return [
        [r.optimizer.state[p][key].clone() for p in r.model.head.parameters()]
        for r in group.replicas
    ]


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    return math.sqrt(sum(float((x - y).double().square().sum()) for x, y in zip(a, b, strict=True)))


def size(a: list[Tensor]) -> float:
    return distance(a, [torch.zeros_like(x) for x in a])


@pytest.mark.parametrize("count", [2, 4])
def test_metrics_tell_the_drift(count: int) -> None:
    """`drift` of a window is the plain |now - then| / |then|, `apart` the plain distance from the
    mean; the first sync knows no `then`."""
    then: dict[str, list[Tensor]] = {}
    wanted = []
    with stacked(count) as group:
        for t in range(STEPS):
            for key, every in (("exp_avg", 3), ("exp_avg_sq", 4)):
                if t and t % every == 0:
                    each = head_states(group, key)
                    mean = [torch.stack(part).mean(0) for part in zip(*each, strict=True)]
                    moved = distance(each[0], then[key]) / size(then[key]) if key in then else None
                    square = sum(distance(one, mean) ** 2 for one in each) / count
                    wanted.append((f"head: {key}", moved, math.sqrt(square) / size(mean)))
                    then[key] = mean
            group.step(batches(count, t))
        found = [
            (record["layer"], record["drift"], record["apart"])
            for record in group.replicas[0].syncs.metrics.drain()
            if record["layer"].startswith("head: ")
        ]
    assert [layer for layer, *_ in found] == [layer for layer, *_ in wanted]
    for (_, drift, apart), (_, moved, far) in zip(found, wanted, strict=True):
        assert apart == pytest.approx(far, rel=1e-4)
        assert drift == (None if moved is None else pytest.approx(moved, rel=1e-4))
    assert any(moved for _, moved, _ in wanted)


def test_weights_have_no_drift() -> None:
    """Layers of parameters are told by their norms alone."""
    with stacked() as group:
        for t in range(4):
            group.step(batches(2, t))
        records = group.replicas[0].syncs.metrics.drain()
    assert all(("drift" in r) == (": exp_avg" in r["layer"]) for r in records) and records


def test_sample_is_bounded() -> None:
    """A large state is sampled evenly, a small one is taken whole, in any order of dimensions."""
    large = torch.zeros(1000, 300).t()
    samples = Samples()
    samples.keep(0, [large, torch.zeros(5)])
    assert SAMPLE / 2 < len(samples._then[0]) <= SAMPLE + 2
    large += torch.randn(300, 1000)
    assert samples.moved(0, [large, torch.zeros(5)]) == math.inf  # from zero
    samples.keep(0, [large])
    assert samples.moved(0, [large * 1.5]).item() == pytest.approx(0.5)
    assert samples.moved(1, [large]) is None and samples.moved(0, [large[:3]]) is None


@pytest.mark.parametrize(("target", "longer"), [(1e-4, False), (1e4, True)])
def test_direction_and_bounds(target: float, longer: bool) -> None:
    """A target that is never reached stretches periods to 16 times the first, one that always is
    shrinks them to `param_every`; at most by 2 at a time; alike on all replicas."""
    with stacked(state_every={"exp_avg": 4, "exp_avg_sq": 4}, adaptive=target) as group:
        seen = []
        for t in range(60):
            group.step(batches(2, t))
            clocks = [replica.clock for replica in group.replicas]
            assert clocks[0].periods == clocks[1].periods
            seen.append(clocks[0].every(1))
    changes = [now / before for before, now in itertools.pairwise(seen)]
    assert seen[0] == 4 and all(0.5 <= change <= 2.0 for change in changes)
    assert seen[-1] == (32 if longer else 2)  # 4, 8, 16, 32: the third average is after step 28
    track = Track(name="s", every=4, target=1e4, shortest=2, longest=64)
    assert next_period(track, 64, 64, 0.1) == 64


@pytest.mark.parametrize("first", [2, 4, 8])
@pytest.mark.parametrize("target", [0.1, 0.3, 0.6])
def test_windows_are_whole(first: int, target: float) -> None:
    """No window is shorter than `param_every`, also where states and weights are due together, and
    each is from half to twice the period told before."""
    with stacked(state_every={"exp_avg": first, "exp_avg_sq": 64}, adaptive=target) as group:
        for t in range(60):
            group.step(batches(2, t))
        records = group.replicas[0].syncs.metrics.drain()
    found = [
        (record["step"], record["steps"][0], record["every"])
        for record in records
        if record["layer"] == "head: exp_avg"
    ]
    assert [step for step, *_ in found] == list(itertools.accumulate(w for _, w, _ in found))
    assert all(2 <= window <= max(2, 16 * first) for _, window, _ in found)
    for (_, _, before), (_, window, _) in itertools.pairwise(found):
        assert round(before / 2) <= window <= 2 * before


def test_the_period_follows_the_window_that_was_measured() -> None:
    """Half the target in a window of 2: 4 steps reach it, also if the period is 4 already; by a
    factor of 2 at most from the period."""
    track = Track(name="s", every=2, target=0.5, shortest=2, longest=64)
    assert [next_period(track, every, 2, 0.25) for every in (2, 3, 4, 8, 16)] == [4, 4, 4, 4, 8]
    assert next_period(track, 16, 32, 0.5) == 32


def test_adapt_on_the_clock() -> None:
    """A period taken up where its step is reached joins that sync; where the old one has come at
    the same step, the new one counts from there; else from the last sync."""
    method = edit_ext.DESLOC(param_every=2, state_every={"s": 4, "other": 2}, adaptive=0.5)
    clock = Clock(method.recipe())
    for at, drift, armed, periods in (
        (4, 1.0, {0, 1, 2}, {1: (2, 6)}),  # after 4 and 2: due at 6, which is here
        (4, 0.25, {0, 2}, {1: (8, 4)}),  # after 4 and 8
        (2, 0.25, {0, 1}, {1: (8, 6)}),  # the old period has brought it to 6
    ):
        clock.step, clock.periods = 6, {}
        clock.armed = clock.due(6) if at == 4 else {0, 1}
        clock.measured = {1: (at, 4.0, drift)}
        clock.adapt()
        assert (clock.armed, clock.periods, clock.measured) == (armed, periods, {})


def test_explain_counts_samples() -> None:
    """What the samples take is told: 4 bytes an element."""
    samples = Samples()
    samples.keep(0, [torch.ones(100, dtype=torch.bfloat16), torch.ones(20, 5)])
    assert samples.bytes == 800


def explained() -> tuple[str, str]:
    run = attached("DESLOC-adaptive")
    sync = run[2]
    before = sync.explain(steps=8)
    train(run, 0, 9)
    after = sync.explain(steps=8)
    sync.detach()
    return before, after


def test_explain(ranks: Ranks) -> None:
    """explain() tells the present period and what it follows."""
    before, after = ranks.run(2, explained)[0]
    assert "syncs of exp_avg_sq: a window of 4 steps now, so that replicas come apart by 0.15" in (
        before
    )
    assert "so that replicas come apart by 0.15" in after


def unequal(steps: list[int]) -> tuple[int, dict[str, Tensor]]:
    import torch.distributed as dist

    run = attached("DESLOC-adaptive")
    train(run, 0, steps[dist.get_rank()])
    run[2].flush()
    weights = {name: p.detach().clone() for name, p in run[0].named_parameters()}
    index = run[2].sync_index
    run[2].detach()
    return index, weights


def joined() -> list[tuple[dict[int, tuple[int, int]], dict[str, Tensor]]]:
    """Two replicas become three; periods then and at the end, and the weights."""
    import torch.distributed as dist

    model = make_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    method = CASES["DESLOC-adaptive"][0]
    here = [0, 1] if dist.get_rank() < 2 else [0, 1, 2]
    start = "check" if dist.get_rank() < 2 else "join"
    run = (model, optimizer, edit_ext.attach(model, optimizer, method, group=here, start=start))
    if start == "check":
        train(run, 0, 9)
        run[2].resize([0, 1, 2])
    seen = []
    for first, last in ((9, 9), (9, 25)):
        train(run, first, last)
        if last == 25:
            run[2].flush()
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        seen.append((dict(run[2]._engine.clock.periods), weights))
    run[2].detach()
    return seen


@pytest.mark.timeout(60)
def test_a_replica_that_joins(ranks: Ranks) -> None:
    """It has the periods of the others, and goes on with the same syncs."""
    first, *others = ranks.run(3, joined)
    assert first[0][0] and first[0][0] != {1: (2, 0), 2: (4, 0)}
    for other in others:
        assert [periods for periods, _ in other] == [periods for periods, _ in first]
        assert all(torch.equal(other[1][1][name], w) for name, w in first[1][1].items())


@pytest.mark.timeout(60)
def test_unequal_steps(ranks: Ranks) -> None:
    """Replicas with unequal numbers of steps end together, with the same syncs and weights."""
    (one, first), (two, second) = ranks.run(2, unequal, [5, 13])
    assert one == two
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"adaptive": 0.0}, ValueError, "adaptive must be above 0"),
        ({"adaptive": math.inf}, ValueError, "adaptive must be above 0 and finite"),
        ({"adaptive": "0.3"}, TypeError, "adaptive must be a number or None"),
        ({"adaptive": 0.3, "schedule": "bernoulli"}, ValueError, "no effect with schedule="),
        ({"adaptive": 0.3, "state_every": math.inf}, ValueError, "no state is averaged"),
        ({"adaptive": 0.3, "state_every": {}}, ValueError, "no state is averaged"),
    ],
)
def test_bad_input(settings: dict[str, Any], error: type[Exception], words: str) -> None:
    """A target that cannot be, or has no effect, is refused in a sentence."""
    with pytest.raises(error, match=words):
        edit_ext.DESLOC(**settings)


def test_a_state_that_never_syncs_stays_so() -> None:
    """math.inf for one state: its period does not follow anything."""
    method = edit_ext.DESLOC(state_every={"exp_avg": 96, "exp_avg_sq": math.inf}, adaptive=0.3)
    assert [track.target for track in method.recipe().tracks] == [None, 0.3, None]
