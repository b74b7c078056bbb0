"""Which parameters form a layer, who waits for them, and what attach refuses by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import Net, layer_of, make_net, sgd
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import edit_ext
from edit_ext.layer import find_layers


def split(model: nn.Module, **options: Any) -> dict[str, list[str]]:
    """Layer -> names of its parameters."""
    return {unit.name: list(unit.params) for unit in find_layers(model, **options).units}


def waits(model: nn.Module, **options: Any) -> dict[str, list[str]]:
    """Module -> names of the layers that its forward waits for."""
    plan = find_layers(model, **options)
    names = {id(module): name for name, module in model.named_modules()}
    found = {names[id(g.module)]: [plan.units[i].name for i in g.layers] for g in plan.gates}
    return {"": [plan.units[i].name for i in plan.root], **found}


def test_blocks_and_leftovers() -> None:
    """Blocks of the outermost ModuleList are layers; the rest is split by direct child."""
    model = Net()
    layers = split(model)
    assert list(layers) == ["(root)", "stem", *(f"blocks.{i}" for i in range(3)), "spare", "head"]
    assert {n: layer for layer, names in layers.items() for n in names} == {
        name: layer_of(name) for name, _ in model.named_parameters()
    }
    assert waits(model)[""] == ["(root)"]
    assert waits(model)["blocks.1"] == ["blocks.1"]
    assert waits(model)["blocks.1.2"] == ["blocks.1"]
    assert waits(model)["head"] == ["head"]


def test_no_module_list() -> None:
    """Without a ModuleList the direct children are layers."""
    model = nn.Sequential(
        nn.Linear(2, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    )
    assert list(split(model)) == ["0", "2"]


def test_nested_lists_outermost_counts() -> None:
    """ModuleLists inside a block (experts) do not split it; lists in an inner module are found."""
    block = lambda: nn.ModuleDict({"experts": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])})  # noqa: E731
    inner = nn.Module()
    inner.wte, inner.h, inner.ln = nn.Embedding(4, 2), nn.ModuleList([block(), block()]), Norm()
    model = nn.Module()
    model.transformer, model.head = inner, nn.Linear(2, 4)
    assert list(split(model)) == ["transformer", "transformer.h.0", "transformer.h.1", "head"]
    found = waits(model)
    # A container that is never called waits nowhere; what runs inside it does.
    assert "transformer.h.0" not in found
    assert found["transformer.h.0.experts.1"] == ["transformer.h.0"]
    assert found["transformer.wte"] == found["transformer.ln"] == ["transformer"]


class Norm(nn.Module):
    """Its parameter sits in a ParameterList, which has no forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(2))])

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scales[0]


def test_lists_of_lists() -> None:
    """A block that is itself a ModuleList is one layer; its members wait for it."""
    model = nn.Module()
    model.layers = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])])
    assert list(split(model)) == ["layers.0"]
    assert waits(model) == {"": [], "layers.0.0": ["layers.0"], "layers.0.1": ["layers.0"]}


def test_tied_weights() -> None:
    """A tied weight belongs to the first layer; every module that owns it waits for that one."""
    model = make_net()
    model.head.weight = nn.Parameter(torch.zeros(3, 7))
    model.extra = nn.Linear(7, 3)
    model.extra.weight = model.head.weight
    assert split(model)["head"] == ["head.weight", "head.bias"]
    assert split(model)["extra"] == ["extra.bias"]
    assert waits(model)["extra"] == ["head", "extra"]


def test_shared_block() -> None:
    """A block that is listed twice is one layer."""
    block = nn.Linear(2, 2)
    model = nn.Module()
    model.blocks = nn.ModuleList([block, block])
    assert list(split(model)) == ["blocks.0"]


def test_layers_by_name_or_module() -> None:
    """layers= takes names or modules, and may cut finer or coarser than the rule."""
    model = make_net()
    layers = split(model, layers=["blocks", model.head])
    assert list(layers) == ["(root)", "stem", "blocks", "spare", "head"]


@pytest.mark.parametrize(
    ("layers", "kind", "words"),
    [
        (["block"], ValueError, "'block', which the model lacks"),
        (["blocks", "blocks.1"], ValueError, "'blocks' and 'blocks.1', which overlap"),
        (["head", "head"], ValueError, "overlap"),
        ([3], TypeError, "names or modules, not int"),
        ([nn.Linear(1, 1)], ValueError, "Linear that is not inside the model"),
    ],
)
def test_bad_layers(layers: list[Any], kind: type[Exception], words: str) -> None:
    """A wrong entry in layers= is named."""
    with pytest.raises(kind, match=words):
        split(make_net(), layers=layers)


@pytest.mark.parametrize(("layers", "said"), [("12", "the string '12'"), (3, "3")])
def test_layers_is_a_list(layers: Any, said: str) -> None:
    """A string is not read as a list of its characters."""
    with pytest.raises(TypeError) as caught:
        split(make_net(), layers=layers)
    expected = "layers must be a list of module names or modules"
    assert str(caught.value) == f"{expected}, not {said}"


def test_frozen_parameters_are_left_out() -> None:
    """A frozen parameter belongs to no layer; a layer without trainable ones is none."""
    model = make_net()
    model.stem.requires_grad_(False)
    model.head.bias.requires_grad_(False)
    layers = split(model)
    assert "stem" not in layers and layers["head"] == ["head.weight"]
    assert "stem" not in waits(model)


