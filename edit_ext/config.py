"""The methods' settings: frozen dataclasses, every relation between numbers checked when made."""

from __future__ import annotations

import math
import operator
from dataclasses import asdict, dataclass, fields
from numbers import Integral, Real
from typing import Any

WEIGHTINGS = ("softmax", "uniform", "steps")
GRANULARITIES = ("layer", "model")
WIRES = ("fp32", "bf16")
MOMENTA = ("sharded", "replicated")


@dataclass(frozen=True, kw_only=True)
class Method:
    """What the methods have in common; `EDiT` and `AEDiT` say when a sync is due."""

    warmup_steps: int = 0
    """Optimizer steps of plain data parallel training (averaged gradients) before local steps."""
    outer_lr: float = 0.7
    """Learning rate of the outer step; `Handle.outer_lr` can follow a schedule."""
    outer_momentum: float = 0.8
    """Momentum of the outer step, in [0, 1)."""
    nesterov: bool = True
    """Nesterov form of the outer momentum."""
    clip_norm: float | None = 10.0
    """Largest L2 norm of a layer's merged pseudo-gradient (Eq. 4); None switches clipping off."""
    weighting: str = "softmax"
    """How accepted replicas are weighted: "softmax" of -norm (Eq. 2), "uniform" or "steps"."""
    temperature: float = 1.0
    """Temperature of the softmax weighting."""
    z_threshold: float | None = 3.0
    """Standard deviations above which a replica is flagged (Eq. 1); None: only if its norm is not
    finite. Sums of squares beyond the range of fp32, norms above 1.8e19, count as not finite."""
    ema_alpha: float = 0.02
    """Weight of the newest norm in the detector's running mean and variance."""
    ema_warmup: int = 10
    """Norms a detector must have seen before it flags (syncs)."""
    max_flags_in_a_row: int = 10
    """A replica flagged more often in a row is accepted if finite, an error if not."""
    prefetch: int = 2
    """Layers in flight at once; 0 is blocking: a layer begins only when its forward needs it."""
    granularity: str = "layer"
    """What is waited for: "layer": each at its own forward; "model": all before the root's."""
    wire: str = "fp32"
    """Format of what is exchanged: "fp32" or "bf16"."""
    momentum: str = "sharded"
    """Where the outer momentum is: "sharded": each replica holds its part of it (4/R bytes a
    parameter); "replicated": all of it (4 bytes), so that none is lost with a replica."""
    timeout: float = 600.0
    """Seconds for which a peer may be silent. A peer that is slow but alive is waited for."""
    offload: bool = False
    """Keep anchors and outer momentum in pinned memory of the host; each layer's come to the GPU
    for its sync and go back after it."""
    average_buffers: bool = True
    """Average persistent floating buffers (BatchNorm statistics) at each sync."""

    def __post_init__(self) -> None:
        self._integer("warmup_steps", 0)
        self._integer("ema_warmup", 2)
        self._integer("max_flags_in_a_row", 1)
        self._integer("prefetch", 0, 1_000_000)
        self._number("outer_lr", 0.0, 1e3, high_included=True)
        self._number("outer_momentum", 0.0, 1.0, low_included=True)
        self._number("clip_norm", 0.0, math.inf, optional=True)
        self._number("temperature", 0.0, math.inf)
        self._number("z_threshold", 0.0, math.inf, optional=True)
        self._number("ema_alpha", 0.0, 1.0)
        self._number("timeout", 0.0, 1e6, high_included=True, unit=" seconds (about 11 days)")
        self._choice("weighting", WEIGHTINGS)
        self._choice("granularity", GRANULARITIES)
        self._choice("wire", WIRES)
        self._choice("momentum", MOMENTA)
        for name in ("nesterov", "offload", "average_buffers"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, but is {getattr(self, name)!r}.")
        if self.weighting != "softmax" and self.temperature != 1.0:
            raise ValueError(
                f"temperature={self.temperature!r} has no effect with weighting="
                f"{self.weighting!r}: only the softmax weighting has a temperature."
            )
        if self.z_threshold is None:
            for name in ("ema_alpha", "ema_warmup"):
                if getattr(self, name) != _default(name):
                    raise ValueError(
                        f"{name}={getattr(self, name)!r} has no effect with z_threshold=None, "
                        "which switches the detector off."
                    )

    def as_dict(self) -> dict[str, Any]:
        """The fields as plain numbers, strings, booleans and None."""
        return asdict(self)

    @property
    def name(self) -> str:
        """What messages and states call the method."""
        return type(self).__name__

    def policy_fields(self) -> dict[str, Any]:
        """The keyword arguments of `_C.Policy` that these settings stand for."""
        return {
            "outer": "sgd",
            "outer_lr": float(self.outer_lr),
            "outer_momentum": float(self.outer_momentum),
            "nesterov": self.nesterov,
            "clip_norm": None if self.clip_norm is None else float(self.clip_norm),
            "weighting": self.weighting,
            "temperature": float(self.temperature),
            "z_threshold": None if self.z_threshold is None else float(self.z_threshold),
            "ema_alpha": float(self.ema_alpha),
            "ema_warmup": self.ema_warmup,
            "max_flags_in_a_row": self.max_flags_in_a_row,
            "min_steps": getattr(self, "min_steps", 0),
        }

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


def _default(name: str) -> Any:
    return next(field.default for field in fields(Method) if field.name == name)


@dataclass(frozen=True, kw_only=True)
class EDiT(Method):
    """How EDiT (arXiv 2412.07210) trains: local steps, then a sync layer by layer.

    Raises TypeError or ValueError, in a sentence, for a value that cannot work.
    """

    sync_every: int = 128
    """Local optimizer steps between two syncs."""

    def __post_init__(self) -> None:
        self._integer("sync_every", 1)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class AEDiT(Method):
    """How A-EDiT (arXiv 2412.07210) trains: as EDiT, but a sync is due by the clock on the wall.

    Replicas of unequal speed make unequal numbers of steps in a window and do not wait for the
    slowest. What one clock says holds for all: a replica that is due asks the others, and they take
    part after their next step. Raises as `EDiT`.
    """

    sync_seconds: float = 600.0
    """Seconds between two syncs, from the step after which a replica asked for one."""
    min_steps: int = 0
    """Steps that all replicas together must have made in a window. With fewer its sync is void: it
    changes nothing and the window goes on; but not when every replica has ended its training."""

    def __post_init__(self) -> None:
        self._number("sync_seconds", 0.0, math.inf)
        self._integer("min_steps", 0, 1_000_000_000_000)
        super().__post_init__()


METHODS = (EDiT, AEDiT)
