"""The detector flags Gaussian norms at the rate of the tail that its threshold names."""

import math
import random

import pytest

from edit_ext.reference import Detector, Policy

TAIL = 0.5 * math.erfc(3 / math.sqrt(2))  # 1 - Phi(3) = 0.00135
SYNCS = 1000


def flag_rates(policy: Policy, ratio: float, runs: int, seed: int) -> tuple[float, float, int]:
    """Flags per decision in whole runs and in the first 100 syncs after warm-up; decisions made.

    Norms have mean 1 and standard deviation 1/ratio.
    """
    draw = random.Random(seed).gauss
    early = total = 0
    for _ in range(runs):
        row = Detector()
        for sync in range(SYNCS):
            row, flagged = row.judge(draw(1.0, 1.0 / ratio), policy)
            total += flagged
            early += flagged and sync < policy.ema_warmup + 100
    decisions = SYNCS - policy.ema_warmup
    return total / (runs * decisions), early / (runs * 100), runs * decisions


@pytest.mark.parametrize("warmup", [10, 100])
@pytest.mark.parametrize("ratio", [5.0, 20.0, 50.0])
def test_flag_rate_is_the_gaussian_tail(ratio: float, warmup: int) -> None:
    """Within a factor of two of 1 - Phi(3), over whole runs and right after the EMA warm-up."""
    whole, early, decisions = flag_rates(Policy(ema_warmup=warmup), ratio, runs=480, seed=3)
    assert decisions >= 200_000
    assert 0.5 * TAIL < whole < 2 * TAIL
    assert 0.5 * TAIL < early < 2 * TAIL


def test_floor_of_sigma_only_lowers_the_rate() -> None:
    """Norms steadier than 1 % of their mean are flagged less often than the tail, never more."""
    whole, early, _ = flag_rates(Policy(), ratio=200.0, runs=60, seed=4)
    assert whole < TAIL and early < TAIL


def test_outliers_are_still_found() -> None:
    """Right after warm-up, and late, a norm eight sigma up is flagged in most runs."""
    draw = random.Random(5).gauss
    for syncs, share in ((10, 0.9), (200, 0.99)):
        caught = 0
        for _ in range(200):
            row = Detector()
            for _ in range(syncs):
                row, _ = row.judge(draw(1.0, 0.05), Policy())
            caught += row.judge(1.4, Policy())[1]
        assert caught >= share * 200