def test_granularity_model() -> None:
    """With granularity "model" only the root waits, for all."""
    plan = find_layers(make_net(), None, "model")
    assert plan.whole is not None and not plan.gates


class Wrapped(Tensor):
    """A tensor subclass, as quantised weights are."""


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(nn.Linear(2, 2))


def in_double() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2)).double()


def parametrized() -> nn.Module:
    return nn.Sequential(weight_norm(nn.Linear(2, 2)))


def wrapped() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].weight = nn.Parameter(torch.zeros(2, 2).as_subclass(Wrapped))
    return model


def expanded() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].weight = nn.Parameter(torch.zeros(2, 1).expand(2, 2))
    return model


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(2))


def one_memory() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight.data = model[0].weight.data
    return model


def frozen() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2)).requires_grad_(False)


def double_buffer() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_buffer("statistic", torch.zeros(2, dtype=torch.float64))
    return model


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (on_meta, ValueError, "'0.weight' is on the meta device"),
        (in_double, TypeError, "'0.weight' is torch.float64"),
        (parametrized, ValueError, "module '0' is parametrized"),
        (wrapped, TypeError, "'0.weight' is a .*Wrapped, a tensor subclass"),
        (expanded, ValueError, "'0.weight' has strides"),
        (lazy, ValueError, "'0.weight' has no shape yet"),
        (one_memory, ValueError, "'0.weight' and '1.weight' are two objects on one memory"),
        (frozen, ValueError, "no trainable parameter"),
        (double_buffer, TypeError, "buffer 'statistic' is torch.float64.*average_buffers=False"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_refused_models(make: Callable[[], nn.Module], kind: type[Exception], words: str) -> None:
    """What the sync cannot handle is refused at attach, by name."""
    model = make()
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(kind, match=words):
        edit_ext.attach(model, optimizer, edit_ext.EDiT())


def test_frozen_parameters_may_be_odd() -> None:
    """A frozen parameter may have any dtype: it is left alone."""
    model = make_net()
    model.stem.double().requires_grad_(False)
    edit_ext.attach(model, sgd(model), edit_ext.EDiT()).detach()


def test_refused_arguments() -> None:
    """Wrong arguments are named: model, optimizer, config, start, group."""
    model = make_net()
    optimizer = sgd(model)
    config = edit_ext.EDiT()
    stranger = torch.optim.SGD([nn.Parameter(torch.zeros(3, 2))], lr=0.1)
    with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, not function"):
        edit_ext.attach(make_net, optimizer, config)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"optimizer must be a torch.optim.Optimizer"):
        edit_ext.attach(model, [3], config)  # type: ignore[list-item]
    for wrong in (None, 3):
        with pytest.raises(TypeError, match=f"optimizer must be a .* or a list, not {wrong}"):
            edit_ext.attach(model, wrong, config)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"optimizer 1 \(SGD\) steps a parameter of shape \(3, 2\)"
    ):
        edit_ext.attach(model, [optimizer, stranger], config)
    with pytest.raises(ValueError, match="empty list"):
        edit_ext.attach(model, [], config)
    with pytest.raises(ValueError, match="listed twice"):
        edit_ext.attach(model, [optimizer, optimizer], config)
    with pytest.raises(TypeError, match=r"must be one of .* \(EDiT, .*\), not dict"):
        edit_ext.attach(model, optimizer, {"sync_every": 3})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="start must be one of 'check', 'broadcast', 'join'"):
        edit_ext.attach(model, optimizer, config, start="copy")


def test_attach_twice() -> None:
    """A second attach to the same parameters is refused until the first is detached."""
    model = make_net()
    sync = edit_ext.attach(model, sgd(model), edit_ext.EDiT())
    with pytest.raises(ValueError, match=r"'scale' is attached already"):
        edit_ext.attach(model, sgd(model), edit_ext.EDiT())
    with pytest.raises(ValueError, match=r"'weight' is attached already"):
        edit_ext.attach(model.head, sgd(model.head), edit_ext.EDiT())
    sync.detach()
    edit_ext.attach(model, sgd(model), edit_ext.EDiT()).detach()


def test_compiled_parts() -> None:
    """Names skip torch.compile's wrapper, and the wrapper itself is what waits, at any depth."""
    model = make_net()
    model.blocks[0] = torch.compile(model.blocks[0], backend="eager")
    model.blocks[1][0] = torch.compile(model.blocks[1][0], backend="eager")
    model.head.compile(backend="eager")
    assert split(model) == split(make_net())
    plan = find_layers(model)
    gates = {id(gate.module): [plan.units[i].name for i in gate.layers] for gate in plan.gates}
    assert gates[id(model.blocks[0])] == ["blocks.0"]
    assert gates[id(model.blocks[1][0])] == gates[id(model.blocks[1][2])] == ["blocks.1"]
    assert gates[id(model.head)] == ["head"]
    assert id(model.blocks[1][0]._orig_mod) not in gates
    whole = torch.compile(make_net(), backend="eager")
    assert split(whole) == split(make_net()) and find_layers(whole).whole is not None
