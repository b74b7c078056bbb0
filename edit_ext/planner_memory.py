"""Bytes that each method holds on a rank besides the model and its optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .planner_units import WIRES

if TYPE_CHECKING:
    from .planner import Job, Schedule

REPLACING = ("post-local-sgd", "local-adam", "des-loc", "fedavg-persistent", "fedavg-reset")


def state_parts(job: Job, schedule: Schedule) -> dict[str, float]:
    """Bytes per parameter of the rank's shard, in four kinds; R replicas, w bytes on the wire.

    | method | anchor | momentum | piece | in flight |
    | synchronous | 0 | 0 | 0 | 0 |
    | edit, a-edit, diloco | 4 | 4/R | 0 | layers |
    | post-local-sgd, local-adam, des-loc, fedavg | 4 | 0 | 0 | layers |
    | co2 | 4 | 4 | 0 | w + w (R-1)/R |
    | co2-star | 4 | 4/R | 4/R | layers |
    | streaming-diloco | 4 | 4/R | 0 | a fragment, or layers with delay 0 |

    A mean that replaces the weights has no momentum, and states have no anchor. co2 sends and
    receives all of the model for a whole window: that is its second anchor. What flies holds its
    buffers, b = w + w (R-1)/R + 4/R bytes: what is sent, what is received, and the merged piece.
    Layers: of `prefetch` of L, b prefetch/L. A fragment: b/fragments.
    """
    if schedule.method == "synchronous":
        return {"anchor": 0.0, "momentum": 0.0, "piece": 0.0, "in_flight": 0.0}
    replicas, wire = job.replicas, WIRES[job.wire]
    piece, both_ways = 4 / replicas, wire + wire * (replicas - 1) / replicas
    flying = (both_ways + piece) * min(job.prefetch, job.layers) / job.layers
    momentum = 0.0 if schedule.method in REPLACING else piece
    parts = {"anchor": 4.0, "momentum": momentum, "piece": 0.0, "in_flight": flying}
    if schedule.method == "co2":
        parts |= {"momentum": 4.0, "in_flight": both_ways}
    elif schedule.method == "co2-star":
        parts["piece"] = piece
    elif schedule.delay:
        parts["in_flight"] = (both_ways + piece) / schedule.fragments
    return parts


def state_bytes(job: Job, schedule: Schedule) -> float:
    """The sum of the parts, for all N/S parameters of a rank."""
    return sum(state_parts(job, schedule).values()) * job.params / job.shards
