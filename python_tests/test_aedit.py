"""AEDiT: syncs by the clock, of replicas that make unequal numbers of steps; clocks are made up."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import nets
import pytest
import shards
import torch
import torch.distributed as dist
from nets import batch, make_net, plain, plain_timed, same, sgd, train_step, values
from paced import Paced, until
from ranks import Ranks
from simulate import Trajectory, simulate
from torch import Tensor, nn

import edit_ext

RULES: dict[str, Any] = {
    "sync_seconds": 1000.0,
    "clip_norm": 0.2,
    "ema_warmup": 2,
    "ema_alpha": 0.2,
    "weighting": "steps",
}
# The last window ends with the training. Every replica is once the fastest and once the slowest.
WINDOWS = {2: [[3, 2], [5, 2], [2, 6], [2, 3], [3, 2], [1, 2]]}
WINDOWS[3] = [[*row, extra] for row, extra in zip(WINDOWS[2], [4, 2, 3, 7, 2, 3], strict=True)]
LEADERS = {2: [0, 0, 1, 1, 0], 3: [2, 0, 1, 2, 1]}


def sgd_of(params: Any) -> torch.optim.Optimizer:
    """An optimizer without a state, so that nothing else is to be saved."""
    return torch.optim.SGD(params, lr=0.1)


def windows_of(replicas: int, count: int) -> list[list[int]]:
    """With shards one step more, since what their clock decides holds one step later."""
    return [[steps + (count > 1) for steps in row] for row in WINDOWS[replicas]]


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


class Run:
    """One rank's part of a paced training over replicas of `count` shards."""

    def __init__(
        self, replicas: int, count: int, rules: dict[str, Any], make: Any, buffer: bool
    ) -> None:
        self.mesh = shards.mesh_of(replicas, count)
        self.replica = self.mesh["replica"].get_local_rank()
        self.sharded, self.late, self.rules = count > 1, 1 + (count > 1), rules
        model: nn.Module = shards.make_net() if self.sharded else make_net()
        if buffer:
            model.register_buffer("drift", torch.full((3,), float(dist.get_rank())))
        self.model = shards.shard(model, self.mesh) if self.sharded else model
        self.optimizer = make(self.model.parameters())
        config = edit_ext.AEDiT(timeout=30.0, **rules)
        group = {"mesh": self.mesh} if self.sharded else {"group": self.mesh["replica"].get_group()}
        self.sync = edit_ext.attach(self.model, self.optimizer, config, start="broadcast", **group)
        if buffer:
            with torch.no_grad():
                self.model.get_buffer("drift").fill_(float(dist.get_rank()))
        self.windows = windows_of(replicas, count)
        self.pace = Paced(self.sync, self.windows, LEADERS[replicas])
        self.anchors: list[dict[str, Tensor]] = []
        self.mean_steps: list[float] = []
        self.metrics: list[dict[str, Any]] = []

    def step(self, t: int) -> None:
        seen = self.sync.sync_index
        if self.sharded:
            shards.train_step(self.model, self.optimizer, self.mesh, t)
        else:
            train_step(self.model, self.optimizer, self.replica, t)
        if self.sync.sync_index != seen:
            self.note()

    def note(self) -> None:
        with self.sync.anchor_weights():
            self.anchors.append(shards.full(self.model))
        self.mean_steps.append(self.sync.mean_step)
        self.metrics += self.sync.metrics()

    def train(
        self, saved: dict[str, Any] | None, stop: tuple[int, str] | None
    ) -> dict[str, Any] | None:
        """Up to the end; or up to `stop`, a window and where in it, and what is saved there."""
        t, begin = self.rules.get("warmup_steps", 0), (0, 0)
        for early in range(t):
            self.step(early)
        if saved is not None:
            t, begin = saved["t"], saved["begin"]
            self.load(saved)
        for window in range(begin[0], len(self.windows)):
            steps = self.windows[window][self.replica]
            for made in range(begin[1] if window == begin[0] else 0, steps):
                self.pace.before(window, made)
                self.step(t)
                t += 1
                here = {"early": 0, "late": steps - self.late}
                if stop is not None and stop[0] == window and here[stop[1]] == made:
                    return {"t": t, "begin": (window, made + 1), **self.save()}
        return None

    def save(self) -> dict[str, Any]:
        alarm = self.sync._engine.alarm
        assert alarm is not None
        state = self.sync.state_dict()
        assert state["elapsed"] == alarm.elapsed
        return {"sync": state, "weights": [local(p).clone() for p in self.model.parameters()]}

    def load(self, saved: dict[str, Any]) -> None:
        """Into a model that has made no step."""
        alarm = self.sync._engine.alarm
        assert alarm is not None
        self.pace.seconds += 12345.0
        with torch.no_grad():
            for param, value in zip(self.model.parameters(), saved["weights"], strict=True):
                local(param).copy_(value)
        self.sync.load_state_dict(saved["sync"])
        assert alarm.elapsed == saved["sync"]["elapsed"]
        dist.barrier()  # one that goes on early would be heard by another that has not loaded

    def end(self, *, flush: bool) -> dict[str, Any]:
        dist.barrier()  # a flush asks for a sync, which would end the others' last window early
        if flush:
            self.sync.flush()
            self.note()
        self.sync.detach()
        buffers = {name: b.clone() for name, b in self.model.named_buffers()}
        return {
            "anchors": self.anchors,
            "mean_steps": self.mean_steps,
            "metrics": self.metrics,
            "params": shards.full(self.model),
            "buffers": buffers,
        }


