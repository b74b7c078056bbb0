"""Handle.explain(): what is going to happen, as text for people."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from .config import AEDiT, EDiT
from .schedule import Clock, sync_steps

if TYPE_CHECKING:
    from .engine import Engine

ON_HOST = " on the host"  # in a kind of memory
SHOWN = 8  # steps listed before "..."


def explain(engine: Engine, steps: int | None = None) -> str:
    """Layers in order, syncs of the next `steps` steps (default: two windows), bytes, memory."""
    config, clock, mesh = engine.config, engine.clock, engine.mesh
    window = config.sync_every if isinstance(config, EDiT) else 0
    last = clock.step + (2 * window if steps is None else steps)
    due = sum(1 for _ in sync_steps(clock.step + 1, last, config))
    lines = [
        f"{config.name} over {_count(mesh.replica.size, 'replica')}{_shards(engine)}, this is "
        f"{mesh.all.name(mesh.all.rank)}; step {clock.step}, {clock.sync_index} syncs so far",
        _by_time(engine) if engine.alarm is not None else _by_steps(clock, window, last, due),
    ]
    lines.append(f"transport: {engine.transport}")
    if clock.warming_up:
        lines.append(f"warm-up: gradients are averaged until step {config.warmup_steps}")
    where = (
        "before the root's forward, because " + engine.plan.whole
        if engine.plan.whole
        else ("each at its own forward")
    )
    ahead = f"{config.prefetch} in flight" if config.prefetch else "none ahead (blocking)"
    lines.append(f"layers are waited for {where}; {ahead}; order: {_order_known(engine)}")
    lines.extend(_layers(engine))
    lines.extend(_bytes(engine, due, last))
    lines.extend(_memory(engine))
    return "\n".join(lines)


def _by_steps(clock: Clock, window: int, last: int, due: int) -> str:
    shown = list(islice(sync_steps(clock.step + 1, last, clock.config), SHOWN))
    listed = ", ".join(map(str, shown)) + (", ..." if due > len(shown) else "")
    return (
        f"syncs: a window of {window} steps; in steps {clock.step + 1} to {last}: {due}"
        + f", each in the forward that follows step {listed}" * bool(shown)
    )


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
    for index in engine.syncs.pipeline.order:
        layer = engine.syncs.layers[index]
        count = sum(t.numel() for t in layer.params)
        dtypes = ", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in layer.params}))
        lines.append(f"  {layer.name:32} {count:12,} {len(layer.params):8}  {dtypes}")
    return lines


def _bytes(engine: Engine, due: int, last: int) -> list[str]:
    """What one rank sends."""
    group, config = engine.mesh.replica, engine.config
    if group.size == 1:
        return ["bytes: with one replica no layer is exchanged"]
    share = 2 * (group.size - 1) / group.size
    width = 2 if config.wire == "bf16" else 4
    payload = sum(layer.size for layer in engine.syncs.layers) * width * share
    warm = max(0, min(config.warmup_steps, last) - engine.clock.step)
    own = sum(p.numel() for layer in engine.syncs.anchored_layers() for p in layer.params)
    gradients = own * 4 * share
    return [
        f"wire {config.wire} between ranks {group.ranks}; "
        f"a peer silent for {config.timeout:g} s is given up",
        f"each rank sends {_size(payload)} of payload per sync"
        + f", {_size(payload * due)} in the {due} syncs above" * (engine.alarm is None)
        + (f"; {_size(gradients)} per warm-up step, {warm} to come" * bool(warm)),
    ]


def memory(engine: Engine) -> dict[str, int]:
    """Bytes that attach has added on this rank so far, by kind. What ends in ON_HOST is in pinned
    memory of the host, everything else where the parameters are."""
    syncs, kinds = engine.syncs, {}
    count = len(syncs.anchored_layers()) if engine.config.offload else 0
    for where, layers in (("", syncs.layers[count:]), (ON_HOST, syncs.layers[:count])):
        if layers:
            momenta = [layer.momentum for layer in layers]
            kinds["anchors" + where] = sum(layer.anchor.nbytes for layer in layers)
            kinds["outer momentum" + where] = sum(m.nbytes for m in momenta if m is not None)
    kinds["detectors"] = sum(layer.detector.nbytes for layer in syncs.layers)
    kinds["buffers of layers in flight"] = syncs.pool.bytes
    return kinds


def _memory(engine: Engine) -> list[str]:
    kinds = memory(engine)
    listed = ", ".join(f"{kind} {_size(count)}" for kind, count in kinds.items())
    host = sum(count for kind, count in kinds.items() if kind.endswith(ON_HOST))
    said = f"{_size(sum(kinds.values()) - host)} on this rank"
    if engine.config.offload:
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
