"""The `edit-ext` command: finds the subcommand's module and hands it the rest of the line.

A subcommand's module is imported only when it is called: `edit-ext train` does not load what draws
pictures, and a part that cannot be imported here does not take the others along.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import NamedTuple


class Command(NamedTuple):
    """Where a subcommand lives: `function(arguments) -> exit code` in `module`."""

    help: str
    module: str
    function: str = "main"


COMMANDS: Mapping[str, Command] = {
    "train": Command("train a language model on this machine", "edit_ext.launch", "train"),
    "doctor": Command("what was built, and what works on this machine", "edit_ext.doctor"),
    "bench": Command("measure: kernels", "edit_ext.bench.__main__"),
    "export": Command("the agreed model of a checkpoint as a plain file", "edit_ext.export"),
    "report": Command("draw what runs have recorded", "edit_ext.report"),
    "plan": Command("what each method would cost on a link", "edit_ext.plan"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs `edit-ext ARGV` and returns its exit code; a wrong command line exits with 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["--version"]:
        print(f"edit_ext {version('edit_ext')}")
        return 0
    # Only the first word is read here; `edit-ext train --help` belongs to train.
    command = COMMANDS[_parser().parse_args(arguments[:1]).command]
    try:
        function = getattr(importlib.import_module(command.module), command.function)
        return int(function(arguments[1:]))
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT, what a shell expects


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="edit-ext",
        usage="edit-ext [-h] [--version] COMMAND ...",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="commands:\n"
        + "\n".join(f"  {name:{width}}  {each.help}" for name, each in COMMANDS.items())
        + "\n\n`edit-ext COMMAND --help` says more.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument("command", metavar="COMMAND", choices=list(COMMANDS), help="see below")
    return parser


if __name__ == "__main__":
    sys.exit(main())
