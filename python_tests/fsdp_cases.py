"""What the tests of odd sharded models and loops share: a case, its run on ranks, its truth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import nets
import pytest
import shards
import torch
from simulate import Trajectory, simulate
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import edit_ext

RULES: dict[str, Any] = {
    "warmup_steps": 2,
    "sync_every": 2,
    "clip_norm": 0.2,
    "z_threshold": None,
}
STEPS = 7  # the warm-up, two whole windows and a part of one

Step = Callable[[nn.Module, torch.optim.Optimizer, DeviceMesh, int], None]


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The same weights in every process."""

    def build() -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(11)
            return make()

    return build


@dataclass
class Case:
    """A sharded model and its loop, and the plain model and loss that it must equal.

    prepare: shards the model that `make` returns, and may return another one, which is attached.
    late: what is done to it after attach; its result is trained. step: one iteration.
    plain: the model of the truth; batch, loss: of a whole replica there. quota: steps by replica.
    """

    make: Callable[[], nn.Module] = shards.make_net
    prepare: Callable[[nn.Module, DeviceMesh], nn.Module] = shards.shard
    late: Callable[[nn.Module], nn.Module] = lambda model: model
    step: Step = shards.train_step
    plain: Callable[[], nn.Module] | None = None
    loss: Callable[[nn.Module, Any], Tensor] = nets.loss
    batch: Callable[[int, int], Any] = nets.batch
    layer_of: Callable[[str], str] = shards.layer_of
    optimizer: Callable[[Any], torch.optim.Optimizer] = sgd
    shape: tuple[int, ...] = (2, 2)
    dims: tuple[str, ...] = ("replica", "shard")
    rules: dict[str, Any] = field(default_factory=dict)
    quota: list[int] | None = None
    atol: float = 3e-6
    truth: dict[str, Any] = field(default_factory=dict)  # more for simulate()

    def run(self, plain: bool = False) -> dict[str, Any]:
        """One rank's training. Whole weights after the end, and what the syncs decided.

        plain: on as many ranks as there are replicas, with the model as it was before `prepare`.
        """
        shape = (self.shape[0], *([1] * len(self.shape[1:]) if plain else self.shape[1:]))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=self.dims)
        model = self.make() if plain else self.prepare(self.make(), mesh)
        whole = mesh["replica"] if plain else mesh  # nothing is sharded over another dimension
        optimizer = self.optimizer(model.parameters())
        config = edit_ext.EDiT(timeout=20.0, **{**RULES, **self.rules})
        looks = [look(model)]
        with edit_ext.attach(model, optimizer, config, mesh=whole) as sync:
            trained = self.late(model)
            replica, parts, part = mesh["replica"].get_local_rank(), 1, 0
            if "shard" in self.dims:
                parts, part = mesh["shard"].size(), mesh["shard"].get_local_rank()
            seat = (sync.data_rank, sync.data_world)
            assert seat == (replica * parts + part, self.shape[0] * parts), seat
            for t in range(STEPS if self.quota is None else self.quota[replica]):
                self.step(trained, optimizer, mesh, t)
            sync.flush()
            looks.append(look(model))
            metrics, totals, text = sync.metrics(), sync.totals(), sync.explain()
            state = sync.state_dict()
        assert looks[0] == looks[1], "a sync has changed what the parameters are"
        values = {edit_ext.layer.clean(n): v for n, v in shards.full(model).items()}
        return {
            "values": values,
            "metrics": metrics,
            "totals": totals,
            "explain": text,
            "names": [name for unit in state["layers"].values() for name in unit["params"]],
        }

    def expected(self) -> Trajectory:
        """The same training with whole replicas in one process."""
        known = {k: v for k, v in self.rules.items() if k not in ("granularity", "prefetch")}
        return simulate(
            self.plain or self.make,
            self.batch,
            self.loss,
            replicas=self.shape[0],
            steps=STEPS if self.quota is None else self.quota,
            layer_of=self.layer_of,
            **{"optimizer": self.optimizer, **RULES, **known, **self.truth},
        )

    def check(self, results: list[dict[str, Any]]) -> None:
        """The ranks' results against the truth: whole weights, and each sync's norms and clips."""
        truth = self.expected()
        held = truth.params(0)
        for rank, result in enumerate(results):
            for name, value in result["values"].items():
                if name in held:
                    torch.testing.assert_close(
                        value.double(),
                        held[name].double(),
                        rtol=0,
                        atol=self.atol,
                        msg=lambda text, where=(rank, name): f"{where}: {text}",
                    )
            entries = [e for e in result["metrics"] if e["layer"] != "(buffers)"]
            assert len(entries) == sum(len(sync.layers) for sync in truth.syncs)
            for entry in entries:
                layer = truth.syncs[entry["sync_index"] - 1].layers[entry["layer"]]
                near = {"rel": max(self.atol * 300, 1e-3), "abs": max(self.atol, 1e-6)}
                assert entry["norms"] == pytest.approx(layer.norms, **near), entry["layer"]
                assert entry["clip"] == pytest.approx(layer.clip, **near), entry["layer"]


def built(plain: bool) -> tuple[DeviceMesh, nn.Module]:
    """Two replicas: of two shards, or of one model that nobody shards."""
    mesh = shards.mesh_of(2, 1 if plain else 2)
    return mesh, shards.make_net() if plain else shards.shard(shards.make_net(), mesh)


def attached(model: nn.Module, mesh: DeviceMesh, **options: Any) -> tuple[Any, edit_ext.Handle]:
    optimizer = sgd(model.parameters())
    start = options.pop("start", "check")
    config = nets.plain(**{"outer_lr": 0.5, "sync_every": 3, **options})
    handle = edit_ext.attach(model, optimizer, config, mesh=mesh["replica"], start=start)
    return optimizer, handle


def look(model: nn.Module) -> list[Any]:
    """Global shape, strides and placements of all parameters, and that they make a whole."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    return [
        [name, p.shape, p.stride(), getattr(p, "placements", None), shards.whole(p).shape]
        for name, p in model.named_parameters()
    ]
