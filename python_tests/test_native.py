"""The C++ tests, built by CMake and run by ctest: plain, and under sanitizers."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import pytest
from test_boundary import ROOT, cmake_tests

VARIANTS = {"plain": "", "thread": "thread", "address": "address;undefined"}
TESTS = [Path(source).stem for source in cmake_tests()]
CASES = [
    (variant, test)
    for variant in VARIANTS
    for test in TESTS
    if variant != "thread" or test not in ("test_cuda", "test_emulator")  # fibers are no threads
]
BUILD_SECONDS = 1800
TEST_SECONDS = 660

# Runs something of each runtime: a sanitizer may link and still not start on this kernel.
PROBE = "#include <thread>\nint main() { std::thread([] {}).join(); }\n"


def tool(name: str) -> str:
    """A tool of this environment, else of the machine."""
    here = Path(sysconfig.get_path("scripts")) / name
    return str(here) if here.exists() else shutil.which(name) or name


def run(*command: str, seconds: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=seconds,
        env={**os.environ, "UBSAN_OPTIONS": "print_stacktrace=1"},
    )


@functools.cache
def missing(sanitizers: str) -> str:
    """Why programs cannot be built and run with these sanitizers; empty if they can."""
    flags = [f"-fsanitize={sanitizers.replace(';', ',')}"] if sanitizers else []
    compiler = os.environ.get("CXX", "c++")
    with tempfile.TemporaryDirectory() as folder:
        source, program = Path(folder, "probe.cpp"), Path(folder, "probe")
        source.write_text(PROBE)
        command = [compiler, "-std=c++17", "-pthread", *flags, str(source), "-o", str(program)]
        try:
            for step in (command, [str(program)]):
                result = run(*step, seconds=60)
                if result.returncode:
                    return f"exit code {result.returncode}: {result.stdout.strip()[-200:]}"
        except OSError as error:
            return str(error)
    return ""


@functools.cache
def build(variant: str, target: str = "all") -> Path:
    """Configures and builds a variant, or a target of it, incrementally; returns its folder."""
    folder = ROOT / "build" / f"native-{variant}"
    generator = ["-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"]
    options = [f"-DEDIT_EXT_SANITIZE={VARIANTS[variant]}"]
    jobs = ["--target", target, "--parallel", os.environ.get("MAX_JOBS", "2")]
    for command in (
        [tool("cmake"), "-S", ".", "-B", str(folder), *generator, *options],
        [tool("cmake"), "--build", str(folder), *jobs],
    ):
        result = run(*command, seconds=BUILD_SECONDS)
        assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout[-6000:]}"
    return folder


@pytest.mark.timeout(BUILD_SECONDS + TEST_SECONDS)
@pytest.mark.parametrize(("variant", "test"), CASES)
def test_native(variant: str, test: str) -> None:
    """A C++ test program ends with exit code 0, in each variant that this machine can build."""
    why = missing(VARIANTS[variant])
    if why:
        pytest.skip(f"needs a compiler with -fsanitize={VARIANTS[variant] or 'none'}: {why}")
    command = [tool("ctest"), "--test-dir", str(build(variant)), "--output-on-failure"]
    result = run(*command, "--no-tests=error", "-R", f"^{test}$", seconds=TEST_SECONDS)
    assert result.returncode == 0, result.stdout[-6000:]
