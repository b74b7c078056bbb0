"""What `edit-ext bench kernels` can be asked, and the words that benchmarks share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence


def positive(text: str) -> int:
    """A whole number of at least 1; for `add_argument(type=...)`."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def counts(text: str) -> list[int]:
    """`positive` numbers with commas between."""
    return [positive(part) for part in text.split(",")]


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """A parser of some of the `known` names, with commas between."""

    def parse(text: str) -> list[str]:
        found = text.split(",")
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(
                    f"{name!r} is unknown; expected some of {', '.join(known)}"
                )
        return found

    return parse


def kernels_parser(
    description: str, ops: Sequence[str], providers: Sequence[str], dtypes: Sequence[str]
) -> argparse.ArgumentParser:
    """Arguments of `edit-ext bench kernels`; the names are those that may be asked for."""
    p = argparse.ArgumentParser(
        prog="edit-ext bench kernels",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--n", type=positive, default=2**25, help="parameters (default: %(default)s)")
    p.add_argument(
        "--dtype",
        choices=list(dtypes),
        default="fp32",
        help="of the parameters (default: %(default)s)",
    )
    p.add_argument(
        "--replicas",
        type=counts,
        metavar="R,...",
        help="replicas (default: 4 for sync_rank; 2,4,8 for sync_stacked)",
    )
    p.add_argument("--ops", type=names(ops), default=list(ops), metavar="OP,...")
    p.add_argument(
        "--providers",
        type=names(providers),
        metavar="PROVIDER,...",
        help="default: all that can be timed here",
    )
    p.add_argument(
        "--repeats", type=positive, default=15, help="timed rounds (default: %(default)s)"
    )
    p.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    p.add_argument("--threads", type=positive, help="CPU threads (default: what torch uses)")
    p.add_argument(
        "--json",
        metavar="FILE",
        help="also write rows, yardsticks and machine here (-: standard output)",
    )
    return p
