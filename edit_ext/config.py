"""What all methods' settings have in common: frozen dataclasses that are checked when made."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from numbers import Integral, Real
from typing import Any

import torch

from .recipe import Recipe

GRANULARITIES = ("layer", "model")
WIRES = ("fp32", "bf16")
MOMENTA = ("sharded", "replicated")

MEAN = {
    "outer": "replace",
    "outer_lr": 1.0,
    "outer_momentum": 0.0,
    "nesterov": False,
    "clip_norm": None,
    "weighting": "uniform",
    "temperature": 1.0,
    "z_threshold": None,
    "ema_alpha": 0.02,
    "ema_warmup": 10,
    "max_flags_in_a_row": 10,
}
"""Rules of a plain mean, as keyword arguments of `_C.Policy`. A replica whose norm is not finite is
left out, and after ten syncs in a row it is an error."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """Settings of a method. Making one raises TypeError or ValueError, in a sentence, for a value
    that cannot work or has no effect."""

    timeout: float = 600.0
    """Seconds for which a peer may be silent. A peer that is slow but alive is waited for."""

    def __post_init__(self) -> None:
        self._number("timeout", 0.0, 1e6, high_included=True, unit=" seconds (about 11 days)")

    def recipe(self, optimizers: Sequence[torch.optim.Optimizer] = ()) -> Recipe:
        """What the engine does for this method; some periods follow the optimizers' settings."""
        raise TypeError(f"{self.name} is no method by itself; take one of those built on it")

    @property
    def averages(self) -> bool:
        """Whether gradients are averaged, always or at first."""
        return True

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain numbers, strings, booleans, dicts and None."""
        return asdict(self)

    @property
    def name(self) -> str:
        """What messages and states call the method."""
        return type(self).__name__

    def _integer(self, name: str, low: int, high: int | None = None) -> None:
        given = getattr(self, name)
        if isinstance(given, bool) or not isinstance(given, Integral):
            raise TypeError(f"{name} must be an integer, but is {given!r}.")
        value = operator.index(given)
        if value < low:
            raise ValueError(f"{name} must be at least {low}, but is {value}.")
        if high is not None and value > high:
            raise ValueError(f"{name} must be at most {high}, but is {value}.")
        object.__setattr__(self, name, value)  # NumPy's integers too become plain ones

    def _number(
        self,
        name: str,
        low: float,
        high: float,
        *,
        low_included: bool = False,
        high_included: bool = False,
        optional: bool = False,
        unit: str = "",
    ) -> None:
        given = getattr(self, name)
        if given is None and optional:
            return
        if isinstance(given, bool) or not isinstance(given, Real):
            extra = " or None" if optional else ""
            raise TypeError(f"{name} must be a number{extra}, but is {given!r}.")
        try:
            value = float(given)
        except OverflowError:  # an int beyond the range of float
            value = math.inf
        above = value >= low if low_included else value > low
        below = value <= high if high_included else value < high
        if not (above and below):
            floor = f"at least {low:g}" if low_included else f"above {low:g}"
            ceiling = f"at most {high:,.0f}{unit}" if high_included else f"below {high:g}"
            ceiling = "finite" if high == math.inf else ceiling
            raise ValueError(f"{name} must be {floor} and {ceiling}, but is {given!r}.")
        if not isinstance(given, int):
            object.__setattr__(self, name, value)  # NumPy's numbers too become plain ones

    def _choice(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            names = ", ".join(repr(choice) for choice in choices)
            raise ValueError(f"{name} must be one of {names}, but is {value!r}.")

    def _flags(self, *names: str) -> None:
        for name in names:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, but is {getattr(self, name)!r}.")

    def _no_effect(self, names: Sequence[str], where: str) -> None:
        """Refuse fields that were set although, `where` holding, nothing reads them."""
        defaults = {f.name: f.default for f in fields(self)}
        for name in names:
            if getattr(self, name) != defaults[name]:
                raise ValueError(f"{name}={getattr(self, name)!r} has no effect with {where}.")


@dataclass(frozen=True, kw_only=True)
class LocalUpdate(Method):
    """Replicas step on their own and sync now and then."""

    warmup_steps: int = 0
    """Optimizer steps of plain data parallel training (averaged gradients) before local steps."""
    granularity: str = "layer"
    """What is waited for: "layer": each at its own forward; "model": all before the root's."""
    wire: str = "fp32"
    """Format of what is exchanged: "fp32" or "bf16"."""
    average_buffers: bool = True
    """Average persistent floating buffers (BatchNorm statistics) at each sync."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._integer("warmup_steps", 0)
        self._choice("granularity", GRANULARITIES)
        self._choice("wire", WIRES)
        self._flags("average_buffers")

    @property
    def averages(self) -> bool:
        return self.warmup_steps > 0

    def common(self) -> dict[str, Any]:
        """These fields as keyword arguments of Recipe."""
        return {
            "averaged_steps": self.warmup_steps,
            "granularity": self.granularity,
            "wire": self.wire,
            "average_buffers": self.average_buffers,
        }


@dataclass(frozen=True, kw_only=True)
class Pipelined(LocalUpdate):
    """Syncs are over within the forward, and so only a few layers are in flight at a time."""

    prefetch: int = 2
    """Layers in flight at once; 0 is blocking: a layer begins only when its forward needs it."""
    offload: bool = False
    """Keep anchors and outer momentum in pinned memory of the host; each layer's come to the GPU
    for its sync and go back after it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._integer("prefetch", 0, 1_000_000)
        self._flags("offload")

    def common(self) -> dict[str, Any]:
        return {**super().common(), "prefetch": self.prefetch, "offload": self.offload}


@dataclass(frozen=True, kw_only=True)
class OuterMomentum(Method):
    """An outer step with momentum, from the anchor, as torch's SGD makes it."""

    outer_lr: float = 0.7
    """Learning rate of the outer step; `Handle.outer_lr` can follow a schedule."""
    outer_momentum: float = 0.8
    """Momentum of the outer step, in [0, 1)."""
    momentum: str = "sharded"
    """Where the outer momentum is: "sharded": each replica holds its part of it (4/R bytes a
    parameter); "replicated": all of it (4 bytes), so that none is lost with a replica."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._number("outer_lr", 0.0, 1e3, high_included=True)
        self._number("outer_momentum", 0.0, 1.0, low_included=True)
        self._choice("momentum", MOMENTA)

    def outer_policy(self, *, nesterov: bool) -> dict[str, Any]:
        """Rules of the outer step of a plain mean, as keyword arguments of `_C.Policy`."""
        step = {"outer_lr": float(self.outer_lr), "outer_momentum": float(self.outer_momentum)}
        return {**MEAN, "outer": "sgd", **step, "nesterov": nesterov}


@dataclass(frozen=True, kw_only=True)
class Nesterov(OuterMomentum):
    """The outer momentum in either form."""

    nesterov: bool = True
    """Nesterov form of the outer momentum."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._flags("nesterov")
