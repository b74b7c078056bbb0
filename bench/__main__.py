"""`python -m edit_ext.bench SUBCOMMAND`, the same as `edit-ext bench SUBCOMMAND`."""

from __future__ import annotations

import argparse
import sys

from .kernels import main as kernels

SUBCOMMANDS = {"kernels": kernels}


def main(argv: list[str] | None = None) -> int:
    """Runs one benchmark and returns its exit code; an unknown one exits with 2."""
    arguments = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="edit-ext bench")
    parser.add_argument("benchmark", choices=list(SUBCOMMANDS), help="what to measure")
    name = parser.parse_args(arguments[:1]).benchmark
    return SUBCOMMANDS[name](arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
