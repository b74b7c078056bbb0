"""The hooks on modules and optimizers: they tell the engine what the loop is about to do."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from .engine import Engine


def register(engine: Engine, optimizers: list[torch.optim.Optimizer]) -> list[Any]:
    """All hooks, ours before those of anybody else; what removes them."""
    _hide_from_dynamo()
    root = engine.model
    removers: list[Any] = []
    if getattr(root, "_compiled_call_impl", None) is not None:
        removers.append(_CompiledCall(root, engine))
    else:
        before, after = _EnterRoot(engine, root), _LeaveRoot(engine, root)
        removers.append(root.register_forward_pre_hook(before, prepend=True))
        removers.append(root.register_forward_hook(after, always_call=True))
    for gate in engine.plan.gates:
        hook = _Visit(engine, gate.module, gate.layers)
        if getattr(gate.module, "_compiled_call_impl", None) is not None:
            removers.append(_CompiledCall(gate.module, engine, hook))
        else:
            removers.append(gate.module.register_forward_pre_hook(hook, prepend=True))
    for optimizer in optimizers:
        step = _StepHooks(engine)
        removers.append(optimizer.register_step_pre_hook(step.before))
        removers.append(optimizer.register_step_post_hook(step.after))
    return removers


class _ModuleHook:
    """A hook that does nothing in copies of its module and keeps nothing alive.

    A deep copy or a pickle of the module holds an inert one.
    """

    def __init__(self, engine: Engine | None = None, module: nn.Module | None = None) -> None:
        self._engine = weakref.ref(engine) if engine is not None else None
        self._module = weakref.ref(module) if module is not None else None

    def engine(self, module: nn.Module) -> Engine | None:
        """The engine, if it lives and `module` is the one that was attached."""
        if self._engine is None or self._module is None or self._module() is not module:
            return None
        return self._engine()

    def __deepcopy__(self, memo: dict[int, Any]) -> _ModuleHook:
        return type(self)()

    def __reduce__(self) -> tuple[type[_ModuleHook], tuple[()]]:
        return type(self), ()


class _EnterRoot(_ModuleHook):
    def __call__(self, module: nn.Module, args: Any) -> None:
        engine = self.engine(module)
        if engine is not None:
            engine.enter_root(module)


class _LeaveRoot(_ModuleHook):
    def __call__(self, module: nn.Module, args: Any, result: Any) -> None:
        engine = self.engine(module)
        if engine is not None:
            engine.leave_root()


class _Visit(_ModuleHook):
    def __init__(
        self,
        engine: Engine | None = None,
        module: nn.Module | None = None,
        layers: Sequence[int] = (),
    ) -> None:
        super().__init__(engine, module)
        self._layers = list(layers)

    def __call__(self, module: nn.Module, args: Any = None) -> None:
        engine = self.engine(module)
        if engine is not None and engine.forward_thread is not None:
            engine.visit(module, self._layers)


class _CompiledCall:
    """Stands before a module compiled in place, whose hooks torch.compile would trace or skip."""

    def __init__(self, module: nn.Module, engine: Engine, visit: _Visit | None = None) -> None:
        self._module, self._engine = weakref.ref(module), weakref.ref(engine)
        self._visit = visit
        self._compiled: Any = module._compiled_call_impl
        module._compiled_call_impl = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        engine, module = self._engine(), self._module()
        if engine is None or module is None:
            return self._compiled(*args, **kwargs)
        if self._visit is not None:
            self._visit(module)
            return self._compiled(*args, **kwargs)
        engine.enter_root(module)
        try:
            return self._compiled(*args, **kwargs)
        finally:
            engine.leave_root()

    def remove(self) -> None:
        """Put the compiled call back."""
        module = self._module()
        if module is not None and module._compiled_call_impl is self:
            module._compiled_call_impl = self._compiled


class _StepHooks:
    """An optimizer's hooks. They keep the engine alive, so that attach() needs no variable."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        self._engine.before_step(optimizer, closure)

    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._engine.after_step(optimizer)


@functools.cache
def _hide_from_dynamo() -> None:
    """torch.compile of a model that is attached already must call hooks, not trace them.

    Not at import, because it loads torch._dynamo; making an optimizer has loaded that anyway.
    """
    for hook in (_EnterRoot, _LeaveRoot, _Visit):
        setattr(hook, "__call__", torch.compiler.disable(hook.__call__))  # noqa: B010
