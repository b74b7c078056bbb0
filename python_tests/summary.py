"""The closing summary of `make test`: what ran, what was skipped and why.

A test that lacks a tool skips with a reason that starts with "needs"; `--strict 1` makes such a
skip a failure. A run in which no test passed is a failure always.
"""

from __future__ import annotations

import argparse
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict

OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}


def read(path: str) -> tuple[dict[str, Counter[str]], Counter[str]]:
    """Outcomes by test file, and how often each reason for a skip was given."""
    files: dict[str, Counter[str]] = defaultdict(Counter)
    reasons: Counter[str] = Counter()
    for case in ElementTree.parse(path).iter("testcase"):
        outcomes = {OUTCOMES[child.tag] for child in case if child.tag in OUTCOMES}
        outcome = "failed" if "failed" in outcomes else next(iter(outcomes), "passed")
        files[case.get("classname", "?").split(".")[-1]][outcome] += 1
        reasons.update(
            child.get("message") or "expected failure" for child in case if child.tag == "skipped"
        )
    return files, reasons


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("xml", help="what pytest --junitxml has written")
    parser.add_argument("--strict", choices=("0", "1"), default="0")
    args = parser.parse_args()
    files, reasons = read(args.xml)
    total: Counter[str] = sum(files.values(), Counter())

    print("\nclosing summary")
    for name, counts in files.items():
        print(f"  {name:24} " + ", ".join(f"{n} {outcome}" for outcome, n in counts.items()))
    for reason, count in reasons.items():
        print(f"  skipped x{count}: {reason}")
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    lacking = [reason for reason in reasons if reason.startswith("needs")]
    if not total["passed"]:
        print("no test passed: that is a failure")
    elif args.strict == "1" and lacking:
        print("STRICT=1: a part skipped for want of a tool is a failure")
    else:
        return 0
    return 1


if __name__ == "__main__":
    sys.exit(main())
