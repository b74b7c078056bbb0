"""What is claimed of the methods, and whether the evidence bears it out."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from edit_ext.bench.evidence_read import Table, Value, damage, recovery
from edit_ext.bench.evidence_rows import COUNTS, NOISE, RATES

TAIL = 0.5 * math.erfc(3 / math.sqrt(2))  # of a Gaussian above three standard deviations
Claims = list["Claim"]


@dataclass(frozen=True)
class Claim:
    """A statement, whether it holds here, and the figures."""

    text: str
    holds: bool
    figures: str


def below(table: Table, text: str, better: str, worse: str) -> Claim:
    """That one label ends below another."""
    excess = table.excess(worse, better)
    return Claim(text, excess.positive, _both(table, better, worse))


def same(table: Table, text: str, one: str, other: str) -> Claim:
    """That neither of two labels ends below the other."""
    apart = table.excess(one, other).positive or table.excess(other, one).positive
    return Claim(text, not apart, _both(table, one, other))


def methods(table: Table) -> Claims:
    return [
        below(table, "EDiT ends below DiLoCo.", "EDiT", "DiLoCo"),
        below(table, "EDiT ends below Post Local SGD.", "EDiT", "PostLocalSGD"),
        same(
            table, "DES-LOC ends as Local Adam does, whose syncs send twice as much.",
            "DESLOC", "LocalAdam",
        ),
        below(
            table, "Resetting states after each average is worse than keeping them local.",
            "FedAvgPersistent", "FedAvgReset",
        ),
        below(
            table, "DES-LOC with a Nesterov outer step ends below DES-LOC.",
            "DESLOC, Nesterov", "DESLOC",
        ),
        below(table, "Averaging gradients at every step ends lowest.", "Synchronous", min(
            (label for label in table.results if label != "Synchronous"),
            key=lambda label: table.value(label).mean,
        )),
    ]  # fmt: skip


def noise(table: Table) -> Claims:
    names = ("EDiT", "DiLoCo")
    spread = {n: table.value(n).deviation for n in names}
    excess = {n: table.paired(f"{n}, noise", n, damage) for n in names}
    times = {
        n: table.paired(f"{n}, noise", n, lambda a, b, n=n: recovery(a, b, NOISE[1], spread[n]))
        for n in names
    }
    less = table.paired("EDiT, noise", "EDiT", damage)
    flagged = [result["flags"]["noisy"] for result in table.results["EDiT, noise"]]
    share = sum(f for f, _ in flagged) / sum(judged for _, judged in flagged)
    return [
        Claim(
            "Noise in one replica costs EDiT less than DiLoCo: the largest excess of the "
            "validation loss over the clean run of the same seed.",
            excess["DiLoCo"].mean - less.mean > 2 * max(excess["DiLoCo"].deviation, less.deviation),
            f"{less} against {excess['DiLoCo']} nats",
        ),
        Claim(
            "EDiT is back within the spread of clean runs sooner.",
            times["EDiT"].mean < times["DiLoCo"].mean,
            f"{_steps(times['EDiT'])} against {_steps(times['DiLoCo'])}; spreads "
            f"{spread['EDiT']:.4f} and {spread['DiLoCo']:.4f}; excess at the end "
            f"{table.excess('EDiT, noise', 'EDiT')} and {table.excess('DiLoCo, noise', 'DiLoCo')}",
        ),
        Claim(
            "The z-test flags the noisy replica in most layers and syncs of the noise.",
            share > 0.5, f"{share:.0%}",
        ),
    ]  # fmt: skip


def ablation(table: Table) -> Claims:
    parts = {
        "no z-test": "the z-test", "uniform weights": "softmax weights", "no clip": "the clip",
        "none": "all three",
    }  # fmt: skip
    full = table.paired("EDiT, noise", "EDiT", damage)
    found = []
    for label, what in parts.items():
        less = table.paired(f"{label}, noise", label, damage)
        worse = less.mean - full.mean > 2 * max(less.deviation, full.deviation)
        told = f"largest excess {less} against {full} nats"
        found.append(Claim(f"Without {what} the noise costs more.", worse, told))
        text = f"Without noise, leaving out {what} changes nothing."
        found.append(same(table, text, label, "EDiT"))
    return found


def healthy(table: Table) -> Claims:
    found = []
    for label, results in table.results.items():
        flagged, judged = (sum(r["flags"]["healthy"][i] for r in results) for i in (0, 1))
        # A count of rare events: within two standard deviations of Poisson of the factor.
        most = 2 * TAIL * judged
        found.append(
            Claim(
                f"{label}: healthy replicas are flagged at most twice as often as the tail of a "
                f"Gaussian says ({TAIL:.2%}).",
                flagged <= most + 2 * math.sqrt(most),
                f"{flagged} of {judged:,}: {flagged / judged:.2%}",
            )
        )
    return found


def windows(table: Table) -> Claims:
    found = []
    for name in ("EDiT", "DiLoCo"):
        best = min((4, 8, 16, 32, 64), key=lambda every: table.value(f"{name}, {every}").mean)
        for every, what in ((64, "Long"), (4, "Very short")):
            text = f"{what} windows ({every} steps) cost {name} loss; its best have {best}."
            found.append(below(table, text, f"{name}, {best}", f"{name}, {every}"))
    return found


def schedules(table: Table) -> Claims:
    text = "Syncs by chance at the same rates end as periodic ones do."
    return [same(table, text, "periodic", "bernoulli")]


def never(table: Table) -> Claims:
    often, seldom, none = "K_u = K_v = K_x", "K_u = 48, K_v = 96", "K_u = K_v = inf"
    return [
        same(table, "States averaged at DES-LOC's periods end as at every sync.", seldom, often),
        below(table, "States that are never averaged end higher.", seldom, none),
    ]


def periods(table: Table) -> Claims:
    base = "16, 48, 96"
    return [
        below(table, "Rarer averages of the weights (K_x 128) end higher.", base, "128, 48, 96"),
        same(table, "Rarer averages of the first moment (K_u 192) change nothing.", base,
             "16, 192, 96"),
        same(table, "Rarer averages of the second moment (K_v 192) change nothing.", base,
             "16, 48, 192"),
    ]  # fmt: skip


def best_rate(table: Table, method: str, count: int) -> float:
    """The learning rate with the lowest mean loss."""
    return min(RATES, key=lambda lr: table.value(f"{method}, {count}, {lr:g}").mean)


def rates(table: Table) -> Claims:
    best = {m: [best_rate(table, m, n) for n in COUNTS] for m in ("EDiT", "Synchronous")}
    words = {m: ", ".join(f"{lr:g}" for lr in found) for m, found in best.items()}
    counts = ", ".join(map(str, COUNTS))
    return [
        Claim(
            "EDiT's best learning rate is the same for all numbers of replicas.",
            len(set(best["EDiT"])) == 1, f"{words['EDiT']} for {counts}",
        ),
        Claim(
            "That of averaged gradients is not.",
            len(set(best["Synchronous"])) > 1, f"{words['Synchronous']} for {counts}",
        ),
    ]  # fmt: skip


def joining(table: Table) -> Claims:
    found = []
    for label in ("DESLOC, averaged states", "DESLOC, zero states"):
        jump = table.value(label, lambda r: r["joining"]["new"] - r["joining"]["old"])
        spread = table.value(label, lambda r: r["joining"]["old"]).deviation
        found.append(
            Claim(
                f"{label}: the new replicas' first {16} training losses show no jump beyond the "
                "spread over seeds of the old ones'.",
                jump.mean <= spread, f"new - old: {jump} nats; spread of the old {spread:.4f}",
            )
        )  # fmt: skip
    text = "More replicas end lower than those that were alone."
    return [*found, below(table, text, "DESLOC, averaged states", "DESLOC, nobody joins")]


def sensitivity(table: Table) -> Claims:
    clip = {c: table.value(f"phi {c:g}", lambda r: r["clip"]["deviation"]) for c in (0.4, 0.2, 0.1)}
    share = {c: table.value(f"phi {c:g}", lambda r: r["clip"]["share"]) for c in (0.4, 0.2, 0.1)}
    base = table.value("EDiT, noise")
    values = [table.value(label) for label in table.results if not label.startswith("phi")]
    width = max(v.mean for v in values) - min(v.mean for v in values)
    told = "; ".join(
        f"phi {c:g}: binds in {share[c].mean:.0%}, deviation {clip[c].mean:.3f}" for c in clip
    )
    unclipped = max(r["clip"]["share"] for r in table.results["EDiT, noise"])
    return [
        Claim(
            "Delta between 2 and 6 and alpha between 0.02 and 0.3 move the loss by less than the "
            "seeds do.", width < 2 * base.deviation, f"{width:.4f} against ± {base.deviation:.4f}",
        ),
        Claim(
            "A clip of 10 never binds at this scale.", unclipped == 0,
            f"binds in {unclipped:.0%} of the layers and syncs. The clip factor: {told}",
        ),
    ]  # fmt: skip


def _both(table: Table, one: str, other: str) -> str:
    return (
        f"{table.value(one).mean:.4f} against {table.value(other).mean:.4f}; difference by seed "
        f"{table.excess(one, other).form('+.4f')}"
    )


def _steps(value: Value) -> str:
    if math.isinf(value.mean):
        return "not in every seed by the end"
    return f"{value.form('.0f')} steps after the noise"


CLAIMS: dict[str, Callable[[Table], Claims]] = {
    "methods": methods, "noise": noise, "ablation": ablation, "healthy": healthy,
    "windows": windows, "schedules": schedules, "never": never, "periods": periods,
    "rates": rates, "joining": joining, "sensitivity": sensitivity, "methods-2e-3": methods,
}  # fmt: skip
