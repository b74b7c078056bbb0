"""The folder is the permission: who may include whom, which files are built, how long they get."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"

# Folder -> the folders of csrc whose headers it may include, its own among them.
MAY_INCLUDE = {
    "core": {"core"},
    "cpu": {"core", "cpu"},
    "cuda": {"core", "cuda"},
    "comm": {"core", "comm"},
    "torch": {"core", "cpu", "cuda", "comm", "torch"},
    "tests": {"core", "cpu", "cuda", "comm", "tests"},
}
SEES_TORCH = {"torch"}
SEES_CUDA = {"cuda"}
# Compares our declarations with those of NVIDIA; compiled only where that header is at hand.
SEES_NCCL = {"csrc/tests/nccl_layout.cpp"}
SOURCES = ("csrc/*/*.h", "csrc/*/*.cpp", "csrc/*/*.cuh", "csrc/*/*.cu")
TORCH_HEADER = re.compile(r"^(torch|ATen|c10|caffe2|pybind11)/|^Python\.h$")
CUDA_HEADER = re.compile(r"^(cuda|cub|nvtx3|thrust|cooperative_groups)|^nccl")

# Every other implementation is compared with the reference, so it must not lean on one of them.
REFERENCE_MAY_IMPORT = {"__future__", "collections", "dataclasses", "math", "torch", "typing"}

MOST_LINES = 400


def files(*patterns: str) -> list[Path]:
    found = [path for pattern in patterns for path in sorted(ROOT.glob(pattern))]
    return [path for path in found if path.is_file()]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def includes(path: Path) -> list[tuple[str, str]]:
    """(quote or bracket, header) of each #include of a file."""
    return re.findall(r'^\s*#\s*include\s*(["<])([^">]+)[">]', path.read_text(), re.MULTILINE)


def assigned_lists(path: Path) -> dict[str, list[str]]:
    """The top-level `NAME = ["...", ...]` of a Python file."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
            assert isinstance(node.targets[0], ast.Name)
            found[node.targets[0].id] = ast.literal_eval(node.value)
    return found


def setup_sources() -> list[str]:
    lists = assigned_lists(ROOT / "setup.py")
    return [source for key, value in lists.items() if key.endswith("_SOURCES") for source in value]


def cmake_library_sources() -> list[str]:
    text = (ROOT / "CMakeLists.txt").read_text()
    block = re.search(r"add_library\(edit_ext_cpu STATIC\s+([^)]*)\)", text)
    assert block
    return block.group(1).split()


def cmake_tests() -> list[str]:
    text = (ROOT / "CMakeLists.txt").read_text()
    block = re.search(r"foreach\(name IN ITEMS\s+(test_policy[^)]*)\)", text)
    assert block
    alone = re.findall(r"add_executable\((\w+) ", text)
    return [f"csrc/tests/{test}.cpp" for test in [*block.group(1).split(), *alone]]


def cmake_helpers() -> set[str]:
    """Sources of CMake alone that are no test programs: stand-ins, and comparisons of headers."""
    text = (ROOT / "CMakeLists.txt").read_text()
    return set(re.findall(r"add_library\(\S+ (?:MODULE|OBJECT) (csrc/tests/\w+\.cpp)\)", text))


@pytest.mark.parametrize("path", files(*SOURCES), ids=name)
def test_includes(path: Path) -> None:
    """A file includes headers only of folders it may see, and torch only in csrc/torch."""
    folder = path.parent.name
    for quote, header in includes(path):
        if quote == '"':
            target = (path.parent / header).resolve()
            assert target.is_file(), f"{name(path)} includes {header}, which is not there"
            seen = target.relative_to(CSRC).parts[0]
            assert seen in MAY_INCLUDE[folder], f"{name(path)}: {folder} must not see {seen}"
        else:
            allowed = folder in SEES_TORCH or not TORCH_HEADER.match(header)
            assert allowed, f"{name(path)}: only csrc/torch may include <{header}>"
            allowed = folder in SEES_CUDA or name(path) in SEES_NCCL
            allowed = allowed or not CUDA_HEADER.match(header)
            assert allowed, f"{name(path)}: only csrc/cuda may include <{header}>"


def test_kernels_are_called_kernels() -> None:
    """The emulator's test finds kernels by their names; and no launch is written <<<>>>."""
    for path in files("csrc/cuda/*"):
        text = path.read_text()
        names = re.findall(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)", text)
        assert all(each.endswith("_kernel") for each in names), f"{name(path)}: {names}"
        assert len(names) == text.count("__global__") and "<<<" not in text


