"""The methods' settings: defaults of the paper, and a sentence for everything that cannot work."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from edit_ext import AEDiT, EDiT
from edit_ext.methods_edit import Penalized
from edit_ext.schedule import Clock


def test_defaults() -> None:
    """The defaults are those that the documentation promises."""
    assert EDiT().as_dict() == {
        "sync_every": 128,
        "warmup_steps": 0,
        "outer_lr": 0.7,
        "outer_momentum": 0.8,
        "nesterov": True,
        "clip_norm": 10.0,
        "weighting": "softmax",
        "temperature": 1.0,
        "z_threshold": 3.0,
        "ema_alpha": 0.02,
        "ema_warmup": 10,
        "max_flags_in_a_row": 10,
        "prefetch": 2,
        "granularity": "layer",
        "wire": "fp32",
        "momentum": "sharded",
        "timeout": 600.0,
        "offload": False,
        "average_buffers": True,
    }


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("sync_every", 0, ValueError),
        ("sync_every", 2.5, TypeError),
        ("sync_every", True, TypeError),
        ("warmup_steps", -1, ValueError),
        ("outer_lr", 0.0, ValueError),
        ("outer_lr", math.nan, ValueError),
        ("outer_lr", math.inf, ValueError),
        ("outer_lr", 1001, ValueError),
        ("outer_lr", "0.7", TypeError),
        ("outer_lr", np.True_, TypeError),
        ("outer_momentum", 1.5, ValueError),
        ("outer_momentum", 1.0, ValueError),
        ("outer_momentum", -0.1, ValueError),
        ("nesterov", 1, TypeError),
        ("clip_norm", 0.0, ValueError),
        ("clip_norm", math.inf, ValueError),
        ("clip_norm", 10**400, ValueError),
        ("clip_norm", "ten", TypeError),
        ("weighting", "mean", ValueError),
        ("temperature", 0, ValueError),
        ("temperature", math.inf, ValueError),
        ("z_threshold", -3.0, ValueError),
        ("ema_alpha", 1.0, ValueError),
        ("ema_alpha", 0.0, ValueError),
        ("ema_warmup", 1, ValueError),
        ("max_flags_in_a_row", 0, ValueError),
        ("prefetch", -1, ValueError),
        ("prefetch", 1_000_001, ValueError),
        ("prefetch", np.float32(2), TypeError),
        ("granularity", "tensor", ValueError),
        ("wire", "fp16", ValueError),
        ("momentum", "whole", ValueError),
        ("timeout", 0, ValueError),
        ("timeout", 1.1e6, ValueError),
        ("average_buffers", None, TypeError),
        ("offload", 1, TypeError),
    ],
)
def test_bad_value(field: str, value: Any, kind: type[Exception]) -> None:
    """A value that cannot work is refused when the settings are made, by field and value."""
    with pytest.raises(kind) as caught:
        EDiT(**{field: value})
    assert field in str(caught.value) and repr(value) in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"weighting": "uniform", "temperature": 2.0},
        {"z_threshold": None, "ema_alpha": 0.1},
        {"z_threshold": None, "ema_warmup": 5},
    ],
)
def test_option_without_effect(fields: dict[str, Any]) -> None:
    """An option that another one switches off is an error, not silence."""
    with pytest.raises(ValueError, match="has no effect"):
        EDiT(**fields)


def test_numpy_numbers() -> None:
    """Scalars of NumPy are taken, and become plain numbers, which a state can hold."""
    config = EDiT(
        sync_every=np.int64(4),  # type: ignore[arg-type]
        prefetch=np.uint8(3),  # type: ignore[arg-type]
        outer_lr=np.float32(0.5),  # type: ignore[arg-type]
        timeout=np.int32(60),  # type: ignore[arg-type]
        clip_norm=np.float64(2),
    )
    plain = EDiT(sync_every=4, prefetch=3, outer_lr=0.5, timeout=60.0, clip_norm=2.0)
    assert config == plain
    assert {type(value) for value in config.as_dict().values()} == {int, float, bool, str}


def test_largest_values() -> None:
    """The upper bounds themselves are allowed."""
    config = EDiT(prefetch=1_000_000, timeout=1e6, outer_lr=1e3)
    with pytest.raises(
        ValueError, match=r"at most 1,000,000 seconds \(about 11 days\), but is 10000000"
    ):
        dataclasses.replace(config, timeout=1e7)


def test_unknown_option() -> None:
    """A misspelt option is named."""
    with pytest.raises(TypeError, match="beta"):
        EDiT(beta=0.9)  # type: ignore[call-arg]


def test_off_and_frozen() -> None:
    """None switches clipping and the z-test off; settings cannot change afterwards."""
    config = EDiT(clip_norm=None, z_threshold=None)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.sync_every = 3  # type: ignore[misc]
    assert dataclasses.replace(config, sync_every=3).sync_every == 3


def test_schedule() -> None:
    """Syncs come every `sync_every` steps after the warm-up, and never at its end."""
    clock = Clock(EDiT(sync_every=4, warmup_steps=6).recipe())
    assert list(clock.sync_steps(20)) == [(10, {0}), (14, {0}), (18, {0})]
    for _ in range(12):
        clock.tick()
    assert list(clock.sync_steps(20)) == [(14, {0}), (18, {0})]


def test_clock() -> None:
    """The clock counts the steps of a window apart from those of the warm-up."""
    clock = Clock(EDiT(sync_every=2, warmup_steps=3).recipe())
    assert clock.warming_up and not clock.switch_pending
    seen = []
    for _ in range(8):
        clock.tick()
        seen.append((clock.step, clock.window_steps, set(clock.armed)))
        if clock.switch_pending:
            clock.anchored = True
        if clock.armed:
            assert clock.begin_sync()[1] == {0: 2}
    assert [step for step, _, armed in seen if armed] == [5, 7]
    assert seen[2] == (3, [0], set())
    assert clock.sync_index == 2 and clock.window_steps == [1]


def test_timed() -> None:
    """AEDiT has the settings of EDiT with the same defaults, but for the one that says when."""
    timed, stepped = AEDiT().as_dict(), EDiT().as_dict()
    assert timed.pop("sync_seconds") == 600.0 and timed.pop("min_steps") == 0
    assert stepped.pop("sync_every") == 128
    assert timed == stepped and Penalized().as_dict() == stepped
    assert (AEDiT().name, EDiT().name) == ("AEDiT", "EDiT")


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("sync_seconds", 0, ValueError),
        ("sync_seconds", -1.5, ValueError),
        ("sync_seconds", math.inf, ValueError),
        ("sync_seconds", math.nan, ValueError),
        ("sync_seconds", 10**400, ValueError),
        ("sync_seconds", "600", TypeError),
        ("sync_seconds", True, TypeError),
        ("min_steps", -1, ValueError),
        ("min_steps", 10**13, ValueError),
        ("min_steps", 2.0, TypeError),
        ("outer_lr", 0.0, ValueError),
        ("wire", "fp16", ValueError),
    ],
)
def test_bad_value_timed(field: str, value: Any, kind: type[Exception]) -> None:
    """What cannot work is refused there too, its own settings and the shared ones."""
    with pytest.raises(kind) as caught:
        AEDiT(**{field: value})
    assert field in str(caught.value)
    with pytest.raises(TypeError, match="sync_every"):
        AEDiT(sync_every=4)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="sync_seconds"):
        EDiT(sync_seconds=4)  # type: ignore[call-arg]


def test_steps_arm_no_timed_sync() -> None:
    """However many steps are complete, AEDiT's clock is armed by the alarm alone."""
    config = AEDiT(warmup_steps=3)
    clock = Clock(config.recipe())
    assert list(clock.sync_steps(1000)) == []
    for _ in range(300):
        clock.tick()
    assert not clock.armed and clock.window_steps == [297]


def test_void_window_goes_on() -> None:
    """Steps of a void sync come back, also late; those of a closed window are counted for all."""
    clock = Clock(AEDiT().recipe())
    for _ in range(3):
        clock.tick()
    clock.arm()
    assert clock.begin_sync() == (1, {0: 3})
    clock.tick()  # a GPU tells its statistics steps later
    clock.settle([3, 5], 3, void=True)
    assert (clock.window_steps, clock.agreed_steps, clock.shown_steps) == ([4], 0, 8)
    clock.arm()
    assert clock.begin_sync() == (2, {0: 4})
    clock.settle([4, 6], 4, void=False)
    assert (clock.window_steps, clock.agreed_steps, clock.shown_steps) == ([0], 10, 10)
    clock.tick()
    clock.arm()
    assert clock.begin_sync() == (3, {0: 1})
    clock.settle([1, 0], 1, void=False)
    assert (clock.agreed_steps, clock.shown_steps) == (11, 11)
