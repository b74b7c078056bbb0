"""A run in one checkpoint of torch.distributed.checkpoint (DCP), for any mesh to go on from.

Keys of the tree: `meta` (JSON: method, settings, order, detectors), `anchors`, `momentum`,
`flightN` and `frozen` by parameter name, the same on all replicas; `replicaN` with what differs
inside a window: `meta` (JSON: counts of steps), `model` (trainable weights and buffers) and
`optimizer`. DCP keeps one of several equal keys without a word, hence the names. Sharded tensors
are DTensors, so that DCP cuts them anew for another mesh.

Loaded with another number of replicas, replica r goes on from what replica r mod R has saved, its
weights, inner optimizer, window and detectors; a replica without successor takes the local steps of
its last window along. Anchors and outer momentum are all there.
"""

from __future__ import annotations

import json
import pickle
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dsd

from . import momentum, optimizer_state
from .engine import Engine
from .layer import clean
from .sharding import from_local, is_sharded, local
from .state import read_counts, read_flights, refuse_flights, take_counts, take_flights

FORMAT = 3
REPLICA = re.compile(r"^(.*\.)?replica(\d+)\.meta$")
UNREADABLE = (
    OSError, EOFError, pickle.UnpicklingError, AttributeError, ImportError, IndexError, KeyError,
    TypeError, ValueError,
)  # fmt: skip
"""What reading a file that is no pickle of DCP's description may raise."""
Source = str | PathLike[str] | dcp.StorageReader