def test_headers_are_included_once() -> None:
    """Each header starts with a comment of what it holds and has an include guard."""
    for path in files("csrc/*/*.h", "csrc/*/*.cuh"):
        text = path.read_text()
        assert text.startswith("//"), f"{name(path)} does not say what it holds"
        assert "#pragma once" in text, f"{name(path)} has no #pragma once"


def test_setup_and_cmake_name_the_same_sources() -> None:
    """What needs no torch is built by both, from the same list in the same order."""
    without_torch = [
        source for source in setup_sources() if not re.match(r"csrc/(torch|cuda)/", source)
    ]
    assert without_torch == cmake_library_sources()
    emulated = re.search(r"set\(cuda_sources\s+([^)]*)\)", (ROOT / "CMakeLists.txt").read_text())
    assert emulated
    assert emulated.group(1).split() == assigned_lists(ROOT / "setup.py")["CUDA_SOURCES"]


def test_every_source_is_named() -> None:
    """No .cpp lies about unbuilt, and none is named that is not there."""
    named = setup_sources() + cmake_tests()
    assert len(named) == len(set(named))
    assert set(named) | cmake_helpers() == {
        name(path) for path in files("csrc/*/*.cpp", "csrc/*/*.cu")
    }


def test_setup_and_cmake_use_the_same_flags() -> None:
    """Both builds use the same flags, and none that changes how floats are rounded."""
    lists = assigned_lists(ROOT / "setup.py")
    cmake = (ROOT / "CMakeLists.txt").read_text()
    assert "set(CMAKE_CXX_STANDARD 17)" in cmake
    for flag in {*lists["CXX_FLAGS"], *lists["CXX_WARNINGS"]} - {"-g0"}:
        assert re.search(rf"(?<!\S){re.escape(flag)}(?=[\s)])", cmake), f"CMake lacks {flag}"
    for flag in re.findall(r"""(?<=[\s"'])-(?:m|ff)[a-z][\w=-]*""", cmake + repr(lists)):
        assert flag in ("-ffp-contract=off", "-fmad=false"), f"{flag} may change what is computed"
    assert "-fmad=false" in lists["NVCC_FLAGS"]


def test_tree_is_flat() -> None:
    """Folders hold files, not further folders; names are lower case with underscores."""
    for folder in ("csrc/*", "edit_ext", "bench", "examples", "python_tests"):
        for path in ROOT.glob(f"{folder}/*"):
            if path.name.startswith((".", "_")) or path.name == "results":
                continue
            assert path.is_file(), f"{name(path)} is a folder inside a folder"
            assert re.fullmatch(r"[a-z0-9_]+\.[a-z]+", path.name), f"{name(path)}: odd name"


@pytest.mark.parametrize(
    "path",
    files(
        "*.py", "csrc/*/*.*", "edit_ext/*.py*", "bench/*.py", "examples/*.py", "python_tests/*.py"
    ),
    ids=name,
)
def test_no_long_files(path: Path) -> None:
    """No file takes a day to scroll."""
    lines = len(path.read_text().splitlines())
    assert lines <= MOST_LINES, f"{name(path)} has {lines} lines: ask what hides in it"


def test_reference_stands_alone() -> None:
    """reference.py imports torch and the standard library, nothing of the paths it judges."""
    tree = ast.parse((ROOT / "edit_ext/reference.py").read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "reference.py has a relative import"
            imported = [node.module or ""]
        elif isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        else:
            continue
        for module in imported:
            assert module.split(".")[0] in REFERENCE_MAY_IMPORT, f"reference.py imports {module}"
