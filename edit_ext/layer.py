"""Which parameters form a layer, and which modules wait for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import nn

from . import fsdp

ROOT = "(root)"


@dataclass
class Unit:
    """A layer before it has memory: its name and its trainable parameters in registration order."""

    name: str
    params: dict[str, nn.Parameter] = field(default_factory=dict)
    counted: int = 0
    """How many of them, the first ones, count in this rank's norms."""


@dataclass
class Gate:
    """A module whose forward waits for layers; `layers` are indexes into `Plan.units`."""

    module: nn.Module
    layers: list[int]


@dataclass
class Plan:
    """The layers of a model by registration, and the modules that wait for them."""

    units: list[Unit]
    gates: list[Gate]
    """Modules inside the root, each with the layers that it waits for."""
    root: list[int]
    """Layers that the root itself waits for: its own parameters."""
    whole: str | None
    """Why all layers are waited for before the root's forward; None when they are not."""
    sharded: dict[nn.Module, int] = field(default_factory=dict)
    """FSDP2 modules and the layer of what each of them gathers."""
    behind: dict[nn.Module, list[nn.Module]] = field(default_factory=dict)
    """Modules that wait, and the FSDP2 modules for which each of them waits: itself, or what a
    wrapper or a compiled module around them holds."""


WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # torch.compile, activation checkpointing


def clean(name: str) -> str:
    """A module's or parameter's name without what torch's wrappers of modules add to it."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile would trace hooks below this module, or TorchScript skip them."""
    kind = type(module)
    return (
        kind.__module__ == "torch._dynamo.eval_frame"
        or getattr(module, "_compiled_call_impl", None) is not None
        or any(base.__module__.startswith("torch.jit") for base in kind.__mro__)
    )


def find_layers(
    model: nn.Module,
    layers: Sequence[str | nn.Module] | None = None,
    granularity: str = "layer",
) -> Plan:
    """Split the trainable parameters of `model` into layers.

    A layer is what `layers` names (modules or their names); else each FSDP2 parameter group; else
    each child of the outermost `nn.ModuleList`s; else each direct child. What is left over belongs
    to the FSDP2 module around it, or is split by direct child of the root. A parameter that several
    layers share belongs to the first of them.

    Raises ValueError for an unknown or overlapping name, TypeError for anything else in `layers`.
    """
    groups = fsdp.param_groups(model)
    if groups and layers is not None:
        raise ValueError(
            "layers= has no effect on a model of fully_shard: FSDP2 gathers a parameter group at a "
            "time, so those are the layers"
        )
    modules: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        modules.setdefault(clean(name), module)  # torch.compile's wrapper, not what it wraps
    names = [] if groups else _chosen(model, modules, layers)
    names_of = {module: clean(name) for name, module in model.named_modules()}
    units = _units(model, modules, names, [(names_of[g.modules[0]], g.params) for g in groups])
    owner = {id(p): index for index, unit in enumerate(units) for p in unit.params.values()}
    uncovered = [
        clean(name)
        for name, p in model.named_parameters()
        if p.requires_grad and id(p) not in owner
    ]
    if uncovered:
        raise ValueError(f"no layer covers the parameter {uncovered[0]!r}")
    gathered = {id(p) for group in groups for p in group.params}
    waits = _waits(model, modules, names, {i: u for i, u in owner.items() if i not in gathered})
    sharded: dict[nn.Module, int] = {}
    behind: dict[nn.Module, list[nn.Module]] = {}
    for group in groups:
        mine = {owner[id(p)] for p in group.params if id(p) in owner}
        for module in group.modules:
            if mine:
                gate = _gate_name(names_of[module], modules)
                sharded[module] = min(mine)
                behind.setdefault(modules[gate], []).append(module)
                waits.setdefault(gate, set()).update(mine)
    root = sorted(waits.pop("", set()))
    whole = None
    if granularity == "model":
        whole = "granularity is 'model'"
    elif is_compiled(model):
        whole = "the root is compiled as a whole"
    gates = [] if whole else [Gate(modules[n], sorted(waits[n])) for n in modules if n in waits]
    return Plan(units, gates, root, whole, sharded, behind)