class Checkpoint:
    """The Stateful of one attached run; made by `Handle.checkpoint`.

    `state_dict` is collective over the replicas and changes nothing. `load_state_dict` gets the
    same tree with other values, as `dcp.load` fills it.
    """

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        source: Source | None,
    ) -> None:
        self._engine, self._model, self._optimizers = engine, model, list(optimizers)
        self._names: dict[Tensor, str] = {p: clean(n) for n, p in model.named_parameters()}
        self._saved = saved_in(source, set(engine.held.trainable)) if source is not None else None
        replicas = self._saved.replicas if self._saved else engine.mesh.replica.size
        self._own = f"replica{engine.mesh.replica.rank % replicas}"

    def state_dict(self) -> dict[str, Any]:
        """The tree. Raises RuntimeError while a sync is in progress."""
        engine = self._engine
        engine.check()
        if engine.syncs.active:
            raise RuntimeError(
                "a checkpoint while a sync is in progress; save after optimizer.step()"
            )
        counts = read_counts(engine)
        frozen, weights = self._weights()
        if self._saved is None:
            inner = optimizer_state.pack(self._optimizers, self._names)
        else:
            states = self._saved.below(f"{self._own}.optimizer.state.")
            inner = optimizer_state.room(states, self._names)
        own = {"meta": json.dumps(counts), "model": weights, "optimizer": inner}
        return {
            "meta": json.dumps(self._meta()),
            "anchors": self._by_name(layer.anchor for layer in engine.held.anchored()),
            "momentum": self._by_name(self._momenta()),
            **self._flights(),
            "frozen": frozen,
            self._own: own,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the checkpoint was saved. Raises ValueError if it is of another model."""
        engine = self._engine
        meta, counts = json.loads(state["meta"]), json.loads(state[self._own]["meta"])
        odd = self._check(meta)
        refuse_flights(engine)
        engine.held.refresh()
        dsd.set_model_state_dict(
            self._model,
            {**state["frozen"], **state[self._own]["model"]},
            options=dsd.StateDictOptions(strict=False),
        )
        optimizer_state.unpack(self._optimizers, self._names, state[self._own]["optimizer"])
        mine = engine.mesh.replica.rank
        rows = [r % meta["replicas"] for r in range(engine.mesh.replica.size)]
        for layer, unit in zip(engine.held.anchored(), engine.plan.units, strict=False):
            layer.load_anchor([local(state["anchors"][name]) for name in unit.params])
            if unit.name not in odd:
                detectors = torch.tensor(meta["detectors"][unit.name], dtype=torch.float64)
                layer.detector.copy_(detectors[rows])
            if layer.momentum is not None:
                whole = layer.join([local(state["momentum"][name]) for name in unit.params])
                momentum.put(layer, whole, mine)
        if meta["order"] and not odd:
            places = {unit.name: index for index, unit in enumerate(engine.plan.units)}
            engine.syncs.set_order([places[name] for name in meta["order"]])
        engine.syncs.outer_lr = meta["outer_lr"]
        for name in ("agreed_steps", "shown_steps"):  # of all replicas together
            counts[name] = round(counts[name] * len(rows) / meta["replicas"])
        take_counts(engine, counts)
        for number, flight in enumerate(meta["flights"]):
            flight["steps"] = {n: local(t) for n, t in state[f"flight{number}"].items()}
        take_flights(engine, meta["flights"])
        engine.warmup_may_be_over()
        # From now on this tree is good for saving: no room for what is to come, but what is here.
        self._saved, self._own = None, f"replica{mine}"

    def _meta(self) -> dict[str, Any]:
        engine = self._engine
        units, layers = engine.plan.units, engine.held.anchored()
        order = engine.syncs.order
        return {
            "format": FORMAT,
            "method": engine.config.name,
            "config": engine.config.as_dict(),
            "replicas": engine.mesh.replica.size,
            "outer_lr": engine.syncs.outer_lr,
            "order": [units[i].name for i in order] if engine.clock.sync_index else [],
            "layers": {unit.name: sorted(unit.params) for unit in units},
            "dtypes": {n: str(p.dtype)[6:] for u in units for n, p in u.params.items()},
            "detectors": {layer.name: layer.detector.tolist() for layer in layers},
            "flights": [
                {"windows": list(sync.windows.items()), "due": sync.due, "keep": sync.keep}
                for sync in engine.syncs.airborne
            ],
        }

    def _weights(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Frozen parameters, and what training changes."""
        trains = set(self._engine.held.trainable)
        frozen = {clean(n) for n, _ in self._model.named_parameters() if clean(n) not in trains}
        every = dsd.get_model_state_dict(self._model)
        return (
            {name: value for name, value in every.items() if name in frozen},
            {name: value for name, value in every.items() if name not in frozen},
        )

    def _momenta(self) -> Iterable[Tensor]:
        """The outer momentum of whole layers, from the replicas' pieces."""
        for layer in self._engine.held.anchored():
            if layer.anchor is not None and layer.momentum is not None:
                whole = momentum.gather(layer, self._engine.mesh.replica, "checkpoint")
                yield whole.to(layer.anchor.device)

    def _flights(self) -> dict[str, Any]:
        """`flightN`: what will be taken off the anchors when it lands, by parameter name."""
        params = self._engine.held.trainable
        if self._saved is None:
            flights = [flight["steps"] for flight in read_flights(self._engine)]
        else:
            flights = []
            while names := self._saved.below(f"flight{len(flights)}."):
                flights.append({n: torch.zeros_like(local(params[n]).float()) for n in names})
        return {
            f"flight{number}": {
                name: from_local(part, params[name]) if is_sharded(params[name]) else part
                for name, part in steps.items()
            }
            for number, steps in enumerate(flights)
        }

    def _by_name(self, flats: Iterable[Tensor | None]) -> dict[str, Tensor]:
        """Flat tensors of all layers as tensors shaped and sharded like the parameters."""
        found: dict[str, Tensor] = {}
        for layer, unit, flat in zip(
            self._engine.held.anchored(), self._engine.plan.units, flats, strict=False
        ):
            assert flat is not None
            for (name, param), part in zip(unit.params.items(), layer.split(flat), strict=True):
                found[name] = from_local(part, param) if is_sharded(param) else part
        return found

    def _check(self, meta: dict[str, Any]) -> set[str]:
        """Layers here that the saved run cut otherwise: their detectors and order start anew."""
        here = self._meta()
        for name in ("format", "method"):
            if meta.get(name) != here[name]:
                raise ValueError(
                    f"the checkpoint has {name} {meta.get(name)!r}; this run has {here[name]!r}"
                )
        theirs, ours = ({n for names in m["layers"].values() for n in names} for m in (meta, here))
        if theirs != ours:
            missing, extra = min(ours - theirs, default=""), min(theirs - ours, default="")
            said = f"it has no {missing!r}" if missing else f"{extra!r} is not trained here"
            raise ValueError(f"the checkpoint is of another model: {said}")
        odd = {n for n, params in here["layers"].items() if meta["layers"].get(n) != params}
        if odd:
            warnings.warn(
                f"edit_ext: the checkpoint's layers are cut otherwise ({min(odd)!r}, for one): the "
                "outlier detectors of such layers start anew.",
                stacklevel=2,
            )
        return odd


@dataclass
class Saved:
    """What a checkpoint holds of one run: how many replicas, and DCP's description by key."""

    prefix: str
    replicas: int
    keys: dict[str, Any]

    def below(self, place: str) -> dict[str, Any]:
        """Keys that begin with `place`, without it."""
        start = self.prefix + place
        return {key[len(start) :]: what for key, what in self.keys.items() if key.startswith(start)}


def saved_in(source: Source, params: set[str] | None = None, run: str | None = None) -> Saved:
    """Look into a checkpoint; `params` or the key `run` chooses between several runs in it.

    Raises ValueError when it holds no run, or not exactly one that fits.
    """
    reader = source if isinstance(source, dcp.StorageReader) else dcp.FileSystemReader(source)
    try:
        keys = dict(reader.read_metadata().state_dict_metadata)
    except UNREADABLE as error:
        raise ValueError(f"{source} is no checkpoint of torch.distributed.checkpoint") from error
    replicas: dict[str, int] = {}
    for match in filter(None, map(REPLICA.match, keys)):
        prefix = match[1] or ""
        replicas[prefix] = max(replicas.get(prefix, 0), int(match[2]) + 1)
    if not replicas:
        raise ValueError(f"{source} holds no state of edit_ext: it was not saved by checkpoint()")
    found = [Saved(prefix, count, keys) for prefix, count in replicas.items()]
    if run is not None:
        found = [saved for saved in found if saved.prefix == f"{run}."]
    elif params is not None and len(found) > 1:
        found = [saved for saved in found if saved.below("anchors.").keys() == params]
    if len(found) != 1:
        names = ", ".join(repr(prefix.rstrip(".")) for prefix in replicas)
        raise ValueError(f"{source} holds the runs {names}; {len(found)} of them fit")
    return found[0]
