"""The methods on the command line of train_lm.py, and the settings that each of them has."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

import edit_ext
from edit_ext.config import Method
from edit_ext.examples.kinds import number_or_none

Kind = Callable[[str], Any]
CONFIGS: dict[str, type[Method]] = {
    "edit": edit_ext.EDiT,
    "aedit": edit_ext.AEDiT,
    "sync": edit_ext.Synchronous,
    "post-local-sgd": edit_ext.PostLocalSGD,
    "diloco": edit_ext.DiLoCo,
    "streaming-diloco": edit_ext.StreamingDiLoCo,
    "co2": edit_ext.CO2,
    "co2-star": edit_ext.CO2Star,
    "local-adam": edit_ext.LocalAdam,
    "des-loc": edit_ext.DESLOC,
    "fedavg-persistent": edit_ext.FedAvgPersistent,
    "fedavg-reset": edit_ext.FedAvgReset,
}


def periods(text: str) -> float | dict[str, float]:
    """One number of steps, or NAME=STEPS,NAME=STEPS; `never` is a number too."""

    def period(word: str) -> float:
        return math.inf if word == "never" else int(word)

    try:
        if "=" not in text:
            return period(text)
        pairs = [part.partition("=") for part in text.split(",")]
        return {name: period(word) for name, _, word in pairs}
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"wants steps, or NAME=STEPS,NAME=STEPS, such as exp_avg=96, got {text!r}"
        ) from None


# Handed to the settings as they are; what is not given keeps its own default. None: a switch.
SETTINGS: dict[str, Kind | None] = {
    "sync_every": int,
    "sync_seconds": float,
    "min_steps": int,
    "param_every": int,
    "state_every": periods,
    "schedule": str,
    "order": str,
    "outer": str,
    "adaptive": number_or_none,
    "warmup_steps": int,
    "outer_lr": float,
    "outer_momentum": float,
    "clip_norm": number_or_none,
    "clip_value": number_or_none,
    "weighting": str,
    "temperature": float,
    "z_threshold": number_or_none,
    "ema_alpha": float,
    "ema_warmup": int,
    "max_flags_in_a_row": int,
    "fragments": int,
    "pattern": str,
    "delay": int,
    "alpha": float,
    "staleness": str,
    "penalty": float,
    "reset_step": None,
    "prefetch": int,
    "wire": str,
}


def flag(name: str) -> str:
    """A setting's option."""
    return "--" + name.replace("_", "-")


def defaults(name: str) -> str:
    """A setting's default in each method that has it."""
    found: dict[str, list[str]] = {}
    for method, config in CONFIGS.items():
        fields = config().as_dict()
        if name in fields:
            found.setdefault(str(fields[name]), []).append(method)
    if len(found) == 1 and len(*found.values()) > 3:
        return next(iter(found))
    return "; ".join(f"{value} {', '.join(methods)}" for value, methods in found.items())


def add_settings(add: Callable[..., None]) -> None:
    """All settings as options."""
    for name, kind in SETTINGS.items():
        add(flag(name), kind, argparse.SUPPRESS, f"the method's {name} ({defaults(name)})")


def check_settings(options: argparse.Namespace) -> None:
    """Raise ValueError for a setting that the method does not have, or that leaves it no step."""
    known = CONFIGS[options.method]().as_dict()
    for name in SETTINGS:
        if hasattr(options, name) and name not in known:
            raise ValueError(f"{flag(name)} has no effect with --method {options.method}")
    if getattr(options, "warmup_steps", 0) >= options.steps:
        raise ValueError(
            f"--warmup-steps {options.warmup_steps} leaves none of the {options.steps} steps "
            f"to --method {options.method}; use --method sync for that"
        )


def config_of(options: argparse.Namespace) -> Method:
    """The method's settings. Raises ValueError or TypeError, from them, for one out of range."""
    given = {name: getattr(options, name) for name in SETTINGS if hasattr(options, name)}
    return CONFIGS[options.method](timeout=options.timeout, **given)