def _chosen(
    model: nn.Module,
    modules: dict[str, nn.Module],
    layers: Sequence[str | nn.Module] | None,
) -> list[str]:
    """Names of the modules that are layers, before the leftovers."""
    if layers is not None:
        if isinstance(layers, str) or not isinstance(layers, Iterable):
            said = f"the string {layers!r}" if isinstance(layers, str) else repr(layers)
            raise TypeError(f"layers must be a list of module names or modules, not {said}")
        chosen = [_resolve(item, modules) for item in layers]
        for name in chosen:
            inside = [other for other in chosen if other != name and _within(name, other)]
            if inside or chosen.count(name) > 1:
                other = inside[0] if inside else name
                raise ValueError(f"layers= names {other!r} and {name!r}, which overlap")
        return chosen
    lists: list[str] = []
    for name, module in modules.items():
        if isinstance(module, nn.ModuleList) and not any(_within(name, other) for other in lists):
            lists.append(name)
    if lists:
        children = [(name, key) for name in lists for key, _ in modules[name].named_children()]
        return [f"{name}.{key}" if name else key for name, key in children]
    return [key for key, child in model.named_children() if key != "_orig_mod"] or [
        key for child in model.children() for key, _ in child.named_children()
    ]


def _resolve(item: str | nn.Module, modules: dict[str, nn.Module]) -> str:
    if isinstance(item, str):
        if clean(item) not in modules or not item:
            some = ", ".join(repr(name) for name in list(modules)[1:6])
            raise ValueError(f"layers= names {item!r}, which the model lacks; it has {some}, ...")
        return clean(item)
    if isinstance(item, nn.Module):
        for name, module in modules.items():
            if module is item and name:
                return name
        raise ValueError(f"layers= holds a {type(item).__name__} that is not inside the model")
    raise TypeError(f"layers= takes module names or modules, not {type(item).__name__}")


def _units(
    model: nn.Module,
    modules: dict[str, nn.Module],
    names: list[str],
    groups: list[tuple[str, list[nn.Parameter]]],
) -> list[Unit]:
    owned: set[int] = set()
    units: dict[str, Unit] = {}

    def give(unit: str, params: Iterable[tuple[str, nn.Parameter]]) -> None:
        for name, param in params:
            if param.requires_grad and id(param) not in owned:
                owned.add(id(param))
                units.setdefault(unit, Unit(unit)).params[clean(name)] = param

    called = {id(p): name for name, p in model.named_parameters()}
    for name, params in groups:
        give(name or ROOT, [(called[id(p)], p) for p in params])
    for name in names:
        give(name, modules[name].named_parameters(prefix=name))
    around = {name for name, _ in groups}
    for name, param in model.named_parameters():
        child, dot, _ = clean(name).partition(".")
        home = clean(name).rpartition(".")[0]
        while home and home not in around:
            home = home.rpartition(".")[0]
        give((home if home in around else child if dot else "") or ROOT, [(name, param)])
    # Registration order, because layers that the first forward does not visit follow by it.
    place = {id(p): index for index, p in enumerate(model.parameters())}
    return sorted(units.values(), key=lambda u: min(place[id(p)] for p in u.params.values()))


def _waits(
    model: nn.Module, modules: dict[str, nn.Module], names: list[str], owner: dict[int, int]
) -> dict[str, set[int]]:
    """Module name -> layers that its forward waits for."""
    waits: dict[str, set[int]] = {}

    def add(name: str, params: Iterable[nn.Parameter]) -> None:
        found = {owner[id(p)] for p in params if id(p) in owner}
        if found:
            waits.setdefault(_gate_name(name, modules), set()).update(found)

    for name, module in model.named_modules():
        add(clean(name), module.parameters(recurse=False))
    # A layer's own forward may use a parameter of a child that it never calls.
    containers = {n.partition(".")[0] for n in names}
    pure = [n for n in modules if n and "." not in n and n not in containers]
    for name in [*names, *pure]:
        if _callable(modules[name]):
            add(name, modules[name].parameters())
    return waits


def _gate_name(name: str, modules: dict[str, nn.Module]) -> str:
    """The module that waits for `name`'s parameters: itself, or the nearest ancestor that runs."""
    parts = name.split(".") if name else []
    for length in range(1, len(parts) + 1):
        ancestor = ".".join(parts[:length])
        if is_compiled(modules[ancestor]):
            return ancestor
    while name and not _callable(modules[name]):
        name = name.rpartition(".")[0]
    return name


def _callable(module: nn.Module) -> bool:
    """Whether the module has a forward; ModuleList, ParameterList and their like have none."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def _within(name: str, ancestor: str) -> bool:
    return ancestor == "" or name == ancestor or name.startswith(ancestor + ".")
