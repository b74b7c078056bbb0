"""Arrays of other libraries (CuPy, NumPy, JAX, ...) as tensors on the same memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

CUDA = 2  # DLPack's number of that kind of device


def as_tensor(value: Any) -> Any:
    """A tensor on the memory of `value` if it offers DLPack or `__cuda_array_interface__`.

    Lists are taken apart; tensors, numbers and strings come back as they are. Nothing is copied: an
    operator that works in place changes the array. Raises ValueError for an array that is
    read-only, has negative strides, or is on a GPU that torch does not see.
    """
    if isinstance(value, Tensor | str | int | float | None):
        return value
    if isinstance(value, list | tuple):
        return [as_tensor(each) for each in value]
    for name in ("__array_interface__", "__cuda_array_interface__"):
        if hasattr(value, name) and getattr(value, name)["data"][1]:
            raise ValueError("an array is read-only; operators work in place and copy nothing")
    if any(stride < 0 for stride in _strides(value)):  # torch.from_dlpack would end the process
        raise ValueError("an array has negative strides, which tensors cannot have; pass a copy")
    on_gpu = hasattr(value, "__cuda_array_interface__")
    if hasattr(value, "__dlpack_device__"):
        on_gpu = on_gpu or value.__dlpack_device__()[0] == CUDA
    if on_gpu and not torch.cuda.is_available():
        raise ValueError(
            f"an argument is a {type(value).__name__} in the memory of a GPU, and torch "
            f"{torch.__version__} sees no GPU here"
        )
    if hasattr(value, "__dlpack__"):
        return torch.from_dlpack(value)
    return torch.as_tensor(value, device="cuda") if on_gpu else value


def _strides(value: Any) -> tuple[int, ...]:
    for name in ("__array_interface__", "__cuda_array_interface__"):
        if hasattr(value, name):
            return getattr(value, name).get("strides") or ()
    return ()


def taking_arrays(operator: Callable[..., Any]) -> Callable[..., Any]:
    """The operator, with `as_tensor` before each argument."""

    @functools.wraps(operator, assigned=("__doc__",), updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        own = {name: as_tensor(value) for name, value in kwargs.items()}
        return operator(*(as_tensor(value) for value in args), **own)

    return call