def local(param: Tensor) -> Tensor:
    """This rank's part."""
    return getattr(param, "_local_tensor", param).detach()


def run(
    replicas: int,
    count: int,
    rules: dict[str, Any],
    make: Any = adam,
    buffer: bool = False,
    saved: list[Any] | None = None,
    stop: tuple[int, str] | None = None,
) -> dict[str, Any]:
    """A whole training, or a part of it: from what all ranks have saved, or up to `stop`."""
    part = Run(replicas, count, rules, make, buffer)
    state = part.train(None if saved is None else saved[dist.get_rank()], stop)
    return {**part.end(flush=stop is None), "saved": state}


def truth_of(replicas: int, sharded: bool, rules: dict[str, Any], windows: Any) -> Trajectory:
    left_out = ("sync_seconds", "min_steps", "prefetch", "granularity")
    return simulate(
        shards.make_net if sharded else make_net,
        nets.batch,
        nets.loss,
        replicas=replicas,
        windows=windows,
        optimizer=adam,
        layer_of=shards.layer_of if sharded else nets.layer_of,
        anchor_dtype=torch.float32 if rules.get("wire") == "bf16" else torch.float64,
        **{k: v for k, v in rules.items() if k not in left_out},
    )


def decided(metrics: list[dict[str, Any]]) -> list[Any]:
    """What all ranks must have in common."""
    keys = ("layer", "sync_index", "norms", "weights", "flags", "clip", "skip", "void", "steps")
    return [[entry[key] for key in keys] for entry in metrics]


def close(left: dict[str, Tensor], right: dict[str, Tensor], where: Any) -> None:
    for name, value in left.items():
        expected = right[name].double()
        assert (value.double() - expected).abs().max() <= 2e-6 * (1 + expected.abs().max()), where


CASES: dict[str, dict[str, Any]] = {
    "steps": {},
    "softmax": {"weighting": "softmax", "prefetch": 0},
    "warm-up": {"warmup_steps": 3},
    "bf16-wire": {"wire": "bf16", "granularity": "model"},
}


@pytest.mark.parametrize(
    ("replicas", "count", "case"),
    [*((2, 1, case) for case in CASES), (3, 1, "steps"), (2, 2, "steps"), (2, 2, "bf16-wire")],
)
def test_trajectory(ranks: Ranks, replicas: int, count: int, case: str) -> None:
    """Unequal windows, ended by one clock: the simulation's numbers, the same bits on all ranks."""
    rules = {**RULES, **CASES[case]}
    windows = windows_of(replicas, count)
    results = ranks.run(replicas * count, run, replicas, count, rules)
    truth = truth_of(replicas, count > 1, rules, windows)
    for rank, result in enumerate(results):
        assert len(result["anchors"]) == len(truth.syncs) == len(windows)
        for index, (anchors, sync) in enumerate(zip(result["anchors"], truth.syncs, strict=True)):
            assert same(anchors, results[0]["anchors"][index]), (rank, index)
            close(anchors, sync.anchors, (rank, index))
        assert same(result["params"], results[0]["params"]), rank
        assert decided(result["metrics"]) == decided(results[0]["metrics"]), rank
        for entry in result["metrics"]:
            row = windows[entry["sync_index"] - 1]
            assert entry["steps"] == row and not entry["void"] and not any(entry["idle"])
            expected = truth.syncs[entry["sync_index"] - 1].layers[entry["layer"]]
            assert entry["norms"] == pytest.approx(expected.norms, rel=1e-3, abs=1e-6)
            assert entry["weights"] == pytest.approx(expected.weights, rel=1e-3, abs=1e-6)
            if case == "steps" and not any(entry["flags"]):
                assert entry["weights"] == pytest.approx([n / sum(row) for n in row])
        sums = [sum(map(sum, windows[: k + 1])) for k in range(len(windows))]
        warmup = rules.get("warmup_steps", 0)
        assert result["mean_steps"] == [warmup + n / replicas for n in sums]


