"""AEDiT: syncs by the clock, of replicas that make unequal numbers of steps; clocks are made up."""

from __future__ import annotations

from typing import Any

import nets
import pytest
import shards
import torch
import torch.distributed as dist
from nets import batch, make_net, plain_timed, same, sgd, train_step, values
from paced import Paced
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
    assert state["armed"] and state["window_steps"] == [2]
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
        for key in ("momentum", "detector"):
            assert same({key: layer[key]}, {key: state["layers"][name][key]}), (name, key)
    assert any(layer["momentum"].any() for layer in after["layers"].values())
    assert after["window_steps"] == [3] and after["sync_index"] == 2
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
    assert {bool(state["sync"]["armed"]) for state in saved} == {stop[1] == "late" and count == 1}
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
