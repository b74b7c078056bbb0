"""Handle.explain(): what is going to happen, as text for people."""

from __future__ import annotations

import math
from itertools import islice
from typing import TYPE_CHECKING

from .methods import AEDiT
from .recipe import Track
from .sharding import local

if TYPE_CHECKING:
    from .engine import Engine

ON_HOST = " on the host"  # in a kind of memory
SHOWN = 8  # steps listed before "..."


def explain(engine: Engine, steps: int | None = None) -> str:
    """Layers in order, syncs of the next `steps` steps (default: two windows), bytes, memory."""
    config, clock, mesh, recipe = engine.config, engine.clock, engine.mesh, engine.recipe
    periods = map(clock.every, range(len(recipe.tracks)))
    finite = [every for every in periods if not math.isinf(every)]
    last = clock.step + (2 * int(max(finite, default=0)) if steps is None else steps)
    lines = [
        f"{config.name} over {_count(mesh.replica.size, 'replica')}{_shards(engine)}, this is "
        f"{mesh.all.name(mesh.all.rank)}; step {clock.step}, {clock.sync_index} syncs so far",
    ]
    if engine.alarm is not None:
        lines.append(_by_time(engine))
    else:
        lines.extend(_by_steps(engine, number, last) for number in range(len(recipe.tracks)))
    lines.append(f"transport: {engine.transport}")
    if clock.warming_up:
        until = recipe.averaged_steps
        said = "at every step" if math.isinf(until) else f"until step {until}"
        lines.append(f"warm-up: gradients are averaged {said}")
    if not recipe.tracks:
        return "\n".join([*lines, *_bytes(engine, last), *_memory(engine)])
    where = (
        "before the root's forward, because " + engine.plan.whole
        if engine.plan.whole
        else ("each at its own forward")
    )
    ahead = f"{recipe.prefetch} in flight" if recipe.prefetch else "none ahead (blocking)"
    if recipe.late:
        ahead = "in flight meanwhile"
    if recipe.tracks[0].at_step:
        where = "before the step"
    lines.append(f"layers are waited for {where}; {ahead}; order: {_order_known(engine)}")
    lines.extend(_layers(engine))
    lines.extend(_bytes(engine, last))
    lines.extend(_memory(engine))
    return "\n".join(lines)


def _by_steps(engine: Engine, number: int, last: int) -> str:
    clock, track = engine.clock, engine.recipe.tracks[number]
    steps = [step for step, due in clock.sync_steps(last) if number in due]
    shown = list(islice(steps, SHOWN))
    listed = ", ".join(map(str, shown)) + (", ..." if len(steps) > len(shown) else "")
    name = "syncs" if len(engine.recipe.tracks) == 1 else f"syncs of {track.name}"
    window = _window(track, clock.every(number))
    return (
        f"{name}: {window}; in steps {clock.step + 1} to {last}: {len(steps)}"
        + f", each in the forward that follows step {listed}" * bool(shown)
    )


def _window(track: Track, every: float) -> str:
    if math.isinf(every):
        return "never"
    said = f"a window of {every} steps"
    if track.target is not None:
        said += f" now, so that replicas come apart by {track.target:g}"
    if track.seed is not None:
        said += " on average, by chance"
    if track.delay:
        said += f", in place {track.delay} steps later"
        if track.keep:
            said += f" with {track.keep:g} of the local weights"
    return said


def _by_time(engine: Engine) -> str:
    """Which step it will be nobody knows: another replica may ask, and steps take their time."""
    alarm, config, mesh = engine.alarm, engine.config, engine.mesh
    assert alarm is not None and isinstance(config, AEDiT)
    text = f"syncs: a window of {config.sync_seconds:g} s"
    if config.min_steps:
        text += f" and at least {config.min_steps} steps of all replicas together"
    if not engine.clock.anchored:
        return text + ", the first from the end of the warm-up or the first forward"
    if mesh.shard.rank != 0:
        return text + f", by the clock of {mesh.shard.name(0)}"
    if alarm.asked > engine.clock.sync_index:
        return text + "; the next is due now"
    return text + f"; the next in {alarm.left:.1f} s, sooner if another replica asks for it"