@pytest.mark.parametrize(("count", "wire"), [(1, "fp32"), (1, "bf16"), (2, "fp32")])
def test_void_windows(ranks: Ranks, count: int, wire: str) -> None:
    """Windows with too few steps: one after the other is void until together they have enough."""
    rules = {**RULES, "min_steps": 8, "wire": wire}
    windows = windows_of(2, count)
    # 5 steps (7 with shards) are too few, 8 are enough, and so are two such windows and the end.
    void = [True, False, False, True, False, False]
    merged = [
        [a + b for a, b in zip(windows[k - 1], row, strict=True)] if k and void[k - 1] else row
        for k, row in enumerate(windows)
        if not void[k]
    ]
    results = ranks.run(2 * count, run, 2, count, rules, adam, True)
    truth = truth_of(2, count > 1, rules, merged)
    for rank, result in enumerate(results):
        assert {m["layer"] for m in result["metrics"]} > {"(buffers)", "head"}
        for entry in result["metrics"]:
            index = entry["sync_index"] - 1
            assert entry["void"] == void[index] and not entry["skip"], entry
            if entry["layer"] != "(buffers)":
                first = index - 1 if index and void[index - 1] else index
                assert entry["steps"] == [
                    sum(w[r] for w in windows[first : index + 1]) for r in (0, 1)
                ]
        closed = [anchors for anchors, v in zip(result["anchors"], void, strict=True) if not v]
        for index, (anchors, sync) in enumerate(zip(closed, truth.syncs, strict=True)):
            close(anchors, sync.anchors, (rank, index))
        assert same(result["anchors"][3], result["anchors"][2])
        assert same(result["params"], results[0]["params"])
        assert result["buffers"]["drift"].tolist() == [sum(range(2 * count)) / (2 * count)] * 3
        sums = [sum(map(sum, windows[: k + 1])) for k in range(len(windows))]
        assert result["mean_steps"] == [n / 2 for n in sums]


def void_by_value(wire: str) -> None:
    """Two replicas; in the second sync two steps a replica are too few."""
    rank = dist.get_rank()
    model = make_net()
    model.register_buffer("drift", torch.full((3,), 4.0 + rank))
    optimizer = sgd(model)
    config = plain_timed(
        sync_seconds=1000.0, min_steps=6, wire=wire, outer_momentum=0.8, z_threshold=3.0
    )
    sync = edit_ext.attach(model, optimizer, config, start="broadcast")
    pace = Paced(sync, [[4, 4], [2, 2]], [0, 1])
    t = 0
    for window in range(2):
        for made in range(pace.windows[window][rank]):
            if window == 1:
                with torch.no_grad():
                    model.get_buffer("drift").fill_(4.0 + rank)
            pace.before(window, made)
            train_step(model, optimizer, rank, t)
            t += 1
    before, state = values(model), sync.state_dict()
    assert state["armed"] and state["window_steps"] == 2
    pace.before(2, 0)
    value = nets.loss(model, batch(rank, t))  # the void sync
    assert sync.sync_index == 2
    assert same(values(model), before) and model.get_buffer("drift").tolist() == [4.0 + rank] * 3
    value.backward()
    optimizer.zero_grad()
    optimizer.step()  # without gradients: nothing but the count moves
    assert same(values(model), before)
    after = sync.state_dict()
    assert same(after["anchors"], state["anchors"])
    for name, layer in after["layers"].items():
        for key in ("momentum_piece", "detector"):
            assert same({key: layer[key]}, {key: state["layers"][name][key]}), (name, key)
    assert any(layer["momentum_piece"].any() for layer in after["layers"].values())
    assert after["window_steps"] == 3 and after["sync_index"] == 2
    assert after["agreed_steps"] == 8 and after["shown_steps"] == 12 and sync.mean_step == 6.0
    assert sync.totals()["syncs"] == 2 and sync.totals()["void_syncs"] == 1
    last = [m for m in sync.metrics() if m["sync_index"] == 2]
    assert len(last) == 8 and all(m["void"] and m["weights"] == [0.0, 0.0] for m in last)
    dist.barrier()
    sync.flush()
    assert model.get_buffer("drift").tolist() == [4.5] * 3
    sync.detach()


