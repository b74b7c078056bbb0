"""The CuPy peer without a GPU: its expressions run on NumPy, and its absence is said."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from edit_ext.bench import kernels, peers_cupy
from edit_ext.bench.__main__ import main as bench_main


class Parameters:
    """A CuPy list of parameters, "float32 x, raw float32 w", and the check of a call against it."""

    def __init__(self, text: str) -> None:
        words = [each.split() for each in text.split(",")]
        self.names = [each[-1] for each in words]
        self.kinds = [each[-2] for each in words]

    def scope(self, values: tuple[Any, ...]) -> dict[str, Any]:
        for kind, value in zip(self.kinds, values, strict=True):
            assert isinstance(value, float) or value.dtype == kind
        return dict(zip(self.names, values, strict=True))


class Elementwise:
    """`cupy.ElementwiseKernel` for operations that are Python too; outputs are given, as ours."""

    def __init__(self, inputs: str, outputs: str, operation: str, name: str) -> None:
        self.inputs, self.outputs = Parameters(inputs), Parameters(outputs)
        self.operation = operation

    def __call__(self, *values: Any) -> None:
        split = len(self.inputs.names)
        scope = self.inputs.scope(values[:split])
        into = self.outputs.scope(values[split:])
        scope["float"] = lambda array: array.astype("float32")
        exec(self.operation, scope)
        for name, array in into.items():
            array[...] = scope[name]


class Reduction:
    """`cupy.ReductionKernel` of one input and a sum."""

    def __init__(
        self, inputs: str, output: str, map_: str, reduce: str, post: str, zero: str, name: str
    ) -> None:
        assert (reduce, zero) == ("a + b", "0")
        self.inputs, self.output, self.map, self.post = Parameters(inputs), output, map_, post

    def __call__(self, value: Any, out: Any) -> None:
        scope = {"a": eval(self.map, self.inputs.scope((value,))).sum()}
        exec(self.post, scope)
        assert out.shape == ()
        out[...] = scope[self.output.split()[-1]]


def numpy_as_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """`import cupy` gets NumPy under CuPy's names; views share torch's memory."""
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    fake = SimpleNamespace(
        ElementwiseKernel=Elementwise,
        ReductionKernel=Reduction,
        from_dlpack=lambda tensor: tensor.numpy(),
        cuda=SimpleNamespace(ExternalStream=lambda pointer: contextlib.nullcontext()),
    )
    monkeypatch.setitem(sys.modules, "cupy", fake)


@pytest.mark.parametrize(
    ("op", "replicas", "dtype"),
    [
        ("sync_rank", 4, "fp32"),
        ("sync_rank", 3, "fp16"),
        ("sync_stacked", 2, "fp32"),
        ("sync_stacked", 5, "fp32"),
    ],
)
def test_expressions_follow_the_reference(
    monkeypatch: pytest.MonkeyPatch, op: str, replicas: int, dtype: str
) -> None:
    """Every kernel's expression, pass after pass, gives what the fp64 reference gives."""
    numpy_as_cupy(monkeypatch)
    rows, _ = kernels.measure(op, 9000, replicas, dtype, ["cupy"], 1, torch.device("cpu"))
    narrow = 4 if dtype == "fp16" else 0
    want = 52 - narrow if op == "sync_rank" else 24 * replicas + 28
    assert [row["bytes"] / row["n"] for row in rows] == [want]


def missing(_: str) -> Any:
    raise ImportError("No module named 'cupy'")


def without_driver(_: str) -> Any:
    def count() -> int:
        raise OSError("no driver")

    return SimpleNamespace(cuda=SimpleNamespace(runtime=SimpleNamespace(getDeviceCount=count)))


@pytest.mark.parametrize(
    ("device", "dtype", "module", "said"),
    [
        ("cpu", "fp32", missing, "it needs --device cuda"),
        ("cuda", "bf16", missing, "its kernels take fp32 and fp16 parameters, not bf16"),
        ("cuda", "fp32", missing, "it cannot be imported (No module named 'cupy'); the extras"),
        ("cuda", "fp32", without_driver, "it finds no GPU (no driver)"),
    ],
)
def test_absence_is_said_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    dtype: str,
    module: Callable[[str], Any],
    said: str,
) -> None:
    """Left out with the reason where nobody asked for it; an error where it was asked by name."""
    monkeypatch.setattr(peers_cupy.importlib, "import_module", module)
    names, sentence = kernels.chosen(None, device, dtype)
    assert names == ["edit_ext", "eager", "foreach", "compile"]
    assert sentence.startswith(f"cupy left out: {said}")
    with pytest.raises(ValueError, match="cupy cannot be timed here"):
        kernels.chosen(["eager", "cupy"], device, dtype)
    assert kernels.chosen(["eager"], device, dtype) == (["eager"], "")


def test_the_command_says_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the CPU the run goes on without it, and asking for it by name exits with 2."""
    monkeypatch.setattr(kernels, "NAMES", ["edit_ext", "cupy"])
    assert bench_main(["kernels", "--n", "300", "--ops", "sync_rank", "--repeats", "1"]) == 0
    assert "cupy left out: it needs --device cuda\n" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        bench_main(["kernels", "--providers", "cupy"])
    assert stop.value.code == 2 and "it needs --device cuda" in capsys.readouterr().err