def _order_known(engine: Engine) -> str:
    if engine.clock.sync_index:
        return "as in replica 0's first training forward"
    return "by registration until replica 0's first training forward is known"


def _layers(engine: Engine) -> list[str]:
    """One line per layer in the order of the exchange."""
    lines = [f"  {'layer':32} {'parameters':>12} {'tensors':>8}  dtype"]
    held = engine.held
    for index in held.of(set(range(len(held.recipe.tracks))), engine.syncs.order):
        layer = held.layers[index]
        count = sum(t.numel() for t in layer.params)
        dtypes = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in layer.params}))
        lines.append(f"  {layer.name:32} {count:12,} {len(layer.params):8}  {dtypes}")
    return lines


def _bytes(engine: Engine, last: int) -> list[str]:
    """What one rank sends."""
    group, config, recipe, held = engine.mesh.replica, engine.config, engine.recipe, engine.held
    if group.size == 1:
        return ["bytes: with one replica no layer is exchanged"]
    share = 2 * (group.size - 1) / group.size
    width = 2 if recipe.wire == "bf16" else 4
    warm = max(0, min(recipe.averaged_steps, last) - engine.clock.step)
    gradients = sum(local(p).numel() for p in held.trainable.values()) * 4 * share
    lines = [
        f"wire {recipe.wire} between ranks {group.ranks}; "
        f"a peer silent for {config.timeout:g} s is given up",
    ]
    steps = list(engine.clock.sync_steps(last))
    for number, track in enumerate(recipe.tracks):
        elements = sum(held.layers[index].size for index in held.of({number}, engine.syncs.order))
        if track.states is not None and not elements:
            lines.append(
                f"each rank will send {track.name} too: a state of the optimizer, unknown yet"
            )
            continue
        payload, due = elements * width * share, sum(1 for _, tracks in steps if number in tracks)
        name = "sync" if len(recipe.tracks) == 1 else f"sync of {track.name}"
        lines.append(
            f"each rank sends {_size(payload)} of payload per {name}"
            + f", {_size(payload * due)} in the {due} syncs above" * (engine.alarm is None)
        )
    if warm:
        lines[-1] += f"; {_size(gradients)} per warm-up step, {warm} to come"
    return lines


def memory(engine: Engine) -> dict[str, int]:
    """Bytes that attach has added on this rank so far, by kind. What ends in ON_HOST is in pinned
    memory of the host, everything else where the parameters are."""
    held, where = engine.held, ON_HOST if engine.recipe.offload else ""
    anchors = [layer.anchor for layer in held.anchored()]
    momenta = [layer.momentum for layer in held.anchored()]
    return {
        "anchors" + where: sum(a.nbytes for a in anchors if a is not None),
        "outer momentum" + where: sum(m.nbytes for m in momenta if m is not None),
        "detectors": sum(layer.detector.nbytes for layer in held.layers),
        "buffers of layers in flight": held.pool.bytes + held.state_pool.bytes,
        "samples of states": engine.syncs.samples.bytes,
    }


def _memory(engine: Engine) -> list[str]:
    kinds = memory(engine)
    listed = ", ".join(f"{kind} {_size(count)}" for kind, count in kinds.items())
    host = sum(count for kind, count in kinds.items() if kind.endswith(ON_HOST))
    said = f"{_size(sum(kinds.values()) - host)} on this rank"
    if engine.recipe.offload:
        said += f"'s device and {_size(host)} in pinned memory of its host"
    return [f"memory: {said} so far: {listed}"]


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'s' * (number > 1)}"


def _shards(engine: Engine) -> str:
    shards = engine.mesh.shard.size
    return f" of {shards} shards each" if shards > 1 else ""


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")
