"""Installing: with and without torch, in each of the ways people install, and what it says.

Field reports 31 (build isolation) and 32 (toolkit).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
import torch

import edit_ext

ROOT = Path(__file__).resolve().parent.parent
SITE = Path(sysconfig.get_path("purelib"))
BUILD_SECONDS = 1500
BACKEND = "from setuptools import build_meta; print(build_meta.get_requires_for_build_wheel())"


def run(
    *command: str | Path, cwd: Path, seconds: float = 60, **env: str
) -> subprocess.CompletedProcess[str]:
    drop = ("PYTHONPATH", "EDIT_EXT_CUDA", "VIRTUAL_ENV")
    kept = {key: value for key, value in os.environ.items() if key not in drop}
    return subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**kept, **env},
        capture_output=True,
        text=True,
        timeout=seconds,
    )


def copy_tree(to: Path) -> Path:
    """The files that a build reads, without what was built before."""
    for name in ("csrc", "edit_ext", "bench", "examples"):
        skip = shutil.ignore_patterns("*.so", "__pycache__", "results")
        shutil.copytree(ROOT / name, to / name, ignore=skip)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to / name)
    return to


def new_venv(folder: Path, *packages: str) -> Path:
    """The Python of a new environment that holds links to some of this one's packages."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    asked = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder)
    site = Path(asked.stdout.strip())
    for package in packages:
        for path in SITE.glob(package):
            if not path.name.startswith(("edit_ext", "__editable__", "_edit")):
                (site / path.name).symlink_to(path)
    ninja = Path(sysconfig.get_path("scripts")) / "ninja"
    if ninja.exists():
        (python.parent / "ninja").symlink_to(ninja)
    return python


@pytest.fixture(scope="module")
def no_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with setuptools alone."""
    packages = ("setuptools*", "_distutils_hack", "distutils-precedence.pth")
    return new_venv(tmp_path_factory.mktemp("no_torch"), *packages)


def one_line(result: subprocess.CompletedProcess[str]) -> str:
    """The only line that a stopped build printed."""
    assert result.returncode != 0
    lines = (result.stdout + result.stderr).splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize("command", [("setup.py", "build_ext"), ("-c", BACKEND)], ids=str)
def test_row_31_without_torch(no_torch: Path, command: tuple[str, str]) -> None:
    """Without torch a build stops with one line that says what to run."""
    line = one_line(run(no_torch, *command, cwd=ROOT))
    assert line.startswith("edit_ext: ") and "`pip install --no-build-isolation .`" in line


def test_row_31_torch_too_old(no_torch: Path, tmp_path: Path) -> None:
    """A torch below the floor is refused by its version, in one line."""
    (tmp_path / "torch.py").write_text('__version__ = "2.9.1"\n')
    line = one_line(run(no_torch, "setup.py", "build_ext", cwd=ROOT, PYTHONPATH=str(tmp_path)))
    assert "torch >= 2.10" in line and "2.9.1" in line


def test_row_31_setuptools_too_old(no_torch: Path, tmp_path: Path) -> None:
    """A setuptools that cannot read pyproject.toml is refused in one line that says what to run."""
    (tmp_path / "setuptools.py").write_text('__version__ = "65.5.0"\n')
    line = one_line(run(no_torch, "setup.py", "build_ext", cwd=ROOT, PYTHONPATH=str(tmp_path)))
    assert "setuptools >= 77" in line and "65.5.0" in line and "pip install" in line


def test_row_32_cuda_switch_is_unclear(no_torch: Path) -> None:
    """A switch that is neither 0 nor 1 stops the build with one line."""
    line = one_line(run(no_torch, "setup.py", "build_ext", cwd=ROOT, EDIT_EXT_CUDA="yes"))
    assert "EDIT_EXT_CUDA" in line and "'yes'" in line


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is a CUDA build")
def test_row_32_cuda_build_without_cuda_torch() -> None:
    """Asking for the CUDA part with a CPU build of torch stops with one line that says so."""
    line = one_line(run(sys.executable, "setup.py", "build_ext", cwd=ROOT, EDIT_EXT_CUDA="1"))
    assert "EDIT_EXT_CUDA=1" in line and "is a CPU build" in line


def test_row_32_says_which_build_it_is() -> None:
    """At run time the extension names its torch, its SIMD path, and why it has CUDA or not."""
    info = edit_ext._C.build_info()
    assert info["torch"] == torch.__version__.split("+")[0]
    assert info["simd"] in info["simd_paths"] and "scalar" in info["simd_paths"]
    reason = str(info["cuda_reason"])
    assert reason.startswith("CUDA " if info["cuda"] else "not built: ")


def test_row_31_isolated_build_finds_torch(tmp_path: Path) -> None:
    """A build from which the environment's packages are hidden, as pip does it, finds its torch."""
    python = new_venv(tmp_path / "env", "[!.]*")
    shown = tmp_path / "shown"
    shown.mkdir()
    for package in [*SITE.glob("setuptools*"), SITE / "_distutils_hack"]:
        (shown / package.name).symlink_to(package)
    (shown / "sitecustomize.py").write_text(
        "import sys\nsys.path[:] = [p for p in sys.path if 'site-packages' not in p]\n"
    )
    assert run(python, "-c", "import torch", cwd=tmp_path, PYTHONPATH=str(shown)).returncode
    tree = copy_tree(tmp_path / "tree")
    result = run(python, "-c", BACKEND, cwd=tree, PYTHONPATH=str(shown))
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@pytest.mark.timeout(BUILD_SECONDS + 300)
def test_row_31_each_way_to_install(tmp_path: Path) -> None:
    """pip install, a wheel and an editable install each bring the compiled part and the command."""
    tree = copy_tree(tmp_path / "tree")
    python = new_venv(tmp_path / "env", "[!.]*")
    pip = (python, "-m", "pip", "install", "--no-deps", "--no-build-isolation")
    ask = "import torch, edit_ext._C as c, edit_ext.bench, edit_ext.examples; print(c.__file__)"

    def installed() -> Path:
        assert run(python.parent / "edit-ext", "--version", cwd=tmp_path).returncode == 0
        return Path(run(python, "-c", ask, cwd=tmp_path).stdout.strip())

    result = run(*pip, "-v", ".", cwd=tree, seconds=BUILD_SECONDS)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert "edit_ext: build summary" in result.stdout + result.stderr
    assert installed().is_relative_to(tmp_path / "env")

    wheel = (python, "-m", "build", "--wheel", "--no-isolation")
    result = run(*wheel, cwd=tree, seconds=BUILD_SECONDS)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    (built,) = (tree / "dist").glob("*.whl")
    names = zipfile.ZipFile(built).namelist()
    for wanted in (r"edit_ext/_C\..*\.so", "edit_ext/_C.pyi", "edit_ext/py.typed", ".*/LICENSE"):
        assert any(re.fullmatch(wanted, name) for name in names), wanted
    assert not [name for name in names if "test" in name]

    result = run(*pip, "-v", "--editable", ".", cwd=tree, seconds=BUILD_SECONDS)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    assert installed().is_relative_to(tree)

    # One touched source, one compilation; the objects outlive pip's temporary folders.
    os.utime(tree / "csrc/cpu/worker.cpp")
    result = run(python, "setup.py", "build_ext", "--inplace", cwd=tree, seconds=BUILD_SECONDS)
    assert result.returncode == 0, result.stderr[-4000:]
    assert re.findall(r"^\[\d+/(\d+)\]", result.stdout, re.MULTILINE) == ["1"]
