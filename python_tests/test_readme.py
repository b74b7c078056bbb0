"""The README is true: its commands exist, its examples run, its table is that of the settings.

As a program it writes the table anew: `make readme`.
"""

from __future__ import annotations

import ast
import dataclasses
import itertools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from edit_ext import config, methods, methods_clocks, methods_edit, methods_outer
from edit_ext.bench.__main__ import SUBCOMMANDS as BENCHMARKS
from edit_ext.cli import COMMANDS

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BEGIN, END = "<!-- defaults: begin -->\n", "<!-- defaults: end -->\n"


def field_docs() -> dict[tuple[str, str], str]:
    """The string that stands under each field of a dataclass, by class and field."""
    docs: dict[tuple[str, str], str] = {}
    for module in (config, methods_edit, methods_outer, methods_clocks):
        for cls in ast.parse(Path(module.__file__).read_text()).body:
            for node, after in itertools.pairwise(getattr(cls, "body", [])):
                if isinstance(node, ast.AnnAssign) and isinstance(after, ast.Expr):
                    assert isinstance(cls, ast.ClassDef) and isinstance(node.target, ast.Name)
                    text = " ".join(str(ast.literal_eval(after.value)).split())
                    docs[cls.name, node.target.id] = text
    return docs


def default_of(field: dataclasses.Field[Any]) -> str:
    value = field.default
    if value is dataclasses.MISSING:
        assert field.default_factory is not dataclasses.MISSING
        value = field.default_factory()
    return f"`{value!r}`"


def methods_named(names: list[str]) -> str:
    others = [cls.__name__ for cls in methods.METHODS if cls.__name__ not in names]
    if len(others) < len(names) - 3:
        return f"all but {', '.join(others)}" if others else ""
    return ", ".join(names)


def table_of_defaults() -> str:
    """Markdown: option, default by method, meaning."""
    docs = field_docs()
    rows: dict[str, dict[str, list[str]]] = {}  # option -> default -> methods
    meanings: dict[str, str] = {}
    for cls in methods.METHODS:
        for field in dataclasses.fields(cls):
            rows.setdefault(field.name, {}).setdefault(default_of(field), []).append(cls.__name__)
            home = next(c for c in cls.__mro__ if (c.__name__, field.name) in docs)
            meanings.setdefault(field.name, docs[home.__name__, field.name])
    lines = ["| option | default | meaning |", "| --- | --- | --- |"]
    for name, defaults in rows.items():
        said = [f"{default} {methods_named(names)}".strip() for default, names in defaults.items()]
        meaning = meanings[name].replace("|", r"\|")
        lines.append(f"| `{name}` | {'; '.join(said)} | {meaning} |")
    return "\n".join(lines) + "\n"


def split_at_table() -> tuple[str, str, str]:
    before, rest = README.read_text().split(BEGIN)
    table, after = rest.split(END)
    return before, table, after


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)


def test_table_of_defaults() -> None:
    """The table between the markers is the dataclass; `make readme` writes it."""
    assert split_at_table()[1] == table_of_defaults()


def test_opens_with_the_two_commands() -> None:
    """The first block is `make demo` and `make test`, before the usage example."""
    first = re.search(r"```(\w*)\n(.*?)```", README.read_text(), re.DOTALL)
    assert first
    commands = [line.split("#")[0].strip() for line in first.group(2).splitlines()]
    assert commands == ["make demo", "make test"]


def test_named_commands_and_paths_exist() -> None:
    """Each `make` target, `edit-ext` subcommand, file and folder that the page names is there."""
    text = README.read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    code = " ".join(re.findall(r"`([^`\n]+)`", text) + re.findall(r"```\w*\n(.*?)```", text, re.S))
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in re.findall(r"\bmake ([a-z-]+)", code):
        assert target in targets, f"make {target}"
    for name, sub in re.findall(r"\bedit-ext ([a-z]+)(?: ([a-z]+))?", code):
        assert name in COMMANDS, f"edit-ext {name}"
        assert name != "bench" or sub in BENCHMARKS, f"edit-ext bench {sub}"
    folders = "csrc|edit_ext|bench|examples|python_tests"
    for path in re.findall(rf"(?<![\w/])((?:{folders})/[\w/.]*)", code):
        assert (ROOT / path).exists(), path


def test_usage_example_runs(tmp_path: Path) -> None:
    """The usage example is at most 15 lines and trains two replicas as it stands."""
    example = blocks("python")[0]
    assert len([line for line in example.splitlines() if line.strip()]) <= 15
    script = tmp_path / "example.py"
    script.write_text(example)
    launcher = f"from edit_ext.launch import launch; exit(launch([{sys.executable!r}, "
    launcher += f"{str(script)!r}], 2, 1))"
    result = subprocess.run(
        [sys.executable, "-c", launcher], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert result.returncode == 0, result.stderr
    assert "bytes_sent" in result.stdout


if __name__ == "__main__":
    before, _, after = split_at_table()
    README.write_text(before + BEGIN + table_of_defaults() + END + after)