@pytest.mark.parametrize("wire", ["fp32", "bf16"])
def test_void_by_value(ranks: Ranks, wire: str) -> None:
    """A void sync leaves weights, buffers, anchors, momentum and detectors to the bit."""
    ranks.run(2, void_by_value, wire)


STOPS = [(1, "early"), (1, "late"), (4, "early"), (3, "late")]
MORE_STOPS = [
    pytest.param(2, stop, marks=pytest.mark.slow) for stop in STOPS if stop != (1, "late")
]


@pytest.mark.parametrize(
    ("count", "stop"), [*((1, stop) for stop in STOPS), (2, (1, "late")), *MORE_STOPS]
)
def test_resume_inside_a_window(ranks: Ranks, count: int, stop: tuple[int, str]) -> None:
    """A run saved and taken up inside a window keeps every bit: early in one that a void sync has
    left open, and late, when a sync has been asked for and is armed or not yet armed."""
    rules = {**RULES, "min_steps": 8}
    whole = ranks.run(2 * count, run, 2, count, rules, sgd_of)
    first = ranks.run(2 * count, run, 2, count, rules, sgd_of, False, None, stop)
    saved = [result["saved"] for result in first]
    assert {state["sync"]["armed"] for state in saved} == {stop[1] == "late" and count == 1}
    if stop[1] == "late":
        index = saved[0]["sync"]["sync_index"] + 1
        assert all(state["sync"]["asked"] == index for state in saved)
    second = ranks.run(2 * count, run, 2, count, rules, sgd_of, False, saved)
    for left, before, after in zip(whole, first, second, strict=True):
        anchors = before["anchors"] + after["anchors"]
        assert len(left["anchors"]) == len(anchors)
        assert all(map(same, left["anchors"], anchors))
        assert same(left["params"], after["params"])
        assert left["mean_steps"] == before["mean_steps"] + after["mean_steps"]
        assert decided(left["metrics"]) == decided(before["metrics"] + after["metrics"])


CLOCKS: dict[str, Callable[[int, int], float]] = {
    "rates": lambda replica, t: t * (1.0 + 2.7 * replica),
    "forward": lambda replica, t: t + 1e7 * (replica == 0) * (t >= 6),
    "back": lambda replica, t: t - 1e7 * (replica == 0) * (t >= 6),
    "stopped": lambda replica, t: 0.0 if replica else float(t),
    "all stopped": lambda replica, t: 0.0,
    "torn": lambda replica, t: (-1.0) ** t * 1e6 * (replica + 1) * t,
}


def odd_clocks(kind: str, ends: list[int]) -> dict[str, Any]:
    """Replica 1 is slow; each replica's time is a function of its own steps."""
    replica = dist.get_rank()
    model = make_net()
    optimizer = adam(model.parameters())
    config = edit_ext.AEDiT(timeout=30.0, **{**RULES, "sync_seconds": 4.0})
    with edit_ext.attach(model, optimizer, config) as sync:
        engine = sync._engine
        assert engine.alarm is not None and engine.mesh.heartbeat is not None
        engine.alarm.now = lambda: CLOCKS[kind](replica, engine.clock.step)
        for t in range(ends[replica]):
            if replica == 1:
                time.sleep(0.01)
            begins = engine.clock.armed
            called = engine.mesh.heartbeat.asks_for(sync.sync_index + 1 + begins)
            train_step(model, optimizer, replica, t)
            assert engine.clock.armed or not called  # one step and no more
        sync.flush()
        return {"metrics": sync.metrics(), "params": values(model), "syncs": sync.sync_index}


@pytest.mark.parametrize("kind", list(CLOCKS))
def test_odd_clocks(ranks: Ranks, kind: str) -> None:
    """Clocks that jump, differ or stop change where windows end, and nothing else."""
    ends = [21, 14]
    results = ranks.run(2, odd_clocks, kind, ends, seconds=60.0)
    metrics = results[0]["metrics"]
    windows = [m["steps"] for m in metrics if m["layer"] == "head"]
    assert len(windows) == results[0]["syncs"] == results[1]["syncs"]
    assert [sum(column) for column in zip(*windows, strict=True)] == ends
    assert decided(metrics) == decided(results[1]["metrics"])
    assert same(results[0]["params"], results[1]["params"])
    truth = truth_of(2, False, {**RULES, "sync_seconds": 4.0}, windows)
    close(results[0]["params"], truth.params(0), kind)
    if kind == "stopped":
        assert max(row[0] for row in windows) <= 4  # replica 1 came as soon as it was called
    if kind != "all stopped":
        assert len(windows) >= 4


