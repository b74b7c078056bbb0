"""Bytes that each method holds on a rank besides the model and its optimizer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from .planner_units import WIRES

if TYPE_CHECKING:
    from .planner import Job, Schedule

REPLACING = ("post-local-sgd", "local-adam", "des-loc", "fedavg-persistent", "fedavg-reset")


def state_parts(job: Job, schedule: Schedule) -> dict[str, float]:
    """Bytes per parameter of the rank's shard, in three kinds; R replicas, w bytes on the wire.

    | method | anchor | momentum | in flight |
    | synchronous | 0 | 0 | 0 |
    | edit, a-edit, diloco, co2-star | 4 | 4/R | layers |
    | post-local-sgd, local-adam, des-loc, fedavg | 4 | 0 | layers |
    | co2 | 4 | 4/R | all |
    | streaming-diloco | 4 | 4/R | a fragment, or layers with delay 0 |

    A mean that replaces the weights has no momentum, and states have no anchor. What flies holds
    its buffers, b = w + w (R-1)/R + 4/R bytes: what is sent, what is received, and the merged
    piece. Layers: of `prefetch` of L, b prefetch/L. A fragment: b/fragments. All of them, and one
    more, for a whole window: in co2 the step that comes back is its second anchor. States go one
    after the other in the buffers of one layer more, with 4 bytes of what comes back, since they
    have no anchor to come back to: (b + 4)/L.
    """
    if schedule.method == "synchronous":
        return {"anchor": 0.0, "momentum": 0.0, "in_flight": 0.0}
    replicas, wire = job.replicas, WIRES[job.wire]
    piece, both_ways = 4 / replicas, wire + wire * (replicas - 1) / replicas
    each = flying = both_ways + piece
    momentum = 0.0 if schedule.method in REPLACING else piece
    if schedule.method == "co2":
        flying *= (job.layers + 1) / job.layers
    elif schedule.delay:
        flying /= schedule.fragments
    else:
        flying *= min(job.prefetch, job.layers) / job.layers
    if any(map(math.isfinite, schedule.states)):
        flying += (each + 4) / job.layers
    return {"anchor": 4.0, "momentum": momentum, "in_flight": flying}


def state_bytes(job: Job, schedule: Schedule) -> float:
    """The sum of the parts, for all N/S parameters of a rank."""
    return sum(state_parts(job, schedule).values()) * job.params / job.shards
