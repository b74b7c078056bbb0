"""What nvcc makes of the kernels: no spills, registers as in a committed table, 16-byte loads.

`python python_tests/test_nvcc.py` writes the table anew.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from test_boundary import ROOT, assigned_lists

TABLE = ROOT / "python_tests" / "nvcc_resources.json"
ARCHITECTURES = ("80", "90", "100")
SETUP = assigned_lists(ROOT / "setup.py")
FLAGS = ["-std=c++17", *SETUP["NVCC_FLAGS"], "-Xcompiler=-Wall,-Wextra,-Werror"]
WIDE = re.compile(r"\bld\.(?:global\.)?(?:nc\.)?v4\.[fbu]32\b")
# Kernels whose arrays are fp32 and aligned promise one access of 16 bytes a thread.
PROMISED = ("pseudo_grad_kernel<float>", "merge_kernel<float>", "outer_step_kernel<float, float>")
PROMISED += ("write_back_kernel<false, float>", "gram_kernel<4>", "stacked_step_kernel")
PROMISED += ("on_chip_kernel<4>",)


def nvcc(*arguments: str) -> str:
    """What nvcc prints; fails the test when it fails."""
    command = ["nvcc", *FLAGS, *arguments]
    done = subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}"
    return done.stdout


def release() -> str:
    if shutil.which("nvcc") is None:
        return ""
    found = re.search(r"release (\d+\.\d+)", subprocess.getoutput("nvcc --version"))
    return found.group(1) if found else ""


def short(symbol: str) -> str:
    """`merge_kernel<bf16>` for a mangled symbol."""
    plain = subprocess.run(["c++filt", symbol], capture_output=True, text=True, timeout=60).stdout
    found = re.search(r"(\w+_kernel)(<[^(]*>)?\(", plain)
    assert found, plain
    template = (found.group(2) or "").replace("edit_ext::", "").replace("(int)", "")
    return found.group(1) + template


@functools.cache
def resources() -> dict[str, dict[str, dict[str, int]]]:
    """Per architecture and kernel: registers, bytes of shared memory, stack and spills."""
    table: dict[str, dict[str, dict[str, int]]] = {f"sm_{a}": {} for a in ARCHITECTURES}
    codes = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in ARCHITECTURES]
    with tempfile.TemporaryDirectory() as folder:
        for source in SETUP["CUDA_SOURCES"]:
            text = nvcc(*codes, "-Xptxas=-v", "-c", source, "-o", str(Path(folder, "out.o")))
            for symbol, arch, body in re.findall(
                r"Compiling entry function '(\w+)' for '(\w+)'(.*?)Used (?=\d+ registers)",
                text + "\n",
                re.DOTALL,
            ):
                used = text[text.index(f"'{symbol}' for '{arch}'") :]
                used = used[: used.index("registers") + 200].split("\n")
                line = next(each for each in used if "registers" in each)
                table[arch][short(symbol)] = {
                    "registers": number(r"Used (\d+) registers", line),
                    "shared": number(r"(\d+) bytes smem", line),
                    "stack": number(r"(\d+) bytes stack frame", body),
                    "spills": number(r"(\d+) bytes spill stores", body)
                    + number(r"(\d+) bytes spill loads", body),
                }
    return {arch: dict(sorted(kernels.items())) for arch, kernels in table.items()}


def number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0


needs_nvcc = pytest.mark.skipif(not release(), reason="needs nvcc, the CUDA compiler")


@needs_nvcc
@pytest.mark.timeout(600)
def test_no_spills() -> None:
    """Every kernel fits into the registers of each architecture."""
    for arch, kernels in resources().items():
        assert len(kernels) >= 20, f"{arch}: {sorted(kernels)}"
        assert not {name for name, used in kernels.items() if used["spills"]}, arch


@needs_nvcc
@pytest.mark.timeout(600)
def test_what_stays_on_chip_leaves_room() -> None:
    """The kernel that takes all of a processor's shared memory has as little besides as it says."""
    source = (ROOT / "csrc" / "cuda" / "on_chip.cu").read_text()
    room = number(r"kStatic = (\d+);", source)
    for arch, kernels in resources().items():
        own = {name: used for name, used in kernels.items() if name.startswith("on_chip_kernel<")}
        assert len(own) == 8, f"{arch}: {sorted(kernels)}"
        assert not {name for name, used in own.items() if used["shared"] > room}, arch
        # 512 threads share the 65536 registers of a processor.
        assert not {name for name, used in own.items() if used["registers"] > 128}, arch


@needs_nvcc
@pytest.mark.timeout(600)
def test_resources_are_those_of_the_table() -> None:
    """Registers, shared memory and stack are what the committed table says for this nvcc."""
    table = json.loads(TABLE.read_text())
    if table["nvcc"] != release():
        pytest.skip(f"the table is of nvcc {table['nvcc']}, here is {release()}")
    assert resources() == table["kernels"], "run python python_tests/test_nvcc.py and look at it"


@needs_nvcc
@pytest.mark.timeout(600)
def test_loads_are_wide(tmp_path: Path) -> None:
    """Kernels on aligned fp32 arrays load 16 bytes at a time."""
    found = {}
    for source in SETUP["CUDA_SOURCES"]:
        ptx = tmp_path / "out.ptx"
        nvcc("-arch=compute_90", "-ptx", source, "-o", str(ptx))
        for symbol, body in re.findall(r"\.entry (\w+)\((.*?)\n\}", ptx.read_text(), re.DOTALL):
            found[short(symbol)] = len(WIDE.findall(body))
    assert all(found[name] > 0 for name in PROMISED), found


if __name__ == "__main__":
    TABLE.write_text(json.dumps({"nvcc": release(), "kernels": resources()}, indent=1) + "\n")