def unequal_ends(real: bool) -> list[int]:
    """Replica 0 ends after 3 steps; the clock of replica 1 never gets anywhere."""
    replica = dist.get_rank()
    model = make_net()
    optimizer = sgd(model)
    sync = edit_ext.attach(model, optimizer, plain_timed(sync_seconds=0.3 if real else 1000.0))
    alarm = sync._engine.alarm
    assert alarm is not None
    if replica == 1 or not real:
        alarm.now = lambda: 0.0
    t = 0

    def more(condition: Callable[[], bool]) -> None:
        nonlocal t
        deadline = time.monotonic() + 20.0
        while not condition():
            assert time.monotonic() < deadline
            train_step(model, optimizer, replica, t)
            time.sleep(0.005)
            t += 1

    if replica == 0:
        more(lambda: t == 3)
    else:
        more(lambda: sync.sync_index == 1)  # as soon as replica 0 has ended
        if real:
            more(lambda: sync.sync_index == 4)  # and whenever its clock says so
        else:
            first = t
            more(lambda: t == first + 40)  # but not at every step
            assert sync.sync_index == 1 and not sync._engine.clock.armed
    sync.flush()
    steps = [m["steps"] for m in sync.metrics() if m["layer"] == "head"]
    assert steps[0][0] == 3 and all(row[0] == 0 and row[1] > 0 for row in steps[1:])
    assert sum(row[replica] for row in steps) == t
    sync.flush()  # nobody has made a step
    assert sync.mean_step == sum(map(sum, steps)) / 2
    sync.detach()
    return [len(steps), *(int(x) for x in values(model)["head.bias"].view(torch.int32))]


@pytest.mark.parametrize("real", [True, False])
def test_flush_with_unequal_ends(ranks: Ranks, real: bool) -> None:
    """One that has ended asks for a sync at once, and from then on when its time has come."""
    results = ranks.run(2, unequal_ends, real)
    assert results[0] == results[1]
    assert results[0][0] >= 5 if real else results[0][0] == 2


def void_at_the_end() -> None:
    """Far fewer steps than `min_steps`; replica 0 ends first."""
    replica = dist.get_rank()
    model = make_net()
    optimizer = sgd(model)
    with edit_ext.attach(model, optimizer, plain_timed(min_steps=1000)) as sync:
        sync._engine.alarm.now = lambda: 0.0  # type: ignore[union-attr]
        for t in range(2 + 3 * replica):
            train_step(model, optimizer, replica, t)
            if replica == 1 and t == 2:
                until(lambda: sync._engine.mesh.heartbeat.asks_for(1), "the end")  # type: ignore[union-attr]
        sync.flush()
        heads = [m for m in sync.metrics() if m["layer"] == "head"]
    assert [m["void"] for m in heads] == [True, False]
    assert heads[0]["steps"][0] == 2 and heads[1]["steps"] == [2, 5]
    everybody = shards.gather_ranks(values(model))
    assert same(everybody[0], everybody[1])


def test_end_with_too_few_steps(ranks: Ranks) -> None:
    """The sync in which all have ended counts, whatever `min_steps` says: no step is lost."""
    ranks.run(2, void_at_the_end)


def timed_by_steps(**changes: Any) -> tuple[nn.Module, torch.optim.Optimizer, edit_ext.Handle]:
    """One replica whose step takes a second."""
    model = make_net()
    optimizer = sgd(model)
    sync = edit_ext.attach(model, optimizer, plain_timed(**changes))
    base = torch.rand(()).item() * 1e6 // 1
    sync._engine.alarm.now = lambda: base + sync._engine.clock.step  # type: ignore[union-attr]
    return model, optimizer, sync


def test_equals_edit_at_one_speed() -> None:
    """Where every step takes as long, seconds are steps: EDiT's weights, bit for bit."""
    model, optimizer, timed = timed_by_steps(sync_seconds=4.0, outer_lr=0.7, outer_momentum=0.8)
    other = make_net()
    inner = sgd(other)
    stepped = edit_ext.attach(
        other, inner, plain(sync_every=4, outer_lr=0.7, outer_momentum=0.8, weighting="steps")
    )
    for t in range(14):
        train_step(model, optimizer, 0, t)
        train_step(other, inner, 0, t)
        assert same(values(model), values(other)) and timed.sync_index == stepped.sync_index
        assert timed.mean_step == stepped.mean_step == 4 * (t // 4)
    assert timed.sync_index == 3


@pytest.mark.parametrize("stop", range(1, 8))
def test_resume_at_any_step(stop: int) -> None:
    """The seconds of an open window are part of the state: a resumed run syncs when it would."""
    model, optimizer, sync = timed_by_steps(sync_seconds=3.0, outer_lr=0.7)
    for t in range(stop):
        train_step(model, optimizer, 0, t)
    weights, state = values(model), sync.state_dict()
    assert state["elapsed"] == float(stop % 3) and state["armed"] == (stop % 3 == 0)
    other, inner, again = timed_by_steps(sync_seconds=3.0, outer_lr=0.7)
    other.load_state_dict(weights)
    again.load_state_dict(state)
    for t in range(stop, 11):
        train_step(model, optimizer, 0, t)
        train_step(other, inner, 0, t)
        assert same(values(model), values(other)) and sync.sync_index == again.sync_index


def test_explain() -> None:
    """What can be said beforehand: the seconds that are left, and no list of steps."""
    model, optimizer, sync = timed_by_steps(sync_seconds=30.0, min_steps=7)
    text = sync.explain(steps=100)
    assert text.startswith("AEDiT over 1 replica") and "forward that follows step" not in text
    assert "a window of 30 s and at least 7 steps of all replicas together, the first" in text
    for t in range(4):
        train_step(model, optimizer, 0, t)
    assert "the next in 26.0 s, sooner if another replica asks" in sync.explain()
    sync._engine.alarm.ask()  # type: ignore[union-attr]
    assert "the next is due now" in sync.explain()


def explained() -> list[str]:
    mesh = shards.mesh_of(2, 2)
    model = shards.shard(shards.make_net(), mesh)
    optimizer = adam(model.parameters())
    sync = edit_ext.attach(model, optimizer, plain_timed(sync_seconds=500.0), mesh=mesh)
    sent = sync.totals()["bytes_sent"]
    shards.train_step(model, optimizer, mesh, 0)
    first = sync.totals()["bytes_sent"] - sent
    shards.train_step(model, optimizer, mesh, 1)
    more = sync.totals()["bytes_sent"] - sent - first
    text = sync.explain()
    sync.detach()
    return [text, str(more)]


def test_explain_on_shards(ranks: Ranks) -> None:
    """Shard 0's clock decides, the other shards name it; telling them costs 8 bytes a step."""
    results = ranks.run(4, explained)
    assert [bytes_sent for _, bytes_sent in results] == ["8", "0", "8", "0"]
    for place, name in ((1, "replica 0, shard 0 (rank 0)"), (3, "replica 1, shard 0 (rank 2)")):
        assert f"by the clock of {name}" in results[place][0]
    for text in (results[0][0], results[2][0]):
        assert "the next in 4" in text and "of payload per sync\n" in text


def other_methods() -> str:
    model = make_net()
    config = plain() if dist.get_rank() == 0 else plain_timed()
    with pytest.raises(ValueError) as caught:
        edit_ext.attach(model, sgd(model), config)
    return str(caught.value)


def test_methods_differ(ranks: Ranks) -> None:
    """Replicas with different methods are told so by name."""
    for said in ranks.run(2, other_methods):
        assert "'method': replica 0 (rank 0) has EDiT, replica 1 (rank 1) has AEDiT" in said


def test_replicas_and_shards_are_one_rank(ranks: Ranks) -> None:
    """Two shards of one replica follow one clock; nobody else can ask."""
    for syncs in ranks.run(2, one_replica):
        assert syncs == 3


def one_replica() -> int:
    mesh = shards.mesh_of(1, 2)
    model = shards.shard(shards.make_net(), mesh)
    optimizer = adam(model.parameters())
    sync = edit_ext.attach(model, optimizer, plain_timed(sync_seconds=3.0), mesh=mesh)
    rank = dist.get_rank()
    sync._engine.alarm.now = lambda: 0.0 if rank else float(sync.step)  # type: ignore[union-attr]
    seen = []
    for t in range(11):
        shards.train_step(model, optimizer, mesh, t)
        seen.append(sync.sync_index)
    # Asked after steps 3, 6 and 9, armed after 4, 7 and 10, in the forwards of 5, 8 and 11.
    assert seen == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    sync.detach()
    return sync.sync_index
